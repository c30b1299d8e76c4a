# SPDX-License-Identifier: Apache-2.0
"""Detection of the engines in this Python environment and of the form in which each would use Switchyard. Reads metadata of
distributions and environment variables; imports no engine.
"""
from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, distribution
from typing import List, NamedTuple, Optional, Tuple

from .._abi import names as _names
from .._internal import owners as _owners
from ..errors import InvalidArgument
from ._patches import installed, requested, require_version

#: The distribution that registers the entry points.
_OURS = "switchyard-ep"
_DROP_IN = ("SWITCHYARD_DEEP_EP", ("1", "replace"), "switchyard_deep_ep")


class Engine(NamedTuple):
    """An engine and the forms in which it can use Switchyard."""

    name: str  #: of the distribution
    tested: Tuple[str, ...]  #: version prefixes, such as "0.33" or "0.5.23"
    refuses: bool  #: True: other versions are refused; False: they are only untested
    forms: Tuple[Tuple[str, str], ...]  #: of each form, the setting that enables it, and its effect
    group: str = ""  #: group of entry points that the engine loads
    variable: str = ""  #: environment variable of the plug-in
    allowed: str = ""  #: environment variable with the names of the plug-ins that the engine loads


_IMPORTS_OURS = "import deep_ep finds Switchyard's drop-in for DeepEP V1"
_OF_DROP_IN = (("distribution switchyard-deep-ep", _IMPORTS_OURS),
               ("switchyard.deep_ep.install()", f"{_IMPORTS_OURS}, in this process"))

ENGINES = (
    Engine("vllm", ("0.33",), True, (("SWITCHYARD_VLLM=all2all", "Switchyard replaces the all-to-all backend"),
                                     ("SWITCHYARD_VLLM=layer", "Switchyard replaces the whole MoE layer"),
                                     ("SWITCHYARD_VLLM_EPLB=switchyard", "with either, Switchyard's planner is the policy of EPLB"),
                                     ("SWITCHYARD_DEEP_EP=1", f"{_IMPORTS_OURS}, any version")),
           "vllm.general_plugins", "SWITCHYARD_VLLM", "VLLM_PLUGINS"),
    Engine("sglang", ("0.5.23",), True, (("SWITCHYARD_SGLANG=all2all", "Switchyard replaces the token dispatcher"),
                                         ("SWITCHYARD_SGLANG=layer", "Switchyard replaces the whole MoE layer"),
                                         ("SWITCHYARD_DEEP_EP=1", f"{_IMPORTS_OURS}, any version")),
           "sglang.srt.plugins", "SWITCHYARD_SGLANG", "SGLANG_PLUGINS"),
    Engine("torchtitan", ("0.3",), True, (("--override.imports switchyard.engines.torchtitan.token_dispatcher",
                                           "Switchyard replaces the token dispatcher"),)),
    Engine("megatron-core", ("0.19",), False, _OF_DROP_IN),
    Engine("nemo-automodel", ("0.7",), False, _OF_DROP_IN),
    Engine("transformers", ("5.24",), False, (("switchyard.parallelize_moe(model, group, ...)",
                                               "divides the experts of a model among ranks"),)),
)


class Found(NamedTuple):
    """State of an engine in this environment."""

    engine: Engine
    version: Optional[str]
    support: str  #: "supported", or the reason against it
    now: Tuple[str, ...]  #: active forms, and reasons why others are not active
    refused: bool  #: True: the value of an environment variable is refused


def _matches(version: str, tested: Tuple[str, ...]) -> bool:
    parts = version.split("+")[0].split(".")
    return any(parts[:len(each)] == each for each in (one.split(".") for one in tested))


def _support(engine: Engine, version: Optional[str]) -> str:
    if version is None:
        return "not installed"
    if _matches(version, engine.tested):
        return "supported"
    return f"{'refused' if engine.refuses else 'not tested'}: {_names.listed(engine.tested)} was tested"


def _unreachable(engine: Engine, entry: str) -> Optional[str]:
    """Returns why the engine does not load the entry point `entry`, or None if it does."""
    try:
        entries = {(each.group, each.name) for each in distribution(_OURS).entry_points}
    except PackageNotFoundError:
        return f"the distribution {_OURS} is not installed, so {engine.name} finds no plug-in"
    if (engine.group, entry) not in entries:
        return f"{_OURS} {installed(_OURS)} has no entry point {entry} in {engine.group}: install a newer version"
    names = os.environ.get(engine.allowed)
    if names is None or (not names and engine.name == "sglang"):  # SGLang ignores an empty list
        return None
    if entry in ([each.strip() for each in names.split(",")] if engine.name == "sglang" else names.split(",")):  # vLLM compares exactly
        return None
    return f"{engine.allowed} = {names!r} excludes it: add {entry}"


def _plug_in(engine: Engine, variable: str, choices: Tuple[str, ...], entry: str, any_version: bool) -> Optional[str]:
    """Returns the state of the plug-in that `variable` enables, or None if it enables none.

    Raises:
        InvalidArgument: the value or the version of the engine is refused.
    """
    choice = requested(variable, choices)
    if choice is None or installed(engine.name) is None:
        return None
    reason = _unreachable(engine, entry)
    others = [each for each in _owners.owners() if each != _owners.OURS] if any_version and choice == "1" else []
    if reason is None and others:
        reason = f"the deep_ep of {_names.listed(others)} is installed; use {variable}=replace"
    if reason is None and not any_version:
        require_version(engine.name, engine.tested, "SWITCHYARD_DEEP_EP=1 supports other versions")
    return f"{variable}={choice} is active" if reason is None else f"{variable}={choice} is not active: {reason}"


def _of_plug_ins(engine: Engine) -> Tuple[List[str], bool]:
    lines, refused = [], False
    for variable, choices, entry, any_version in ((engine.variable, ("all2all", "layer"), "switchyard", False), (*_DROP_IN, True)):
        try:
            line = _plug_in(engine, variable, choices, entry, any_version)
        except InvalidArgument as error:
            line, refused = f"refused: {error}", True
        lines += [] if line is None else [line]
    return lines or [f"nothing: neither {engine.variable} nor {_DROP_IN[0]} is set"], refused


def _of_deep_ep() -> str:
    owners = _owners.owners()
    if owners == [_owners.OURS]:
        return "the drop-in is active"
    if owners:
        return f"nothing: the deep_ep of {_names.listed(owners)} is installed; switchyard.deep_ep.install(replace=True) replaces it"
    ignored = f"; {_DROP_IN[0]} has no effect, because this engine loads no plug-ins" if os.environ.get(_DROP_IN[0]) else ""
    return f"nothing, unless the program calls switchyard.deep_ep.install(){ignored}"


def find(engine: Engine) -> Found:
    """Returns the state of one engine."""
    version = installed(engine.name)
    now: List[str] = []
    refused = False
    if engine.variable:
        now, refused = _of_plug_ins(engine)
        now = now if version or refused else []  # a refused value affects every process that loads plug-ins
    elif version and engine.forms is _OF_DROP_IN:
        now = [_of_deep_ep()]
    elif version and _support(engine, version).startswith("refused"):
        now = ["nothing: this version is refused"]
    elif version:
        now = [f"only in programs that use {engine.forms[0][0]}"]
    return Found(engine, version, _support(engine, version), tuple(now), refused)


def lines_of(found: Found) -> List[str]:
    """Returns the text about one engine."""
    engine = found.engine
    lines = [f"{engine.name} {found.version}, {found.support}" if found.version else f"{engine.name}: not installed"]
    lines += [f"  {how}: {effect}" for how, effect in engine.forms]
    return lines + [f"  now: {each}" for each in found.now]
