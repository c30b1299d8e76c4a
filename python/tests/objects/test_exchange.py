# SPDX-License-Identifier: Apache-2.0
"""Normal mode with numpy arrays, compared with the oracle element by element."""
import numpy as np
import pytest

import oracle
import switchyard as sy

EXPERTS, TOPK, HIDDEN, TOKENS = 7, 3, 16, 9
SHAPE = {"num_experts": EXPERTS, "topk": TOPK, "hidden": HIDDEN, "max_tokens": TOKENS}


def typed(inputs, dtype):
    """The same inputs with rows of the given type; bf16 rows as bits."""
    cast = {"f32": lambda x: x, "f16": lambda x: x.astype(np.float16), "bf16": oracle.to_bf16}[dtype]
    return [given._replace(x=cast(given.x)) for given in inputs]


def check_rank_major(rows, handle, want, weighted):
    assert rows.shape == want.x.shape and np.array_equal(rows, want.x)
    assert handle.rows == len(want.x)
    assert np.array_equal(handle.topk_ids, want.ids)
    assert handle.topk_ids_int64.dtype == np.int64 and np.array_equal(handle.topk_ids_int64, want.ids)
    assert np.array_equal(handle.source_token, want.tokens)
    assert handle.row_source is None and handle.row_weights is None and handle.expert_first_row is None
    if weighted:
        assert np.array_equal(handle.topk_weights, want.weights)
    elif len(want.x):
        assert handle.topk_weights is None


@pytest.mark.parametrize("staging", ["direct", "ring"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_rank_major(ranks, world, dtype, staging):
    weighted = dtype != "f16"
    inputs = typed(oracle.make_inputs(world, seed=world, weights=weighted, **SHAPE), dtype)

    def rank(group):
        exchange = sy.Exchange(group, dtype=dtype, staging=staging, **SHAPE)
        x, ids, weights = inputs[group.rank]
        rows, handle = exchange.dispatch(x, ids, weights)
        check_rank_major(rows, handle, oracle.rank_major(inputs, EXPERTS, group.rank), weighted)
        assert handle.num_tokens == len(x) and handle.layout == "rank_major"
        out = exchange.combine(rows, handle)
        assert out.dtype == x.dtype
        if dtype == "f32":
            want = oracle.combine_rank_major(inputs, EXPERTS, group.rank, lambda r: oracle.rank_major(inputs, EXPERTS, r).x)
            assert np.array_equal(out, want)

    ranks(rank, world)


def test_weights_come_back_as_sums(ranks):
    inputs = oracle.make_inputs(3, seed=5, bad_ids=False, **SHAPE)

    def rank(group):
        exchange = sy.Exchange(group, dtype="f32", **SHAPE)
        x, ids, weights = inputs[group.rank]
        rows, handle = exchange.dispatch(x, ids, weights)
        out, summed = exchange.combine(rows, handle, topk_weights=handle.topk_weights, bias=[x, x])
        # Each choice has one owner, so its weight is returned unsummed.
        assert np.array_equal(summed, weights)
        want = oracle.combine_rank_major(inputs, EXPERTS, group.rank, lambda r: oracle.rank_major(inputs, EXPERTS, r).x)
        np.testing.assert_allclose(out, want + x + x, rtol=1e-5, atol=1e-5)

    ranks(rank, 3)


@pytest.mark.parametrize("order", ["per_rank", "per_route"])
@pytest.mark.parametrize("expert_alignment", [1, 4])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_expert_major(ranks, world, expert_alignment, order):
    inputs = oracle.make_inputs(world, seed=10 + world, ids_type=np.int32, **SHAPE)

    def made(r):
        """Returns the expert outputs of the rows of rank r."""
        return oracle.expert_major(inputs, EXPERTS, r, expert_alignment).x * np.float32(r + 2)

    def rank(group):
        exchange = sy.Exchange(group, dtype="f32", layout="expert_major", expert_alignment=expert_alignment, **SHAPE)
        rows, handle = exchange.dispatch(*inputs[group.rank])
        want = oracle.expert_major(inputs, EXPERTS, group.rank, expert_alignment)
        assert np.array_equal(rows, want.x)
        assert np.array_equal(handle.row_source, want.source)
        assert np.array_equal(handle.row_weights[want.source >= 0], want.weights[want.source >= 0])
        assert np.array_equal(handle.tokens_per_expert, want.counts)
        assert np.array_equal(handle.aligned_per_expert, want.aligned)
        assert np.array_equal(handle.offsets, np.cumsum(want.aligned)) and handle.offsets.dtype == np.int32
        assert handle.topk_ids is None and handle.dropped is None
        counts = handle.counts()
        assert counts.rows == len(want.x) and np.array_equal(counts.tokens_per_expert, want.counts)
        y = exchange.allocate_rows(handle)
        assert y.shape == rows.shape
        y[:] = rows * np.float32(group.rank + 2)
        for weighted in (True, False):
            out = exchange.combine(y, handle, order=order, apply_weights=weighted)
            assert np.array_equal(out, oracle.combine_expert_major(inputs, EXPERTS, group.rank, made, order, weighted, expert_alignment))

    ranks(rank, world)


def test_cached_dispatch_moves_other_rows_the_same_way(ranks):
    inputs = oracle.make_inputs(3, seed=3, **SHAPE)
    others = [given._replace(x=given.x[::-1] * 2) for given in inputs]

    def rank(group):
        exchange = sy.Exchange(group, dtype="f32", **SHAPE)
        rows, handle = exchange.dispatch(*inputs[group.rank])
        again, same = exchange.dispatch(others[group.rank].x.copy(), handle=handle)
        assert same is handle
        assert np.array_equal(again, oracle.rank_major(others, EXPERTS, group.rank).x)
        assert np.array_equal(rows, oracle.rank_major(inputs, EXPERTS, group.rank).x)
        restored = exchange.handle_from_bytes(handle.to_bytes())
        assert restored.num_tokens == handle.num_tokens and restored.rows == handle.rows
        del again
        third, _ = exchange.dispatch(inputs[group.rank].x, handle=restored)
        assert np.array_equal(third, rows)
        assert np.array_equal(exchange.combine(third, restored, apply_weights=False), exchange.combine(rows, handle, apply_weights=False))

    ranks(rank, 3, heap_bytes=64 << 20)


@pytest.mark.parametrize("tokens", [[0, 0, 0], [0, 5, 0], [3, 0, 9]])
@pytest.mark.parametrize("layout", ["rank_major", "expert_major"])
def test_ranks_without_tokens(ranks, layout, tokens):
    inputs = oracle.make_inputs(3, seed=8, tokens=tokens, **SHAPE)

    def rank(group):
        exchange = sy.Exchange(group, dtype="f32", layout=layout, **SHAPE)
        rows, handle = exchange.dispatch(*inputs[group.rank])
        want = (oracle.rank_major if layout == "rank_major" else oracle.expert_major)(inputs, EXPERTS, group.rank)
        assert np.array_equal(rows, want.x)
        out = exchange.combine(rows, handle, apply_weights=layout == "expert_major")
        assert out.shape == (tokens[group.rank], HIDDEN)

    ranks(rank, 3)


@pytest.mark.parametrize("capacity", [0, 5, 11])
def test_drops_beyond_a_capacity(ranks, capacity):
    world = 3
    inputs = oracle.make_inputs(world, seed=2, tokens=[9, 4, 7], **SHAPE)

    def rank(group):
        exchange = sy.Exchange(group, dtype="f32", layout="expert_major", **SHAPE)
        rows, handle = exchange.dispatch(*inputs[group.rank], capacity=capacity, overflow="drop_and_report")
        everywhere = [oracle.expert_major(inputs, EXPERTS, r, 1, capacity) for r in range(world)]
        want = everywhere[group.rank]
        assert handle.rows == len(want.x) and np.array_equal(rows[:handle.rows], want.x)
        assert np.array_equal(handle.tokens_per_expert, want.counts)
        assert np.array_equal(handle.dropped, sum(there.dropped[group.rank] for there in everywhere))
        assert handle.dropped_per_source.sum() == sum(each.sum() for each in want.dropped)
        out = exchange.combine(rows, handle, order="per_route")
        made = [there.x for there in everywhere]
        assert np.array_equal(out, oracle.combine_expert_major(inputs, EXPERTS, group.rank, made.__getitem__, "per_route", True, 1,
                                                               capacity))
        return int(handle.dropped.sum())

    assert sum(ranks(rank, world)) > 0


def test_capacity_that_fails_leaves_everything_usable(ranks):
    inputs = oracle.make_inputs(2, seed=2, tokens=[9, 9], bad_ids=False, **SHAPE)

    def rank(group):
        exchange = sy.Exchange(group, dtype="f32", **SHAPE)
        with pytest.raises(sy.CapacityExceeded):
            exchange.dispatch(*inputs[group.rank], capacity=1)
        rows, _ = exchange.dispatch(*inputs[group.rank])
        assert np.array_equal(rows, oracle.rank_major(inputs, EXPERTS, group.rank).x)

    ranks(rank, 2)


@pytest.mark.parametrize("kind", ["f32", "ue8m0"])
def test_quantised_rows(ranks, kind):
    """Scales are compared element by element with those of the rows; rows times scales equal the rows within the precision of
    e4m3; and rows that are already fp8 are transferred with their scales bit for bit."""
    shape = {**SHAPE, "hidden": 320}  # the last group is short, and float32 scales are padded
    inputs = oracle.make_inputs(2, seed=4, **shape)

    def rank(group):
        exchange = sy.Exchange(group, dtype="f32", **shape)
        (q, scales), handle = exchange.dispatch(inputs[group.rank].x, inputs[group.rank].ids, quantize=kind)
        want = oracle.rank_major(inputs, EXPERTS, group.rank).x
        assert q.shape == want.shape and q.dtype == np.uint8 and scales.shape == (len(want), 3)
        padded = np.pad(np.abs(want), ((0, 0), (0, 64))).reshape(len(want), 3, 128).max(-1)
        if kind == "f32":
            assert np.array_equal(scales, padded / np.float32(448))
            factors = scales
        else:
            assert np.array_equal(scales, np.ceil(np.log2(padded / np.float32(448))).astype(np.int32) + 127)
            factors = np.float32(2) ** (scales.astype(np.float32) - 127)
        values = e4m3(q) * np.repeat(factors, 128, axis=1)[:, :320]
        np.testing.assert_allclose(values, want, rtol=1 / 16, atol=float(factors.max()) * 2**-9)
        # The first rank returns its rows, which are fp8, to their sources.
        (again, its_scales), _ = exchange.dispatch((np.ascontiguousarray(q[:1]).repeat(len(inputs[group.rank].x), 0),
                                                    np.ascontiguousarray(scales[:1]).repeat(len(inputs[group.rank].x), 0)),
                                                   handle=handle)
        mine = [i for i, source in enumerate(oracle.rank_major(inputs, EXPERTS, group.rank).sources) if source == group.rank]
        assert all(np.array_equal(again[i], q[0]) and np.array_equal(its_scales[i], scales[0]) for i in mine) and mine

    ranks(rank, 2)


def e4m3(bits):
    """Values of fp8 e4m3 (no infinities) from their bits."""
    bits = bits.astype(np.int32)
    sign, exponent, mantissa = np.where(bits & 0x80, -1.0, 1.0), bits >> 3 & 0xF, bits & 7
    return sign * np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0**(exponent - 7.0))


def test_static_sizes(ranks):
    inputs = oracle.make_inputs(2, seed=6, tokens=[4, 5], **SHAPE)

    def rank(group):
        exchange = sy.Exchange(group, dtype="f32", **SHAPE)
        rows, handle = exchange.dispatch(*inputs[group.rank], size="worst_case")
        want = oracle.rank_major(inputs, EXPERTS, group.rank)
        assert rows.shape == (2 * TOKENS, HIDDEN) and handle.rows == len(want.x)
        assert np.array_equal(rows[:handle.rows], want.x)
        assert (handle.source_token[handle.rows:] == -1).all() and (handle.topk_ids[handle.rows:] == -1).all()

    ranks(rank, 2)


def test_matrices_and_ledger(ranks):
    inputs = oracle.make_inputs(3, seed=9, **SHAPE)

    def rank(group):
        exchange = sy.Exchange(group, dtype="f32", **SHAPE)
        x, ids, weights = inputs[group.rank]
        _, handle = exchange.dispatch(x, ids, weights)
        m = handle.matrices(2)
        touched = np.array([[any(e in oracle.experts_of(EXPERTS, 3, r) for e in row) for r in range(3)] for row in ids]).reshape(-1, 3)
        assert m.is_token_in_rank.dtype == bool and np.array_equal(m.is_token_in_rank, touched)
        here = oracle.rank_major(inputs, EXPERTS, group.rank)
        assert np.array_equal(m.recv_src_idx, here.tokens)
        assert np.array_equal(np.diff(m.rank_prefix_matrix[:, group.rank], prepend=0), np.bincount(here.sources, minlength=3))
        ledger = handle.ledger()
        assert ledger.expanded_row_idx.shape == (ids.size,)
        assert ((ledger.expanded_row_idx >= 0) == ((ids >= 0) & (ids < EXPERTS)).ravel()).all()
        layout = sy.routing_layout(ids, num_experts=EXPERTS, world=3)
        assert np.array_equal(layout.is_token_in_rank, touched)
        assert np.array_equal(layout.num_tokens_per_rank, touched.sum(0))
        assert np.array_equal(layout.num_tokens_per_expert, [(ids == e).sum() for e in range(EXPERTS)])

    ranks(rank, 3)


def test_outputs_of_the_caller(ranks):
    inputs = oracle.make_inputs(2, seed=1, **SHAPE)

    def rank(group):
        with sy.Exchange(group, dtype="f32", **SHAPE) as exchange:
            rows, handle = exchange.dispatch(*inputs[group.rank])
            out = np.full(inputs[group.rank].x.shape, np.nan, np.float32)
            assert exchange.combine(rows, handle, apply_weights=False, out=out) is out
            assert np.array_equal(out, exchange.combine(rows.copy(), handle, apply_weights=False))
            assert exchange.last_call().total_us > 0

    ranks(rank, 2)


def test_sizes_without_a_group():
    config = dict(SHAPE, layout="expert_major", dtype="f32")
    required = sy.Exchange.memory_required(4, **config)
    assert 0 < required.total_bytes <= sy.Exchange.heap_bytes(4, **config)
    assert sy.Exchange.heap_bytes(4, routing_gradients=True, **config) > sy.Exchange.heap_bytes(4, **config)
    assert [list(oracle.experts_of(7, 3, r)) for r in range(3)] == [
        list(range(sy.first_expert(7, 3, r), sy.first_expert(7, 3, r + 1))) for r in range(3)]


def test_heap_bytes_suffice(ranks):
    config = dict(SHAPE, layout="expert_major", dtype="f32", routing_gradients=True)
    heap = sy.Exchange.heap_bytes(2, **config)
    ranks(lambda group: sy.Exchange(group, **config), 2, heap_bytes=heap)
    with pytest.raises(sy.HeapExhausted):
        ranks(lambda group: sy.Exchange(group, **config), 2, heap_bytes=8192)


def test_graph_memory(ranks):
    """The CPU has no graphs: graph memory has no effect there and lives as long as it is referenced."""
    inputs = oracle.make_inputs(1, seed=3, **SHAPE)

    def rank(group):
        exchange, other = sy.Exchange(group, dtype="f32", **SHAPE), sy.Exchange(group, dtype="f32", **SHAPE)
        memory = exchange.make_graph_memory()
        for used in (memory, None, memory):
            exchange.use_graph_memory(used)
            rows, _ = exchange.dispatch(*inputs[0])
            assert np.array_equal(rows, oracle.rank_major(inputs, SHAPE["num_experts"], 0).x)
            del rows
        with pytest.raises(sy.InvalidArgument, match="made by another exchange"):
            other.use_graph_memory(memory)
        exchange.close()
        with pytest.raises(sy.InvalidArgument, match="is closed"):
            exchange.make_graph_memory()
        del memory

    ranks(rank, 1)
