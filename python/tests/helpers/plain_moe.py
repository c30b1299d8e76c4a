# SPDX-License-Identifier: Apache-2.0
"""A small model in plain torch, of the form that `parallelize_moe` can divide, without transformers."""
import contextlib
import threading
import types

import torch

HIDDEN, INNER, EXPERTS, TOPK, TOKENS = 16, 16, 6, 2, 8


_seeding = threading.Lock()


@contextlib.contextmanager
def seeded():
    """Provides the same random numbers at every use, even if ranks are threads."""
    with _seeding:
        torch.manual_seed(0)
        yield


class Experts(torch.nn.Module):
    """SwiGLU experts in a loop."""

    def __init__(self, experts=EXPERTS, dtype=torch.float32):
        super().__init__()
        self.num_experts = experts
        self.gate_up_proj = torch.nn.Parameter(torch.randn(experts, 2 * INNER, HIDDEN).to(dtype) / 4)
        self.down_proj = torch.nn.Parameter(torch.randn(experts, HIDDEN, INNER).to(dtype) / 4)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for e in range(self.num_experts):
            tokens, places = torch.where(top_k_index == e)
            gate, up = (hidden_states[tokens] @ self.gate_up_proj[e].T).chunk(2, dim=-1)
            made = (torch.nn.functional.silu(gate) * up) @ self.down_proj[e].T
            out = out.index_add(0, tokens, made * top_k_weights[tokens, places, None].to(made.dtype))
        return out


class StaticExperts(Experts):
    """Experts with shapes that do not depend on the routing, for torch.compile(fullgraph=True)."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for e in range(self.num_experts):
            weight = (top_k_weights * (top_k_index == e)).sum(1, keepdim=True).to(out.dtype)
            gate, up = (hidden_states @ self.gate_up_proj[e].T).chunk(2, dim=-1)
            out = out + (torch.nn.functional.silu(gate) * up) @ self.down_proj[e].T * weight
        return out


class Model(torch.nn.Module):
    """A linear layer, and experts whose routing depends only on the rank."""

    def __init__(self, kind=Experts, **options):
        super().__init__()
        with seeded():
            self.first, self.experts = torch.nn.Linear(HIDDEN, HIDDEN), kind(**options)
        self.config = types.SimpleNamespace(num_experts_per_tok=TOPK)

    def forward(self, x):
        ids = torch.arange(len(x) * TOPK).reshape(len(x), TOPK) % EXPERTS
        return self.experts(self.first(x), ids, torch.full((len(x), TOPK), 0.5))


def tokens_of(rank, step=0):
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model, rank, step=0):
    return (model(tokens_of(rank, step)) - 1).square().mean()


def off(a, b):
    """Returns the relative distance."""
    return ((a - b).norm() / b.norm()).item()
