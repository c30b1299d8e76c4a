# SPDX-License-Identifier: Apache-2.0
"""Tensor and scale arguments shared by several objects."""
from __future__ import annotations

from typing import Any, Tuple

import numpy as np

from .._abi import arrays as _arrays
from .._abi.arrays import I32, Taken, is_tensor
from .._abi.names import invalid


def bytes_of_scales(scales: Any, hidden: int, group: int) -> Any:
    """Converts int32 scales, which contain four powers of two each, to one byte per scale; returns other scales unchanged."""
    if getattr(scales, "ndim", 0) != 2 or _arrays.arrays_of(scales, "scales")[1].code(scales) != I32:
        return scales
    groups = -(-hidden // group)
    if scales.shape[1] != -(-groups // 4):
        return scales
    if is_tensor(scales):
        torch = _arrays.sys.modules["torch"]
        return scales.contiguous().view(torch.uint8)[:, :groups]
    return np.ascontiguousarray(scales).view(np.uint8)[:, :groups]


def pair_of(x: Any, name: str) -> Tuple[Any, Any]:
    """Returns rows and scales; scales are None if not given."""
    if not isinstance(x, tuple):
        return x, None
    if len(x) != 2:
        invalid(f"{name} is a tuple of {len(x)}: fp8 rows come as a pair ({name}, scales), others as an array")
    return x


def padded_scales(given: Taken, columns: int) -> Any:
    """Returns `given` [T, groups] as dense rows of `columns` elements, copying it only if it does not have this form."""
    if given.shape[1] == columns and given.arrays.is_dense(given.array):
        return given.array
    padded = given.arrays.empty((given.shape[0], columns), given.code, given.array)
    padded[:] = 0
    padded[:, :given.shape[1]] = given.array
    return padded
