# SPDX-License-Identifier: Apache-2.0
"""Settings of normal mode. Here, DeepEP's chunk sizes affect only the sizes returned by a Config."""
from __future__ import annotations

from typing import NamedTuple

from ..exchange import Exchange

__all__ = ["Config"]

#: Numbers of ranks for which DeepEP has settings; it rejects other numbers.
KNOWN_SIZES = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)


class Sms(int):
    """A number of multiprocessors with a separate identity, because equal ints may be the same object."""


#: DeepEP's default, returned to callers that query it. If a call receives this object, the library chooses the number that the
#: call needs; a 20 passed explicitly by a caller is used as 20.
UNCHOSEN = Sms(20)


class Config(NamedTuple):
    """The number of multiprocessors for a call, and chunk sizes, which are stored but not used."""

    num_sms: int = UNCHOSEN
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Returns ``num_nvl_bytes`` for rows of `hidden_bytes` bytes, enough for the rings of two shapes."""
        hidden = -(-hidden_bytes // 16) * 8
        return 2 * Exchange.heap_bytes(min(num_ranks, 64), hidden=hidden, **ring_shape(num_ranks, num_ranks, 8))

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Returns 0, because all ranks are on one host."""
        return 0


def config_for(num_sms: int, num_ranks: int) -> Config:
    assert num_ranks in KNOWN_SIZES, f"unsupported number of ranks: {num_ranks}; known are {KNOWN_SIZES}"
    return Config(num_sms)


def ring_shape(world: int, experts: int, topk: int) -> dict:
    """Returns the keywords of an exchange that accepts any number of tokens: rings limit its memory for any routing."""
    most = min(((1 << 23) - 1) // topk, ((1 << 31) - (1 << 28)) // (topk * min(world, 64)))
    return {"num_experts": experts, "topk": topk, "max_tokens": most, "staging": "ring", "dtype": "bf16"}
