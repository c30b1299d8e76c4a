# SPDX-License-Identifier: Apache-2.0
"""Entry points for programs that load plug-ins in every process that they start: vLLM through the entry point group
``vllm.general_plugins`` and SGLang through ``sglang.srt.plugins``. Installing the package has no effect until environment
variables enable the plug-ins.
"""
from __future__ import annotations

import os

from ._internal import owners as _owners
from ._abi import names as _names

__all__ = ["deep_ep"]

#: ``1``: ``import deep_ep`` finds :mod:`switchyard.deep_ep`; ``replace``: even if another deep_ep is installed; unset, empty or
#: ``0``: no effect.
VARIABLE = "SWITCHYARD_DEEP_EP"


def deep_ep() -> None:
    """Calls ``switchyard.deep_ep.install()`` if :data:`VARIABLE` requests it. May be called repeatedly, in every process."""
    choice = os.environ.get(VARIABLE, "")
    if choice in ("", "0"):
        return
    if choice not in ("1", "replace"):
        _names.invalid(f"{VARIABLE} = {choice!r}: must be '1', 'replace' (in the place of a deep_ep that is installed) or '0'")
    from . import deep_ep as drop_in  # not earlier, because it imports torch

    drop_in.install(replace=choice == "replace" or _owners.owners() == [_owners.OURS])
