# SPDX-License-Identifier: Apache-2.0
"""Low-latency mode with numpy arrays, compared with the oracle."""
import numpy as np
import pytest

import oracle
import switchyard as sy

EXPERTS, TOPK, HIDDEN, TOKENS = 7, 3, 32, 6
SHAPE = {"num_experts": EXPERTS, "topk": TOPK, "hidden": HIDDEN, "max_tokens": TOKENS}


def without_repeats(inputs):
    """Returns inputs in which no token repeats an expert, because a repeated expert is one row in this mode."""
    changed = []
    for given in inputs:
        ids = given.ids.copy()
        for row in ids:
            for k in range(len(row)):
                while row[k] in row[:k]:
                    row[k] = (row[k] + 1) % EXPERTS
        changed.append(given._replace(ids=ids))
    return changed


def experts_rows(inputs, rank):
    """Rows and sources of each local expert, ordered by source and token."""
    there = oracle.expert_major(inputs, EXPERTS, rank)
    begins = np.concatenate([[0], np.cumsum(there.counts)])
    return [(there.x[a:b], there.source[a:b]) for a, b in zip(begins, begins[1:])]


def check_received(received, inputs, rank):
    for expert, (x, source) in enumerate(experts_rows(inputs, rank)):
        count = received.rows[expert]
        assert count == len(x)
        assert np.array_equal(received.x[expert, :count], x)
        assert np.array_equal(received.row_source[expert, :count], source)
        ranges = received.source_range[expert]
        assert np.array_equal(ranges & 0xFFFFFFFF, np.bincount(source >> 48, minlength=len(inputs)))


@pytest.mark.parametrize("sending", ["per_rank", "per_route"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_exchange(ranks, world, sending):
    inputs = without_repeats(oracle.make_inputs(world, seed=world, **SHAPE))

    def made(r):
        return oracle.expert_major(inputs, EXPERTS, r).x * np.float32(3)

    def rank(group):
        exchange = sy.LowLatency(group, dtype="f32", sending=sending, **SHAPE)
        for weighted in (True, False):
            x, ids, weights = inputs[group.rank]
            received = exchange.dispatch(x, ids, weights if weighted else None)
            check_received(received, inputs, group.rank)
            y = exchange.make_rows(received)
            assert y.shape == received.x.shape == (len(group.experts_of(EXPERTS)), world * TOKENS, HIDDEN)
            with np.errstate(all="ignore"):  # invalid rows may have any bits
                y[:] = received.x * np.float32(3)
            for order in ("per_route", "per_rank"):
                out = exchange.combine(y, received, order=order)
                assert np.array_equal(out, oracle.combine_expert_major(inputs, EXPERTS, group.rank, made, order, weighted))
        own = exchange.combine(y, received, topk_weights=weights, out=np.empty_like(x))
        assert np.array_equal(own, oracle.combine_expert_major(inputs, EXPERTS, group.rank, made, "per_route", True))
        assert exchange.last_call().total_us > 0

    ranks(rank, world)


def test_halves(ranks):
    inputs = without_repeats(oracle.make_inputs(2, seed=4, **SHAPE))

    def rank(group):
        exchange = sy.LowLatency(group, dtype="f32", **SHAPE)
        pending = exchange.dispatch_async(*inputs[group.rank])
        received = pending.wait()
        assert pending.wait() is received  # only the first call has an effect
        check_received(received, inputs, group.rank)
        first = exchange.combine(received.x, received)
        second = exchange.combine_async(received.x, received).wait()
        assert np.array_equal(first, second)

    ranks(rank, 2)


def test_all_to_all(ranks):
    inputs = without_repeats(oracle.make_inputs(2, seed=5, **SHAPE))

    def made(r):
        return oracle.expert_major(inputs, EXPERTS, r).x * np.float32(2)

    def rank(group):
        exchange = sy.LowLatency(group, dtype="f32", **SHAPE)
        scale = np.full(len(group.experts_of(EXPERTS)), 2, np.float32)
        out = exchange.all_to_all(*inputs[group.rank], expert_scale=scale)
        assert np.array_equal(out, oracle.combine_expert_major(inputs, EXPERTS, group.rank, made, "per_route", True))

    ranks(rank, 2)


@pytest.mark.parametrize("order", ["row_major", "column_major"])
@pytest.mark.parametrize("kind", ["f32", "ue8m0"])
def test_scales(ranks, kind, order):
    shape = {**SHAPE, "hidden": 288}  # three groups of 128 columns, the last one short
    inputs = without_repeats(oracle.make_inputs(2, seed=7, **shape))

    def rank(group):
        exchange = sy.LowLatency(group, dtype="f32", scales=kind, scale_order=order, **shape)
        received = exchange.dispatch(inputs[group.rank].x, inputs[group.rank].ids)
        packed = kind == "ue8m0" and order == "column_major"
        assert received.scales.shape == (*received.x.shape[:2], 1 if packed else 3)
        if order == "column_major":
            assert received.scales.strides[1] == 4
        for expert, (x, _) in enumerate(experts_rows(inputs, group.rank)):
            amax = np.pad(np.abs(x), ((0, 0), (0, 96))).reshape(len(x), 3, 128).max(-1) / np.float32(448)
            got = received.scales[expert, :len(x)]
            if kind == "f32":
                assert np.array_equal(got, amax)
            else:
                exponents = np.ceil(np.log2(amax)).astype(np.int64) + 127
                assert np.array_equal(got, exponents @ [[1], [256], [65536]] if packed else exponents)

    ranks(rank, 2)


def test_outputs_of_ones_own(ranks):
    inputs = without_repeats(oracle.make_inputs(2, seed=8, **SHAPE))
    others = [given._replace(x=given.x + 1) for given in inputs]

    def rank(group):
        exchange = sy.LowLatency(group, dtype="f32", **SHAPE)
        outputs = [exchange.make_output() for _ in range(2)]
        for output, given in zip(outputs, (inputs, others)):
            assert exchange.dispatch(*given[group.rank], output=output) is output
        check_received(outputs[0], inputs, group.rank)
        check_received(outputs[1], others, group.rank)
        default = exchange.dispatch(*inputs[group.rank])
        assert exchange.dispatch(*others[group.rank]) is default  # overwritten
        check_received(default, others, group.rank)

    ranks(rank, 2)


def test_sizes_and_mistakes(ranks):
    assert sy.LowLatency.memory_required(4, **SHAPE).total_bytes <= sy.LowLatency.heap_bytes(4, **SHAPE)

    def rank(group):
        exchange = sy.LowLatency(group, dtype="f32", **SHAPE)
        with pytest.raises(sy.InvalidArgument, match=r"y has the shape \[2, 32\]: must be \[7, 6, 32\]"):
            exchange.combine(np.zeros((2, HIDDEN), np.float32), exchange.make_output())

    ranks(rank, 1)
    with pytest.raises(sy.InvalidArgument, match="sending = 'twice'"):
        sy.LowLatency.heap_bytes(4, sending="twice", **SHAPE)


def test_letting_go(ranks):
    def rank(group):
        exchange = sy.LowLatency(group, dtype="f32", **SHAPE)
        received = exchange.dispatch(np.ones((2, HIDDEN), np.float32), np.array([[0, 1, 2]] * 2))
        rows = exchange.make_rows(received)
        x = received.x
        exchange.close()
        del exchange, received
        rows[:] = 1
        assert (x[0, :2] == 1).all()

    ranks(rank, 1)
