# SPDX-License-Identifier: Apache-2.0
"""Low-latency mode of the DeepEP drop-in."""
from __future__ import annotations

import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch

from ..errors import HeapExhausted, InvalidArgument, PeerTimeout, Unsupported
from ..group import Group
from ..low_latency import LowLatency, Pending, Received


#: Seconds until a combine that waits for the signals of a product raises PeerTimeout.
SIGNAL_SECONDS = 100.0


class LowLatencyHandle(tuple):
    """DeepEP's handle: src_info int32 [L, R], layout_range int64 [L, W] of ``first << 32 | count``, maximum number of tokens of
    a rank, hidden, experts."""

    received: Received
    object: "Object"
    output: "Output"


class Output:
    """A destination for an object's dispatches, and the parts of a handle that refer to it. These never change and are created
    once."""

    def __init__(self, it: "Object", received: Received, most: int, hidden: int, experts: int) -> None:
        self.received = received
        self.handle = LowLatencyHandle((received.row_source.view(torch.int32)[:, ::2], received.source_range, most, hidden, experts))
        self.handle.received, self.handle.object, self.handle.output = received, it, self
        self.packed = received.x if received.scales is None else (received.x, received.scales)
        self._powers: Optional[torch.Tensor] = None
        self._rows: Optional[torch.Tensor] = None

    def powers(self, hidden: int) -> torch.Tensor:
        """Returns float32 [L, groups, R] for power-of-two scales reported as float32."""
        if self._powers is None:
            here, rows = self.received.x.shape[:2]
            self._powers = torch.empty((here, -(-hidden // 128), rows), dtype=torch.float32, device=self.received.x.device)
        return self._powers


    def rows(self) -> torch.Tensor:
        """Returns rows [L, R, H] that combine reads in place. Each of the two outputs has separate rows, because DeepEP's
        buffers alternate."""
        if self._rows is None:
            self._rows = self.handle.object.exchange.make_rows(self.received, "bf16")
        return self._rows


class Object:
    """One low-latency object and its two outputs, used alternately."""

    def __init__(self, group: Group, **config: Any) -> None:
        self.exchange = LowLatency(group, **config)
        functions = self.exchange._functions
        self.send_rows, self.send_sums = functions.sy_low_latency_dispatch, functions.sy_low_latency_combine
        self._told = (config["max_tokens"], config["hidden"], config["num_experts"])
        self._outputs: List[Output] = []
        self._turn = 0

    def next_output(self, x: torch.Tensor) -> Output:
        if len(self._outputs) < 2:
            self._outputs = [Output(self, self.exchange.make_output(x), *self._told) for _ in range(2)]
        self._turn ^= 1
        return self._outputs[self._turn]


class LowLatencyMode:
    """Objects of one Buffer by shape, created in the first dispatch with that shape, which is collective. `streams` chooses the
    streams for calls."""

    def __init__(self, group: Group, streams: Any) -> None:
        self.group, self.streams = group, streams
        self._made: Dict[Tuple[Any, ...], Object] = {}
        self._pending: Optional[Callable[[], None]] = None
        self.recent: Dict[Tuple[Any, ...], Object] = {}  #: keyed by the callers' arguments other than tensors

    def object(self, hidden: int, experts: int, topk: int, most: int, scales: Optional[str]) -> Object:
        key = (hidden, experts, topk, most, scales)
        made = self._made.get(key)
        if made is None:
            config = {"hidden": hidden, "num_experts": experts, "topk": topk, "max_tokens": most, "scales": scales, "dtype": "bf16",
                      "scale_order": "column_major"}
            try:
                made = Object(self.group, **config)
            except HeapExhausted:  # on all ranks: free the shapes used earlier
                self.close()
                made = Object(self.group, **config)
            self._made[key] = made
        return made

    def finish(self) -> None:
        """Completes a call whose hook has not yet been called, because an object supports only one call at a time."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending()

    def hook(self, pending: Pending, after: Optional[Callable[[], None]]) -> Callable[[], None]:
        """Returns a function whose first call receives on the sending stream; later calls do nothing."""
        def first() -> None:
            pending.wait()
            if after is not None:
                after()

        receive, done = self.streams.on_stream_of(first), [False]

        def once() -> None:
            if not done[0]:
                done[0] = True
                receive()

        self._pending = once
        return once

    def close(self) -> None:
        self.finish()
        for each in self._made.values():
            each.exchange.close()
        self._made.clear()
        self.recent.clear()


class Sending(NamedTuple):
    """Row format of a dispatch."""

    scales: Optional[str]  #: "f32", "ue8m0", None: rows are sent unchanged
    powers_as_f32: bool  #: power-of-two scales are reported as float32


_PLAIN, _F32, _POWERS, _PACKED_POWERS = Sending(None, False), Sending("f32", False), Sending("ue8m0", True), Sending("ue8m0", False)


def sending_of(use_fp8: bool, round_scale: bool, use_ue8m0: bool) -> Sending:
    if not use_fp8:
        return _PLAIN
    return _F32 if not round_scale else _PACKED_POWERS if use_ue8m0 else _POWERS


def dispatch(mode: LowLatencyMode, x: torch.Tensor, topk_idx: torch.Tensor, most: int, experts: int, sending: Sending,
             stats: Optional[torch.Tensor], hooked: bool) -> List[Any]:
    """Returns recv_x, or a pair with scales; recv_count; handle; hook or None. None of the returned memory comes from torch's
    allocator."""
    if mode._pending is not None:
        mode.finish()
    tokens, hidden = x.shape
    if tokens > most:
        raise InvalidArgument(f"x has {tokens} tokens: num_max_dispatch_tokens_per_rank = {most} allows no more")
    it = mode.object(hidden, experts, topk_idx.shape[1], most, sending.scales)
    output, ids = it.next_output(x), topk_idx.contiguous()
    received, packed = output.received, output.packed
    after = None
    if stats is not None or sending.powers_as_f32:
        expanded = output.powers(hidden) if sending.powers_as_f32 else None
        if expanded is not None:
            packed = (received.x, expanded.transpose(1, 2))

        def after() -> None:
            if expanded is not None:
                _expand(received.scales, expanded)
            if stats is not None:
                stats.add_(received.rows.to(stats.dtype))

    hook = None
    if hooked:
        hook = mode.hook(it.exchange.dispatch_async(x, ids, output=received), after)
    else:
        it.exchange._dispatch(it.send_rows, x, ids, None, received, 0)
        if after is not None:
            after()
    if after is None:
        mode.recent[most, experts, sending.scales] = it
    return [packed, received.rows, output.handle, hook]


def dispatch_again(mode: LowLatencyMode, x: torch.Tensor, topk_idx: torch.Tensor, most: int, experts: int, scales: Optional[str],
                   stream: int) -> Optional[Output]:
    """Repeats the last dispatch with these numbers for other tensors, into the next output, and fills its `packed`. Returns
    None, without side effects, if not applicable."""
    it = mode.recent.get((most, experts, scales))
    if it is None or mode._pending is not None or it.exchange._dispatch_again is None:
        return None
    output = it._outputs[it._turn ^ 1]
    if not it.exchange._dispatch_again(x, topk_idx, None, output.received, stream):
        return None
    it._turn ^= 1
    return output


def _expand(packed: Any, into: torch.Tensor) -> None:
    """Expands powers of two, packed four per int32 in [L, R, ceil(G / 4)] with adjacent rows, to float32 in [L, G, R]."""
    here, groups, rows = into.shape
    exponents = packed.transpose(1, 2).contiguous().view(torch.uint8).view(here, -1, rows, 4).transpose(2, 3)
    exponents = exponents.reshape(here, -1, rows)[:, :groups].to(torch.int32)
    into.view(torch.int32).copy_(torch.where(exponents == 0, 1 << 22, exponents << 23))


class Signals(NamedTuple):
    """Progress of the product that computes the rows of a combine: int32, one counter per block of `block_m` rows of an expert,
    at ``expert * ceil(R / block_m) + block``. A block is complete when its counter is at least `threshold`."""

    counters: torch.Tensor
    block_m: int
    threshold: int

    def check(self, received: Received) -> None:
        """Raises InvalidArgument or Unsupported unless :meth:`wait` can be called with these arguments."""
        here, rows = received.x.shape[:2]
        if self.block_m.__class__ is not int or self.threshold.__class__ is not int or self.block_m < 1 or self.threshold < 1:
            raise InvalidArgument(f"low_latency_combine: block_m = {self.block_m} and threshold = {self.threshold} must be at least 1")
        least, given = here * -(-rows // self.block_m), self.counters
        if given.dtype != torch.int32 or not given.is_contiguous() or given.numel() < least:
            raise InvalidArgument(f"comp_signal is {given.dtype} {list(given.shape)}: must be contiguous int32 with at least {least} "
                                  f"elements, one per {self.block_m} of {rows} rows of {here} experts")
        if given.is_cuda or received.x.is_cuda:
            raise Unsupported("low_latency_combine: comp_signal is available on the CPU only; on GPUs, combine after the product, with "
                              "overlap=False")

    def wait(self, received: Received) -> None:
        """Returns when every block with received rows is complete. CPU.

        Raises:
            PeerTimeout: after SIGNAL_SECONDS.
        """
        blocks = -(-received.x.shape[1] // self.block_m)
        counters, end = self.counters.view(-1).numpy(), time.monotonic() + SIGNAL_SECONDS
        for expert, rows in enumerate(received.rows.tolist()):
            for block in range(-(-rows // self.block_m)):
                while counters[expert * blocks + block] < self.threshold:
                    if time.monotonic() > end:
                        raise PeerTimeout(f"low_latency_combine: comp_signal of block {block} of local expert {expert} is "
                                          f"{counters[expert * blocks + block]} after {SIGNAL_SECONDS:g} s: threshold = {self.threshold}")
                    time.sleep(5e-5)


def combine(mode: LowLatencyMode, x: torch.Tensor, topk_weights: torch.Tensor, handle: Any, zero_copy: bool, hooked: bool,
            out: Optional[torch.Tensor], num_sms: int = 0, signals: Optional[Signals] = None) \
        -> Tuple[torch.Tensor, Optional[Callable[[], None]]]:
    """Returns the sums and a hook or None. Reads no row before `signals` report its block as complete."""
    if mode._pending is not None:
        mode.finish()
    handle = handle_of(handle)
    exchange = handle.object.exchange
    if signals is not None:
        signals.check(handle.received)
        signals.wait(handle.received)
    if zero_copy:
        x = rows_of(handle)
    if hooked:
        pending = exchange.combine_async(x, handle.received, topk_weights=topk_weights, out=out, num_sms=num_sms)
        return pending._result, mode.hook(pending, None)
    return exchange._combine(handle.object.send_sums, x, handle.received, topk_weights, None, "per_route", out, num_sms)[0], None


def combine_again(mode: LowLatencyMode, x: torch.Tensor, topk_weights: torch.Tensor, handle: Any, stream: int) -> Optional[torch.Tensor]:
    """Returns the sums of a combine like the previous one, or None, without side effects, if not applicable."""
    if mode._pending is not None or type(handle) is not LowLatencyHandle:
        return None
    again = handle.object.exchange._combine_again
    return None if again is None else again(x, handle.received, topk_weights, stream)


def rows_of(handle: Any) -> torch.Tensor:
    """Returns rows [L, R, H] that combine reads in place."""
    return handle_of(handle).output.rows()


def handle_of(handle: Any) -> LowLatencyHandle:
    if not isinstance(handle, LowLatencyHandle):
        raise InvalidArgument("handle: must be what a low_latency_dispatch of this Buffer returned, as it was returned")
    return handle
