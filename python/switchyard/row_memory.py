# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory in which torch allocates tensors."""
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
    """Symmetric memory of a GPU group for torch tensors. A dispatch delivers rows directly into such a tensor, and a combine
    reads them there, both without a copy. Torch's caching allocator manages the memory in a separate pool
    (``torch.cuda.MemPool``), so tensors exist as long as they are in use, and ``record_stream`` works. Once the `size` bytes
    are exhausted, tensors are allocated in ordinary memory, and their rows are copied.

    Collective: `size`, in bytes of the group's heap, must be identical on all ranks. `device`: the GPU; None: the current GPU.
    `segment`: number of bytes that torch reserves for each stream when the first and again when the second tensor is created on
    it, as long as segments are left; all smaller tensors are then allocated in these segments. 0: torch reserves only what each
    tensor needs, and memory reserved for a small tensor cannot hold a larger one. The group's memory is kept until the last
    such tensor has been dropped and ``torch.cuda.empty_cache()`` has been called."""

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
        # These functions belong to the library already loaded; torch calls them with the size, device and stream.
        self._allocator = torch.cuda.memory.CUDAPluggableAllocator(library().path, "sy_row_memory_allocate", "sy_row_memory_free")
        self.pool: Any = torch.cuda.MemPool(self._allocator.allocator())
        here = torch.cuda.current_device() if device is None else device
        self._in_use = _InUse(self, torch, here, segment, size // segment if segment else 0)

    def use(self) -> "_InUse":
        """Inside ``with memory.use():``, this thread's new tensors on the group's GPU are allocated in this memory. Must not be
        nested. Costs a few microseconds of host time."""
        alive(self._owned, "the row memory", self._group)
        return self._in_use

    def close(self) -> None:
        """Releases the memory. Existing tensors stay valid."""
        self._at.value = None
        self._owned.close()


_BOTH = -1


class _OfThread(threading.local):
    """The row memory last selected in the library by this thread."""

    told: Any = None


class _InUse:
    """Context of :meth:`RowMemory.use`, created once per RowMemory."""

    _here = _OfThread()

    def __init__(self, memory: RowMemory, torch: Any, device: int, segment: int, segments: int) -> None:
        self._use_here, self._at = bare("sy_row_memory_use"), memory._at
        self._device, self._pool = device, memory.pool.id
        # These functions implement torch.cuda.use_mem_pool, which itself takes longer than the rest of a call.
        self._begin, self._end, self._release = (
            torch._C._cuda_beginAllocateCurrentThreadToPool, torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool)
        self._torch, self._segment, self._segments_left = torch, segment, segments
        self._raw_stream = torch._C._cuda_getCurrentRawStream
        self._first: Dict[int, int] = {}  # address of a stream's first segment, until the stream has both

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
        """Returns the result of calling `rows` with the other arguments inside this context. Equivalent to ``with``, but
        faster."""
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
        if self._here.told is not self:  # set once, because torch uses this memory nowhere else
            self._use_here(self._at)
            self._here.told = self
        if self._segments_left:
            self._take_segment()

    def _take_segment(self) -> None:
        """Allocates a segment for the current stream if the stream has fewer than two. Torch keeps the memory of a dropped
        tensor and allocates smaller tensors in it."""
        stream = self._raw_stream(self._device)
        first = self._first.get(stream)
        if first == _BOTH or self._torch.cuda.is_current_stream_capturing():  # a graph allocates tensors in its own memory
            return
        segment = self._new_segment()
        if first is not None and segment.data_ptr() == first:  # the first segment was free, so torch returned it again
            self._new_segment()
        self._first[stream] = segment.data_ptr() if first is None else _BOTH
        self._segments_left -= 1

    def _new_segment(self) -> Any:
        return self._torch.empty(self._segment, dtype=self._torch.uint8, device=self._device)
