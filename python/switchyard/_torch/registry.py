# SPDX-License-Identifier: Apache-2.0
"""Numbers for objects passed to torch operators, because graphs can contain numbers but not objects."""
from __future__ import annotations

import itertools
import weakref
from typing import Any, MutableMapping

from .._abi.names import invalid

#: Starts at 2, because torch.compile treats 0 and 1 as constants.
_numbers = itertools.count(2)
_objects: MutableMapping[int, Any] = weakref.WeakValueDictionary()


def torch_for(what: str) -> Any:
    """Returns torch, for a function that requires it."""
    try:
        import torch
    except ImportError as error:
        raise ImportError(f"{what} needs torch (PyTorch), which cannot be imported here: {error}", name="torch") from None
    return torch


def number_of(thing: Any) -> int:
    """Returns a number for `thing` that is unique in this process and never reused."""
    number = next(_numbers)
    _objects[number] = thing
    return number


def object_of(number: int) -> Any:
    """Returns the object with that number."""
    thing = _objects.get(number)
    if thing is None:
        invalid(f"object {number} is gone: a compiled graph uses an exchange, a handle or an output that nothing refers to any more")
    return thing
