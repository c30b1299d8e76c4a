# SPDX-License-Identifier: Apache-2.0
"""Combine by ledgers, compared with combine by the handle from which the ledgers were made."""
import numpy as np
import pytest

import oracle
import switchyard as sy

SHAPE = {"num_experts": 7, "topk": 3, "hidden": 20, "max_tokens": 9}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_sum_is_that_of_the_handle(ranks, world):
    inputs = oracle.make_inputs(world, seed=world, **SHAPE)

    def rank(group):
        exchange = sy.Exchange(group, dtype="f32", layout="expert_major", **SHAPE)
        combine = sy.LedgerCombine(group, dtype="f32", **SHAPE)
        x, ids, weights = inputs[group.rank]
        rows, handle = exchange.dispatch(x, ids, weights)
        y = rows * np.float32(group.rank + 2)
        want = exchange.combine(y, handle, order="per_route")
        prepared = combine.prepare(handle.ledger())
        assert prepared.num_tokens == len(x) and prepared.rows <= len(rows)
        out = np.empty_like(want)
        assert combine.combine(y, prepared, weights, out=out) is out
        assert np.array_equal(out, want)
        plain = combine.combine(y, prepared)
        assert np.array_equal(plain, exchange.combine(y, handle, order="per_route", apply_weights=False))
        assert combine.last_call().payload_rows >= 0
        with pytest.raises(sy.InvalidArgument, match="dispatch_offset has the shape"):
            combine.prepare(handle.ledger()._replace(dispatch_offset=np.zeros(9, np.int32)))
        if len(x):
            wrong = handle.ledger()
            wrong.expanded_row_idx[:] = 1 << 20
            with pytest.raises(sy.InvalidArgument, match="expanded_row_idx"):
                combine.prepare(wrong)

    ranks(rank, world)


def test_memory():
    need = sy.LedgerCombine.memory_required(2, dtype="f32", **SHAPE)
    assert 0 < need.total_bytes < sy.LedgerCombine.heap_bytes(2, dtype="f32", **SHAPE)
    with pytest.raises(TypeError, match="LedgerCombine"):
        sy.LedgerCombine.heap_bytes(2, hidden=4, expert=1)
