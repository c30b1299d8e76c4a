# SPDX-License-Identifier: Apache-2.0
"""Placements of experts for the load balancers (EPLB) of vLLM and SGLang: the logical expert of each physical expert, int64
[layers, slots], with the slots of W ranks in order. Both engines divide the routes to an expert evenly among its slots, unlike
:class:`switchyard.SlotSelector`. This module imports neither engine; only ``.pt`` files need torch.

    counts = load_counts("expert_distribution_recorder_1.pt")            # [layers, experts]
    save("placement.json", place(counts, world=8, slots_per_rank=34))    # for SGLang's --init-expert-location
"""
from __future__ import annotations

import json
from typing import Any, List, Optional, Sequence

import numpy as np

from .._abi import names as _names
from ..expert_map import ExpertMap

__all__ = ["from_expert_maps", "load", "load_counts", "place", "rank_loads", "save", "to_expert_maps"]

_MAPS = ("physical_to_logical_map", "last_physical_to_logical_map")
#: Loads are integers with this many fractional bits, so all ranks and machines compute the same placement.
_BITS = 16


# ---- Loads and placements ----


class _Layer:
    """Slots of one layer and the loads of its ranks. -1: an empty slot."""

    def __init__(self, slots: np.ndarray, counts: np.ndarray, world: int) -> None:
        self.slots, self.world, self.width = slots.copy(), world, len(slots) // world
        self.scaled = counts << _BITS
        used = np.flatnonzero(self.slots >= 0)
        self.on = np.zeros((len(counts), world), np.int64)  #: number of slots per expert and rank
        np.add.at(self.on, (self.slots[used], used // self.width), 1)
        mean = int(self.scaled.sum()) // world
        self.target, self.limit = mean + mean // 100, mean + mean // 50

    @property
    def shares(self) -> np.ndarray:
        """Load of one slot of each expert."""
        return self.scaled // np.maximum(self.on.sum(1), 1)

    @property
    def loads(self) -> np.ndarray:
        return self.shares @ self.on

    def excess(self, loads: np.ndarray) -> np.ndarray:
        """Returns the load above the target, summed over ranks, the last axis."""
        return np.maximum(loads - self.target, 0).sum(-1)

    def put(self, slot: int, expert: int) -> None:
        """Assigns another expert to a slot."""
        rank = slot // self.width
        if self.slots[slot] >= 0:
            self.on[self.slots[slot], rank] -= 1
        self.on[expert, rank] += 1
        self.slots[slot] = expert

    def replicas(self, slots: np.ndarray, experts: np.ndarray) -> np.ndarray:
        """Returns the excess, [slots, experts], after one of `experts` is assigned to one of `slots`, which are empty or hold
        replicated experts."""
        ranks, held = np.eye(self.world, dtype=np.int64)[slots // self.width], self.slots[slots]
        number, shares, loads = self.on.sum(1), self.shares, self.loads
        without = self.scaled[held] // np.maximum(number[held] - 1, 1)
        removed = without[:, None] * (self.on[held] - ranks) - shares[held][:, None] * self.on[held]
        removed[held < 0] = 0
        more = (self.scaled[experts] // (number[experts] + 1))[:, None]
        fixed = more * self.on[experts] - shares[experts][:, None] * self.on[experts]
        found = self.excess(loads + removed[:, None] + fixed[None] + more[None] * ranks[:, None])
        found[held[:, None] == experts[None]] = np.iinfo(np.int64).max
        return found

    def swaps(self, mine: np.ndarray) -> np.ndarray:
        """Returns the excess, [mine, slots], after a slot in `mine` (all of one rank) exchanges its expert with another slot."""
        loads, shares = self.loads, self.shares[self.slots]
        rank, ranks = mine[0] // self.width, np.arange(len(self.slots)) // self.width
        over = np.maximum(loads - self.target, 0)
        moved = shares[mine][:, None] - shares[None]
        found = over.sum() - over[rank] - over[ranks] + np.maximum(loads[rank] - moved - self.target, 0) \
            + np.maximum(loads[ranks] + moved - self.target, 0)
        found[:, ranks == rank] = np.iinfo(np.int64).max
        return found

    def fill(self) -> None:
        """Assigns to each empty slot the expert that balances the ranks best."""
        every = np.arange(len(self.on))
        for slot in np.flatnonzero(self.slots < 0).tolist():
            self.put(slot, int(self.replicas(np.array([slot]), every)[0].argmin()))

    def improve(self) -> bool:
        """Makes the change of one slot or exchange of two that reduces the excess most. Returns False if none reduces it or none is
        needed."""
        loads = self.loads
        now, busiest = int(self.excess(loads)), int(loads.argmax())
        if loads[busiest] <= self.limit:
            return False
        mine = np.arange(busiest * self.width, (busiest + 1) * self.width)
        experts, spare = np.unique(self.slots[mine]), np.flatnonzero(self.on.sum(1)[self.slots] > 1)
        swaps = self.swaps(mine)
        best, change = int(swaps.min()), swaps.argmin()
        if len(spare):
            replicas = self.replicas(spare, experts)
            if replicas.min() <= best and replicas.min() < now:
                slot, expert = np.unravel_index(replicas.argmin(), replicas.shape)
                self.put(int(spare[slot]), int(experts[expert]))
                return True
        if best >= now:
            return False
        a, b = np.unravel_index(change, swaps.shape)
        first, second = int(mine[a]), int(b)
        held = int(self.slots[first]), int(self.slots[second])
        self.put(first, held[1])
        self.put(second, held[0])
        return True


def _array(given: Any) -> np.ndarray:
    """Returns an array, list or tensor of any device as an array."""
    return np.asarray(given.cpu() if hasattr(given, "cpu") else given)


def _counts(counts: Any) -> np.ndarray:
    """Returns counts as [layers, E]; large counts are scaled down so that loads fit into 64 bits."""
    taken = np.atleast_2d(_array(counts))
    if taken.ndim != 2 or taken.dtype.kind not in "iuf" or taken.size == 0 or (taken < 0).any() or not np.isfinite(taken).all():
        _names.invalid(f"counts {list(taken.shape)}: must be numbers of routes, at least 0, [layers, experts]")
    taken = taken.astype(np.int64)
    while int(taken.max()) * taken.shape[1] >> (61 - _BITS):
        taken = taken >> 1
    return taken


def _placement(placement: Any, experts: Optional[int], world: int) -> np.ndarray:
    """Returns a checked placement as int64 [layers, slots]."""
    taken = np.atleast_2d(_array(placement))
    if taken.ndim != 2 or taken.dtype.kind not in "iu" or taken.size == 0 or taken.shape[1] % world:
        _names.invalid(f"placement {list(taken.shape)}: must be experts [layers, slots], with a multiple of {world} slots")
    taken = taken.astype(np.int64)
    number = int(taken.max()) + 1 if experts is None else experts
    for layer, slots in enumerate(taken):
        if slots.min() < 0 or slots.max() >= number or len(np.unique(slots)) != number:
            _names.invalid(f"placement: layer {layer} must have each expert of 0 to {number - 1} in at least one slot, and no others")
    return taken


def rank_loads(placement: Any, counts: Any, *, world: int) -> np.ndarray:
    """Returns the number of routes to each rank, float64 [layers, W], with each expert's routes divided evenly among its slots.

    Args:
        placement: [layers, slots].
        counts: routes per expert, [layers, experts].
        world: W.

    Raises:
        InvalidArgument: the placement lacks an expert or is malformed.
    """
    given = np.atleast_2d(_array(counts)).astype(np.float64)
    taken = _placement(placement, given.shape[1], world)
    found = []
    for slots, routes in zip(taken, given):
        found.append((routes / np.bincount(slots, minlength=len(routes)))[slots].reshape(world, -1).sum(1))
    return np.array(found)


def _fresh(before: np.ndarray, counts: np.ndarray, world: int) -> np.ndarray:
    """Returns a placement of one layer that does not depend on the current one, as EPLB does: adds replicas of the experts with the
    busiest slots, then assigns slots, busiest first, to the least loaded rank with a free slot. Experts that stay on a rank keep
    their slots."""
    width, scaled = len(before) // world, counts << _BITS
    number = np.ones(len(counts), np.int64)
    for _ in range(len(before) - len(counts)):
        number[(scaled // number).argmax()] += 1
    shares = scaled // number
    slots, loads = before.reshape(world, width), np.zeros(world, np.int64)
    held: List[List[int]] = [[] for _ in range(world)]
    for expert in np.repeat(np.arange(len(counts)), number)[np.argsort(-np.repeat(shares, number), kind="stable")].tolist():
        free = [rank for rank in range(world) if len(held[rank]) < width]
        rank = min(free, key=lambda each: (expert in held[each], loads[each]))
        held[rank].append(expert)
        loads[rank] += shares[expert]
    found = np.full_like(slots, -1)
    for rank, experts in enumerate(held):
        for slot, expert in enumerate(slots[rank].tolist()):
            if expert in experts:
                experts.remove(expert)
                found[rank, slot] = expert
        found[rank, found[rank] < 0] = experts
    return found.reshape(-1)


def _placed(before: np.ndarray, counts: np.ndarray, world: int) -> np.ndarray:
    """Returns the slots of one layer: those before with few changes, or a new placement if it is better by more than 2 % of the
    mean."""
    found = []
    for slots in (before, None):
        layer = _Layer(_fresh(before, counts, world) if slots is None else slots, counts, world)
        for _ in range(4 * len(before)):
            if not layer.improve():
                break
        found.append(layer)
        if layer.loads.max() <= layer.limit:
            return layer.slots
    first, other = found
    return other.slots if other.loads.max() + (other.limit - other.target) * 2 < first.loads.max() else first.slots


def place(counts: Any, *, world: int, slots_per_rank: int, before: Any = None) -> np.ndarray:
    """Chooses a placement for even division. Changes few slots of `before`, until no rank exceeds the mean by more than 2 % or no
    single change reduces the excess; in the latter case, returns a new placement of all experts if that is better. Equal arguments
    yield equal placements on all machines.

    Args:
        counts: routes per expert, [layers, experts] or [experts].
        world: number of ranks.
        slots_per_rank: number of physical experts per rank.
        before: the current placement, [layers, slots]; None: experts in order, then again from the first, as in both engines.

    Returns:
        int64 [layers, slots].

    Raises:
        InvalidArgument: too few slots, or arguments that do not match.
    """
    taken, slots = _counts(counts), world * slots_per_rank
    layers, experts = taken.shape
    if slots < experts:
        _names.invalid(f"slots_per_rank = {slots_per_rank}: {slots} slots for {experts} experts; must be at least "
                       f"{-(-experts // world)}")
    start = np.tile(np.arange(slots) % experts, (layers, 1)) if before is None else _placement(before, experts, world)
    if start.shape != (layers, slots):
        _names.invalid(f"before {list(start.shape)}: must be [{layers}, {slots}]")
    return np.array([_placed(slots_before, routes, world) for routes, slots_before in zip(taken, start)])


# ---- ExpertMap ----


def from_expert_maps(maps: Sequence[ExpertMap], counts: Any = None) -> np.ndarray:
    """Returns the placement of one map per layer. Empty slots, which the engines do not support, receive replicas that balance
    `counts` ([layers, experts]; None: all experts are equally busy)."""
    if not maps or len({(each.num_experts, each.world, each.num_slots) for each in maps}) != 1:
        _names.invalid("maps: must be at least one, all of the same size")
    taken = _counts(np.ones((len(maps), maps[0].num_experts), np.int64) if counts is None else counts)
    if taken.shape != (len(maps), maps[0].num_experts):
        _names.invalid(f"counts {list(taken.shape)}: must be [{len(maps)}, {maps[0].num_experts}]")
    found = []
    for each, routes in zip(maps, taken):
        layer = _Layer(np.asarray(each.expert_of_slot, np.int64), routes, each.world)
        layer.fill()
        found.append(layer.slots)
    return np.array(found)


def to_expert_maps(placement: Any, *, world: int, num_experts: Optional[int] = None) -> List[ExpertMap]:
    """Returns one map per layer.

    Args:
        placement: [layers, slots], for example ``physical_to_logical_map`` of vLLM's EplbModelState or of SGLang's
            ExpertLocationMetadata, or the result of :func:`load`.
        world: number of ranks.
        num_experts: number of logical experts; None: as many as the placement contains.

    Raises:
        InvalidArgument: a layer without one of the experts.
    """
    taken = _placement(placement, num_experts, world)
    number = int(taken.max()) + 1 if num_experts is None else num_experts
    return [ExpertMap(each.astype(np.int32), num_experts=number, world=world) for each in taken]


# ---- Files ----


def _content(path: Any) -> Any:
    """Returns the content of a ``.json`` file or, of tensors and plain values, a ``.pt`` file."""
    if str(path).endswith(".json"):
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    import pickle

    import torch  # here, because only this format needs it

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        return _names.invalid(f"{path}: must be a file of torch.save with tensors and plain values: {error}")


def _kind(content: Any) -> str:
    return f"the entries {_names.listed(map(str, content))}" if isinstance(content, dict) else type(content).__name__


def load(path: Any) -> np.ndarray:
    """Returns the placement in a file for SGLang's ``--init-expert-location`` or of its recorder (``per_pass``, ``per_token``).

    Raises:
        InvalidArgument: the file has another format.
    """
    content = _content(path)
    for name in _MAPS:
        if isinstance(content, dict) and name in content:
            return _placement(content[name], None, 1)
    return _names.invalid(f"{path}: must have the entry {_names.listed(_MAPS)}, not {_kind(content)}")


def save(path: Any, placement: Any) -> None:
    """Writes a file for SGLang's ``--init-expert-location``, ``.json`` or ``.pt``."""
    taken = _placement(placement, None, 1)
    if str(path).endswith(".json"):
        with open(path, "w", encoding="utf-8") as file:
            json.dump({_MAPS[0]: taken.tolist()}, file)
    elif str(path).endswith(".pt"):
        import torch

        torch.save({_MAPS[0]: torch.from_numpy(taken)}, path)
    else:
        _names.invalid(f"{path}: must end in .json or .pt, the formats of --init-expert-location")


def load_counts(*paths: Any) -> np.ndarray:
    """Returns the number of routes to each logical expert, int64 [layers, experts], summed over steps and files.

    Args:
        paths: files of SGLang's recorder in any mode (``per_pass`` and ``per_token``: those of all ranks), or ``.pt`` or ``.json``
            files with an entry ``logical_count`` or only a tensor or list, [layers, experts] or [steps, layers, experts], as for
            EPLB's ``rebalance_experts``. ``.pt`` files may contain only tensors and plain values.

    Raises:
        InvalidArgument: a file has another format, or the sizes differ.
    """
    found = [_counts_in(path) for path in paths]
    if not found or len({each.shape for each in found}) != 1:
        _names.invalid(f"paths: must be at least one file, all with counts of the same size, not "
                       f"{[list(each.shape) for each in found]}")
    return np.sum(found, axis=0)


def _counts_in(path: Any) -> np.ndarray:
    content = _content(path)
    if isinstance(content, dict) and {"records", _MAPS[1]} <= content.keys():
        return _of_records(path, content)
    counts = np.asarray(content.get("logical_count")) if isinstance(content, dict) else np.asarray(content)
    if counts.dtype.kind not in "iuf" or counts.ndim not in (2, 3) or (counts < 0).any():
        _names.invalid(f"{path}: must have counts of routes, at least 0, [layers, experts] or [steps, layers, experts], in the entry "
                       f"logical_count or alone, not {_kind(content)}")
    return (counts if counts.ndim == 2 else counts.sum(0)).astype(np.int64)


def _of_records(path: Any, content: Any) -> np.ndarray:
    """Returns the counts of recordings in the modes per_pass and per_token, in which SGLang counts by physical expert."""
    logical = load(path)
    passes = [each.get("global_physical_count") for each in content["records"]]
    if not passes or any(each is None or tuple(each.shape) != logical.shape for each in passes):
        _names.invalid(f"{path}: each record must have a global_physical_count {list(logical.shape)}")
    found = np.zeros((len(logical), int(logical.max()) + 1), np.int64)
    np.add.at(found, (np.arange(len(logical))[:, None], logical), sum(np.asarray(each, np.int64) for each in passes))
    return found
