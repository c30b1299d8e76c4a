# SPDX-License-Identifier: Apache-2.0
"""Numbers of objects, for operators of torch: a graph can hold a number where it cannot hold an object."""
from __future__ import annotations

import itertools
import weakref
from typing import Any, MutableMapping

from .._abi.names import invalid

#: Begins at 2, because torch.compile takes 0 and 1 for constants.
_numbers = itertools.count(2)
_objects: MutableMapping[int, Any] = weakref.WeakValueDictionary()


def torch_for(what: str) -> Any:
    """torch, for a function that cannot do without."""
    try:
        import torch
    except ImportError as error:
        raise ImportError(f"{what} needs torch (PyTorch), which cannot be imported here: {error}", name="torch") from None
    return torch


def number_of(thing: Any) -> int:
    """A number for `thing` that no other object has or will have in this process."""
    number = next(_numbers)
    _objects[number] = thing
    return number


def object_of(number: int) -> Any:
    """The object with that number."""
    thing = _objects.get(number)
    if thing is None:
        invalid(f"object {number} is gone: a compiled graph uses an exchange, a handle or an output that nothing refers to any more")
    return thing
