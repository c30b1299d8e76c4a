# SPDX-License-Identifier: Apache-2.0
"""Errors as exceptions: details, pickling, and errors caused by peers that die or leave."""
import multiprocessing
import os
import pickle
import threading

import numpy as np
import pytest

import switchyard as sy
from processes import a_store, run_processes

CONFIG = {"hidden": 16, "num_experts": 4, "topk": 2, "max_tokens": 8, "dtype": "f32"}
REPORT = sy.WaitReport("dispatch", "count", 3, 0, 1, 7, 6, 12.5)


@pytest.mark.parametrize("error", [
    sy.InvalidArgument("a"), sy.Unsupported("b"), sy.HeapExhausted("c"), sy.PoolExhausted("d"), sy.CapacityExceeded("e"),
    sy.PeerTimeout("f", REPORT), sy.PeerFailed("g", 3, 2), sy.PeerFailed("g", 3, 200), sy.Mismatch("h"),
    sy.RendezvousError("i", (1, 2)), sy.FileError("j"), sy.SystemFailure("k"),
], ids=lambda error: type(error).__name__)
def test_pickled(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error) == error.text and again.code == error.code
    assert isinstance(again, sy.SwitchyardError)
    for name in ("report", "rank", "reason", "missing_ranks"):
        assert getattr(again, name, None) == getattr(error, name, None)


def test_they_are_what_python_calls_them():
    assert issubclass(sy.PeerTimeout, TimeoutError) and issubclass(sy.InvalidArgument, ValueError)
    assert issubclass(sy.PoolExhausted, MemoryError) and issubclass(sy.FileError, OSError)


def x_and_ids():
    return np.ones((2, 16), np.float32), np.array([[0, 3], [1, 2]])


def test_a_wait_that_ends_has_a_report(ranks):
    ended = threading.Event()

    def rank(group):
        exchange = sy.Exchange(group, **CONFIG)
        if group.rank == 1:
            ended.wait(60)
            return None
        group.set_timeout(0.2)
        try:
            with pytest.raises(sy.PeerTimeout) as caught:
                exchange.dispatch(*x_and_ids())
        finally:
            ended.set()
        return pickle.loads(pickle.dumps(caught.value))

    error = ranks(rank, 2)[0]
    assert error.report.operation == "dispatch" and error.report.waiting_rank == 0 and error.report.awaited_rank == 1
    assert error.report.waited_ms >= 199 and error.report.site and error.report.call == 1
    assert "rank 1" in str(error)


def test_the_pool_can_be_exhausted_and_used_again(ranks):
    def rank(group):
        exchange = sy.Exchange(group, pool_bytes=8192, **CONFIG)
        held = []
        with pytest.raises(sy.PoolExhausted) as caught:
            for _ in range(100):
                held.append(exchange.dispatch(*x_and_ids())[0])
        assert "pool_bytes" in str(caught.value) and held
        del held
        exchange.dispatch(*x_and_ids())

    ranks(rank, 2)


def test_ranks_that_make_different_calls(ranks):
    def rank(group):
        exchange = sy.Exchange(group, **CONFIG)
        rows, handle = exchange.dispatch(*x_and_ids())
        with pytest.raises(sy.Mismatch):
            if group.rank == 0:
                exchange.combine(rows, handle)
            else:
                exchange.dispatch(*x_and_ids())

    ranks(rank, 2)


def test_abort_with_a_number_of_ones_own(ranks):
    def rank(group):
        exchange = sy.Exchange(group, **CONFIG)
        if group.rank == 1:
            group.abort(77)
            return
        with pytest.raises(sy.PeerFailed) as caught:
            exchange.dispatch(*x_and_ids())
        assert caught.value.rank == 1 and caught.value.reason == 77
        with pytest.raises(sy.PeerFailed):
            group.check()

    ranks(rank, 2)


def test_the_error_of_the_rank_that_had_cause_is_raised(ranks):
    def rank(group):
        if group.rank == 2:
            raise KeyError("mine")
        sy.Exchange(group, **CONFIG).dispatch(*x_and_ids())

    with pytest.raises(KeyError, match="mine"):
        ranks(rank, 3)


def _victim(rank, world, store, outcome):
    group = sy.Group.connect(rank, world, store, "secret", 16 << 20, timeout=20, rendezvous_timeout=20)
    try:
        exchange = sy.Exchange(group, **CONFIG)
        exchange.dispatch(*x_and_ids())
        if rank == 1:
            os._exit(3)  # dies without leaving the group
        exchange.dispatch(*x_and_ids())
    except sy.SwitchyardError as error:
        outcome.put(error)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_dead_peer_is_a_typed_error(method):
    outcome = multiprocessing.get_context(method).SimpleQueue()
    assert run_processes(method, _victim, 2, a_store(), outcome) == [0, 3]
    error = outcome.get()  # it was pickled in transit
    assert isinstance(error, sy.PeerFailed) and error.rank == 1 and error.reason == sy.Code.SYSTEM


def test_ranks_that_never_come():
    with pytest.raises(sy.RendezvousError) as caught:
        sy.Group.connect(0, 3, a_store(), "t", rendezvous_timeout=0.3)
    assert caught.value.missing_ranks == (1, 2)


def test_a_library_that_is_none(tmp_path, monkeypatch):
    from switchyard._abi import ffi as _ffi

    nothing = tmp_path / "libswitchyard.so"
    nothing.write_text("no library")
    monkeypatch.setenv("SWITCHYARD_LIBRARY", str(nothing))
    with pytest.raises(sy.LibraryNotFound, match="SWITCHYARD_LIBRARY"):
        _ffi._load()
    monkeypatch.setenv("SWITCHYARD_LIBRARY", "libc.so.6")
    with pytest.raises(sy.LibraryNotFound, match="sy_struct_bytes"):
        _ffi._load()


def _call_with(option, value):
    """A rank's calls, of which the one that accepts `option` has this value."""
    def scenario(group):
        own_value = value if group.rank else None
        x, ids = np.ones((4, 16), np.float32), np.zeros((4, 2), np.int32)
        given = {} if own_value is None else {option: own_value}
        with sy.Exchange(group, **CONFIG, layout="expert_major") as exchange, sy.LowLatency(group, **CONFIG) as low:
            if option == "order of low latency":
                received = low.dispatch(x, ids)
                low.combine(received.x, received, order=own_value or "per_route")
            elif option in ("padding", "quantize", "size"):
                exchange.dispatch(x, ids, **given)
            else:
                rows, handle = exchange.dispatch(x, ids, np.ones((4, 2), np.float32))
                exchange.combine(rows, handle, **given)
    return scenario


@pytest.mark.parametrize("option, value, text", [
    ("padding", "unspecified", "padding = 'zero' on rank 0 and 'unspecified' on rank 1"),
    ("quantize", "f32", "quantize = None on rank 0 and 'f32' on rank 1"),
    ("size", "worst_case", "size = 'exact' on rank 0 and 'worst_case' on rank 1"),
    ("order", "per_route", "order = 'per_rank' on rank 0 and 'per_route' on rank 1"),
    ("apply_weights", False, "apply_weights = True on rank 0 and False on rank 1"),
    ("order of low latency", "per_rank", "order = 'per_route' on rank 0 and 'per_rank' on rank 1"),
])
def test_a_mismatch_names_the_option(option, value, text):
    first, second = text.split(" = ")[1].replace(" on rank 0", "").replace(" on rank 1", "").split(" and ")
    other = f"{text.split(' = ')[0]} = {second} on rank 1 and {first} on rank 0"  # rank 1 found it
    with pytest.raises(sy.Mismatch) as found:
        sy.run_ranks(_call_with(option, value), 2)
    assert text in str(found.value) or other in str(found.value)
