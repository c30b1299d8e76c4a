# SPDX-License-Identifier: Apache-2.0
"""Runs ranks as threads, for small programs, examples and tests."""
from __future__ import annotations

import threading
import time
from typing import Any, Callable, List, Optional, TypeVar

from ._abi.arguments import checked
from .errors import Code, PeerFailed
from .group import Group

__all__ = ["run_ranks"]

Result = TypeVar("Result")
#: Seconds within which ranks must finish after the calling thread is interrupted. Ranks that take longer are running other
#: Python code.
_GRACE = 5.0


@checked("run_ranks")
def run_ranks(function: Callable[..., Result], world: int, *arguments: Any, heap_bytes: int = 256 << 20, **options: Any) -> List[Result]:
    """Calls ``function(group, *arguments)`` once for each of `world` ranks, each in a separate thread, and returns the results
    in rank order. `options` are the keywords of :class:`Group`. A rank leaves its group when its function returns. If a rank
    raises an exception, or returns while others still need it, their calls end with :class:`PeerFailed`. The original exception
    is raised here with its rank as a note. Ctrl-C ends the calls of all ranks.

    Use this function for experiments and tests, because the threads share one interpreter: library calls run without the
    interpreter lock, but Python code does not. Production programs start one process per rank and use
    ``Group.from_environment``.
    """
    return _Ranks(function, Group.threads(world, heap_bytes, **options), arguments).run()


class _Ranks:
    """The threads of one :func:`run_ranks` call."""

    def __init__(self, function: Callable[..., Any], groups: List[Group], arguments: Any) -> None:
        self._function, self._groups, self._arguments = function, groups, arguments
        self._results: List[Any] = [None] * len(groups)
        self._errors: List[Optional[BaseException]] = [None] * len(groups)
        self._returned = [False] * len(groups)

    def _rank(self, r: int) -> None:
        group = self._groups[r]
        try:
            self._results[r] = self._function(group, *self._arguments)
            self._returned[r] = True
        except BaseException as error:  # run() raises it again in the calling thread
            self._errors[r] = error
            if not group.closed:
                group.abort(Code.SYSTEM)
        else:
            group.close()

    def run(self) -> List[Any]:
        # Uses daemon threads, so a rank that keeps computing after Ctrl-C does not keep the process alive.
        threads = [threading.Thread(target=self._rank, args=(r,), name=f"switchyard rank {r}", daemon=True) for r in range(len(self._groups))]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException:
            self._abort(threads)
            raise
        for group in self._groups:
            group.close()
        self._raise()
        return self._results

    def _abort(self, threads: List[threading.Thread]) -> None:
        """Stops all ranks after an exception in the calling thread."""
        for group in self._groups:
            if not group.closed:
                group.abort(Code.SYSTEM)
        deadline = time.monotonic() + _GRACE
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        for group, thread in zip(self._groups, threads):
            if not thread.is_alive():
                group.close()

    def _raise(self) -> None:
        """Raises the exception of the first rank that did not fail because of a peer, if any."""
        found = [(r, error) for r, error in enumerate(self._errors) if error is not None]
        if not found:
            return
        causes = [each for each in found if not isinstance(each[1], PeerFailed)] or found
        (r, error), world = causes[0], len(self._groups)
        alike = [other for other, also in causes if type(also) is type(error) and str(also) == str(error)]  # what ranks agreed on
        notes = [f"raised by {_ranks(alike)} of {world} in run_ranks"]
        if isinstance(error, PeerFailed) and 0 <= error.rank < world and self._returned[error.rank]:
            notes.append(f"the function of rank {error.rank} had returned, or did not make this call")
        notes += [f"rank {other} raised {type(also).__name__}: {also}" for other, also in [each for each in causes if each[0] not in alike][:3]]
        _annotate(error, notes)
        raise error


def _ranks(numbers: List[int]) -> str:
    """Returns "rank 2", "ranks 0 and 2" or "ranks 0 to 3"."""
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"ranks {numbers[0]} to {numbers[-1]}"
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def _annotate(error: BaseException, notes: List[str]) -> None:
    """Adds notes to an exception. Python 3.11 and later print them in tracebacks. PeerFailed errors include them in their text
    instead."""
    if isinstance(error, PeerFailed):
        error.text = "; ".join([error.text, *notes])
        error.args = (error.text,)
    elif hasattr(error, "add_note"):
        for note in notes:
            error.add_note(note)
    else:
        error.__notes__ = notes  # type: ignore[attr-defined]
