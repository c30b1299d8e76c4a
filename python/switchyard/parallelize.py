# SPDX-License-Identifier: Apache-2.0
"""Experts of a model over the ranks of a group.

For models whose experts are one module with weights of all experts in parameters of three dimensions, and ``forward(hidden_states,
top_k_index, top_k_weights)``: those of transformers from 5.0 on. Nothing of transformers is imported.
"""
from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Optional, Tuple

from .errors import InvalidArgument
from .exchange import Exchange
from .group import Group

if TYPE_CHECKING:
    import torch

__all__ = ["moe_heap_bytes", "parallelize_moe"]

_ARGUMENTS = ["hidden_states", "top_k_index", "top_k_weights"]


def _experts_modules(model: Any) -> Iterator[Tuple[str, Any]]:
    """Names and modules of experts, with all of their experts still there."""
    for name, module in model.named_modules():
        parameters = dict(module.named_parameters(recurse=False))
        if not any(parameter.dim() == 3 for parameter in parameters.values()) or not hasattr(module, "num_experts"):
            continue
        arguments = [each for each in inspect.signature(inspect.unwrap(type(module).forward)).parameters if each != "self"]
        if arguments[:3] == _ARGUMENTS:
            yield name, module


def _topk_of(model: Any, topk: Optional[int]) -> int:
    if topk is None:
        config = getattr(model, "config", None)
        config = getattr(config, "text_config", config)
        topk = getattr(config, "num_experts_per_tok", None)
    if topk is None:
        raise InvalidArgument("topk: the model's config has no num_experts_per_tok; say how many experts a token has")
    return topk


def _shape_of(module: Any) -> Tuple[int, int, "torch.dtype"]:
    """Hidden, experts, type of rows."""
    weights = getattr(module, "down_proj", None)
    if weights is None or weights.dim() != 3:
        raise InvalidArgument(f"{type(module).__name__} has no down_proj of three dimensions, which would tell the size of a row")
    hidden = weights.shape[2] if getattr(module, "is_transposed", False) else weights.shape[1]
    return hidden, int(module.num_experts), weights.dtype


def _config(module: Any, topk: int, max_tokens: int, backend: str) -> Dict[str, Any]:
    hidden, experts, dtype = _shape_of(module)
    # The worst routing sends all rows of all ranks to one: on the CPU rings bound the memory.
    return {"hidden": hidden, "experts": experts, "topk": topk, "max_tokens": max_tokens, "layout": "expert_major", "dtype": dtype,
            "staging": "ring" if backend == "cpu" else "direct", "routing_gradients": True}


def moe_heap_bytes(model: Any, world: int, *, max_tokens: int, topk: Optional[int] = None, backend: str = "cpu") -> int:
    """``heap_bytes`` of a group for :func:`parallelize_moe` of this model, not converted yet. Needs no group."""
    configs = {repr(each): each for each in
               (_config(module, _topk_of(model, topk), max_tokens, backend) for _, module in _experts_modules(model))}
    return sum(Exchange.heap_bytes(world, backend=backend, **each) for each in configs.values())


def parallelize_moe(model: Any, group: Group, *, max_tokens: int, topk: Optional[int] = None) -> List[str]:
    """Collective. Keeps this rank's experts of every layer, and lets tokens travel to their experts and back.

    model: a torch module, the same on all ranks. max_tokens: most tokens (batch times length) of any rank in a forward pass. topk:
    experts of a token; None: ``model.config.num_experts_per_tok``.

    Experts' parameters become those of ``group.experts_of(num_experts)``, so that a state dict has this rank's share. Routers, shared
    experts and all else stay as they are, on every rank. Each forward and backward pass of the model is collective. Gradients of experts
    are then those of all ranks' tokens, and gradients of the rest those of this rank's.

    Returns the names of the modules that were converted; InvalidArgument if there is none.
    """
    topk, exchanges, converted = _topk_of(model, topk), {}, []  # type: ignore[var-annotated]
    for name, module in list(_experts_modules(model)):
        config = _config(module, topk, max_tokens, group.backend)
        key = repr(config)
        if key not in exchanges:
            exchanges[key] = Exchange(group, **config)
        _convert(module, group, exchanges[key])
        converted.append(name)
    if not converted:
        raise InvalidArgument(f"{type(model).__name__} has no experts in one module with weights of three dimensions and "
                              f"forward({', '.join(_ARGUMENTS)})")
    return converted


def _convert(module: Any, group: Group, exchange: Exchange) -> None:
    import torch

    mine = group.experts_of(module.num_experts)
    for name, parameter in list(module.named_parameters(recurse=False)):
        if parameter.shape[0] == module.num_experts:
            share = torch.nn.Parameter(parameter.detach()[mine.start:mine.stop].clone(), parameter.requires_grad)
            setattr(module, name, share)
    module.num_experts = len(mine)
    experts = module.forward

    def forward(hidden_states: "torch.Tensor", top_k_index: "torch.Tensor", top_k_weights: "torch.Tensor") -> "torch.Tensor":
        rows: Any
        rows, handle = exchange.dispatch(hidden_states.contiguous(), top_k_index.contiguous(), top_k_weights.float().contiguous())
        count = rows.shape[0]  # with sizes that the host does not know, rows behind the last expert's are of no one
        positions = torch.arange(count, device=rows.device)
        owners = torch.searchsorted(handle.offsets.long(), positions, right=True).clamp(max=max(len(mine) - 1, 0))
        if count > 0 and len(mine) > 0:
            ones = torch.ones((count, 1), dtype=rows.dtype, device=rows.device)
            rows = experts(rows, owners[:, None], ones)
        return exchange.combine(rows.contiguous(), handle, order="per_route")

    module.forward = forward
