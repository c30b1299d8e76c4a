# SPDX-License-Identifier: Apache-2.0
"""Grouped products of experts between dispatch and combine, for passes without gradients."""
from __future__ import annotations

from typing import Any, NamedTuple, Sequence, Tuple

from ..gemm import GroupedGemm


class Products(NamedTuple):
    """Both products of a set of experts. They read the weights in place and keep them alive."""

    up: GroupedGemm
    down: GroupedGemm


def products_of(w13: Any, w2: Any) -> Products:
    return Products(GroupedGemm(w13, epilogue="swiglu"), GroupedGemm(w2))


def multiply(parts: Sequence[Tuple[Products, Any]], rows: Any, out: Any) -> Any:
    """Writes the experts' results to `out` and returns it. parts: products, each with the handle of its rows."""
    middle: Any = None
    for (up, _), handle in parts:
        middle = up(rows, handle, out=middle)
    for (_, down), handle in parts:
        down(middle, handle, out=out)
    return out


__all__ = ["Products", "multiply", "products_of"]
