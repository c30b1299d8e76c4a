# SPDX-License-Identifier: Apache-2.0
"""Rows in the caller's memory, and scales in any memory order."""
import numpy as np
import pytest

import oracle
import switchyard as sy

EXPERTS, TOPK, TOKENS = 7, 3, 9


def shape(hidden):
    return {"num_experts": EXPERTS, "topk": TOPK, "hidden": hidden, "max_tokens": TOKENS}


@pytest.mark.parametrize("staging", ["direct", "ring"])
@pytest.mark.parametrize("layout", ["rank_major", "expert_major"])
@pytest.mark.parametrize("size", ["exact", "worst_case"])
def test_rows_are_where_they_shall_be(ranks, layout, size, staging):
    """On some ranks only, fresh and cached. The pool holds one output, and the rows of all layers are kept."""
    inputs = oracle.make_inputs(3, seed=3, tokens=[5, 0, 9], **shape(16))

    def rank(group):
        exchange = sy.Exchange(group, dtype="f32", layout=layout, staging=staging, **shape(16))
        x, ids, weights = inputs[group.rank]
        own, handle = exchange.dispatch(x, ids, weights, size=size)
        want, count = own.copy(), handle.rows
        other = exchange.dispatch(2 * x, handle=handle)[0].copy()
        del own
        layers = []
        for layer in range(10):
            out = None if group.rank == 2 and layer == 4 else np.full((len(want) + layer, 16), np.nan, np.float32)
            if layer % 2 == 0:
                rows, again = exchange.dispatch(x, ids, weights, size=size, out=out)
                assert again.rows == count
            else:
                rows, again = exchange.dispatch(2 * x, handle=handle, out=out)
            assert rows.shape == want.shape
            assert out is None or len(rows) == 0 or rows.ctypes.data == out.ctypes.data
            if out is not None:
                assert np.isnan(out[len(want):]).all()
            layers.append((layer, rows if out is not None else rows.copy(), again))
            del rows
        for layer, rows, again in layers:
            assert np.array_equal(rows[:count], (other if layer % 2 else want)[:count])
        weighted = layout == "expert_major"
        sums = exchange.combine(layers[0][1], layers[0][2], apply_weights=weighted)
        assert np.array_equal(sums, exchange.combine(want, handle, apply_weights=weighted))

    ranks(rank, 3)


def test_rows_of_the_exchange_need_no_copy(ranks):
    inputs = oracle.make_inputs(2, seed=4, tokens=[5, 9], bad_ids=False, **shape(16))

    def rank(group):
        exchange = sy.Exchange(group, dtype="f32", **shape(16))
        x, ids, _ = inputs[group.rank]
        want, handle = exchange.dispatch(x, ids)
        want = want.copy()
        mine = exchange.allocate_rows(handle)
        rows, _ = exchange.dispatch(x, handle=handle, out=mine)
        assert exchange.last_call().copied_bytes == 0
        assert rows.ctypes.data == mine.ctypes.data and np.array_equal(rows, want)
        exchange.dispatch(x, handle=handle, out=np.empty_like(want))
        assert exchange.last_call().copied_bytes == want.nbytes

    ranks(rank, 2)


@pytest.mark.parametrize("quantize", ["f32", "ue8m0"])
@pytest.mark.parametrize("hidden", [144, 512, 2048])
def test_fp8_rows_and_scales(ranks, hidden, quantize):
    inputs = oracle.make_inputs(2, seed=hidden, **shape(hidden))
    groups = -(-hidden // 128)
    columns, dtype = (-(-groups // 4) * 4, np.float32) if quantize == "f32" else (-(-groups // 16) * 16, np.uint8)

    def rank(group):
        exchange = sy.Exchange(group, dtype="f32", layout="expert_major", **shape(hidden))
        x, ids, weights = inputs[group.rank]
        (rows, scales), handle = exchange.dispatch(x, ids, weights, quantize=quantize)
        rows, scales = rows.copy(), scales.copy()
        out = (np.zeros((len(rows) + 2, hidden), np.uint8), np.zeros((len(rows) + 2, columns), dtype))
        (got, its), _ = exchange.dispatch(x, ids, weights, quantize=quantize, out=out)
        assert np.array_equal(got, rows) and np.array_equal(its, scales) and np.array_equal(out[0][:len(rows)], rows)
        # Sent unchanged, with scales in other memory orders.
        tokens = len(x)
        given = np.random.default_rng(1).integers(0, 120, (tokens, hidden)).astype(np.uint8)
        dense = (np.arange(tokens * groups).reshape(tokens, groups) % 200 + 1).astype(dtype)
        want = [each.copy() for each in exchange.dispatch((given, dense), handle=handle)[0]]
        by_columns = np.asfortranarray(dense)
        apart = np.zeros((tokens, 2 * groups), dtype)[:, ::2]
        apart[:] = dense
        orders = [by_columns, apart]
        if quantize == "ue8m0":
            packed = np.zeros((tokens, -(-groups // 4) * 4), np.uint8)
            packed[:, :groups] = dense
            words = packed.view(np.int32)
            orders += [words, np.asfortranarray(words)]
        for each in orders:
            got = exchange.dispatch((given, each), handle=handle)[0]
            assert np.array_equal(got[0], want[0]) and np.array_equal(got[1], want[1])

    ranks(rank, 2)


def test_what_is_refused(ranks):
    def rank(group):
        exchange = sy.Exchange(group, dtype="f32", **shape(16))
        x, ids = np.ones((4, 16), np.float32), np.zeros((4, TOPK), np.int32)
        rows, handle = exchange.dispatch(x, ids)
        count = len(rows)
        del rows
        # Detectable only from the counts: all ranks receive the error and continue.
        if group.rank == 0:
            with pytest.raises(sy.PoolExhausted, match="out has room for 3 rows"):
                exchange.dispatch(x, ids, out=np.empty((3, 16), np.float32))
        else:
            with pytest.raises(sy.PoolExhausted):
                exchange.dispatch(x, ids)
        assert len(exchange.dispatch(x, ids, out=np.empty((count, 16), np.float32))[0]) == count

    ranks(rank, 2)
    wrong = [
        (np.empty((9, 16), np.float16), "out is float16: must be f32"),
        (np.empty((9, 8), np.float32), r"out has the shape \[9, 8\]"),
        (np.empty((9, 32), np.float32)[:, ::2], "out is not dense"),
        ((np.empty((9, 16), np.float32), np.empty((9, 4), np.float32)), "out: fp8 rows, and only these"),
        (np.empty((3, 16), np.float32), r"out has 3 rows: the dispatch allocates 9 rows"),
    ]
    for out, text in wrong:

        def alone(group, out=out, text=text):
            exchange = sy.Exchange(group, dtype="f32", **shape(16))
            with pytest.raises(sy.InvalidArgument, match=text):
                exchange.dispatch(np.ones((4, 16), np.float32), np.zeros((4, TOPK), np.int32), size="worst_case", out=out)

        ranks(alone, 1)


@pytest.mark.parametrize("config", [{"scales": None}, {"scales": "f32"}, {"scales": "f32", "scale_order": "column_major"}, {"scales": "ue8m0"},
                                    {"scales": "ue8m0", "scale_order": "column_major"}], ids=str)
def test_low_latency_outputs(ranks, config):
    hidden, inputs = 272, oracle.make_inputs(2, seed=8, bad_ids=False, tokens=[5, 9], **shape(272))

    def rank(group):
        ll = sy.LowLatency(group, dtype="f32", **config, **shape(hidden))
        x, ids, weights = inputs[group.rank]
        here, per_expert = len(group.experts_of(EXPERTS)), 2 * TOKENS
        memory = np.zeros((here, per_expert, hidden), np.float32 if config["scales"] is None else np.uint8)
        given, by_columns = memory, config.get("scale_order") == "column_major"
        if config["scales"] is not None:
            dtype = np.int32 if by_columns and config["scales"] == "ue8m0" else np.float32 if config["scales"] == "f32" else np.uint8
            columns = {np.float32: 3, np.int32: 1}[dtype] if by_columns else {np.float32: 4, np.uint8: 16}[dtype]
            scales = np.zeros((here, columns, -(-per_expert // 4) * 4) if by_columns else (here, per_expert, columns), dtype)
            given = (memory, scales)
        output = ll.make_output(memory=given)
        want = ll.dispatch(x, ids, weights)
        got = ll.dispatch(x, ids, weights, output=output)
        assert got is output and got.x.ctypes.data == memory.ctypes.data and np.array_equal(got.rows, want.rows)
        for e in range(here):
            count = want.rows[e]
            assert np.array_equal(memory[e, :count], want.x[e, :count])
            assert config["scales"] is None or np.array_equal(got.scales[e, :count], want.scales[e, :count])
        y = np.random.default_rng(1).standard_normal(want.x.shape).astype(np.float32)
        assert np.array_equal(ll.combine(y, got), ll.combine(y, want))
        with pytest.raises(sy.InvalidArgument, match="memory"):
            ll.make_output(memory=np.zeros((here, per_expert, hidden), np.float16))

    ranks(rank, 2)


def test_low_latency_scales_in_any_order(ranks):
    hidden, groups = 400, 4

    def rank(group):
        for kind in ("f32", "ue8m0"):
            ll = sy.LowLatency(group, dtype="f32", scales=kind, **shape(hidden))
            rows = np.random.default_rng(group.rank).integers(0, 120, (6, hidden)).astype(np.uint8)
            ids = np.zeros((6, TOPK), np.int64)
            dense = (np.arange(6 * groups).reshape(6, groups) + 1).astype(np.float32 if kind == "f32" else np.uint8)
            received = ll.dispatch((rows, dense), ids)
            want = [received.x.copy(), received.scales.copy()]
            others = [np.asfortranarray(dense)]
            if kind == "ue8m0":
                others.append(np.asfortranarray(np.ascontiguousarray(dense).view(np.int32)))
            for each in others:
                received = ll.dispatch((rows, each), ids)
                for e, count in enumerate(received.rows):
                    assert np.array_equal(received.x[e, :count], want[0][e, :count])
                    assert np.array_equal(received.scales[e, :count], want[1][e, :count])

    ranks(rank, 2)


def test_row_memory_is_for_gpus(ranks):
    def alone(group):
        with pytest.raises(sy.Unsupported, match="tensors on GPUs"):
            sy.RowMemory(group, 4096)

    ranks(alone, 1)
