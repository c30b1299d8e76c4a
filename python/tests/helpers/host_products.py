# SPDX-License-Identifier: Apache-2.0
"""A stand-in for GroupedGemm, which requires a GPU: accepts the same calls and computes with torch on the CPU."""
import ctypes

import torch

from switchyard import parallelize
from switchyard._models import products


class HostProducts:
    """Computes only the rows of experts, each independently of the number of rows. Reads the positions of the rows, as GroupedGemm
    does, at the addresses in the handle."""

    made = 0

    def __init__(self, weights, *, epilogue="none"):
        assert weights.shape[0] > 0 and weights.is_contiguous()
        self._weights, self._gated = weights, epilogue == "swiglu"
        HostProducts.made += 1

    def __call__(self, x, handle, *, out=None):
        view, count = handle._view, self._weights.shape[0]
        columns = self._weights.shape[1] // (2 if self._gated else 1)
        out = x.new_full((x.shape[0], columns), float("nan")) if out is None else out
        first, rows = ((ctypes.c_int64 * count).from_address(each) for each in (view.expert_first_row, view.tokens_per_expert))
        assert view.num_local_experts == count
        for e in range(count):
            here = slice(first[e], first[e] + rows[e])
            made = (x[here, None, :].float() * self._weights[e].float()).sum(-1)
            if self._gated:
                gate, up = made.chunk(2, dim=-1)
                made = torch.nn.functional.silu(gate) * up
            out[here] = made.to(x.dtype)
        return out


def use_host_products(monkeypatch):
    """Makes parallelize_moe select "grouped" on the CPU, with these products."""
    monkeypatch.setattr(products, "GroupedGemm", HostProducts)
    monkeypatch.setattr(parallelize, "way_of", lambda *_: "grouped")
    monkeypatch.setattr(HostProducts, "made", 0)
