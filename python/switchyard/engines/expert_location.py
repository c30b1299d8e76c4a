# SPDX-License-Identifier: Apache-2.0
"""Placements of experts for the load balancers (EPLB) of vLLM and SGLang: the logical expert of each physical expert, int64
[layers, slots], with the slots of W ranks in order. Both engines divide the routes to an expert evenly among its slots, unlike
:class:`switchyard.SlotSelector`. This module imports neither engine; only ``.pt`` files need torch.

    counts = load_counts("expert_distribution_recorder_1.pt")            # [layers, experts]
    save("placement.json", place(counts, world=8, slots_per_rank=34))    # for SGLang's --init-expert-location
"""
from __future__ import annotations

import json
import math
import os
from typing import Any, Iterable, List, Optional, Tuple

import numpy as np

from .._abi import kinds as _kinds, names as _names
from ..expert_map import ExpertMap

__all__ = ["from_expert_maps", "load", "load_counts", "place", "rank_loads", "save", "to_expert_maps"]

_MAPS = ("physical_to_logical_map", "last_physical_to_logical_map")
#: Loads are integers with this many fractional bits, so all ranks and machines compute the same placement.
_BITS = 16
_SIZE = _kinds.Integer(1, _kinds.INT32)
_ROUTES = "numbers of routes, at least 0 and less than 2^63"


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


def _array(name: str, given: Any, must: str, *, dims: Tuple[int, ...] = (1, 2), whole: bool = False) -> np.ndarray:
    """Returns an array, list or tensor of any device and number type, with at least 2 dimensions: int64 if all values are whole,
    otherwise float64.

    Raises:
        InvalidArgument: another number of dimensions than `dims`, no elements, values outside [0, 2^63), or fractions if `whole`.
    """
    try:
        if hasattr(given, "detach"):
            given = given.detach().cpu()
            given = given.double() if given.is_floating_point() else given  # numpy lacks bf16
        taken = np.asarray(given)
    except Exception as error:  # ragged lists and objects of the caller's
        _names.invalid(f"{name}: must be {must}: {error}")
    if taken.dtype.kind not in "iuf" or taken.ndim not in dims or 0 in taken.shape[-2:]:
        _names.invalid(f"{name} {list(taken.shape)}, {taken.dtype}: must be {must}")
    real = taken.dtype.kind == "f"
    taken = np.atleast_2d(taken.astype(np.float64) if real else taken)
    fits = bool(((taken >= 0) & ((taken < 2.0 ** 63) if real else (taken <= _kinds.INT64))).all())
    integral = fits and (not real or bool((np.floor(taken) == taken).all()))
    if not fits or (whole and not integral):
        _names.invalid(f"{name} {list(taken.shape)}: must be {must}")
    return taken.astype(np.int64) if integral else taken


def _counts(counts: Any) -> np.ndarray:
    """Returns counts as int64 [layers, E]; large counts are scaled down so that loads fit into 64 bits. Counts with fractions are
    multiplied by the power of two that brings the largest sum of a layer into [2^39, 2^40), and then truncated. All machines
    compute the same."""
    taken = _array("counts", counts, f"{_ROUTES}, [layers, experts]")
    if taken.dtype == np.float64:
        largest = max(math.fsum(each) for each in taken)
        taken = np.ldexp(taken, 40 - math.frexp(largest)[1]).astype(np.int64)
    while int(taken.max()) * taken.shape[1] >> (61 - _BITS):
        taken = taken >> 1
    return taken


def _placement(name: str, placement: Any, experts: Optional[int], world: int) -> np.ndarray:
    """Returns a checked placement as int64 [layers, slots]."""
    must = "experts, at least 0, [layers, slots]" + (f", with a multiple of {world} slots" if world > 1 else "")
    taken = _array(name, placement, must, whole=True)
    if taken.shape[1] % world:
        _names.invalid(f"{name} {list(taken.shape)}: must be {must}")
    number = int(taken.max()) + 1 if experts is None else experts
    for layer, slots in enumerate(taken):
        if slots.max() >= number or len(np.unique(slots)) != number:
            _names.invalid(f"{name}: layer {layer} must have each expert of 0 to {number - 1} in at least one slot, and no others")
    return taken


def rank_loads(placement: Any, counts: Any, *, world: int) -> np.ndarray:
    """Returns the number of routes to each rank, float64 [layers, W], with each expert's routes divided evenly among its slots.

    Args:
        placement: [layers, slots].
        counts: routes per expert, [layers, experts].
        world: W.

    Raises:
        InvalidArgument: the placement lacks an expert, or arguments are malformed or do not match.
    """
    world = _SIZE.check("world", world)
    given = _array("counts", counts, f"{_ROUTES}, [layers, experts]").astype(np.float64)
    taken = _placement("placement", placement, given.shape[1], world)
    if len(given) != len(taken):
        _names.invalid(f"counts {list(given.shape)}: must be [{len(taken)}, {given.shape[1]}], with the layers of placement")
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
        counts: routes per expert, [layers, experts] or [experts], or relative loads with fractions. Less than 2^63.
        world: number of ranks.
        slots_per_rank: number of physical experts per rank.
        before: the current placement, [layers, slots]; None: experts in order, then again from the first, as in both engines.

    Returns:
        int64 [layers, slots].

    Raises:
        InvalidArgument: too few slots, or arguments that are malformed or do not match.
    """
    world, slots_per_rank = _SIZE.check("world", world), _SIZE.check("slots_per_rank", slots_per_rank)
    taken, slots = _counts(counts), world * slots_per_rank
    layers, experts = taken.shape
    if slots < experts:
        _names.invalid(f"slots_per_rank = {slots_per_rank}: {slots} slots for {experts} experts; must be at least "
                       f"{-(-experts // world)}")
    start = np.tile(np.arange(slots) % experts, (layers, 1)) if before is None else _placement("before", before, experts, world)
    if start.shape != (layers, slots):
        _names.invalid(f"before {list(start.shape)}: must be [{layers}, {slots}]")
    return np.array([_placed(slots_before, routes, world) for routes, slots_before in zip(taken, start)])


# ---- ExpertMap ----


def from_expert_maps(maps: Iterable[ExpertMap], counts: Any = None) -> np.ndarray:
    """Returns the placement of one map per layer. Empty slots, which the engines do not support, receive replicas that balance
    `counts` (as for :func:`place`, [layers, experts]; None: all experts are equally busy).

    Raises:
        InvalidArgument: no maps, maps of different sizes, or counts that do not match.
    """
    given = list(maps) if isinstance(maps, Iterable) else []
    if not all(isinstance(each, ExpertMap) for each in given) \
            or len({(each.num_experts, each.world, each.num_slots) for each in given}) != 1:
        _names.invalid("maps: must be ExpertMaps, at least one, all of the same size")
    layers, experts = len(given), given[0].num_experts
    taken = _counts(np.ones((layers, experts), np.int64) if counts is None else counts)
    if taken.shape != (layers, experts):
        _names.invalid(f"counts {list(taken.shape)}: must be [{layers}, {experts}]")
    found = []
    for each, routes in zip(given, taken):
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
        InvalidArgument: a layer without one of the experts, or malformed arguments.
    """
    world, num_experts = _SIZE.check("world", world), _SIZE._replace(optional=True).check("num_experts", num_experts)
    taken = _placement("placement", placement, num_experts, world)
    number = int(taken.max()) + 1 if num_experts is None else num_experts
    return [ExpertMap(each.astype(np.int32), num_experts=number, world=world) for each in taken]


# ---- Files ----


def _path(name: str, given: Any) -> str:
    return os.fspath(_kinds.Path().check(name, given))


def _content(path: str) -> Any:
    """Returns the content of a ``.json`` file or, of tensors and plain values, a ``.pt`` file."""
    try:
        if path.endswith(".json"):
            with open(path, encoding="utf-8") as file:
                return json.load(file)
        import torch  # here, because only this format needs it

        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, ImportError, MemoryError):
        raise
    except Exception as error:  # a damaged file can cause any error in pickle
        kind = "JSON in UTF-8" if path.endswith(".json") else "a file of torch.save with tensors and plain values"
        return _names.invalid(f"{path}: must be {kind}: {type(error).__name__}: {error}")


def _kind(content: Any) -> str:
    return f"the entries {_names.listed(content)}" if isinstance(content, dict) and content else type(content).__name__


def _placement_in(path: str, content: Any) -> np.ndarray:
    for name in _MAPS:
        if isinstance(content, dict) and name in content:
            return _placement(f"{path}: {name}", content[name], None, 1)
    return _names.invalid(f"{path}: must have the entry {_names.listed(_MAPS)}, not {_kind(content)}")


def load(path: Any) -> np.ndarray:
    """Returns the placement in a file for SGLang's ``--init-expert-location`` or of its recorder (``per_pass``, ``per_token``).

    Raises:
        InvalidArgument: the file has another format.
        OSError: the file cannot be read.
    """
    named = _path("path", path)
    return _placement_in(named, _content(named))


def save(path: Any, placement: Any) -> None:
    """Writes a file for SGLang's ``--init-expert-location``, ``.json`` or ``.pt``."""
    named, taken = _path("path", path), _placement("placement", placement, None, 1)
    if named.endswith(".json"):
        with open(named, "w", encoding="utf-8") as file:
            json.dump({_MAPS[0]: taken.tolist()}, file)
    elif named.endswith(".pt"):
        import torch

        torch.save({_MAPS[0]: torch.from_numpy(taken)}, named)
    else:
        _names.invalid(f"{named}: must end in .json or .pt, the formats of --init-expert-location")


def load_counts(*paths: Any) -> np.ndarray:
    """Returns the number of routes to each logical expert, int64 [layers, experts], summed over steps and files.

    Args:
        paths: files of SGLang's recorder in any mode (``per_pass`` and ``per_token``: those of all ranks), or ``.pt`` or ``.json``
            files with an entry ``logical_count`` or only a tensor or list, [layers, experts] or [steps, layers, experts], as for
            EPLB's ``rebalance_experts``. ``.pt`` files may contain only tensors and plain values. Counts may have
            any number type, but no fractions.

    Raises:
        InvalidArgument: a file has another format, the sizes differ, or a sum is 2^63 or more.
        OSError: a file cannot be read.
    """
    found = [_counts_in(_path("paths", path)) for path in paths]
    if not found or len({each.shape for each in found}) != 1:
        _names.invalid(f"paths: must be at least one file, all with counts of the same size, not "
                       f"{[list(each.shape) for each in found]}")
    return _sum("paths", found, found[0].shape)


def _sum(name: str, parts: Iterable[np.ndarray], shape: Tuple[int, ...]) -> np.ndarray:
    """Returns the sum of arrays of `shape` with values in [0, 2^63)."""
    found = np.zeros(shape, np.int64)
    for each in parts:
        found += each
        if (found < 0).any():  # one addition of such values wraps into the negative
            _names.invalid(f"{name}: the sum of counts must be less than 2^63")
    return found


def _counts_in(path: str) -> np.ndarray:
    content = _content(path)
    if isinstance(content, dict) and {"records", _MAPS[1]} <= content.keys():
        return _of_records(path, content)
    if isinstance(content, dict) and "logical_count" not in content:
        _names.invalid(f"{path}: must have counts of routes in the entry logical_count or alone, not {_kind(content)}")
    counts = _array(f"{path}: counts", content["logical_count"] if isinstance(content, dict) else content,
                    f"whole {_ROUTES}, [layers, experts] or [steps, layers, experts]", dims=(2, 3), whole=True)
    return _sum(path, counts if counts.ndim == 3 else counts[None], counts.shape[-2:])


def _of_records(path: str, content: Any) -> np.ndarray:
    """Returns the counts of recordings in the modes per_pass and per_token, in which SGLang counts by physical expert."""
    logical, records, name = _placement_in(path, content), content["records"], "global_physical_count"
    must = f"{path}: each record must have a {name} {list(logical.shape)}"
    if not isinstance(records, (list, tuple)) or not records or not all(isinstance(each, dict) and name in each for each in records):
        _names.invalid(must)
    passes = [_array(f"{path}: {name}", each[name], f"whole {_ROUTES}, {list(logical.shape)}", dims=(2,), whole=True)
              for each in records]
    if any(each.shape != logical.shape for each in passes):
        _names.invalid(must)
    slots, experts = _sum(path, passes, logical.shape), np.arange(int(logical.max()) + 1)
    parts = (np.where(of[:, None] == experts, routes[:, None], 0) for of, routes in zip(logical.T, slots.T))
    return _sum(path, parts, (len(logical), len(experts)))
