# SPDX-License-Identifier: Apache-2.0
"""Streams of calls, and their order relative to other work.

DeepEP runs every call on a communication stream, except those with a hook. Here, a call without overlap (neither previous_event
nor async_finish) runs on the current stream. The order is the same, because DeepEP's stream would wait for the current stream,
and vice versa. The communication stream waits before and after a call without overlap as if it had run the call.
"""
from __future__ import annotations

from typing import Any, Callable, Iterator, Optional, Tuple, TypeVar

import torch

from ._events import EventHandle, EventOverlap

Result = TypeVar("Result")


def _raw_stream_of(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


#: Returns the handle of a GPU's current stream, without creating a stream object if torch supports that.
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _raw_stream_of)


class NoStreams:
    """Order of calls on the CPU, where a call is complete when it returns."""

    def communication(self) -> Optional[torch.cuda.Stream]:
        return None

    def ready(self) -> Optional[int]:
        return 0

    def run(self, work: Callable[[], Result], given: Tuple[Any, ...], previous_event: Optional[EventOverlap] = None,
            async_finish: bool = False, held: Any = None) -> Tuple[Result, EventOverlap]:
        result = work()
        return result, EventOverlap(EventHandle(), (given, held)) if async_finish else EventOverlap()

    def here(self, work: Callable[[], Result]) -> Result:
        return work()

    def on_stream_of(self, work: Callable[[], Result]) -> Callable[[], Result]:
        return work

    def to_host(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        return make()


class Streams:
    """The communication stream of one Buffer, and the order of its calls. The calls share the GPU's multiprocessors and
    therefore run one after another."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._comm = torch.cuda.Stream(device, priority=-1)
        self._copies = torch.cuda.Stream(device, priority=-1)
        self._comm_in_use = False
        self._raw: Optional[int] = None  # stream of all calls so far, while only one was used
        self._last: Optional[torch.cuda.Stream] = None

    def communication(self) -> Optional[torch.cuda.Stream]:
        """Returns the communication stream for callers that enqueue their own work on it between calls."""
        if not self._comm_in_use:
            self._use_comm(self._last or torch.cuda.current_stream(self._device))
        return self._comm

    def ready(self) -> Optional[int]:
        """Returns the handle of the current stream if a call without overlap can run there without additional synchronization,
        as in most calls; otherwise None, and :meth:`run` must be used."""
        if self._comm_in_use:
            return None
        raw = raw_stream(self._device)
        return raw if raw == self._raw else None

    def run(self, work: Callable[[], Result], given: Tuple[Any, ...], previous_event: Optional[EventOverlap] = None,
            async_finish: bool = False, held: Any = None) -> Tuple[Result, EventOverlap]:
        """Returns the result of `work` and the event of the call. `given`: the caller's tensors that `work` reads or writes.
        `held`: those that may be library memory, which torch's allocator does not track; the event keeps them alive."""
        event = None if previous_event is None else previous_event.event
        if event is None and not async_finish:
            return self.here(work), EventOverlap()
        return self._on_comm(work, given, event, async_finish, held)

    def here(self, work: Callable[[], Result]) -> Result:
        """Runs `work` on the current stream, in order with all calls of the Buffer."""
        if not self._comm_in_use and self._on_one_stream():
            return work()
        if torch.cuda.is_current_stream_capturing():
            return self._on_comm(work, (), None, False)[0]
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._comm)
        result = work()
        self._comm.wait_stream(current)
        return result

    def _on_one_stream(self) -> bool:
        """Returns whether all calls so far were enqueued on the current stream. Captured calls are ignored, because the program
        orders graph replays."""
        raw = raw_stream(self._device)
        if raw == self._raw or torch.cuda.is_current_stream_capturing():
            return True
        current = torch.cuda.current_stream(self._device)
        if self._last is None:
            self._raw, self._last = raw, current
            return True
        self._use_comm(self._last)
        return False

    def _use_comm(self, after: torch.cuda.Stream) -> None:
        self._comm_in_use = True
        self._comm.wait_stream(after)

    def _on_comm(self, work: Callable[[], Result], given: Tuple[Any, ...], event: Optional[EventHandle], async_finish: bool,
                 held: Any = None) -> Tuple[Result, EventOverlap]:
        current, comm = torch.cuda.current_stream(self._device), self._comm
        if not self._comm_in_use:  # earlier calls ran elsewhere
            captures = torch.cuda.is_current_stream_capturing()
            self._use_comm(current if captures or self._last is None else self._last)
        if event is not None:
            event.stream_wait(comm)
        else:
            comm.wait_stream(current)
        with torch.cuda.stream(comm):
            result = work()
        for tensor in _tensors(result):  # allocated for the communication stream
            tensor.record_stream(current)
        if not async_finish:
            current.wait_stream(comm)
            return result, EventOverlap()
        for tensor in _tensors(given):
            tensor.record_stream(comm)
        return result, EventOverlap(EventHandle(comm), (given, held))

    def on_stream_of(self, work: Callable[[], Result]) -> Callable[[], Result]:
        """Returns `work`, bound to the current stream, on which later callers enqueue it."""
        stream, raw = torch.cuda.current_stream(self._device), raw_stream(self._device)

        def there() -> Result:
            if raw_stream(self._device) == raw:
                return self.here(work)
            with torch.cuda.stream(stream):
                return self.here(work)

        return there

    def to_host(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Returns the result of `make` in host memory, without waiting for enqueued calls. The host has already waited for this
        data."""
        with torch.cuda.stream(self._copies):
            return make().cpu()


def _tensors(found: Any) -> Iterator[torch.Tensor]:
    """Yields the GPU tensors contained in plain tuples. Handles are tuples of their own type and are skipped."""
    if isinstance(found, torch.Tensor):
        if found.is_cuda:
            yield found
    elif type(found) is tuple:
        for each in found:
            yield from _tensors(each)
