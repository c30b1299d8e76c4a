# SPDX-License-Identifier: Apache-2.0
"""Normal mode of the DeepEP drop-in: exchanges by shape, and handles in DeepEP's form."""
from __future__ import annotations

from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple, Union

import numpy as np
import torch

from ..errors import HeapExhausted, InvalidArgument, Unsupported
from ..exchange import Exchange
from ..group import Group
from ..handle import Handle
from ..routing import layout_of_checked, routing_layout
from ._config import ring_shape
from ._copies import CopyingExchange, Generation, Generations, Kept, Shape

Rows = Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]


class NormalHandle(tuple):
    """DeepEP's handle of six tensors, created on first access: rank_prefix_matrix [W, W], channel_prefix_matrix [W, C],
    recv_channel_prefix_matrix [W, C], recv_src_idx [rows], is_token_in_rank bool [T, W], send_head [T, W]; C = num_sms / 2."""

    exchange: Exchange
    handle: Handle
    channels: int
    device: torch.device
    kept: Optional[Kept]
    _tensors: Optional[Tuple[torch.Tensor, ...]]

    @classmethod
    def of(cls, exchange: Exchange, handle: Handle, channels: int, device: torch.device, kept: Optional[Kept]) -> "NormalHandle":
        made = cls((None,) * 6)
        made.exchange, made.handle, made.channels, made.device, made.kept = exchange, handle, channels, device, kept
        made._tensors = None
        return made

    def _all(self) -> Tuple[torch.Tensor, ...]:
        """Returns the tensors. On a GPU, waits for the dispatch."""
        if self._tensors is None:
            self._tensors = tuple(torch.from_numpy(each).to(self.device) for each in self.handle.matrices(self.channels))
        return self._tensors

    def __getitem__(self, index: Any) -> Any:
        return self._all()[index]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._all())

    def __reduce__(self) -> Any:
        raise TypeError("a handle belongs to its process")


class Rings:
    """Exchanges of a group of CPU ranks, one per shape, created in the first dispatch with that shape, which is collective.
    Rings limit their symmetric memory, and rows are in host memory, so nothing is copied."""

    def __init__(self, group: Group, num_nvl_bytes: int) -> None:
        self._group, self._bytes = group, num_nvl_bytes
        self._made: Dict[Shape, Exchange] = {}

    def exchange(self, shape: Shape) -> Exchange:
        if shape not in self._made:
            config = dict(ring_shape(self._group.size, shape.num_experts, shape.topk), hidden=shape.hidden,
                          ring_max_bytes=max(self._bytes // 2, 1))
            try:
                self._made[shape] = Exchange(self._group, **config)
            except HeapExhausted:  # on all ranks: free the shapes used earlier
                self.close()
                self._made[shape] = Exchange(self._group, **config)
        return self._made[shape]

    def close(self) -> None:
        for each in self._made.values():
            each.close()
        self._made.clear()


class Normal:
    """Provides the exchanges of one Buffer, which `made` creates."""

    def __init__(self, group: Group, num_nvl_bytes: int, made: Union[Rings, Generations]) -> None:
        self.group = group
        self.made = made
        self._bytes = num_nvl_bytes

    def choose(self, shape: Shape, tokens: int, num_worst_tokens: int) -> Tuple[Exchange, Optional[Generation]]:
        """Collective. Returns the exchange for an uncached dispatch."""
        if self._bytes <= 0:
            raise InvalidArgument("Buffer: normal mode needs num_nvl_bytes; Config.get_nvl_buffer_size_hint says how much")
        if isinstance(self.made, Rings):
            return self.made.exchange(shape), None
        generation = self.made.sized_by_caller(shape, num_worst_tokens) if num_worst_tokens > 0 \
            else self.made.sized_by_counts(shape, tokens)
        return generation.exchange, generation

    def keep(self, generation: Optional[Generation], shape: Shape, tokens: int, rows: int) -> Optional[Kept]:
        if generation is None or isinstance(self.made, Rings):
            return None
        return self.made.keep(generation, shape, tokens, rows)

    def groups(self) -> List[Group]:
        """Returns the groups of the exchanges that have their own."""
        return [] if isinstance(self.made, Rings) else self.made.groups()

    def close(self) -> None:
        self.made.close()


def layout_of(topk_idx: torch.Tensor, experts: int, world: int) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns tokens per rank, int32 [W]; routes per expert, int32 [E]; and is_token_in_rank, bool [T, W], on the device of
    `topk_idx`."""
    topk_idx = topk_idx.contiguous()
    layout: Any = (layout_of_checked(topk_idx, experts, world) if experts.__class__ is int and not experts >> 31 else
                   routing_layout(topk_idx, num_experts=experts, world=world))
    per_rank, per_expert, where = layout if topk_idx.is_cuda else map(torch.from_numpy, layout)
    return per_rank, per_expert, where


def rows_in(x: Rows) -> Rows:
    """Converts rows to the form used by Exchange, with dense scales and packed powers of two as bytes."""
    if not isinstance(x, tuple):
        return x
    rows, scales = x
    if scales.dtype == torch.int32:
        scales = scales.contiguous().view(torch.uint8)[:, :-(-rows.shape[1] // 128)]
    return rows, scales.contiguous()


def rows_out(rows: torch.Tensor, scales: Optional[torch.Tensor], given: Rows) -> Rows:
    """Converts rows to DeepEP's form, with dense scales packed as in the input."""
    if scales is None:
        return rows
    if given[1].dtype == torch.int32:
        groups = scales.shape[1]
        packed = scales.new_zeros((scales.shape[0], -(-groups // 4) * 4))
        packed[:, :groups] = scales
        scales = packed.view(torch.int32)
    return rows, scales.contiguous()


class Call(NamedTuple):
    """Arguments of an uncached dispatch."""

    x: Rows
    topk_idx: Optional[torch.Tensor]
    topk_weights: Optional[torch.Tensor]
    is_token_in_rank: torch.Tensor
    num_tokens_per_expert: torch.Tensor
    expert_alignment: int
    num_worst_tokens: int
    channels: int
    num_sms: int


def dispatch(normal: Normal, call: Call, streams: Any) -> Tuple[Rows, Optional[torch.Tensor], Optional[torch.Tensor], List[int], NormalHandle]:
    """Runs an uncached dispatch."""
    x, given = rows_in(call.x), call.x[0] if isinstance(call.x, tuple) else call.x
    experts, world, tokens = call.num_tokens_per_expert.numel(), normal.group.size, given.shape[0]
    if experts % world:
        raise InvalidArgument(f"num_tokens_per_expert has {experts} experts: must be a multiple of the {world} ranks")
    if call.topk_idx is None:
        shape, ids = Shape(given.shape[1], world, world), _ids_of_ranks(call.is_token_in_rank, world)
    else:
        shape, ids = Shape(given.shape[1], experts, call.topk_idx.shape[1]), call.topk_idx.contiguous()
    exchange, generation = normal.choose(shape, tokens, call.num_worst_tokens)
    size, out = _CAPACITY if call.num_worst_tokens > 0 else _EXACT, None
    if call.num_worst_tokens > 0 and isinstance(exchange, CopyingExchange):
        out = exchange.room_for(x, call.num_worst_tokens)
    options = (0, size, 0, 0, call.num_worst_tokens, call.num_sms)
    rows, scales, handle = exchange._dispatch(x, ids, call.topk_weights, None, options, out)
    received_ids = received_weights = None
    if call.topk_idx is not None:
        received_ids = handle.topk_ids.long()
        received_weights = None if call.topk_weights is None else handle.topk_weights.clone()
    counts = [] if call.num_worst_tokens > 0 else _counts(normal, call, handle, streams)
    kept = normal.keep(generation, shape, tokens, rows.shape[0])
    made = NormalHandle.of(exchange, handle, call.channels, given.device, kept)
    return rows_out(rows, scales, call.x), received_ids, received_weights, counts, made


#: Values of ``size`` for ``Exchange.dispatch(size=...)``.
_EXACT, _CAPACITY = 0, 1


def cached_dispatch(x: Rows, known: NormalHandle, num_sms: int) -> Rows:
    """Repeats a known routing with other rows."""
    if isinstance(known.exchange, CopyingExchange):
        rows, scales = known.exchange.dispatch_again(rows_in(x), known.handle, num_sms)
    else:
        rows, scales, _ = known.exchange._dispatch(rows_in(x), None, None, known.handle, (0, _EXACT, 0, 0, 0, num_sms))
    return rows_out(rows, scales, x)


def _counts(normal: Normal, call: Call, handle: Handle, streams: Any) -> List[int]:
    """Returns the aligned token counts of this rank's experts. The host has already waited for the counts, but not for the
    rows."""
    if call.topk_idx is None:
        counts = _counts_of_experts(normal.group, call.num_tokens_per_expert)
    elif call.topk_idx.is_cuda:
        counts = streams.to_host(lambda: handle.tokens_per_expert).numpy()
    else:
        counts = handle.counts().tokens_per_expert
    return (-(-counts // call.expert_alignment) * call.expert_alignment).tolist()


def _ids_of_ranks(is_token_in_rank: torch.Tensor, world: int) -> torch.Tensor:
    """Returns the ids for an exchange with one expert per rank."""
    if world > 32:
        raise Unsupported(f"dispatch without topk_idx is for at most 32 ranks, this group has {world}")
    return torch.where(is_token_in_rank, torch.arange(world, device=is_token_in_rank.device), -1).contiguous()


def _counts_of_experts(group: Group, num_tokens_per_expert: torch.Tensor) -> np.ndarray:
    """Returns int64 counts of routes from all ranks to each of this rank's experts."""
    everybody = group.all_gather(num_tokens_per_expert.to("cpu", torch.int64).numpy().tobytes())
    total = np.sum([np.frombuffer(each, np.int64) for each in everybody], axis=0)
    mine = group.experts_of(num_tokens_per_expert.numel())
    return total[mine.start:mine.stop]


def handle_of(handle: Any) -> NormalHandle:
    if not isinstance(handle, NormalHandle):
        raise InvalidArgument("handle: must be what a dispatch of this Buffer returned, as it was returned")
    return handle
