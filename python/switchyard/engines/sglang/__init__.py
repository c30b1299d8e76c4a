# SPDX-License-Identifier: Apache-2.0
"""Plug-in for SGLang 0.5.23, enabled by the environment variable ``SWITCHYARD_SGLANG`` (:mod:`switchyard.plugins`).

``all2all`` replaces the token dispatcher of ``--moe-a2a-backend deepep`` through SGLang's hook registry; ``layer`` replaces the
whole MoE layer, also through its registry of runner cores. With either, each step of a model runner raises pending errors.
Importing this package imports no part of SGLang.
"""
from __future__ import annotations

from typing import Any, List, Optional

from ..._abi import names as _names
from .._patches import require_version

__all__ = ["install", "refuse", "uninstall"]

_CHOICES = ("all2all", "layer")
_VERSION = "0.5.23"

#: The installed form, and the changes of SGLang in order of installation; uninstall() reverts them in reverse order.
_choice: Optional[str] = None
_changes: List[Any] = []


def install(choice: str) -> None:
    """Installs the plug-in in this process. Repeated calls with the same choice have no effect.

    SGLang's plug-in loader logs exceptions and continues. If the loader is the caller, a failed installation therefore also makes
    the construction of every MoE layer fail with the same error.


    Args:
        choice: "all2all" or "layer".

    Raises:
        InvalidArgument: another choice, another version of SGLang, or an extension point that another plug-in has replaced.
    """
    global _choice
    if choice not in _CHOICES:
        _names.invalid(f"choice = {choice!r}: must be {_names.listed(map(repr, _CHOICES))}")
    if _choice == choice:
        return
    if _choice is not None:
        _names.invalid(f"choice = {choice!r}: {_choice!r} is installed; call uninstall() before")
    try:
        require_version("sglang", [_VERSION], "SWITCHYARD_DEEP_EP=1 enables the drop-in for DeepEP, which supports other versions")
        _install(choice)
    except Exception as error:
        refuse(error)
        raise
    _choice = choice


def refuse(error: Exception) -> None:
    """Makes the construction of every MoE layer raise `error` until :func:`uninstall`, if SGLang's plug-in loader is the caller."""
    from . import _hooks

    _changes.extend(_hooks.refuse(error))


def _install(choice: str) -> None:
    """Checks all extension points before it changes the first."""
    from . import _dispatcher, _hooks, _layer, _shared

    hook = _hooks.Hook(_hooks.FACTORY, _dispatcher.around_factory if choice == "all2all" else _layer.around_factory)
    changes: List[Any] = [hook, _shared.STEPS]
    if choice == "layer":
        changes.append(_hooks.Core(_layer.RUNNER, _layer.Core))
    for each in changes:
        each.check()
    for each in changes:
        each.install()
        _changes.append(each)


def uninstall() -> None:
    """Restores SGLang, and leaves the groups of all dispatchers and layers, which cannot be used afterwards. Repeated calls have
    no effect.

    Raises:
        InvalidArgument: another plug-in has since replaced an extension point; nothing is then restored.
    """
    global _choice
    for each in _changes:
        each.check_undo()
    while _changes:
        _changes.pop().undo()
    if _choice is not None:
        from . import _shared

        _shared.close()
    _choice = None
