# SPDX-License-Identifier: Apache-2.0
"""Config structs of an :class:`Exchange`."""
from __future__ import annotations

from .._abi import names as _names
from .._abi.arguments import checked
from .._abi.ffi import structs
from .._abi.names import EXPERT_MAJOR, F32, value_of


@checked("Exchange.__init__", called="Exchange")
def normal_config(*, hidden: int, num_experts: int, topk: int, max_tokens: int, layout: str = "rank_major", expert_alignment: int = 1,
                  dtype: object = "bf16", staging: str = "direct", pool_bytes: int = 0, ring_num_channels: int = 0, ring_send_chunk: int = 6,
                  ring_slots: int = 0, ring_max_bytes: int = 0, invalid_ids: str = "raise") -> structs.NormalConfig:
    """Converts the keywords of :class:`Exchange` to a config struct."""
    return structs.NormalConfig(
        hidden=hidden, max_tokens=max_tokens, num_experts=num_experts, topk=topk, layout=value_of(_names.LAYOUTS, "layout", layout),
        expert_alignment=expert_alignment, dtype=_names.dtype_of("dtype", dtype), staging=value_of(_names.STAGINGS, "staging", staging),
        ring_num_channels=ring_num_channels, ring_send_chunk=ring_send_chunk, ring_slots=ring_slots, pool_bytes=pool_bytes,
        ring_max_bytes=ring_max_bytes, invalid_ids=value_of(_names.INVALID_IDS, "invalid_ids", invalid_ids))


def weights_config(config: structs.NormalConfig) -> structs.NormalConfig:
    """Returns the configuration of the exchange that returns gradients of routing weights: float32 rows with one column per
    k."""
    return structs.NormalConfig(
        hidden=-(-config.topk // 4) * 4, max_tokens=config.max_tokens, num_experts=config.num_experts, topk=config.topk,
        layout=EXPERT_MAJOR, expert_alignment=config.expert_alignment, dtype=F32)
