# SPDX-License-Identifier: Apache-2.0
"""Base class of the C interface structs."""
from __future__ import annotations

import ctypes
from typing import Any, Dict


class Struct(ctypes.Structure):
    """A struct whose first member is its size. ``name`` is its name in C; ``defaults`` contains the nonzero defaults of its
    members."""

    name = ""
    defaults: Dict[str, Any] = {}

    def __init__(self, **members: Any) -> None:
        super().__init__(struct_size=ctypes.sizeof(self), **{**self.defaults, **members})
