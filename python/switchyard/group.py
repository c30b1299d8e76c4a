# SPDX-License-Identifier: Apache-2.0
"""The ranks that exchange rows."""
from __future__ import annotations

import contextlib
import ctypes
import functools
import ipaddress
import json
import os
import secrets
import socket
import sys
from types import TracebackType
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple, Type, TypeVar

from ._internal import interrupts as _interrupts
from ._abi import names as _names
from ._abi.arguments import checked
from ._abi.ffi import CallLock, Owned, alive, byref, check, check_collective, library, structs
from ._torch.registry import torch_for
from .errors import Code, InvalidArgument, SwitchyardError, Unsupported

__all__ = ["Group", "WaitStatistics", "first_expert"]

#: Longest deadline, in effect never.
_FOREVER = 2**63 - 1


class WaitStatistics(NamedTuple):
    """Time that a rank spent waiting for one peer since the group was formed."""

    total_ms: float
    max_ms: float
    waits: int  #: number of waits that did not succeed at once


@checked("first_expert")
def first_expert(num_experts: int, world: int, rank: int) -> int:
    """Returns the first expert of `rank`, which holds ``range(first_expert(E, W, rank), first_expert(E, W, rank + 1))``."""
    first = ctypes.c_int32()
    check(library().functions.sy_first_expert(num_experts, world, rank, byref(first)))
    return first.value


def _milliseconds(seconds: Optional[float]) -> int:
    if seconds is None:
        return _FOREVER
    return min(int(seconds * 1000), _FOREVER)


@checked("Group.from_environment")
def _options(heap_bytes: int = 256 << 20, *, timeout: Optional[float] = 30.0, rendezvous_timeout: float = 60.0, backend: str = "cpu",
             device: int = -1, workers: int = 1, num_sms: int = 0, host: str = "", network: str = "sockets",
             silence: Optional[float] = None) -> structs.GroupOptions:
    return structs.GroupOptions(
        heap_bytes=heap_bytes, timeout_ms=_milliseconds(timeout),
        rendezvous_timeout_ms=_milliseconds(rendezvous_timeout), num_warps=workers,
        backend=_names.value_of(_names.BACKENDS, "backend", backend), device=device, num_sms=num_sms,
        host=host.encode(), network=_names.value_of(_names.NETWORKS, "network", network),
        silence_ms=0 if silence is None else _milliseconds(silence))


def _kernel() -> str:
    """Identifies the running kernel and network namespace. Processes that meet at a Unix socket have both in common."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return ""


def _address() -> str:
    """Returns an address of this machine that other machines can reach: the local address of the route to MASTER_ADDR, else the
    address of the host name, else that of the default route. Returns "" if all of them are loopback addresses."""
    ways = [os.environ.get("MASTER_ADDR", ""), socket.gethostname(), "192.0.2.1", "2001:db8::1"]  # the last two belong to no host
    for way in filter(None, ways):
        try:
            family, _, _, _, target = socket.getaddrinfo(way, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:  # nothing is sent
                probe.connect(target)
                address = probe.getsockname()[0]
        except OSError:
            continue
        if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            return address
    return ""


def _own_master_name() -> str:
    """Returns MASTER_ADDR if it is this machine's own name, which all ranks of a process group have, so that rank 0 can listen
    on every address; otherwise ""."""
    name = os.environ.get("MASTER_ADDR", "")
    return name if name.partition(".")[0].lower() == socket.gethostname().partition(".")[0].lower() != "localhost" else ""


def _network_store() -> str:
    """Returns SWITCHYARD_STORE if it is a TCP address; otherwise an address of this machine, or its name, with a currently free
    port outside the range of automatic assignment."""
    given = os.environ.get("SWITCHYARD_STORE", "")
    if given.startswith("tcp://"):
        return given
    found = _address()
    address = found or _own_master_name()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for _ in range(100 if address else 0):
        port = 20000 + secrets.randbelow(10000)
        try:
            with socket.socket(family) as probe:
                probe.bind((found, port))  # "": all addresses
        except OSError:
            continue
        return f"tcp://[{address}]:{port}" if family == socket.AF_INET6 else f"tcp://{address}:{port}"
    return ""


def _meeting(rank: int, gather: Callable[[Tuple[str, ...]], Sequence[Sequence[str]]]) -> Tuple[str, str]:
    """Returns the store and the token that rank 0 generated. `gather` collects texts of every rank on all ranks, in rank
    order."""
    drawn = (f"unix:@switchyard-{secrets.token_hex(16)}", secrets.token_hex(16)) if rank == 0 else ()
    everybody = gather((socket.gethostname(), _kernel(), *drawn))
    machine, kernel, store, token = everybody[0]
    others = [(r, each[0]) for r, each in enumerate(everybody) if tuple(each[:2]) != (machine, kernel)]
    if others:
        store = gather((_network_store() if rank == 0 else "",))[0][0]
        if not store:
            raise Unsupported(f"rank {others[0][0]} is on {others[0][1]}, rank 0 on {machine}, which has no address that others reach: set "
                              "SWITCHYARD_STORE=tcp://ADDRESS:PORT on rank 0")
    return store, token


class _Collective:
    """Context of a collective call: one thread at a time. An invalid argument that Python detects is announced to the peers
    like one that the library detects: their calls end, and so does the group."""

    __slots__ = ("_acquire", "_release", "_group")

    def __init__(self, lock: CallLock, group: Owned) -> None:
        self._acquire = lock.acquire
        self._release = lock.release
        self._group = group

    def __enter__(self) -> None:
        self._acquire()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if isinstance(error, InvalidArgument) and error.found_by_python and not error.peers_know and self._group.pointer:
                library().functions.sy_group_abort(self._group.pointer, Code.INVALID_ARGUMENT)
        finally:
            self._release()


class Construction:
    """Context of a construction: one thread at a time. During a construction ranks may load weights, and their peers wait for
    them in its collective steps, so an exception in this rank's code is reported to the peers in their next step. They raise it
    there with this rank's number and text, and the group stays usable. Constructions nest; an error that the library has
    already reported is not reported again.

    settles: the construction ends with an additional step, so that all ranks raise an exception that one rank raises after the
    last step of its peers."""

    __slots__ = ("_group", "_subject", "_settles")

    def __init__(self, group: "Group", subject: str, settles: bool = False) -> None:
        self._group, self._subject, self._settles = group, subject, settles

    def __enter__(self) -> None:
        self._group._lock.acquire()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        group = self._group
        try:
            if error is None:
                if self._settles:
                    group._agree(self._subject)
            elif not group.closed and not getattr(error, "peers_know", False):
                self._report(error)
        finally:
            group._lock.release()

    def _report(self, error: BaseException) -> None:
        group, functions = self._group, self._group._functions
        if not isinstance(error, Exception):  # an exiting interpreter waits for no peer
            functions.sy_group_abort(group.pointer, Code.SYSTEM)
        elif isinstance(error, SwitchyardError):
            functions.sy_group_agree(group.pointer, self._subject.encode(), error.code, error.text.encode(), None, 0, None)
        else:
            code = Code.INVALID_ARGUMENT if isinstance(error, (TypeError, ValueError)) else Code.SYSTEM
            text = f"{type(error).__name__}: {error}"
            functions.sy_group_agree(group.pointer, self._subject.encode(), code, text.encode(errors="replace"), None, 0, None)
        with contextlib.suppress(AttributeError):
            error.peers_know = True  # type: ignore[attr-defined]


_Made = TypeVar("_Made", bound=Callable[..., Any])


def constructs(function: _Made, settles: bool = False) -> _Made:
    """Decorates a constructor, or another constructing function, that is collective over the :class:`Group` among its
    arguments, and runs it in a :class:`Construction`."""
    subject = function.__qualname__.replace(".__init__", "")

    @functools.wraps(function)
    def construct(*arguments: Any, **keywords: Any) -> Any:
        group = next((each for each in (*arguments, *keywords.values()) if isinstance(each, Group)), None)
        if group is None:
            return function(*arguments, **keywords)
        with Construction(group, subject, settles):
            return function(*arguments, **keywords)

    return construct  # type: ignore[return-value]


class Group:
    """One rank's membership in a group of ranks.

    Created by :meth:`from_environment`, :meth:`from_process_group`, :meth:`from_mpi4py`, :meth:`connect` or :meth:`threads`,
    all of which take these keywords:

    heap_bytes: symmetric memory of each rank, in which exchanges allocate; ``Exchange.heap_bytes(...)`` returns the size that
    one needs.
    timeout: seconds until a wait inside a call raises :class:`PeerTimeout`; None: never. May differ by rank.
    rendezvous_timeout: seconds to wait for the peers while the group or one of its objects is created, and in :meth:`sleep` and
    :meth:`wake`. Ranks reach these calls at very different times, for example when they load weights.
    backend: "cpu" or "cuda". device: GPU of this rank; -1: rank modulo the number of GPUs.
    workers: CPU threads of each rank. num_sms: maximum number of multiprocessors of any call on a GPU; 0: the library's choice.
    host: name of this rank's host. Ranks with equal names share a host and map each other's memory. Comma-separated names are
    assigned to ranks cyclically ("a,a,b": rank 3 is on a again). "": SWITCHYARD_HOST in the environment; if that is not set
    either, ranks that can share memory share a host. May differ by rank.
    network: transport of rows between hosts, "sockets" or "mpi"; GPUs use "nccl" automatically (docs/concepts/hosts.md).
    silence: seconds without any message after which a process on another host counts as dead, even if no rank waits for it.
    None: the timeout plus one second. May differ by rank.

    A group is a context manager: at the end of ``with`` the rank leaves and its objects are closed; after an exception, the
    peers' calls raise :class:`PeerFailed`. Dropping a group without closing it leaves the objects made from it usable. Only one
    thread at a time may be in a call of a group; other threads wait.
    """

    _process_group: Any = None  # the torch.distributed process group, with the same ranks

    def __init__(self, pointer: int, backend: int, workers: int = 1) -> None:
        functions = library().functions
        self._lock = CallLock()
        self._owned = Owned(pointer, functions.sy_group_destroy, lock=self._lock)
        self._functions = functions
        self._call = _Collective(self._lock, self._owned)
        _interrupts.watch(self)
        self.backend = _names.name_of(_names.BACKENDS, backend)  #: "cpu" or "cuda"
        self._backend = backend
        self._workers = workers
        number = ctypes.c_int32()
        check(functions.sy_group_rank(pointer, byref(number)))
        self.rank: int = number.value
        check(functions.sy_group_size(pointer, byref(number)))
        self.size: int = number.value
        other = ctypes.c_int32()
        check(functions.sy_group_hosts(pointer, byref(other), byref(number)))
        self.hosts: int = other.value  #: number of hosts, which are numbered by their lowest ranks
        self.host: int = number.value  #: host of this rank

    # ---- Creation ----

    @classmethod
    def from_environment(cls, heap_bytes: int = 256 << 20, **options: Any) -> "Group":
        """Joins this process as one rank, from SWITCHYARD_RANK, _WORLD_SIZE, _STORE and _JOB_TOKEN, or from the variables of
        torchrun, Open MPI or Slurm (docs/concepts/rendezvous.md). Waits until all ranks have arrived."""
        settings = _options(heap_bytes, **options)
        group = ctypes.c_void_p()
        check(library().functions.sy_group_from_environment(byref(settings), byref(group)))
        return cls(group.value or 0, settings.backend, settings.num_warps)

    @classmethod
    @checked("Group.connect")
    def connect(cls, rank: int, world: int, store: str, token: str = "", heap_bytes: int = 256 << 20, **options: Any) -> "Group":
        """Joins this process as rank `rank` of `world`, meeting at `store`: "unix:/path", "unix:@name" or "tcp://host:port".
        `token` is any text, equal on all ranks, that excludes other processes."""
        settings = _options(heap_bytes, **options)
        group = ctypes.c_void_p()
        check(library().functions.sy_group_connect(rank, world, store.encode(), token.encode(), byref(settings), byref(group)))
        return cls(group.value or 0, settings.backend, settings.num_warps)

    @classmethod
    @checked("Group.threads")
    def threads(cls, world: int, heap_bytes: int = 256 << 20, **options: Any) -> List["Group"]:
        """Creates all `world` ranks in this process; element r belongs to rank r and must be used by one thread. Used by
        :func:`run_ranks`."""
        settings = _options(heap_bytes, **options)
        groups = (ctypes.c_void_p * max(world, 1))()
        check(library().functions.sy_group_in_process(world, byref(settings), groups))
        return [cls(group or 0, settings.backend, settings.num_warps) for group in groups]

    @classmethod
    def from_process_group(cls, process_group: Any = None, heap_bytes: int = 256 << 20, **options: Any) -> "Group":
        """Forms a group of the ranks of a ``torch.distributed`` process group (gloo, NCCL or any other that gathers objects;
        None: the default group). All ranks of the process group call this function. The process group supplies rank and size,
        transports the rendezvous address and a random token, and is not used afterwards. With NCCL, `backend` defaults to
        "cuda" and `device` to the current one.

        Ranks on several machines meet over TCP, at an address of rank 0 (that of its route to MASTER_ADDR, else that of its
        host name) and a port from 20000 to 29999; SWITCHYARD_STORE=tcp://address:port on rank 0 overrides both."""
        torch = torch_for("Group.from_process_group")
        import torch.distributed as dist

        pg = process_group if process_group is not None else dist.group.WORLD
        if "nccl" in str(dist.get_backend(pg)):
            options.setdefault("backend", "cuda")
        if options.get("backend") == "cuda":
            options.setdefault("device", torch.cuda.current_device())
        rank = dist.get_rank(pg)
        world = dist.get_world_size(pg)

        def gather(mine: Tuple[str, ...]) -> List[Any]:
            everybody: List[Any] = [None] * world
            dist.all_gather_object(everybody, mine, group=pg)
            return everybody

        group = cls.connect(rank, world, *_meeting(rank, gather), heap_bytes, **options)
        group._process_group = pg
        return group

    @classmethod
    @checked("Group.from_mpi4py")
    def from_mpi4py(cls, communicator: Any, heap_bytes: int = 256 << 20, **options: Any) -> "Group":
        """Forms a group of the ranks of an mpi4py communicator, which only transports the rendezvous address. On several
        machines: as in :meth:`from_process_group`."""
        rank = communicator.Get_rank()
        return cls.connect(rank, communicator.Get_size(), *_meeting(rank, communicator.allgather), heap_bytes, **options)

    def _once_more(self, heap_bytes: int, options: Any) -> "Group":
        """Collective. Forms another group of the same ranks, with its own heap."""

        def gather(mine: Tuple[str, ...]) -> List[Any]:
            return [json.loads(each) for each in self._agree("Group", json.dumps(mine).encode().ljust(1024))]

        return self.connect(self.rank, self.size, *_meeting(self.rank, gather), heap_bytes, **options)

    # ---- Queries and collective operations ----

    @property
    def closed(self) -> bool:
        return not self._owned.pointer

    @property
    def pointer(self) -> int:
        """The ``sy_group*``, for code that calls the C interface."""
        return alive(self._owned, "the group")

    @checked("Group.experts_of")
    def experts_of(self, num_experts: int, rank: Optional[int] = None) -> range:
        """Returns the experts that a rank holds (default: this rank), of `num_experts` in total."""
        rank = self.rank if rank is None else rank
        return range(first_expert(num_experts, self.size, rank), first_expert(num_experts, self.size, rank + 1))

    @checked("Group.host_of")
    def host_of(self, rank: int) -> int:
        """Returns the host of `rank`."""
        host = ctypes.c_int32()
        check(self._functions.sy_group_host_of(self.pointer, rank, byref(host)))
        return host.value

    def barrier(self) -> None:
        """Collective. Waits until all ranks have called it."""
        with self._lock:
            check(self._functions.sy_group_barrier(self.pointer))

    @checked("Group.record_stream")
    def record_stream(self, tensor: Any, stream: Any = None) -> None:
        """GPUs: like ``torch.Tensor.record_stream``, for a tensor in memory of the library (rows, outputs). The memory is not
        reused before the work enqueued on `stream` up to the drop of the last such tensor has completed. The library already
        tracks the stream on which the tensor was made and the streams of calls that use it. stream: None: the current one.
        Local; does nothing on the CPU."""
        if self._backend == _names.CUDA:
            import torch

            raw = (torch.cuda.current_stream(tensor.device) if stream is None else stream).cuda_stream
            check(self._functions.sy_group_used_by(self.pointer, tensor.data_ptr(), raw))

    @checked("Group.all_gather")
    def all_gather(self, mine: bytes) -> List[bytes]:
        """Collective. Gathers the bytes of every rank, equally many, in rank order."""
        everything = ctypes.create_string_buffer(max(1, len(mine) * self.size))
        with self._lock:
            check(self._functions.sy_group_all_gather(self.pointer, mine if mine else None, len(mine), everything))
        return [everything.raw[r * len(mine):(r + 1) * len(mine)] for r in range(self.size)]

    def _agree(self, subject: str, mine: bytes = b"") -> List[bytes]:
        """Collective: one step of a construction, within `rendezvous_timeout`. Gathers the bytes of every rank, equally many,
        in rank order. A rank whose construction has failed elsewhere reports its error in this step, and all ranks raise it."""
        everything = ctypes.create_string_buffer(max(1, len(mine) * self.size))
        with self._lock:
            check_collective(self._functions.sy_group_agree(self.pointer, subject.encode(), Code.OK, None, mine if mine else None,
                                                            len(mine), everything))
        return [everything.raw[r * len(mine):(r + 1) * len(mine)] for r in range(self.size)]

    def check(self) -> None:
        """Raises the pending fault of this rank, if any."""
        check(self._functions.sy_group_check(self.pointer))

    @checked("Group.abort")
    def abort(self, reason: int = Code.SYSTEM) -> None:
        """Ends every wait of every rank with :class:`PeerFailed` (this rank, `reason`). Any thread may call it."""
        check(self._functions.sy_group_abort(self.pointer, reason))

    @checked("Group.set_timeout")
    def set_timeout(self, seconds: Optional[float]) -> None:
        """Sets the deadline of every wait inside later calls; None: never."""
        with self._lock:
            check(self._functions.sy_group_set_timeout(self.pointer, _milliseconds(seconds)))

    def wait_statistics(self) -> List[WaitStatistics]:
        """Returns this rank's wait times, by peer."""
        found = []
        for peer in range(self.size):
            s = structs.WaitStatistics()
            check(self._functions.sy_group_wait_statistics(self.pointer, peer, byref(s)))
            found.append(WaitStatistics(s.total_ms, s.max_ms, s.waits))
        return found

    @property
    def heap(self) -> Tuple[int, int]:
        """Bytes of the symmetric heap: used, total."""
        used, size = ctypes.c_size_t(), ctypes.c_size_t()
        check(self._functions.sy_group_heap(self.pointer, byref(used), byref(size)))
        return used.value, size.value

    def sleep(self) -> None:
        """Collective. Releases the memory of the symmetric heap until :meth:`wake`; the content of its rows is lost. GPUs:
        waits for the current stream. Work on other streams that uses the heap must have completed."""
        if self._backend == _names.CUDA and "torch" in sys.modules:
            sys.modules["torch"].cuda.current_stream().synchronize()
        with self._lock:
            check(self._functions.sy_group_sleep(self.pointer))

    def wake(self) -> None:
        """Collective. Restores the memory that :meth:`sleep` released."""
        with self._lock:
            check(self._functions.sy_group_wake(self.pointer))

    def close(self) -> None:
        """Leaves the group: peers that still need this rank get :class:`PeerFailed`. Closes the objects of the group; arrays
        that they delivered stay valid. May be called twice."""
        for each in list(self._lock.members):
            each.close()
        leave = getattr(self._functions, "sy_group_leave", None)  # rows and handles of the group may outlive it
        with self._lock:
            if leave is not None and self._owned.pointer:
                leave(ctypes.c_void_p(self._owned.pointer))
        self._owned.close()

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:
        if error is not None and not self.closed:  # ends peers' waits at once, even if this rank's objects are still referenced
            self._functions.sy_group_abort(self._owned.pointer, Code.SYSTEM)
        self.close()

    def __repr__(self) -> str:
        hosts = f", host {self.host} of {self.hosts}" if self.hosts > 1 else ""
        return f"<switchyard.Group rank {self.rank} of {self.size}{hosts}, {self.backend}{', closed' if self.closed else ''}>"

    def __reduce__(self) -> Any:
        raise TypeError("a Group belongs to its process: form one in each process, for example by Group.from_environment()")
