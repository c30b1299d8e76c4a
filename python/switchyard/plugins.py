# SPDX-License-Identifier: Apache-2.0
"""Entry points of the plug-ins that vLLM (entry point group ``vllm.general_plugins``) and SGLang (``sglang.srt.plugins``) load in
each of their processes. An installed package has no effect until an environment variable enables a plug-in.

``SWITCHYARD_DEEP_EP``
    ``1``: ``import deep_ep`` finds :mod:`switchyard.deep_ep`; ``replace``: even if another deep_ep is installed.
``SWITCHYARD_VLLM``
    ``all2all``: Switchyard replaces the all-to-all backend of vLLM; ``layer``: its whole MoE layer. With either,
    ``SWITCHYARD_VLLM_EPLB=switchyard`` also replaces the policy of vLLM's EPLB.
``SWITCHYARD_SGLANG``
    ``all2all``: Switchyard replaces the token dispatcher of SGLang; ``layer``: its whole MoE layer.

A variable that is unset, empty or ``0`` has no effect; any other value raises InvalidArgument.
"""
from __future__ import annotations

from contextlib import suppress as _suppress

from ._internal import owners as _owners
from .engines._patches import requested as _requested
from .errors import InvalidArgument as _InvalidArgument

__all__ = ["deep_ep", "sglang", "vllm"]

VARIABLE = "SWITCHYARD_DEEP_EP"
_CHOICES = ("all2all", "layer")


def deep_ep() -> None:
    """Calls ``switchyard.deep_ep.install()`` if :data:`VARIABLE` requests it. May be called repeatedly, in every process."""
    choice = _requested(VARIABLE, ("1", "replace"))
    if not choice:
        return
    from . import deep_ep as drop_in  # not earlier, because it imports torch

    drop_in.install(replace=choice == "replace" or _owners.owners() == [_owners.OURS])


def vllm() -> None:
    """Installs the plug-in for vLLM that ``SWITCHYARD_VLLM`` requests. May be called repeatedly, in every process."""
    choice = _requested("SWITCHYARD_VLLM", _CHOICES)
    if choice:
        from .engines import vllm as engine

        engine.install(choice)


def sglang() -> None:
    """Installs the plug-in for SGLang that ``SWITCHYARD_SGLANG`` requests. May be called repeatedly, in every process. SGLang logs
    exceptions of plug-ins and continues, so an invalid value also makes the construction of every MoE layer fail."""
    from .engines import sglang as engine

    try:
        choice = _requested("SWITCHYARD_SGLANG", _CHOICES)
    except _InvalidArgument as error:
        with _suppress(ImportError):  # without SGLang
            engine.refuse(error)
        raise
    if choice:
        engine.install(choice)
