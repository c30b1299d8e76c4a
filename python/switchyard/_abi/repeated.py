# SPDX-License-Identifier: Apache-2.0
"""Repeated calls: the fastest path to the library, for torch tensors.

A fully checked call records the properties of its tensors (``learn``). A later call can skip these checks if its tensors have
the same types and shapes, are on the same kind of device and are dense, because only the addresses in its structs change. These
objects decline all other calls without side effects; the caller then uses the full path, which reports errors.

On GPUs, the library queries the driver for the location of the addresses in the first such call. To save time, later calls with
tensors on the same GPU set ``known_memory``, because torch tracks their location.

Library functions are called without argument types (:func:`.ffi.bare`), so addresses are passed in ctypes objects that are
created once and refilled. As in every call, the group lock is held.
"""
from __future__ import annotations

import ctypes
from ctypes import byref, c_void_p
from functools import partial
from typing import Any, Optional

from .arrays import I32, I64, arrays_of_torch
from .ffi import alive_here, bare, check, structs
from .names import CUDA, F32, ORDERS, bytes_of


def _apart(first: int, first_bytes: int, second: int, second_bytes: int) -> bool:
    """Returns whether two ranges of addresses share no byte."""
    return first + first_bytes <= second or second + second_bytes <= first


class _Repeated:
    """Common base: the library object and torch functions."""

    def __init__(self, exchange: Any, function: str) -> None:
        self._function = bare(function)
        self._owned = exchange._owned
        self._at = c_void_p(exchange.pointer)
        self._lock = exchange.group._lock
        self._acquire = self._lock.acquire
        self._release, self._later = self._lock.release_only, self._lock.later
        self._cuda = exchange._backend == CUDA
        self._hidden: int = exchange.hidden
        self._x = structs.RowView(cols=exchange.hidden)
        self._by_x = byref(self._x)
        self._type: Any = None  # type of rows; None: nothing was learned
        self._device = -1  # the GPU on which the library has located the memory of such a call
        torch = arrays_of_torch()
        self._Tensor, self._raw_stream, self._rows = torch.Tensor, torch.raw_stream, torch.rows
        self._wrote = torch.increment_version
        self._f32 = torch.dtypes[F32]

    def _place(self, options: Any, rows: Any, other: Any, stream: Optional[int]) -> bool:
        """CUDA: sets the options that depend on the tensors' location; returns False if they are not on a GPU."""
        if not (rows.is_cuda and (other is None or other.is_cuda)):
            return False
        device = rows.get_device()
        options.known_memory = device == self._device and (other is None or other.get_device() == device)
        options.stream = self._raw_stream(device) if stream is None else stream
        return True

    def _done(self, rows: Any) -> None:
        """Runs after a successful call."""
        if self._device < 0 and self._cuda and self._x.data:
            self._device = rows.get_device()


class _Weighted(_Repeated):
    """Low-latency calls, whose options may refer to weights."""

    _options: Any
    _weighted = False

    def _take_weights(self, topk_weights: Any, shape: Any) -> bool:
        """Sets float32 weights of this shape, or none; returns False if `topk_weights` is anything else."""
        if topk_weights is None:
            self._options.topk_weights, self._weighted = None, False
            return True
        if type(topk_weights) is not self._Tensor or topk_weights.dtype is not self._f32 or topk_weights.shape != shape \
                or not topk_weights.is_contiguous() or not (topk_weights.is_cuda if self._cuda else topk_weights.is_cpu):
            return False
        self._options.topk_weights, self._weighted = topk_weights.data_ptr(), True
        return True


class Dispatch(_Weighted):
    """A low-latency dispatch of rows without scales."""

    def __init__(self, exchange: Any) -> None:
        super().__init__(exchange, "sy_low_latency_dispatch")
        self._ids = structs.ExpertIds(topk=exchange.topk)
        self._options = structs.LowLatencyDispatchOptions()
        self._by_ids, self._by_options = byref(self._ids), byref(self._options)
        self._shape: Any = None
        self._ids_type: Any = None
        self._ids_shape: Any = None

    def learn(self, x: Any, topk_ids: Any) -> None:
        """Records the properties of a successful call. The lock must be held."""
        if type(x) is not self._Tensor or type(topk_ids) is not self._Tensor:
            return
        codes = arrays_of_torch().codes
        self._type, self._shape, self._ids_type, self._ids_shape = x.dtype, x.shape, topk_ids.dtype, topk_ids.shape
        self._x.rows = self._ids.num_tokens = x.shape[0]
        self._x.dtype, self._ids.is_int64 = codes[x.dtype], int(codes[topk_ids.dtype] == I64)

    def __call__(self, x: Any, topk_ids: Any, topk_weights: Any, output: Any, stream: Optional[int] = None, selector: Any = None) -> bool:
        """Returns False if not applicable. If `stream` is None, uses the current stream of x's GPU. selector: a SlotSelector or None."""
        tensor = self._Tensor
        if type(x) is not tensor or type(topk_ids) is not tensor or output._at is None:
            return False
        self._acquire()
        try:
            if x.dtype is not self._type or x.shape != self._shape or topk_ids.dtype is not self._ids_type or topk_ids.shape != self._ids_shape:
                return False
            if x.requires_grad or (topk_weights is not None and topk_weights.requires_grad):
                return False
            if not (x.is_contiguous() and topk_ids.is_contiguous() and self._owned.pointer):
                return False
            if self._cuda:
                if not self._place(self._options, x, topk_ids, stream):
                    return False
            elif not (x.is_cpu and topk_ids.is_cpu):
                return False
            if topk_weights is not None or self._weighted:
                if not self._take_weights(topk_weights, self._ids_shape):
                    return False
                if topk_weights is not None and topk_weights.get_device() != x.get_device():
                    self._options.known_memory = 0
            chosen = None if selector is None else alive_here(selector._owned)
            if selector is not None and chosen is None:
                return False
            self._x.data, self._ids.data, self._options.selector = x.data_ptr(), topk_ids.data_ptr(), chosen
            check(self._function(self._at, self._by_x, self._by_ids, output._at, self._by_options))
            output.num_tokens = self._x.rows
            self._wrote((output.x,))
            self._done(x)
            return True
        finally:
            self._release()
            if self._later:
                self._lock.give_back()


class Combine(_Weighted):
    """A low-latency combine into a new tensor or the caller's tensor, per route, or per rank without `topk_weights`."""

    def __init__(self, exchange: Any) -> None:
        super().__init__(exchange, "sy_low_latency_combine")
        self._options = structs.LowLatencyCombineOptions()
        self._by_options = byref(self._options)
        self._topk: int = exchange.topk
        self._shape: Any = None
        self._result = c_void_p()
        self._row_bytes = self._bytes = 0
        self._order = "per_route"  # of the options

    def learn(self, y: Any) -> None:
        """Records the properties of a successful call. The lock must be held."""
        if type(y) is self._Tensor:
            self._type, self._shape = y.dtype, y.shape
            self._x.rows, self._x.dtype = y.shape[0] * y.shape[1], arrays_of_torch().codes[y.dtype]
            self._row_bytes = bytes_of(self._x.dtype, self._hidden)
            self._bytes = self._x.rows * self._row_bytes

    def _takes(self, out: Any, y: Any, tokens: int, topk_weights: Any) -> bool:
        """Returns whether the call can write its sums to `out`. If not, for example because `out` shares memory with an input, the
        full path applies."""
        if type(out) is not self._Tensor or out.dtype is not self._type or out.shape != (tokens, self._hidden) or out.requires_grad \
                or not out.is_contiguous() or not (out.get_device() == y.get_device() if self._cuda else out.is_cpu):
            return False
        to, size = out.data_ptr(), tokens * self._row_bytes
        return _apart(to, size, y.data_ptr(), self._bytes) \
            and (topk_weights is None or _apart(to, size, topk_weights.data_ptr(), 4 * tokens * self._topk))

    def __call__(self, y: Any, received: Any, topk_weights: Any, stream: Optional[int] = None, out: Any = None,
                 order: str = "per_route") -> Any:
        """Returns the sums, or None if not applicable. order: "per_route" or "per_rank"."""
        if type(y) is not self._Tensor or received._at is None or y.requires_grad or (topk_weights is not None and topk_weights.requires_grad):
            return None
        self._acquire()
        try:
            if y.dtype is not self._type or y.shape != self._shape or not y.is_contiguous() or not self._owned.pointer:
                return None
            if topk_weights is not None or self._weighted:
                if not self._take_weights(topk_weights, (received.num_tokens, self._topk)):
                    return None
            if order != self._order:
                self._options.order, self._order = ORDERS[order], order
            if self._cuda:
                if not self._place(self._options, y, topk_weights, stream):
                    return None
            elif not y.is_cpu:
                return None
            sums = out
            if out is None:
                sums = self._rows(received.num_tokens, self._hidden, y)
            elif not self._takes(out, y, received.num_tokens, topk_weights):
                return None
            self._x.data, self._result.value = y.data_ptr(), sums.data_ptr()
            check(self._function(self._at, self._by_x, received._at, self._result, self._by_options))
            self._done(y)
            if out is not None:
                self._wrote((out,))
            return sums
        finally:
            self._release()
            if self._later:
                self._lock.give_back()


class Layer(_Repeated):
    """A forward pass of a layer into a new tensor or the caller's tensor, with any number of tokens."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer, "sy_moe_layer_forward")
        torch, code = arrays_of_torch(), layer._row_type
        self._type, self._topk = torch.dtypes[code], layer.topk
        self._wide = {torch.dtypes[I32]: 0, torch.dtypes[I64]: 1}
        self._row_bytes, self._records = bytes_of(code, self._hidden), torch.records
        self._ids, self._options = structs.ExpertIds(topk=self._topk), structs.MoeLayerCall()
        self._by_ids, self._by_options = byref(self._ids), byref(self._options)
        self._from, self._weights, self._result = c_void_p(), c_void_p(), c_void_p()
        self._shape: Any = None  # of the last call's x; the following are of the same call
        self._routes: Any = None
        self._ids_type: Any = None
        self._bytes = self._ids_bytes = self._weights_bytes = 0

    def _sized(self, shape: Any, ids_type: Any) -> bool:
        """Prepares for tokens of this shape and ids of this type; returns False if no call has them."""
        wide = self._wide.get(ids_type)
        if wide is None or len(shape) != 2 or shape[1] != self._hidden:
            return False
        self._shape, tokens = None, shape[0]  # an exception such as KeyboardInterrupt leaves no mixture of two calls
        places = tokens * self._topk
        self._ids.num_tokens, self._ids.is_int64, self._routes, self._ids_type = tokens, wide, (tokens, self._topk), ids_type
        self._bytes, self._ids_bytes, self._weights_bytes = tokens * self._row_bytes, (8 if wide else 4) * places, 4 * places
        self._shape = shape
        return True

    def __call__(self, x: Any, topk_ids: Any, topk_weights: Any, out: Any, selector: Any = None) -> Any:
        """Returns the tensor, or None if not applicable. Uses the current stream of x's GPU. selector: a SlotSelector or None."""
        tensor, cuda = self._Tensor, self._cuda
        if type(x) is not tensor or type(topk_ids) is not tensor:
            return None
        self._acquire()
        try:
            shape, ids_type = x.shape, topk_ids.dtype
            if (shape != self._shape or ids_type is not self._ids_type) and not self._sized(shape, ids_type):
                return None
            routes, rows, device = self._routes, self._type, x.get_device()
            if x.dtype is not rows or topk_ids.shape != routes or not self._owned.pointer or not x.is_contiguous() \
                    or not topk_ids.is_contiguous() or not (x.is_cuda and topk_ids.is_cuda and topk_ids.get_device() == device
                                                            if cuda else x.is_cpu and topk_ids.is_cpu):
                return None
            at, ids, scale, chosen = x.data_ptr(), topk_ids.data_ptr(), None, None
            if topk_weights is not None:
                if type(topk_weights) is not tensor or topk_weights.dtype is not self._f32 or topk_weights.shape != routes \
                        or not topk_weights.is_contiguous() \
                        or not (topk_weights.is_cuda and topk_weights.get_device() == device if cuda else topk_weights.is_cpu):
                    return None
                scale = topk_weights.data_ptr()
            if selector is not None:
                chosen = alive_here(selector._owned)
                if chosen is None:
                    return None
            if out is None:
                result = self._rows(shape[0], self._hidden, x)
                to = result.data_ptr()
            else:
                if type(out) is not tensor or out.dtype is not rows or out.shape != shape or not out.is_contiguous() \
                        or not (out.is_cuda and out.get_device() == device if cuda else out.is_cpu):
                    return None
                result, to, size = out, out.data_ptr(), self._bytes
                end = to + size
                if to < at + size and at < end or to < ids + self._ids_bytes and ids < end \
                        or scale is not None and to < scale + self._weights_bytes and scale < end:
                    return None  # they share memory
            if self._records() and (x.requires_grad or (scale is not None and topk_weights.requires_grad)
                                    or (out is not None and out.requires_grad)):
                return None
            options = self._options
            if cuda:
                options.known_memory, options.stream = device == self._device, self._raw_stream(device)
            self._ids.data, options.selector = ids, chosen
            self._from.value, self._weights.value, self._result.value = at, scale, to
            code = self._function(self._at, self._from, self._by_ids, self._weights, self._result, self._by_options)
            if code:
                check(code)
            if out is not None:
                self._wrote((out,))
            if cuda and self._device < 0 and at:
                self._device = device
            return result
        finally:
            self._release()
            if self._later:
                self._lock.give_back()


class _Normal(_Repeated):
    """Normal-mode calls with any number of rows without scales."""

    def learn(self, x: Any) -> None:
        """Records the properties of a successful call. The lock must be held."""
        if type(x) is self._Tensor:
            self._type, self._x.dtype = x.dtype, arrays_of_torch().codes[x.dtype]

    def _take(self, x: Any, options: Any, num_sms: int, stream: Optional[int]) -> bool:
        """Fills the view of `x`. The lock must be held."""
        shape = x.shape
        if x.dtype is not self._type or len(shape) != 2 or shape[1] != self._hidden or not x.is_contiguous() or not self._owned.pointer:
            return False
        if self._cuda:
            if not self._place(options, x, None, stream):
                return False
        elif not x.is_cpu:
            return False
        self._x.data, self._x.rows, options.num_sms = x.data_ptr(), shape[0], num_sms
        return True


class NormalCombine(_Normal):
    """A combine per rank, without bias or weights, into a new tensor."""

    def __init__(self, exchange: Any) -> None:
        super().__init__(exchange, "sy_exchange_combine")
        self._options = structs.CombineOptions(apply_weights=1)
        self._by_options = byref(self._options)
        self._result, self._nothing = c_void_p(), c_void_p()

    def __call__(self, y: Any, handle: Any, num_sms: int, stream: Optional[int] = None) -> Any:
        """Returns the sums, or None if not applicable."""
        if type(y) is not self._Tensor or handle._at is None or handle._tokens is None:
            return None
        self._acquire()
        try:
            if not self._take(y, self._options, num_sms, stream):
                return None
            out = self._rows(handle._tokens, self._hidden, y)
            self._result.value = out.data_ptr()
            check(self._function(self._at, self._by_x, handle._at, self._result, self._by_options, self._nothing))
            self._done(y)
            return out
        finally:
            self._release()
            if self._later:
                self._lock.give_back()


class NormalDispatch(_Normal):
    """A dispatch with a handle into a new tensor or the caller's tensor, without other results."""

    def __init__(self, exchange: Any) -> None:
        super().__init__(exchange, "sy_exchange_dispatch_cached")
        self._to = structs.RowView(cols=exchange.hidden)
        self._options = structs.DispatchOptions(out=ctypes.addressof(self._to), size=0)
        self._by_options = byref(self._options)
        self._nothing = c_void_p()
        self._row_bytes = 0
        memory = getattr(exchange, "row_memory", None)
        self._fresh = self._rows if memory is None else partial(memory.use().rows, self._rows)

    def learn(self, x: Any) -> None:
        super().learn(x)
        self._to.dtype = self._x.dtype
        self._row_bytes = bytes_of(self._x.dtype, self._hidden)

    def _fits(self, out: Any, x: Any, number: int) -> bool:
        """Returns whether `out` can hold `number` rows like those of `x`."""
        shape = out.shape
        return (out.dtype is x.dtype and len(shape) == 2 and shape[0] >= number and shape[1] == self._hidden and out.is_contiguous()
                and (out.get_device() == x.get_device() if self._cuda else out.is_cpu))

    def __call__(self, x: Any, handle: Any, num_sms: int, stream: Optional[int] = None, out: Any = None) -> Any:
        """Returns the rows (the first rows of `out`, if given), or None if not applicable."""
        if type(x) is not self._Tensor or handle._at is None:
            return None
        self._acquire()
        try:
            if not self._take(x, self._options, num_sms, stream) or self._x.rows != handle._tokens:
                return None
            number = handle._rows_allocated
            if out is None:
                rows = self._fresh(number, self._hidden, x)
            elif type(out) is self._Tensor and self._fits(out, x, number):
                rows = out if out.shape[0] == number else out[:number]
            else:
                return None
            to = rows.data_ptr()
            if out is not None:
                at = self._x.data or 0
                if at - number * self._row_bytes < to < at + handle._tokens * self._row_bytes:
                    return None  # they share memory
            self._to.data, self._to.rows = to, number
            check(self._function(self._at, self._by_x, handle._at, self._by_options, self._nothing))
            self._done(x)
            if out is not None:
                self._wrote((rows,))
            return rows
        finally:
            self._release()
            if self._later:
                self._lock.give_back()
