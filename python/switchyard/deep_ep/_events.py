# SPDX-License-Identifier: Apache-2.0
"""Events. On the CPU everything has happened when a call returns, so that they only have to be there."""
from __future__ import annotations

from typing import Any, Optional, Tuple

__all__ = ["EventHandle", "EventOverlap"]


class EventHandle:
    """A point in the order of work, recorded when it is made."""

    def current_stream_wait(self) -> None:
        """The current stream waits for it."""


class EventOverlap:
    """An event, or none, and tensors that must stay until it."""

    def __init__(self, event: Optional[EventHandle] = None, extra_tensors: Optional[Tuple[Any, ...]] = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """The current stream waits for the event, of which there must be one."""
        assert self.event is not None, "EventOverlap without an event: only calls with async_finish=True return one"
        self.event.current_stream_wait()

    def __enter__(self) -> "EventOverlap":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self.event is not None:
            self.event.current_stream_wait()


def event_of(async_finish: bool, *tensors: Any) -> EventOverlap:
    """What a call returns."""
    return EventOverlap(EventHandle(), tensors) if async_finish else EventOverlap()


def check_events(previous_event: Optional[EventOverlap], async_finish: bool, allocate_on_comm_stream: bool) -> None:
    """The combination that DeepEP forbids."""
    if allocate_on_comm_stream:
        assert getattr(previous_event, "event", None) is not None and async_finish, \
            "allocate_on_comm_stream needs a previous_event and async_finish=True"
