# SPDX-License-Identifier: Apache-2.0
"""Tests whether torch records gradients for a call or traces it. Never imports torch."""
from __future__ import annotations

import sys
from typing import Any

from ..errors import Unsupported


def needs_gradient(*tensors: Any) -> bool:
    """Returns whether torch must record gradients for one of these tensors. Raises Unsupported inside torch.func transforms."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if not is_traced() and torch._C._functorch.peek_interpreter_stack() is not None:
        raise Unsupported("torch.vmap and the other transforms of torch.func are not supported: a call exchanges rows with other ranks, "
                          "which do not run the transform. Give the rows of all samples to one call, and use backward() for gradients")
    if not torch.is_grad_enabled():
        return False
    for each in tensors:
        if each is not None and getattr(each, "requires_grad", False):
            return True
    return False


def refuse_gradient(call: str, instead: str, **tensors: Any) -> None:
    """Raises Unsupported if torch must record gradients for one of these tensors in a call that does not support gradients."""
    for name, each in tensors.items():
        if needs_gradient(each[0] if isinstance(each, tuple) else each):
            raise Unsupported(f"{call}: {name} requires a gradient, which this call does not have: give {name}.detach(), call it under "
                              f"torch.no_grad(), or use {instead}")


def is_traced() -> bool:
    """Returns whether torch.compile is tracing the current call."""
    torch = sys.modules.get("torch")
    compiler = getattr(torch, "compiler", None)  # torch from 2.1 on has is_compiling
    return compiler is not None and hasattr(compiler, "is_compiling") and compiler.is_compiling()
