# SPDX-License-Identifier: Apache-2.0
"""Low-latency dispatch and combine as torch operators, for torch.compile. An output is passed by number, as an int64 [1] tensor
in host memory whose memory keeps the output alive, like plans in ops.py.

A graph cannot express that a later call overwrites memory. Therefore, each dispatch without a caller's output borrows an output
to which no tensor refers any more. A compiled function with short-lived results thus reuses the same one or two outputs.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, List, Optional, Tuple

import torch
from torch import Tensor

from .._abi.names import FP8
from .._internal.received import Received
from .ops import DTYPES, operator, tensor_of
from .registry import object_of

if TYPE_CHECKING:
    from ..low_latency import LowLatency

_operators = torch.ops.switchyard


def _received(output: Tensor) -> Received:
    return object_of(int(output))


def _dispatch(x: Tensor, scales: Optional[Tensor], topk_ids: Tensor, topk_weights: Optional[Tensor], low_latency: int, output: int, num_sms: int,
              shape: List[int], kind: int, scale_shape: List[int], scale_strides: List[int]) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    owner = object_of(low_latency)
    received = object_of(output) if output else owner._lend(x)
    owner._dispatch(owner._functions.sy_low_latency_dispatch, x if scales is None else (x, scales), topk_ids, topk_weights, received, num_sms)
    result_scales = x.new_empty((0,), dtype=torch.float32) if received.scales is None else received.scales
    return received.x, result_scales, received.rows.clone(), tensor_of(received, received._number)


def _fake_dispatch(x: Tensor, scales: Optional[Tensor], topk_ids: Tensor, topk_weights: Optional[Tensor], low_latency: int, output: int,
                   num_sms: int, shape: List[int], kind: int, scale_shape: List[int], scale_strides: List[int]) \
        -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    result = x.new_empty(shape, dtype=DTYPES[FP8] if kind >= 0 else x.dtype)
    result_scales = x.new_empty((0,), dtype=torch.float32)
    if kind >= 0:
        result_scales = torch.empty_strided(scale_shape, scale_strides, dtype=DTYPES[kind], device=x.device)
    return result, result_scales, x.new_empty((shape[0],), dtype=torch.int32), _fake_output()


def _fake_output(*_: Any) -> Tensor:
    return torch.empty((1,), dtype=torch.int64, device="cpu")


def _combine(y: Tensor, output: Tensor, topk_weights: Optional[Tensor], expert_scale: Optional[Tensor], low_latency: int, tokens: int,
             order: str, num_sms: int) -> Tensor:
    owner = object_of(low_latency)
    function = owner._functions.sy_low_latency_combine
    return owner._combine(function, y, _received(output), topk_weights, expert_scale, order, None, num_sms)[0]


def _fake_combine(y: Tensor, output: Tensor, topk_weights: Optional[Tensor], expert_scale: Optional[Tensor], low_latency: int, tokens: int,
                  order: str, num_sms: int) -> Tensor:
    return y.new_empty((tokens, y.shape[2]))


operator("low_latency_dispatch(Tensor x, Tensor? scales, Tensor topk_ids, Tensor? topk_weights, SymInt low_latency, SymInt output, int num_sms, "
         "int[] shape, int kind, int[] scale_shape, int[] scale_strides) -> (Tensor, Tensor, Tensor, Tensor)", _dispatch, _fake_dispatch)
operator("low_latency_combine(Tensor y, Tensor output, Tensor? topk_weights, Tensor? expert_scale, SymInt low_latency, SymInt tokens, "
         "str order, int num_sms) -> Tensor", _combine, _fake_combine)
operator("low_latency_output(SymInt output) -> Tensor", lambda output: tensor_of(object_of(output), output), _fake_output)
operator("low_latency_table(Tensor output, Tensor like, str name, int[] shape) -> Tensor",
         lambda output, like, name, shape: getattr(_received(output), name).clone(),
         lambda output, like, name, shape: like.new_empty(shape, dtype=torch.int64))


class TracedReceived(Received):
    """The output of a dispatch in a graph traced by torch.compile. An output returned by a compiled function can be used like
    any other output."""

    def __init__(self, owner: "LowLatency", x: Any, scales: Any, rows: Any, output: Any, tokens: Any) -> None:
        # Does not call the base constructor, because library objects do not exist while a graph is traced.
        self.x, self.scales, self.rows, self.num_tokens, self._output = x, scales, rows, tokens, output
        self._shape, self._world = owner._shape, owner._world

    def _table(self, name: str, columns: int) -> Any:
        return _operators.low_latency_table(self._output, self.x, name, [self._shape[0], columns])

    source_range = property(lambda self: self._table("source_range", self._world))  # type: ignore[assignment]
    row_source = property(lambda self: self._table("row_source", self._shape[1]))  # type: ignore[assignment]
    # Base class members, for code outside graphs.
    _owned = property(lambda self: _received(self._output)._owned)  # type: ignore[assignment]
    _view = property(lambda self: _received(self._output)._view)  # type: ignore[assignment]


def _detached(tensor: Any) -> Any:
    return None if tensor is None else tensor.detach()


def dispatch(owner: "LowLatency", x: Any, topk_ids: Any, topk_weights: Any, output: Optional[Received], num_sms: int) -> Received:
    """Implements LowLatency.dispatch."""
    rows, scales = x if isinstance(x, tuple) else (x, None)
    kind, scale_shape, scale_strides = owner._scale_geometry
    if output is None:
        number = 0
    else:
        number = output._number
    received, received_scales, counts, made = _operators.low_latency_dispatch(
        rows.detach(), scales, topk_ids, _detached(topk_weights), owner._number, number, num_sms, owner._shape, kind, scale_shape, scale_strides)
    return TracedReceived(owner, received, received_scales if kind >= 0 else None, counts, made, rows.shape[0])


def combine(owner: "LowLatency", y: Any, received: Received, topk_weights: Any, expert_scale: Any, order: str, out: Any, num_sms: int) -> Any:
    """Implements LowLatency.combine."""
    output = received._output if isinstance(received, TracedReceived) else _operators.low_latency_output(received._number)
    result = _operators.low_latency_combine(y.detach(), output, _detached(topk_weights), _detached(expert_scale), owner._number,
                                            received.num_tokens, order, num_sms)
    return result if out is None else out.copy_(result)
