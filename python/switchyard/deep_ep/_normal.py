# SPDX-License-Identifier: Apache-2.0
"""Normal mode of the drop-in: exchanges by shape, and handles that look like DeepEP's."""
from __future__ import annotations

from typing import Any, Dict, Iterator, List, Optional, Tuple, Union

import numpy as np
import torch

from ..errors import HeapExhausted, InvalidArgument, Unsupported
from ..exchange import Exchange, routing_layout
from ..group import Group
from ..handle import Handle
from ._config import ring_shape

Rows = Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]


class NormalHandle(tuple):
    """DeepEP's handle of six tensors, which are made when somebody looks: rank_prefix_matrix [W, W], channel_prefix_matrix [W, C],
    recv_channel_prefix_matrix [W, C], recv_src_idx [rows], is_token_in_rank bool [T, W], send_head [T, W]; C = num_sms / 2."""

    exchange: Exchange
    handle: Handle
    channels: int
    _tensors: Optional[Tuple[torch.Tensor, ...]]

    @classmethod
    def of(cls, exchange: Exchange, handle: Handle, channels: int) -> "NormalHandle":
        made = cls((None,) * 6)
        made.exchange, made.handle, made.channels = exchange, handle, channels
        made._tensors = None
        return made

    def _all(self) -> Tuple[torch.Tensor, ...]:
        if self._tensors is None:
            self._tensors = tuple(torch.from_numpy(each) for each in self.handle.matrices(self.channels))
        return self._tensors

    def __getitem__(self, index: Any) -> Any:
        return self._all()[index]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._all())

    def __reduce__(self) -> Any:
        raise TypeError("a handle belongs to its process")


class Normal:
    """Exchanges of one Buffer: one for each (hidden, experts, topk), made at the first dispatch of that shape, which all ranks make."""

    def __init__(self, group: Group, num_nvl_bytes: int) -> None:
        self.group = group
        self._bytes = num_nvl_bytes
        self._made: Dict[Tuple[int, int, int], Exchange] = {}

    def exchange(self, hidden: int, experts: int, topk: int) -> Exchange:
        key = (hidden, experts, topk)
        if key not in self._made:
            if self._bytes <= 0:
                raise InvalidArgument("Buffer: normal mode needs num_nvl_bytes; Config.get_nvl_buffer_size_hint says how much")
            shape = dict(ring_shape(self.group.size, experts, topk), hidden=hidden, ring_max_bytes=max(self._bytes // 2, 1))
            try:
                self._made[key] = Exchange(self.group, **shape)
            except HeapExhausted:  # on all ranks: shapes that were used before make room
                self.close()
                self._made[key] = Exchange(self.group, **shape)
        return self._made[key]

    def close(self) -> None:
        for each in self._made.values():
            each.close()
        self._made.clear()


def layout_of(topk_idx: torch.Tensor, experts: int, world: int) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """int32 [W] tokens per rank, int32 [E] routes per expert, bool [T, W]."""
    per_rank, per_expert, where = routing_layout(topk_idx.contiguous(), experts=experts, world=world)
    return torch.from_numpy(per_rank), torch.from_numpy(per_expert), torch.from_numpy(where)


def rows_in(x: Rows) -> Rows:
    """Rows as an Exchange takes them: scales dense, packed powers of two as bytes."""
    if not isinstance(x, tuple):
        return x
    rows, scales = x
    if scales.dtype == torch.int32:
        scales = scales.contiguous().view(torch.uint8)[:, :-(-rows.shape[1] // 128)]
    return rows, scales.contiguous()


def rows_out(x: Rows, given: Rows) -> Rows:
    """Rows as DeepEP returns them: scales dense, packed as they were given."""
    if not isinstance(x, tuple):
        return x
    rows, scales = x
    if given[1].dtype == torch.int32:
        groups = scales.shape[1]
        packed = scales.new_zeros((scales.shape[0], -(-groups // 4) * 4))
        packed[:, :groups] = scales
        scales = packed.view(torch.int32)
    return rows, scales.contiguous()


def dispatch(normal: Normal, x: Rows, topk_idx: Optional[torch.Tensor], topk_weights: Optional[torch.Tensor],
             is_token_in_rank: torch.Tensor, num_tokens_per_expert: torch.Tensor, expert_alignment: int, num_worst_tokens: int,
             channels: int) -> Tuple[Rows, Optional[torch.Tensor], Optional[torch.Tensor], List[int], NormalHandle]:
    """A dispatch that counts."""
    hidden = (x[0] if isinstance(x, tuple) else x).shape[1]
    experts, world = num_tokens_per_expert.numel(), normal.group.size
    if experts % world:
        raise InvalidArgument(f"num_tokens_per_expert has {experts} experts: must be a multiple of the {world} ranks")
    options: Dict[str, Any] = {"capacity": num_worst_tokens} if num_worst_tokens > 0 else {}
    if topk_idx is None:
        exchange, ids = normal.exchange(hidden, world, world), _ids_of_ranks(is_token_in_rank, world)
        rows, handle = exchange.dispatch(rows_in(x), ids, **options)
        received_ids = received_weights = None
        counts = _counts_of_experts(normal.group, num_tokens_per_expert)
    else:
        exchange = normal.exchange(hidden, experts, topk_idx.shape[1])
        rows, handle = exchange.dispatch(rows_in(x), topk_idx.contiguous(), topk_weights, **options)
        received_ids = handle.topk_ids.long()
        received_weights = None if topk_weights is None else handle.topk_weights.clone()
        counts = handle.counts().tokens_per_expert
    aligned = [] if num_worst_tokens > 0 else (-(-counts // expert_alignment) * expert_alignment).tolist()
    return rows_out(rows, x), received_ids, received_weights, aligned, NormalHandle.of(exchange, handle, channels)


def _ids_of_ranks(is_token_in_rank: torch.Tensor, world: int) -> torch.Tensor:
    """Ids of an exchange with an expert for each rank."""
    if world > 32:
        raise Unsupported(f"dispatch without topk_idx is for at most 32 ranks, this group has {world}")
    return torch.where(is_token_in_rank, torch.arange(world), -1).contiguous()


def _counts_of_experts(group: Group, num_tokens_per_expert: torch.Tensor) -> np.ndarray:
    """int64: routes of all ranks to each of this rank's experts."""
    everybody = group.all_gather(num_tokens_per_expert.to(torch.int64).numpy().tobytes())
    total = np.sum([np.frombuffer(each, np.int64) for each in everybody], axis=0)
    mine = group.experts_of(num_tokens_per_expert.numel())
    return total[mine.start:mine.stop]


def handle_of(handle: Any) -> NormalHandle:
    if not isinstance(handle, NormalHandle):
        raise InvalidArgument("handle: must be what a dispatch of this Buffer returned, as it was returned")
    return handle
