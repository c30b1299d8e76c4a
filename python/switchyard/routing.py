# SPDX-License-Identifier: Apache-2.0
"""Computes the counts of a routing without sending any rows."""
from __future__ import annotations

from typing import Any

from ._abi import arguments as _arguments, arrays as _arrays, names as _names
from ._abi.arguments import checked
from ._abi.arrays import I32, I64, U8, TorchArrays
from ._abi.ffi import byref, check, library, structs
from .handle import RoutingLayout, stored

__all__ = ["routing_layout"]

_TAKERS = {backend: _arguments.bind("routing_layout", backend) for backend in (_names.CPU, _names.CUDA)}


@checked("routing_layout")
def routing_layout(topk_ids: Any, *, num_experts: int, world: int) -> RoutingLayout:
    """Counts the tokens per rank and per expert in `topk_ids`, int32 or int64 [T, K]. Requires no group. For ids in host
    memory, returns numpy arrays. For a tensor on a GPU, a single kernel on the GPU's current stream computes the counts without
    synchronizing; the results are tensors on that GPU, and at most 32768 experts are supported."""
    return layout_of_checked(topk_ids, num_experts, world)


def layout_of_checked(topk_ids: Any, num_experts: int, world: int) -> RoutingLayout:
    """Like :func:`routing_layout`, for callers that pass ints in [0, 2^31) as `num_experts` and `world`."""
    if _arrays.is_tensor(topk_ids) and topk_ids.is_cuda:
        return _on_gpu(topk_ids, num_experts, world)
    taken = _TAKERS[_names.CPU].topk_ids(topk_ids)
    given = structs.ExpertIds(data=taken.pointer, num_tokens=taken.shape[0], topk=taken.shape[1], is_int64=int(taken.code == I64))
    out = structs.RoutingLayout()
    check(library().functions.sy_routing_layout_of(byref(given), num_experts, world, byref(out)))
    arrays = stored(out, [("num_tokens_per_rank", (world,), I32), ("num_tokens_per_expert", (num_experts,), I32),
                          ("is_token_in_rank", (out.num_tokens, world), U8)])
    return RoutingLayout(arrays[0], arrays[1], arrays[2].astype(bool))


def _on_gpu(topk_ids: Any, num_experts: int, world: int) -> RoutingLayout:
    taken = _TAKERS[_names.CUDA].topk_ids(topk_ids)
    arrays, (tokens, topk) = taken.arrays, taken.shape
    assert isinstance(arrays, TorchArrays)  # only tensors are on GPUs
    torch, device = arrays.torch, topk_ids.device
    per_rank = torch.empty(max(world, 0), dtype=torch.int32, device=device)
    per_expert = torch.empty(max(num_experts, 0), dtype=torch.int32, device=device)
    where = torch.empty((tokens, max(world, 0)), dtype=torch.bool, device=device)
    given = structs.ExpertIds(data=taken.pointer, num_tokens=tokens, topk=topk, is_int64=int(taken.code == I64))
    check(library().functions.sy_routing_layout_enqueue(byref(given), num_experts, world, per_rank.data_ptr(), per_expert.data_ptr(),
                                                   where.data_ptr(), arrays.stream(topk_ids)))
    return RoutingLayout(per_rank, per_expert, where)
