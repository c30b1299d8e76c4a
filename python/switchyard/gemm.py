# SPDX-License-Identifier: Apache-2.0
"""One matrix product per expert on GPUs, of the library switchyard_layer (docs/gemm.md)."""
from __future__ import annotations

import ctypes
from typing import Any, Optional, Tuple, Union

from ._abi import names as _names
from ._abi.arrays import U8, Taken, take, written
from ._abi.ffi import Owned, byref, check, layer_library, structs
from ._abi.names import BF16, CUDA, F16, F32, FP8, invalid, value_of
from ._torch.recorded import refuse_gradient
from .handle import Handle
from .low_latency import Received

__all__ = ["GroupedGemm"]

Rows = Union[Any, Tuple[Any, Any]]


class GroupedGemm:
    """``out[r] = epilogue(W[e] x[r])`` for every row r of expert e, on the current GPU.

    weights: [L, N, K], or [L, K, N] with order "kn": bf16, f16 or fp8 e4m3; they stay yours and are kept alive by this object. scales: of
    fp8 weights, float32 or uint8 [L, S, ceil(K / 128)]. epilogue: "none", "relu", "silu" or "swiglu", which has N / 2 columns.
    quantize: fp8 with "swiglu": outputs are fp8 with "f32" or "ue8m0" scales. limit, alpha, up_shift: of swiglu (docs/gemm.md).

        up = sy.GroupedGemm(w13, epilogue="swiglu")
        down = sy.GroupedGemm(w2)
        rows, handle = exchange.dispatch(x, ids)          # expert-major, or received = ll.dispatch(x, ids)
        y = down(up(rows, handle), handle, out=exchange.allocate_rows(handle))

    Calls of one object are to be ordered; they wait for nothing and can be captured. No gradients.
    """

    def __init__(self, weights: Any, *, scales: Any = None, order: str = "nk", epilogue: str = "none", quantize: Optional[str] = None,
                 limit: float = float("inf"), alpha: float = 1.0, up_shift: float = 0.0) -> None:
        self._functions = layer_library().functions
        taken = take(weights, "weights", ("L", "N", "K"), (BF16, F16, FP8), CUDA)
        number = value_of(_names.WEIGHT_ORDERS, "order", order)
        n, k = taken.shape[1:] if number == 0 else taken.shape[:0:-1]
        self._config = structs.GroupedGemmConfig(
            n=n, k=k, num_experts=taken.shape[0], type=taken.code, order=number, epilogue=value_of(_names.EPILOGUES, "epilogue", epilogue),
            swiglu_limit=limit, swiglu_alpha=alpha, swiglu_up_shift=up_shift, quantize=value_of(_names.SCALES, "quantize", quantize))
        if (taken.code == FP8) != (scales is not None):
            invalid("scales: fp8 weights, and only these, come with scales")
        given = None if scales is None else take(scales, "scales", (taken.shape[0], "S", -(-k // 128)), (F32, FP8, U8), CUDA)
        if given is not None:
            self._config.weight_scales = 1 if given.code == F32 else 2
        columns, dtype, made = ctypes.c_int64(), ctypes.c_int32(), ctypes.c_void_p()
        check(self._functions.sy_grouped_gemm_output(byref(self._config), byref(columns), byref(dtype)))
        check(self._functions.sy_grouped_gemm_create(byref(self._config), taken.pointer, given.pointer if given else None, byref(made)))
        self._owned = Owned(made.value, self._functions.sy_grouped_gemm_destroy, weights, scales)
        self.columns: int = columns.value  #: of an output row
        self._out_type = dtype.value
        self._options = structs.GroupedGemmOptions()

    @property
    def pointer(self) -> int:
        """The ``sy_grouped_gemm*``, for code that calls the C interface."""
        if not self._owned.pointer:
            invalid("the grouped GEMM is closed")
        return self._owned.pointer

    def __call__(self, x: Rows, rows: Union[Handle, Received], *, out: Optional[Rows] = None, num_sms: int = 0) -> Rows:
        """The products of the rows of an expert-major dispatch, x [R, K], or of a low-latency one, x [L, R, K]; fp8 rows are pairs
        (x, scales). What lies in rows of no expert is not touched. out: made unless given; with `quantize` a pair, whose scales have whole
        16 bytes a row. Returns out."""
        refuse_gradient("GroupedGemm", "torch.nn.functional.grouped_mm", x=x)
        c, f, where = self._config, self._functions, structs.ExpertRows()
        masked = isinstance(rows, Received)
        view = rows._view
        if view is None:
            invalid("rows: this handle was made from bytes; dispatch with it first")
        check((f.sy_expert_rows_of_low_latency if masked else f.sy_expert_rows_of_dispatched)(byref(view), byref(where)))
        shape = tuple(rows.x.shape[:2]) if isinstance(rows, Received) else ("R",)
        values, scales = x if isinstance(x, tuple) else (x, None)
        taken = take(values, "x", (*shape, c.k), (c.type,), CUDA)
        shape, count = taken.shape[:-1], taken.array.numel() // c.k
        given = structs.RowView(data=taken.pointer, rows=count, cols=c.k, dtype=c.type)
        kept = None
        if scales is not None:
            by_columns = masked and where.scale_rows != 0 and taken.pointer == view.x
            if not by_columns:
                where.scale_rows = 0
            kept = scales if by_columns else self._scale_rows(scales, count, c.k)
            given.scale_kind, given.scales = (1 if kept.dtype.itemsize == 4 and kept.is_floating_point() else 2), kept.data_ptr()
            if by_columns:
                given.scale_kind = view.x_scale_kind
        out = self._room(shape, taken) if out is None else out
        result, its_scales = out if isinstance(out, tuple) else (out, None)
        to = take(result, "out", (*shape, self.columns), (self._out_type,), CUDA)
        target = structs.RowView(data=to.pointer, rows=count, cols=self.columns, dtype=self._out_type, scale_kind=c.quantize)
        if its_scales is not None:
            target.scales = its_scales.data_ptr()
        self._options.stream, self._options.num_sms = taken.arrays.stream(taken.array), num_sms
        check(f.sy_grouped_gemm_run(self.pointer, byref(given), byref(where), byref(target), byref(self._options)))
        written(result, its_scales)
        return out

    def _scale_rows(self, scales: Any, count: int, columns: int) -> Any:
        """Scales of a row each in whole 16 bytes: as a dispatch delivers them, or a copy."""
        groups = -(-columns // 128)
        unit = 4 if scales.is_floating_point() else 16
        width = -(-groups // unit) * unit
        if scales.stride() == (width, 1) or scales.stride() == (scales.shape[-2] * width, width, 1):
            return scales
        padded = scales.new_zeros((count, width))
        padded[:, :groups] = scales.reshape(count, -1)[:, :groups]
        return padded

    def _room(self, shape: Tuple[int, ...], like: Taken) -> Rows:
        """Memory for results."""
        rows = like.arrays.empty((*shape, self.columns), self._out_type, like.array)
        if not self._config.quantize:
            return rows
        groups, f32 = -(-self.columns // 128), self._config.quantize == 1
        width = -(-groups // (4 if f32 else 16)) * (4 if f32 else 16)
        return rows, like.arrays.empty((*shape, width), F32 if f32 else U8, like.array)

    def close(self) -> None:
        """Gives it back; no call or graph of it may be under way. May be called twice."""
        self._owned.close()
