# SPDX-License-Identifier: Apache-2.0
"""torch.compile(fullgraph=True) over dispatch and combine: results and gradients equal those without it."""
import gc
import shutil
import weakref

import numpy as np
import pytest

import switchyard as sy
from switchyard import run_ranks

torch = pytest.importorskip("torch")
from torch.utils.checkpoint import checkpoint  # noqa: E402

EXPERTS, TOPK, HIDDEN = 5, 2, 8
SHAPE = {"num_experts": EXPERTS, "topk": TOPK, "hidden": HIDDEN, "max_tokens": 8}
LAYOUTS = ["rank_major", "expert_major"]
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler"))]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs_of(tokens, seed, hidden=HIDDEN):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, EXPERTS, (tokens, TOPK), generator=generator)
    return (torch.randn(tokens, hidden, generator=generator).requires_grad_(), ids,
            torch.rand(tokens, TOPK, generator=generator).requires_grad_())


def layer_of(exchange, size):
    """A layer whose experts scale rows by properties of the handle."""

    def layer(x, ids, weights):
        rows, handle = exchange.dispatch(x * 2, ids, weights, size=size)
        if exchange.layout == "expert_major":
            y = torch.relu(rows) * handle.offsets.sum() + (handle.row_source >= 0)[:, None]
        else:
            y = torch.relu(rows) * handle.topk_weights.sum(1, keepdim=True) + (handle.topk_ids >= 0).sum(1, keepdim=True)
        return torch.tanh(exchange.combine(y, handle)) + handle.tokens_per_expert.sum()

    return layer


def results(function, x, ids, weights):
    out = function(x, ids, weights)
    return (out.detach(), *torch.autograd.grad(out.square().sum(), (x, weights)))


@pytest.mark.parametrize("size", ["exact", "worst_case"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer(backend, layout, size):
    """With varying numbers of tokens, including none."""
    group = sy.Group.threads(1, 1 << 22)[0]
    exchange = sy.Exchange(group, dtype="f32", layout=layout, routing_gradients=True, **SHAPE)
    layer = layer_of(exchange, size)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    for tokens in (5, 6, 3, 0):
        given = inputs_of(tokens, tokens)
        for got, want in zip(results(compiled, *given), results(layer, *given)):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)  # inductor's tanh differs


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_with_other_sizes(layout):
    """A rank without tokens has its own graph but makes the same calls."""

    def rank(group):
        exchange = sy.Exchange(group, dtype="f32", layout=layout, routing_gradients=True, **SHAPE)
        layer = layer_of(exchange, "automatic")
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        for step in range(4):
            given = inputs_of([5, 3, 0, 7][(step + group.rank) % 4], 10 * step + group.rank)
            want = results(layer, *given)
            for got, expected in zip(results(compiled, *given), want):
                torch.testing.assert_close(got, expected)

    run_ranks(rank, 2, heap_bytes=1 << 24, timeout=120)


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_checkpoints_reuse_the_plan(layout, compiles, monkeypatch):
    """Two checkpointed layers: with keep_plans the backward pass does not plan; without it the results are the same."""
    group = sy.Group.threads(1, 1 << 22)[0]
    exchange = sy.Exchange(group, dtype="f32", layout=layout, routing_gradients=True, **SHAPE)
    planned = []
    dispatch = sy.Exchange._dispatch
    monkeypatch.setattr(sy.Exchange, "_dispatch",
                        lambda self, x, ids, *rest: (planned.append(ids is not None), dispatch(self, x, ids, *rest))[1])

    def layer(x, router):
        weights, ids = torch.topk(torch.softmax(x @ router, -1), TOPK)
        rows, handle = exchange.dispatch(x * 2, ids, weights)
        return torch.tanh(exchange.combine(torch.relu(rows), handle)) + 1

    def model(each, x, router):
        out = each(each(x, router), router)
        return torch.autograd.grad(out.square().sum(), (x, router))

    x, router = torch.randn(5, HIDDEN).requires_grad_(), torch.randn(HIDDEN, EXPERTS).requires_grad_()
    want = model(layer, x, router)
    assert planned.count(True) == 2
    for options, plans in (({}, 4), ({"context_fn": sy.keep_plans}, 2)):
        planned.clear()

        def checkpointed(x, router, options=options):
            return checkpoint(layer, x, router, use_reentrant=False, **options)

        torch._dynamo.reset()
        each = torch.compile(checkpointed, backend="aot_eager", fullgraph=True) if compiles else checkpointed
        for got, expected in zip(model(each, x, router), want):
            torch.testing.assert_close(got, expected)
        assert planned.count(True) == plans


@pytest.mark.parametrize("layout", LAYOUTS)
def test_handles_enter_and_leave_graphs(layout):
    group = sy.Group.threads(1, 1 << 22)[0]
    exchange = sy.Exchange(group, dtype="f32", layout=layout, **SHAPE)
    x, ids, weights = (each.detach() for each in inputs_of(5, 1))
    options = {"size": "capacity", "capacity": 6, "overflow": "drop_and_report"}
    names = ["tokens_per_expert", "aligned_per_expert", "dropped", "dropped_per_source", "device_invalid_ids"]
    names += ["topk_ids", "topk_weights", "source_token"] if layout == "rank_major" else ["row_source", "row_weights", "expert_first_row"]
    absent = ["row_source", "row_weights"] if layout == "rank_major" else ["topk_ids", "source_token"]

    def dispatch(x):
        rows, handle = exchange.dispatch(x, ids, weights, **options)
        assert all(getattr(handle, name) is None for name in absent) and handle.num_tokens == x.shape[0]
        if layout == "rank_major":
            assert handle.topk_ids_int64.dtype == torch.int64
        return rows, handle, {name: getattr(handle, name) for name in names}

    rows, handle, tables = torch.compile(dispatch, backend="aot_eager", fullgraph=True)(x)
    rows = rows.clone()
    want, real = exchange.dispatch(x, ids, weights, **options)
    count = real.rows
    assert torch.equal(rows[:count], want[:count]) and handle.rows == count and handle.layout == layout
    for name in names:
        assert torch.equal(tables[name], getattr(real, name)) and torch.equal(getattr(handle, name), getattr(real, name)), name
    assert handle.to_bytes() and np.array_equal(handle.counts().tokens_per_expert, real.counts().tokens_per_expert)
    # With either handle, in a graph and outside.
    out = exchange.combine(rows, real)
    combine = torch.compile(lambda y, handle: exchange.combine(y, handle), backend="aot_eager", fullgraph=True)
    again = torch.compile(lambda x, handle: exchange.dispatch(x, handle=handle)[0].clone(), backend="aot_eager", fullgraph=True)
    for each in (handle, real):
        assert torch.equal(combine(rows, each), out) and torch.equal(exchange.combine(rows, each), out)
        assert torch.equal(again(x + 1, each)[:count], exchange.dispatch(x + 1, handle=each)[0][:count])


@pytest.mark.parametrize("scales", ["f32", "ue8m0"])
def test_fp8_rows(scales):
    group = sy.Group.threads(1, 1 << 24)[0]
    exchange = sy.Exchange(group, dtype="bf16", num_experts=EXPERTS, topk=TOPK, hidden=144, max_tokens=8, layout="expert_major")
    x, ids, weights = inputs_of(5, 2, hidden=144)
    x, weights = x.detach().bfloat16(), weights.detach()

    def quantized(x):
        (rows, its), _ = exchange.dispatch(x, ids, weights, quantize=scales)
        return rows.float(), its.clone()

    def passed_on(x, its):
        (rows, its), _ = exchange.dispatch((x, its), ids)
        return rows.float(), its.clone()

    for function, given in ((quantized, (x,)), (passed_on, (x.to(torch.float8_e4m3fn), torch.ones(5, 2)))):
        want = function(*given)
        got = torch.compile(function, backend="aot_eager", fullgraph=True)(*given)
        assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_biases_outputs_and_summed_weights():
    group = sy.Group.threads(1, 1 << 22)[0]
    exchange = sy.Exchange(group, dtype="f32", layout="rank_major", **SHAPE)
    x, ids, weights = inputs_of(5, 3)
    bias, out = torch.ones_like(x).requires_grad_(), torch.empty_like(x)

    def layer(x, bias, out):
        rows, handle = exchange.dispatch(x, ids, weights.detach())
        y, summed = exchange.combine(rows, handle, topk_weights=handle.topk_weights, bias=(bias, bias), out=out)
        return y, summed

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    got, want = compiled(x, bias, out), layer(x, bias, torch.empty_like(x))
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1]) and torch.equal(out, want[0])
    for a, b in zip(torch.autograd.grad(got[0].sum(), (x, bias)), torch.autograd.grad(want[0].sum(), (x, bias))):
        assert torch.equal(a, b)


def test_graphs_keep_plans_as_long_as_they_need_them():
    group = sy.Group.threads(1, 1 << 22)[0]
    exchange = sy.Exchange(group, dtype="f32", layout="expert_major", **SHAPE)
    x, ids, _ = inputs_of(5, 4)

    def layer(x):
        rows, handle = exchange.dispatch(x, ids)
        return exchange.combine(torch.tanh(rows), handle), handle

    out, handle = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    watched = weakref.ref(handle._owned)
    del handle
    gc.collect()
    assert watched() is not None
    out.sum().backward()
    del out
    gc.collect()
    assert watched() is None
    assert x.grad is not None


@pytest.mark.parametrize("config", [{"scales": None}, {"scales": "f32"}, {"scales": "f32", "scale_order": "column_major"}, {"scales": "ue8m0"},
                                    {"scales": "ue8m0", "scale_order": "column_major"}], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_low_latency(backend, config):
    """Two calls whose outputs are read after the second call: without a graph each needs its own output."""
    group = sy.Group.threads(1, 1 << 24)[0]
    ll = sy.LowLatency(group, dtype="bf16", num_experts=EXPERTS, topk=TOPK, hidden=256, max_tokens=8, **config)
    first, second = ll.make_output(torch.empty(0, 256, dtype=torch.bfloat16)), ll.make_output(torch.empty(0, 256, dtype=torch.bfloat16))

    def layer(x, ids, weights, *outputs):
        one, other = ll.dispatch(x, ids, weights, output=outputs[0]), ll.dispatch_async(x + 1, ids, output=outputs[1]).wait()
        made = []
        for received in (one, other):
            there = torch.arange(received.x.shape[1])[None, :] < received.rows[:, None]
            y = torch.where(there[:, :, None], received.x.float(), 0)
            made.append(ll.combine(y.bfloat16(), received))
            if received is other:  # per_rank applies no weights
                made.append(ll.combine_async(y.bfloat16(), received, order="per_rank").wait())
            made += [torch.where(there, received.row_source, 0), received.source_range + 0]
            if received.scales is not None:
                whole = received.scales.dim() == 3 and received.scales.shape[1] == there.shape[1]
                assert whole
                made.append(torch.where(there[:, :, None], received.scales.float(), 0))
        return made

    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    for tokens in (5, 6, 0):
        x, ids, weights = inputs_of(tokens, tokens, hidden=256)
        x, weights = x.detach().bfloat16(), weights.detach()
        want = layer(x, ids, weights, first, second)
        for outputs in ((None, None), (first, second)):
            got = compiled(x, ids, weights, *outputs)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert sum(map(len, ll._spare.values())) <= 2


def test_low_latency_leaves_graphs():
    group = sy.Group.threads(1, 1 << 24)[0]
    ll = sy.LowLatency(group, dtype="bf16", num_experts=EXPERTS, topk=TOPK, hidden=256, max_tokens=8, scales=None)
    x, ids, weights = inputs_of(5, 5, hidden=256)
    x, weights = x.detach().bfloat16(), weights.detach()
    received = torch.compile(lambda x: ll.dispatch(x, ids, weights), backend="aot_eager", fullgraph=True)(x)
    y = ll.make_rows(received)
    y.copy_(received.x)
    out = ll.combine(y, received)
    assert torch.equal(torch.compile(lambda y: ll.combine(y, received), backend="aot_eager", fullgraph=True)(y), out)
    assert torch.equal(out, ll.combine(y, ll.dispatch(x, ids, weights)))


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("size", ["exact", "worst_case"])
def test_rows_in_memory_of_the_caller(size, compiles):
    """Every step reuses the same buffer: no step keeps the previous one."""
    group = sy.Group.threads(1, 1 << 22)[0]
    exchange = sy.Exchange(group, dtype="f32", layout="expert_major", routing_gradients=True, **SHAPE)
    buffer = torch.zeros(40, HIDDEN)

    def layer(x, ids, weights, out):
        rows, handle = exchange.dispatch(x, ids, weights, size=size, out=out)
        return exchange.combine(torch.relu(rows), handle), rows

    function = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiles else layer
    for step in range(3):
        x, ids, weights = inputs_of(5, step)
        got, rows = function(x, ids, weights, buffer)
        assert rows.data_ptr() == buffer.data_ptr() and not buffer.requires_grad
        want, _ = layer(x, ids, weights, None)
        assert torch.equal(got, want)
        for a, b in zip(torch.autograd.grad(got.sum(), (x, weights)), torch.autograd.grad(want.sum(), (x, weights))):
            assert torch.equal(a, b)
    with torch.no_grad():
        got, rows = function(x, ids, weights, buffer)
        assert torch.equal(got, want) and rows.data_ptr() == buffer.data_ptr()
