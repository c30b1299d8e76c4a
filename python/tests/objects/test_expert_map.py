# SPDX-License-Identifier: Apache-2.0
"""Maps of replicated experts: properties of plans and divisions, and an exchange of replicas whose results are those without."""
import pickle

import numpy as np
import pytest

import switchyard as sy

E, W, C = 13, 4, 6


def loads(seed):
    return np.random.default_rng(seed).zipf(1.4, E).clip(1, 500).astype(np.int64)


def test_home_map():
    home = sy.ExpertMap.home(num_experts=E, world=W, slots_per_rank=C)
    assert (home.num_slots, home.slots_per_rank, home.num_experts, home.world) == (W * C, C, E, W)
    for rank in range(W):
        mine = list(range(sy.first_expert(E, W, rank), sy.first_expert(E, W, rank + 1)))
        assert home.expert_of_slot[rank * C:(rank + 1) * C].tolist() == mine + [-1] * (C - len(mine))
    again = sy.ExpertMap(home.expert_of_slot, num_experts=E, world=W)
    assert again == home and hash(again) == hash(home) and again.count_moved(home) == 0
    assert pickle.loads(pickle.dumps(home)) == home
    assert "13 experts, 4 ranks with 6 slots" in repr(home)


@pytest.mark.parametrize("seed", range(20))
def test_plan_and_division(seed):
    home, given = sy.ExpertMap.home(num_experts=E, world=W, slots_per_rank=C), loads(seed)
    planned = home.plan(given, tolerance=0.0)
    assert planned == home.plan(given.copy(), tolerance=0.0)
    slots = planned.expert_of_slot
    divided = planned.divide(given)
    assert divided.of_slot.dtype == divided.of_rank.dtype == np.int64
    for expert in range(E):
        assert divided.of_slot[slots == expert].sum() == given[expert] and (slots == expert).any()
    assert (divided.of_slot[slots < 0] == 0).all()
    assert np.array_equal(divided.of_rank, divided.of_slot.reshape(W, C).sum(1))
    assert divided.of_rank.max() <= home.divide(given).of_rank.max()
    moved = sum(len(set(slots[r * C:(r + 1) * C]) - set(home.expert_of_slot[r * C:(r + 1) * C]) - {-1}) for r in range(W))
    assert home.count_moved(planned) == moved


def test_results_are_those_without_replicas(ranks):
    tokens, topk, hidden = 40, 3, 16
    rng = np.random.default_rng(5)
    chances = loads(1) / loads(1).sum()
    ids = np.stack([np.stack([rng.choice(E, topk, replace=False, p=chances) for _ in range(tokens)]) for _ in range(W)]).astype(np.int32)
    ids[1, 7] = -1
    x = rng.standard_normal((W, tokens, hidden)).astype(np.float32)
    weights = rng.random((W, tokens, topk), np.float32)
    scale = rng.standard_normal(E).astype(np.float32)  # the experts
    routes = np.stack([[(ids[r] == e).sum() for e in range(E)] for r in range(W)])
    planned = sy.ExpertMap.home(num_experts=E, world=W, slots_per_rank=C).plan(routes.sum(0))
    slots = planned.expert_of_slot
    assert (np.bincount(slots[slots >= 0], minlength=E) > 1).any(), "no expert has a replica"

    def call(group, num_experts, topk_ids, expert_of):
        exchange = sy.Exchange(group, dtype="f32", layout="expert_major", hidden=hidden, num_experts=num_experts, topk=topk, max_tokens=tokens)
        rows, handle = exchange.dispatch(x[group.rank], topk_ids, weights[group.rank])
        y, first = rows.copy(), sy.first_expert(num_experts, W, group.rank)
        for i, (end, count) in enumerate(zip(handle.offsets, handle.counts().tokens_per_expert)):
            y[end - count:end] *= scale[expert_of[first + i]] if count else 1
        return exchange.combine(y, handle, order="per_route"), handle.rows

    def rank(group):
        want, _ = call(group, E, ids[group.rank], np.arange(E))
        mine = ids[group.rank].copy()
        planned.replace(mine, routes, rank=group.rank)
        assert np.array_equal(np.where(mine >= 0, slots[mine], -1), ids[group.rank])
        got, rows = call(group, planned.num_slots, mine, slots)
        assert np.array_equal(got, want)
        assert rows == planned.divide(routes.sum(0)).of_rank[group.rank]

    ranks(rank, W, heap_bytes=64 << 20)


def test_errors():
    home = sy.ExpertMap.home(num_experts=E, world=W, slots_per_rank=C)
    for text, make in [
            ("world = 5", lambda: sy.ExpertMap(home.expert_of_slot, num_experts=E, world=5)),
            ("expert 0 has no slot|no slot", lambda: sy.ExpertMap(np.maximum(home.expert_of_slot, 1), num_experts=E, world=W)),
            ("slots_per_rank = 3", lambda: sy.ExpertMap.home(num_experts=E, world=W, slots_per_rank=3)),
            ("routes_per_expert", lambda: home.plan(np.ones(E + 1, np.int64))),
            (r"\[2\] is -1", lambda: home.divide(np.array([1, 1, -1] + [1] * (E - 3)))),
            ("tolerance", lambda: home.plan(loads(0), tolerance=-1.0)),
            ("source = 4", lambda: home.replace(np.zeros((1, 1), np.int32), np.ones((W, E), np.int64), rank=4)),
            ("more routes|99", lambda: home.replace(np.full((1, 1), 99, np.int32), np.ones((W, E), np.int64), rank=0)),
    ]:
        with pytest.raises(sy.InvalidArgument, match=text):
            make()
    with pytest.raises(sy.SwitchyardError):
        home.replace(np.zeros((1, 1), np.int64), np.ones((W, E), np.int64), rank=0)
