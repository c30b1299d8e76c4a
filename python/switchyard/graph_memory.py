# SPDX-License-Identifier: Apache-2.0
"""Memory shared by CUDA graphs in normal mode."""
from __future__ import annotations

from ._abi.ffi import Owned

__all__ = ["GraphMemory"]


class GraphMemory:
    """Created by :meth:`Exchange.make_graph_memory` for :meth:`Exchange.use_graph_memory`. Its memory returns to the pool when
    this object is no longer referenced and the graphs, rows and handles that use it have been released."""

    def __init__(self, owned: Owned) -> None:
        self._owned = owned
