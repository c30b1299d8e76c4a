# SPDX-License-Identifier: Apache-2.0
"""Handles Ctrl-C while the main thread is in a library call.

Python runs signal handlers between bytecode instructions, but a call waiting for a peer may not return before its deadline.
Therefore, the interpreter writes the signal number to a socket (``signal.set_wakeup_fd``). A thread that reads the socket
aborts this process's groups that are in a call; the call then returns, and Python raises KeyboardInterrupt. This mechanism is
inactive if SIGINT has a handler other than Python's default, or if the program has its own wakeup descriptor, as with a running
asyncio loop.
"""
from __future__ import annotations

import os
import signal
import socket
import threading
import time
import weakref
from typing import TYPE_CHECKING, List, MutableSet

from .._abi.ffi import library
from ..errors import Code

if TYPE_CHECKING:
    from ..group import Group

_groups: "MutableSet[Group]" = weakref.WeakSet()
_sockets: List[socket.socket] = []


def watch(group: "Group") -> None:
    """Allows Ctrl-C to abort `group` during a call. Has an effect only in the main thread; :func:`.run.run_ranks` stops its
    ranks itself."""
    _groups.add(group)
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    if not _sockets:
        _sockets[:] = socket.socketpair()
        _sockets[1].setblocking(False)
        threading.Thread(target=_serve, args=(_sockets[0],), name="switchyard interrupts", daemon=True).start()
    ours = _sockets[1].fileno()
    before = signal.set_wakeup_fd(ours, warn_on_full_buffer=False)
    if before not in (-1, ours):
        signal.set_wakeup_fd(before)  # restores the program's own descriptor


def _serve(reader: socket.socket) -> None:
    while True:
        numbers = reader.recv(64)
        if not numbers:
            return
        if signal.SIGINT in numbers and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            time.sleep(0.05)  # meanwhile, a main thread that is in no call raises KeyboardInterrupt
            _abort_those_in_calls()


def _abort_those_in_calls() -> None:
    for group in list(_groups):
        if group._lock.acquire(blocking=False):  # in no call
            group._lock.release()
        elif group._owned.pointer:  # stays valid until the call has returned
            library().functions.sy_group_abort(group._owned.pointer, Code.SYSTEM)


def _forked() -> None:
    """Resets the state in a forked child: the socket belongs to the parent, and the child's signals must not affect the
    parent's groups."""
    if _sockets:
        before = signal.set_wakeup_fd(-1)
        if before not in (-1, _sockets[1].fileno()):
            signal.set_wakeup_fd(before)
        for each in _sockets:
            each.close()
        _sockets.clear()
    _groups.clear()


os.register_at_fork(after_in_child=_forked)
