# SPDX-License-Identifier: Apache-2.0
"""Normal-mode dispatch and combine as torch operators, the graph nodes for torch.compile and for gradients.

Objects are passed by number (registry.py). A plan, an int64 [1] tensor in host memory, represents the routing of one dispatch.
It contains the number of a cell that the dispatch fills. Its memory keeps the cell, and thus the routing, alive as long as a
tensor refers to it. A dispatch whose cell is full is a cached dispatch; selective checkpointing that saves plans therefore does
not repeat the counting.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, List, Optional, Tuple

import numpy as np
import torch
from torch import Tensor

from .._abi.arrays import I32, I64, U8, _Memory
from .._abi.names import BF16, F16, F32, FP8, PER_ROUTE, RANK_MAJOR, invalid
from ..handle import Handle
from .registry import number_of, object_of

if TYPE_CHECKING:
    from ..exchange import Exchange

_library = torch.library.Library("switchyard", "FRAGMENT")
_tags = tuple(getattr(torch.Tag, name) for name in ("pt2_compliant_tag", "needs_fixed_stride_order", "cudagraph_unsafe")
              if hasattr(torch.Tag, name))
DTYPES = {BF16: torch.bfloat16, F16: torch.float16, F32: torch.float32, I32: torch.int32, I64: torch.int64, U8: torch.uint8}
if hasattr(torch, "float8_e4m3fn"):
    DTYPES[FP8] = torch.float8_e4m3fn


def operator(schema: str, kernel: Any, fake: Any) -> None:
    """Defines switchyard::`schema`."""
    name = schema[:schema.index("(")]
    _library.define(schema, tags=_tags)
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"switchyard::{name}", fake, lib=_library)


def differentiable(name: str, setup: Any, backward: Any) -> None:
    """Registers the backward pass of switchyard::`name`."""
    torch.library.register_autograd(f"switchyard::{name}", backward, setup_context=setup, lib=_library)


# ---- Plans ----


class Cell:
    """Holds the routing of a dispatch."""

    __slots__ = ("handle", "number", "__weakref__")

    def __init__(self, handle: Optional[Handle] = None) -> None:
        self.handle = handle
        self.number = number_of(self)

    @property
    def filled(self) -> Handle:
        if self.handle is None:
            invalid("the plan has not been dispatched with")
        return self.handle


def tensor_of(thing: Any, number: int) -> Tensor:
    """Returns an int64 [1] tensor containing `number`; its memory keeps `thing` alive."""
    memory = np.array([number], np.int64)
    return torch.from_numpy(np.asarray(_Memory(memory.ctypes.data, (1,), I64, (memory, thing), False)))


def _cell(plan: Tensor) -> Cell:
    cell = object_of(int(plan))
    if not isinstance(cell, Cell):
        invalid("this tensor is not the plan of a dispatch")
    return cell


def handle_of(plan: Tensor) -> Handle:
    """Returns the routing that a plan represents."""
    return _cell(plan).filled


def _plan(topk_ids: Tensor, topk_weights: Optional[Tensor], exchange: int, options: List[int]) -> Tensor:
    """Returns the plan of an empty cell. The arguments determine which dispatches may share it, because compilers merge
    identical calls."""
    cell = Cell()
    return tensor_of(cell, cell.number)


def _plan_of_handle(handle: int) -> Tensor:
    cell = Cell(object_of(handle).twin())
    return tensor_of(cell, cell.number)


def _fake_plan(*_: Any) -> Tensor:
    return torch.empty((1,), dtype=torch.int64, device="cpu")


operator("plan(Tensor topk_ids, Tensor? topk_weights, SymInt exchange, int[] options) -> Tensor", _plan, _fake_plan)
operator("plan_of_handle(SymInt handle) -> Tensor", _plan_of_handle, _fake_plan)


def _table(plan: Tensor, like: Tensor, name: str, element: int, shape: List[int]) -> Tensor:
    """Returns a copy, because a compiler may overwrite graph tensors after their last use in the graph."""
    return getattr(handle_of(plan), name).clone()


def _fake_table(plan: Tensor, like: Tensor, name: str, element: int, shape: List[int]) -> Tensor:
    return like.new_empty(shape, dtype=DTYPES[element])


operator("table(Tensor plan, Tensor like, str name, int element, SymInt[] shape) -> Tensor", _table, _fake_table)


# ---- Dispatch ----


def scale_columns(hidden: int, kind: int) -> Tuple[int, int]:
    """Returns the number of scales per row and the distance in elements between rows of scales."""
    groups, unit = -(-hidden // 128), 4 if kind == 1 else 16
    return groups, -(-groups // unit) * unit


def _received_weights(handle: Handle, rows: Tensor, topk: int) -> Tensor:
    """Returns a copy of the rows' weights, or zeros if no weights were sent because no rank had tokens."""
    rank_major = handle._layout == RANK_MAJOR
    topk_weights = handle.topk_weights if rank_major else handle.row_weights
    if topk_weights is None:
        return rows.new_zeros((rows.shape[0], topk) if rank_major else (rows.shape[0],), dtype=torch.float32)
    return topk_weights.clone()


def dispatch(x: Tensor, scales: Optional[Tensor], topk_ids: Optional[Tensor], topk_weights: Optional[Tensor], cell: Cell, exchange: int,
             layout: int, options: List[int], rows: int, exact: bool, copy: bool) -> Tuple[Tensor, Optional[Tensor], Optional[Tensor], Cell]:
    """Returns the rows, their scales, the delivered weights, and the filled cell."""
    owner, given = object_of(exchange), x if scales is None else (x, scales)
    # With `copy`, only the delivered rows are copied. The other rows must be finite, because callers multiply them by 0.
    out = x.new_zeros((rows, x.shape[1])) if copy and not exact else None
    if cell.handle is None:
        result, result_scales, cell.handle = owner._dispatch(given, topk_ids, topk_weights, None, tuple(options), out)
    else:
        result, result_scales, _ = owner._dispatch(given, None, None, cell.handle, tuple(options), out)
    assert cell.handle is not None
    received = None if topk_weights is None else _received_weights(cell.handle, result, topk_weights.shape[1])
    return result.clone() if copy and out is None else result, result_scales, received, cell


def _or_nothing(tensor: Optional[Tensor], like: Tensor) -> Tensor:
    """Replaces None with an empty tensor, because operators cannot have optional results."""
    return like.new_empty((0,), dtype=torch.float32) if tensor is None else tensor


def _dispatch(x: Tensor, scales: Optional[Tensor], topk_ids: Optional[Tensor], topk_weights: Optional[Tensor], plan: Tensor, *rest: Any) \
        -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, result_scales, received, cell = dispatch(x, scales, topk_ids, topk_weights, _cell(plan), *rest)
    return rows, _or_nothing(result_scales, x), _or_nothing(received, x), tensor_of(cell, cell.number)


def _fake_dispatch(x: Tensor, scales: Optional[Tensor], topk_ids: Optional[Tensor], topk_weights: Optional[Tensor], plan: Tensor, exchange: int,
                   layout: int, options: List[int], rows: int, exact: bool, copy: bool) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    count = torch.library.get_ctx().new_dynamic_size() if exact else rows
    quantized, hidden = options[0], x.shape[1]
    result = x.new_empty((count, hidden), dtype=DTYPES[FP8] if quantized else x.dtype)
    kind = quantized or (0 if scales is None else 1 if scales.dtype == torch.float32 else 2)
    result_scales = x.new_empty((0,), dtype=torch.float32)
    if kind:
        groups, stride = scale_columns(hidden, kind)
        result_scales = torch.empty_strided((count, groups), (stride, 1), dtype=torch.float32 if kind == 1 else torch.uint8,
                                            device=x.device)
    received = x.new_empty((0,), dtype=torch.float32)
    if topk_weights is not None:
        received = topk_weights.new_empty((count, topk_weights.shape[1]) if layout == RANK_MAJOR else (count,))
    return result, result_scales, received, _fake_plan()


operator("dispatch(Tensor x, Tensor? scales, Tensor? topk_ids, Tensor? topk_weights, Tensor plan, SymInt exchange, int layout, int[] options, "
         "SymInt rows, bool exact, bool copy) -> (Tensor, Tensor, Tensor, Tensor)", _dispatch, _fake_dispatch)


def _owners_weights(exchange: "Exchange", handle: Handle, grads: Tensor) -> Tensor:
    """Returns the weight gradients float32 [T, K], given those of the rows' weights, [R]."""
    small = exchange._for_weights
    assert small is not None, "dispatch() has looked"
    source = handle.row_source
    valid = source >= 0
    k = torch.where(valid, (source >> 32) & 0xFFFF, 0)
    rows = torch.zeros((source.shape[0], small.hidden), dtype=torch.float32, device=source.device)
    rows.scatter_(1, k[:, None], torch.where(valid, grads, 0.0)[:, None])
    summed, _ = small._combine(rows, handle, None, False, PER_ROUTE)
    return summed[:, :exchange.topk].contiguous()


def dispatch_backward(grad_rows: Tensor, grad_received: Optional[Tensor], cell: Cell, exchange: int, *_: int) \
        -> Tuple[Tensor, Optional[Tensor]]:
    """Returns the gradients of x and of the weights."""
    owner, handle = object_of(exchange), cell.filled
    if handle._layout == RANK_MAJOR:
        if grad_received is not None:  # entries without a route to this rank were delivered as the constant 0
            grad_received = torch.where(handle.topk_ids >= 0, grad_received, 0.0)
        return owner._combine(grad_rows.contiguous(), handle, grad_received)
    grad_x, _ = owner._combine(grad_rows.contiguous(), handle, None, False, PER_ROUTE)
    return grad_x, None if grad_received is None else _owners_weights(owner, handle, grad_received)


def _dispatch_backward(grad_rows: Tensor, grad_received: Optional[Tensor], plan: Tensor, *rest: int) -> Tuple[Tensor, Tensor]:
    grad_x, grad_weights = dispatch_backward(grad_rows, grad_received, _cell(plan), *rest)
    return grad_x, _or_nothing(grad_weights, grad_rows)


def _fake_dispatch_backward(grad_rows: Tensor, grad_received: Optional[Tensor], plan: Tensor, exchange: int, tokens: int, topk: int) \
        -> Tuple[Tensor, Tensor]:
    grad_weights = (0,) if grad_received is None else (tokens, topk)
    return grad_rows.new_empty((tokens, grad_rows.shape[1])), grad_rows.new_empty(grad_weights, dtype=torch.float32)


operator("dispatch_backward(Tensor grad_rows, Tensor? grad_received, Tensor plan, SymInt exchange, SymInt tokens, int topk) "
         "-> (Tensor, Tensor)", _dispatch_backward, _fake_dispatch_backward)


# ---- Combine ----


def combine(y: Tensor, carried: Optional[Tensor], cell: Cell, topk_weights: Optional[Tensor], bias: Optional[Tensor],
            second_bias: Optional[Tensor], exchange: int, tokens: int, topk: int, order: int, apply_weights: bool, num_sms: int) \
        -> Tuple[Tensor, Optional[Tensor]]:
    """Returns the summed rows and the summed weights."""
    biases = [each for each in (bias, second_bias) if each is not None]
    return object_of(exchange)._combine(y, cell.filled, topk_weights, apply_weights, order, biases, None, num_sms)


def _combine(y: Tensor, carried: Optional[Tensor], plan: Tensor, *rest: Any) -> Tuple[Tensor, Tensor]:
    out, summed = combine(y, carried, _cell(plan), *rest)
    return out, _or_nothing(summed, y)


def _fake_combine(y: Tensor, carried: Optional[Tensor], plan: Tensor, topk_weights: Optional[Tensor], bias: Optional[Tensor],
                  second_bias: Optional[Tensor], exchange: int, tokens: int, topk: int, order: int, apply_weights: bool,
                  num_sms: int) -> Tuple[Tensor, Tensor]:
    return y.new_empty((tokens, y.shape[1])), y.new_empty((tokens, topk) if topk else (0,), dtype=torch.float32)


operator("combine(Tensor y, Tensor? carried, Tensor plan, Tensor? topk_weights, Tensor? bias, Tensor? second_bias, SymInt exchange, "
         "SymInt tokens, int topk, int order, bool apply_weights, int num_sms) -> (Tensor, Tensor)", _combine, _fake_combine)


def _is_row(handle: Handle) -> Optional[Tensor]:
    """Returns bool [R], False for padding and for rows after the delivered ones, or None if all rows are valid."""
    view = handle._view
    assert view is not None, "combine() has looked"
    if handle._layout == RANK_MAJOR:
        return None if view.rows == view.x_rows else handle.source_token >= 0
    return handle.row_source >= 0


def _fitted(rows: Tensor, count: int) -> Tensor:
    """Returns the first `count` rows, padded with zero rows if there are fewer."""
    if rows.shape[0] >= count:
        return rows[:count]
    return torch.cat([rows, rows.new_zeros((count - rows.shape[0], *rows.shape[1:]))])


def combine_backward(grad_out: Tensor, y: Optional[Tensor], carried: Optional[Tensor], cell: Cell, exchange: int, rows: int) \
        -> Tuple[Tensor, Optional[Tensor]]:
    """Returns the gradients of y and of the rows' weights; `y` is given only if the weight gradients are needed."""
    handle = cell.filled
    received, _, _ = object_of(exchange)._dispatch(grad_out.contiguous(), None, None, handle)
    valid, grad_carried = _is_row(handle), None
    if y is not None:
        dots = (received.float() * _fitted(y, received.shape[0]).float()).sum(-1)
        grad_carried = dots if valid is None else torch.where(valid, dots, 0.0)
    grad_y = received.clone() if carried is None else (received.float() * carried[:, None]).to(received.dtype)
    if valid is not None:
        grad_y = torch.where(valid[:, None], grad_y, torch.zeros((), dtype=received.dtype, device=received.device))
    return _fitted(grad_y, rows), grad_carried


def _combine_backward(grad_out: Tensor, y: Optional[Tensor], carried: Optional[Tensor], plan: Tensor, *rest: int) \
        -> Tuple[Tensor, Tensor]:
    grad_y, grad_carried = combine_backward(grad_out, y, carried, _cell(plan), *rest)
    return grad_y, _or_nothing(grad_carried, grad_out)


def _fake_combine_backward(grad_out: Tensor, y: Optional[Tensor], carried: Optional[Tensor], plan: Tensor, exchange: int, rows: int) \
        -> Tuple[Tensor, Tensor]:
    count = (0,) if y is None or carried is None else tuple(carried.shape)
    return grad_out.new_empty((rows, grad_out.shape[1])), grad_out.new_empty(count, dtype=torch.float32)


operator("combine_backward(Tensor grad_out, Tensor? y, Tensor? carried, Tensor plan, SymInt exchange, SymInt rows) -> (Tensor, Tensor)",
         _combine_backward, _fake_combine_backward)
