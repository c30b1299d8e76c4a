# SPDX-License-Identifier: Apache-2.0
"""Gradients of dispatch, combine, and the pair: by gradcheck, and compared with a model computed by torch without any
exchange."""
import gc
import weakref

import numpy as np
import pytest

import oracle
import switchyard as sy

torch = pytest.importorskip("torch")

EXPERTS, TOPK, HIDDEN = 5, 2, 8
SHAPE = {"num_experts": EXPERTS, "topk": TOPK, "hidden": HIDDEN, "max_tokens": 5}
LAYOUTS = [{"layout": "rank_major"}, {"layout": "expert_major"}, {"layout": "expert_major", "expert_alignment": 4}]


def of_layout(group, **change):
    return sy.Exchange(group, dtype="f32", **{**SHAPE, "routing_gradients": True, **change})


def inputs_of(rank, world, seed=1):
    x, ids, weights = oracle.make_inputs(world, seed=seed, tokens=[4, 0, 5, 3][:world], **SHAPE)[rank]
    # With small integers all sums are exact, and so are float32 differences.
    rng = np.random.default_rng(seed + rank)
    x = torch.from_numpy(rng.integers(-4, 5, x.shape).astype(np.float32)).requires_grad_()
    return x, torch.from_numpy(ids), torch.from_numpy(rng.integers(-3, 4, weights.shape).astype(np.float32)).requires_grad_()


def check(function, inputs):
    """Runs gradcheck in float32: with a step size that is a power of two, differences of these functions are exact or nearly
    so."""
    assert torch.autograd.gradcheck(function, inputs, eps=0.5, atol=1e-3, rtol=1e-3, nondet_tol=0, check_undefined_grad=False)


@pytest.mark.filterwarnings("ignore:Input #:UserWarning")  # gradcheck expects float64
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradcheck_of_dispatch(layout):
    def rank(group):
        exchange = of_layout(group, **layout)
        x, ids, weights = inputs_of(0, 1)

        def function(x, weights):
            rows, handle = exchange.dispatch(x, ids, weights)
            received = handle.topk_weights if layout["layout"] == "rank_major" else handle.row_weights
            return rows, torch.where(valid(handle), received, 0)

        check(function, (x, weights))

    sy.run_ranks(rank, 1, heap_bytes=1 << 22)


def valid(handle):
    return (handle.topk_ids >= 0) if handle.layout == "rank_major" else (handle.row_source >= 0)


@pytest.mark.filterwarnings("ignore:Input #:UserWarning")
@pytest.mark.parametrize("order", ["per_rank", "per_route"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradcheck_of_combine_and_the_pair(layout, order):
    if order == "per_route" and layout["layout"] == "rank_major":
        return  # rank-major rows are one per (token, rank)

    def rank(group):
        exchange = of_layout(group, **layout)
        x, ids, weights = inputs_of(0, 1)
        with torch.no_grad():
            rows, handle = exchange.dispatch(x, ids, weights)
        _ = handle.topk_weights  # accessed, so a rank-major combine does not apply them
        y = torch.randint(-4, 5, rows.shape).float().requires_grad_()
        bias = torch.randint(-4, 5, x.shape).float().requires_grad_()
        for weighted in (True, False):
            check(lambda y, bias: exchange.combine(y, handle, order=order, apply_weights=weighted, bias=bias), (y, bias))

        def pair(x, weights):
            rows, handle = exchange.dispatch(x, ids, weights)
            return exchange.combine(rows * 2, handle, order=order, apply_weights=handle.layout == "expert_major")

        check(pair, (x, weights))

    sy.run_ranks(rank, 1, heap_bytes=1 << 22)


def moe(x, ids, weights, matrices):
    """A layer of linear experts on one rank, using only torch."""
    out = [0 * token for token in x]
    for t in range(len(x)):
        for k in range(ids.shape[1]):
            if 0 <= ids[t, k] < EXPERTS:
                out[t] = out[t] + weights[t, k] * torch.tanh(matrices[ids[t, k]] @ x[t])
    return torch.stack(out) if out else 0 * x


def sharded_rank_major(exchange, x, ids, weights, mine):
    rows, handle = exchange.dispatch(x, ids, weights)
    y = torch.zeros_like(rows)
    for e in range(len(mine)):
        here = (handle.topk_ids == e)
        factor = torch.where(here, handle.topk_weights, 0).sum(1, keepdim=True)
        y = y + factor * torch.tanh(rows @ mine[e].T)
    return exchange.combine(y, handle)


def sharded_expert_major(exchange, x, ids, weights, mine):
    rows, handle = exchange.dispatch(x, ids, weights)
    parts, begin = [], 0
    for e, end in enumerate(handle.offsets.tolist()):
        parts.append(torch.tanh(rows[begin:end] @ mine[e].T))
        begin = end
    return exchange.combine(torch.cat(parts) if parts else rows, handle, order="per_route")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_layer_over_ranks(world, layout):
    """Outputs and all gradients equal those of a single process with all tokens and experts."""
    matrices = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(0)) / 3
    sharded = sharded_rank_major if layout["layout"] == "rank_major" else sharded_expert_major

    def rank(group):
        exchange = of_layout(group, **layout)
        x, ids, weights = inputs_of(group.rank, world)
        owned = group.experts_of(EXPERTS)
        mine = matrices[owned.start:owned.stop].clone().requires_grad_()
        results = []
        for _ in range(2):  # twice: gradients are computed again in the next step
            out = sharded(exchange, x, ids, weights, mine)
            grads = torch.autograd.grad(out.square().sum(), (x, weights, mine))
            results.append((out.detach(), *grads))
        assert all(torch.equal(a, b) for a, b in zip(*results))
        return results[0]

    got = sy.run_ranks(rank, world, heap_bytes=1 << 24, timeout=60)
    everything = matrices.clone().requires_grad_()
    total = torch.zeros(EXPERTS, HIDDEN, HIDDEN)
    for r in range(world):
        x, ids, weights = inputs_of(r, world)
        out = moe(x, ids, weights, everything)
        grads = torch.autograd.grad(out.square().sum(), (x, weights, everything), allow_unused=True, materialize_grads=True)
        for mine, want in zip(got[r], (out.detach(), *grads[:2])):
            torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-4)
        total += grads[2]
    torch.testing.assert_close(torch.cat([each[3] for each in got]), total, rtol=1e-4, atol=1e-4)


def test_the_handle_is_used_again(ranks):
    """Backward passes and cached dispatches do not count, because they do not plan."""

    def rank(group):
        exchange = of_layout(group, layout="expert_major")
        x, ids, weights = inputs_of(group.rank, 2)
        rows, handle = exchange.dispatch(x, ids, weights)
        again, same = exchange.dispatch(x * 2, handle=handle)
        assert same is handle and again.requires_grad
        out = exchange.combine(again, handle)
        out.sum().backward()
        assert x.grad is not None and weights.grad is not None
        kept = torch.where((ids >= 0) & (ids < EXPERTS), weights.detach(), 0)
        torch.testing.assert_close(x.grad, (2 * kept.sum(1, keepdim=True)).expand_as(x))

    ranks(rank, 2)


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=str)
def test_checkpointing(ranks, layout):
    from torch.utils.checkpoint import checkpoint

    def rank(group):
        exchange = of_layout(group, **layout)
        x, ids, weights = inputs_of(group.rank, 2)

        def layer(x, weights):
            rows, handle = exchange.dispatch(x, ids, weights)
            return exchange.combine(torch.tanh(rows), handle)

        plain = torch.autograd.grad(layer(x, weights).square().sum(), (x, weights), allow_unused=True)
        saved = torch.autograd.grad(checkpoint(layer, x, weights, use_reentrant=False).square().sum(), (x, weights), allow_unused=True)
        assert torch.equal(plain[0], saved[0])
        if layout["layout"] == "expert_major":
            assert torch.equal(plain[1], saved[1])

    ranks(rank, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types_of_training(ranks, dtype):
    def rank(group):
        exchange = sy.Exchange(group, dtype=dtype, layout="expert_major", routing_gradients=True, **SHAPE)
        x, ids, weights = inputs_of(group.rank, 2)
        x = x.detach().to(dtype).requires_grad_()
        rows, handle = exchange.dispatch(x, ids, weights)
        exchange.combine(rows, handle, order="per_route").float().sum().backward()
        assert x.grad.dtype == dtype and weights.grad.dtype == torch.float32
        kept = torch.where((ids >= 0) & (ids < EXPERTS), weights.detach(), 0)
        torch.testing.assert_close(x.grad.float(), kept.sum(1, keepdim=True).expand_as(x))
        valid_ids = ((ids >= 0) & (ids < EXPERTS)).float()
        torch.testing.assert_close(weights.grad, valid_ids * x.detach().float().sum(1, keepdim=True))

    ranks(rank, 2)


def test_drops_have_no_gradient(ranks):
    def rank(group):
        exchange = of_layout(group, layout="expert_major")
        x = torch.ones(4, HIDDEN, requires_grad=True)
        weights = torch.ones(4, TOPK, requires_grad=True)
        rows, handle = exchange.dispatch(x, torch.tensor([[0, 1]] * 4), weights, capacity=6, overflow="drop_and_report")
        exchange.combine(rows, handle).sum().backward()
        kept = 1 - handle.dropped.float()
        assert kept.sum() == 6
        assert torch.equal(weights.grad, kept * HIDDEN)
        assert torch.equal(x.grad, kept.sum(1, keepdim=True).expand_as(x))

    ranks(rank, 1)


def test_rows_of_many_layers_are_kept(ranks):
    """Tensors kept by a graph are outside the pool, which holds one output."""

    def rank(group):
        exchange = of_layout(group, layout="expert_major")
        x, ids, weights = inputs_of(group.rank, 1)
        h = x
        for _ in range(20):
            rows, handle = exchange.dispatch(h, ids, weights)
            h = torch.tanh(exchange.combine(rows, handle))
        h.sum().backward()
        assert x.grad.isfinite().all()

    ranks(rank, 1)


def test_graphs_do_not_leak():
    group = sy.Group.threads(1, 1 << 22)[0]
    exchange = of_layout(group, layout="expert_major")
    x, ids, weights = inputs_of(0, 1)
    rows, handle = exchange.dispatch(x, ids, weights)
    out = exchange.combine(rows, handle)
    watched = weakref.ref(handle._owned)
    gc.disable()
    try:
        del rows, handle, out
        assert watched() is None
    finally:
        gc.enable()


def test_outputs_and_biases_of_the_caller(ranks):
    def rank(group):
        x, ids, weights = inputs_of(0, 1)
        exchange = of_layout(group, layout="expert_major")
        bias, out = torch.ones_like(x).requires_grad_(), torch.empty_like(x)
        rows, handle = exchange.dispatch(x, ids, weights)
        assert exchange.combine(rows, handle, bias=(bias, bias), out=out) is out and out.requires_grad
        out.sum().backward()
        assert (bias.grad == 2).all() and x.grad is not None and weights.grad is not None
        # Gradients of only the weights, then of only the experts' parameters.
        rows, handle = exchange.dispatch(x.detach(), ids, weights)
        assert not rows.requires_grad or rows.grad_fn is not None
        first = weights.grad.clone()
        weights.grad = None
        exchange.combine(rows, handle).sum().backward()
        assert torch.equal(weights.grad, first)
        factor = torch.ones(HIDDEN, requires_grad=True)
        rows, handle = exchange.dispatch(x.detach(), ids, weights.detach())
        exchange.combine(rows * factor, handle).sum().backward()
        assert factor.grad.isfinite().all()
        with torch.inference_mode():
            rows, handle = exchange.dispatch(x, ids, weights)
            assert not exchange.combine(rows, handle).requires_grad

    ranks(rank, 1)


def test_what_has_no_gradient(ranks):
    def rank(group):
        x, ids, weights = inputs_of(0, 1)
        exchange = of_layout(group, layout="expert_major", routing_gradients=False)
        with pytest.raises(sy.Unsupported, match="routing_gradients=True"):
            exchange.dispatch(x, ids, weights)
        with pytest.raises(sy.Unsupported, match="fp8 rows have no gradients"):
            exchange.dispatch(x, ids, quantize="f32")
        rows, handle = exchange.dispatch(x, ids, weights.detach())
        with pytest.raises(sy.Unsupported, match="give them to dispatch"):
            exchange.combine(rows, handle, topk_weights=weights, order="per_route")
        with torch.no_grad():
            assert not exchange.dispatch(x, ids, weights)[0].requires_grad

    ranks(rank, 1)
