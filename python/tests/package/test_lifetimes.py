# SPDX-License-Identifier: Apache-2.0
"""Objects may be dropped in any order, on any thread, twice, and by forked children."""
import gc
import itertools
import os
import queue
import re
import threading
import time
import weakref

import numpy as np
import pytest

import switchyard as sy

CONFIG = {"hidden": 16, "num_experts": 4, "topk": 2, "max_tokens": 8, "dtype": "f32"}
NAMES = ("group", "exchange", "rows", "handle", "buffer")


def made(**options):
    group = sy.Group.threads(1, 16 << 20, **options)[0]
    exchange = sy.Exchange(group, **CONFIG)
    x = np.arange(48, dtype=np.float32).reshape(3, 16)
    rows, handle = exchange.dispatch(x, np.array([[0, 3], [1, 2], [2, -1]]), np.ones((3, 2), np.float32))
    return {"group": group, "exchange": exchange, "rows": rows, "handle": handle, "buffer": exchange.allocate_rows(handle)}, x


@pytest.mark.parametrize("order", list(itertools.permutations(NAMES))[::7], ids="-".join)
def test_any_order(order):
    objects, x = made()
    for name in order:
        if "rows" in objects:
            assert np.array_equal(objects["rows"], x)
        if "handle" in objects:
            assert objects["handle"].num_tokens == 3 and objects["handle"].topk_weights.sum() == 5
        if "buffer" in objects:
            objects["buffer"][:] = 1
        del objects[name]
        gc.collect()


def test_arrays_keep_what_they_show():
    objects, x = made()
    weights, part = objects["handle"].topk_weights, objects["rows"][1:, 3]
    objects.clear()
    gc.collect()
    assert weights.sum() == 5 and np.array_equal(part, x[1:, 3])


def test_reprs_name_the_shape():
    objects, _ = made()
    assert re.fullmatch(r"<switchyard\.Exchange \w+, hidden \d+, \d+ experts, topk 2, <switchyard\.Group .*>>", repr(objects["exchange"]))
    assert re.fullmatch(r"<switchyard\.Handle \w+, 3 tokens>", repr(objects["handle"]))


def test_rows_go_back_to_the_pool():
    objects, x = made()
    exchange, ids = objects["exchange"], np.array([[0, 3], [1, 2], [2, -1]])
    objects.clear()
    for _ in range(200):
        rows, handle = exchange.dispatch(x, ids)
    assert np.array_equal(rows, x)


def test_closing_twice_and_using_what_is_closed():
    objects, x = made()
    group, exchange = objects["group"], objects["exchange"]
    for _ in range(2):
        exchange.close()
    with pytest.raises(sy.InvalidArgument, match="the exchange is closed"):
        exchange.dispatch(x, np.zeros((3, 2), np.int64))
    for _ in range(2):
        group.close()
    assert group.closed and "closed" in repr(group)
    with pytest.raises(sy.InvalidArgument, match="the group is closed"):
        group.barrier()
    assert np.array_equal(objects["rows"], x)


def test_context_managers():
    with sy.Group.threads(1, 16 << 20)[0] as group, sy.Exchange(group, **CONFIG) as exchange:
        assert group.rank == 0 and group.size == 1 and exchange.layout == "rank_major"
    assert group.closed


def test_nothing_leaks():
    """Objects are destroyed with their last reference, not by a later garbage collection."""
    objects, _ = made()
    watched = [weakref.ref(objects[name]._owned) for name in ("group", "exchange", "handle")]
    gc.disable()
    try:
        objects.clear()
        assert [ref() for ref in watched] == [None] * 3
    finally:
        gc.enable()


def test_inputs_are_not_kept():
    """A handle remains valid after the rows of its dispatch and the dispatched inputs are gone."""
    objects, _ = made()
    x = np.ones((3, 16), np.float32)
    watched = weakref.ref(x)
    rows, handle = objects["exchange"].dispatch(x, np.array([[0, 3], [1, 2], [2, -1]]))
    out = objects["exchange"].combine(rows, handle)
    del x
    assert watched() is None and out.shape == (3, 16)


def test_other_threads_may_let_go_during_calls(ranks):
    """Handles and rows are destroyed on one thread while another thread makes calls in the same group."""

    def rank(group):
        exchange = sy.Exchange(group, pool_bytes=1 << 20, **CONFIG)
        x, ids = np.ones((8, 16), np.float32), np.zeros((8, 2), np.int64)
        pile = queue.Queue(maxsize=4)
        thread = threading.Thread(target=lambda: all(iter(pile.get, None)))
        thread.start()
        for _ in range(300):
            pile.put(exchange.dispatch(x, ids))
        pile.put(None)
        thread.join()

    ranks(rank, 2)


def test_a_rank_collects_what_belongs_to_another_that_waits_for_it(ranks):
    """An exchange of rank 1 that is part of a reference cycle, collected on rank 0's thread while rank 1 is in a call that
    needs rank 0."""
    waiting, watched = threading.Event(), []

    def rank(group):
        exchange = sy.Exchange(group, **CONFIG)
        if group.rank == 1:
            cycle = [exchange]
            cycle.append(cycle)
            watched.append(weakref.ref(exchange))
            del exchange, cycle
            waiting.set()
            group.barrier()
        else:
            waiting.wait()
            time.sleep(0.1)  # lets rank 1 enter its call; if it has not, this test shows nothing
            gc.collect()
            assert watched[0]() is None
            exchange.close()
            group.barrier()
        sy.Exchange(group, **CONFIG)  # there is room for both again

    gc.disable()
    try:
        ranks(rank, 2, heap_bytes=sy.Exchange.heap_bytes(2, **CONFIG))
    finally:
        gc.enable()


def test_a_forked_child_leaves_its_parents_objects_alone():
    objects, x = made()
    group, exchange = objects["group"], objects["exchange"]
    held, done = threading.Event(), threading.Event()

    def elsewhere():
        with group._lock:  # as a call does
            held.set()
            done.wait()

    other = threading.Thread(target=elsewhere)
    other.start()
    held.wait()
    child = os.fork()
    if child == 0:
        objects.clear()
        del group, exchange
        gc.collect()
        os._exit(0)
    done.set()
    other.join()
    assert os.waitpid(child, 0)[1] == 0
    rows, _ = exchange.dispatch(x, np.array([[0, 3], [1, 2], [2, -1]]))
    assert np.array_equal(rows, x)


def test_groups_are_not_pickled():
    import pickle

    with pytest.raises(TypeError, match="belongs to its process"):
        pickle.dumps(made()[0]["group"])
