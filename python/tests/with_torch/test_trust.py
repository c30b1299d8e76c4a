# SPDX-License-Identifier: Apache-2.0
"""Guarantees for autograd, with a test for each row of the table in docs/python.md: masked weights, memory that the library
overwrites, ranks without rows, double backward, retained graphs, checkpoints, autocast, and refusals. torch.compile is covered
by test_compile.py."""
import copy

import pytest

import switchyard as sy

torch = pytest.importorskip("torch")

from switchyard._abi.arrays import TorchArrays  # noqa: E402
from plain_moe import HIDDEN, Experts, Model, loss_of, off, seeded, tokens_of  # noqa: E402

SHAPE = {"hidden": 16, "num_experts": 4, "topk": 2, "max_tokens": 4, "dtype": "f32"}


def inputs(rank=0, tokens=4):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(tokens, 16, generator=generator).requires_grad_()
    weights = torch.rand(tokens, 2, generator=generator).requires_grad_()
    return x, torch.arange(2 * tokens).reshape(tokens, 2) % 4, weights


def layer(exchange, x, ids, weights, scale=2.0):
    rows, handle = exchange.dispatch(x, ids, weights)
    return exchange.combine(torch.tanh(rows) * scale, handle)


def plain_layer(x, ids, weights, scale=2.0):
    return torch.tanh(x) * scale * weights.sum(1, keepdim=True)


# ---- Values ----


@pytest.mark.parametrize("world", [1, 2, 4])
def test_masked_places_of_weights_have_no_gradient(ranks, world):
    """Rank-major: the delivered value for a route of another rank is the constant 0, for any loss."""
    def rank(group):
        exchange = sy.Exchange(group, layout="rank_major", **SHAPE)
        x, ids, weights = inputs(group.rank)
        _, handle = exchange.dispatch(x, ids, weights)
        (handle.topk_weights * 3 + 5).sum().backward()
        assert torch.equal(weights.grad, torch.full_like(weights, 3))
        weights.grad = None
        _, handle = exchange.dispatch(x, ids, weights)
        torch.where(handle.topk_ids >= 0, handle.topk_weights * 3, float("nan")).nan_to_num(0).sum().backward()
        assert torch.equal(weights.grad, torch.full_like(weights, 3))

    ranks(rank, world)


@pytest.mark.parametrize("frozen", [True, False])
def test_ranks_without_rows_take_part_in_backward(ranks, frozen):
    """All tokens go to the first expert. With three ranks and two experts, one rank has no experts at all. Gradients are zeros,
    not None."""
    class OfTwo(torch.nn.Module):
        def __init__(self):
            super().__init__()
            with seeded():
                self.first, self.experts = torch.nn.Linear(HIDDEN, HIDDEN), Experts(2)
            self.first.requires_grad_(not frozen)

        def forward(self, x):
            return self.experts(self.first(x), torch.zeros(len(x), 1, dtype=torch.int64), torch.ones(len(x), 1))

    def rank(group):
        whole, model = OfTwo(), OfTwo()
        sy.parallelize_moe(model, group, max_tokens=8, topk=1)
        loss_of(model, group.rank).backward()
        sum(loss_of(whole, r) for r in range(3)).backward()
        mine = group.experts_of(2)
        for name in ("gate_up_proj", "down_proj"):
            got, want = getattr(model.experts, name).grad, getattr(whole.experts, name).grad[mine.start:mine.stop]
            assert got is not None and torch.allclose(got, want, rtol=1e-4, atol=1e-6)
        group.barrier()

    ranks(rank, 3)


# ---- Memory that the library overwrites ----


def overwritten(tensor, write):
    """Checks that a graph that saved `tensor` refuses its backward pass after `write` has run."""
    p = torch.ones((), requires_grad=True)
    loss = (tensor * p).sum()
    write()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_memory_of_the_caller_raises_its_version(ranks):
    def rank(group):
        exchange = sy.Exchange(group, layout="expert_major", **SHAPE)
        x, ids, _ = inputs()
        with torch.no_grad():
            rows, handle = exchange.dispatch(x, ids)
            sums, rows_out = torch.ones(4, 16), torch.ones(len(rows), 16)
        for _ in range(3):  # the second and the third call take the fast path
            overwritten(sums, lambda: exchange.combine(rows, handle, out=sums))
            overwritten(rows_out, lambda: exchange.dispatch(x.detach(), handle=handle, out=rows_out))

    ranks(rank, 1)


def test_rows_of_low_latency_raise_their_version(ranks):
    def rank(group):
        ll = sy.LowLatency(group, **SHAPE)
        x, ids, _ = inputs()
        received, sums = ll.dispatch(x.detach(), ids), torch.ones(4, 16)
        for _ in range(3):
            overwritten(received.x[:, :2], lambda: ll.dispatch(x.detach(), ids))
            overwritten(sums, lambda: ll.combine(received.x, received, out=sums))

    ranks(rank, 1)


# ---- Refusals ----


def test_low_latency_refuses_gradients(ranks):
    def rank(group):
        ll = sy.LowLatency(group, **SHAPE)
        x, ids, weights = inputs()
        for _ in range(2):  # also on the fast path of repeated calls
            for call, name in ((lambda: ll.dispatch(x, ids), "x"), (lambda: ll.dispatch(x.detach(), ids, weights), "topk_weights"),
                               (lambda: ll.dispatch_async(x, ids), "x"), (lambda: ll.all_to_all(x, ids), "x")):
                with pytest.raises(sy.Unsupported, match=f"{name} requires a gradient.*use an Exchange"):
                    call()
            with torch.no_grad():
                received = ll.dispatch(x, ids)
            y = received.x.clone().requires_grad_()
            for call in (ll.combine, ll.combine_async):
                with pytest.raises(sy.Unsupported, match="y requires a gradient"):
                    call(y, received)
            assert ll.combine(y.detach(), received).shape == (4, 16)

    ranks(rank, 1)


def test_layers_refuse_gradients(ranks):
    from switchyard._abi import ffi

    try:
        ffi.layer_library()
    except sy.LibraryNotFound as error:
        pytest.skip(str(error))

    def rank(group):
        w13, w2 = torch.randn(4, 32, 16).bfloat16(), torch.randn(4, 16, 16).bfloat16()
        layer = sy.MoeLayer(group, w13, w2, hidden=16, intermediate=16, num_experts=4, topk=2, max_tokens=4)
        x, ids, weights = inputs()
        x = x.detach().bfloat16().requires_grad_()
        for arguments, name in (((x, ids), "x"), ((x.detach(), ids, weights), "topk_weights")):
            with pytest.raises(sy.Unsupported, match=f"MoeLayer: {name} requires a gradient"):
                layer(*arguments)
        with torch.no_grad():
            sums = layer(x, ids, weights)
        overwritten(sums, lambda: layer(x.detach(), ids, weights.detach(), out=sums))

    ranks(rank, 1, heap_bytes=64 << 20)


def test_transforms_of_functions_are_refused(ranks):
    def rank(group):
        exchange = sy.Exchange(group, layout="expert_major", **SHAPE)
        x, ids, _ = inputs()
        with pytest.raises(sy.Unsupported, match="torch.vmap.*Give the rows of all samples to one call"):
            torch.vmap(lambda each: exchange.dispatch(each, ids)[0])(torch.randn(3, 4, 16))
        with pytest.raises(sy.Unsupported, match="use backward"):
            torch.func.grad(lambda each: exchange.dispatch(each, ids)[0].sum())(x)
        assert exchange.dispatch(x, ids)[0].requires_grad

    ranks(rank, 1)


# ---- Guarantees ----


def run_layer(ranks, body):
    """Runs `body(layer of x and weights, x, weights, the same layer in plain torch)` on two ranks."""
    def rank(group):
        exchange = sy.Exchange(group, layout="expert_major", routing_gradients=True, **SHAPE)
        x, ids, weights = inputs(group.rank)
        body(lambda x, weights: layer(exchange, x, ids, weights), x, weights, lambda x, weights: plain_layer(x, ids, weights))
        group.barrier()

    ranks(rank, 2)


def test_double_backward_is_refused(ranks):
    def body(function, x, weights, _):
        first, = torch.autograd.grad(function(x, weights).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            first.sum().backward()

    run_layer(ranks, body)


def test_a_graph_that_is_kept_runs_again(ranks):
    def body(function, x, weights, plain):
        out = function(x, weights).square().sum()
        want = torch.autograd.grad(plain(x, weights).square().sum(), (x, weights))
        for _ in range(3):
            got = torch.autograd.grad(out, (x, weights), retain_graph=True)
            assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(got, want))

    run_layer(ranks, body)


@pytest.mark.parametrize("way", ["reentrant", "not reentrant", "keep_plans"])
def test_checkpoints(ranks, way):
    from torch.utils.checkpoint import checkpoint

    options = {"reentrant": {"use_reentrant": True}, "not reentrant": {"use_reentrant": False},
               "keep_plans": {"use_reentrant": False, "context_fn": sy.keep_plans}}[way]

    def body(function, x, weights, plain):
        checkpoint(function, x, weights, **options).square().sum().backward()
        want = torch.autograd.grad(plain(x, weights).square().sum(), (x, weights))
        assert torch.allclose(x.grad, want[0], rtol=1e-4, atol=1e-5) and torch.allclose(weights.grad, want[1], rtol=1e-4, atol=1e-5)

    run_layer(ranks, body)


def test_autocast(ranks):
    """Rows are sent in their own type. Expert outputs in bf16 are combined in bf16, and gradients have the type of the
    inputs."""
    def rank(group):
        exchange = sy.Exchange(group, layout="expert_major", routing_gradients=True, **SHAPE)
        x, ids, weights = inputs(group.rank)
        expert = torch.eye(16).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rows, handle = exchange.dispatch(x, ids, weights)
            y = rows @ expert
            assert rows.dtype is torch.float32 and y.dtype is torch.bfloat16
            out = exchange.combine(y, handle)
        assert out.dtype is torch.bfloat16
        out.float().sum().backward()
        assert x.grad.dtype is torch.float32 and expert.grad.dtype is torch.float32
        assert torch.allclose(x.grad, weights.sum(1, keepdim=True).expand_as(x), rtol=2e-2, atol=2e-2)

    ranks(rank, 2)


def test_copies_of_a_divided_model(ranks):
    """deepcopy has its own parameters and computes the same result; the error of pickle names the alternative."""
    import pickle

    def rank(group):
        whole, model = Model(), Model()
        sy.parallelize_moe(model, group, max_tokens=8)
        twin = copy.deepcopy(model)
        with torch.no_grad():
            model.experts.down_proj.zero_()
            assert off(twin(tokens_of(group.rank)), whole(tokens_of(group.rank))) < 1e-5
        loss_of(twin, group.rank).backward()
        assert twin.experts.down_proj.grad is not None and model.experts.down_proj.grad is None
        assert type(twin.experts.down_proj.grad) is not torch.Tensor  # its norm is that of all ranks
        with pytest.raises(TypeError, match="experts: a divided model belongs to its group and cannot be pickled: save switchyard.full_state_dict"):
            pickle.dumps(model)

    ranks(rank, 2)


@pytest.mark.parametrize("error", [TypeError, RuntimeError, AttributeError])
def test_torch_whose_version_counters_are_raised_one_by_one(monkeypatch, error):
    def of_older_torch(tensor):
        if not isinstance(tensor, torch.Tensor):
            raise error("increment_version expect a Tensor as input")
        real((tensor,))

    real = torch._C._increment_version
    monkeypatch.setattr(torch._C, "_increment_version", of_older_torch)
    monkeypatch.setattr(torch.autograd.graph, "increment_version", of_older_torch)
    tensors = [torch.zeros(2), torch.zeros(3)]
    TorchArrays(torch).increment_version(tensors)
    assert [each._version for each in tensors] == [1, 1]
