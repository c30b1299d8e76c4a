# SPDX-License-Identifier: Apache-2.0
"""What can go wrong, as exceptions.

Every failure of the library is a subclass of :class:`SwitchyardError`, which has the library's text and its code. Where Python has
an exception of the same meaning, the class is also one of those, so that ``except TimeoutError`` does what it says. All of them can
be pickled, with their details.
"""
from __future__ import annotations

import enum
from typing import Any, NamedTuple, Optional, Tuple

__all__ = [
    "Code", "WaitReport", "SwitchyardError", "InvalidArgument", "InvalidType", "Unsupported", "HeapExhausted", "PoolExhausted",
    "CapacityExceeded", "PeerTimeout", "PeerFailed", "Mismatch", "RendezvousError", "FileError", "SystemFailure",
    "LibraryNotFound",
]


class Code(enum.IntEnum):
    """What kind of failure it is; the values of ``switchyard_code_t``."""

    OK = 0
    INVALID_ARGUMENT = 1
    UNSUPPORTED = 2
    HEAP_EXHAUSTED = 3
    POOL_EXHAUSTED = 4
    CAPACITY_EXCEEDED = 5
    PEER_TIMEOUT = 6
    PEER_FAILED = 7
    MISMATCH = 8
    RENDEZVOUS = 9
    IO = 10
    SYSTEM = 11


class WaitReport(NamedTuple):
    """The full story of a wait that did not end."""

    operation: str  #: "dispatch", "combine", ...
    site: str  #: name of the flag (docs/concepts/flags.md)
    call: int  #: number of the call on its object, from 1
    waiting_rank: int
    awaited_rank: int
    expected: int  #: smallest flag word that would have ended the wait
    seen: int  #: last flag word read
    waited_ms: float
    silent_ms: float = -1.0  #: how long nothing has come from `awaited_rank`, if it is a process on another host; negative otherwise


class SwitchyardError(RuntimeError):
    """A failed call. ``str(error)`` is the library's text, which names the argument, what was given, and what is allowed."""

    code: Code = Code.SYSTEM
    peers_know = False  # whether the library has reported it to the peers

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def _details(self) -> Tuple[Any, ...]:
        """Arguments of the constructor, for pickle."""
        return (self.text,)

    def __reduce__(self) -> Tuple[Any, ...]:
        return (type(self), self._details())


class InvalidArgument(SwitchyardError, ValueError):
    """An argument is outside its contract."""

    code = Code.INVALID_ARGUMENT
    found_by_python = False


class InvalidType(InvalidArgument, TypeError):
    """An argument has a type that the function does not take."""


class Unsupported(SwitchyardError):
    """Legal elsewhere, not available with this backend, machine or combination."""

    code = Code.UNSUPPORTED


class HeapExhausted(SwitchyardError, MemoryError):
    """The symmetric heap has no room left: give the group more ``heap_bytes``; ``Exchange.heap_bytes(...)``, and the function of the same
    name of other objects, says how much an object needs."""

    code = Code.HEAP_EXHAUSTED


class PoolExhausted(SwitchyardError, MemoryError):
    """The output pool of one exchange has no room left: let go of outputs, or give it more ``pool_bytes``."""

    code = Code.POOL_EXHAUSTED


class CapacityExceeded(SwitchyardError):
    """More rows than the caller's capacity, with ``overflow="fail"``. All ranks report it; everything stays usable."""

    code = Code.CAPACITY_EXCEEDED


class PeerTimeout(SwitchyardError, TimeoutError):
    """A wait passed its deadline. :attr:`report` says which."""

    code = Code.PEER_TIMEOUT

    def __init__(self, text: str, report: Optional[WaitReport] = None) -> None:
        super().__init__(text)
        self.report = report

    def _details(self) -> Tuple[Any, ...]:
        return (self.text, self.report)


class PeerFailed(SwitchyardError):
    """A peer reported an error, left or died: its :attr:`rank`, and the :attr:`reason` that it gave (``Code.SYSTEM`` if it died or
    left, a number above 11 if it called :meth:`Group.abort` with one of its own)."""

    code = Code.PEER_FAILED

    def __init__(self, text: str, rank: int = -1, reason: int = Code.SYSTEM) -> None:
        super().__init__(text)
        self.rank = rank
        self.reason = Code(reason) if reason in Code._value2member_map_ else reason

    def _details(self) -> Tuple[Any, ...]:
        return (self.text, self.rank, int(self.reason))


class Mismatch(SwitchyardError):
    """The ranks made different calls."""

    code = Code.MISMATCH


class RendezvousError(SwitchyardError):
    """The group could not be formed. :attr:`missing_ranks` never came; empty if the cause lies elsewhere."""

    code = Code.RENDEZVOUS

    def __init__(self, text: str, missing_ranks: Tuple[int, ...] = ()) -> None:
        super().__init__(text)
        self.missing_ranks = tuple(missing_ranks)

    def _details(self) -> Tuple[Any, ...]:
        return (self.text, self.missing_ranks)


class FileError(SwitchyardError, OSError):
    """A file could not be read, written or understood."""

    code = Code.IO


class SystemFailure(SwitchyardError):
    """The operating system refused something, or memory is exhausted."""

    code = Code.SYSTEM


class LibraryNotFound(ImportError):
    """The shared library of Switchyard is missing, or is not one that this package can use."""


CLASSES = {
    cls.code: cls
    for cls in (InvalidArgument, Unsupported, HeapExhausted, PoolExhausted, CapacityExceeded, PeerTimeout, PeerFailed, Mismatch,
                RendezvousError, FileError, SystemFailure)
}
