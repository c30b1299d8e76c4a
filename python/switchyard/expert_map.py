# SPDX-License-Identifier: Apache-2.0
"""Replicated experts (docs/how_to/replicate_experts.md)."""
from __future__ import annotations

import ctypes
import sys
from types import TracebackType
from typing import Any, List, NamedTuple, Optional, Tuple, Type

from ._abi import arguments as _arguments
from ._abi.arguments import checked, named
from ._abi.arrays import ELEMENTS, I32, I64, NUMPY, bytes_of, check_apart, take, written
from ._abi.ffi import Owned, alive, byref, check, check_collective, library, structs
from ._abi.names import CPU, CUDA, invalid
from .group import Construction, Group, constructs

__all__ = ["BalanceReport", "ExpertMap", "SlotLoads", "SlotSelector", "SlotWeights", "move_weights"]


class SlotLoads(NamedTuple):
    """Route counts, int64 numpy arrays."""

    of_slot: Any  #: [W * C]
    of_rank: Any  #: [W]


class BalanceReport(NamedTuple):
    """The result of :meth:`SlotSelector.balance`, equal on all ranks except for `received_bytes`."""

    max_before: int  #: rows of the busiest rank with the map before the call
    max_after: int  #: rows of the busiest rank in this call
    mean: int  #: ceil(rows of all ranks / W)
    fetched: int  #: sets of weights that ranks have fetched
    received_bytes: int  #: by this rank


class ExpertMap:
    """The expert of each slot of W ranks with C slots each. Slot p belongs to rank p // C and is expert p of an exchange with
    ``num_experts=map.num_slots``. All methods run on the host and are deterministic. Maps are immutable.

    expert_of_slot: int32 [W * C], -1 for an empty slot; copied. num_experts: E; each expert needs a slot. world: W.

        map = sy.ExpertMap.home(num_experts=256, world=8, slots_per_rank=34)
        map = map.plan(routes_per_expert)                  # int64 [E], from counts of past calls
        map.replace(topk_ids, routes, rank=group.rank)     # int64 [W, E], of this call
    """

    @checked("ExpertMap.__init__")
    def __init__(self, expert_of_slot: Any, *, num_experts: int, world: int) -> None:
        taken = _arguments.bind("ExpertMap.__init__", CPU).expert_of_slot(expert_of_slot)
        count = taken.shape[0]
        if count % world != 0:
            invalid(f"expert_of_slot: {count} slots are not a multiple of world = {world}")
        slots = (ctypes.c_int32 * count)()
        ctypes.memmove(slots, taken.pointer, 4 * count)
        self._set(slots, num_experts, world)
        check(library().functions.sy_expert_map_check(byref(self._struct())))

    @classmethod
    @checked("ExpertMap.home")
    def home(cls, *, num_experts: int, world: int, slots_per_rank: int) -> "ExpertMap":
        """The map without replicas: each rank holds the experts of :func:`first_expert`, in order, followed by empty slots."""
        made = cls.__new__(cls)
        made._set((ctypes.c_int32 * max(world * slots_per_rank, 0))(), num_experts, world)
        check(library().functions.sy_expert_map_home(byref(made._struct())))
        return made

    def _set(self, slots: Any, num_experts: int, world: int) -> None:
        self._slots, self.num_experts, self.world = slots, num_experts, world

    def _struct(self) -> structs.ExpertMap:
        return structs.ExpertMap(num_experts=self.num_experts, world=self.world, slots_per_rank=self.slots_per_rank,
                                 expert_of_slot=ctypes.addressof(self._slots))

    def __reduce__(self) -> Any:
        return _expert_map, (bytes(self._slots), self.num_experts, self.world)

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    @property
    def slots_per_rank(self) -> int:
        return len(self._slots) // self.world

    @property
    def expert_of_slot(self) -> Any:
        """A copy of the expert of each slot, int32 [W * C]; -1: an empty slot."""
        return NUMPY.wrap(ctypes.addressof(self._slots), (self.num_slots,), I32, self._slots, None).copy()

    def _like(self, fill: Any) -> "ExpertMap":
        """Returns a map of this size. `fill` receives the address of its slots and writes them."""
        made = ExpertMap.__new__(ExpertMap)
        made._set((ctypes.c_int32 * self.num_slots)(), self.num_experts, self.world)
        check(fill(ctypes.addressof(made._slots)))
        return made

    @checked("ExpertMap.plan")
    def plan(self, routes_per_expert: Any, *, tolerance: float = 0.02) -> "ExpertMap":
        """Chooses replicas for the loads `routes_per_expert`, int64 [E], and returns a map of the same size. Among the maps whose
        maximum rank load exceeds that of the best by at most `tolerance` times the mean, returns the one with the fewest weights
        to move."""
        taken = _arguments.bind("ExpertMap.plan", CPU, E=self.num_experts).routes_per_expert(routes_per_expert)
        return self._like(lambda slots: library().functions.sy_expert_map_plan(byref(self._struct()), taken.pointer, tolerance, slots))

    @checked("ExpertMap.plan_replicas")
    def plan_replicas(self, routes_per_expert: Any, *, tolerance: float = 0.02) -> "ExpertMap":
        """Variant of :meth:`plan` that only adds and replaces replicas: each expert keeps one of its slots, so
        :meth:`SlotWeights.move` can load the replicas in the background."""
        taken = _arguments.bind("ExpertMap.plan_replicas", CPU, E=self.num_experts).routes_per_expert(routes_per_expert)
        return self._like(
            lambda slots: library().functions.sy_expert_map_plan_replicas(byref(self._struct()), taken.pointer, tolerance, slots))

    @checked("ExpertMap.vacate")
    def vacate(self, to: "ExpertMap") -> "ExpertMap":
        """Returns a copy of this map in which every slot whose expert differs in `to` is empty. With that map in force, no call uses
        these slots, so :meth:`SlotWeights.move` can load them in the background. Raises InvalidArgument if an
        expert would be left without a slot: such a change requires :func:`move_weights`."""
        return self._like(lambda slots: library().functions.sy_expert_map_vacate(byref(self._struct()), byref(to._struct()), slots))

    @checked("ExpertMap.divide")
    def divide(self, routes_per_expert: Any) -> SlotLoads:
        """Divides the routes of each expert, int64 [E], among its slots so that the maximum rank load is the lowest possible."""
        taken = _arguments.bind("ExpertMap.divide", CPU, E=self.num_experts).routes_per_expert(routes_per_expert)
        loads = [(ctypes.c_int64 * count)() for count in (self.num_slots, self.world)]
        check(library().functions.sy_expert_map_divide(byref(self._struct()), taken.pointer, *map(ctypes.addressof, loads)))
        return SlotLoads(*(NUMPY.wrap(ctypes.addressof(each), (len(each),), I64, each, None).copy() for each in loads))

    @checked("ExpertMap.replace")
    def replace(self, topk_ids: Any, routes: Any, *, rank: int) -> None:
        """Replaces the ids of a rank, int32 [T, K], in place with slots; -1 is kept. routes: int64 [W, E], the number of routes
        from each rank to each expert in this call, equal on all ranks."""
        takes = _arguments.bind("ExpertMap.replace", CPU, W=self.world, E=self.num_experts)
        ids, counts = takes.topk_ids(topk_ids), takes.routes(routes)
        check(library().functions.sy_expert_map_replace(byref(self._struct()), counts.pointer, rank, ids.pointer, ids.shape[0] * ids.shape[1]))

    @checked("ExpertMap.count_moved")
    def count_moved(self, to: "ExpertMap") -> int:
        """Returns the number of sets of weights to move: for each rank, the experts that it holds in `to` and not in this map."""
        moved = ctypes.c_int32()
        check(library().functions.sy_expert_map_count_moved(byref(self._struct()), byref(to._struct()), byref(moved)))
        return moved.value

    def __eq__(self, other: object) -> bool:
        return (isinstance(other, ExpertMap) and (self.num_experts, self.world) == (other.num_experts, other.world)
                and bytes(self._slots) == bytes(other._slots))

    def __hash__(self) -> int:
        return hash((self.num_experts, self.world, bytes(self._slots)))

    def __repr__(self) -> str:
        return f"<switchyard.ExpertMap of {self.num_experts} experts, {self.world} ranks with {self.slots_per_rank} slots each>"


def _expert_map(slots: bytes, num_experts: int, world: int) -> ExpertMap:
    """Returns the map that was pickled."""
    made = ExpertMap.__new__(ExpertMap)
    made._set((ctypes.c_int32 * (len(slots) // 4)).from_buffer_copy(slots), num_experts, world)
    return made


class _SlotArrays:
    """The arrays of a rank's slots, as arguments of the C functions."""

    def __init__(self, group: Group, slots: int, arrays: Tuple[Any, ...]) -> None:
        self.taken: List[Any] = [take(each, f"arrays[{i}]", (slots, *getattr(each, "shape", (0,))[1:]), ELEMENTS, group._backend, written=True)
                                 for i, each in enumerate(arrays)]
        for i, each in enumerate(self.taken):
            check_apart(f"arrays[{i}]", each, **{f"arrays[{j}]": other for j, other in enumerate(self.taken[:i])})
        self.pointers = (ctypes.c_void_p * len(arrays))(*(each.pointer for each in self.taken))
        self.sizes = (ctypes.c_size_t * len(arrays))(*(bytes_of(each) // slots for each in self.taken))


class SlotWeights:
    """The weights of this rank's slots, for moves in the background of other calls. Creation and :meth:`move` are collective.

    arrays, staging_bytes: as for :func:`move_weights`; the object keeps the arrays alive. They must stay allocated until all ranks
    have closed their objects. GPUs of one host: each rank reads the arrays of the others directly, so they must not be in expandable
    segments or stream-ordered pools; copy engines perform the copies on a stream of the object and never wait for another rank.
    CPUs, and GPUs of several hosts: :meth:`move` waits for the copies.

        weights = sy.SlotWeights(group, w13, w2)
        selector.set_map(selector.expert_map.vacate(better))    # calls stop using the slots that change
        weights.move(selector.expert_map, better)
        ...                                                     # calls with the map in force
        weights.wait()
        selector.set_map(better, routes)
    """

    @constructs
    @named("SlotWeights.__init__")
    def __init__(self, group: Group, *arrays: Any, staging_bytes: int = 64 << 20) -> None:
        _arguments.check("SlotWeights.__init__", group=group, staging_bytes=staging_bytes)
        if not arrays or not getattr(arrays[0], "shape", ()):
            invalid("arrays: give the weights of the slots, of shape [C, ...]")
        self.group, self._arrays, self._functions = group, arrays, library().functions
        slots: int = arrays[0].shape[0]
        taken = _SlotArrays(group, slots, arrays)
        #: CUDA: the torch stream of the copies
        self.stream: Any = sys.modules["torch"].cuda.Stream(arrays[0].device) if group._backend == CUDA else None
        made = ctypes.c_void_p()
        check_collective(self._functions.sy_slot_weights_create(
            group.pointer, slots, taken.pointers, taken.sizes, len(arrays), staging_bytes,
            None if self.stream is None else self.stream.cuda_stream, byref(made)))
        self._owned = Owned(made.value, self._functions.sy_slot_weights_destroy, group._owned, arrays, self.stream, lock=group._lock)
        group._lock.members.add(self._owned)

    @property
    def pointer(self) -> int:
        """The underlying ``sy_slot_weights*``, for code that calls the C interface."""
        return self._owned.pointer or alive(self._owned, "the slot weights", self.group)

    @named("SlotWeights.move")
    def move(self, before: ExpertMap, after: ExpertMap) -> int:
        """Collective. Starts to copy the weights of each expert that `after` assigns to an empty slot of `before`. All other slots that
        differ must be empty in `after`. Waits on the host for the other ranks and for earlier work on the current stream, which must
        include all calls that use these slots, but not for the copies. Until they are complete on all ranks, the weights of
        `before` must not change. Order work that uses the new weights with :meth:`wait` or ``MoeLayer.forward(weights_ready=)``.
        Returns the number of bytes that this rank receives from other ranks. Raises InvalidArgument or Mismatch, on all ranks, before any copy."""
        with Construction(self.group, "SlotWeights.move"):
            _arguments.check("SlotWeights.move", before=before, after=after)
            received = ctypes.c_int64()
            check_collective(self._functions.sy_slot_weights_move(self.pointer, byref(before._struct()), byref(after._struct()),
                                                                  self.group._current_stream(), byref(received)))
            written(*self._arrays)
            return received.value

    def wait(self) -> None:
        """Local. Orders later work on the current stream after the copies of the last move. CPU: no effect."""
        check(self._functions.sy_slot_weights_wait(self.pointer, self.group._current_stream()))

    @property
    def ready(self) -> bool:
        """Whether the copies of the last move have completed on this rank."""
        done = ctypes.c_int32()
        check(self._functions.sy_slot_weights_ready(self.pointer, byref(done), None))
        return bool(done.value)

    @property
    def event(self) -> Optional[int]:
        """cudaEvent_t recorded after the copies, valid until the next move; None if there is nothing to wait for."""
        event = ctypes.c_void_p()
        check(self._functions.sy_slot_weights_ready(self.pointer, None, byref(event)))
        return event.value

    def close(self) -> None:
        """Releases the object after this rank's copies. Repeated calls have no effect."""
        self._owned.close()

    def __enter__(self) -> "SlotWeights":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]) -> None:
        self.close()


class SlotSelector:
    """Replaces the expert ids of each call on this rank with slots of a map, on the device, and counts the routes to each
    expert. Creation, :meth:`select`, :meth:`balance`, :meth:`set_map` and :meth:`gather_routes` are collective: all ranks call
    them in the same order, and the same number of times between two maps.

    expert_map: equal on all ranks. routes: int64 [W, E], the expected number of routes from each rank to each expert; None: all
    are equal. They determine the proportions in which the routes to an expert are divided among its slots, in runs of 8 tokens,
    the rank's own slots first.

        selector = sy.SlotSelector(group, expert_map)
        layer = sy.MoeLayer(group, w13, w2, num_experts=expert_map.num_slots, ...)   # weights by slot
        out = layer(x, topk_ids, topk_weights, selector=selector)

        routes = selector.gather_routes()                  # every few hundred steps
        expert_map = selector.expert_map.plan(routes.sum(0))
        sy.move_weights(group, selector.expert_map, expert_map, w13, w2)
        selector.set_map(expert_map, routes)

    Raises InvalidArgument or Mismatch, on all ranks.
    """

    @constructs
    @named("SlotSelector.__init__")
    def __init__(self, group: Group, expert_map: ExpertMap, routes: Any = None) -> None:
        _arguments.check("SlotSelector.__init__", group=group, expert_map=expert_map)
        self.group, self._map, self._functions = group, expert_map, library().functions
        self._takes = _arguments.bind("SlotSelector.set_map", CPU, W=expert_map.world, E=expert_map.num_experts)
        self._ids = _arguments.bind("SlotSelector.select", group._backend)
        self._given = structs.ExpertIds()
        given = None if routes is None else self._takes.routes(routes)
        made = ctypes.c_void_p()
        check_collective(self._functions.sy_slot_selector_create(group.pointer, byref(expert_map._struct()), given and given.pointer, byref(made)))
        self._owned = Owned(made.value, self._functions.sy_slot_selector_destroy, group._owned, lock=group._lock)
        group._lock.members.add(self._owned)

    @property
    def pointer(self) -> int:
        """The underlying ``sy_slot_selector*``, for code that calls the C interface."""
        return self._owned.pointer or alive(self._owned, "the selector", self.group)

    @property
    def expert_map(self) -> ExpertMap:
        """The map in force."""
        return self._map

    def select(self, topk_ids: Any, *, out: Any = None) -> Any:
        """Collective. Returns the slot of each id, [T, K], with the type of `topk_ids` (int32 or int64), in `out` if given, which
        may be `topk_ids`. The id -1 is kept; any other id that is not an expert is replaced with a number that no exchange accepts
        and whose errors name the id. GPUs: enqueues one kernel on the current stream; does not wait. A replay of a captured call
        uses the map in force when it runs."""
        with self.group._call:
            ids, result, out = self._take_ids(topk_ids, out)
            g = self._given
            g.data, g.is_int64 = ids.pointer, int(ids.code == I64)
            g.num_tokens, g.topk = ids.shape
            check(self._functions.sy_slot_selector_select(self.pointer, byref(g), result.pointer, ids.arrays.stream(ids.array)))
            written(out)
            return out

    def _take_ids(self, topk_ids: Any, out: Any) -> Tuple[Any, Any, Any]:
        """Returns the taken ids, the taken output, which may be the same memory, and `out` or a new array."""
        ids = self._ids.topk_ids(topk_ids)
        if out is None:
            out = ids.arrays.empty(ids.shape, ids.code, ids.array)
        result = take(out, "out", ids.shape, (ids.code,), self.group._backend, written=True)
        if result.pointer != ids.pointer:
            check_apart("out", result, topk_ids=ids)
        return ids, result, out

    @named("SlotSelector.set_map")
    def set_map(self, expert_map: ExpertMap, routes: Any = None) -> None:
        """Collective. Later calls of :meth:`select`, and later replays of captured calls, use `expert_map`, which must have the sizes
        of the map in force. Waits for the other ranks' hosts. GPUs: does not wait for enqueued work; the new table is copied on
        the current stream, after all earlier calls. Before the call, load the weights of the new slots on all ranks. routes: as for
        the constructor. Errors are raised on all ranks, and the previous map stays in force. Mismatch if the ranks have made different
        numbers of :meth:`select` calls since the last comparison; calls are then counted from 0 again."""
        with Construction(self.group, "SlotSelector.set_map"):
            _arguments.check("SlotSelector.set_map", expert_map=expert_map)
            given = None if routes is None else self._takes.routes(routes)
            check_collective(self._functions.sy_slot_selector_set_map(self.pointer, byref(expert_map._struct()), given and given.pointer,
                                                                      self.group._current_stream()))
            self._map = expert_map

    @named("SlotSelector.balance")
    def balance(self, topk_ids: Any, *arrays: Any, out: Any = None, tile: int = 128, link_bytes_per_s: float = 300e9,
                seconds_per_row: float = 0.14e-6, seconds_per_move: float = 0.5e-3,
                staging_bytes: int = 64 << 20) -> Tuple[Any, BalanceReport]:
        """Collective. Variant of :meth:`select` that balances a large call, such as a prefill or a training step, by its own
        routes. Counts the routes on all ranks and plans replicas; if this reduces the predicted time, moves the weights of `arrays`
        (:func:`move_weights`) and sets the planned map. Returns the slots and a report, with exact numbers of rows.

        arrays, staging_bytes: as for :func:`move_weights`. With one :class:`SlotWeights` as `arrays`, this call starts the copies but
        does not wait for them, so they overlap with the dispatch of the slots; pass the object to
        ``MoeLayer.forward(weights_ready=)``. tile: rows by which the busiest rank may exceed the mean before weights are
        fetched. link_bytes_per_s: rate at which a rank sends or receives weights. seconds_per_row: time of the experts per row.
        seconds_per_move: fixed costs of moving any weights. All are equal on all ranks; the defaults are for bf16 experts of hidden
        7168 and intermediate 2048 on H200s.

        Waits for the other ranks, and on GPUs for earlier work on the current stream; cannot be captured. Layers that pack their
        weights need ``with_weights`` if ``report.fetched > 0``. Raises InvalidArgument, Mismatch or HeapExhausted, on all ranks,
        before any copy of weights; the previous map then stays in force."""
        with Construction(self.group, "SlotSelector.balance"):
            _arguments.check("SlotSelector.balance", tile=tile, link_bytes_per_s=link_bytes_per_s, seconds_per_row=seconds_per_row,
                             seconds_per_move=seconds_per_move, staging_bytes=staging_bytes)
            options = structs.BalanceOptions(tile=tile, link_bytes_per_s=link_bytes_per_s, seconds_per_row=seconds_per_row,
                                             seconds_per_move=seconds_per_move, staging_bytes=staging_bytes)
            ids, result, out = self._take_ids(topk_ids, out)
            moving = arrays[0] if len(arrays) == 1 and isinstance(arrays[0], SlotWeights) else None
            arrays = moving._arrays if moving is not None else arrays
            weights = _SlotArrays(self.group, self._map.slots_per_rank, arrays)
            for i, each in enumerate(weights.taken):
                check_apart(f"arrays[{i}]", each, topk_ids=ids, out=result)
            given = structs.ExpertIds(data=ids.pointer, is_int64=int(ids.code == I64), num_tokens=ids.shape[0], topk=ids.shape[1])
            made = structs.BalanceReport()
            stream = ids.arrays.stream(ids.array)
            if moving is not None:
                check_collective(self._functions.sy_slot_selector_balance_in_background(
                    self.pointer, byref(given), result.pointer, moving.pointer, byref(options), stream, byref(made)))
            else:
                check_collective(self._functions.sy_slot_selector_balance(
                    self.pointer, byref(given), result.pointer, weights.pointers, weights.sizes, len(arrays), byref(options), stream,
                    byref(made)))
            written(out)
            if made.fetched:
                written(*arrays)
                self._map = self._state_map()
            return out, BalanceReport(made.max_before, made.max_after, made.mean, made.fetched, made.received_bytes)

    def _state_map(self) -> ExpertMap:
        """Returns the library's map in force."""
        slots = (ctypes.c_int32 * self._map.num_slots)()
        check(self._functions.sy_slot_selector_state(self.pointer, slots, None, None))
        found = ExpertMap.__new__(ExpertMap)
        found._set(slots, self._map.num_experts, self._map.world)
        return found

    def gather_routes(self) -> Any:
        """Collective. Returns the number of routes from each rank to each expert since creation or the last gather_routes(), a
        numpy array int64 [W, E], and resets the counters. GPUs: waits for the counted calls; meanwhile, no graph that contains one
        may run."""
        with self.group._call:
            counts = (ctypes.c_int64 * (self._map.world * self._map.num_experts))()
            check_collective(self._functions.sy_slot_selector_gather_routes(self.pointer, counts))
            return NUMPY.wrap(ctypes.addressof(counts), (self._map.world, self._map.num_experts), I64, counts, None).copy()

    @property
    def version(self) -> int:
        """The number of maps that have been in force: 1 after creation."""
        version = ctypes.c_int64()
        check(self._functions.sy_slot_selector_state(self.pointer, None, byref(version), None))
        return version.value

    def close(self) -> None:
        """Releases the selector. Repeated calls have no effect."""
        self._owned.close()

    def __enter__(self) -> "SlotSelector":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]) -> None:
        self.close()


@constructs
@named("move_weights")
def move_weights(group: Group, before: ExpertMap, after: ExpertMap, *arrays: Any, staging_bytes: int = 64 << 20) -> int:
    """Collective. Copies weights between ranks so that slot p of each array contains the weights of expert
    ``after.expert_of_slot[p]``. Before the call, it must contain those of ``before.expert_of_slot[p]``. Returns the number of bytes
    received from other ranks.

    arrays: this rank's weights and scales by slot, dense, of shape [C, ...]: float32, float16, bfloat16, fp8, int32, int64 or
    uint8, written in place; they must not overlap. staging_bytes: upper limit of the memory that the call allocates and frees:
    symmetric memory of the group's heap_bytes and, if weights move between hosts, memory for sending and receiving. Waits for the
    copies; on GPUs, they run on the current stream. No other call may use the arrays concurrently. Layers that pack their weights
    need ``with_weights`` afterwards.

    Raises InvalidArgument, Mismatch or HeapExhausted, on all ranks, before any copy.
    """
    _arguments.check("move_weights", group=group, before=before, after=after, staging_bytes=staging_bytes)
    weights = _SlotArrays(group, after.slots_per_rank, arrays)
    stream = weights.taken[0].arrays.stream(weights.taken[0].array) if arrays else None
    received = ctypes.c_int64()
    check_collective(library().functions.sy_move_weights(group.pointer, byref(before._struct()), byref(after._struct()), weights.pointers,
                                                         weights.sizes, len(arrays), staging_bytes, stream, byref(received)))
    written(*arrays)
    return received.value
