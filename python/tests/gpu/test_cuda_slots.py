# SPDX-License-Identifier: Apache-2.0
"""Replicated experts with torch on 2 GPUs: layers and low-latency calls that select slots, also in graphs, weights that move in the
background, counts of routes, and rates of moves. Results are bitwise those without replicas. Ranks are processes."""
import pytest

import switchyard as sy

torch = pytest.importorskip("torch")

from test_cuda import over_ranks  # noqa: E402

E, W, C, K, H, I, T = 8, 2, 6, 2, 256, 128, 64
SHAPE = {"hidden": H, "intermediate": I, "topk": K, "max_tokens": T, "order": "per_route"}


@pytest.fixture(autouse=True)
def gpus():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")


def weights_of(experts):
    """The weights of these experts; -1: zeros."""
    made = []
    for shape in ((2 * I, H), (H, I)):
        random = torch.Generator().manual_seed(5)
        every = (torch.randn((E, *shape), generator=random) / 16).bfloat16()
        made.append(torch.stack([every[e] if e >= 0 else torch.zeros_like(every[0]) for e in experts]).cuda())
    return made


def inputs_of(rank, hot):
    """Tokens, ids (half of them `hot`) and weights."""
    random = torch.Generator().manual_seed(rank)
    ids = torch.rand((T, E), generator=random).argsort(1)[:, :K].int()
    ids[::2] = torch.tensor([hot, (hot + 1) % E])
    return (torch.randn((T, H), generator=random).bfloat16().cuda(), ids.cuda(), torch.rand((T, K), generator=random).cuda())


def mine(expert_map, rank):
    return [int(e) for e in expert_map.expert_of_slot[rank * C:(rank + 1) * C]]


def home_map():
    return sy.ExpertMap.home(num_experts=E, world=W, slots_per_rank=C)


def without_replicas(group, given, **options):
    with sy.MoeLayer(group, *weights_of(group.experts_of(E)), num_experts=E, **SHAPE, **options) as layer:
        return layer(*given).clone()


#: Layers whose calls select slots.
LAYERS = {"low_latency": {"exchange": "low_latency"}, "normal": {"exchange": "normal", "form": "separate"},
          "fused": {"exchange": "normal", "form": "fused"}}


def _selecting(group, kind):
    given, home, options = inputs_of(group.rank, 1), home_map(), LAYERS[kind]
    want = without_replicas(group, given, **options)
    maps = [home, home.plan(torch.bincount(inputs_of(0, 1)[1].flatten().cpu().long(), minlength=E).numpy(), tolerance=0.0)]
    assert maps[0] != maps[1]
    selector = sy.SlotSelector(group, home)
    w13, w2 = weights_of(mine(home, group.rank))
    layer = sy.MoeLayer(group, w13, w2, num_experts=home.num_slots, **SHAPE, **options)
    out = torch.empty_like(given[0])
    layer(*given, out=out, selector=selector)
    assert torch.equal(out, want)
    torch.cuda.synchronize()
    group.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(*given, out=out, selector=selector)
    for step in range(5):  # a replay uses the map in force
        if step:
            before, after = maps[(step + 1) % 2], maps[step % 2]
            sy.move_weights(group, before, after, w13, w2, staging_bytes=1 << 20)
            selector.set_map(after)
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, want), step
        group.barrier()
    counts = torch.bincount(given[1].flatten().cpu().long(), minlength=E)
    assert selector.gather_routes()[group.rank].tolist() == (6 * counts).tolist()
    if kind == "low_latency":
        _decode(group, given, home, selector)
    torch.cuda.synchronize()
    group.barrier()
    del graph


def _decode(group, given, home, selector):
    ll = sy.LowLatency(group, hidden=H, num_experts=home.num_slots, topk=K, max_tokens=T)
    for _ in range(3):  # the third call takes the short path
        received = ll.dispatch(given[0], given[1], selector=selector)
    first = received.rows.clone()
    assert torch.equal(ll.dispatch(given[0], selector.select(given[1])).rows, first)
    flat = ll.all_to_all(*given, selector=selector)
    assert torch.equal(flat, ll.all_to_all(given[0], selector.select(given[1]), given[2]))


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_that_select(kind):
    config = {"num_experts": W * C, **LAYERS[kind], **SHAPE}
    over_ranks(_selecting, 3 * sy.MoeLayer.heap_bytes(W, backend="cuda", **config) + (8 << 20), kind)


def _background(group, form):
    home, options = home_map(), {"exchange": "normal", "form": form}
    w13, w2 = weights_of(mine(home, group.rank))
    layer = sy.MoeLayer(group, w13, w2, num_experts=home.num_slots, **SHAPE, **options)
    selector, weights = sy.SlotSelector(group, home), sy.SlotWeights(group, w13, w2)
    assert weights.ready and weights.event is None
    fetched = []
    for hot in (1, 5, 2):  # two experts of one rank; the replicas of the first two calls balance the third
        given = inputs_of(group.rank, hot)
        want = without_replicas(group, given, **options)
        slots, report = selector.balance(given[1], weights, tile=1, link_bytes_per_s=1e15, seconds_per_move=0.0)
        fetched.append(report.fetched > 0)
        assert weights.event is not None
        assert torch.equal(layer(given[0], slots, given[2], weights_ready=weights), want)
    assert fetched == [True, True, False]
    before = selector.expert_map
    after = before.plan_replicas(torch.arange(1, E + 1).numpy() ** 3, tolerance=0.0)
    assert after != before
    selector.set_map(before.vacate(after))
    received = weights.move(selector.expert_map, after)
    assert torch.equal(layer(given[0], selector.select(given[1]), given[2]), want)  # the old map serves
    weights.wait()
    selector.set_map(after)
    assert torch.equal(layer(given[0], selector.select(given[1]), given[2]), want)
    torch.cuda.synchronize()
    assert weights.ready and received % (w13[0].nbytes + w2[0].nbytes) == 0
    held = mine(after, group.rank)
    for array, whole in zip((w13, w2), weights_of(held)):
        assert all(torch.equal(array[s], whole[s]) for s in range(C) if held[s] >= 0)
    group.barrier()
    with pytest.raises(sy.InvalidArgument, match="only empty slots"):
        weights.move(after, sy.ExpertMap(after.expert_of_slot[::-1].copy(), num_experts=E, world=W))
    group.barrier()
    weights.close()


@pytest.mark.parametrize("form", ["separate", "fused"])
def test_weights_move_in_the_background(form):
    config = {"num_experts": W * C, "exchange": "normal", "form": form, **SHAPE}
    over_ranks(_background, 3 * sy.MoeLayer.heap_bytes(W, backend="cuda", **config) + (8 << 20), form)


def _counting(group):
    x, ids, _ = inputs_of(group.rank, 1)
    exchange = sy.Exchange(group, num_experts=E, topk=K, hidden=H, max_tokens=T, count_routes=True)
    counter = sy.RouteCounter(group, num_experts=E)
    rows, handle = exchange.dispatch(x, ids)
    exchange.dispatch(x, handle=handle)  # repeats a routing, so it is not counted
    del rows, handle
    counter.count(ids.long())
    torch.cuda.synchronize()
    group.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counter.count(ids)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    once = torch.stack([torch.bincount(inputs_of(r, 1)[1].flatten().cpu().long(), minlength=E) for r in range(W)])
    load, counted = exchange.load(), counter.load()
    assert load.of_expert.tolist() == once.tolist() and counted.of_expert.tolist() == (4 * once).tolist()
    assert load.of_rank.tolist() == once.sum(0).reshape(W, E // W).sum(1).tolist()
    rates = sy.measure_step_rates(group, seconds_per_row=1e-6 * (1 + group.rank), staging_bytes=1 << 20)
    assert rates.seconds_per_row == 1e-6 * W
    assert len(set(group.all_gather(repr(tuple(rates)).ljust(100).encode()))) == 1
    group.barrier()
    del graph


def test_counts_and_rates():
    shape = {"num_experts": E, "topk": K, "hidden": H, "max_tokens": T}
    over_ranks(_counting, sy.Exchange.heap_bytes(W, backend="cuda", **shape) + (4 << 20))
