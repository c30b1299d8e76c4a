# SPDX-License-Identifier: Apache-2.0
"""Ids that are neither -1 nor an expert, in exchanges, low latency and layers: an error by default, counted on request."""
import numpy as np
import pytest

import switchyard as sy

EXPERTS, TOPK, TOKENS, HIDDEN = 4, 2, 3, 16
SIZES = {"hidden": HIDDEN, "num_experts": EXPERTS, "topk": TOPK, "max_tokens": TOKENS}


def _ids(dtype, *invalid):
    """One id is -1. The `invalid` ids follow it."""
    ids = np.arange(TOKENS * TOPK, dtype=dtype) % EXPERTS
    ids[0] = -1
    ids[1:1 + len(invalid)] = invalid
    return ids.reshape(TOKENS, TOPK)


def _x():
    return np.ones((TOKENS, HIDDEN), np.float32)


def _exchange(layout):
    def make(group, **options):
        exchange = sy.Exchange(group, dtype="f32", layout=layout, **SIZES, **options)

        def call(ids):
            rows, handle = exchange.dispatch(_x(), ids)
            return exchange.combine(rows, handle), handle

        return exchange, call

    return make


def _low_latency(group, **options):
    exchange = sy.LowLatency(group, dtype="f32", **SIZES, **options)

    def call(ids):
        received = exchange.dispatch(_x(), ids)
        return exchange.combine(received.x, received), None

    return exchange, call


MODES = [pytest.param(_exchange("rank_major"), id="rank_major"), pytest.param(_exchange("expert_major"), id="expert_major"),
         pytest.param(_low_latency, id="low_latency")]


@pytest.mark.parametrize("make", MODES)
@pytest.mark.parametrize("dtype, bad", [(np.int32, EXPERTS), (np.int64, EXPERTS), (np.int64, 2**32 + 1), (np.int32, -2)])
def test_the_first_invalid_id_is_named(make, dtype, bad):
    def rank(group):
        _, call = make(group)
        call(_ids(dtype, *([bad] if group.rank == 1 else [])))

    with pytest.raises(sy.InvalidArgument, match=rf"topk_ids\[0\]\[1\] = {bad} "):
        sy.run_ranks(rank, 2)


@pytest.mark.parametrize("make", MODES)
def test_counted_ids_are_no_experts(make):
    def rank(group):
        exchange, call = make(group, invalid_ids="count")
        expected, handle = call(_ids(np.int64, -1))
        assert exchange.invalid_ids == 0 and (handle is None or handle.invalid_ids == 0)
        expected = expected.copy()
        for calls in (1, 2):
            out, handle = call(_ids(np.int64, 2**32 + 1))
            np.testing.assert_array_equal(out, expected)
            assert exchange.invalid_ids == calls and (handle is None or handle.invalid_ids == handle.device_invalid_ids.item() == 1)

    sy.run_ranks(rank, 2)


def test_the_option_is_named():
    def rank(group):
        sy.Exchange(group, dtype="f32", invalid_ids="drop", **SIZES)

    with pytest.raises((sy.InvalidArgument, ValueError), match="invalid_ids.*raise.*count"):
        sy.run_ranks(rank, 1)
