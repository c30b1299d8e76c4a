# SPDX-License-Identifier: Apache-2.0
"""Foreign arrays: ml_dtypes, and any array that supports DLPack."""
import numpy as np
import pytest

import switchyard as sy

ml_dtypes = pytest.importorskip("ml_dtypes")

SHAPE = {"num_experts": 4, "topk": 1, "hidden": 128, "max_tokens": 4}
IDS = np.array([[0], [3], [1]])


class Foreign:
    """An array of another library, as exposed by DLPack."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


def test_dlpack(ranks):
    def rank(group):
        exchange = sy.Exchange(group, dtype="f32", **SHAPE)
        x = np.random.default_rng(0).standard_normal((3, 128)).astype(np.float32)
        rows, handle = exchange.dispatch(Foreign(x), Foreign(IDS), Foreign(np.ones((3, 1), np.float32)))
        assert isinstance(rows, np.ndarray) and np.array_equal(rows, x)
        assert np.array_equal(exchange.combine(Foreign(rows), handle, apply_weights=False), x)

    ranks(rank, 1)


def test_bf16_and_fp8(ranks):
    def rank(group):
        exchange = sy.Exchange(group, dtype=ml_dtypes.bfloat16, **SHAPE)
        x = np.arange(384).reshape(3, 128).astype(ml_dtypes.bfloat16)
        rows, handle = exchange.dispatch(x, IDS)
        assert rows.dtype == ml_dtypes.bfloat16 and np.array_equal(rows, x)
        assert exchange.combine(rows, handle).dtype == ml_dtypes.bfloat16
        (q, scales), _ = exchange.dispatch(x, handle=handle, quantize="f32")
        assert q.dtype == ml_dtypes.float8_e4m3fn
        np.testing.assert_allclose(q.astype(np.float32) * scales, x.astype(np.float32), rtol=1 / 16)
        (again, _), _ = exchange.dispatch((q.copy(), np.ascontiguousarray(scales)), handle=handle)
        assert again.dtype == q.dtype and np.array_equal(again.view(np.uint8), q.view(np.uint8))

    ranks(rank, 1)
