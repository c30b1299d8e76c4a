# SPDX-License-Identifier: Apache-2.0
"""Replicated experts (docs/how_to/replicate_experts.md)."""
from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from ._abi import arguments as _arguments
from ._abi.arguments import checked
from ._abi.arrays import I32, I64, NUMPY
from ._abi.ffi import byref, check, library, structs
from ._abi.names import CPU, invalid

__all__ = ["ExpertMap", "SlotLoads"]


class SlotLoads(NamedTuple):
    """Route counts, int64 numpy arrays."""

    of_slot: Any  #: [W * C]
    of_rank: Any  #: [W]


class ExpertMap:
    """The expert of each slot of W ranks with C slots each. Slot p belongs to rank p // C and is expert p of an exchange with
    ``num_experts=map.num_slots``. All methods run on the host and are deterministic. Immutable.

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

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    @property
    def slots_per_rank(self) -> int:
        return len(self._slots) // self.world

    @property
    def expert_of_slot(self) -> Any:
        """A copy of the map's contents, int32 [W * C]."""
        return NUMPY.wrap(ctypes.addressof(self._slots), (self.num_slots,), I32, self._slots, None).copy()

    @checked("ExpertMap.plan")
    def plan(self, routes_per_expert: Any, *, tolerance: float = 0.02) -> "ExpertMap":
        """Chooses replicas for the loads `routes_per_expert`, int64 [E], and returns a map of the same size. Of the maps whose
        maximum rank load exceeds that of the best by at most `tolerance` times the mean, returns the one with the fewest weights
        to move."""
        taken = _arguments.bind("ExpertMap.plan", CPU, E=self.num_experts).routes_per_expert(routes_per_expert)
        made = ExpertMap.__new__(ExpertMap)
        made._set((ctypes.c_int32 * self.num_slots)(), self.num_experts, self.world)
        check(library().functions.sy_expert_map_plan(byref(self._struct()), taken.pointer, tolerance, ctypes.addressof(made._slots)))
        return made

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
        from each rank to each expert in this call. Every rank passes the same `routes`."""
        takes = _arguments.bind("ExpertMap.replace", CPU, W=self.world, E=self.num_experts)
        ids, counts = takes.topk_ids(topk_ids), takes.routes(routes)
        check(library().functions.sy_expert_map_replace(byref(self._struct()), counts.pointer, rank, ids.pointer, ids.shape[0] * ids.shape[1]))

    @checked("ExpertMap.count_moved")
    def count_moved(self, to: "ExpertMap") -> int:
        """Number of sets of weights to move: for each rank, the experts that it holds in `to` and not in this map."""
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
