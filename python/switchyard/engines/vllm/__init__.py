# SPDX-License-Identifier: Apache-2.0
"""Plug-in for vLLM 0.33.

``all2all``
    Switchyard replaces both DeepEP V1 backends: ``--all2all-backend deepep_high_throughput`` uses :class:`switchyard.Exchange`
    (activation format Standard), ``deepep_low_latency`` uses :class:`switchyard.LowLatency` (BatchedExperts). Requires no deep_ep.
``layer``
    Layers with expert parallelism use the all-to-all backend ``passthrough``, with :class:`switchyard.MoeLayer` as experts.

With ``SWITCHYARD_VLLM_EPLB=switchyard``, Switchyard's planner also places experts for ``--enable-eplb``.

Importing this package imports neither torch nor vLLM.
"""
from __future__ import annotations

from typing import Any, Optional

from ..._abi import names as _names
from .._patches import Patches, requested, require_version

__all__ = ["install", "uninstall"]

#: Versions whose extension points were tested.
SUPPORTED = ("0.33",)
#: Environment variable that selects the planner of vLLM's EPLB.
EPLB = "SWITCHYARD_VLLM_EPLB"
_INSTEAD = "SWITCHYARD_DEEP_EP=1 supports every version that calls DeepEP V1"

_patches = Patches("vllm")
_installed: Optional[str] = None


def install(choice: str) -> None:
    """Local. Installs the plug-in in this process. Repeated calls with the same choice have no effect.

    Args:
        choice: "all2all" or "layer".

    Raises:
        InvalidArgument: an unsupported version of vLLM, a choice other than the installed one, an unsupported value of EPLB, or
            an attribute that another plug-in has replaced; vLLM is then unchanged.
    """
    global _installed
    if choice not in ("all2all", "layer"):
        _names.invalid(f"choice = {choice!r}: must be 'all2all' or 'layer'")
    if _installed == choice:
        return
    if _installed is not None:
        _names.invalid(f"the vLLM plug-in is installed with {_installed!r}: call uninstall() before install({choice!r})")
    found = require_version("vllm", SUPPORTED, _INSTEAD)
    policy = requested(EPLB, ("switchyard",))
    from . import _ranks  # not earlier, because it imports torch and vLLM

    form: Any
    if choice == "all2all":
        from . import _all2all as form
    else:
        from . import _layer as form
    try:
        _ranks.watch_workers(_patches)
        form.install(_patches)
        if policy:
            from . import _policy

            _policy.install(_patches)
    except BaseException:
        _patches.undo()
        raise
    _installed = choice
    _ranks.logger.info("Switchyard %s plugs into vLLM %s (SWITCHYARD_VLLM=%s)", _ranks.version(), found, choice)
    if policy:
        _ranks.logger.info("Switchyard's planner places the experts of vLLM's EPLB (%s=%s)", EPLB, policy)


def uninstall() -> None:
    """Local. Restores vLLM's attributes. Existing layers remain usable. Repeated calls have no effect.

    Raises:
        InvalidArgument: another plug-in has since replaced one of the attributes; no attribute is then restored.
    """
    global _installed
    _patches.undo()
    _installed = None
