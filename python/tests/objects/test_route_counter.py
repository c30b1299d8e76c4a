# SPDX-License-Identifier: Apache-2.0
"""Counts of routes by expert and by rank, of dispatches with and without a SlotSelector."""
import numpy as np
import pytest

import switchyard as sy

E, W, C, K, H = 7, 3, 4, 2, 32
CALLS = 5
IDS = np.random.default_rng(3).integers(-1, E, (CALLS, W, 40, K))
TOKENS = (40, 0, 17)  # of each rank
X = np.ones((40, H), np.float32)


def routes_of(calls):
    """[W, E]"""
    counts = np.zeros((W, E), np.int64)
    for call in range(calls):
        for rank in range(W):
            ids = IDS[call, rank, :TOKENS[rank]]
            counts[rank] += np.bincount(ids[ids >= 0], minlength=E)
    return counts


@pytest.mark.parametrize("layout", ["rank_major", "expert_major"])
def test_an_exchange_counts_its_dispatches(ranks, layout):
    owner = [next(r for r in range(W) if e < sy.first_expert(E, W, r + 1)) for e in range(E)]

    def body(group):
        exchange = sy.Exchange(group, num_experts=E, topk=K, hidden=H, max_tokens=40, dtype="f32", layout=layout, count_routes=True)
        for call in range(CALLS):
            ids = IDS[call, group.rank, :TOKENS[group.rank]].astype(np.int32 if call % 2 else np.int64)
            rows, handle = exchange.dispatch(X[:len(ids)], ids)
            exchange.dispatch(X[:len(ids)], handle=handle)  # repeats a routing, so it is not counted
            del rows, handle
            load, expected = exchange.load(), routes_of(call + 1)
            np.testing.assert_array_equal(load.of_expert, expected)
            np.testing.assert_array_equal(load.of_rank, [expected[:, [o == r for o in owner]].sum() for r in range(W)])

    ranks(body, W)


def test_an_exchange_of_slots_counts_experts_and_ranks(ranks):
    home = sy.ExpertMap.home(num_experts=E, world=W, slots_per_rank=C)

    def body(group):
        exchange = sy.Exchange(group, num_experts=W * C, topk=K, hidden=H, max_tokens=40, dtype="f32", count_routes=True)
        selector, to_rank = sy.SlotSelector(group, home), np.zeros(W, np.int64)
        for call in range(CALLS):
            slots = selector.select(IDS[call, group.rank, :TOKENS[group.rank]])
            to_rank += np.bincount(slots[slots >= 0] // C, minlength=W)
            exchange.dispatch(X[:len(slots)], slots)
            if call == 2:
                routes = selector.gather_routes()
                selector.set_map(home.plan(routes.sum(0)), routes)
        load = exchange.load(selector)
        np.testing.assert_array_equal(load.of_expert, routes_of(CALLS))
        all_ranks = np.frombuffer(b"".join(group.all_gather(to_rank.tobytes())), np.int64).reshape(W, W)
        np.testing.assert_array_equal(load.of_rank, all_ranks.sum(0))
        assert (exchange.load().of_expert.shape, load.of_expert.shape) == ((W, W * C), (W, E))

    ranks(body, W)


def test_a_counter_counts_other_calls(ranks):
    def body(group):
        counter = sy.RouteCounter(group, num_experts=E)
        for call in range(CALLS):
            counter.count(IDS[call, group.rank, :TOKENS[group.rank]])
        np.testing.assert_array_equal(counter.load().of_expert, routes_of(CALLS))
        with pytest.raises(sy.InvalidArgument, match="topk_ids"):
            counter.count(np.zeros((2, K), np.float32))
        counter.close()
        counter.close()

    ranks(body, W)


@pytest.mark.parametrize("wrong", ["text", "closed"])
def test_a_selector_that_one_rank_must_not_pass(ranks, wrong):
    """All ranks raise the error, and the group stays usable."""
    def body(group):
        counter = sy.RouteCounter(group, num_experts=E)
        counter.count(IDS[0, group.rank, :TOKENS[group.rank]])
        selector = sy.SlotSelector(group, sy.ExpertMap.home(num_experts=E, world=W, slots_per_rank=E))
        if wrong == "closed":
            selector.close()
        with pytest.raises(sy.SwitchyardError) as error:
            counter.load(None if group.rank > 0 else selector if wrong == "closed" else "text")
        assert "selector" in str(error.value) and not isinstance(error.value, sy.PeerFailed)
        np.testing.assert_array_equal(counter.load().of_expert, routes_of(1))

    ranks(body, W)


def test_an_exchange_that_counts_nothing(ranks):
    def body(group):
        with pytest.raises(sy.InvalidArgument, match="count_routes=True"):
            sy.Exchange(group, num_experts=E, topk=K, hidden=H, max_tokens=4).load()

    ranks(body, 1)


def test_a_dispatch_that_fails_is_not_counted(ranks):
    def body(group):
        exchange = sy.Exchange(group, num_experts=2, topk=1, hidden=H, max_tokens=8, dtype="f32", count_routes=True)
        ids = np.zeros((8, 1), np.int32)
        with pytest.raises(sy.CapacityExceeded):
            exchange.dispatch(X[:8], ids, size="capacity", capacity=4, overflow="fail")
        exchange.dispatch(X[:8], ids)
        np.testing.assert_array_equal(exchange.load().of_expert, [[8, 0], [8, 0]])

    ranks(body, 2)
