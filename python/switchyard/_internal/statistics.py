# SPDX-License-Identifier: Apache-2.0
"""Call statistics and memory requirements of objects."""
from __future__ import annotations

from typing import NamedTuple

from .._abi import structs

__all__ = ["CallStatistics", "MemoryRequirement", "statistics_of"]


class CallStatistics(NamedTuple):
    """Traffic and time of this rank's last call. Payload bytes include rows and scales but not metadata."""

    remote_bytes: int  #: payload sent to (dispatch) or received from (combine) other ranks
    local_bytes: int  #: payload sent to or received from this rank itself
    copied_bytes: int  #: local copies: repeated routes, staging of ordinary memory
    payload_rows: int  #: rows sent (dispatch) or read (combine), own rank included
    metadata_bytes: int  #: counts, placements, records, flags
    plan_us: float  #: counting, exchange of counts, addresses
    total_us: float  #: entry to exit
    network_bytes: int  #: rows sent to (dispatch) or received from (combine) other hosts


class MemoryRequirement(NamedTuple):
    """Symmetric memory of one object, in bytes per rank."""

    control_bytes: int
    pool_bytes: int
    ring_bytes: int
    total_bytes: int
    private_bytes: int  #: CUDA, ring staging: outside the heap, not part of total_bytes


def statistics_of(struct: structs.CallStatistics) -> CallStatistics:
    return CallStatistics(*(getattr(struct, name) for name in CallStatistics._fields))
