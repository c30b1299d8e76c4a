# SPDX-License-Identifier: Apache-2.0
"""One matrix product per expert on GPUs, provided by the switchyard_layer library (docs/gemm.md)."""
from __future__ import annotations

import ctypes
from typing import Any, Optional, Tuple, Union

from ._abi import arguments as _arguments, names as _names
from ._abi.arrays import I32, U8, Taken, check_apart, take, written
from ._abi.ffi import Owned, alive, byref, check, layer_library, structs
from ._abi.names import BF16, CUDA, F32, FP8, invalid, value_of
from ._internal.tensors import pair_of
from ._torch.recorded import refuse_gradient
from .handle import Handle
from .low_latency import Received

__all__ = ["GroupedGemm"]

Rows = Union[Any, Tuple[Any, Any]]
#: Number of rows and of columns that share a scale.
_GROUP = 128
_PER_CHANNEL, _PER_ROW = _names.GRANULARITIES["per_channel"], _names.OUTPUT_SCALINGS["per_row"]


class GroupedGemm:
    """``out[r] = epilogue(W[e] x[r])`` for every row r of expert e, on the current GPU.

    weights: [L, N, K], or [L, K, N] with order "kn", in bf16, f16 or fp8 e4m3; read in place and kept alive by this object.
    scales: scales of fp8 weights, float32 or uint8 [L, S, ceil(K / 128)]. epilogue: "none", "relu", "silu" or "swiglu", which
    has N / 2 output columns. quantize: for fp8 with "swiglu", returns fp8 outputs with "f32" or "ue8m0" scales. limit, alpha,
    up_shift: parameters of swiglu. accumulate: "exact" or, for fp8, "fast" (docs/gemm.md). scaling: for fp8, "block",
    "per_channel" (one scale per row and per output) or "group_channel" (one per 128 columns of a row and per output); the
    latter two require float32 scales [L, N]. output_scaling: with `quantize` and one of these two, "per_group", "fixed" or
    "per_row"; the last two return scales [R, 1].

        up = sy.GroupedGemm(w13, epilogue="swiglu")
        down = sy.GroupedGemm(w2)
        rows, handle = exchange.dispatch(x, ids)          # expert-major, or received = ll.dispatch(x, ids)
        y = down(up(rows, handle), handle, out=exchange.allocate_rows(handle))

    Calls on one object must be ordered by the caller. Calls do not wait and can be captured. Gradients are not supported.
    """

    @_arguments.named("GroupedGemm.__init__")
    def __init__(self, weights: Any, *, scales: Any = None, order: str = "nk", epilogue: str = "none", quantize: Optional[str] = None,
                 limit: float = float("inf"), alpha: float = 1.0, up_shift: float = 0.0, accumulate: str = "exact",
                 scaling: str = "block", output_scaling: str = "per_group") -> None:
        self._functions = layer_library().functions
        _arguments.check("GroupedGemm.__init__", limit=limit, alpha=alpha, up_shift=up_shift)
        takes = _arguments.bind("GroupedGemm.__init__", CUDA)
        taken = takes.weights(weights)
        number = value_of(_names.WEIGHT_ORDERS, "order", order)
        n, k = taken.shape[1:] if number == 0 else taken.shape[:0:-1]
        self._config = structs.GroupedGemmConfig(
            n=n, k=k, num_experts=taken.shape[0], dtype=taken.code, order=number, epilogue=value_of(_names.EPILOGUES, "epilogue", epilogue),
            swiglu_limit=limit, swiglu_alpha=alpha, swiglu_up_shift=up_shift, quantize=value_of(_names.SCALES, "quantize", quantize),
            accumulate=value_of(_names.ACCUMULATIONS, "accumulate", accumulate), scaling=value_of(_names.GRANULARITIES, "scaling", scaling),
            output_scaling=value_of(_names.OUTPUT_SCALINGS, "output_scaling", output_scaling))
        if (taken.code == FP8) != (scales is not None):
            invalid("scales: fp8 weights, and only these, come with scales")
        given = None if scales is None else self._take_weight_scales(scales, taken, n, k)
        if given is not None:
            self._config.weight_scales = 1 if given.code == F32 else 2
        columns, dtype, made = ctypes.c_int64(), ctypes.c_int32(), ctypes.c_void_p()
        check(self._functions.sy_grouped_gemm_output(byref(self._config), byref(columns), byref(dtype)))
        check(self._functions.sy_grouped_gemm_create(byref(self._config), taken.pointer, given.pointer if given else None, byref(made)))
        self._owned = Owned(made.value, self._functions.sy_grouped_gemm_destroy, weights, scales)
        self._made_of = {"weights": taken, "scales": given}
        self.columns: int = columns.value  #: number of columns of an output row
        self._out_type = dtype.value
        self._options = structs.GroupedGemmOptions()

    @property
    def pointer(self) -> int:
        """The underlying ``sy_grouped_gemm*``, for code that calls the C interface."""
        return alive(self._owned, "the grouped GEMM")

    def _take_weight_scales(self, scales: Any, weights: Taken, n: int, k: int) -> Taken:
        """Accepts scales of 128 x 128 weight blocks (over N rows, or over the gate half followed by the up half) or of N outputs."""
        if self._config.scaling:
            channels: Taken = take(scales, "scales", (weights.shape[0], n), (F32,), CUDA, weights.array.get_device())
            return channels
        rows = 2 * -(-n // 256) if self._config.epilogue == _names.EPILOGUES["swiglu"] else -(-n // _GROUP)
        given: Taken = take(scales, "scales", (weights.shape[0], rows, -(-k // _GROUP)), (F32, FP8, U8), CUDA, weights.array.get_device())
        return given

    def __call__(self, x: Rows, rows: Union[Handle, Received], *, out: Optional[Rows] = None, num_sms: int = 0,
                 output_scale: Any = None) -> Rows:
        """Multiplies the rows of an expert-major dispatch, x [R, K], or of a low-latency dispatch, x [L, R, K]; fp8 rows are
        pairs (x, scales). Rows that belong to no expert are not accessed. out: allocated by default; with `quantize`, a pair
        whose rows of scales are a multiple of 16 bytes or, with output_scaling "fixed" or "per_row", one scale. output_scale:
        float32 [1], for output_scaling "fixed". With "per_channel", only the first column of the scales of x counts, and they
        may be [R]. Returns out."""
        refuse_gradient("GroupedGemm", "torch.nn.functional.grouped_mm", x=x, output_scale=output_scale)
        c, f, where = self._config, self._functions, structs.ExpertRows()
        if not isinstance(rows, (Handle, Received)):
            _arguments.check("GroupedGemm.__call__", rows=rows)
        _arguments.check("GroupedGemm.__call__", num_sms=num_sms)
        masked = isinstance(rows, Received)
        view = rows._view
        if view is None:
            invalid("rows: this handle was made from bytes; dispatch with it first")
        check((f.sy_expert_rows_of_low_latency if masked else f.sy_expert_rows_of_dispatched)(byref(view), byref(where)))
        shape = tuple(rows.x.shape[:2]) if isinstance(rows, Received) else ("R",)
        values, scales = pair_of(x, "x")
        device = self._made_of["weights"].array.get_device()
        taken = take(values, "x", (*shape, c.k), (c.dtype,), CUDA, device)
        if (c.dtype == FP8) != (scales is not None):
            invalid("x: fp8 rows, and only these, come with scales, as a pair (x, scales)")
        shape, count = taken.shape[:-1], taken.array.numel() // c.k
        if not masked and count < view.rows:
            invalid(f"x has {count} rows: the dispatch of `rows` delivered {view.rows}")
        given = structs.RowView(data=taken.pointer, rows=count, cols=c.k, dtype=c.dtype)
        its_scales = None if scales is None else self._take_scales(scales, taken, where, given, view if masked else None)
        scale = None if output_scale is None else take(output_scale, "output_scale", (1,), (F32,), CUDA, device)
        out = self._room(shape, taken) if out is None else out
        target = self._take_out(out, (*shape, self.columns), device)
        read = {"x": taken, "scales of x": its_scales, "output_scale": scale, **self._made_of}
        check_apart("out", target[0], **read)
        result = structs.RowView(data=target[0].pointer, rows=count, cols=self.columns, dtype=self._out_type, scale_kind=c.quantize)
        if target[1] is not None:
            check_apart("scales of out", target[1], out=target[0], **read)
            result.scales = target[1].pointer
        self._options.stream, self._options.num_sms = taken.arrays.stream(taken.array), num_sms
        scratch: Any = taken.arrays.empty((count, self.columns), BF16, taken.array) if c.output_scaling == _PER_ROW else None
        self._options.output_scale = None if scale is None else scale.pointer
        self._options.scratch = None if scratch is None or count == 0 else scratch.data_ptr()
        check(f.sy_grouped_gemm_run(self.pointer, byref(given), byref(where), byref(result), byref(self._options)))
        written(target[0].array, None if target[1] is None else target[1].array)
        return out

    def _take_scales(self, scales: Any, x: Taken, where: Any, given: Any, view: Any) -> Taken:
        """Sets the scales of the rows `given` and returns the scales to be read. `view`: the view of a low-latency output,
        whose scales may be column-major if both rows and scales belong to it."""
        columns, device = self._config.k, x.array.get_device()
        groups = -(-columns // _GROUP)
        if view is not None and where.scale_rows != 0 and given.data == view.x and getattr(scales, "is_cuda", False) \
                and scales.data_ptr() == view.x_scales:
            taken = take(scales, "scales of x", (*x.shape[:-1], "groups"), (F32, I32), CUDA, device, strided=True)
            given.scale_kind, given.scales = view.x_scale_kind, taken.pointer
            return taken
        where.scale_rows = 0
        if self._config.scaling == _PER_CHANNEL:
            if getattr(scales, "ndim", 0) == len(x.shape) - 1:
                scales = scales[..., None]
            taken = take(scales, "scales of x", (*x.shape[:-1], "columns"), (F32,), CUDA, device, strided=True)
            if not taken.shape[-1]:
                invalid("scales of x has no columns: must have at least 1")
            each = (taken.array if taken.shape[-1] == -(-groups // 4) * 4 else taken.array[..., :1]).contiguous()
            where.scale_stride, given.scale_kind, given.scales = each.shape[-1], 1, each.data_ptr()
            return taken._replace(array=each, pointer=each.data_ptr())
        taken = take(scales, "scales of x", (*x.shape[:-1], "groups"), (F32, FP8, U8), CUDA, device, strided=True)
        unit = 4 if taken.code == F32 else 16
        width = -(-groups // unit) * unit
        if taken.shape[-1] not in (groups, width):
            invalid(f"scales of x has {taken.shape[-1]} columns: must have {groups}, one for each {_GROUP} columns of x, or {width}")
        kept = self._scale_rows(taken.array, given.rows, groups, width)
        given.scale_kind, given.scales = (1 if taken.code == F32 else 2), kept.data_ptr()
        return taken._replace(array=kept, pointer=kept.data_ptr())

    @staticmethod
    def _scale_rows(scales: Any, count: int, groups: int, width: int) -> Any:
        """Returns the scales with one row per row of x, padded to a multiple of 16 bytes. They are copied unless they have the
        form delivered by a dispatch."""
        if scales.stride() == (width, 1) or scales.stride() == (scales.shape[-2] * width, width, 1):
            return scales
        padded = scales.new_zeros((count, width))
        padded[:, :groups] = scales.reshape(count, -1)[:, :groups]
        return padded

    def _scale_columns(self) -> int:
        """Returns the number of elements in a row of output scales: 1, or a number padded to a multiple of 16 bytes."""
        if self._config.output_scaling:
            return 1
        groups, unit = -(-self.columns // _GROUP), 4 if self._config.quantize == 1 else 16
        return -(-groups // unit) * unit

    def _take_out(self, out: Rows, shape: Tuple[Any, ...], device: int) -> Tuple[Taken, Optional[Taken]]:
        """Accepts output rows and, with `quantize`, their scales."""
        rows, scales = pair_of(out, "out")
        taken = take(rows, "out", shape, (self._out_type,), CUDA, device, written=True)
        quantize = self._config.quantize
        if bool(quantize) != (scales is not None):
            invalid("out: fp8 results, and only these, come with scales, as a pair (out, scales)")
        if scales is None:
            return taken, None
        return taken, take(scales, "scales of out", (*shape[:-1], self._scale_columns()), (F32,) if quantize == 1 else (FP8, U8), CUDA, device,
                           written=True)

    def _room(self, shape: Tuple[int, ...], like: Taken) -> Rows:
        """Allocates memory for results."""
        rows = like.arrays.empty((*shape, self.columns), self._out_type, like.array)
        if not self._config.quantize:
            return rows
        f32 = self._config.quantize == 1
        return rows, like.arrays.empty((*shape, self._scale_columns()), F32 if f32 else U8, like.array)

    def close(self) -> None:
        """Releases the object immediately, even if calls and graphs still use it; its memory is freed once they have finished.
        May be called twice."""
        self._owned.close()
