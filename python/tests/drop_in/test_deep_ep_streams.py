# SPDX-License-Identifier: Apache-2.0
"""The order of the drop-in's calls on a GPU, tested without a GPU: a stream is modeled as the set of work enqueued before.
Random programs of calls and of the caller's own work run under DeepEP's rules, where every call runs on the communication
stream, and under the drop-in's rules."""
import contextlib
import random
import types

import pytest

torch = pytest.importorskip("torch")

from switchyard.deep_ep import _events, _streams  # noqa: E402


class Stream:
    """The set of work that precedes the next work enqueued on this stream."""

    def __init__(self, device=0, priority=0):
        self.before = set()
        self.cuda_stream = id(self)

    def enqueue(self, name, log):
        log[name] = frozenset(self.before)
        self.before.add(name)

    def wait_event(self, event):
        self.before |= event.before

    def wait_stream(self, other):
        self.before |= other.before


class Event:
    def record(self, stream):
        self.before = set(stream.before)


class World:
    """The subset of torch used by the drop-in's streams and events."""

    Tensor = torch.Tensor

    def __init__(self):
        self.now = Stream()
        self.cuda = types.SimpleNamespace(
            Stream=Stream, Event=Event, current_stream=lambda device=0: self.now, stream=self.on, is_initialized=lambda: True,
            is_current_stream_capturing=lambda: False)

    @contextlib.contextmanager
    def on(self, stream):
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before


class DeepEp:
    """DeepEP's rules."""

    def __init__(self, world):
        self.world, self.comm = world, Stream()

    def call(self, work, previous, asynchronous):
        current = self.world.now
        if previous is not None:
            self.comm.wait_event(previous)
        else:
            self.comm.wait_stream(current)
        with self.world.on(self.comm):
            work()
        if not asynchronous:
            current.wait_stream(self.comm)
            return None
        event = Event()
        event.record(self.comm)
        return event

    def capture(self):
        event = Event()
        event.record(self.world.now)
        return event

    def wait(self, event):
        self.world.now.wait_event(event)

    def communication(self):
        return self.comm


class Ours:
    def __init__(self, world):
        self.world, self.streams = world, _streams.Streams(0)

    def call(self, work, previous, asynchronous):
        if previous is None and not asynchronous and self.streams.ready() is not None:  # same condition as in Buffer
            assert self.streams.ready() == self.world.now.cuda_stream
            return work()
        _, event = self.streams.run(work, (), None if previous is None else _events.EventOverlap(previous), asynchronous)
        assert (event.event is not None) == asynchronous
        return event.event

    def capture(self):
        return _events.EventHandle()

    def wait(self, event):
        event.current_stream_wait()

    def communication(self):
        return self.streams.communication()


def play(program, rules, monkeypatch):
    """Returns the work that precedes each call and each piece of the caller's work."""
    world, log, events = World(), {}, []
    monkeypatch.setattr(_streams, "torch", world)
    monkeypatch.setattr(_events, "torch", world)
    monkeypatch.setattr(_streams, "raw_stream", lambda device: world.now.cuda_stream)
    callers, it = [world.now, Stream()], rules(world)
    for number, (kind, stream, asynchronous, chosen) in enumerate(program):
        with world.on(it.communication() if kind == "on comm" else callers[stream]):
            if kind in ("work", "on comm"):
                world.now.enqueue(f"work {number}", log)
            elif kind == "capture":
                events.append(it.capture())
            elif kind == "wait" and events:
                it.wait(events[int(chosen * len(events))])
            elif kind == "call":
                previous = events[int(chosen * len(events))] if events and chosen < 0.5 else None
                event = it.call(lambda: world.now.enqueue(f"call {number}", log), previous, asynchronous)
                if event is not None:
                    events.append(event)
    return log


def programs(kinds, streams, overlap):
    for seed in range(300):
        rng = random.Random(seed)
        yield [(rng.choice(kinds), rng.randrange(streams), overlap and rng.random() < 0.5, rng.random()) for _ in range(40)]


@pytest.mark.parametrize("kinds, streams, overlap", [
    (["work", "call"], 1, False),
    (["work", "call"], 2, False),
    (["work", "call", "capture", "wait"], 1, True),
    (["work", "call", "capture", "wait"], 2, True),
    (["work", "call", "capture", "wait", "on comm"], 2, True),
])
def test_order(monkeypatch, kinds, streams, overlap):
    """The drop-in preserves every order of DeepEP. It adds an order only once: when the communication stream is first used, it
    is ordered after all work that the caller has enqueued on the streams of the calls."""
    more = 0
    for program in programs(kinds, streams, overlap):
        theirs, ours = play(program, DeepEp, monkeypatch), play(program, Ours, monkeypatch)
        assert theirs.keys() == ours.keys()
        for name in theirs:
            assert theirs[name] <= ours[name], (name, theirs[name] - ours[name], program)
            more += len(ours[name] - theirs[name])
    if streams == 1 and not overlap:
        assert more == 0


def test_no_more_order(monkeypatch):
    """After the first use of the communication stream, the order equals DeepEP's."""
    kinds = ["work", "call", "capture", "wait", "on comm"]
    for program in programs(kinds, 2, True):
        begun = [("on comm", 0, False, 0.0)] + program
        assert play(begun, DeepEp, monkeypatch) == play(begun, Ours, monkeypatch)
