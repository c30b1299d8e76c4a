# SPDX-License-Identifier: Apache-2.0
"""Ranks for small programs, examples and tests."""
from __future__ import annotations

import threading
from typing import Any, Callable, List, Optional, TypeVar

from .errors import Code, PeerFailed
from .group import Group

__all__ = ["run_ranks"]

Result = TypeVar("Result")


def run_ranks(function: Callable[..., Result], world: int, *arguments: Any, heap_bytes: int = 256 << 20, **options: Any) -> List[Result]:
    """Calls ``function(group, *arguments)`` once for each of `world` ranks, each in a thread of its own, and returns the results in rank
    order. `options` are those of :class:`Group`. If a rank raises, the others' calls end with :class:`PeerFailed`, and its exception is
    raised here.

    Threads share one interpreter, so this is for trying things out and for tests: the library works outside the interpreter's lock, but
    Python code does not. Programs start a process for each rank, and use ``Group.from_environment``.
    """
    groups = Group.threads(world, heap_bytes, **options)
    results: List[Any] = [None] * world
    errors: List[Optional[BaseException]] = [None] * world

    def rank(r: int) -> None:
        try:
            results[r] = function(groups[r], *arguments)
        except BaseException as error:  # raised again below, in the calling thread
            errors[r] = error
            if not groups[r].closed:
                groups[r].abort(Code.SYSTEM)

    threads = [threading.Thread(target=rank, args=(r,), name=f"switchyard rank {r}") for r in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for group in groups:
        group.close()
    found = [error for error in errors if error is not None]
    if found:
        raise next((error for error in found if not isinstance(error, PeerFailed)), found[0])
    return results
