# SPDX-License-Identifier: Apache-2.0
"""A timeline of all workers, for Perfetto (docs/concepts/trace.md)."""
from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from types import TracebackType
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple, Type, Union

from ._abi import structs as _structs
from ._abi.arguments import checked
from ._abi.ffi import Owned, alive, byref, check, library, structs
from ._abi.names import CUDA
from .group import Group

__all__ = ["Trace", "TracePhase"]


class TracePhase(NamedTuple):
    """The time that a rank spent in a phase."""

    name: str
    category: str  #: "call", "plan", "move", "wait", "compute" or "user"
    unit: str  #: unit of `arg_sum`
    rank: int
    spans: int
    total_ms: float  #: sum over all workers
    max_ms: float  #: the longest span
    slowest_ms: float  #: the largest sum of one worker
    arg_sum: int
    bytes: int  #: of rows received from or sent to other ranks


class Trace:
    """Records this rank's calls in `group` between :meth:`start` and :meth:`stop` or inside ``with trace:``.

    events_per_track: maximum number of records per worker; the newest are kept. num_blocks, num_warps: CUDA, number of blocks
    and warps per block that are recorded.

        trace = sy.Trace(group)
        with trace:
            rows, handle = exchange.dispatch(x, ids)
            with trace.span("experts"):
                y = my_experts(rows, handle.offsets)
            exchange.combine(y, handle)
        trace.gather()                     # collective: the records of all ranks
        trace.write_json("trace.json")     # for ui.perfetto.dev
    """

    @checked("Trace.__init__")
    def __init__(self, group: Group, *, events_per_track: int = 1 << 14, num_blocks: int = 132, num_warps: int = 20) -> None:
        _ = group.pointer  # raises if the group is closed
        self.group = group
        self._functions = library().functions
        cuda = group._backend == CUDA
        options = structs.TraceOptions(num_blocks=num_blocks if cuda else 1, num_warps=num_warps if cuda else group._workers,
                                       events_per_track=events_per_track)
        made = ctypes.c_void_p()
        check(self._functions.sy_trace_create(group.size, byref(options), byref(made)))
        self._owned = Owned(made.value, self._functions.sy_trace_destroy)
        self._events: Dict[Tuple[str, str], int] = {}

    @property
    def pointer(self) -> int:
        """The underlying ``sy_trace*``, for code that calls the C interface."""
        return alive(self._owned, "the trace")

    def start(self) -> None:
        """Local. Starts recording this rank's calls, replacing any previous recorder."""
        with self.group._lock:
            check(self._functions.sy_group_set_trace(self.group.pointer, self.pointer))

    def stop(self) -> None:
        """Local. Stops recording. CUDA: waits for the GPU; all ranks must have enqueued the same calls."""
        with self.group._lock:
            check(self._functions.sy_group_set_trace(self.group.pointer, None))

    def __enter__(self) -> "Trace":
        self.start()
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]) -> None:
        if not self.group.closed:
            self.stop()

    @checked("Trace.span")
    @contextlib.contextmanager
    def span(self, name: str, arg: int = 0, unit: str = "") -> Iterator[None]:
        """Records a phase of the caller's code on the track of this rank's calls, with an argument in `unit`. All ranks whose
        records are gathered must use the same phase names in the same order."""
        if (name, unit) not in self._events:
            event = ctypes.c_int32()
            check(self._functions.sy_trace_event(self.pointer, name.encode(), unit.encode(), byref(event)))
            self._events[name, unit] = event.value
        begun = ctypes.c_void_p()
        check(self._functions.sy_trace_span_begin(self.pointer, self.group.rank, self._events[name, unit], arg, byref(begun)))
        try:
            yield
        finally:
            self._functions.sy_trace_span_end(begun)

    def gather(self) -> None:
        """Collective. Gathers the records of all ranks on every rank. Call once, after :meth:`stop`."""
        mine = self.to_bytes()
        sizes = [struct.unpack("<q", each)[0] for each in self.group.all_gather(struct.pack("<q", len(mine)))]
        everybody = self.group.all_gather(mine.ljust(max(sizes), b"\0"))
        for rank, (size, content) in enumerate(zip(sizes, everybody)):
            if rank != self.group.rank:
                self.merge(content[:size])

    def to_bytes(self) -> bytes:
        """Returns this rank's records, for :meth:`merge`."""
        return self._bytes(self._functions.sy_trace_serialize, self.group.rank)

    @checked("Trace.merge")
    def merge(self, content: bytes) -> None:
        """Adds the records of another rank on this host, from a trace created with the same arguments."""
        check(self._functions.sy_trace_merge(self.pointer, content, len(content)))

    def _bytes(self, function: Any, argument: int) -> bytes:
        b = structs.Bytes()
        check(function(self.pointer, argument, byref(b)))
        storage = Owned(b.storage, self._functions.sy_storage_release)
        content = ctypes.string_at(b.data, b.size) if b.size else b""
        storage.close()
        return content

    @checked("Trace.json")
    def json(self, *, flows: bool = True) -> str:
        """Returns the trace in Chrome's JSON format. flows: include arrows into waits."""
        return self._bytes(self._functions.sy_trace_json, int(flows)).decode()

    @checked("Trace.write_json")
    def write_json(self, path: Union[str, "os.PathLike[str]"], *, flows: bool = True) -> None:
        """Writes the output of :meth:`json` to a file."""
        check(self._functions.sy_trace_write_json(self.pointer, os.fspath(path).encode(), int(flows)))

    def summary(self) -> List[TracePhase]:
        """Returns one entry per rank and phase that occurred."""
        s = structs.TraceSummary()
        check(self._functions.sy_trace_summary_of(self.pointer, byref(s)))
        storage = Owned(s.storage, self._functions.sy_storage_release)
        found = []
        for i in range(s.count):
            p = _structs.TracePhase.from_address(s.phases + i * s.phase_bytes)
            found.append(TracePhase(p.name.decode(), p.category.decode(), p.unit.decode(), p.rank, p.count, p.total_ms, p.max_ms,
                                    p.slowest_ms, p.arg_sum, p.bytes))
        storage.close()
        return found

    def clear(self) -> None:
        """Deletes all records."""
        check(self._functions.sy_trace_clear(self.pointer))

    @property
    def lost(self) -> int:
        """Number of records overwritten because their track was full."""
        number = ctypes.c_uint64()
        check(self._functions.sy_trace_lost(self.pointer, byref(number)))
        return number.value

    @property
    def clock_error_ns(self) -> int:
        """Maximum deviation of any rank's times from this host's clock; 0 unless GPU calls were recorded."""
        number = ctypes.c_uint64()
        check(self._functions.sy_trace_clock_error(self.pointer, byref(number)))
        return number.value
