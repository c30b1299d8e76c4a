# SPDX-License-Identifier: Apache-2.0
"""A whole MoE layer in one call, provided by the switchyard_layer library."""
from __future__ import annotations

import ctypes
from typing import Any, NamedTuple, Optional, Tuple, Type

from ._abi import arguments as _arguments, names as _names, repeated as _repeated
from ._abi.arguments import checked, named
from ._abi.arrays import I64, NUMPY, U8, arrays_of, arrays_of_torch, check_apart, take, written
from ._abi.ffi import Owned, alive, byref, check, check_collective, layer_library, number_from, structs
from ._abi.names import BF16, CPU, CUDA, F32, FP8, invalid, value_of
from ._torch.recorded import is_plain, refuse_gradient
from .expert_map import SlotSelector, SlotWeights
from .group import Group, constructs

__all__ = ["LayerMemory", "MoeLayer"]

#: Number of weight rows and of columns that share a scale.
_GROUP = 128


class LayerMemory(NamedTuple):
    """Memory of a layer on the rank with the most experts, in bytes, excluding the caller's arrays."""

    heap_bytes: int  #: memory of the group's symmetric heap, excluding its header
    private_bytes: int
    weight_bytes: int  #: CPU, packed weights
    scratch_bytes: int
    total_bytes: int


@checked("MoeLayer.__init__", called="MoeLayer")
def _config(*, hidden: int, intermediate: int, num_experts: int, topk: int, max_tokens: int, capacity: int = 0, dtype: object = "bf16",
            order: str = "per_route", exchange: str = "automatic", form: str = "automatic", overflow: str = "fail",
            captured: bool = True, storage: Optional[str] = None, row_scales: str = "f32", weight_scales: str = "f32",
            invalid_ids: str = "raise", accumulate: str = "exact", scaling: str = "block", intermediate_scaling: str = "per_group",
            backend: int = CPU) -> structs.MoeLayerConfig:
    """Converts the keywords of :class:`MoeLayer` to a config struct."""
    storage = storage or ("view" if backend == CUDA else "packed")
    return structs.MoeLayerConfig(
        hidden=hidden, intermediate=intermediate, max_tokens=max_tokens, capacity=capacity, num_experts=num_experts, topk=topk,
        dtype=_names.dtype_of("dtype", dtype), order=value_of(_names.ORDERS, "order", order),
        exchange=value_of(_names.MOE_EXCHANGES, "exchange", exchange), form=value_of(_names.MOE_FORMS, "form", form),
        overflow=value_of(_names.OVERFLOWS, "overflow", overflow), captured=int(captured),
        storage=value_of(_names.STORAGES, "storage", storage), row_scales=value_of(_names.SCALES, "row_scales", row_scales),
        weight_scales=value_of(_names.SCALES, "weight_scales", weight_scales),
        invalid_ids=value_of(_names.INVALID_IDS, "invalid_ids", invalid_ids),
        accumulate=value_of(_names.ACCUMULATIONS, "accumulate", accumulate),
        scaling=value_of(_names.GRANULARITIES, "scaling", scaling),
        intermediate_scaling=value_of(_names.OUTPUT_SCALINGS, "intermediate_scaling", intermediate_scaling))


def _pointers(group: Group, c: structs.MoeLayerConfig, w13: Any, w2: Any, w13_scales: Any, w2_scales: Any,
              intermediate_scale: Any) -> Tuple[Any, ...]:
    """Validates weights and their scales and returns their pointers."""
    hidden, intermediate = -(-c.hidden // _GROUP), -(-c.intermediate // _GROUP)
    sizes = {"L": len(group.experts_of(c.num_experts)), "H": c.hidden, "I": c.intermediate, "2I": 2 * c.intermediate}
    takes = _arguments.bind("MoeLayer.with_weights", group._backend, **sizes, S13=2 * intermediate, G13=hidden, S2=hidden, G2=intermediate)

    def scales_of(name: str, given: Any, outputs: int) -> Optional[int]:
        if given is None:
            return None
        pointer: int = (take(given, name, (sizes["L"], outputs), (F32,), group._backend) if c.scaling else getattr(takes, name)(given)).pointer
        return pointer

    first, second = takes.w13(w13, None, (c.dtype,)), takes.w2(w2, None, (c.dtype,))
    if c.dtype != FP8 and (w13_scales is not None or w2_scales is not None):
        invalid(f"{'w13_scales' if w13_scales is not None else 'w2_scales'}: only fp8 weights have scales")
    return (first.pointer, second.pointer, scales_of("w13_scales", w13_scales, sizes["2I"]), scales_of("w2_scales", w2_scales, c.hidden),
            None if intermediate_scale is None else takes.intermediate_scale(intermediate_scale).pointer)


def _stream_of(weights: Any) -> int:
    """Returns the stream on which the weights are read, the current stream of their GPU."""
    array, arrays = arrays_of(weights, "w13")
    return arrays.stream(array)


class MoeLayer:
    """``out[t] = sum over k of topk_weights[t, k] * mlp_(topk_ids[t, k])(x[t])``, where mlp is SwiGLU. Creation is collective.

    w13: [L, 2 I, H], with the gate rows followed by the up rows for each expert. w2: [L, H, I]. Both contain this rank's L
    experts and have type `dtype`.
    hidden: H. intermediate: I. num_experts: E, in total. topk: K. max_tokens: maximum number of tokens on any rank.
    dtype: weight type, "bf16"; on GPUs also "f16", or "fp8_e4m3" with w13_scales and w2_scales. Tokens and results have the
    same type, or bf16 with fp8 weights.
    capacity: maximum number of rows accepted by a rank; 0: the number for worst-case routing or, in the fused form, at most
    65536 or twice the mean, with overflow "split". overflow: "fail", "drop_and_report" or, in the fused form, "split": calls
    that exceed the capacity run in passes over ranges of tokens, with the same results.
    order: summation order. exchange: "automatic", "normal" or "low_latency". form: "automatic", "separate" or "fused"
    (docs/layer.md).
    storage: "packed" (default on the CPU: a copy owned by the layer) or "view" (default on GPUs: the layer reads the caller's
    weights and keeps them alive).
    invalid_ids: "raise" or "count", as in :class:`Exchange`. captured: whether calls are captured in graphs (GPUs, normal
    mode). row_scales, weight_scales: "f32" or "ue8m0" (fp8). accumulate: "exact" or, for fp8 in the separate form, "fast"
    (docs/gemm.md). scaling: "block" or, for fp8 in the separate form, "per_channel" (normal mode) or "group_channel", with
    float32 w13_scales [L, 2 I] and w2_scales [L, H]. intermediate_scaling: "per_group", "per_row" or "fixed", which requires
    intermediate_scale, a float32 tensor [1] that each call reads.

    Requires the switchyard_layer library, which not every wheel contains (docs/python.md).
    """

    @constructs
    @named("MoeLayer.__init__")
    def __init__(self, group: Group, w13: Any, w2: Any, *, w13_scales: Any = None, w2_scales: Any = None, intermediate_scale: Any = None,
                 **config: Any) -> None:
        _arguments.check("MoeLayer.__init__", group=group)
        functions, c = layer_library().functions, _config(backend=group._backend, **config)
        first, second, c.w13_scales, c.w2_scales, c.intermediate_scale = _pointers(group, c, w13, w2, w13_scales, w2_scales,
                                                                                   intermediate_scale)
        made = ctypes.c_void_p()
        with group._lock:
            check_collective(functions.sy_moe_layer_create(group.pointer, byref(c), first, second, _stream_of(w13), byref(made)))
        self._hold(group, c, made.value, (w13, w2, w13_scales, w2_scales, intermediate_scale))

    def _hold(self, group: Group, c: structs.MoeLayerConfig, made: Optional[int], weights: Tuple[Any, ...]) -> None:
        self.group, self._config, self._functions = group, c, layer_library().functions
        keeps = weights if c.storage else ()
        self._owned = Owned(made, self._functions.sy_moe_layer_destroy, group._owned, *keeps, lock=group._lock)
        group._lock.members.add(self._owned)
        self._ids, self._options = structs.ExpertIds(), structs.MoeLayerCall()
        self._by = (byref(self._ids), byref(self._options))
        self._row_type = BF16 if c.dtype == FP8 else c.dtype
        self._takes = _arguments.bind("MoeLayer.forward", group._backend, H=c.hidden, K=c.topk)
        self._like: Any = None
        self._backend, self.hidden, self.topk = group._backend, c.hidden, c.topk
        self._again: Optional[_repeated.Layer] = None  # only after a call with torch tensors

    @named("MoeLayer.with_weights")
    def with_weights(self, w13: Any, w2: Any, *, w13_scales: Any = None, w2_scales: Any = None, intermediate_scale: Any = None) -> "MoeLayer":
        """Local. Returns another layer of the model with different weights; it shares all other memory. All ranks must create
        the same layers in the same order. Either layer may be closed first. Calls of layers that share memory, including those
        in graphs, must run one after another, in the same order on all ranks."""
        group, made = self.group, ctypes.c_void_p()
        pointers = _pointers(group, self._config, w13, w2, w13_scales, w2_scales, intermediate_scale)
        with group._lock:
            check(self._functions.sy_moe_layer_with_scaled_weights(self.pointer, *pointers, _stream_of(w13), byref(made)))
        other = MoeLayer.__new__(MoeLayer)
        other._hold(group, self._config, made.value, (w13, w2, w13_scales, w2_scales, intermediate_scale))
        return other

    @staticmethod
    @checked("MoeLayer.memory_required")
    def memory_required(world: int, *, backend: str = "cpu", **config: Any) -> LayerMemory:
        """Returns the memory required by a layer with these keywords. Requires no group."""
        number, m = value_of(_names.BACKENDS, "backend", backend), structs.MoeLayerMemory()
        c = _config(backend=number, **config)
        check(layer_library().functions.sy_moe_layer_memory_required(byref(c), world, number, byref(m)))
        return LayerMemory(*(getattr(m, name) for name in LayerMemory._fields))

    @staticmethod
    @checked("MoeLayer.heap_bytes")
    def heap_bytes(world: int, *, backend: str = "cpu", **config: Any) -> int:
        """Returns ``heap_bytes`` for a group whose only object is a layer with these keywords. Requires no group."""
        number, size = value_of(_names.BACKENDS, "backend", backend), ctypes.c_size_t()
        c = _config(backend=number, **config)
        check(layer_library().functions.sy_moe_layer_heap_bytes(byref(c), world, number, byref(size)))
        return size.value

    @property
    def pointer(self) -> int:
        """The underlying ``sy_moe_layer*``, for code that calls the C interface."""
        return self._owned.pointer or alive(self._owned, "the layer", self.group)

    @property
    def implementation(self) -> str:
        """The chosen implementation, for example "separate, normal, bf16 wgmma:sm_90a"."""
        text = ctypes.c_char_p()
        check(self._functions.sy_moe_layer_implementation(self.pointer, byref(text)))
        return (text.value or b"").decode()

    def forward(self, x: Any, topk_ids: Any, topk_weights: Any = None, *, out: Any = None, add: bool = False, device_tokens: Any = None,
                num_sms: int = 0, selector: Optional[SlotSelector] = None, weights_ready: Optional[SlotWeights] = None) -> Any:
        """Collective. x: [T, H]. topk_ids: int32 or int64 [T, K]; an id outside [0, E) means no expert, and the result for a
        token without any expert is +0. topk_weights: float32 [T, K]; None: all 1. out: [T, H], allocated by default. add: adds
        the layer's result to the content of `out`. device_tokens: int32 [1] with T, read when the call runs; rows of `out` from
        T on are not written. selector: `topk_ids` are expert ids, which the call replaces with slots as :meth:`SlotSelector.select`
        does; ``num_experts`` is the number of slots. All ranks must pass the same selector, with the same version of its
        map, or None; otherwise, all raise Mismatch (:meth:`LowLatency.dispatch`). weights_ready: orders the experts, in the fused form
        the whole call, on the stream after the last :meth:`SlotWeights.move`. Returns out."""
        again = self._again
        if again is not None and weights_ready is None and add is False and device_tokens is None and num_sms.__class__ is int and num_sms == 0 \
                and (selector is None or selector.__class__ is SlotSelector) and is_plain():
            result = again(x, topk_ids, topk_weights, out, selector)
            if result is not None:
                return result
        refuse_gradient("MoeLayer", "an Exchange with experts of your own between dispatch and combine", x=x, topk_weights=topk_weights,
                        **({"out": out} if add else {}))
        c = self._config
        with self.group._call:
            if add.__class__ is not bool or num_sms.__class__ is not int or num_sms >> 31:
                _arguments.check("MoeLayer.forward", add=add, num_sms=num_sms)
            if selector is not None or weights_ready is not None:
                _arguments.check("MoeLayer.forward", selector=selector, weights_ready=weights_ready)
            types, takes = (self._row_type,), self._takes
            taken = takes.x(x, None, types)
            tokens = taken.shape[0]
            given = takes.topk_ids(topk_ids, tokens)
            i, o = self._ids, self._options
            i.data, i.num_tokens, i.topk, i.is_int64 = given.pointer, tokens, c.topk, int(given.code == I64)
            scale = None if topk_weights is None else takes.topk_weights(topk_weights, tokens)
            if add and out is None:
                invalid("add: needs `out`, which the layer is added to")
            if out is None:
                out = taken.arrays.empty((tokens, c.hidden), self._row_type, taken.array)
            result = takes.out(out, tokens, types)
            o.stream, o.num_sms, o.add = taken.arrays.stream(taken.array), num_sms, int(add)
            count = None if device_tokens is None else takes.device_tokens(device_tokens)
            o.device_tokens = None if count is None else count.pointer
            o.selector = None if selector is None else selector.pointer
            o.weights_ready = None if weights_ready is None else weights_ready.event
            check_apart("out", result, x=taken, topk_ids=given, topk_weights=scale, device_tokens=count)
            by_ids, by_options = self._by
            check(self._functions.sy_moe_layer_forward(self.pointer, taken.pointer, by_ids, None if scale is None else scale.pointer,
                                                       result.pointer, by_options))
            if type(self._like) is not type(out):  # for dropped(); not `out` itself, which would live as long as the layer
                self._like = taken.arrays.empty((0,), self._row_type, out)
            written(out)
            if self._again is None and taken.arrays is not NUMPY and taken.arrays is arrays_of_torch():
                self._again = _repeated.Layer(self)
            return out

    __call__ = forward

    @property
    def invalid_ids(self) -> int:
        """Number of ids in this rank's calls so far that are neither -1 nor a valid expert. CUDA: includes only calls that have
        run; does not wait for kernels."""
        return number_from(self._functions.sy_moe_layer_invalid_ids, self.pointer)

    def dropped(self) -> Any:
        """Returns uint8 [T, K] for the last forward pass, 1 where this rank's route was dropped due to capacity; None with
        ``overflow="fail"``. Valid until the next forward pass."""
        pointer, count = ctypes.c_void_p(), ctypes.c_int64()
        check(self._functions.sy_moe_layer_dropped(self.pointer, byref(pointer), byref(count)))
        if not pointer.value:
            return None
        arrays = NUMPY if self._like is None else arrays_of(self._like, "x")[1]
        return arrays.wrap(pointer.value, (count.value // self._config.topk, self._config.topk), U8, self._owned, self._like)

    def close(self) -> None:
        """Releases the layer immediately, even if calls and graphs still use it; its memory is freed once they have finished.
        May be called twice."""
        self._owned.close()

    def __enter__(self) -> "MoeLayer":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Any) -> None:
        self.close()
