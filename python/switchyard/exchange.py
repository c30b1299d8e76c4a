# SPDX-License-Identifier: Apache-2.0
"""Normal mode: dispatch and combine for prefill and training."""
from __future__ import annotations

import ctypes
from types import TracebackType
from typing import Any, Optional, Sequence, Tuple, Type, Union

from ._abi import arguments as _arguments, names as _names, repeated as _repeated
from ._abi.arguments import checked, named
from ._abi.arrays import I64, U8, Arrays, Taken, arrays_of_torch, check_apart, code_of_rows, is_tensor, refuse_overlap, take, written
from ._abi.ffi import Owned, alive, byref, check, check_collective, library, number_from, structs
from ._abi.names import BF16, CUDA, EXPERT_MAJOR, F16, F32, FP8, PER_RANK, RANK_MAJOR, invalid, value_of
from ._internal.configs import normal_config, weights_config
from ._internal.statistics import CallStatistics, MemoryRequirement, statistics_of
from ._internal.tensors import bytes_of_scales, padded_scales, pair_of
from ._torch.recorded import is_traced, needs_gradient
from ._torch.registry import number_of
from .graph_memory import GraphMemory
from .expert_map import SlotSelector
from .group import Group, constructs
from .handle import Handle
from .route_counter import RouteCounter, RouteLoad

__all__ = ["CallStatistics", "Exchange", "MemoryRequirement"]

#: Number of columns that share a scale.
_GROUP = 128
_COMBINED, _WIDEST = (BF16, F16, F32), (BF16, F16, F32, FP8)
_UNREAD = ("topk_weights: dispatch got weights that a rank-major combine does not apply, and nobody has read handle.topk_weights: multiply by these "
           "where experts compute, or make the exchange with layout='expert_major', or say apply_weights=False")
#: Default numeric values of quantize, size, overflow, padding and capacity.
_PLAIN_DISPATCH = (0, 3, 0, 0, 0)
_AUTOMATIC = (*_PLAIN_DISPATCH, 0)  # with num_sms

Rows = Union[Any, Tuple[Any, Any]]


class Exchange:
    """Normal-mode dispatch and combine over a group. Creation is collective: all ranks pass the same keywords.

    hidden: H, columns per row; rows must be a multiple of 16 bytes. num_experts: E, in total. topk: K, at most 32.
    max_tokens: maximum number of tokens on any rank.
    layout: "rank_major", one row per (token, rank); or "expert_major", one row per (token, expert), grouped by expert and
    padded to a multiple of `expert_alignment` rows per group.
    dtype: the widest row type, "bf16", "f16", "f32", or a numpy or torch dtype. staging: "direct" or "ring" (bounded memory).
    invalid_ids: handling of ids that are neither -1 (no expert) nor in [0, num_experts), "raise" or "count" (docs/routing.md).
    pool_bytes: memory for outputs; 0: enough for one output and one buffer of expert outputs with any routing.
    routing_gradients: for training with expert-major layout; returns gradients of routing weights to the tokens' owners through
    a separate small exchange.
    count_routes: counts the routes of each dispatch with `topk_ids` for :meth:`load`, unless the call raises an error. GPUs: a
    dispatch that fails on the device (CapacityExceeded) is counted.

    Rows delivered by a dispatch occupy the pool until the last array that refers to them is dropped.
    """

    @constructs
    @named("Exchange.__init__")
    def __init__(self, group: Group, *, routing_gradients: bool = False, count_routes: bool = False, **config: Any) -> None:
        _arguments.check("Exchange.__init__", group=group, routing_gradients=routing_gradients, count_routes=count_routes)
        self.group = group
        self._config = normal_config(**config)
        self._functions, self._call, self._backend = library().functions, group._call, group._backend
        made = ctypes.c_void_p()
        check_collective(self._functions.sy_exchange_create(group.pointer, byref(self._config), byref(made)))
        self._owned = Owned(made.value, self._functions.sy_exchange_destroy, group._owned, lock=group._lock)
        group._lock.members.add(self._owned)
        self._layout = self._config.layout
        c = self._config
        self.hidden, self.topk, self.num_experts, self.max_tokens = c.hidden, c.topk, c.num_experts, c.max_tokens
        self._most_rows = number_from(self._functions.sy_exchange_max_rows, byref(self._config), group.size)
        self._world, self._experts_here = group.size, len(group.experts_of(self.num_experts))
        sizes = {"H": self.hidden, "K": self.topk}
        self._dispatched = _arguments.bind("Exchange.dispatch", self._backend, **sizes)
        self._combined = _arguments.bind("Exchange.combine", self._backend, **sizes)
        # The widest row type determines memory sizes, so wider rows are rejected for any routing.
        widest = _names.DTYPE_BITS[self._config.dtype]
        self._row_types = tuple(code for code in _WIDEST if _names.DTYPE_BITS[code] <= widest)
        self._summed_types = tuple(code for code in _COMBINED if _names.DTYPE_BITS[code] <= widest)
        self._number = number_of(self)
        self._make_structs()
        self._counter = RouteCounter(group, num_experts=self.num_experts) if count_routes else None
        self._for_weights: Optional[Exchange] = None
        if routing_gradients and self._layout == EXPERT_MAJOR:
            small = weights_config(self._config)
            self._for_weights = Exchange(group, hidden=small.hidden, num_experts=self.num_experts, topk=self.topk, dtype="f32",
                                         invalid_ids="count", max_tokens=self.max_tokens, layout="expert_major",
                                         expert_alignment=small.expert_alignment)

    def _make_structs(self) -> None:
        """Creates the structs that calls fill and pass, once per object."""
        self._x, self._ids = structs.RowView(), structs.ExpertIds()
        self._dispatch_options, self._combine_options = structs.DispatchOptions(), structs.CombineOptions()
        self._given_out = structs.RowView()
        self._plain = structs.RowView(cols=self.hidden)  # view of rows without scales
        self._by_plain = byref(self._plain)
        self._biased = False  # whether the options contain a bias
        self._combine_again: Optional[_repeated.NormalCombine] = None
        self._dispatch_again: Optional[_repeated.NormalDispatch] = None  # only after a delivery into torch memory
        self._out, self._view = ctypes.c_void_p(), structs.DispatchedView()
        self._by_view = byref(self._view)
        self._by = tuple(byref(each) for each in (self._x, self._ids, self._dispatch_options, self._combine_options, self._out))

    _site: Optional[int] = None  # number of the model's module that uses this object, if any; sent with each call

    def _at_site(self, site: int) -> "Exchange":
        """Returns this exchange for use by one module of a model; ranks then also compare the `site` of their calls."""
        twin = Exchange.__new__(Exchange)
        twin.__dict__.update(self.__dict__)
        twin._site, twin._number = site, number_of(twin)
        return twin

    def _here(self) -> int:
        """Sets the site of the next call and returns the ``sy_exchange*``. The caller must hold the lock."""
        if self._site is not None:
            check(self._functions.sy_exchange_set_site(self.pointer, self._site))
        return self.pointer

    @staticmethod
    @checked("Exchange.memory_required")
    def memory_required(world: int, *, backend: str = "cpu", **config: Any) -> MemoryRequirement:
        """Returns the symmetric memory that an exchange with these keywords allocates on each rank. Requires no group."""
        r = structs.MemoryRequirement()
        number = value_of(_names.BACKENDS, "backend", backend)
        check(library().functions.sy_exchange_memory_required(byref(normal_config(**config)), world, number, byref(r)))
        return MemoryRequirement(*(getattr(r, name) for name in MemoryRequirement._fields))

    @staticmethod
    @checked("Exchange.heap_bytes")
    def heap_bytes(world: int, *, backend: str = "cpu", routing_gradients: bool = False, **config: Any) -> int:
        """Returns ``heap_bytes`` for a group whose only exchange has these keywords. Requires no group."""
        given, number = normal_config(**config), value_of(_names.BACKENDS, "backend", backend)
        total = 0
        for each in [given] + ([weights_config(given)] if routing_gradients and given.layout == EXPERT_MAJOR else []):
            size = ctypes.c_size_t()
            check(library().functions.sy_exchange_heap_bytes(byref(each), world, number, byref(size)))
            total += size.value
        return total

    @property
    def layout(self) -> str:
        return _names.name_of(_names.LAYOUTS, self._layout)

    @property
    def pointer(self) -> int:
        """The underlying ``sy_exchange*``, for code that calls the C interface."""
        return self._owned.pointer or alive(self._owned, "the exchange", self.group)

    def dispatch(self, x: Rows, topk_ids: Any = None, topk_weights: Any = None, *, handle: Optional[Handle] = None,
                 quantize: Optional[str] = None, size: str = "automatic", capacity: Optional[int] = None, overflow: str = "fail",
                 padding: str = "zero", out: Optional[Rows] = None, num_sms: int = 0) -> Tuple[Rows, Handle]:
        """Collective. Sends row t of `x` to every rank that owns one of token t's experts.

        x: [T, H], a dense numpy array or torch tensor on the CPU or the group's GPU. T may be 0 and may differ by rank. fp8
        rows are passed as a pair (x, scales). Scales are [T, ceil(H / 128)], float32, or uint8 for powers of two; or [T, ceil(H
        / 512)], int32 with four powers of two each. They may be strided, for example column-major, and are copied unless they
        are dense with rows that are a multiple of 16 bytes.
        topk_ids: int32 or int64 [T, K]; -1 means no expert. topk_weights: float32 [T, K], sent with the rows.
        handle: replaces topk_ids and topk_weights; repeats the routing of the handle with other rows, without counting.
        quantize: "f32" or "ue8m0"; sends rows as fp8 with scales of this type.
        size: number of rows to allocate: "exact", "capacity" (at most `capacity` on this rank), "worst_case" or "automatic"
        (CPU: exact; CUDA: worst case, because exact waits for the GPU). overflow: action if the capacity is exceeded, "fail" on
        all ranks or "drop_and_report".
        padding: content of expert-major padding rows, "zero" or "unspecified". num_sms: CUDA, maximum number of
        multiprocessors; 0: automatic.
        out: memory for the rows, [at least the number of allocated rows, H]; for fp8 rows, a pair with dense scales whose rows
        are a multiple of 16 bytes. Ranks may differ in using it. Rows are copied to it locally, except rows without scales if
        it is from :meth:`allocate_rows` ("direct" staging). If it is too small with exact size, all ranks raise PoolExhausted.

        Returns (rows, handle): rows [R, H] of the same kind and type as x, or a pair with scales if they are fp8; and the
        routing. docs/concepts/layouts.md describes the row order. Differentiable in `x` and `topk_weights` if these are torch
        tensors that require gradients. Rows are then copied out of the pool, so any number of layers may keep them. With `out`,
        the returned rows are the first R rows of `out`.
        """
        if quantize is None and capacity is None and size == "automatic" and overflow == "fail" and padding == "zero" \
                and num_sms.__class__ is int and not num_sms >> 31 and (handle is None or isinstance(handle, Handle)):
            options: Tuple[int, ...] = (*_PLAIN_DISPATCH, num_sms) if num_sms else _AUTOMATIC
        elif is_traced():
            options = self._options(quantize, size, capacity, overflow, padding, num_sms)
        else:
            with self._call:
                _arguments.check("Exchange.dispatch", capacity=capacity, handle=handle, num_sms=num_sms)
                options = self._options(quantize, size, capacity, overflow, padding, num_sms)
        gradient = needs_gradient(x, topk_weights)
        if gradient or is_traced():
            from ._torch import autograd as _autograd

            return _autograd.dispatch(self, x, topk_ids, topk_weights, handle, options, out, gradient)
        rows, scales, made = self._dispatch(x, topk_ids, topk_weights, handle, options, out)
        return (rows if scales is None else (rows, scales)), made

    def _options(self, quantize: Optional[str], size: str, capacity: Optional[int], overflow: str, padding: str, num_sms: int) -> Tuple[int, ...]:
        """Converts dispatch options to numbers."""
        return (value_of(_names.SCALES, "quantize", quantize), self._size(size, capacity), value_of(_names.OVERFLOWS, "overflow", overflow),
                value_of(_names.PADDINGS, "padding", padding), capacity or 0, num_sms)

    def _size(self, size: str, capacity: Optional[int]) -> int:
        if capacity is not None and size == "automatic":
            size = "capacity"
        if (size == "capacity") != (capacity is not None):
            invalid(f"capacity = {capacity}: goes with size = 'capacity', not {size!r}")
        return value_of(_names.SIZES, "size", size)

    def _dispatch(self, x: Rows, topk_ids: Any, topk_weights: Any, handle: Optional[Handle], options: Tuple[int, ...] = _AUTOMATIC,
                  out: Optional[Rows] = None) -> Tuple[Any, Any, Handle]:
        """Returns the rows, the scales or None, and the handle. `options`: as returned by :meth:`_options`."""
        plain = out is not None and topk_ids is topk_weights is self._site is None and (options is _AUTOMATIC or options[:5] == _PLAIN_DISPATCH)
        if plain and handle is not None and self._dispatch_again is not None:
            rows = self._dispatch_again(x, handle, options[5], None, out)
            if rows is not None:
                return rows, None, handle
        by_x, by_ids, by_options, _, by_out = self._by
        with self._call:
            exchange = self._here()
            if (topk_ids is None) == (handle is None) or (handle is not None and topk_weights is not None):
                invalid("dispatch takes either topk_ids, with or without topk_weights, or a handle")
            taken, kept = self._take_rows(self._dispatched.x, x, self._row_types)
            o = self._dispatch_options
            o.quantize, o.size, o.overflow, o.padding, o.capacity, o.num_sms = options
            o.stream = taken.arrays.stream(taken.array)
            routing = None if handle is not None else self._take_routing(topk_ids, topk_weights, taken)
            o.out = None if out is None else self._take_out(out, taken, routing)
            if routing is not None:
                pointer = 0 if routing[1] is None else routing[1].pointer
                check(self._functions.sy_exchange_dispatch(exchange, by_x, by_ids, pointer, by_options, by_out))
                if self._counter is not None:  # a call that fails is not counted
                    self._counter._count(by_ids, o.stream)
            else:
                assert handle is not None
                check(self._functions.sy_exchange_dispatch_cached(exchange, by_x, handle.pointer, by_options, by_out))
                if plain and is_tensor(x):
                    self._dispatch_again = self._dispatch_again or _repeated.NormalDispatch(self)
                    self._dispatch_again.learn(x)
            return self._deliver(taken, handle, out, routing is not None and routing[1] is not None)

    def _take_out(self, out: Rows, x: Taken, routing: Optional[Tuple[Taken, Optional[Taken]]]) -> int:
        """Fills the view of `out` and returns its address."""
        rows, scales = pair_of(out, "out") if isinstance(out, tuple) else (out, None)
        quantize, v = self._dispatch_options.quantize, self._given_out
        code = FP8 if quantize else x.code
        taken = self._dispatched.out(rows, None, (code,))
        if (code == FP8) != (scales is not None):
            invalid("out: fp8 rows, and only these, come with scales, as a pair (out, scales)")
        kind = quantize or self._x.scale_kind
        v.data, v.rows, v.cols, v.dtype, v.scale_kind, v.scales = taken.pointer, taken.shape[0], self.hidden, code, kind, None
        topk_ids, topk_weights = routing or (None, None)
        check_apart("out", taken, x=x, topk_ids=topk_ids, topk_weights=topk_weights)
        if scales is not None:
            given = take(scales, "scales of out", (taken.shape[0], self._scale_columns(kind)), (F32,) if kind == 1 else (FP8, U8),
                         self._backend, written=True)
            check_apart("scales of out", given, out=taken, x=x, topk_ids=topk_ids, topk_weights=topk_weights)
            v.scales = given.pointer
        return ctypes.addressof(v)

    def _scale_columns(self, kind: int) -> int:
        """Returns the number of elements per row of scales, padded to a multiple of 16 bytes."""
        groups = -(-self.hidden // _GROUP)
        return -(-groups // 4) * 4 if kind == 1 else -(-groups // 16) * 16

    def _take_routing(self, topk_ids: Any, topk_weights: Any, x: Taken) -> Tuple[Taken, Optional[Taken]]:
        """Fills the ids struct; returns the ids and the weights."""
        tokens = x.shape[0]
        taken = self._dispatched.topk_ids(topk_ids, tokens)
        i = self._ids
        i.data, i.num_tokens, i.topk, i.is_int64 = taken.pointer, tokens, self.topk, int(taken.code == I64)
        return taken, None if topk_weights is None else self._dispatched.topk_weights(topk_weights, tokens)

    def _take_rows(self, taker: Any, x: Rows, types: Tuple[int, ...]) -> Tuple[Taken, Any]:
        """Fills the row view; returns the rows and an object that must stay alive until the call has returned."""
        rows, scales = pair_of(x, taker.name) if isinstance(x, tuple) else (x, None)
        taken, name = taker(rows, None, types), taker.name
        v = self._x
        v.data, v.rows, v.cols, v.dtype, v.scale_kind, v.scales = taken.pointer, taken.shape[0], self.hidden, taken.code, 0, None
        if (taken.code == FP8) != (scales is not None):
            invalid(f"{name}: fp8 rows, and only these, come with scales, as a pair ({name}, scales)")
        if scales is None:
            return taken, None
        given = take(bytes_of_scales(scales, self.hidden, _GROUP), f"scales of {name}", (taken.shape[0], -(-self.hidden // _GROUP)), (F32, FP8, U8),
                     self._backend, strided=True)
        v.scale_kind = 1 if given.code == F32 else 2
        padded = padded_scales(given, self._scale_columns(v.scale_kind))
        v.scales = given.arrays.pointer(padded)
        return taken, padded

    def _deliver(self, x: Taken, handle: Optional[Handle], out: Optional[Rows], weighted: bool) -> Tuple[Any, Any, Handle]:
        functions = self._functions
        delivered = Owned(self._out.value, functions.sy_dispatched_destroy, self._owned)
        view = self._view
        check(functions.sy_dispatched_get(delivered.pointer, self._by_view))
        scales = None
        if out is not None:
            rows, scales = out if isinstance(out, tuple) else (out, None)
            rows, scales = rows[:view.x_rows], None if scales is None else scales[:view.x_rows, :-(-self.hidden // _GROUP)]
            written(rows, scales)
        else:
            rows = x.arrays.wrap(view.x, (view.x_rows, self.hidden), view.x_dtype, delivered, x.array)
            if view.x_scale_kind:
                scales = self._scales(view, delivered, x.arrays, x.array)
        if handle is None:
            check(functions.sy_handle_retain(view.handle))
            handle = Handle(view.handle, self._layout, self._owned)
        if handle._view is None:
            handle._set(type(view).from_buffer_copy(view), x.arrays, x.arrays.empty((0,), x.code, x.array), weighted)
        return rows, scales, handle

    def _scales(self, view: structs.DispatchedView, owner: Owned, arrays: Arrays, like: Any) -> Any:
        """Returns the scales [R, groups], a strided view of rows padded to 16 bytes."""
        columns, element = self._scale_columns(view.x_scale_kind), F32 if view.x_scale_kind == 1 else U8
        return arrays.wrap(view.x_scales, (view.x_rows, columns), element, owner, like)[:, :-(-self.hidden // _GROUP)]

    # ---- Expert outputs and combine ----

    @named("Exchange.allocate_rows")
    def allocate_rows(self, handle: Handle, dtype: object = None) -> Any:
        """Allocates uninitialized rows [rows of `handle`, H] in symmetric memory for expert outputs, which combine reads in
        place. `dtype`: None selects that of the exchange. CUDA: the rows are for use on the current stream."""
        _arguments.check("Exchange.allocate_rows", handle=handle)
        code = self._config.dtype if dtype is None else _names.dtype_of("dtype", dtype)
        rows, view = ctypes.c_void_p(), structs.RowView()
        f = self._functions
        with self.group._lock:
            stream = handle._arrays.stream(handle._like) if self._backend == CUDA else None
            check(f.sy_exchange_allocate_rows(self.pointer, handle.pointer, code, stream, byref(rows)))
        owner = Owned(rows.value, f.sy_rows_destroy, self._owned)
        check(f.sy_rows_get(owner.pointer, byref(view)))
        return handle._arrays.wrap(view.data, (view.rows, self.hidden), code, owner, handle._like)

    def combine(self, y: Any, handle: Handle, *, topk_weights: Any = None, apply_weights: bool = True, order: str = "per_rank",
                bias: Union[Any, Sequence[Any], None] = None, out: Any = None, num_sms: int = 0) -> Any:
        """Collective. Sums the expert outputs of each token.

        y: bf16, f16 or f32 [at least the rows of `handle`, H]. Rows delivered by a dispatch or allocated by
        :meth:`allocate_rows` are read in place; other rows are copied first.
        topk_weights: in rank-major layout, float32 [R, K], whose sums over ranks are returned; rows are not multiplied by them.
        In expert-major layout, float32 [T, K], which replace those passed to dispatch; "per_route" order only.
        apply_weights: in expert-major layout, multiplies rows by their weights if dispatch or `topk_weights` supplied any.
        Rank-major rows are sums over a rank's experts, so only the caller can apply weights: combine raises InvalidArgument if
        dispatch delivered weights and ``handle.topk_weights`` was never read. False confirms that unweighted sums are intended.
        order: order of the float32 sum, "per_rank", "per_route" (expert-major only) or "per_host", with which each other host
        returns one row per token (docs/concepts/layouts.md).
        bias: one or two arrays [T, H] of y's type, added before the sum. out: [T, H] of y's type, filled by the call.

        Returns out [T, H], +0 for tokens without a route; with rank-major `topk_weights`, a pair with the summed weights,
        float32 [T, K]. Differentiable in `y`, `bias` and, in expert-major layout, the weights passed to the differentiable
        dispatch that returned `handle`.
        """
        if order == "per_rank" and apply_weights is True and num_sms.__class__ is int and not num_sms >> 31 and isinstance(handle, Handle) \
                and not handle._unread_weights:
            number = PER_RANK
        elif is_traced():
            number = value_of(_names.ORDERS, "order", order)
        else:
            with self._call:
                number = value_of(_names.ORDERS, "order", order)
                self._check_combine(handle, topk_weights, apply_weights, num_sms)
        biases = () if bias is None else tuple(bias) if isinstance(bias, (tuple, list)) else (bias,)
        carried = handle._carried if apply_weights and topk_weights is None else None
        gradient = needs_gradient(y, carried, *biases)
        if gradient or is_traced():
            from ._torch import autograd as _autograd

            return _autograd.combine(self, y, handle, topk_weights, apply_weights, number, biases, out, num_sms, gradient)
        result, summed = self._combine(y, handle, topk_weights, apply_weights, number, biases, out, num_sms)
        return result if summed is None else (result, summed)

    def _check_combine(self, handle: Any, topk_weights: Any, apply_weights: Any, num_sms: Any) -> None:
        """Checks the non-tensor arguments of combine and rejects weights that would be ignored."""
        _arguments.check("Exchange.combine", handle=handle, apply_weights=apply_weights, num_sms=num_sms)
        if topk_weights is not None:
            if self._layout != RANK_MAJOR and not apply_weights:
                invalid("topk_weights: apply_weights = False leaves them without effect; give one of the two")
        elif apply_weights and handle._unread_weights:
            invalid(_UNREAD)

    def _combine(self, y: Any, handle: Handle, topk_weights: Any = None, apply_weights: bool = True, order: int = 0,
                 biases: Sequence[Any] = (), out: Any = None, num_sms: int = 0) -> Tuple[Any, Any]:
        """Returns the summed rows, and the summed weights or None."""
        plain = topk_weights is None and apply_weights and not order and not biases and out is None and self._site is None
        if plain and self._combine_again is not None:
            out = self._combine_again(y, handle, num_sms)
            if out is not None:
                return out, None
        by_x, _, _, by_options, _ = self._by
        with self._call:
            exchange, tokens = self._here(), handle._tokens if handle._tokens is not None else handle.num_tokens
            code = code_of_rows(y, self.hidden, self._summed_types, self._backend)
            if code is None:
                taken, _ = self._take_rows(self._combined.y, y, self._summed_types)
                code, arrays, array, at, count = taken.code, taken.arrays, taken.array, taken.pointer, taken.shape[0]
            else:
                arrays, array, by_x, v, at, count = arrays_of_torch(), y, self._by_plain, self._plain, y.data_ptr(), y.shape[0]
                v.data, v.rows, v.dtype = at, count, code
                if plain:
                    self._combine_again = self._combine_again or _repeated.NormalCombine(self)
                    self._combine_again.learn(y)
            o, summed, to_summed, into = self._combine_options, None, 0, None
            if out is None:
                out = arrays.empty((tokens, self.hidden), code, array)
                result = arrays.pointer(out)
            else:
                into = self._combined.out(out, tokens, (code,))
                result = into.pointer
            if len(biases) > 2:
                invalid(f"bias: {len(biases)} arrays given, at most 2 are allowed")
            if biases or self._biased:
                added = [self._combined.bias(each, tokens, (code,)) for each in biases]
                for i in (0, 1):
                    o.bias[i] = added[i].pointer if i < len(added) else None
                self._biased = bool(biases)
                if into is not None:
                    check_apart("out", into, **{("bias", "second bias")[i]: each for i, each in enumerate(added)})
            o.order, o.apply_weights, o.num_sms, o.topk_weights = order, int(apply_weights), num_sms, None
            o.stream = arrays.stream(array)
            given = None
            if topk_weights is not None:
                given = self._take_weights(topk_weights, handle, tokens)
                o.topk_weights = given.pointer or result  # a rank without rows passes weights too
                if self._layout == RANK_MAJOR:
                    summed = arrays.empty((tokens, self.topk), F32, array)
                    to_summed = arrays.pointer(summed)
            if into is not None:
                size = _names.bytes_of(code, self.hidden)
                if result < at + count * size and at < result + tokens * size:
                    refuse_overlap("out", "y")
                if given is not None:
                    check_apart("out", into, topk_weights=given)
            check(self._functions.sy_exchange_combine(exchange, by_x, handle.pointer, result, by_options, to_summed))
            if into is not None:
                written(out)
            return out, summed

    def _take_weights(self, topk_weights: Any, handle: Handle, tokens: int) -> Taken:
        """Accepts combine weights, which are per row in rank-major layout, otherwise per token."""
        if self._layout != RANK_MAJOR:
            return self._combined.topk_weights(topk_weights, tokens)  # type: ignore[no-any-return]
        given: Taken = take(topk_weights, "topk_weights", ("R", self.topk), (F32,), self._backend)
        if given.shape[0] < (needed := handle._view.rows if handle._view is not None else handle.rows):
            invalid(f"topk_weights has {given.shape[0]} rows: the handle's dispatch delivered {needed}")
        return given

    # ---- Graph memory, statistics, lifetime ----

    def make_graph_memory(self) -> GraphMemory:
        """Local. Creates memory for graphs that are never in flight together. Initially, it takes nothing from the pool."""
        made = ctypes.c_void_p()
        with self.group._lock:
            check(self._functions.sy_exchange_make_graph_memory(self.pointer, byref(made)))
        return GraphMemory(Owned(made.value, self._functions.sy_graph_memory_destroy, self._owned, lock=self.group._lock))

    @named("Exchange.use_graph_memory")
    def use_graph_memory(self, memory: Optional[GraphMemory]) -> None:
        """Local. CUDA: graphs captured from now on share `memory` for their calls; its size is that of the largest graph. Rows
        that a graph delivers in library memory are valid until another graph is launched. None, the default: each graph has
        separate memory."""
        _arguments.check("Exchange.use_graph_memory", memory=memory)
        with self.group._lock:
            check(self._functions.sy_exchange_use_graph_memory(self.pointer, None if memory is None else memory._owned.pointer))

    @checked("Exchange.handle_from_bytes")
    def handle_from_bytes(self, content: bytes) -> Handle:
        """Restores a handle from bytes returned by ``Handle.to_bytes`` on the same rank."""
        handle = ctypes.c_void_p()
        check(self._functions.sy_handle_deserialize(content, len(content), byref(handle)))
        return Handle(handle.value or 0, self._layout, self._owned)

    @property
    def invalid_ids(self) -> int:
        """Number of ids in this rank's calls so far that are neither -1 nor a valid expert. CUDA: includes only calls that have
        run; does not wait for kernels."""
        return number_from(self._functions.sy_exchange_invalid_ids, self.pointer)

    def last_call(self) -> CallStatistics:
        """Returns the traffic and time of this rank's last call. CUDA: waits for that call."""
        s = structs.CallStatistics()
        check(self._functions.sy_exchange_last_call(self.pointer, byref(s)))
        return statistics_of(s)

    @named("Exchange.load")
    def load(self, selector: Optional[SlotSelector] = None) -> RouteLoad:
        """Collective. Requires ``count_routes=True``. :meth:`RouteCounter.load` for the dispatches of this exchange."""
        if self._counter is None:
            invalid("load: the exchange counts no routes; create it with count_routes=True")
        return self._counter.load(selector)

    def close(self) -> None:
        """Local. Releases the exchange; its memory is freed once its rows are dropped. May be called twice."""
        if self._counter is not None:
            self._counter.close()
        if self._for_weights is not None:
            self._for_weights.close()
        self._owned.close()

    def __enter__(self) -> "Exchange":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<switchyard.Exchange {self.layout}, hidden {self.hidden}, {self.num_experts} experts, topk {self.topk}, {self.group!r}>"
