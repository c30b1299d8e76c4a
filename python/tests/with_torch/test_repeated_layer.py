# SPDX-License-Identifier: Apache-2.0
"""Repeated forward passes of a layer take a fast path, which computes the same bits as the full path. Other calls, and those that
are invalid, take the full path."""
import itertools
import random

import numpy as np
import pytest

import switchyard as sy

torch = pytest.importorskip("torch")

from switchyard._abi import ffi as _ffi, repeated as _repeated  # noqa: E402  (need torch)

LAYER = {"num_experts": 5, "topk": 2, "hidden": 32, "intermediate": 16, "max_tokens": 9}


@pytest.fixture
def taken(monkeypatch):
    """Results of the calls of the fast path, None if it was not applicable."""
    calls, original = [], _repeated.Layer.__call__

    def call(self, *arguments):
        calls.append(original(self, *arguments))
        return calls[-1]

    monkeypatch.setattr(_repeated.Layer, "__call__", call)
    return calls


@pytest.fixture
def layer_of():
    """Returns a function that creates a layer with random weights; skips the test without the library."""
    try:
        _ffi.layer_library()
    except sy.LibraryNotFound as error:
        pytest.skip(str(error))

    def make(group):
        source, mine = torch.Generator().manual_seed(1), group.experts_of(LAYER["num_experts"])
        w13, w2 = (torch.randn(5, *shape, generator=source).bfloat16()[mine.start:mine.stop] / 5 for shape in ((32, 32), (32, 16)))
        return sy.MoeLayer(group, w13.contiguous(), w2.contiguous(), **LAYER)

    return make


def tokens_of_layer(seed, tokens):
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, LAYER["hidden"], generator=source).bfloat16()
    ids = torch.randint(-1, LAYER["num_experts"], (tokens, LAYER["topk"]), generator=source)
    return x, ids, torch.rand(tokens, LAYER["topk"], generator=source) + 0.5


def in_numpy(x):
    return x.view(torch.int16).numpy().view(np.uint16)


def test_layer(ranks, taken, layer_of):
    """The bits are those of calls with numpy arrays, which have no fast path. The ranks differ in tokens, types and arguments."""

    def rank(group):
        layer, rng = layer_of(group), random.Random(group.rank)
        for number in range(40):
            x, ids, weights = tokens_of_layer(10 * number + group.rank, rng.choice([5, 5, 9, 1, 0]))
            if rng.random() < 0.5:
                ids = ids.int()
            if rng.random() < 0.3:
                weights = None
            want = layer.forward(in_numpy(x), ids.numpy(), None if weights is None else weights.numpy())
            out = torch.full((len(x) + 2, LAYER["hidden"]), 7, dtype=torch.bfloat16)
            version, part = out._version, out[1:-1]
            assert layer.forward(x, ids, weights, out=part) is part and out._version > version
            assert np.array_equal(in_numpy(part), want) and (out[0] == 7).all() and (out[-1] == 7).all()
            made = layer(x, ids, weights)
            assert np.array_equal(in_numpy(made), want) and made.shape == x.shape and made.dtype == torch.bfloat16
            held = torch.zeros_like(x)
            layer.forward(x, ids, weights, out=held, add=True)
            assert torch.equal(held, part)
            fewer = torch.full_like(x, 7)
            layer.forward(x, ids, weights, out=fewer, device_tokens=torch.tensor([len(x) // 2], dtype=torch.int32))
            assert (fewer[len(x) // 2:] == 7).all() and torch.equal(fewer[:len(x) // 2], part[:len(x) // 2])

    ranks(rank, 2, heap_bytes=sy.MoeLayer.heap_bytes(2, **LAYER))
    # All calls without further arguments, with and without `out`, except the first of each rank.
    assert sum(each is not None for each in taken) == 2 * 79


def test_a_layer_that_selects_slots(ranks, taken, layer_of):
    """With a selector and without one in turn: each call has the arguments given to it."""

    def rank(group):
        layer = layer_of(group)
        order = np.random.default_rng(3).permutation(LAYER["num_experts"]).astype(np.int32)
        selector = sy.SlotSelector(group, sy.ExpertMap(order, num_experts=LAYER["num_experts"], world=1))
        for number in range(5):
            x, ids, weights = tokens_of_layer(number, 7)
            want = layer(in_numpy(x), selector.select(ids.numpy()), weights.numpy())
            assert np.array_equal(in_numpy(layer(x, ids, weights, selector=selector)), want)
            assert np.array_equal(in_numpy(layer(x, selector.select(ids), weights)), want)
            assert not np.array_equal(in_numpy(layer(x, ids, weights)), want)
        with pytest.raises(sy.InvalidType, match="selector"):
            layer(x, ids, weights, selector=selector.expert_map)

    ranks(rank, 1, heap_bytes=sy.MoeLayer.heap_bytes(1, **LAYER))
    assert sum(each is not None for each in taken) == 14


def _in_one(sizes):
    """Returns (out, other): bf16 rows and another tensor of `sizes` bytes, in memory that they share."""
    memory = torch.zeros(sizes + 320, dtype=torch.uint8)
    return memory[:320].view(torch.bfloat16).view(5, 32), memory[240:240 + sizes]


def _across(size, dtype):
    """Returns (other, out): [5, 2] of `size` bytes, whose last element is in the first bf16 rows."""
    memory = torch.zeros(size + 320, dtype=torch.uint8)
    begin = size - size // 10
    return memory[:size].view(dtype).view(5, 2), memory[begin:begin + 320].view(torch.bfloat16).view(5, 32)


@pytest.mark.parametrize("wrong, text", [
    (lambda x, ids, weights, out: {"x": x.float()}, "x is torch.float32"),
    (lambda x, ids, weights, out: {"x": x[:, :16].contiguous()}, r"x has the shape \[5, 16\]"),
    (lambda x, ids, weights, out: {"x": x.t().contiguous().t()}, "x is not dense"),
    (lambda x, ids, weights, out: {"x": x.to("meta")}, "must be in host memory"),
    (lambda x, ids, weights, out: {"topk_ids": ids[:4]}, r"topk_ids has the shape \[4, 2\]"),
    (lambda x, ids, weights, out: {"topk_ids": ids.short()}, "topk_ids is torch.int16"),
    (lambda x, ids, weights, out: {"topk_ids": ids.t().contiguous().t()}, "topk_ids is not dense"),
    (lambda x, ids, weights, out: {"topk_weights": weights.half()}, "topk_weights is torch.float16"),
    (lambda x, ids, weights, out: {"topk_weights": weights[:, :1].contiguous()}, "topk_weights has the shape"),
    (lambda x, ids, weights, out: {"out": out[:4]}, r"out has the shape \[4, 32\]"),
    (lambda x, ids, weights, out: {"out": out.float()}, "out is torch.float32"),
    (lambda x, ids, weights, out: {"out": torch.empty(32, 5, dtype=torch.bfloat16).t()}, "out is not dense"),
    (lambda x, ids, weights, out: {"out": x}, "out shares memory with x"),
    (lambda x, ids, weights, out: dict(zip(("out", "topk_ids"), [(o, i.view(torch.int64).view(5, 2)) for o, i in [_in_one(80)]][0])),
     "out shares memory with topk_ids"),
    (lambda x, ids, weights, out: dict(zip(("out", "topk_weights"), [(o, w.view(torch.float32).view(5, 2)) for o, w in [_in_one(40)]][0])),
     "out shares memory with topk_weights"),
    (lambda x, ids, weights, out: dict(zip(("topk_ids", "out"), _across(80, torch.int64))), "out shares memory with topk_ids"),
    (lambda x, ids, weights, out: dict(zip(("topk_weights", "out"), _across(40, torch.float32))), "out shares memory with topk_weights"),
    (lambda x, ids, weights, out: {"num_sms": -1}, "num_sms"),
    (lambda x, ids, weights, out: {"add": 1}, "add"),
])
def test_what_is_wrong_in_a_layer_is_found(ranks, layer_of, wrong, text):
    def rank(group):
        layer, (x, ids, weights) = layer_of(group), tokens_of_layer(3, 5)
        out = torch.empty_like(x)
        for _ in range(3):
            layer.forward(x, ids, weights, out=out)
        given = {"x": x, "topk_ids": ids, "topk_weights": weights, "out": out, **wrong(x, ids, weights, out)}
        with pytest.raises(sy.InvalidArgument, match=text):
            layer.forward(**given)

    ranks(rank, 1, heap_bytes=sy.MoeLayer.heap_bytes(1, **LAYER))


def test_a_layer_between_its_arguments(ranks, taken, layer_of):
    """Arguments may touch `out` without sharing a byte with it, and the calls take the fast path."""

    def rank(group):
        layer, (x, long_ids, weights) = layer_of(group), tokens_of_layer(3, 5)
        want = layer(x, long_ids, weights)
        for order, ids in itertools.product(itertools.permutations(("x", "out", "ids", "weights")), (long_ids, long_ids.int())):
            memory, at, places = torch.zeros(2 * x.nbytes + 128, dtype=torch.uint8), 0, {}
            for name in order:
                tensor = {"x": x, "out": x, "ids": ids, "weights": weights}[name]
                places[name] = memory[at:at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                at += tensor.nbytes
            for name, tensor in (("x", x), ("ids", ids), ("weights", weights)):
                places[name].copy_(tensor)
            out = layer.forward(places["x"], places["ids"], places["weights"], out=places["out"])
            assert out is places["out"] and torch.equal(out, want) and torch.equal(places["x"], x) and torch.equal(places["ids"], ids)

    ranks(rank, 1, heap_bytes=sy.MoeLayer.heap_bytes(1, **LAYER))
    assert [each is not None for each in taken] == [True] * 48


def test_gradients_and_transforms_of_a_layer_are_refused(ranks, taken, layer_of):
    def rank(group):
        layer, (x, ids, weights) = layer_of(group), tokens_of_layer(3, 5)
        out = torch.empty_like(x)
        for _ in range(2):
            layer.forward(x, ids, weights, out=out)
        for given in ((x.clone().requires_grad_(), ids, weights), (x, ids, weights.clone().requires_grad_())):
            with pytest.raises(sy.Unsupported, match="requires a gradient"):
                layer.forward(*given, out=out)
            want, calls = out.clone(), len(taken)
            with torch.no_grad():
                layer.forward(*given, out=out)
            assert torch.equal(out, want) and [each is not None for each in taken[calls:]] == [True]
        with pytest.raises(sy.Unsupported, match="torch.vmap"):
            torch.vmap(lambda each: layer.forward(each, ids, weights, out=out))(torch.randn(3, 5, 32).bfloat16())

    ranks(rank, 1, heap_bytes=sy.MoeLayer.heap_bytes(1, **LAYER))


def test_closed_layer(ranks, layer_of):
    def rank(group):
        layer, (x, ids, weights) = layer_of(group), tokens_of_layer(3, 5)
        out = torch.empty_like(x)
        for _ in range(3):
            layer.forward(x, ids, weights, out=out)
        layer.close()
        with pytest.raises(sy.InvalidArgument, match="the layer is closed"):
            layer.forward(x, ids, weights, out=out)

    ranks(rank, 1, heap_bytes=sy.MoeLayer.heap_bytes(1, **LAYER))


def test_errors_of_the_library_in_a_layer(ranks, layer_of):
    def rank(group):
        layer, (x, ids, weights) = layer_of(group), tokens_of_layer(3, 9)
        for _ in range(2):
            layer.forward(x, ids, weights, out=torch.empty_like(x))
        x, ids, weights = tokens_of_layer(4, 10)
        with pytest.raises(sy.InvalidArgument, match="max_tokens"):
            layer.forward(x, ids, weights, out=torch.empty_like(x))

    ranks(rank, 1, heap_bytes=sy.MoeLayer.heap_bytes(1, **LAYER))


def test_a_closed_selector(ranks, taken, layer_of):
    """The fast path declines, and the full path reports the error to the other rank."""
    home, shape = sy.ExpertMap.home(num_experts=4, world=2, slots_per_rank=2), {**LAYER, "num_experts": 4, "exchange": "low_latency"}

    def rank(group):
        layer = sy.MoeLayer(group, torch.zeros(2, 32, 32).bfloat16(), torch.zeros(2, 32, 16).bfloat16(), **shape)
        selector, (x, ids, weights) = sy.SlotSelector(group, home), tokens_of_layer(group.rank, 7)
        for _ in range(3):
            layer(x, ids.clamp(max=3), weights, selector=selector)
        group.barrier()
        if group.rank == 0:
            selector.close()
        with pytest.raises(sy.InvalidArgument if group.rank == 0 else sy.PeerFailed, match="closed" if group.rank == 0 else "rank 0"):
            layer(x, ids.clamp(max=3), weights, selector=selector)

    ranks(rank, 2, heap_bytes=sy.MoeLayer.heap_bytes(2, **shape))
    assert sum(each is not None for each in taken) == 4
