# SPDX-License-Identifier: Apache-2.0
"""Events. On the CPU, all work is complete when a call returns, so events are empty. On GPUs, they are CUDA events."""
from __future__ import annotations

from typing import Any, Optional, Tuple

import torch

__all__ = ["EventHandle", "EventOverlap"]


class EventHandle:
    """A point in stream order, recorded at construction on the current stream of the current GPU, or on `stream`. Records
    nothing in a process that has not yet used a GPU."""

    def __init__(self, stream: Optional[torch.cuda.Stream] = None) -> None:
        self._event: Optional[torch.cuda.Event] = None
        if stream is not None or torch.cuda.is_initialized():
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream() if stream is None else stream)

    def current_stream_wait(self) -> None:
        """Makes the current stream wait for the event. The host does not wait."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def stream_wait(self, stream: torch.cuda.Stream) -> None:
        """Makes `stream` wait for the event. The host does not wait."""
        if self._event is not None:
            stream.wait_event(self._event)


class EventOverlap:
    """An optional event, and tensors that must stay alive until it occurs."""

    def __init__(self, event: Optional[EventHandle] = None, extra_tensors: Optional[Tuple[Any, ...]] = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """Makes the current stream wait for the event, which must exist."""
        assert self.event is not None, "EventOverlap without an event: only calls with async_finish=True return one"
        self.event.current_stream_wait()

    def __enter__(self) -> "EventOverlap":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self.event is not None:
            self.event.current_stream_wait()


def check_events(previous_event: Optional[EventOverlap], async_finish: bool) -> None:
    """Checks DeepEP's requirements for a call with allocate_on_comm_stream."""
    assert getattr(previous_event, "event", None) is not None and async_finish, \
        "allocate_on_comm_stream needs a previous_event and async_finish=True"
