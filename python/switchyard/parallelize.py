# SPDX-License-Identifier: Apache-2.0
"""Distributes the experts of a model over the ranks of a group.

Supports models whose experts are one module with ``forward(hidden_states, top_k_index, top_k_weights)`` and three-dimensional
parameters that contain the weights of all experts, such as those in transformers 5.0 and later. Does not import transformers.
"""
from __future__ import annotations

import functools
import types
from typing import Any, Dict, List, Optional

from ._abi.arguments import checked
from ._models import states as _states, wrappers as _wrappers
from ._models.find import exchange_config, experts_modules, layer_config, way_of
from ._models.share import Layers, Share
from .exchange import Exchange
from .group import Group, constructs
from .layer import MoeLayer

__all__ = ["expert_parameters", "full_state_dict", "keep_out_of_ddp", "moe_heap_bytes", "parallelize_moe"]


@checked("moe_heap_bytes")
def moe_heap_bytes(model: Any, world: int, *, max_tokens: int, topk: Optional[int] = None, backend: str = "cpu",
                   experts: str = "automatic", hosts: int = 1) -> int:
    """Returns the group's ``heap_bytes`` for :func:`parallelize_moe` with this model, which must not yet be divided. Requires
    no group. hosts: number of hosts of the group; with several hosts, rings do not limit the memory on the CPU. Raises
    InvalidArgument if the model cannot be divided."""
    exchanges: Dict[str, int] = {}
    layers: Dict[str, int] = {}
    for found in experts_modules(model, topk):
        config = exchange_config(model, found, max_tokens, backend, hosts)
        exchanges[repr(config)] = Exchange.heap_bytes(world, backend=backend, **config)
        if way_of(found.module, experts, backend) == "layer":
            of_layer = layer_config(config, found.module)
            layers[repr(of_layer)] = MoeLayer.heap_bytes(world, backend=backend, **of_layer)
    return sum(layers.values()) + sum(exchanges.values())


@functools.partial(constructs, settles=True)
@checked("parallelize_moe")
def parallelize_moe(model: Any, group: Group, *, max_tokens: int, topk: Optional[int] = None, experts: str = "automatic",
                    gradients: str = "sum") -> List[str]:
    """Collective. Divides the experts of every layer among the ranks: each rank keeps its share, and tokens are sent to their
    experts and back.

    model: a torch module, identical on all ranks and not yet divided. max_tokens: maximum number of tokens (batch times length)
    on any rank in a forward pass. topk: experts per token in all modules; None: for each module, the value of its router or of
    the config.

    experts: implementation of the experts in uncompiled passes that record no gradients. "module" uses the module itself, as in
    all other passes. "grouped" uses :class:`GroupedGemm` between dispatch and combine on GPUs. "layer" uses a :class:`MoeLayer`
    for each module; its automatic form computes the whole layer in one kernel on a GPU. "grouped" and "layer" read the module's
    parameters in place, require the switchyard_layer library, and support only SwiGLU in bf16 without biases; InvalidArgument
    states which requirement a module does not meet. Layers of modules with the same shape share all memory except their
    weights. "automatic" selects "grouped" on GPUs if possible, otherwise "module".

    gradients: reduction of expert gradients over the tokens of all ranks: "sum", or "mean", the sum divided by the number of
    ranks. DistributedDataParallel and fully_shard use "mean" for the gradients of other parameters.

    Expert parameters are reduced in place to those of ``group.experts_of(num_experts)``; an optimizer that refers to them
    trains the share. Routers, shared experts and everything else stay unchanged on every rank. Each forward and backward pass
    of the model is collective; in each pass, either all ranks or none must record gradients. Gradients of other parameters
    cover only this rank's tokens. Parameters may change in place at any time between passes; they may be moved to other memory
    only on all ranks together.

    Returns the names of the divided modules. Raises InvalidArgument if there are none, or if the model is already divided.
    """
    found = [(each, way_of(each.module, experts, group.backend)) for each in experts_modules(model, topk)]
    configs = [exchange_config(model, each, max_tokens, group.backend, group.hosts) for each, _ in found]
    exchanges: Dict[str, Exchange] = {}
    layers: Dict[str, Layers] = {}
    for (each, way), config in zip(found, configs):
        key = repr(config)
        if key not in exchanges:
            exchanges[key] = Exchange(group, **config)
        exchange = exchanges[key]._at_site(_site(group, each.name))
        of_layer = layer_config(config, each.module) if way == "layer" else {}
        share = Share(each.name, each.module, group, exchange, way, gradients == "mean", _above(model, each.name))
        if way == "layer":
            share.compute_by(layers.setdefault(repr(of_layer), Layers(group, of_layer)))
    _wrappers.keep_out_of_ddp(model)
    if hasattr(type(model), "save_pretrained"):
        model.save_pretrained = types.MethodType(_states.save_pretrained, model)
    return [each.name for each, _ in found]


def _site(group: Group, name: str) -> int:
    """Returns a number that identifies calls by this module and is identical on all ranks."""
    names = vars(group).setdefault("_sites", {})
    names[len(names) + 1] = name
    return len(names)


def _above(model: Any, name: str) -> List[Any]:
    """Returns the module with that name and all modules that contain it."""
    parts = name.split(".") if name else []
    return [model.get_submodule(".".join(parts[:i])) for i in range(len(parts) + 1)]


@checked("expert_parameters")
def expert_parameters(model: Any) -> List[Any]:
    """Returns the parameters of divided experts, which wrappers must not treat as replicas, for use as in ``fully_shard(model,
    ignored_params=set(...))``."""
    return [parameter for _, parameter in _wrappers.of_experts(model)]


@checked("keep_out_of_ddp")
def keep_out_of_ddp(model: Any) -> None:
    """Local. Call this for a module that contains a divided model and will be wrapped by DistributedDataParallel, which reads
    the parameters to ignore from the module that it wraps. :func:`parallelize_moe` calls it for the model itself."""
    _wrappers.keep_out_of_ddp(model)


@checked("full_state_dict")
def full_state_dict(model: Any) -> Dict[str, Any]:
    """Collective. Returns the state dict of the undivided model on every rank, with the experts in host memory. It can be
    passed to ``load_state_dict`` of a divided model."""
    return _states.full_state_dict(model)
