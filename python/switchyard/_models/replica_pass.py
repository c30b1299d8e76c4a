# SPDX-License-Identifier: Apache-2.0
"""The forward pass of a module with replicas, and its gradients. Rows of owned experts and rows of replicas form two ranges. A twin
of the module with separate tensors computes each range, so the weights of owned experts are not copied."""
from __future__ import annotations

import struct
from typing import Any, List, Sequence, Tuple

import torch
from torch.autograd.function import once_differentiable

from ..errors import Mismatch
from .replicas import Layout, Replicas, sum_gradients


class Held:
    """The replicas of one module on this rank. Each copy of a module has a separate object."""

    def __init__(self) -> None:
        self.tensors: List[Any] = []
        self.key: Any = None  #: state of the owned weights when `tensors` were copied; None: unknown
        self._storages: List[Any] = []  # kept alive, so that no other storage has the same identity

    def refresh(self, share: Any, replicas: Replicas, weights: Sequence[Any]) -> bool:
        """Collective. Copies the weights of all replicas if any rank records gradients or has changed weights. Returns True if the
        pass computes gradients of the weights; the result is equal on all ranks."""
        records = torch.is_grad_enabled()
        key = None if records else self._key(share, replicas)
        mask = sum(1 << i for i, each in enumerate(weights) if records and each.requires_grad)
        if _agree(share, key is None or key != self.key, mask):
            self.tensors = []
            self.tensors = replicas.fetch(weights)
        self.key = key  # after training, the next pass copies weights: writes through .data are not detectable
        self._storages = [] if key is None else [each.untyped_storage() for each in share.parameters().values()]
        return mask != 0

    @staticmethod
    def _key(share: Any, replicas: Replicas) -> Any:
        parameters = share.parameters()
        if len(parameters) < len(share.names) or any(each.is_inference() for each in parameters.values()):
            return None
        return replicas.version, [(each.untyped_storage()._cdata, each.data_ptr(), each._version) for each in parameters.values()]


def _agree(share: Any, changed: bool, mask: int) -> bool:
    """Collective. Returns True if weights have changed on any rank. Raises Mismatch if the ranks run different modules or record
    gradients of different weights."""
    every = [struct.unpack("<q?Q", each) for each in share.group.all_gather(struct.pack("<q?Q", share.site, changed, mask))]
    for r, (site, _, its_mask) in enumerate(every):
        if site != share.site:
            names = share.group._sites
            raise Mismatch(f"forward in {names.get(site, 'another module')} on rank {r}")
        if its_mask != mask:
            name = next(each for i, each in enumerate(share.names) if (its_mask ^ mask) >> i & 1)
            raise Mismatch(f"{share.name}: either all ranks or none must record gradients of {name}; rank {r} and this rank differ")
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


@torch.compiler.disable
def forward(share: Any, replicas: Replicas, held: Held, x: Any, ids: Any, topk_weights: Any) -> Any:
    """Collective. Runs the pass of a share with replicas. Compiled graphs end before this function and continue after it."""
    layout, weights = replicas.layout, [getattr(share._module, name) for name in share.names]
    trains = held.refresh(share, replicas, weights)
    rows, handle = share._exchange.dispatch(x, replicas.selector.select(ids), topk_weights)
    if not layout.any:
        rows = share._by_module(rows, handle, False)
    else:
        copies = held.tensors
        if trains:
            rows, weights, copies = _replicated(layout, share.group, rows, weights, copies)
        rows = _compute(share, layout, rows, handle, weights, copies)
    return share._exchange.combine(rows.contiguous(), handle, order="per_route")


__all__ = ["Held", "forward"]
