# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory that torch allocates tensors in."""
from __future__ import annotations

import threading
from ctypes import byref, c_void_p
from typing import Any, Callable, Dict, Optional

from ._abi.arguments import checked
from ._abi.ffi import Owned, alive, bare, check_collective, library
from ._torch.registry import torch_for
from .errors import Unsupported
from .group import Group, constructs

__all__ = ["RowMemory"]


class RowMemory:
    """Symmetric memory of a group on GPUs for tensors of torch: rows that a dispatch writes into such a tensor arrive there, and a combine
    reads rows there, both without a copy. Torch's caching allocator hands it out, in a pool of its own (``torch.cuda.MemPool``), so
    tensors live as long as they are used, and ``record_stream`` works. Where the `size` bytes are taken, tensors lie in ordinary memory
    and cost the copy.

    Collective: `size`, in bytes of the group's heap, is the same on all ranks. `device`: the GPU, None: the current one. `segment`: what torch
    takes of it at once for each stream, in bytes, when a tensor is first made there on that stream, and once more at the second one, as long
    as there is one left: tensors of any smaller size find room in these in turn. 0: as much as a tensor needs, and room that was taken for a
    small tensor is none for a larger one. The group's memory stays until the last such tensor is gone and ``torch.cuda.empty_cache()`` was called."""

    @constructs
    @checked("RowMemory.__init__")
    def __init__(self, group: Group, size: int, device: Optional[int] = None, segment: int = 0) -> None:
        if group.backend != "cuda":
            raise Unsupported("RowMemory is for tensors on GPUs, and this group is on the CPU")
        torch = torch_for("RowMemory")
        made, functions = c_void_p(), library().functions
        check_collective(functions.sy_row_memory_create(group.pointer, size, byref(made)))
        self._owned = Owned(made.value, functions.sy_row_memory_destroy, group._owned, lock=group._lock)
        group._lock.members.add(self._owned)
        self._group = group
        self._at = made
        # Functions of a library that is loaded already; torch calls them with the size, the device and the stream.
        self._allocator = torch.cuda.memory.CUDAPluggableAllocator(library().path, "sy_row_memory_allocate", "sy_row_memory_free")
        self.pool: Any = torch.cuda.MemPool(self._allocator.allocator())
        here = torch.cuda.current_device() if device is None else device
        self._in_use = _InUse(self, torch, here, segment, size // segment if segment else 0)

    def use(self) -> "_InUse":
        """``with memory.use():`` tensors that this thread makes inside on the group's GPU lie in this memory. Not to be nested. Costs a few
        microseconds of the host."""
        alive(self._owned, "the row memory", self._group)
        return self._in_use

    def close(self) -> None:
        """Tensors that are there stay."""
        self._at.value = None
        self._owned.close()


_BOTH = -1


class _OfThread(threading.local):
    """What the library was told that this thread's tensors are made in."""

    told: Any = None


class _InUse:
    """Made once for a RowMemory."""

    _here = _OfThread()

    def __init__(self, memory: RowMemory, torch: Any, device: int, segment: int, segments: int) -> None:
        self._use_here, self._at = bare("sy_row_memory_use"), memory._at
        self._device, self._pool = device, memory.pool.id
        # What torch.cuda.use_mem_pool calls, which takes longer than all the rest of a call.
        self._begin, self._end, self._release = (
            torch._C._cuda_beginAllocateCurrentThreadToPool, torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool)
        self._torch, self._segment, self._segments_left = torch, segment, segments
        self._raw_stream = torch._C._cuda_getCurrentRawStream
        self._first: Dict[int, int] = {}  # where the first segment of a stream is, until it has both

    def __enter__(self) -> None:
        self._begin(self._device, self._pool)
        try:
            self._prepare()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: Any) -> None:
        self._end(self._device, self._pool)
        self._release(self._device, self._pool)

    def rows(self, rows: Callable[[int, int, Any], Any], number: int, columns: int, like: Any) -> Any:
        """What `rows` makes of the rest, inside: the same as by a ``with``, and shorter."""
        device, pool = self._device, self._pool
        self._begin(device, pool)
        try:
            if self._segments_left or self._here.told is not self:
                self._prepare()
            return rows(number, columns, like)
        finally:
            self._end(device, pool)
            self._release(device, pool)

    def _prepare(self) -> None:
        if self._here.told is not self:  # said once: torch asks for this memory nowhere else
            self._use_here(self._at)
            self._here.told = self
        if self._segments_left:
            self._take_segment()

    def _take_segment(self) -> None:
        """For the current stream, if it has less than two. Torch keeps what a tensor that is gone lay in, and makes smaller ones of it."""
        stream = self._raw_stream(self._device)
        first = self._first.get(stream)
        if first == _BOTH or self._torch.cuda.is_current_stream_capturing():  # then tensors are made in the memory of the graph
            return
        segment = self._new_segment()
        if first is not None and segment.data_ptr() == first:  # nothing lies there now, so torch gave it again
            self._new_segment()
        self._first[stream] = segment.data_ptr() if first is None else _BOTH
        self._segments_left -= 1

    def _new_segment(self) -> Any:
        return self._torch.empty(self._segment, dtype=self._torch.uint8, device=self._device)
