# SPDX-License-Identifier: Apache-2.0
"""The forward pass of a module with replicas, and its gradients. Rows of owned experts and rows of replicas form two ranges. A twin
of the module with separate tensors, or separate grouped products, compute each range, so the weights of owned experts are not copied.
A layer reads each weight as one tensor, which therefore contains copies for all slots."""
from __future__ import annotations

import struct
from typing import Any, List, Optional, Sequence, Tuple

import torch
from torch.autograd.function import once_differentiable

from ..errors import Mismatch
from .find import WAYS
from .products import Products, multiply, products_of
from .replicas import Layout, Replicas, sum_gradients


class Held:
    """The replicas of one module on this rank. Each copy of a module has a separate object."""

    def __init__(self) -> None:
        self.tensors: List[Any] = []  #: weights of the replicas; empty if slots() contains them
        self.products: Optional[Products] = None  #: products that read `tensors`; None: not created yet
        self.key: Any = None  #: state of the owned weights when they were last copied; None: unknown
        self._slots: List[Any] = []
        self._storages: List[Any] = []  # kept alive, so that no other storage has the same identity

    def refresh(self, share: Any, replicas: Replicas, weights: Sequence[Any], way: str) -> bool:
        """Collective. Copies the weights of all replicas if any rank records gradients or has changed weights. Returns True if the
        pass computes gradients of the weights; the result is equal on all ranks."""
        records = torch.is_grad_enabled()
        key = None if records else self._key(share, replicas)
        mask = sum(1 << i for i, each in enumerate(weights) if records and each.requires_grad)
        if _agree(share, key is None or key != self.key, mask, way):
            self.key, self.tensors, self.products = None, [], None
            self.tensors = replicas.fetch(weights)
            if way == "layer":
                self._fill(weights, replicas.layout)
        self.key = key  # after training, the next pass copies weights: writes through .data are not detectable
        self._storages = [] if key is None else [each.untyped_storage() for each in share.parameters().values()]
        return mask != 0

    def slots(self, weights: Sequence[Any], layout: Layout) -> List[Any]:
        """Returns the weights of all slots for a layer, [C, ...]. weights: those of owned experts. The memory
        changes only with their device, type or shape."""
        shapes = [(layout.given.slots_per_rank, *each.shape[1:]) for each in weights]
        if [(each.shape, each.dtype, each.device) for each in self._slots] != [(s, w.dtype, w.device) for s, w in zip(shapes, weights)]:
            self._slots, self.key = [], None
            with torch.inference_mode(False):  # later passes write to them in any mode
                self._slots = [each.new_zeros(shape) for each, shape in zip(weights, shapes)]
        return self._slots

    def _fill(self, weights: Sequence[Any], layout: Layout) -> None:
        """Copies the weights of all slots in stream order on the current stream, and discards `tensors`."""
        own = [each.detach() for each in weights]
        end, slots = len(layout.owned), self.slots(own, layout)
        with torch.no_grad():
            for array, each, copied in zip(slots, own, self.tensors):
                for i, row in enumerate(layout.owned):
                    array[i].copy_(each[row])
                array[end:end + len(copied)].copy_(copied)
        self.tensors = []

    @staticmethod
    def _key(share: Any, replicas: Replicas) -> Any:
        parameters = share.parameters()
        if len(parameters) < len(share.names) or any(each.is_inference() for each in parameters.values()):
            return None
        return replicas.version, [(each.untyped_storage()._cdata, each.data_ptr(), each._version) for each in parameters.values()]


def _agree(share: Any, changed: bool, mask: int, way: str) -> bool:
    """Collective. Returns True if weights have changed on any rank. Raises Mismatch if the ranks run different modules, record
    gradients of different weights, or compute their experts in different ways."""
    state = struct.pack("<q?QB", share.site, changed, mask, WAYS.index(way))
    every = [struct.unpack("<q?QB", each) for each in share.group.all_gather(state)]
    for r, (site, _, its_mask, its_way) in enumerate(every):
        if site != share.site:
            names = share.group._sites
            raise Mismatch(f"forward in {names.get(site, 'another module')} on rank {r}")
        if its_mask != mask:
            name = next(each for i, each in enumerate(share.names) if (its_mask ^ mask) >> i & 1)
            raise Mismatch(f"{share.name}: either all ranks or none must record gradients of {name}; rank {r} and this rank differ")
        if WAYS[its_way] != way:
            raise Mismatch(f"{share.name}: either all ranks or none must record gradients; rank {r} computes the experts with "
                           f"{WAYS[its_way]!r}, this rank with {way!r}")
    return any(each[1] for each in every)


class _Replicate(torch.autograd.Function):
    """Identity function of rows, owned weights and replicas' weights. It includes the rows so that the backward pass runs on every
    rank, even on a rank without rows."""

    @staticmethod
    def forward(ctx: Any, layout: Layout, group: Any, rows: Any, *tensors: Any) -> Tuple[Any, ...]:
        ctx.layout, ctx.group, ctx.weights = layout, group, [each.detach() for each in tensors[:len(tensors) // 2]]
        ctx.set_materialize_grads(False)
        return (rows.detach(), *(each.detach() for each in tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Any, *grads: Any) -> Tuple[Any, ...]:
        count = len(ctx.weights)
        totals = sum_gradients(ctx.layout, ctx.group, ctx.weights, grads[:count], grads[count:])
        return (None, None, grad_rows, *totals, *[None] * count)


def _replicated(layout: Layout, group: Any, rows: Any, weights: List[Any], replicas: List[Any]) -> Tuple[Any, List[Any], List[Any]]:
    """Returns rows, weights and replicas with the gradient of _Replicate for weights that require one."""
    trained = [i for i, each in enumerate(weights) if each.requires_grad]
    rows, *tensors = _Replicate.apply(layout, group, rows, *(weights[i] for i in trained), *(replicas[i] for i in trained))
    weights, replicas = list(weights), list(replicas)
    for place, i in enumerate(trained):
        weights[i], replicas[i] = tensors[place], tensors[len(trained) + place]
    return rows, weights, replicas


def _run(share: Any, rows: Any, weights: Sequence[Any], experts: Any) -> Any:
    """Computes rows with the module's class and the given weights. experts: for each row, the index of its expert in `weights`."""
    twin = object.__new__(share.kind)
    vars(twin).update({name: value for name, value in vars(share._module).items() if name != "forward"},
                      _parameters={**share._module._parameters, **dict(zip(share.names, weights))}, num_experts=weights[0].shape[0])
    made = share._experts.__func__(twin, rows, experts[:, None], torch.ones((rows.shape[0], 1), dtype=rows.dtype, device=rows.device))
    return made if made.dim() == 2 else made.reshape(rows.shape[0], -1)


def _compute(share: Any, layout: Layout, rows: Any, handle: Any, weights: Sequence[Any], replicas: Sequence[Any]) -> Any:
    """Computes rows in order of slots. Rows after those of the last slot belong to no expert."""
    owned, slots = len(layout.owned), len(layout.owned) + len(layout.replicas)
    if rows.shape[0] == 0 or slots == 0:
        return rows
    slot = torch.searchsorted(handle.offsets.long(), torch.arange(rows.shape[0], device=rows.device), right=True).clamp(max=slots - 1)
    end = rows.shape[0] if owned == slots else int(handle.counts().aligned_per_expert[:owned].sum())
    parts = []
    if end > 0:
        own = slot[:end] if layout.owned == list(range(owned)) else torch.tensor(layout.owned, device=rows.device)[slot[:end]]
        parts.append(_run(share, rows[:end], weights, own))
    if end < rows.shape[0]:
        parts.append(_run(share, rows[end:], replicas, slot[end:] - owned))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _multiply(share: Any, layout: Layout, held: Held, rows: Any, handle: Any) -> Any:
    """Computes rows in order of slots with grouped products, without reading the number of rows on the host."""
    owned, slots = len(layout.owned), len(layout.owned) + len(layout.replicas)
    if rows.shape[0] == 0 or slots == 0:
        return rows
    parts = []
    if owned > 0:
        parts.append((share.made_products(), handle._of_experts(layout.slots_of_mine(rows.device))))
    if layout.replicas:
        held.products = held.products or products_of(*share.pair(held.tensors))
        parts.append((held.products, handle._of_experts(slice(owned, slots))))
    return multiply(parts, rows, share._exchange.allocate_rows(handle))


@torch.compiler.disable
def forward(share: Any, replicas: Replicas, held: Held, x: Any, ids: Any, topk_weights: Any) -> Any:
    """Collective. Runs the pass of a share with replicas. Compiled graphs end before this function and continue after it."""
    way = share.way(x, topk_weights)
    layout, weights = replicas.layout, [getattr(share._module, name) for name in share.names]
    trains = held.refresh(share, replicas, weights, way)
    if way == "layer":
        return share.made_layer()(x, ids, topk_weights, selector=replicas.selector)
    rows, handle = share._exchange.dispatch(x, replicas.selector.select(ids), topk_weights)
    if way == "grouped":
        rows = _multiply(share, layout, held, rows, handle)
    elif not layout.any:
        rows = share._by_module(rows, handle, False)
    else:
        copies = held.tensors
        if trains:
            rows, weights, copies = _replicated(layout, share.group, rows, weights, copies)
        rows = _compute(share, layout, rows, handle, weights, copies)
    return share._exchange.combine(rows.contiguous(), handle, order="per_route")


__all__ = ["Held", "forward"]
