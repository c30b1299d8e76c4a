# SPDX-License-Identifier: Apache-2.0
"""Measured tuning values, which groups read when they are formed (docs/tuning.md)."""
from __future__ import annotations

import os
from typing import NamedTuple, Optional, Union

from ._abi.arguments import checked
from ._abi.ffi import byref, check, library, structs
from ._abi.names import TUNING_MODES, value_of

__all__ = ["TuningValues", "tuned_values"]


class TuningValues(NamedTuple):
    """Tuning values; 0 means unset, so the library chooses."""

    dispatch_sms: int
    combine_sms: int
    sms: int
    dispatch_warps: int
    dispatch_stages: int
    combine_warps: int
    pieces: int
    warps: int
    chunk_kib: int
    quantized_dispatch_sms: int


@checked("tuned_values")
def tuned_values(device: str, mode: str, *, ranks: int, hidden: int, max_tokens: int,
                 path: Union[str, "os.PathLike[str]", None] = None) -> TuningValues:
    """Returns the values of the nearest entry in a tuning file. Without `path`, searches the file named by SWITCHYARD_TUNING
    and then the built-in values. device: "cpu", or a GPU's name. mode: "normal" (rank-major), "normal_expert_major",
    "low_latency", "flat" or "ledger". InvalidArgument contains the file and line of an error."""
    v = structs.TuningValues()
    encoded = device.encode()
    key = structs.TuningKey(device=encoded, hidden=hidden, max_tokens=max_tokens, ranks=ranks, mode=value_of(TUNING_MODES, "mode", mode))
    where: Optional[bytes] = None if path is None else os.fspath(path).encode()
    check(library().functions.sy_tuning_find(where, byref(key), byref(v)))
    return TuningValues(*(getattr(v, name) for name in TuningValues._fields))
