# SPDX-License-Identifier: Apache-2.0
"""Settings of normal mode. Of DeepEP's chunk sizes nothing depends here, but for the sizes that are asked of a Config."""
from __future__ import annotations

from typing import NamedTuple

from ..exchange import Exchange

__all__ = ["Config"]

#: Ranks for which DeepEP has settings; it refuses others.
KNOWN_SIZES = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)


class Sms(int):
    """A number of multiprocessors. Integers of the same value may be the same object; these are not."""


#: What DeepEP takes if nobody says anything. It is told to whoever asks, and calls that are given it leave the number to the library,
#: which knows what a call needs. A 20 that somebody names is a 20.
UNCHOSEN = Sms(20)


class Config(NamedTuple):
    """Multiprocessors of a call, and chunk sizes, which are kept and not used."""

    num_sms: int = UNCHOSEN
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """``num_nvl_bytes`` for rows of `hidden_bytes` bytes: room for the rings of two shapes."""
        hidden = -(-hidden_bytes // 16) * 8
        return 2 * Exchange.heap_bytes(min(num_ranks, 64), hidden=hidden, **ring_shape(num_ranks, num_ranks, 8))

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Ranks are on one host: none."""
        return 0


def config_for(num_sms: int, num_ranks: int) -> Config:
    assert num_ranks in KNOWN_SIZES, f"unsupported number of ranks: {num_ranks}; known are {KNOWN_SIZES}"
    return Config(num_sms)


def ring_shape(world: int, experts: int, topk: int) -> dict:
    """Keywords of an exchange that takes any number of tokens: rings bound its memory, whatever comes."""
    most = min(((1 << 23) - 1) // topk, ((1 << 31) - (1 << 28)) // (topk * min(world, 64)))
    return {"experts": experts, "topk": topk, "max_tokens": most, "staging": "ring", "dtype": "bf16"}
