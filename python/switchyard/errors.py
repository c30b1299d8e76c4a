# SPDX-License-Identifier: Apache-2.0
"""Errors as exceptions.

Every library error is a subclass of :class:`SwitchyardError` with the library's error text and code. If Python has an exception
with the same meaning, the class also derives from it, so ``except TimeoutError`` works as expected. All classes can be pickled
with their details.
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
    """Kinds of errors, with the values of ``sy_code``."""

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
    """Details of a wait that timed out."""

    operation: str  #: "dispatch", "combine", ...
    site: str  #: name of the flag (docs/concepts/flags.md)
    call: int  #: number of the call on its object, from 1
    waiting_rank: int
    awaited_rank: int
    expected: int  #: smallest flag word that would have ended the wait
    seen: int  #: last flag word read
    waited_ms: float
    silent_ms: float = -1.0  #: since the last message of `awaited_rank`, a process on another host; else negative


class SwitchyardError(RuntimeError):
    """A failed call. ``str(error)`` is the library's error text, which contains the argument, its value and the allowed
    values."""

    code: Code = Code.SYSTEM
    peers_know = False  # whether the library has reported the error to the peers

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def _details(self) -> Tuple[Any, ...]:
        """Returns the constructor arguments, for pickle."""
        return (self.text,)

    def __reduce__(self) -> Tuple[Any, ...]:
        return (type(self), self._details())


class InvalidArgument(SwitchyardError, ValueError):
    """An argument violates its contract."""

    code = Code.INVALID_ARGUMENT
    found_by_python = False


class InvalidType(InvalidArgument, TypeError):
    """An argument has a type not accepted by the function."""


class Unsupported(SwitchyardError):
    """A valid request that is not supported by this backend, machine or combination."""

    code = Code.UNSUPPORTED


class HeapExhausted(SwitchyardError, MemoryError):
    """The symmetric heap is exhausted: increase the group's ``heap_bytes``. ``Exchange.heap_bytes(...)``, or the function of
    the same name in another class, returns the size that an object needs."""

    code = Code.HEAP_EXHAUSTED


class PoolExhausted(SwitchyardError, MemoryError):
    """The output pool of an exchange is exhausted: drop outputs, or increase ``pool_bytes``."""

    code = Code.POOL_EXHAUSTED


class CapacityExceeded(SwitchyardError):
    """The number of rows exceeds the caller's capacity, with ``overflow="fail"``. All ranks raise this error, and everything
    remains usable."""

    code = Code.CAPACITY_EXCEEDED


class PeerTimeout(SwitchyardError, TimeoutError):
    """A wait exceeded its deadline. :attr:`report` describes the wait."""

    code = Code.PEER_TIMEOUT

    def __init__(self, text: str, report: Optional[WaitReport] = None) -> None:
        super().__init__(text)
        self.report = report

    def _details(self) -> Tuple[Any, ...]:
        return (self.text, self.report)


class PeerFailed(SwitchyardError):
    """A peer reported an error, left or died. :attr:`rank` is the peer. :attr:`reason` is the code that it reported:
    ``Code.SYSTEM`` if it died or left; a number above 11 if it passed a custom number to :meth:`Group.abort`."""

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
    """The group could not be formed. :attr:`missing_ranks` contains the ranks that never arrived; it is empty if there was
    another cause."""

    code = Code.RENDEZVOUS

    def __init__(self, text: str, missing_ranks: Tuple[int, ...] = ()) -> None:
        super().__init__(text)
        self.missing_ranks = tuple(missing_ranks)

    def _details(self) -> Tuple[Any, ...]:
        return (self.text, self.missing_ranks)


class FileError(SwitchyardError, OSError):
    """A file could not be read, written or parsed."""

    code = Code.IO


class SystemFailure(SwitchyardError):
    """The operating system rejected a request, or memory is exhausted."""

    code = Code.SYSTEM


class LibraryNotFound(ImportError):
    """The Switchyard shared library is missing or incompatible with this package."""


CLASSES = {
    cls.code: cls
    for cls in (InvalidArgument, Unsupported, HeapExhausted, PoolExhausted, CapacityExceeded, PeerTimeout, PeerFailed, Mismatch,
                RendezvousError, FileError, SystemFailure)
}
