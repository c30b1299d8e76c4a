# SPDX-License-Identifier: Apache-2.0
"""Replicas of divided experts: the positions of experts and replicas on each rank, and copies of weights and gradients. For every
map, the owner of an expert is its rank in the partition without replicas. All replicas have the weights of the owner's parameters.

Notation: W ranks, E experts, C slots per rank.
"""
from __future__ import annotations

import hashlib
from typing import Any, Dict, List, Optional, Sequence, Tuple

from .._abi.kinds import shown
from ..errors import InvalidArgument, InvalidType, Mismatch
from ..expert_map import ExpertMap, SlotSelector, move_weights
from ..group import Group, first_expert

#: Upper limit of the heap memory that one copy of weights or gradients uses.
STAGING_BYTES = 64 << 20


class Layout:
    """A map, with the positions that one rank needs. Immutable.

    routed: the map for routing. The slots of each rank contain owned experts in ascending order, then replicas without
    repetitions; the remaining slots are empty.
    mine: experts that this rank owns. owned: index in `mine` of each slot of an owned expert. replicas: expert of each replica
    on this rank. weights, gradients: the moves. sums: for each owned expert with replicas, its index in `mine` and the rows of
    its gradients in order of rank (None: the owner's gradient).
    """

    def __init__(self, expert_map: ExpertMap, rank: int) -> None:
        world, count = expert_map.world, expert_map.num_experts
        first = [first_expert(count, world, r) for r in range(world + 1)]
        held = [list(dict.fromkeys(each for each in slots if each >= 0)) for slots in expert_map.expert_of_slot.reshape(world, -1).tolist()]
        own = [sorted(each for each in held[r] if first[r] <= each < first[r + 1]) for r in range(world)]
        replicas = [[each for each in held[r] if not first[r] <= each < first[r + 1]] for r in range(world)]
        self.given, self.routed = expert_map, _map_of([a + b for a, b in zip(own, replicas)], count, expert_map.slots_per_rank)
        self.mine, self.replicas = range(first[rank], first[rank + 1]), replicas[rank]
        self.owned = [each - self.mine.start for each in own[rank]]
        self._slots_of_mine: Dict[Any, Any] = {}
        self.any = any(replicas)
        if not self.any:
            return
        copied = sorted({each for ranks in replicas for each in ranks})
        sent = [[each for each in copied if first[r] <= each < first[r + 1]] for r in range(world)]
        self.sent = [each - self.mine.start for each in sent[rank]]
        self.weights = _Moves([[-1] * len(a) + b for a, b in zip(replicas, sent)], [a + b for a, b in zip(replicas, sent)], copied)
        # Each replica's gradient moves to a separate row at the owner.
        copies = [(each, r) for r in range(world) for each in replicas[r]]
        landed = [sorted(copy for copy in copies if first[r] <= copy[0] < first[r + 1]) for r in range(world)]
        leaving = [[(each, r) for each in replicas[r]] for r in range(world)]
        self.gradients = _Moves([a + [-1] * len(b) for a, b in zip(leaving, landed)], [a + b for a, b in zip(leaving, landed)], copies)
        self.sums = [(each - self.mine.start, self._terms(each, rank, each in own[rank], landed[rank])) for each in sent[rank]]

    def slots_of_mine(self, device: Any) -> Any:
        """Returns the slots of the experts in `mine`, for Handle._of_experts. The first call on a device copies them to it."""
        if device not in self._slots_of_mine:
            import torch

            slots = {row: slot for slot, row in enumerate(self.owned)}
            all_owned = len(slots) == len(self.mine)  # slots are in ascending order of experts
            self._slots_of_mine[device] = slice(0, len(slots)) if all_owned else torch.tensor(
                [slots.get(row, -1) for row in range(len(self.mine))], device=device)
        return self._slots_of_mine[device]

    def _terms(self, expert: int, rank: int, here: bool, landed: Sequence[Tuple[int, int]]) -> List[Optional[int]]:
        rows: Dict[int, Optional[int]] = {copy[1]: len(self.replicas) + i for i, copy in enumerate(landed) if copy[0] == expert}
        if here:
            rows[rank] = None
        return [rows[r] for r in sorted(rows)]


class _Moves:
    """Arguments of move_weights. rows: number of sets of weights in each rank's array."""

    def __init__(self, before: Sequence[Sequence[Any]], after: Sequence[Sequence[Any]], things: Sequence[Any]) -> None:
        number = {**{each: i for i, each in enumerate(things)}, -1: -1}
        self.rows = max(map(len, after))
        self.before, self.after = (_map_of([[number[each] for each in row] for row in rows], len(things), self.rows) for rows in (before, after))

    def move(self, group: Group, arrays: Sequence[Any]) -> None:
        """Collective. arrays: dense tensors [rows, ...] of any types, moved in place as bytes."""
        import torch

        flat = [each.reshape(self.rows, -1).view(torch.uint8) for each in arrays if each.numel() > 0]
        move_weights(group, self.before, self.after, *flat, staging_bytes=STAGING_BYTES)


def _map_of(rows: Sequence[Sequence[int]], num_experts: int, slots: int) -> ExpertMap:
    import numpy as np

    table = np.full((len(rows), slots), -1, np.int32)
    for r, row in enumerate(rows):
        table[r, :len(row)] = row
    return ExpertMap(table.reshape(-1), num_experts=num_experts, world=len(rows))


class Replicas:
    """The map of one experts module, shared by copies of the module. Creation is collective."""

    def __init__(self, name: str, group: Group, expert_map: ExpertMap) -> None:
        self.name, self.group, self.version = name, group, 1
        self.layout = Layout(expert_map, group.rank)
        self.selector = SlotSelector(group, self.layout.routed)

    def set_map(self, expert_map: ExpertMap, routes: Any) -> None:
        """Collective. The next pass copies the weights of all replicas."""
        layout = Layout(expert_map, self.group.rank)
        self.selector.set_map(layout.routed, routes if routes.any() else None)
        self.layout, self.version = layout, self.version + 1

    def fetch(self, weights: Sequence[Any]) -> List[Any]:
        """Collective. Returns the weights of this rank's replicas, [replicas, ...]. weights: those of owned experts, [mine, ...]. Does
        not overwrite tensors that earlier calls returned."""
        import torch

        layout, count = self.layout, len(self.layout.replicas)
        if not layout.any:
            return [each[:0].detach() for each in weights]
        with torch.no_grad():
            arrays = [each.new_empty((layout.weights.rows, *each.shape[1:])) for each in weights]
            for array, each in zip(arrays, weights):
                for i, row in enumerate(layout.sent):
                    array[count + i].copy_(each[row])
            layout.weights.move(self.group, arrays)
            return [array if array.shape[0] == count else array[:count].clone() for array in arrays]


def sum_gradients(layout: Layout, group: Group, weights: Sequence[Any], own: Sequence[Any], replicas: Sequence[Any]) -> List[Any]:
    """Collective. Returns the gradients of the owned experts, [mine, ...], including those of their replicas: for each expert, a
    sum in order of rank in float32 (float64 weights: in float64), rounded once. weights: tensors with the shapes and types of the
    results. own, replicas: this rank's gradients, [mine, ...] and [replicas, ...]; None: zeros."""
    import torch

    count, arrays = len(layout.replicas), []
    for like, each in zip(weights, replicas):
        array = like.new_empty((layout.gradients.rows, *like.shape[1:]))
        array[:count] = 0 if each is None else each
        arrays.append(array)
    layout.gradients.move(group, arrays)
    results = []
    for like, gradient, array in zip(weights, own, arrays):
        result = torch.zeros_like(like) if gradient is None else gradient
        wide = torch.promote_types(like.dtype, torch.float32)
        if layout.sums and gradient is not None:
            result = gradient.clone()  # autograd owns the argument
        for index, rows in layout.sums:
            terms = [result[index] if row is None else array[row] for row in rows]
            total = terms[0].to(wide, copy=True)
            for term in terms[1:]:
                total += term
            result[index] = total
        results.append(result)
    return results


# ---- Arguments ----


def maps_of(replicas: Any, experts: Dict[str, int], world: int) -> Dict[str, ExpertMap]:
    """Returns the map of each module with replicas. experts: number of experts of each module. Raises InvalidArgument."""
    if replicas is None:
        return {}
    for each in replicas.values() if isinstance(replicas, dict) else [replicas]:
        if not isinstance(each, ExpertMap):
            raise InvalidType(f"replicas contains {shown(each)} ({type(each).__name__}): must be an ExpertMap, a dict from names of experts modules "
                              "to ExpertMaps, or None")
    maps = {name: replicas for name in experts} if isinstance(replicas, ExpertMap) else replicas
    for name, each in maps.items():
        if name not in experts:
            raise InvalidArgument(f"replicas: {name!r} is not an experts module; allowed: {', '.join(experts)}")
        if each.num_experts != experts[name]:
            raise InvalidArgument(f"replicas: the map of {name} has {each.num_experts} experts; the module has {experts[name]}")
        if each.world != world:
            raise InvalidArgument(f"replicas: the map of {name} is for {each.world} ranks; the group has {world}")
    return {name: maps[name] for name in experts if name in maps}


def check_support(modules: Dict[str, Any]) -> None:
    """Raises an error if these modules cannot have replicas."""
    for name, module in modules.items():
        if "forward" in vars(module):
            raise InvalidArgument(f"replicas: the forward of {name} is replaced on the module; divide the model first")


def agree(group: Group, subject: str, maps: Optional[Dict[str, ExpertMap]]) -> None:
    """Collective. Raises Mismatch on all ranks if the maps, or whether there are any, differ by rank."""
    text = repr(maps is not None and [(name, each.num_experts, each.world, each.expert_of_slot.tolist()) for name, each in maps.items()])
    every = group._agree(subject, hashlib.sha256(text.encode()).digest())
    for r, each in enumerate(every):
        if each != every[0]:
            error = Mismatch(f"{subject}: replicas differ between rank 0 and rank {r}")
            error.peers_know = True  # type: ignore[attr-defined]
            raise error


def staging(modules: Sequence[Any], slots: int) -> int:
    """Returns the bytes of heap memory that copies for these modules need. slots: number of slots on all ranks."""
    sizes = [each[:1].numel() * each.element_size() for module in modules for each in module.parameters(recurse=False) if each.dim() > 0]
    return min(STAGING_BYTES, 2 * slots * (-(-max(sizes) // 256) * 256)) + 4096


__all__ = ["Layout", "Replicas", "agree", "check_support", "maps_of", "staging", "sum_gradients"]
