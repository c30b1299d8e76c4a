# SPDX-License-Identifier: Apache-2.0
"""The shared library: locating it, checking it at load time, and converting its errors to exceptions.

Calls go through ctypes, which releases the interpreter lock during each call. Structs are created once per object and refilled
for each call, because creating them takes longer than the call.
"""
from __future__ import annotations

import collections
import ctypes
import os
import threading
import weakref
from ctypes import byref, c_char_p, c_double, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any, Callable, Deque, Dict, List, MutableSet, NamedTuple, NoReturn, Optional, Tuple

from ..errors import CLASSES, Code, LibraryNotFound, PeerFailed, PeerTimeout, RendezvousError, SwitchyardError, WaitReport
from . import signatures, structs
from .names import invalid
from .words import in_python

_PACKAGE = Path(__file__).resolve().parent.parent
#: Library version that this package requires.
_MAJOR, _MINOR = 0, 2

# The letters of signatures.py.
_TYPES = {"p": c_void_p, "i": c_int32, "u": c_uint32, "l": c_int64, "z": c_size_t, "s": c_char_p, "d": c_double}


class Library(NamedTuple):
    path: str
    functions: Any  # the CDLL
    version: str


def _build_trees() -> List[Path]:
    """Returns the build folders of the repository clone that contains this package, if any."""
    root = _PACKAGE.parent.parent
    if not (root / "include" / "switchyard" / "c" / "switchyard.h").is_file():
        return []
    return [root / "build" / preset for preset in ("cuda", "release")]


def _candidates(stem: str, variable: str) -> List[str]:
    """Returns the possible locations of a library, in search order."""
    given = os.environ.get(variable)
    if given:
        return [given]
    folders = [_PACKAGE / "lib", *_build_trees()]
    found = [str(path) for folder in folders for path in sorted(folder.glob(f"{stem}*.so*")) if stem_of(path) == stem]
    return found[:1] or [f"{stem}.so.{_MAJOR}"]


def stem_of(path: Path) -> str:
    """Returns the name of a library without its version and auditwheel suffix."""
    return path.name.split(".")[0].split("-")[0]


def _open(stem: str, variable: str, signatures: Dict[str, str], made_by: str) -> Library:
    path = _candidates(stem, variable)[0]
    try:
        functions = ctypes.CDLL(path)
    except OSError as error:
        raise LibraryNotFound(f"{stem} could not be loaded: {error}. {variable} may name it; {made_by}") from None
    for name, arguments in signatures.items():
        function = getattr(functions, name, None)
        if function is None:
            raise LibraryNotFound(f"{path} has no function {name}: it is not the library of this package (version {_MAJOR}.{_MINOR})")
        function.argtypes = [_TYPES[letter] for letter in arguments]
        function.restype = c_int32
    return Library(path, functions, "")


def _load() -> Library:
    library = _open("libswitchyard", "SWITCHYARD_LIBRARY", signatures.EXCHANGE,
                    "wheels have it, and in a clone `./dev build --target switchyard_shared` makes it")
    functions = library.functions
    for name in ("sy_last_error", "sy_version_string"):
        getattr(functions, name).restype = c_char_p
        getattr(functions, name).argtypes = []
    major, minor = c_int32(), c_int32()
    functions.sy_version(byref(major), byref(minor), None)
    version = functions.sy_version_string().decode()
    if (major.value, minor.value) != (_MAJOR, _MINOR):
        raise LibraryNotFound(f"{library.path} is version {version}; this package needs {_MAJOR}.{_MINOR}")
    size = c_size_t()
    for struct in structs.ALL:
        functions.sy_struct_bytes(struct.name.encode(), byref(size))
        if size.value < ctypes.sizeof(struct):
            raise LibraryNotFound(f"{library.path} is older than this package: its {struct.name} has {size.value} bytes, not "
                                  f"{ctypes.sizeof(struct)}")
    return library._replace(version=version)


_library: Optional[Library] = None
_layer: Optional[Library] = None


def library() -> Library:
    """Returns libswitchyard, loading it on the first call."""
    global _library
    if _library is None:
        _library = _load()
    return _library


_bare: Dict[str, Any] = {}


def bare(name: str) -> Any:
    """Returns a library function without argument conversion, which is faster; its arguments must be ctypes objects of the
    correct types."""
    function = _bare.get(name)
    if function is None:
        source = layer_library() if name in signatures.LAYER else library()
        function = _bare[name] = source.functions[name]  # a separate object, unlike the attribute
        function.restype = c_int32
    return function


def layer_library() -> Library:
    """Returns libswitchyard_layer. Only wheels built with `--layer` include it, because it adds 40 MB of oneDNN."""
    global _layer
    if _layer is None:
        library()
        _layer = _open("libswitchyard_layer", "SWITCHYARD_LAYER_LIBRARY", signatures.LAYER,
                       "wheels that were made by `./dev wheel --layer` have it, and in a clone `./dev build --target "
                       "switchyard_layer_shared` makes it")
    return _layer


def _report() -> WaitReport:
    r = structs.WaitReport()
    library().functions.sy_last_wait_report(byref(r))
    return WaitReport((r.operation or b"").decode(), (r.site or b"").decode(), r.call, r.waiting_rank, r.awaited_rank, r.expected,
                      r.seen, r.waited_ms, r.silent_ms)


def failure(code: int) -> SwitchyardError:
    """Returns the exception for this thread's last failed call, which returned `code`."""
    functions = library().functions
    text = in_python(functions.sy_last_error().decode(errors="replace"))
    if code == Code.PEER_TIMEOUT:
        return PeerTimeout(text, _report())
    if code == Code.PEER_FAILED:
        rank, reason = c_int32(-1), c_int32(Code.SYSTEM)
        functions.sy_last_peer_failure(byref(rank), byref(reason))
        return PeerFailed(text, rank.value, reason.value)
    if code == Code.RENDEZVOUS:
        ranks = c_uint64()
        functions.sy_last_missing_ranks(byref(ranks))
        return RendezvousError(text, tuple(r for r in range(64) if ranks.value >> r & 1))
    return CLASSES[Code(code)](text)


def check(code: int) -> None:
    """Raises the exception for `code` if it is an error."""
    if code:
        _raise(code)


def check_collective(code: int) -> None:
    """Like check(), for collective library functions, which report their errors to the peers."""
    if code:
        error = failure(code)
        error.peers_know = True
        raise error from None


def number_from(function: Any, *arguments: Any) -> int:
    """Returns the number that a function writes to its last argument, an int64_t pointer."""
    number = c_int64()
    check(function(*arguments, byref(number)))
    return number.value


def _raise(code: int) -> NoReturn:
    raise failure(code) from None


# Number of forks between the process that imported this module and the current process. Objects belong to the process that
# created them. A forked child lacks that process's threads and part of its memory, so calls in the child raise an exception,
# and the child releases no objects.
_process = [0]
_locks: "MutableSet[CallLock]" = weakref.WeakSet()


def _forked() -> None:
    """Runs in the child. Clears the pointers of objects with calls; the calls' fast paths check only these pointers and then
    fail in :func:`alive`. Resets locks held by other threads of the parent."""
    _process[0] += 1
    for lock in list(_locks):
        lock.reset()
        for owned in list(lock.members):
            owned.pointer = None


os.register_at_fork(after_in_child=_forked)


class CallLock:
    """Serializes the calls of a group. Objects destroyed on another thread during a call are released after the call returns.
    The destroying thread must not wait, because the call may be waiting for the thread that runs the garbage collection."""

    __slots__ = ("acquire", "release_only", "later", "members", "_lock", "__weakref__")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        #: Objects of the group that have calls; they are closed with the group.
        self.members: MutableSet[Owned] = weakref.WeakSet()
        _locks.add(self)
        # Callers of `release_only` must then call `give_back` if `later` is not empty.
        self.acquire, self.release_only = self._lock.acquire, self._lock.release
        self.later: Deque[Tuple[Callable[[int], Any], int]] = collections.deque()

    def release(self) -> None:
        self._lock.release()
        if self.later:
            self.give_back()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.release()

    def reset(self) -> None:
        """Resets the lock in a forked child, where no thread holds it."""
        self._lock._at_fork_reinit()  # type: ignore[attr-defined]  # as the standard library's own modules do
        self.later.clear()

    def give_back_soon(self, destroy: Callable[[int], Any], pointer: int) -> None:
        """Releases the object immediately if no thread is in a call; otherwise the thread in the call releases it
        afterwards."""
        self.later.append((destroy, pointer))
        self.give_back()

    def give_back(self) -> None:
        while self.later and self._lock.acquire(blocking=False):
            try:
                destroy, pointer = self.later.popleft()
                destroy(pointer)
            except IndexError:
                pass  # another thread was faster
            finally:
                self._lock.release()


class Owned:
    """A library object, released once when it is no longer referenced. `keeps`: Python objects to keep alive as long as this
    object. With a `lock`, it is not released while a thread is in a call of its group."""

    __slots__ = ("pointer", "_destroy", "_lock", "_keeps", "_made_in", "__weakref__")

    def __init__(self, pointer: Optional[int], destroy: Callable[[int], Any], *keeps: Any, lock: Optional[CallLock] = None) -> None:
        self.pointer = pointer
        self._destroy = destroy
        self._lock = lock
        self._keeps = keeps
        self._made_in = _process[0]

    def __reduce__(self) -> Any:
        raise TypeError("an object of switchyard belongs to its process and cannot be pickled or copied")

    def close(self) -> None:
        """Releases the object immediately. May be called twice."""
        pointer, self.pointer = self.pointer, None
        if pointer and self._made_in == _process[0]:
            if self._lock is None:
                self._destroy(pointer)
            else:
                with self._lock:
                    self._destroy(pointer)
        self._keeps = ()

    def __del__(self) -> None:
        pointer = getattr(self, "pointer", None)
        if pointer and self._made_in == _process[0]:
            if self._lock is None:
                self._destroy(pointer)
            else:
                self._lock.give_back_soon(self._destroy, pointer)


def alive_here(owned: Owned) -> Optional[int]:
    """Returns the pointer of `owned`, or None if the object was closed or created before this process was forked."""
    return owned.pointer if owned._made_in == _process[0] else None


def alive(owned: Owned, what: str, group: Any = None) -> int:
    """Returns the pointer of `owned`. Raises InvalidArgument if the object or its group was closed, or if the object was
    created before this process was forked."""
    pointer = owned.pointer
    if pointer and owned._made_in == _process[0]:
        return pointer
    if owned._made_in != _process[0]:
        invalid(f"{what} was made before this process was forked, and belongs to the process that made it: form the group in the process "
                f"that uses it")
    if group is not None and group.closed:
        invalid(f"{what} is closed, because its group is closed")
    invalid(f"{what} is closed")


__all__ = ["CallLock", "alive", "bare", "byref", "check", "check_collective", "failure", "layer_library", "library", "Owned", "structs"]
