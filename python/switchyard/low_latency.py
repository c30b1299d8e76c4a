# SPDX-License-Identifier: Apache-2.0
"""Low-latency mode, for decoding, with fixed shapes and memory allocated once."""
from __future__ import annotations

import ctypes
from types import TracebackType
from typing import Any, Callable, Dict, List, Optional, Tuple, Type

from ._abi import arguments as _arguments, names as _names, repeated as _repeated
from ._abi.arguments import checked, named
from ._abi.arrays import I32, I64, NUMPY, U8, Taken, arrays_of, arrays_of_torch, check_apart, code_of, code_of_rows, take, written
from ._abi.ffi import Owned, alive, byref, check, check_collective, library, number_from, structs
from ._abi.names import BF16, CUDA, F16, F32, FP8, invalid, value_of
from ._torch.registry import number_of
from ._internal.received import Lent, Received, scale_geometry
from ._internal.tensors import bytes_of_scales, padded_scales, pair_of
from ._torch.recorded import is_traced, refuse_gradient
from .expert_map import SlotSelector
from .exchange import CallStatistics, MemoryRequirement, statistics_of
from .errors import Unsupported
from .group import Group, constructs

#: Row types for calls without scales, row types for sums, and id types.
_PLAIN = _SUMMED = (BF16, F16, F32)
_IDS = (I32, I64)
_INSTEAD = "an Exchange, whose calls are differentiable"

__all__ = ["LowLatency", "Pending", "Received"]


@checked("LowLatency.__init__", called="LowLatency")
def _config(*, hidden: int, num_experts: int, topk: int, max_tokens: int, dtype: object = "bf16", scales: Optional[str] = None,
            scale_group: int = 128, scale_order: str = "row_major", sending: str = "per_rank", pieces: int = 0,
            invalid_ids: str = "raise") -> structs.LowLatencyConfig:
    """Converts the keywords of :class:`LowLatency` to a config struct."""
    return structs.LowLatencyConfig(
        hidden=hidden, max_tokens=max_tokens, num_experts=num_experts, topk=topk, dtype=_names.dtype_of("dtype", dtype),
        scales=value_of(_names.SCALES, "scales", scales), scale_group=scale_group,
        scale_order=value_of(_names.SCALE_ORDERS, "scale_order", scale_order), sending=value_of(_names.SENDINGS, "sending", sending),
        pieces=pieces, invalid_ids=value_of(_names.INVALID_IDS, "invalid_ids", invalid_ids))


def _refuse_selector(selector: Optional[SlotSelector]) -> None:
    if selector is not None:
        raise Unsupported("LowLatency.dispatch: torch.compile cannot trace `selector`: pass the slots of SlotSelector.select as topk_ids")


class Pending:
    """A call whose first half has been executed. The first :meth:`wait` executes the second half; each returns the result of
    the call."""

    def __init__(self, receive: Optional[Callable[[], None]], result: Any, keeps: Any) -> None:
        self._receive = receive
        self._result = result
        self._keeps = keeps

    def wait(self) -> Any:
        """Completes the call and returns its result."""
        receive, self._receive = self._receive, None
        if receive is not None:
            receive()
            self._keeps = None
        return self._result


class LowLatency:
    """Low-latency dispatch and combine for decoding. Creation is collective: all ranks pass the same keywords.

    hidden: H. num_experts: E, in total. topk: K, at most 32. max_tokens: maximum number of tokens on any rank, at most 65535.
    dtype: type of `x` and the widest type accepted by combine, "bf16", "f16" or "f32". scales: "f32" or "ue8m0" sends rows as
    fp8 with one such scale per `scale_group` columns (32, 64 or 128), in `scale_order` "row_major" or "column_major"; None
    sends rows unchanged.
    sending: "per_rank" or "per_route". pieces: number of parts per row that are sent separately; 0: chosen by the library.
    invalid_ids: "raise" or "count", as in :class:`Exchange`.
    """

    @constructs
    @named("LowLatency.__init__")
    def __init__(self, group: Group, **config: Any) -> None:
        _arguments.check("LowLatency.__init__", group=group)
        self.group = group
        self._config = _config(**config)
        self._functions = library().functions
        self._call, self._backend = group._call, group._backend
        made = ctypes.c_void_p()
        check_collective(self._functions.sy_low_latency_create(group.pointer, byref(self._config), byref(made)))
        self._owned = Owned(made.value, self._functions.sy_low_latency_destroy, group._owned, lock=group._lock)
        group._lock.members.add(self._owned)
        self.hidden: int = self._config.hidden
        self.topk: int = self._config.topk
        self._x, self._ids = structs.RowView(), structs.ExpertIds()
        self._dispatch_options, self._combine_options = structs.LowLatencyDispatchOptions(), structs.LowLatencyCombineOptions()
        self._by = tuple(byref(each) for each in (self._x, self._ids, self._dispatch_options, self._combine_options))
        self._plain = structs.RowView(cols=self.hidden)  # view of rows without scales
        self._by_plain = byref(self._plain)
        self._ids.topk = self.topk
        self._output: Optional[Received] = None
        self._given_scales: Any = None
        self._dispatch_again: Optional[_repeated.Dispatch] = None
        self._combine_again: Optional[_repeated.Combine] = None
        self._spare: Dict[int, List[Owned]] = {}  # by stream
        self._number = number_of(self)
        self._world = group.size
        self._shape = [len(group.experts_of(self._config.num_experts)), group.size * self._config.max_tokens, self.hidden]
        self._outputs = tuple(self._shape)
        sizes = {"H": self.hidden, "K": self.topk, "L": self._shape[0], "R": self._shape[1]}
        self._dispatched, self._combined, self._reduced, self._made = (
            _arguments.bind(f"LowLatency.{name}", self._backend, **sizes) for name in ("dispatch", "combine", "all_to_all", "make_output"))
        widest = _names.DTYPE_BITS[self._config.dtype]
        self._row_types = tuple(code for code in (BF16, F16, F32, FP8) if _names.DTYPE_BITS[code] <= widest)
        self._scale_geometry = scale_geometry(self._config, *self._shape)

    @staticmethod
    @checked("LowLatency.memory_required")
    def memory_required(world: int, **config: Any) -> MemoryRequirement:
        """Returns the amount of symmetric memory that an object constructed with these arguments allocates on each rank. Requires no group."""
        r = structs.MemoryRequirement()
        check(library().functions.sy_low_latency_memory_required(byref(_config(**config)), world, byref(r)))
        return MemoryRequirement(*(getattr(r, name) for name in MemoryRequirement._fields))

    @staticmethod
    @checked("LowLatency.heap_bytes")
    def heap_bytes(world: int, **config: Any) -> int:
        """Returns ``heap_bytes`` for a group whose only object has these keywords. Requires no group."""
        size = ctypes.c_size_t()
        check(library().functions.sy_low_latency_heap_bytes(byref(_config(**config)), world, byref(size)))
        return size.value

    @property
    def pointer(self) -> int:
        """The underlying ``sy_low_latency*``, for code that calls the C interface."""
        return self._owned.pointer or alive(self._owned, "the low-latency object", self.group)

    @named("LowLatency.make_output")
    def make_output(self, like: Any = None, *, memory: Any = None) -> Received:
        """Local. Allocates another destination for dispatches, with arrays of the same kind as `like` (default: numpy).
        memory: dense caller memory for rows and scales. Without scales, x [L, R, H]. With scales, a pair of x and float32 or
        uint8 [L, R, columns] whose rows are a multiple of 16 bytes, or column-major [L, columns, Rs], where Rs is R rounded up
        to a multiple of 4 and each int32 contains four powers of two. Costs no more than library memory."""
        if memory is not None:
            return self._output_in(memory)
        if like is None:
            return Received(self._make_output(), NUMPY, None)
        taken = self._made.like(like)
        return self._used_here(Received(self._make_output(), taken.arrays, taken.array), taken.arrays, taken.array)

    def _used_here(self, received: Received, arrays: Any, like: Any) -> Received:
        """GPUs: marks `received` as in use by the current stream until it is dropped."""
        if self._backend == CUDA:
            check(self._functions.sy_group_used_by(self.group.pointer, received._view.rows_of_expert, arrays.stream(like)))
        return received

    def _make_output(self, memory: Any = None, keeps: Any = None) -> Owned:
        made, f = ctypes.c_void_p(), self._functions
        with self.group._lock:
            if memory is None:
                check(f.sy_low_latency_make_output(self.pointer, byref(made)))
            else:
                check(f.sy_low_latency_make_output_in(self.pointer, byref(memory), byref(made)))
        return Owned(made.value, f.sy_low_latency_output_destroy, self._owned, keeps, lock=self.group._lock)

    def _output_in(self, memory: Any) -> Received:
        rows, scales = pair_of(memory, "memory")
        kind, _, strides = self._scale_geometry
        here, per_expert, hidden = self._shape
        taken = self._made.memory(rows, None, (self._config.dtype,) if kind < 0 else (FP8,))
        if (kind >= 0) != (scales is not None):
            invalid("memory: fp8 rows, and only these, come with scales, as a pair (memory, scales)")
        view = structs.RowView(data=taken.pointer, rows=here * per_expert, cols=hidden, dtype=taken.code, scale_kind=self._config.scales)
        if scales is not None:
            width = strides[1] if self._config.scale_order == 0 else strides[2]
            shape = (here, strides[0] // width, width)
            given = take(scales, "scales of memory", shape, (kind,) if kind != U8 else (FP8, U8), self._backend, written=True)
            check_apart("scales of memory", given, memory=taken)
            view.scales = given.pointer
        return self._used_here(Received(self._make_output(view, memory), taken.arrays, taken.array), taken.arrays, taken.array)

    def _lend(self, like: Any) -> Received:
        """Returns an output that is not in use by any tensor."""
        arrays: Any
        like, arrays = arrays_of(like, "like")
        if self._backend == CUDA and arrays.torch.cuda.is_current_stream_capturing():  # it belongs to the graph
            return self._used_here(Received(self._make_output(), arrays, like), arrays, like)
        spare = self._spare.setdefault(arrays.stream(like), [])
        return self._used_here(Received(Lent(spare.pop() if spare else self._make_output(), spare), arrays, like), arrays, like)

    @checked("LowLatency.make_rows")
    def make_rows(self, received: Received, dtype: object = None) -> Any:
        """Local. Allocates memory [L, R, H] for the expert outputs of the rows in `received`, which combine reads in place."""
        code = self._config.dtype if dtype is None else _names.dtype_of("dtype", dtype)
        made, view, f = ctypes.c_void_p(), structs.RowView(), self._functions
        with self.group._lock:
            check(f.sy_low_latency_make_rows(self.pointer, code, byref(made)))
        owned = Owned(made.value, f.sy_low_latency_rows_destroy, self._owned, lock=self.group._lock)
        check(f.sy_low_latency_rows_get(owned.pointer, byref(view)))
        shape = (received._view.num_local_experts, received._view.rows_per_expert, self.hidden)
        _, arrays = arrays_of(received.x, "x")
        if self._backend == CUDA and view.data:
            check(f.sy_group_used_by(self.group.pointer, view.data, arrays.stream(received.x)))
        return arrays.wrap(view.data, shape, code, owned, received.x)

    # ---- Dispatch ----

    def dispatch(self, x: Any, topk_ids: Any, topk_weights: Any = None, *, output: Optional[Received] = None, num_sms: int = 0,
                 selector: Optional[SlotSelector] = None) -> Received:
        """Collective. Sends row t of `x` [T, H] to every expert of token t. topk_ids: int32 or int64 [T, K]; -1 means no
        expert. topk_weights: float32 [T, K], used for the weighted sums in combine. fp8 rows are passed as (x, scales), with
        one row of scales per row, in any memory order. Scales are copied unless they are dense, [T, columns], with rows that
        are a multiple of 16 bytes. output: the destination; None: an output shared by all such calls on this object, each of
        which overwrites the previous result. selector: `topk_ids` are expert ids, which the call replaces with slots as
        :meth:`SlotSelector.select` does, on GPUs usually without another launch; ``num_experts`` of this object is the number of
        slots. All ranks must pass the same selector, with the same version of its map, or None. They compare (version + 3 * number
        of the selector) modulo 8, where SlotSelectors and RouteCounters of a group are numbered in order of construction. All ranks
        raise Mismatch if the results differ or only some ranks pass None."""
        if is_traced():
            _refuse_selector(selector)
            from ._torch import low_latency_ops as _low_latency_ops

            refuse_gradient("LowLatency.dispatch", _INSTEAD, x=x, topk_weights=topk_weights)
            return _low_latency_ops.dispatch(self, x, topk_ids, topk_weights, output, num_sms)
        again, into = self._dispatch_again, self._output if output is None else output
        if again is not None and isinstance(into, Received) and num_sms.__class__ is int and num_sms == 0 and type(into.x) is type(x) \
                and (selector is None or selector.__class__ is SlotSelector) and again(x, topk_ids, topk_weights, into, None, selector):
            return into
        refuse_gradient("LowLatency.dispatch", _INSTEAD, x=x, topk_weights=topk_weights)
        return self._dispatch(self._functions.sy_low_latency_dispatch, x, topk_ids, topk_weights, output, num_sms, selector)[0]

    def dispatch_async(self, x: Any, topk_ids: Any, topk_weights: Any = None, *, output: Optional[Received] = None, num_sms: int = 0,
                       selector: Optional[SlotSelector] = None) -> Pending:
        """Executes the sending half of :meth:`dispatch`. ``wait()`` on the returned object executes the other half and returns
        the output. No other call may be made on this LowLatency in between."""
        if is_traced():  # a graph orders calls itself
            return Pending(None, self.dispatch(x, topk_ids, topk_weights, output=output, num_sms=num_sms, selector=selector), None)
        refuse_gradient("LowLatency.dispatch_async", _INSTEAD, x=x, topk_weights=topk_weights)
        received, kept = self._dispatch(self._functions.sy_low_latency_dispatch_send, x, topk_ids, topk_weights, output, num_sms, selector)
        return Pending(self._receive, received, kept)

    def _dispatch(self, function: Any, x: Any, topk_ids: Any, topk_weights: Any, output: Optional[Received], num_sms: int,
                  selector: Optional[SlotSelector] = None) -> Tuple[Received, Any]:
        by_x, by_ids, by_options, _ = self._by
        with self._call:
            if num_sms.__class__ is not int or num_sms >> 31 or not (output is None or isinstance(output, Received)) or selector is not None:
                _arguments.check("LowLatency.dispatch", output=output, num_sms=num_sms, selector=selector)
            code = code_of_rows(x, self.hidden, _PLAIN, self._backend)
            if code is None:
                taken = self._take_rows(x)
                tokens, arrays, array = taken.shape[0], taken.arrays, taken.array
            else:
                tokens, arrays, array, by_x, v = x.shape[0], arrays_of_torch(), x, self._by_plain, self._plain
                v.data, v.rows, v.dtype = x.data_ptr(), tokens, code
            o, shape = self._dispatch_options, (tokens, self.topk)
            topk_ids = self._take_ids(topk_ids, shape)
            o.topk_weights = None if topk_weights is None else self._take_weights(topk_weights, shape)
            o.stream, o.num_sms = arrays.stream(array), num_sms
            o.selector = None if selector is None else selector.pointer
            if output is None:
                if self._output is None or type(self._output.x) is not type(array):
                    self._output = self.make_output(array)
                output = self._output
            check(function(self.pointer, by_x, by_ids, output._owned.pointer, by_options))
            output.num_tokens = tokens
            written(output.x, output.scales)
            if code is not None:
                self._dispatch_again = self._dispatch_again or _repeated.Dispatch(self)
                self._dispatch_again.learn(x, topk_ids)
            return output, (x, topk_ids, topk_weights, selector)

    def _take_rows(self, x: Any) -> Any:
        rows, scales = pair_of(x, "x") if isinstance(x, tuple) else (x, None)
        taken = self._dispatched.x(rows, None, self._row_types)
        v = self._x
        v.data, v.rows, v.cols, v.dtype, v.scale_kind, v.scales = taken.pointer, taken.shape[0], self.hidden, taken.code, 0, None
        if (taken.code == FP8) != (scales is not None):
            invalid("x: fp8 rows, and only these, come with scales, as a pair (x, scales)")
        if scales is not None:
            size = ctypes.c_size_t()
            check(self._functions.sy_low_latency_scale_row_bytes(byref(self._config), byref(size)))
            f32, group = self._config.scales == 1, self._config.scale_group
            columns, groups = size.value // (4 if f32 else 1), -(-self.hidden // group)
            scales = bytes_of_scales(scales, self.hidden, group)
            wide = getattr(scales, "shape", (0, 0))[-1] == columns
            given = take(scales, "scales of x", (taken.shape[0], columns if wide else groups), (F32,) if f32 else (FP8, U8), self._backend,
                         strided=True)
            self._given_scales = padded_scales(given, columns)  # lives until the call has read it
            v.scale_kind, v.scales = self._config.scales, given.arrays.pointer(self._given_scales)
        return taken

    def _take_ids(self, topk_ids: Any, shape: Tuple[int, int]) -> Any:
        """Fills the ids struct; returns an object that must stay alive until the call has returned."""
        i, code = self._ids, code_of(topk_ids, shape, _IDS, self._backend)
        if code is None:
            given = self._dispatched.topk_ids(topk_ids, shape[0])
            i.data, topk_ids, code = given.pointer, given.array, given.code
        else:
            i.data = topk_ids.data_ptr()
        i.num_tokens, i.is_int64 = shape[0], int(code == I64)
        return topk_ids

    def _take_weights(self, topk_weights: Any, shape: Tuple[int, int]) -> Optional[int]:
        if code_of(topk_weights, shape, (F32,), self._backend) is not None:
            return topk_weights.data_ptr() or None
        return self._dispatched.topk_weights(topk_weights, shape[0]).pointer or None

    def _receive(self) -> None:
        with self.group._lock:
            check(self._functions.sy_low_latency_receive(self.pointer))

    # ---- Combine ----

    def combine(self, y: Any, received: Received, *, topk_weights: Any = None, expert_scale: Any = None, order: str = "per_route",
                out: Any = None, num_sms: int = 0) -> Any:
        """Collective. Sums the expert outputs for the tokens of the last dispatch into `received`; the result is out [T, H] of
        y's type. y: [L, R, H], read in place. topk_weights: float32 [T, K], "per_route" only; None: those passed to dispatch,
        if any; "per_rank" applies these on the experts' ranks. expert_scale: float32 [L], "per_route" only; rows are returned as
        round(y * scale). A token without a route yields +0."""
        if is_traced():
            from ._torch import low_latency_ops as _low_latency_ops

            refuse_gradient("LowLatency.combine", _INSTEAD, y=y, topk_weights=topk_weights, expert_scale=expert_scale)
            return _low_latency_ops.combine(self, y, received, topk_weights, expert_scale, order, out, num_sms)
        again = self._combine_again
        if again is not None and expert_scale is None and (order == "per_route" or (order == "per_rank" and topk_weights is None)) \
                and num_sms.__class__ is int and num_sms == 0 and isinstance(received, Received):
            sums = again(y, received, topk_weights, None, out, order)
            if sums is not None:
                return sums
        refuse_gradient("LowLatency.combine", _INSTEAD, y=y, topk_weights=topk_weights, expert_scale=expert_scale)
        return self._combine(self._functions.sy_low_latency_combine, y, received, topk_weights, expert_scale, order, out, num_sms)[0]

    def combine_async(self, y: Any, received: Received, *, topk_weights: Any = None, expert_scale: Any = None, order: str = "per_route",
                      out: Any = None, num_sms: int = 0) -> Pending:
        """Executes the sending half of :meth:`combine`. ``wait()`` on the returned object executes the other half and returns
        the sums."""
        if is_traced():
            sums = self.combine(y, received, topk_weights=topk_weights, expert_scale=expert_scale, order=order, out=out, num_sms=num_sms)
            return Pending(None, sums, None)
        refuse_gradient("LowLatency.combine_async", _INSTEAD, y=y, topk_weights=topk_weights, expert_scale=expert_scale)
        result, kept = self._combine(self._functions.sy_low_latency_combine_send, y, received, topk_weights, expert_scale, order, out, num_sms)
        return Pending(self._receive, result, kept)

    def _combine(self, function: Any, y: Any, received: Received, topk_weights: Any, expert_scale: Any, order: str, out: Any,
                 num_sms: int) -> Tuple[Any, Any]:
        by_options, v, o = self._by[3], self._plain, self._combine_options
        with self._call:
            if num_sms.__class__ is not int or num_sms >> 31 or not isinstance(received, Received):
                _arguments.check("LowLatency.combine", received=received, num_sms=num_sms)
            tokens, shape, takes = received.num_tokens, self._shape, self._combined
            code, arrays, array, taken = code_of(y, self._outputs, _SUMMED, self._backend), None, y, None
            plain = code is not None
            if code is None:
                taken = takes.y(y)
                code, arrays, array, v.data = taken.code, taken.arrays, taken.array, taken.pointer
            else:
                arrays, v.data = arrays_of_torch(), y.data_ptr()
            v.rows, v.dtype = shape[0] * shape[1], code
            o.order, o.num_sms, o.stream = value_of(_names.ORDERS, "order", order), num_sms, arrays.stream(array)
            o.topk_weights = None if topk_weights is None else self._take_weights(topk_weights, (tokens, self.topk))
            scale = None if expert_scale is None else takes.expert_scale(expert_scale)
            o.expert_scale = None if scale is None else scale.pointer or None
            if out is None:
                out = arrays.empty((tokens, self.hidden), code, array)
                result = arrays.pointer(out)
            else:
                into = takes.out(out, tokens, (code,))
                result = into.pointer
                check_apart("out", into, y=taken or Taken(y.data_ptr(), y.shape, code, y, arrays), expert_scale=scale,
                            topk_weights=None if topk_weights is None else takes.topk_weights(topk_weights, tokens))
            check(function(self.pointer, self._by_plain, received._owned.pointer, result, by_options))
            written(out)
            if plain:
                self._combine_again = self._combine_again or _repeated.Combine(self)
                self._combine_again.learn(y)
            return out, (y, topk_weights, expert_scale)

    def all_to_all(self, x: Any, topk_ids: Any, topk_weights: Any = None, *, expert_scale: Any = None, out: Any = None, num_sms: int = 0,
                   selector: Optional[SlotSelector] = None) -> Any:
        """Collective. Runs dispatch, experts and combine in one launch, for experts that only scale rows
        (docs/concepts/flat.md): out[t] = sum over k of topk_weights[t, k] * round(expert_scale[e] * x[t]). Requires
        ``scales=None``. expert_scale: float32 [L]; None: 1. selector: as in :meth:`dispatch`; a separate kernel selects the slots."""
        refuse_gradient("LowLatency.all_to_all", _INSTEAD, x=x, topk_weights=topk_weights, expert_scale=expert_scale)
        by_x, by_ids = self._by[:2]
        with self._call:
            _arguments.check("LowLatency.all_to_all", num_sms=num_sms, selector=selector)
            taken, takes = self._take_rows(x), self._reduced
            tokens = taken.shape[0]
            routes = takes.topk_ids(self._take_ids(topk_ids, (tokens, self.topk)), tokens)
            o = structs.AllToAllOptions(stream=taken.arrays.stream(taken.array), num_sms=num_sms,
                                        selector=None if selector is None else selector.pointer)
            factors = None if topk_weights is None else takes.topk_weights(topk_weights, tokens)
            scale = None if expert_scale is None else takes.expert_scale(expert_scale)
            o.topk_weights = None if factors is None else factors.pointer or None
            o.expert_scale = None if scale is None else scale.pointer or None
            if out is None:
                out = taken.arrays.empty((tokens, self.hidden), taken.code, taken.array)
            result = takes.out(out, tokens, (taken.code,))
            check_apart("out", result, x=taken, topk_ids=routes, topk_weights=factors, expert_scale=scale)
            check(self._functions.sy_low_latency_all_to_all(self.pointer, by_x, by_ids, result.pointer, byref(o)))
            written(out)
            return out

    # ---- Statistics and lifetime ----

    @property
    def invalid_ids(self) -> int:
        """Number of ids in this rank's calls so far that are neither -1 nor a valid expert. CUDA: includes only calls that have
        run; does not wait for kernels."""
        return number_from(self._functions.sy_low_latency_invalid_ids, self.pointer)

    def last_call(self) -> CallStatistics:
        """Returns the traffic and time of this rank's last call. CUDA: waits for that call."""
        s = structs.CallStatistics()
        check(self._functions.sy_low_latency_last_call(self.pointer, byref(s)))
        return statistics_of(s)

    def close(self) -> None:
        """Releases the object. Outputs stay valid. May be called twice."""
        self._owned.close()

    def __enter__(self) -> "LowLatency":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:
        self.close()
