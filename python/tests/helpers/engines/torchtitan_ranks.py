# SPDX-License-Identifier: Apache-2.0
"""MoE layers of torchtitan on ranks of gloo, and the same layer in float64. No part of torchtitan is replaced. Its device
name is set to that of the ranks, because torch built for GPUs sets it to "cuda" even on machines without a GPU."""
import contextlib
import os
import sys
import types

import pytest

import deep_ep_ranks
from clients import source_of

torch = pytest.importorskip("torch")

if not os.environ.get("SWITCHYARD_CLIENTS"):
    if sys.version_info < (3, 11):
        pytest.skip("torchtitan needs Python 3.11", allow_module_level=True)
    for needed in ("spmd_types", "tyro"):
        pytest.importorskip(needed, reason="torchtitan needs it")
try:
    source_of("torchtitan")
except pytest.skip.Exception as absent:
    pytest.skip(str(absent), allow_module_level=True)

import spmd_types as spmd  # noqa: E402
import torchtitan.tools.utils  # noqa: E402

torchtitan.tools.utils.device_type = "cpu"

from torchtitan.config import OverrideConfig, ParallelismConfig, apply_overrides  # noqa: E402
from torchtitan.distributed import parallel_dims, utils as distributed  # noqa: E402
from torchtitan.distributed.parallel_dims import ParallelDims  # noqa: E402
from torchtitan.models.common.config_utils import make_moe_config, make_routed_experts_config, make_router_config  # noqa: E402
from torchtitan.models.common.moe_sharding import set_moe_sharding_config  # noqa: E402
from torchtitan.models.common.token_dispatcher import update_ep_token_dispatcher_config  # noqa: E402

HIDDEN, INNER, EXPERTS, TOPK, TOKENS = 64, 96, 8, 3, 24
WEIGHTS = {"w1_EFD": spmd.S(1), "w2_EDF": spmd.S(2), "w3_EFD": spmd.S(1)}
OURS = "switchyard.engines.torchtitan.token_dispatcher"


def layer_config(comm_backend="deepep"):
    """The configuration of one MoE layer, as torchtitan's models make it."""
    return make_moe_config(
        num_experts=EXPERTS, router=make_router_config(dim=HIDDEN, num_experts=EXPERTS, gate_param_init={}, top_k=TOPK, route_norm=True),
        routed_experts=make_routed_experts_config(dim=HIDDEN, hidden_dim=INNER, num_experts=EXPERTS, top_k=TOPK, param_init={},
                                                  comm_backend=comm_backend))


def updated(config, world, tokens=TOKENS):
    """Fills `config` from the settings of a run, as the trainer does before it applies overrides."""
    set_moe_sharding_config(config, enable_ep=world > 1, enable_sp=False, expert_param_layout=WEIGHTS)
    run = types.SimpleNamespace(parallelism=ParallelismConfig(expert_parallel_degree=world),
                                training=types.SimpleNamespace(seq_len=tokens, local_batch_size=1))
    update_ep_token_dispatcher_config(types.SimpleNamespace(layers=[types.SimpleNamespace(moe=config)], dim=HIDDEN), run)
    return config


def dims_of(world, backend):
    torchtitan.tools.utils.device_type = parallel_dims.device_type = deep_ep_ranks.memory()
    distributed.set_spmd_backend(backend)
    dims = ParallelDims(dp_replicate=1, dp_shard=world, cp=1, tp=1, pp=1, ep=world, world_size=world, spmd_backend=backend)
    dims.build_mesh()
    return dims


def filled(layer, seed=0, skewed=False):
    """The same parameters on all ranks. `skewed`: all tokens go to the first experts."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
        layer.expert_bias_E.zero_()
        layer.tokens_per_expert_E.zero_()
        if skewed:
            layer.expert_bias_E[:TOPK] = 100
    return layer


def whole_layer(dtype, seed=0, skewed=False):
    """The undivided layer with torchtitan's own dispatcher for one rank."""
    return filled(layer_config("standard").build(), seed, skewed).to(dtype).to(deep_ep_ranks.memory())


def divided_layer(dims, world, dtype, given=None, seed=0, skewed=False):
    """The layer divided by torchtitan, with our dispatcher."""
    config = updated(layer_config(), world)
    lines = apply_overrides(OverrideConfig(imports=[(OURS, {"dtype": "f32" if dtype == torch.float32 else "bf16", **(given or {})})]), config)
    assert len(lines) == 1 and "TokenDispatcher.Config" in lines[0]
    layer = filled(config.build(), seed, skewed).to(dtype).to(deep_ep_ranks.memory())
    layer.parallelize(dims)
    return layer


def inputs_of(rank, dtype, empty=None):
    """Tokens of a rank, and the gradient of its output. `empty`: the rank without tokens."""
    generator = torch.Generator().manual_seed(100 + rank)
    tokens = 0 if rank == empty else TOKENS - 5 * (rank % 2)
    return [torch.randn(1, tokens, HIDDEN, generator=generator).to(dtype).to(deep_ep_ranks.memory()) for _ in range(2)]


def in_double(layer, x, grad):
    """The layer in float64 with the experts that its router selects; returns the output and the gradients of the tokens, the
    router and the experts."""
    with torch.no_grad(), contextlib.suppress(AttributeError):
        ids = layer.router(x, layer.expert_bias_E)[1][0]
    x = x[0].detach().double().requires_grad_()
    gate, w1, w2, w3 = ((layer.router.gate.weight, *(getattr(layer.routed_experts.inner_experts, name) for name in WEIGHTS)))
    gate, w1, w2, w3 = (each.detach().double().requires_grad_() for each in (gate, w1, w2, w3))
    scores = torch.sigmoid(x @ gate.T).gather(1, ids)
    scores = scores / (scores.sum(1, keepdim=True) + 1e-20)
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        tokens, places = torch.where(ids == e)
        given = x[tokens]
        made = (torch.nn.functional.silu(given @ w1[e].T) * (given @ w3[e].T)) @ w2[e].T
        out = out.index_add(0, tokens, made * scores[tokens, places, None])
    made = torch.autograd.grad(out, (x, gate, w1, w2, w3), grad[0].double(), allow_unused=True)
    return out.detach(), [torch.zeros_like(of) if each is None else each for each, of in zip(made, (x, gate, w1, w2, w3))]


def gradients_of(layer, x):
    """Gradients of the tokens, the router and this rank's experts."""
    inner = layer.get_submodule("routed_experts.inner_experts")
    found = [x.grad, layer.get_submodule("router.gate").weight.grad, *(getattr(inner, name).grad for name in WEIGHTS)]
    return [each.to_local() if hasattr(each, "to_local") else each for each in found]


def off(made, want):
    """The relative distance, or the distance if nothing is wanted."""
    made, want = made.double(), want.double()
    return ((made - want).norm() / (want.norm() if want.norm() > 0 else 1)).item()


# ---- One rank of a test ----


def _wanted(layer, rank, world, dtype, empty):
    """Output of `rank`, gradients of its tokens and router, and those of its experts over the tokens of all ranks."""
    made = [in_double(layer, *inputs_of(r, dtype, empty)) for r in range(world)]
    here = slice(rank * EXPERTS // world, (rank + 1) * EXPERTS // world)
    experts = [sum(each[1][i] for each in made)[here] for i in (2, 3, 4)]
    return made[rank][0], [*made[rank][1][:2], *experts]


def _step(layer, x, grad):
    x = x.clone().requires_grad_()
    out = layer(x)
    out.backward(grad)
    return out.detach(), gradients_of(layer, x)


def check_torchtitan(group, backend, dtype, skewed, empty, given):
    """Compares torchtitan's divided layer with float64 and with the undivided layer. backend: of torchtitan's SPMD. empty: the rank without
    tokens, or None. given: arguments of the override."""
    from switchyard.engines import torchtitan as ours

    rank, world = group.rank(), group.size()
    layer = divided_layer(dims_of(world, backend), world, dtype, given, skewed=skewed)
    x, grad = inputs_of(rank, dtype, empty)
    out, found = _step(layer, x, grad)
    whole = whole_layer(dtype, skewed=skewed)
    want, wanted = _wanted(whole, rank, world, dtype, empty)
    assert out.shape == x.shape and out.dtype == dtype and off(out[0], want) < 1e-2
    for made, of in zip(found, wanted):
        assert made.shape == of.reshape(made.shape).shape and off(made, of.reshape(made.shape)) < 2e-2
    own, _ = _step(whole, x, grad)
    assert off(out, own) < 1e-2
    with torch.no_grad():
        assert off(layer(x), out) < 1e-6
    ours.close()
