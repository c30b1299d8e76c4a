# SPDX-License-Identifier: Apache-2.0
"""Distributes the experts of a model over the ranks of a group.

Supports models whose experts are one module with ``forward(hidden_states, top_k_index, top_k_weights)`` and three-dimensional
parameters that contain the weights of all experts, such as those in transformers 5.0 and later. Does not import transformers.
"""
from __future__ import annotations

import functools
import types
from typing import Any, Dict, List, Optional, Tuple

from ._abi.arguments import checked
from ._models import replicas as _replicas, states as _states, wrappers as _wrappers
from ._models.find import Found, exchange_config, experts_modules, layer_config, share_of, way_of
from ._models.replicas import Replicas
from ._models.share import Layers, Share
from .errors import InvalidArgument
from .exchange import Exchange
from .expert_map import ExpertMap
from .group import Construction, Group, constructs
from .layer import MoeLayer

__all__ = ["expert_parameters", "full_state_dict", "keep_out_of_ddp", "moe_heap_bytes", "parallelize_moe", "set_replicas"]


@checked("moe_heap_bytes")
def moe_heap_bytes(model: Any, world: int, *, max_tokens: int, topk: Optional[int] = None, backend: str = "cpu",
                   experts: str = "automatic", hosts: int = 1, replicas: Any = None) -> int:
    """Returns the group's ``heap_bytes`` for :func:`parallelize_moe` with this model, which must not yet be divided. Requires
    no group. hosts: number of hosts of the group; with several hosts, rings do not limit the memory on the CPU. Raises
    InvalidArgument if the model cannot be divided."""
    exchanges: Dict[str, int] = {}
    layers: Dict[str, int] = {}
    every = experts_modules(model, topk)
    maps = _maps(every, replicas, world)
    copies = [_replicas.staging([each.module], maps[each.name].num_slots) for each in every if each.name in maps]
    for found in every:
        config = exchange_config(model, found, max_tokens, backend, hosts, _slots(maps, found))
        exchanges[repr(config)] = Exchange.heap_bytes(world, backend=backend, **config)
        if way_of(found.module, experts, backend) == "layer":
            of_layer = layer_config(config, found.module)
            layers[repr(of_layer)] = MoeLayer.heap_bytes(world, backend=backend, **of_layer)
    return sum(layers.values()) + sum(exchanges.values()) + max(copies, default=0)


def _maps(found: List[Found], replicas: Any, world: int) -> Dict[str, ExpertMap]:
    return _replicas.maps_of(replicas, {each.name: int(each.module.num_experts) for each in found}, world)


def _slots(maps: Dict[str, ExpertMap], found: Found) -> Optional[int]:
    return maps[found.name].num_slots if found.name in maps else None


@functools.partial(constructs, settles=True)
@checked("parallelize_moe")
def parallelize_moe(model: Any, group: Group, *, max_tokens: int, topk: Optional[int] = None, experts: str = "automatic",
                    gradients: str = "sum", replicas: Any = None) -> List[str]:
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

    replicas: an :class:`ExpertMap` for all modules, or a dict from names of modules to ExpertMaps; modules without a map have no
    replicas. None: there are no replicas. Equal on all ranks. For every map, each rank owns the experts of
    ``group.experts_of(num_experts)``; all other experts in its slots are replicas. Each pass that records gradients copies the
    replicas' weights from the owners; other passes do so after weights have changed on any rank. The backward pass adds the
    replicas' gradients to the owner's in order of rank, in float32. With "grouped", separate products compute the rows of
    replicas, and owned weights are read in place. With "layer", each module keeps copies of the weights of all slots of this
    rank, which are updated together with the replicas. :func:`set_replicas` replaces the maps.

    Expert parameters are reduced in place to those of ``group.experts_of(num_experts)``; an optimizer that refers to them
    trains the share. Routers, shared experts and everything else stay unchanged on every rank. Each forward and backward pass
    of the model is collective; in each pass, either all ranks or none must record gradients. Gradients of other parameters
    cover only this rank's tokens. Parameters may change in place at any time between passes; they may be moved to other memory
    only on all ranks together.

    Returns the names of the divided modules. Raises InvalidArgument if there are none, or if the model is already divided.
    Errors in `replicas` raise InvalidArgument or Mismatch on all ranks, before the model changes.
    """
    modules = experts_modules(model, topk)
    maps = _maps(modules, replicas, group.size)
    _replicas.check_support({each.name: each.module for each in modules if each.name in maps})
    found = [(each, way_of(each.module, experts, group.backend)) for each in modules]
    configs = [exchange_config(model, each, max_tokens, group.backend, group.hosts, _slots(maps, each)) for each in modules]
    _replicas.agree(group, "parallelize_moe", maps)
    copied = {name: Replicas(name, group, each) for name, each in maps.items()}
    _divide(model, group, found, configs, gradients == "mean", copied)
    _wrappers.keep_out_of_ddp(model)
    if hasattr(type(model), "save_pretrained"):
        model.save_pretrained = types.MethodType(_states.save_pretrained, model)
    return [each.name for each, _ in found]


def _divide(model: Any, group: Group, found: List[Tuple[Found, str]], configs: List[Dict[str, Any]], average: bool,
            copied: Dict[str, Replicas]) -> None:
    """Replaces modules with shares. found: each module and the implementation of its experts. copied: replicas by module name."""
    exchanges: Dict[str, Exchange] = {}
    layers: Dict[str, Layers] = {}
    for (each, way), config in zip(found, configs):
        key = repr(config)
        if key not in exchanges:
            exchanges[key] = Exchange(group, **config)
        exchange = exchanges[key]._at_site(_site(group, each.name))
        of_layer = layer_config(config, each.module) if way == "layer" else {}
        share = Share(each.name, each.module, group, exchange, way, average, _above(model, each.name),
                      copied.get(each.name))
        share.fetch_replicas()  # raises HeapExhausted here, not in the first pass
        if way == "layer":
            share.compute_by(layers.setdefault(repr(of_layer), Layers(group, of_layer)))


def _site(group: Group, name: str) -> int:
    """Returns a number that identifies calls by this module and is identical on all ranks."""
    names = vars(group).setdefault("_sites", {})
    names[len(names) + 1] = name
    return len(names)


def _above(model: Any, name: str) -> List[Any]:
    """Returns the module with that name and all modules that contain it."""
    parts = name.split(".") if name else []
    return [model.get_submodule(".".join(parts[:i])) for i in range(len(parts) + 1)]


@checked("set_replicas")
def set_replicas(model: Any, replicas: Any = None) -> Dict[str, ExpertMap]:
    """Collective. Replaces the maps of a model that :func:`parallelize_moe` has divided with replicas. Call it between a backward
    pass and the next forward pass. Parameters, and thus optimizers and checkpoints, are unaffected; the next pass copies the
    weights of all replicas.

    model: the divided model. replicas: as for parallelize_moe, with the numbers of slots of the maps in force, equal on all
    ranks; modules that a dict omits keep their maps. None: for each module, ``ExpertMap.plan`` of the map in force for the
    routes counted since the last call. These counts also determine the division of routes among replicas.

    Returns the maps in force, by name of module. Raises InvalidArgument or Mismatch on all ranks, before any map changes.
    """
    shares = {name: share for name, module in model.named_modules() if (share := share_of(module)) is not None and share.replicas is not None}
    if not shares:
        raise InvalidArgument("model has no replicas: call parallelize_moe(..., replicas=...)")
    group = next(iter(shares.values())).group
    with Construction(group, "set_replicas", settles=True):
        maps = _replicas.maps_of(replicas, {name: share.experts for name, share in shares.items()}, group.size)
        for name, each in maps.items():
            inside = shares[name].replicas.layout.given.slots_per_rank
            if each.slots_per_rank != inside:
                raise InvalidArgument(f"replicas: the map of {name} has {each.slots_per_rank} slots per rank; the map in force has {inside}")
        _replicas.agree(group, "set_replicas", None if replicas is None else maps)
        chosen = {id(shares[name].replicas): (shares[name].replicas, maps.get(name)) for name in (shares if replicas is None else maps)}
        for copied, given in chosen.values():  # copies of a module share their replicas
            routes = copied.selector.gather_routes()
            copied.set_map(given or copied.layout.given.plan(routes.sum(0)), routes)
    return {name: share.replicas.layout.given for name, share in shares.items()}


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
