# SPDX-License-Identifier: Apache-2.0
"""Memory that CUDA graphs of normal mode share."""
from __future__ import annotations

from ._abi.ffi import Owned

__all__ = ["GraphMemory"]


class GraphMemory:
    """What :meth:`Exchange.make_graph_memory` makes, for :meth:`Exchange.use_graph_memory`. Its memory goes back to the pool when nothing
    refers to it any more and the graphs, rows and handles that are of it are gone."""

    def __init__(self, owned: Owned) -> None:
        self._owned = owned
