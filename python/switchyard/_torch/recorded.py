# SPDX-License-Identifier: Apache-2.0
"""Tests whether torch records gradients for a call or traces it. Never imports torch."""
from __future__ import annotations

import sys
from typing import Any, Callable, Optional

from ..errors import Unsupported


#: Functions of torch that every call needs; None until the first call after torch was imported.
_compiles: Optional[Callable[[], bool]] = None
_records: Any = None
_transform: Any = None


def _find_torch() -> Optional[Callable[[], bool]]:
    """Sets the functions of torch. Returns the first, or None if torch has not been imported completely."""
    global _compiles, _records, _transform
    torch = sys.modules.get("torch")
    compiler = getattr(torch, "compiler", None)
    if compiler is None or not hasattr(torch, "is_grad_enabled"):
        return None
    _records = torch.is_grad_enabled  # type: ignore[union-attr]
    _transform = torch._C._functorch.peek_interpreter_stack  # type: ignore[union-attr]
    _compiles = getattr(compiler, "is_compiling", bool)  # torch from 2.1 on has it
    return _compiles


def needs_gradient(*tensors: Any) -> bool:
    """Returns whether torch must record gradients for one of these tensors. Raises Unsupported inside torch.func transforms."""
    compiles = _compiles or _find_torch()
    if compiles is None:
        return False
    if not compiles() and _transform() is not None:
        raise Unsupported("torch.vmap and the other transforms of torch.func are not supported: a call exchanges rows with other ranks, "
                          "which do not run the transform. Give the rows of all samples to one call, and use backward() for gradients")
    if _records():
        for each in tensors:
            if each is not None and getattr(each, "requires_grad", False):
                return True
    return False


def is_plain() -> bool:
    """Returns whether the current call is neither traced nor in a torch.func transform."""
    compiles = _compiles or _find_torch()
    return compiles is None or (not compiles() and _transform() is None)


def refuse_gradient(call: str, instead: str, **tensors: Any) -> None:
    """Raises Unsupported if torch must record gradients for one of these tensors in a call that does not support gradients."""
    for name, each in tensors.items():
        if each is not None and needs_gradient(each[0] if isinstance(each, tuple) else each):
            raise Unsupported(f"{call}: {name} requires a gradient, which this call does not have: give {name}.detach(), call it under "
                              f"torch.no_grad(), or use {instead}")


def is_traced() -> bool:
    """Returns whether torch.compile is tracing the current call."""
    compiles = _compiles or _find_torch()
    return compiles is not None and compiles()
