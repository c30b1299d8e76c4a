# SPDX-License-Identifier: Apache-2.0
"""Base class of the structs of the C interface."""
from __future__ import annotations

import ctypes
from typing import Any, Dict


class Struct(ctypes.Structure):
    """A struct that begins with its size. ``name`` is its name in C; ``defaults`` are the members whose default is not zero."""

    name = ""
    defaults: Dict[str, Any] = {}

    def __init__(self, **members: Any) -> None:
        super().__init__(struct_size=ctypes.sizeof(self), **{**self.defaults, **members})
