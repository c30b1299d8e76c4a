# SPDX-License-Identifier: Apache-2.0
"""Replicated experts in every mode: with ids replaced by slots, results are bitwise those without replicas, for several maps."""
import numpy as np
import pytest

import oracle
import switchyard as sy
from switchyard._abi import ffi as _ffi

E, W, C, K, H, I, T = 7, 3, 5, 3, 32, 16, 150
REFUSED = np.iinfo(np.int32).min  # an id that is not an expert becomes the slot REFUSED + id
SHAPE = {"hidden": H, "topk": K, "max_tokens": T}
RNG = np.random.default_rng(11)
CHANCES = RNG.dirichlet(np.ones(E) * 0.4)
IDS = np.stack([np.stack([RNG.choice(E, K, replace=False, p=CHANCES * 0.9 + 0.1 / E) for _ in range(T)]) for _ in range(W)]).astype(np.int32)
IDS[1, 7] = -1
X, WEIGHTS = RNG.standard_normal((W, T, H)).astype(np.float32), RNG.random((W, T, K), np.float32)
SCALE = RNG.standard_normal(E).astype(np.float32)
W13, W2 = oracle.to_bf16(RNG.standard_normal((E, 2 * I, H)) / 6), oracle.to_bf16(RNG.standard_normal((E, H, I)) / 4)
TOKENS = (T, 0, 60)  # of each rank


def normal(group, num_experts, expert_of, layout):
    """Returns a function that runs a layer with experts that scale rows."""
    exchange = sy.Exchange(group, dtype="f32", layout=layout, num_experts=num_experts, **SHAPE)

    def run(x, ids, weights):
        rows, handle = exchange.dispatch(x, ids, weights)
        y, first = np.zeros_like(rows), sy.first_expert(num_experts, W, group.rank)
        if layout == "expert_major":
            for i, (end, count) in enumerate(zip(handle.offsets, handle.counts().tokens_per_expert)):
                y[end - count:end] = rows[end - count:end] * (SCALE[expert_of[first + i]] if count else 1)
            return exchange.combine(y, handle, order="per_route")
        for row, (of_row, factors) in enumerate(zip(handle.topk_ids, handle.topk_weights)):
            for slot, factor in zip(of_row, factors):
                if slot >= 0:
                    y[row] += rows[row] * SCALE[expert_of[first + slot]] * factor
        return exchange.combine(y, handle)

    return run


def low_latency(group, num_experts, expert_of, flat):
    ll = sy.LowLatency(group, dtype="f32", num_experts=num_experts, **SHAPE)
    mine = np.array([SCALE[max(expert_of[e], 0)] for e in group.experts_of(num_experts)], np.float32)

    def run(x, ids, weights, **selector):
        if flat:
            return ll.all_to_all(x, ids, weights, expert_scale=mine, **selector)
        received = ll.dispatch(x, ids, weights, **selector)
        return ll.combine(received.x * mine[:, None, None], received, order="per_route")

    return run


def layer(group, num_experts, expert_of, **options):
    mine = [max(expert_of[e], 0) for e in group.experts_of(num_experts)]
    moe = sy.MoeLayer(group, W13[mine], W2[mine], num_experts=num_experts, intermediate=I, order="per_route", **SHAPE, **options)
    return lambda x, ids, weights, **selector: moe(oracle.to_bf16(x), ids, weights, **selector)


MODES = {
    "expert_major": (normal, {"layout": "expert_major"}), "low_latency": (low_latency, {"flat": False}), "flat": (low_latency, {"flat": True}),
    "layer_normal": (layer, {"exchange": "normal", "form": "separate"}), "layer_low_latency": (layer, {"exchange": "low_latency", "form": "separate"}),
    "layer_fused": (layer, {"exchange": "normal", "form": "fused"}), "rank_major": (normal, {"layout": "rank_major"}),
}


#: Modes whose calls take a selector.
SELECTING = ("low_latency", "flat", "layer_normal", "layer_low_latency", "layer_fused")


def maps_and_routes():
    """Yields maps with the routes for which they were planned; the last one has random replicas, also two on one rank."""
    home = sy.ExpertMap.home(num_experts=E, world=W, slots_per_rank=C)
    routes = np.stack([[(IDS[r, :TOKENS[r]] == e).sum() for e in range(E)] for r in range(W)])
    planned = home.plan(routes.sum(0), tolerance=0.0)
    assert (np.bincount(planned.expert_of_slot[planned.expert_of_slot >= 0], minlength=E) > 1).any(), "no expert has a replica"
    slots = np.random.default_rng(3).permutation(np.r_[np.arange(E), np.random.default_rng(4).integers(-1, E, W * C - E)]).astype(np.int32)
    return [(planned, routes), (home, None), (sy.ExpertMap(slots, num_experts=E, world=W), None)]


def available(mode):
    """Returns the constructor of an object and its options. Skips the test without the library of layers."""
    if MODES[mode][0] is layer:
        try:
            _ffi.layer_library()
        except sy.LibraryNotFound as error:
            pytest.skip(str(error))
    return MODES[mode]


@pytest.mark.parametrize("mode", MODES)
def test_results_are_those_without_replicas(ranks, mode):
    make, options = available(mode)
    maps = maps_and_routes()

    def rank(group):
        r, tokens = group.rank, TOKENS[group.rank]
        given = X[r, :tokens], IDS[r, :tokens], WEIGHTS[r, :tokens]
        want = make(group, E, np.arange(E), **options)(*given)
        selector = sy.SlotSelector(group, *maps[0])
        for number, (expert_map, routes) in enumerate(maps):
            if number:
                selector.set_map(expert_map, routes)
            slots = selector.select(given[1])
            assert np.array_equal(np.where(slots >= 0, expert_map.expert_of_slot[slots], -1), given[1])
            run = make(group, expert_map.num_slots, expert_map.expert_of_slot, **options)
            got = run(given[0], slots, given[2])
            if mode in SELECTING:
                assert np.array_equal(run(*given, selector=selector), got), number
            if mode == "rank_major":  # a rank sums the rows of its experts, so the rounding depends on the map
                np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
            else:
                assert np.array_equal(got, want), number
        assert (selector.version, selector.expert_map) == (3, maps[-1][0])
        calls = 6 if mode in SELECTING else 3
        counted = np.stack([[calls * (IDS[each, :TOKENS[each]] == e).sum() for e in range(E)] for each in range(W)])
        assert np.array_equal(selector.gather_routes(), counted)
        assert not selector.gather_routes().any()

    ranks(rank, W, heap_bytes=256 << 20)


@pytest.mark.parametrize("mode", MODES)
def test_errors_name_the_id_that_was_passed(ranks, mode):
    """Not its slot, also if slots have that number."""
    make, options = available(mode)
    home = sy.ExpertMap.home(num_experts=E, world=W, slots_per_rank=C)

    def rank(group):
        run, ids = make(group, home.num_slots, home.expert_of_slot, **options), IDS[group.rank, :4].copy()
        if group.rank == 1:
            ids[2, 1] = E + 1
        selector = sy.SlotSelector(group, home)
        given, more = (ids, {"selector": selector}) if mode in SELECTING else (selector.select(ids), {})
        group.barrier()  # all ranks have selected before a rank fails
        with pytest.raises(sy.SwitchyardError) as error:
            run(X[group.rank, :4], given, WEIGHTS[group.rank, :4], **more)
        if group.rank == 1:
            assert isinstance(error.value, sy.InvalidArgument)
            named = f"topk_ids[2][1] = {REFUSED + E + 1} (token 2, k = 1; from a SlotSelector: id {E + 1}, which is no expert of its map): must be a slot in [0, "
            assert named in str(error.value)

    ranks(rank, W, heap_bytes=256 << 20)


@pytest.mark.parametrize("calls", ["dispatch", "dispatch_async", "all_to_all"])
def test_selectors_that_do_not_fit(ranks, calls):
    home = sy.ExpertMap.home(num_experts=E, world=1, slots_per_rank=E + 1)

    def rank(group, given, error, text):
        ll = sy.LowLatency(group, dtype="f32", num_experts=E, **SHAPE)
        selector = sy.SlotSelector(group, home)
        with pytest.raises(error, match=text):
            getattr(ll, calls)(X[0], IDS[0], selector=home if given == "map" else selector)

    for more in (("map", sy.InvalidType, "selector"), ("selector", sy.InvalidArgument, "selector has 8 slots: must be num_experts, 7")):
        ranks(lambda group: rank(group, *more), 1, heap_bytes=256 << 20)


#: Calls that take a selector.
CALLS = ("dispatch", "dispatch_async", "all_to_all", "layer_normal", "layer_low_latency", "layer_fused")


def make_call(group, call, home):
    """Returns a function that makes the call with the arguments of one rank."""
    if call in MODES:
        make, options = available(call)
        return make(group, home.num_slots, home.expert_of_slot, **options)
    ll = sy.LowLatency(group, dtype="f32", num_experts=home.num_slots, **SHAPE)

    def run(*args, **more):
        result = getattr(ll, call)(*args, **more)
        return result.wait() if call == "dispatch_async" else result

    return run


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("selecting", [0, 1])
def test_selectors_of_some_ranks(ranks, call, selecting):
    """All ranks raise Mismatch, which says which rank has a selector."""
    home = sy.ExpertMap.home(num_experts=E, world=2, slots_per_rank=C)

    def rank(group):
        selector, x, ids = sy.SlotSelector(group, home), X[group.rank, :8], IDS[group.rank, :8]
        given = {"selector": selector} if group.rank == selecting else {}
        run = make_call(group, call, home)
        with pytest.raises(sy.Mismatch) as error:
            run(x, ids, WEIGHTS[group.rank, :8], **given)
        has, lacks = f"given on rank {selecting}", f"None on rank {1 - selecting}"
        assert any(f"calls: selector = {text};" in str(error.value) for text in (f"{has} and {lacks}", f"{lacks} and {has}")), str(error.value)

    ranks(rank, 2, heap_bytes=256 << 20)


@pytest.mark.parametrize("call", CALLS)
def test_maps_of_different_versions(ranks, call):
    """All ranks raise Mismatch, which says the versions."""
    home = sy.ExpertMap.home(num_experts=E, world=2, slots_per_rank=C)

    def rank(group):
        one, two = sy.SlotSelector(group, home), sy.SlotSelector(group, home)
        two.set_map(home)
        run, arguments = make_call(group, call, home), (X[group.rank, :8], IDS[group.rank, :8], WEIGHTS[group.rank, :8])
        run(*arguments, selector=two)
        with pytest.raises(sy.Mismatch) as error:
            run(*arguments, selector=(one, two)[group.rank])
        name = "map of selector (its version + 3 * the selector's number, modulo 8)"
        texts = ("1 on rank 0 and 5 on rank 1", "5 on rank 1 and 1 on rank 0")
        assert any(f"calls: {name} = {text};" in str(error.value) for text in texts), str(error.value)

    ranks(rank, 2, heap_bytes=256 << 20)


@pytest.mark.parametrize("mode", ["layer_normal", "layer_low_latency", "layer_fused"])
def test_layers_with_a_selector_that_does_not_fit(ranks, mode):
    """The error ends the call of the other rank, whose arguments are valid."""
    make, options = available(mode)
    home, small = (sy.ExpertMap.home(num_experts=E, world=2, slots_per_rank=slots) for slots in (C, C - 1))

    def rank(group):
        run = make(group, home.num_slots, home.expert_of_slot, **options)
        selectors = sy.SlotSelector(group, small), sy.SlotSelector(group, home)
        expected = [(sy.InvalidArgument, "selector has 8 slots: must be num_experts, 10"), (sy.PeerFailed, "rank 0")][group.rank]
        with pytest.raises(expected[0], match=expected[1]):
            run(X[group.rank], IDS[group.rank], WEIGHTS[group.rank], selector=selectors[group.rank])

    ranks(rank, 2, heap_bytes=256 << 20)


def test_weights_move_in_the_background(ranks):
    """A map of replicas is loaded while the vacated map serves; then calls use it. balance() fetches the weights it plans."""
    available("layer_normal")
    home = sy.ExpertMap.home(num_experts=E, world=W, slots_per_rank=C)
    loads = [np.bincount(np.where(IDS >= 0, (IDS + shift) % E, 0).ravel(), minlength=E) for shift in (0, 2)]

    def rank(group):
        r, tokens = group.rank, TOKENS[group.rank]
        held = [max(e, 0) for e in home.expert_of_slot[r * C:(r + 1) * C]]
        w13, w2 = W13[held], W2[held]
        given = X[r, :tokens], IDS[r, :tokens], WEIGHTS[r, :tokens]
        want = layer(group, E, np.arange(E), exchange="normal", form="separate")(*given)
        moe = sy.MoeLayer(group, w13, w2, num_experts=home.num_slots, intermediate=I, order="per_route", exchange="normal", storage="view", **SHAPE)
        selector, weights = sy.SlotSelector(group, home), sy.SlotWeights(group, w13, w2, staging_bytes=1 << 20)
        assert weights.ready and weights.event is None
        before, x = home, oracle.to_bf16(given[0])
        for load in loads:
            after = before.plan_replicas(load, tolerance=0.0)
            assert before.count_moved(after) > 0
            selector.set_map(before.vacate(after))
            received = weights.move(selector.expert_map, after)
            assert np.array_equal(moe(x, selector.select(given[1]), given[2]), want)
            weights.wait()
            selector.set_map(after)
            assert np.array_equal(moe(x, selector.select(given[1]), given[2]), want)
            mine = after.expert_of_slot[r * C:(r + 1) * C]
            assert np.array_equal(w13[mine >= 0], W13[mine[mine >= 0]]) and np.array_equal(w2[mine >= 0], W2[mine[mine >= 0]])
            assert received == (W13[0].nbytes + W2[0].nbytes) * len(set(mine) - set(before.vacate(after).expert_of_slot[r * C:(r + 1) * C]) - {-1})
            before = after
        slots, report = selector.balance(given[1], weights, tile=1, seconds_per_row=1, seconds_per_move=0)
        assert report.max_after <= report.mean + 1
        assert np.array_equal(moe(x, slots, given[2], weights_ready=weights), want)
        with pytest.raises(sy.InvalidArgument, match="only empty slots"):
            weights.move(selector.expert_map, sy.ExpertMap(np.roll(selector.expert_map.expert_of_slot, 1), num_experts=E, world=W))
        group.barrier()
        weights.close()
        with pytest.raises(sy.InvalidArgument, match="slot weights"):
            weights.wait()

    ranks(rank, W, heap_bytes=256 << 20)


def test_types_and_memory(ranks):
    expert_map = sy.ExpertMap(np.array([0, 1, 2, 0], np.int32), num_experts=3, world=1)

    def rank(group):
        with sy.SlotSelector(group, expert_map) as selector:
            wide = np.array([[2, -1], [5, 1]])
            out = selector.select(wide)
            assert out.dtype == np.int64 and out.tolist() == [[2, -1], [REFUSED + 5, 1]]
            narrow = wide.astype(np.int32)
            assert selector.select(narrow, out=narrow) is narrow and narrow.tolist() == [[2, -1], [REFUSED + 5, 1]]
            with pytest.raises(sy.InvalidArgument, match="out is int64|out is int32"):
                selector.select(wide, out=narrow)
            with pytest.raises(sy.InvalidArgument, match="out .* shape"):
                selector.select(wide, out=np.zeros((2, 3), np.int64))
        with pytest.raises(sy.InvalidArgument, match="the selector is closed"):
            selector.select(narrow)

    ranks(rank, 1)


def test_ranks_that_disagree(ranks):
    home = sy.ExpertMap.home(num_experts=4, world=2, slots_per_rank=3)
    other = home.plan(np.array([9, 1, 1, 1]))
    assert other != home

    def rank(group):
        with pytest.raises(sy.Mismatch, match="expert_of_slot"):
            sy.SlotSelector(group, home if group.rank else other)
        selector = sy.SlotSelector(group, home)
        with pytest.raises(sy.Mismatch, match="expert_of_slot"):
            selector.set_map(home if group.rank else other)
        assert selector.expert_map == home and selector.version == 1
        selector.set_map(other)
        assert selector.expert_map == other and selector.version == 2

    ranks(rank, 2)


def test_weights_move_with_the_map(ranks):
    """Each array has its own type and shape; the bytes of a slot depend on its expert."""
    home, shapes = sy.ExpertMap.home(num_experts=E, world=W, slots_per_rank=C), [((5, 3), np.float32), ((7,), np.uint8), ((2, 4, 3), np.uint16), ((), np.int64)]
    rng = np.random.default_rng(2)
    of_expert = [rng.integers(0, 200, (E, *shape)).astype(dtype) for shape, dtype in shapes]
    after = [each for each, _ in maps_and_routes() if each != home]

    def rank(group):
        mine = slice(group.rank * C, (group.rank + 1) * C)
        held = home.expert_of_slot[mine].copy()
        arrays = [np.where((held >= 0).reshape(-1, *[1] * (each.ndim - 1)), each[held], 0).astype(each.dtype) for each in of_expert]
        before = home
        for to in [*after, home]:
            received = sy.move_weights(group, before, to, *arrays, staging_bytes=3 << 10)
            new = set(to.expert_of_slot[mine]) - set(before.expert_of_slot[mine]) - {-1}
            slots = sum((each not in before.expert_of_slot[mine]) for each, old in zip(to.expert_of_slot[mine], before.expert_of_slot[mine]) if each >= 0 and each != old)
            assert received == slots * sum(each[0].nbytes for each in of_expert) and (slots > 0) == bool(new)
            held = np.where(to.expert_of_slot[mine] >= 0, to.expert_of_slot[mine], held)
            for each, whole in zip(arrays, of_expert):
                assert np.array_equal(each[held >= 0], whole[held[held >= 0]])
            before = to
        assert sy.move_weights(group, home, home, *arrays) == 0
        with pytest.raises(sy.InvalidArgument, match=r"arrays\[1\] has the shape"):
            sy.move_weights(group, home, after[0], arrays[0], arrays[1][:2])
        with pytest.raises(sy.InvalidArgument, match=r"arrays\[0\]"):
            sy.move_weights(group, home, after[0], [1, 2])

    ranks(rank, W, heap_bytes=80 << 20)


def test_one_rank_makes_a_mistake(ranks):
    """All ranks raise its error at once, and the group stays usable."""
    home = sy.ExpertMap.home(num_experts=4, world=2, slots_per_rank=3)

    def rank(group):
        selector, weights = sy.SlotSelector(group, home), np.zeros((3, 5), np.float32)
        for mistake in ({"staging_bytes": -1}, {"before": None}):
            with pytest.raises(sy.SwitchyardError, match="|".join(mistake)):
                sy.move_weights(**{"group": group, "before": home, "after": home, **(mistake if group.rank else {})})
        with pytest.raises(sy.SwitchyardError, match="arrays"):
            sy.move_weights(group, home, home, weights[:2] if group.rank else weights)
        with pytest.raises(sy.InvalidArgument, match=r"arrays\[1\]|arrays\[0\]"):
            sy.move_weights(group, home, home, weights, weights)
        with pytest.raises(sy.SwitchyardError, match="routes"):
            selector.set_map(home, np.ones((2, 3 if group.rank else 4), np.int64))
        assert sy.move_weights(group, home, home, weights) == 0
        selector.set_map(home)
        assert selector.version == 2

    ranks(rank, 2, timeout=600, rendezvous_timeout=600)


@pytest.mark.parametrize("mode", ["expert_major", "low_latency", "layer_normal", "layer_fused"])
def test_a_call_is_balanced_by_its_own_routes(ranks, mode):
    """The results of balanced calls are bitwise those without replicas; the ranks are level with enough spare slots."""
    make, options = available(mode)
    home = sy.ExpertMap.home(num_experts=E, world=W, slots_per_rank=C)
    other_ids = np.where(IDS >= 0, (IDS + 3) % E, IDS)

    def rank(group):
        r, tokens = group.rank, TOKENS[group.rank]
        held = [max(e, 0) for e in home.expert_of_slot[r * C:(r + 1) * C]]
        w13, w2, scale = W13[held], W2[held], SCALE[held]
        selector = sy.SlotSelector(group, home)
        for number, ids in enumerate((IDS[r, :tokens], other_ids[r, :tokens], other_ids[r, :tokens].astype(np.int64))):
            want = make(group, E, np.arange(E), **options)(X[r, :tokens], ids, WEIGHTS[r, :tokens])
            before = selector.expert_map
            slots, report = selector.balance(ids, w13, w2, scale, tile=1, seconds_per_row=1, seconds_per_move=0, staging_bytes=1 << 20)
            after = selector.expert_map
            assert slots.dtype == ids.dtype and np.array_equal(np.where(slots >= 0, after.expert_of_slot[slots], -1), ids)
            rows = np.frombuffer(b"".join(group.all_gather(np.bincount(slots[slots >= 0] // C, minlength=W).tobytes())), np.int64)
            assert report.max_after == rows.reshape(W, W).sum(0).max() <= report.mean + 1 and report.fetched == before.count_moved(after)
            assert (report.fetched > 0, report.max_after < report.max_before) == ((number < 2,) * 2)
            mine = after.expert_of_slot[r * C:(r + 1) * C]
            assert all(np.array_equal(each[mine >= 0], whole[mine[mine >= 0]]) for each, whole in ((w13, W13), (w2, W2), (scale, SCALE)))
            got = make(group, after.num_slots, after.expert_of_slot, **options)(X[r, :tokens], slots, WEIGHTS[r, :tokens])
            assert np.array_equal(got, want), number
        assert selector.version == 3
        with pytest.raises(sy.SwitchyardError, match="tile"):
            selector.balance(ids, w13, w2, scale, tile=-1 if r else 1)
        both = np.full((max(tokens, C), ids.shape[1]), -1, ids.dtype)
        with pytest.raises(sy.SwitchyardError, match=r"arrays\[0\] shares memory with topk_ids"):
            selector.balance(both[:tokens], both[:C] if r else w13, w2, scale)
        with pytest.raises(sy.Mismatch, match="seconds_per_row"):
            selector.balance(ids, w13, w2, scale, seconds_per_row=1.0 + r)
        with pytest.raises(sy.SwitchyardError, match=r"arrays\[1\]"):
            selector.balance(ids, w13, w2[1:] if r else w2, scale)
        assert selector.balance(ids, w13, w2, scale, link_bytes_per_s=1e-3)[1].fetched == 0 and selector.expert_map == after

    ranks(rank, W, heap_bytes=256 << 20)
