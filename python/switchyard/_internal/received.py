# SPDX-License-Identifier: Apache-2.0
"""Outputs of low-latency dispatches."""
from __future__ import annotations

import ctypes
from typing import Any, List, Optional, Tuple

from .._abi.arrays import I32, I64, U8
from .._abi.ffi import Owned, byref, check, library, structs
from .._abi.names import F32
from .._torch.registry import number_of

__all__ = ["Lent", "Received", "scale_geometry"]


class Received:
    """A destination for dispatches: memory of fixed shape that each dispatch overwrites. There are L experts on this rank, with
    R = W * max_tokens rows each; the first ``rows[e]`` rows are valid, the others unspecified. Arrays are of the same kind
    (numpy, torch, device) as the first dispatched ``x``.

    x: [L, R, H]. scales: None; or row-major [L, R, groups], float32, or uint8 for powers of two; or column-major, a view with
    the same shape in which consecutive rows are adjacent. Column-major powers of two are int32 [L, R, ceil(groups / 4)] with
    four powers each.
    rows: int32 [L], on the device. source_range: int64 [L, W], ``first << 32 | count``.
    row_source: int64 [L, R], ``source rank << 48 | k << 32 | token``.
    """

    _at: Optional[ctypes.c_void_p] = None  # pointer that repeated calls pass; set only in real outputs

    def __reduce__(self) -> Any:
        raise TypeError("a Received belongs to its process and cannot be pickled or copied: copy its arrays")

    def __init__(self, owned: Any, arrays: Any, like: Any) -> None:
        view = structs.LowLatencyView()
        check(library().functions.sy_low_latency_output_get(owned.pointer, byref(view)))
        self._owned, self._view = owned, view
        self._at = ctypes.c_void_p(owned.pointer)
        here, per_expert, hidden = view.num_local_experts, view.rows_per_expert, view.x_cols
        self.x = arrays.wrap(view.x, (here, per_expert, hidden), view.x_dtype, owned, like)
        self.rows = arrays.wrap(view.rows_of_expert, (here,), I32, owned, like)
        self.source_range = arrays.wrap(view.source_range, (here, view.world), I64, owned, like)
        self.row_source = arrays.wrap(view.row_source, (here, per_expert), I64, owned, like)
        self.scales = None if not view.x_scale_kind else _scales(view, owned, arrays, like)
        self.num_tokens = 0  #: T of the last dispatch into this output
        self._number = number_of(self)


class Lent:
    """An output in use by tensors. When these are dropped, it becomes a spare output of the same stream; later uses are thus
    ordered after this use."""

    __slots__ = ("pointer", "_owned", "_spare")

    def __init__(self, owned: Owned, spare: List[Owned]) -> None:
        self.pointer, self._owned, self._spare = owned.pointer, owned, spare

    def __del__(self) -> None:
        self._spare.append(self._owned)


def scale_geometry(config: structs.LowLatencyConfig, here: int, per_expert: int, hidden: int) -> Tuple[int, List[int], List[int]]:
    """Returns the element type, shape and strides of Received.scales, or (-1, [], []) without scales."""
    if not config.scales:
        return -1, [], []
    groups, f32 = -(-hidden // config.scale_group), config.scales == 1
    if config.scale_order == 0:
        columns = -(-groups // 4) * 4 if f32 else -(-groups // 16) * 16
        return (F32 if f32 else U8), [here, per_expert, groups], [per_expert * columns, columns, 1]
    columns, column = groups if f32 else -(-groups // 4), -(-per_expert // 4) * 4
    return (F32 if f32 else I32), [here, per_expert, columns], [columns * column, 1, column]


def _scales(v: structs.LowLatencyView, owned: Any, arrays: Any, like: Any) -> Any:
    groups, f32 = -(-v.x_cols // v.scale_group), v.x_scale_kind == 1
    if v.scale_order == 0:
        columns = -(-groups // 4) * 4 if f32 else -(-groups // 16) * 16
        memory = arrays.wrap(v.x_scales, (v.num_local_experts, v.rows_per_expert, columns), F32 if f32 else U8, owned, like)
        return memory[:, :, :groups]
    columns = groups if f32 else -(-groups // 4)
    memory = arrays.wrap(v.x_scales, (v.num_local_experts, columns, v.scale_rows), F32 if f32 else I32, owned, like)
    return memory.swapaxes(1, 2)[:, :v.rows_per_expert]
