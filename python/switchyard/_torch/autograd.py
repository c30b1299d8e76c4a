# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine of torch tensors that require gradients or are traced by torch.compile, using the operators in ops.py.

The backward pass of a dispatch is a combine, and vice versa. It uses the handle of the forward pass, so counts are not computed
again.

    rank-major    rows[r] = x[token of r]              grad_x[t] = sum of grad_rows over the ranks of t
                  out[t]  = sum of y over ranks        grad_y[r] = grad_out[token of r]
    expert-major  rows[r] = x[token of r]              grad_x[t] = sum of grad_rows over the routes of t
                  out[t]  = sum of w[r] y[r]           grad_y[r] = w[r] grad_out[token of r],  grad_w[r] = dot(grad_out[...], y[r])

Weight gradients are returned to the owner of the weights. In rank-major layout, they are sent with the rows. In expert-major
layout, they are sent through a small exchange: the row of route (t, k) has the gradient in column k and zeros elsewhere, so
summing over routes yields row t.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional, Sequence, Tuple, Union

import torch
from torch.autograd.function import once_differentiable

from .._abi.names import EXPERT_MAJOR, RANK_MAJOR, invalid
from ..errors import Unsupported
from ..handle import Handle
from . import ops as _ops
from .registry import object_of

if TYPE_CHECKING:
    from ..exchange import Exchange

_operators = torch.ops.switchyard


# ---- Gradients ----


def _keep(ctx: Any, plan: Any, *tensors: Any) -> None:
    """Saves tensors for the backward pass. Outside graphs, a cell replaces the plan."""
    ctx.cell = plan if isinstance(plan, _ops.Cell) else None
    ctx.save_for_backward(*tensors, None if ctx.cell is plan else plan)


def _dispatch_setup(ctx: Any, inputs: Tuple[Any, ...], output: Tuple[Any, ...]) -> None:
    x, _, _, topk_weights, _, exchange = inputs[:6]
    ctx.exchange, ctx.tokens, ctx.topk = exchange, x.shape[0], 0 if topk_weights is None else topk_weights.shape[1]
    fixed = (output[1], output[3]) if topk_weights is not None else output[1:]
    ctx.mark_non_differentiable(*(each for each in fixed if isinstance(each, torch.Tensor)))
    _keep(ctx, output[3])


def _dispatch_backward(call: Any) -> Any:
    """Returns the backward pass of a dispatch. `call`: an operator in graphs, otherwise the operator's function."""

    @once_differentiable
    def backward(ctx: Any, grad_rows: Any, _: Any, grad_received: Any, __: Any) -> Tuple[Any, ...]:
        plan = ctx.cell or ctx.saved_tensors[0]
        needs, wants_weights = ctx.needs_input_grad, ctx.needs_input_grad[3]
        grad_x, grad_weights = call(grad_rows, grad_received if wants_weights else None, plan, ctx.exchange, ctx.tokens, ctx.topk)
        return (grad_x if needs[0] else None, None, None, grad_weights if wants_weights else None, *[None] * 7)

    return backward


def _combine_setup(ctx: Any, inputs: Tuple[Any, ...], output: Tuple[Any, ...]) -> None:
    y, carried, plan, _, _, _, exchange = inputs[:7]
    ctx.exchange, ctx.rows = exchange, y.shape[0]
    if output[1] is not None:
        ctx.mark_non_differentiable(output[1])
    _keep(ctx, plan, y if ctx.needs_input_grad[1] else None, carried)


def _combine_backward(call: Any) -> Any:
    """Returns the backward pass of a combine; `call` is as in :func:`_dispatch_backward`."""

    @once_differentiable
    def backward(ctx: Any, grad_out: Any, _: Any) -> Tuple[Any, ...]:
        y, carried, plan = ctx.saved_tensors
        plan = ctx.cell or plan
        needs, grad_y, grad_carried = ctx.needs_input_grad, None, None
        if needs[0] or needs[1]:
            grad_y, grad_carried = call(grad_out, y, carried, plan, ctx.exchange, ctx.rows)
        return (grad_y if needs[0] else None, grad_carried if needs[1] else None, None, None, grad_out if needs[4] else None,
                grad_out if needs[5] else None, *[None] * 6)

    return backward


_ops.differentiable("dispatch", _dispatch_setup, _dispatch_backward(_operators.dispatch_backward))
_ops.differentiable("combine", _combine_setup, _combine_backward(_operators.combine_backward))


class _Dispatch(torch.autograd.Function):
    """The operator's counterpart outside graphs, at a third of its cost. A separate setup_context would double that cost."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tuple[Any, ...]:
        output = _ops.dispatch(*given)
        _dispatch_setup(ctx, given, output)
        return output

    backward = staticmethod(_dispatch_backward(_ops.dispatch_backward))


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tuple[Any, ...]:
        output = _ops.combine(*given)
        _combine_setup(ctx, given, output)
        return output

    backward = staticmethod(_combine_backward(_ops.combine_backward))


class _Eager:
    """Counterpart of `_operators` for unobserved calls, with cells instead of plans."""

    @staticmethod
    def plan(*_: Any) -> _ops.Cell:
        return _ops.Cell()

    @staticmethod
    def plan_of_handle(handle: int) -> _ops.Cell:
        return _ops.Cell(object_of(handle).twin())

    dispatch = _Dispatch.apply
    combine = _Combine.apply


def _calls() -> Any:
    """Returns the operators if a graph is being traced or a torch mode such as selective checkpointing must observe them;
    otherwise their eager counterparts."""
    watched = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
    return _operators if watched else _Eager


def keep_plans() -> Any:
    """Implements switchyard.keep_plans."""
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    return create_selective_checkpoint_contexts([_operators.plan.default])


# ---- Handles in graphs ----


class TracedHandle(Handle):
    """The routing of a dispatch in a graph traced by torch.compile; its arrays are operator results. A handle returned by a
    compiled function can be used like any other handle."""

    def __init__(self, plan: Any, rows: Any, tokens: Any, exchange: "Exchange", received: Any, drops: bool) -> None:
        # Does not call the base constructor, because library objects do not exist while a graph is traced.
        self._plan, self._like, self._received, self._drops = plan, rows, received, drops
        self._rows_allocated, self._tokens, self._layout = rows.shape[0], tokens, exchange._layout
        self._sizes = (tokens, exchange.topk, exchange._experts_here, exchange._world)

    def _array(self, name: str, element: int, *shape: Union[str, int], layout: Optional[int] = None) -> Any:
        if layout is not None and layout != self._layout:
            return None
        if name in ("topk_weights", "row_weights"):
            return self._received
        if name in ("dropped", "dropped_per_source") and not self._drops:
            return None
        tokens, topk, here, world = self._sizes
        sizes = {"x_rows": self._rows_allocated, "num_tokens": tokens, "topk": topk, "num_local_experts": here, "world": world}
        return _operators.table(self._plan, self._like, name, element, [each if isinstance(each, int) else sizes[each] for each in shape])

    @property
    def topk_ids_int64(self) -> Any:
        topk_ids = self.topk_ids
        return None if topk_ids is None else topk_ids.long()

    @property
    def _carried(self) -> Any:
        return self._received if self._layout == EXPERT_MAJOR else None

    @property
    def offsets(self) -> Any:
        if self._layout != EXPERT_MAJOR:
            invalid("offsets: rank-major rows are not grouped by experts")
        return self.aligned_per_expert.cumsum(0).int()

    @property
    def num_tokens(self) -> int:
        return self._tokens

    @property
    def _real(self) -> Handle:
        return _ops.handle_of(self._plan)

    # Base class members, for code outside graphs.
    _owned = property(lambda self: self._real._owned)  # type: ignore[assignment]
    _view = property(lambda self: self._real._view)  # type: ignore[assignment]
    _arrays = property(lambda self: self._real._arrays)  # type: ignore[assignment]


def _plan_of(handle: Handle, calls: Any) -> Any:
    if isinstance(handle, TracedHandle):
        return handle._plan if calls is _operators else _ops.Cell(_ops.handle_of(handle._plan))
    if handle._rows_allocated is None:
        invalid("this handle was made from bytes; dispatch with it first")
    return calls.plan_of_handle(handle._number)


# ---- Calls ----


def _rows_of(exchange: "Exchange", options: Tuple[int, ...], handle: Optional[Handle]) -> Tuple[Any, bool]:
    """Returns the number of rows that a dispatch allocates and whether it depends on the counts."""
    if handle is not None:
        return handle._rows_allocated, False
    size, capacity = options[1], options[4]
    if size == 0 or (size == 3 and exchange._backend == 0):
        return 0, True
    return (min(capacity, exchange._most_rows) if size == 1 else exchange._most_rows), False


def _copied(out: Any, rows: Any) -> Any:
    """Copies `rows` to the first rows of `out`, discarding the gradient history of `out`."""
    count = rows.shape[0]
    torch._check(count <= out.shape[0], lambda: "out has fewer rows than the dispatch allocates")
    return out.detach().narrow(0, 0, count).copy_(rows)


def dispatch(exchange: "Exchange", x: Any, topk_ids: Any, topk_weights: Any, handle: Optional[Handle], options: Tuple[int, ...],
             out: Any, gradient: bool) -> Tuple[Any, Handle]:
    """Implements Exchange.dispatch. `gradient`: x or the weights require a gradient."""
    rows_given, scales = x if isinstance(x, tuple) else (x, None)
    if (topk_ids is None) == (handle is None) or (handle is not None and topk_weights is not None):
        invalid("dispatch takes either topk_ids, with or without topk_weights, or a handle")
    if gradient and (scales is not None or options[0] != 0):
        raise Unsupported("dispatch: fp8 rows have no gradients; detach x, or dispatch it without quantize and scales")
    wants_weights = gradient and topk_weights is not None and topk_weights.requires_grad
    if wants_weights and exchange._layout == EXPERT_MAJOR and exchange._for_weights is None:
        raise Unsupported("dispatch: topk_weights require gradients; make the expert-major Exchange with routing_gradients=True")
    calls = _calls()
    if handle is None:
        plan = calls.plan(topk_ids, None if topk_weights is None else topk_weights.detach(), exchange._number, options)
    else:
        plan = _plan_of(handle, calls)
    count, exact = _rows_of(exchange, options, handle)
    rows, row_scales, received, plan = calls.dispatch(
        rows_given, scales, topk_ids, topk_weights, plan, exchange._number, exchange._layout, options, count, exact, gradient and out is None)
    if out is not None:
        its_rows, its_scales = out if isinstance(out, tuple) else (out, None)
        rows = _copied(its_rows, rows)
        row_scales = row_scales if its_scales is None else _copied(its_scales[:, :row_scales.shape[1]], row_scales)
    result = rows if scales is None and options[0] == 0 else (rows, row_scales)
    if handle is not None:
        return result, handle
    received = None if topk_weights is None else received
    if torch.compiler.is_compiling():
        return result, TracedHandle(plan, rows, rows_given.shape[0], exchange, received, options[2] == 1)
    made = (plan.filled if isinstance(plan, _ops.Cell) else _ops.handle_of(plan)).twin()
    if received is not None:
        made._cache["topk_weights" if exchange._layout == RANK_MAJOR else "row_weights"] = received
    return result, made


def combine(exchange: "Exchange", y: Any, handle: Handle, topk_weights: Any, apply_weights: bool, order: int, biases: Sequence[Any],
            out: Any, num_sms: int, gradient: bool) -> Any:
    """Implements Exchange.combine. `gradient`: y, a bias or the weights sent by dispatch require a gradient."""
    rank_major = exchange._layout == RANK_MAJOR
    if gradient and not rank_major and topk_weights is not None:
        raise Unsupported("combine: topk_weights of its own have no gradient in expert-major layout; give them to dispatch")
    carried = None
    if gradient and not rank_major and apply_weights:
        carried = handle.row_weights
    if len(biases) > 2:
        invalid(f"bias: {len(biases)} arrays given, at most 2 are allowed")
    first, second = (*biases, None, None)[:2]
    topk = exchange.topk if rank_major and topk_weights is not None else 0
    calls = _calls()
    result, summed = calls.combine(y, carried, _plan_of(handle, calls), topk_weights, first, second, exchange._number, handle._tokens, topk,
                                   order, apply_weights, num_sms)
    if out is not None:
        result = out.copy_(result)
    return (result, summed) if topk else result
