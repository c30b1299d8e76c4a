# SPDX-License-Identifier: Apache-2.0
"""Gradients of dispatch and combine, for torch.

The backward pass of a dispatch is a combine, and the other way round, by the handle of the forward pass: nothing is counted again.

    rank-major    rows[r] = x[token of r]              grad_x[t] = sum of grad_rows over the ranks of t
                  out[t]  = sum of y over ranks        grad_y[r] = grad_out[token of r]
    expert-major  rows[r] = x[token of r]              grad_x[t] = sum of grad_rows over the routes of t
                  out[t]  = sum of w[r] y[r]           grad_y[r] = w[r] grad_out[token of r],  grad_w[r] = dot(grad_out[...], y[r])

Gradients of weights belong to the weights' owner: rank-major they travel beside the rows, expert-major through a small exchange whose
row of route (t, k) has the gradient in column k and zeros elsewhere, so that their sum over routes is row t.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional, Sequence, Tuple

import torch
from torch.autograd.function import once_differentiable

from ._names import EXPERT_MAJOR, RANK_MAJOR, invalid
from .errors import Unsupported
from .handle import Handle

if TYPE_CHECKING:
    from .exchange import Exchange

PER_RANK, PER_ROUTE = 0, 1


def _twin(handle: Handle) -> Handle:
    """Another object of the same routing, without the tensors that refer to a graph: what a graph keeps must not keep the graph."""
    twin = Handle.__new__(Handle)
    twin.__dict__.update(handle.__dict__)
    twin._cache = {}
    return twin


def _is_row(handle: Handle) -> Optional[torch.Tensor]:
    """bool [R], False for padding and behind the rows delivered; None if all are rows."""
    view = handle._view
    assert view is not None, "combine() has looked"
    if handle._layout == RANK_MAJOR:
        return None if view.rows == view.x_rows else handle.source_token >= 0
    return handle.row_source >= 0


def _fitted(rows: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` rows, or zeros behind those there are."""
    if rows.shape[0] >= count:
        return rows[:count]
    return torch.cat([rows, rows.new_zeros((count - rows.shape[0], *rows.shape[1:]))])


class _Dispatch(torch.autograd.Function):
    """Rows, and the weights that came with them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weights: Optional[torch.Tensor], exchange: "Exchange", ids: Any, handle: Optional[Handle],
                options: Tuple[int, ...], made: list) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        rows, _, handle = exchange._dispatch(x.detach(), ids, None if weights is None else weights.detach(), handle, options)
        ctx.exchange, ctx.handle = exchange, _twin(handle)
        made.append(_twin(handle))
        if weights is None:
            return rows.clone(), None
        received = ctx.handle.topk_weights if handle._layout == RANK_MAJOR else ctx.handle.row_weights
        return rows.clone(), received.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: torch.Tensor, grad_received: Optional[torch.Tensor]) -> Tuple[Any, ...]:
        exchange, handle = ctx.exchange, ctx.handle
        wants_weights = ctx.needs_input_grad[1]
        if handle._layout == RANK_MAJOR:
            given = grad_received.contiguous() if wants_weights and grad_received is not None else None
            grad_x, grad_weights = exchange._combine(grad_rows.contiguous(), handle, given)
        else:
            grad_x, _ = exchange._combine(grad_rows.contiguous(), handle, None, False, PER_ROUTE)
            grad_weights = _owners_weights(exchange, handle, grad_received) if wants_weights and grad_received is not None else None
        return grad_x, grad_weights, None, None, None, None, None


def _owners_weights(exchange: "Exchange", handle: Handle, grads: torch.Tensor) -> torch.Tensor:
    """float32 [T, K] from the gradients [R] of the rows' weights."""
    small = exchange._for_weights
    assert small is not None, "dispatch() has looked"
    source = handle.row_source
    valid = source >= 0
    k = torch.where(valid, (source >> 32) & 0xFFFF, 0)
    rows = torch.zeros((source.shape[0], small.hidden), dtype=torch.float32, device=source.device)
    rows.scatter_(1, k[:, None], torch.where(valid, grads, 0.0)[:, None])
    summed, _ = small._combine(rows, handle, None, False, PER_ROUTE)
    return summed[:, :exchange.topk].contiguous()


class _Combine(torch.autograd.Function):
    """The sum, and the summed weights of a rank-major combine, which are not differentiable."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, carried: Optional[torch.Tensor], exchange: "Exchange", handle: Handle, weights: Any,
                apply_weights: bool, order: int, out: Any, num_sms: int, *biases: torch.Tensor) -> Tuple[Any, Any]:
        result, summed = exchange._combine(y.detach(), handle, weights, apply_weights, order, [b.detach() for b in biases], out, num_sms)
        ctx.exchange, ctx.handle, ctx.num_biases, ctx.rows = exchange, handle, len(biases), y.shape[0]
        ctx.save_for_backward(y if ctx.needs_input_grad[1] else None, carried)
        if out is not None:
            ctx.mark_dirty(out)
        if summed is not None:
            ctx.mark_non_differentiable(summed)
        return result, summed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor, _: Any) -> Tuple[Any, ...]:
        exchange, handle = ctx.exchange, ctx.handle
        y, carried = ctx.saved_tensors
        grad_y = grad_carried = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            rows, _, _ = exchange._dispatch(grad_out.contiguous(), None, None, handle)
            valid = _is_row(handle)
            if ctx.needs_input_grad[1]:
                dots = (rows.float() * _fitted(y, rows.shape[0]).float()).sum(-1)
                grad_carried = dots if valid is None else torch.where(valid, dots, 0.0)
            grad_y = rows.clone() if carried is None else (rows.float() * carried[:, None]).to(rows.dtype)
            grad_y = grad_y if valid is None else torch.where(valid[:, None], grad_y, torch.zeros((), dtype=rows.dtype, device=rows.device))
            grad_y = _fitted(grad_y, ctx.rows)
        biases = [grad_out if ctx.needs_input_grad[9 + i] else None for i in range(ctx.num_biases)]
        return (grad_y, grad_carried, None, None, None, None, None, None, None, *biases)


def dispatch(exchange: "Exchange", x: Any, ids: Any, weights: Optional[torch.Tensor], handle: Optional[Handle],
             options: Tuple[int, ...]) -> Tuple[torch.Tensor, Handle]:
    """Exchange.dispatch of tensors that require gradients."""
    if isinstance(x, tuple) or options[0] != 0:
        raise Unsupported("dispatch: fp8 rows have no gradients; detach x, or dispatch it without quantize and scales")
    wants_weights = weights is not None and weights.requires_grad
    if wants_weights and exchange._layout == EXPERT_MAJOR and exchange._for_weights is None:
        raise Unsupported("dispatch: weights require gradients; make the expert-major Exchange with routing_gradients=True")
    made: list = []
    rows, received = _Dispatch.apply(x, weights, exchange, ids, handle, options, made)
    if received is not None:
        made[0]._cache["topk_weights" if exchange._layout == RANK_MAJOR else "row_weights"] = received
    return rows, made[0] if handle is None else handle


def combine(exchange: "Exchange", y: torch.Tensor, handle: Handle, carried: Optional[torch.Tensor], weights: Any, apply_weights: bool,
            order: int, biases: Sequence[torch.Tensor], out: Any, num_sms: int) -> Any:
    """Exchange.combine of tensors that require gradients. `carried` are the rows' weights as dispatch delivered them."""
    if exchange._layout == EXPERT_MAJOR and weights is not None:
        raise Unsupported("combine: weights of its own have no gradient in expert-major layout; give them to dispatch")
    if exchange._layout == EXPERT_MAJOR and apply_weights and carried is None:
        carried = handle.row_weights
    if exchange._layout == RANK_MAJOR:
        carried = None
    if handle._view is None:
        invalid("combine: this handle was made from bytes; dispatch with it first")
    result, summed = _Combine.apply(y, carried, exchange, _twin(handle), weights, apply_weights, order, out, num_sms, *biases)
    return result if summed is None else (result, summed)
