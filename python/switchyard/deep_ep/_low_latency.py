# SPDX-License-Identifier: Apache-2.0
"""Low-latency mode of the drop-in."""
from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

from ..errors import HeapExhausted, InvalidArgument
from ..group import Group
from ..low_latency import LowLatency, Pending, Received


class LowLatencyHandle(tuple):
    """DeepEP's handle: src_info int32 [L, R], layout_range int64 [L, W] of ``first << 32 | count``, most tokens of a rank, hidden,
    experts."""

    received: Received
    object: "Object"


class Object:
    """One low-latency object, its two outputs in turn, and rows for combine."""

    def __init__(self, group: Group, **config: Any) -> None:
        self.exchange = LowLatency(group, **config)
        self.outputs: List[Received] = []
        self.turn = 0
        self.rows: Optional[torch.Tensor] = None

    def next_output(self, x: torch.Tensor) -> Received:
        self.turn ^= 1
        while len(self.outputs) < 2:
            self.outputs.append(self.exchange.make_output(x))
        return self.outputs[self.turn]


class LowLatencyMode:
    """Objects of one Buffer by shape, made at the first dispatch of that shape, which all ranks make."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._made: Dict[Tuple[Any, ...], Object] = {}
        self._pending: Optional[Pending] = None

    def object(self, hidden: int, experts: int, topk: int, most: int, scales: Optional[str]) -> Object:
        key = (hidden, experts, topk, most, scales)
        if key not in self._made:
            config = {"hidden": hidden, "experts": experts, "topk": topk, "max_tokens": most, "scales": scales, "dtype": "bf16",
                      "scale_order": "column_major"}
            try:
                self._made[key] = Object(self.group, **config)
            except HeapExhausted:  # on all ranks: shapes that were used before make room
                self.close()
                self._made[key] = Object(self.group, **config)
        return self._made[key]

    def finish(self) -> None:
        """Ends a call whose hook was not called yet: an object has one at a time."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def hook(self, pending: Pending, after: Callable[[], None]) -> Callable[[], None]:
        """What receives, once, whoever asks for it first."""
        wait, done = pending.wait, [False]

        def receive() -> None:
            wait()
            if not done[0]:
                done[0] = True
                after()

        pending.wait = receive  # type: ignore[method-assign]
        self._pending = pending
        return receive

    def close(self) -> None:
        self.finish()
        for each in self._made.values():
            each.exchange.close()
        self._made.clear()


def dispatch(mode: LowLatencyMode, x: torch.Tensor, topk_idx: torch.Tensor, most: int, experts: int, scales: Optional[str],
             powers_as_f32: bool, stats: Optional[torch.Tensor], hooked: bool) \
        -> Tuple[Any, torch.Tensor, LowLatencyHandle, Optional[Callable[[], None]]]:
    """recv_x, or a pair with scales; recv_count; handle; hook or None."""
    mode.finish()
    if x.shape[0] > most:
        raise InvalidArgument(f"x has {x.shape[0]} tokens: num_max_dispatch_tokens_per_rank = {most} allows no more")
    it = mode.object(x.shape[1], experts, topk_idx.shape[1], most, scales)
    output, ids = it.next_output(x), topk_idx.contiguous()
    expanded: Optional[torch.Tensor] = None
    if powers_as_f32:
        here, rows = output.x.shape[:2]
        expanded = torch.empty((here, -(-x.shape[1] // 128), rows), dtype=torch.float32)

    def after() -> None:
        if expanded is not None:
            _expand(output.scales, expanded)
        if stats is not None:
            stats.add_(output.rows.to(stats.dtype))

    hook = None
    if hooked:
        hook = mode.hook(it.exchange.dispatch_async(x, ids, output=output), after)
    else:
        it.exchange.dispatch(x, ids, output=output)
        after()
    source = output.row_source.view(torch.int32)[:, ::2]
    handle = LowLatencyHandle((source, output.source_range, most, x.shape[1], experts))
    handle.received, handle.object = output, it
    packed = output.x if scales is None else (output.x, output.scales if expanded is None else expanded.transpose(1, 2))
    return packed, output.rows, handle, hook


def _expand(packed: Any, into: torch.Tensor) -> None:
    """Powers of two, four in an int32 [L, R, ceil(G / 4)], as float32 into [L, G, R]."""
    for group in range(into.shape[1]):
        exponents = (packed[:, :, group // 4] >> (8 * (group % 4))) & 0xFF
        into[:, group] = torch.ldexp(torch.ones(()), exponents - 127)


def combine(mode: LowLatencyMode, x: torch.Tensor, topk_weights: torch.Tensor, handle: Any, zero_copy: bool, hooked: bool,
            out: Optional[torch.Tensor]) -> Tuple[torch.Tensor, Optional[Callable[[], None]]]:
    """The sums, and a hook or None."""
    mode.finish()
    handle = handle_of(handle)
    exchange = handle.object.exchange
    if zero_copy:
        x = rows_of(handle)
    if hooked:
        pending = exchange.combine_async(x, handle.received, weights=topk_weights, out=out)
        return pending._result, mode.hook(pending, lambda: None)
    return exchange.combine(x, handle.received, weights=topk_weights, out=out), None


def rows_of(handle: Any) -> torch.Tensor:
    """Rows [L, R, H] that combine reads where they lie."""
    handle = handle_of(handle)
    it = handle.object
    if it.rows is None:
        it.rows = it.exchange.make_rows(handle.received, "bf16")
    return it.rows


def handle_of(handle: Any) -> LowLatencyHandle:
    if not isinstance(handle, LowLatencyHandle):
        raise InvalidArgument("handle: must be what a low_latency_dispatch of this Buffer returned, as it was returned")
    return handle
