# SPDX-License-Identifier: Apache-2.0
"""A whole layer, with bf16 as bits, compared with float64."""
import numpy as np
import pytest

import oracle
import switchyard as sy
from switchyard._abi import ffi as _ffi

EXPERTS, TOPK, HIDDEN, INTERMEDIATE, TOKENS = 5, 2, 32, 16, 6
SHAPE = {"num_experts": EXPERTS, "topk": TOPK, "hidden": HIDDEN, "max_tokens": TOKENS, "intermediate": INTERMEDIATE}


def test_it_says_what_is_missing(monkeypatch):
    monkeypatch.setenv("SWITCHYARD_LAYER_LIBRARY", "libswitchyard_nowhere.so")
    monkeypatch.setattr(_ffi, "_layer", None)
    with pytest.raises(sy.LibraryNotFound, match="SWITCHYARD_LAYER_LIBRARY"):
        sy.MoeLayer.heap_bytes(2, **SHAPE)


@pytest.fixture
def layer():
    """Skips the tests if the wheel does not contain the library; most wheels do not."""
    try:
        _ffi.layer_library()
    except sy.LibraryNotFound as error:
        pytest.skip(str(error))


def weights_of_experts():
    rng = np.random.default_rng(0)
    return (oracle.to_bf16(rng.standard_normal((EXPERTS, 2 * INTERMEDIATE, HIDDEN)) / 6),
            oracle.to_bf16(rng.standard_normal((EXPERTS, HIDDEN, INTERMEDIATE)) / 4))


def reference(given, w13, w2):
    x, first, second = (oracle.from_bf16(each).astype(np.float64) for each in (given.x, w13, w2))
    out = np.zeros(x.shape)
    for t, row in enumerate(given.ids):
        for k, e in enumerate(row):
            if 0 <= e < EXPERTS:
                h = first[e] @ x[t]
                gate, up = h[:INTERMEDIATE], h[INTERMEDIATE:]
                out[t] += given.weights[t, k] * (second[e] @ (gate / (1 + np.exp(-gate)) * up))
    return out


@pytest.mark.parametrize("world, exchange, host", [(1, "normal", ""), (3, "normal", ""), (1, "low_latency", ""), (3, "low_latency", ""),
                                                   (3, "normal", "a,a,b")])
def test_forward(ranks, layer, world, exchange, host):
    inputs = [given._replace(x=oracle.to_bf16(given.x)) for given in
              oracle.make_inputs(world, seed=2, **{k: v for k, v in SHAPE.items() if k != "intermediate"})]
    w13, w2 = weights_of_experts()
    heap = sy.MoeLayer.heap_bytes(world, exchange=exchange, **SHAPE)
    assert sy.MoeLayer.memory_required(world, exchange=exchange, **SHAPE).heap_bytes <= heap

    def rank(group):
        mine = group.experts_of(EXPERTS)
        moe = sy.MoeLayer(group, w13[mine.start:mine.stop], w2[mine.start:mine.stop], exchange=exchange, **SHAPE)
        assert exchange.replace("_", " ") in moe.implementation.replace("_", " ")
        given = inputs[group.rank]
        out, want = oracle.from_bf16(moe(*given)), reference(given, w13, w2)
        np.testing.assert_allclose(out, want, rtol=0.02, atol=0.02)
        held = oracle.to_bf16(np.ones(given.x.shape))
        assert moe.forward(*given, out=held, add=True) is held
        np.testing.assert_allclose(oracle.from_bf16(held), want + 1, rtol=0.02, atol=0.03)
        assert moe.dropped() is None

    ranks(rank, world, heap_bytes=heap, host=host)


@pytest.mark.parametrize("form", ["separate", "fused"])
def test_layers_that_share_all_but_their_weights(ranks, layer, form):
    world, shape = 2, {**SHAPE, "exchange": "normal", "form": form}
    inputs = [given._replace(x=oracle.to_bf16(given.x)) for given in
              oracle.make_inputs(world, seed=5, **{k: v for k, v in SHAPE.items() if k != "intermediate"})]
    w13, w2 = weights_of_experts()
    others = oracle.to_bf16(oracle.from_bf16(w13) * 2), oracle.to_bf16(oracle.from_bf16(w2) * -1)

    def rank(group):
        mine, given = group.experts_of(EXPERTS), inputs[group.rank]
        first = sy.MoeLayer(group, w13[mine.start:mine.stop], w2[mine.start:mine.stop], **shape)
        second = first.with_weights(*(each[mine.start:mine.stop] for each in others))
        for moe, weights in ((first, (w13, w2)), (second, others), (first, (w13, w2))):
            np.testing.assert_allclose(oracle.from_bf16(moe(*given)), reference(given, *weights), rtol=0.02, atol=0.03)
        with pytest.raises(sy.InvalidArgument, match="w2 has the shape"):
            second.with_weights(others[0][mine.start:mine.stop], w2[:1])
        group.barrier()
        first.close()
        with pytest.raises(sy.InvalidArgument, match="the layer is closed"):
            first.with_weights(w13[mine.start:mine.stop], w2[mine.start:mine.stop])
        np.testing.assert_allclose(oracle.from_bf16(second(*given)), reference(given, *others), rtol=0.02, atol=0.03)

    ranks(rank, world, heap_bytes=sy.MoeLayer.heap_bytes(world, **shape))  # heap bytes of one layer


def test_drops_and_mistakes(ranks, layer):
    w13, w2 = weights_of_experts()

    def rank(group):
        moe = sy.MoeLayer(group, w13, w2, exchange="normal", capacity=2, overflow="drop_and_report", **SHAPE)
        x, ids = oracle.to_bf16(np.ones((3, HIDDEN))), np.array([[0, 1], [0, 1], [0, 1]])
        moe(x, ids)
        assert moe.dropped().shape == (3, 2) and moe.dropped().sum() == 4
        with pytest.raises(sy.InvalidArgument, match="w2 has the shape"):
            sy.MoeLayer(group, w13, w2[:2], **SHAPE)
        with pytest.raises(sy.InvalidArgument, match="needs `out`"):
            moe(x, ids, add=True)

    ranks(rank, 1)


def test_split_calls(ranks, layer):
    """All routes go to one rank, which accepts those of two tokens of each rank."""
    w13, w2 = weights_of_experts()
    config = {**SHAPE, "exchange": "normal", "form": "fused", "capacity": 2 * 2 * SHAPE["topk"]}

    def rank(group):
        mine = group.experts_of(SHAPE["num_experts"])
        weights = w13[mine.start:mine.stop], w2[mine.start:mine.stop]
        moe = sy.MoeLayer(group, *weights, overflow="split", **config)
        x = oracle.to_bf16(np.random.default_rng(group.rank).standard_normal((5, HIDDEN)))
        ids = np.zeros((5, SHAPE["topk"]), np.int64)
        parts = np.concatenate([moe(x[i:i + 1].copy(), ids[:1]) for i in range(5)])  # each fits
        np.testing.assert_allclose(oracle.from_bf16(moe(x, ids)), oracle.from_bf16(parts), rtol=0.02, atol=0.03)
        assert moe.dropped() is None
        with pytest.raises(sy.Unsupported, match="overflow = 'split': must be 'fail' or 'drop_and_report', except in the fused form"):
            sy.MoeLayer(group, *weights, overflow="split", **{**config, "form": "separate"})

    ranks(rank, 2, heap_bytes=sy.MoeLayer.heap_bytes(2, overflow="split", **config))


def test_a_grouped_gemm_is_for_gpus(layer):
    with pytest.raises(sy.InvalidArgument, match="weights is on the CPU: must be on a GPU|weights is on cpu: must be on a GPU"):
        sy.GroupedGemm(np.zeros((2, 16, 16), np.uint16))
    with pytest.raises(sy.InvalidArgument, match=r"weights has the shape \[2, 16\]"):
        sy.GroupedGemm(np.zeros((2, 16), np.uint16))
