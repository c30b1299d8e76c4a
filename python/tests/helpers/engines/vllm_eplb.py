# SPDX-License-Identifier: Apache-2.0
"""Scenarios with vLLM's expert load balancing: its state, policy, movement of weights and router, with Switchyard's plug-in.
Imported only in the processes of vllm_host. Stand-ins besides those of vllm_ranks: torch.Event and pinned memory, which need a
GPU."""
import ast
import os
import types

import torch
from vllm.distributed.eplb import eplb_state
from vllm.distributed.eplb.policy import DefaultEplbPolicy
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe import all2all_utils
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel
from vllm.model_executor.layers.fused_moe.router import base_router
from vllm.model_executor.layers.fused_moe.router.router_factory import create_fused_moe_router
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.models.interfaces import MixtureOfExperts

from switchyard.engines import expert_location, vllm as plugin
from vllm_ranks import (BatchedExperts, FusedMoEQuantConfig, RowExperts, error_of, expected, inputs_of, manager_of, moe_config,
                        vllm_with)

LAYERS = 2


class _Event:
    """Stand-in for torch.Event, which needs a GPU."""

    def __init__(self, **options):
        pass

    def record(self, stream=None):
        pass

    synchronize = record

    def elapsed_time(self, other):
        return 0.0


def use_eplb_without_a_gpu():
    """Makes vLLM's routers run their Triton kernel, which maps and counts ids, in Triton's interpreter. Without a GPU, vLLM does
    not define the kernel, and its routers map nothing; this function compiles the kernel from vLLM's file."""
    os.environ["TRITON_INTERPRET"] = "1"
    import triton
    import triton.language as tl
    from triton.runtime import interpreter

    rmw = interpreter.InterpreterBuilder.create_atomic_rmw
    interpreter.InterpreterBuilder.create_atomic_rmw = lambda self, op, to, value, mask, *others: rmw(
        self, op, to, value, interpreter.TensorHandle(mask.data.astype(bool), mask.dtype), *others)  # accepts only bool
    with open(base_router.__file__) as file:
        tree = ast.parse(file.read())
    only_gpu = next(each for each in tree.body if isinstance(each, ast.If))
    names = {"torch": torch, "triton": triton, "tl": tl}
    exec(compile(ast.Module(only_gpu.body, []), base_router.__file__, "exec"), names)
    base_router.eplb_map_to_physical_and_record = names["eplb_map_to_physical_and_record"]
    torch.Event, eplb_state.PIN_MEMORY = _Event, False


class _Kernel:
    """A layer of vLLM's router and modular kernel with plain torch experts."""

    set_eplb_state, eplb_state = MoERunner.set_eplb_state, MoERunner.eplb_state

    def __init__(self, config, shape, backend, routing, physical):
        moe, quant = moe_config(config, (*shape[:2], physical, shape[3]), enable_eplb=True), FusedMoEQuantConfig.make()
        made = all2all_utils.maybe_make_prepare_finalize(moe, quant, allow_new_interface=True)
        batched = backend == "deepep_low_latency"
        sizes = dict(max_num_tokens=made.max_num_tokens_per_rank(), num_dispatchers=made.num_dispatchers()) if batched else {}
        self.kernel = FusedMoEKernel(made, (BatchedExperts if batched else RowExperts)(moe, quant, **sizes))
        self.router = create_fused_moe_router(top_k=shape[3], global_num_experts=physical, eplb_state=eplb_state.EplbLayerState(),
                                              custom_routing_function=routing)
        here = moe.num_local_experts
        self.weights = [torch.empty(here, 2 * shape[1], shape[0], dtype=torch.bfloat16),
                        torch.empty(here, shape[0], shape[1], dtype=torch.bfloat16)]
        self.map = torch.full((physical,), -1, dtype=torch.int32)
        self.map[moe.ep_rank * here:(moe.ep_rank + 1) * here] = torch.arange(here, dtype=torch.int32)

    def get_expert_weights(self):
        return [each.view(len(each), -1) for each in self.weights]

    def __call__(self, x, logits):
        weights, ids = self.router.select_experts(x, logits, None)
        return self.kernel.apply(x, *self.weights, weights, ids, MoEActivation.SILU, len(self.map), self.map, False)


class _Model(MixtureOfExperts):
    """The attributes of a model that EplbState reads."""

    def __init__(self, layers, experts, redundant, world):
        self.moe_layers, self.num_moe_layers, self.num_expert_groups = layers, len(layers), 1
        self.num_routed_experts = self.num_logical_experts = experts
        self.num_redundant_experts, self.num_physical_experts = redundant, experts + redundant
        self.num_local_physical_experts, self.num_shared_experts = (experts + redundant) // world, 0


def _layers(config, shape, form, routing, redundant):
    if form != "layer":
        return [_Kernel(config, shape, form, routing, shape[2] + redundant) for _ in range(LAYERS)]
    hidden, intermediate, experts, topk = shape
    return [FusedMoEFactory(experts, topk, hidden, intermediate, params_dtype=torch.bfloat16, prefix=f"layers.{n}.mlp",
                            custom_routing_function=routing, enable_eplb=True, num_redundant_experts=redundant)
            for n in range(LAYERS)]


def _weights_of(layer):
    its = getattr(layer, "routed_experts", None)
    return layer.weights if its is None else [its.w13_weight.data, its.w2_weight.data]


def rearranged(rank, world, store, form, shape, tokens, redundant, options):
    """Runs two layers, lets vLLM rearrange their experts by the counts of this pass, and runs them again. Returns the errors before
    and after, the maps, the counts of logical experts that vLLM's policy received, and the policy's name.

    form: "layer", or the all-to-all backend. options: ``planted``: the weights of the busiest expert that moves are not moved;
    ``policy``: value of SWITCHYARD_VLLM_EPLB; ``again``: another rearrangement and pass."""
    use_eplb_without_a_gpu()
    if options.get("policy"):
        os.environ["SWITCHYARD_VLLM_EPLB"] = options["policy"]
    plugin.install("layer" if form == "layer" else "all2all")
    w13, w2, by_rank = inputs_of(world, shape, tokens, True)
    x, ids, weights = by_rank[rank]
    ids = torch.where(torch.arange(len(ids)).unsqueeze(1) % 3 == 2, ids + shape[2] - shape[3], ids)  # most to the first experts
    with vllm_with(rank, world, store, "allgather_reducescatter" if form == "layer" else form, enable_eplb=True) as config, \
            torch.no_grad():
        its = config.parallel_config.eplb_config
        its.communicator, its.use_async, its.window_size = "torch_nccl", False, 4  # on CPUs: gloo without pinned memory
        its.num_redundant_experts = redundant
        if form == "layer":
            config.kernel_config.set_platform_defaults(config)
        else:
            manager_of(form)
        layers = _layers(config, shape, form, lambda hidden_states, gating_output, topk, renormalize: (weights, ids), redundant)
        state, model = eplb_state.EplbState(config.parallel_config, torch.device("cpu")), _Model(layers, shape[2], redundant, world)
        first, seen = eplb_state.EplbState.build_initial_global_physical_to_logical_map(shape[2], redundant), []
        here = model.num_local_physical_experts
        for n, layer in enumerate(layers):
            for mine, of_all, factor in zip(_weights_of(layer), (w13, w2), (n + 1, 1)):
                mine.copy_(of_all[torch.tensor(first[rank * here:(rank + 1) * here])] * factor)
            if form == "layer":
                layer.routed_experts.quant_method.process_weights_after_loading(layer.routed_experts)
        name = types.SimpleNamespace(model="model", compute_hash=lambda: "model")
        state.add_model(model, name)
        model_state = state.model_states["model"]
        counted = state.policy.rebalance_experts.__func__
        state.policy = type("Seen", (state.policy,), {"rebalance_experts": classmethod(
            lambda cls, weight, *others: seen.append(weight.clone()) or counted(cls, weight, *others))})

        def run():
            model_state.num_unpadded_tokens_tensors[0].fill_(len(x))
            errors = []
            for n, layer in enumerate(layers):
                with set_forward_context(None, config, num_tokens=len(x), num_tokens_across_dp=torch.tensor(tokens)):
                    out = layer(x.clone(), torch.zeros(len(x), shape[2]))
                errors.append(error_of(out, expected(x, ids, weights, w13 * (n + 1), w2)))
            return max(errors)

        errors, maps = [run()], [model_state.physical_to_logical_map.clone()]
        for _ in range(2 if options.get("again") else 1):
            before = [[each.clone() for each in _weights_of(layer)] for layer in layers]
            state.expert_rearrangement_step = state.expert_rearrangement_step_interval - 1
            state.step()
            maps.append(model_state.physical_to_logical_map.clone())
            if options.get("planted"):
                _move_back(layers, before, maps, seen[-1], slice(rank * here, (rank + 1) * here))
            errors.append(run())
        ours = expert_location.to_expert_maps(model_state.physical_to_logical_map, world=world, num_experts=shape[2])
        assert [each.expert_of_slot.tolist() for each in ours] == maps[-1].tolist()
        return errors, [each.tolist() for each in maps], [each.tolist() for each in seen], state.policy.__mro__[1].__name__


def _move_back(layers, before, maps, counts, here):
    """Restores, in layer 0, the former weights of the slots that now belong to the busiest expert among those that moved."""
    was, now = maps[-2][0], maps[-1][0]
    moved = (was != now).nonzero().flatten()
    expert = max(now[moved].tolist(), key=lambda each: float(counts[0, each]))
    for slot in moved.tolist():
        if now[slot] == expert and here.start <= slot < here.stop:
            for each, old in zip(_weights_of(layers[0]), before[0]):
                each[slot - here.start].copy_(old[slot - here.start])


def refused(rank, world, store):
    """Returns the error sentences for configurations that no form supports with EPLB."""
    from vllm_checks import sentence

    found = {}
    plugin.install("layer")
    with vllm_with(rank, world, store, "allgather_reducescatter", enable_eplb=True) as config:
        config.kernel_config.set_platform_defaults(config)
        config.parallel_config.enable_elastic_ep = True
        found["elastic"] = sentence(_layers, config, (384, 128, 8, 3), "layer", None, 2)
    plugin.uninstall()
    os.environ["SWITCHYARD_VLLM_EPLB"] = "ours"
    found["policy"] = sentence(plugin.install, "all2all")
    del os.environ["SWITCHYARD_VLLM_EPLB"]

    class Other(DefaultEplbPolicy):
        pass

    eplb_state.EPLB_POLICIES["default"] = Other
    os.environ["SWITCHYARD_VLLM_EPLB"] = "switchyard"
    found["another policy"] = sentence(plugin.install, "all2all")
    assert eplb_state.EPLB_POLICIES["default"] is Other
    return found
