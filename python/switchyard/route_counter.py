# SPDX-License-Identifier: Apache-2.0
"""Counts of routes (docs/how_to/replicate_experts.md)."""
from __future__ import annotations

import ctypes
from types import TracebackType
from typing import Any, NamedTuple, Optional, Type

from ._abi import arguments as _arguments
from ._abi.arguments import named
from ._abi.arrays import I64, NUMPY
from ._abi.ffi import Owned, alive, byref, check, check_collective, library, structs
from .expert_map import SlotSelector
from .group import Construction, Group, constructs

__all__ = ["RouteCounter", "RouteLoad"]


class RouteLoad(NamedTuple):
    """The routes of all ranks since the creation of their counters, int64 numpy arrays."""

    of_expert: Any  #: [W, E] from each rank to each expert
    of_rank: Any  #: [W] to the experts of each rank


class RouteCounter:
    """Counts the routes of this rank to each expert of an exchange or a layer, on the device. Creation and :meth:`load` are
    collective. num_experts: of the exchange.

        counter = sy.RouteCounter(group, num_experts=E)
        counter.count(topk_ids)            # each call; Exchange(count_routes=True) does this
        counter.load().of_rank
    """

    @constructs
    @named("RouteCounter.__init__")
    def __init__(self, group: Group, *, num_experts: int) -> None:
        _arguments.check("RouteCounter.__init__", group=group, num_experts=num_experts)
        self.group, self.num_experts, self._functions = group, num_experts, library().functions
        self._ids = _arguments.bind("RouteCounter.count", group._backend)
        made = ctypes.c_void_p()
        check_collective(self._functions.sy_route_counter_create(group.pointer, num_experts, byref(made)))
        self._owned = Owned(made.value, self._functions.sy_route_counter_destroy, group._owned, lock=group._lock)
        group._lock.members.add(self._owned)

    @property
    def pointer(self) -> int:
        """The underlying ``sy_route_counter*``, for code that calls the C interface."""
        return self._owned.pointer or alive(self._owned, "the route counter", self.group)

    @named("RouteCounter.count")
    def count(self, topk_ids: Any) -> None:
        """Local. Adds the routes of a call, int32 or int64 [T, K]. Ids that are not experts are not counted. GPUs: enqueues one kernel
        on the current stream, which graphs can capture; does not wait."""
        with self.group._call:
            ids = self._ids.topk_ids(topk_ids)
            given = structs.ExpertIds(data=ids.pointer, is_int64=int(ids.code == I64), num_tokens=ids.shape[0], topk=ids.shape[1])
            self._count(byref(given), ids.arrays.stream(ids.array))

    def _count(self, by_ids: Any, stream: Any) -> None:
        """The caller must hold the lock."""
        check(self._functions.sy_route_counter_count(self.pointer, by_ids, stream))

    @named("RouteCounter.load")
    def load(self, selector: Optional[SlotSelector] = None) -> RouteLoad:
        """Collective. Returns the counts of all ranks and does not reset them. If the counted ids are slots, pass the selector that
        selected them: `of_expert` then contains the selector's counts by expert, including those that ``gather_routes`` has returned.
        GPUs: waits for the counted calls; meanwhile, no graph that contains such a call may run. Errors are raised on all ranks."""
        with Construction(self.group, "RouteCounter.load"):
            _arguments.check("RouteCounter.load", selector=selector)
            experts = self.num_experts if selector is None else selector.expert_map.num_experts
            of_expert, of_rank = (ctypes.c_int64 * (self.group.size * experts))(), (ctypes.c_int64 * self.group.size)()
            check_collective(self._functions.sy_route_counter_load(self.pointer, None if selector is None else selector.pointer, of_expert, of_rank))
            return RouteLoad(NUMPY.wrap(ctypes.addressof(of_expert), (self.group.size, experts), I64, of_expert, None).copy(),
                             NUMPY.wrap(ctypes.addressof(of_rank), (self.group.size,), I64, of_rank, None).copy())

    def close(self) -> None:
        """Releases the counters. Repeated calls have no effect."""
        self._owned.close()

    def __enter__(self) -> "RouteCounter":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]) -> None:
        self.close()
