# SPDX-License-Identifier: Apache-2.0
"""SGLang's expert load balancing on ranks of sglang_ranks: its manager, recorder, algorithm, movement of weights and mapping of
ids. Stand-ins besides those of sglang_ranks: the numbers of layers and experts, which SGLang reads from the model's class, and the
device, which must be a GPU."""
import contextlib
import types

import torch

from sglang_ranks import EXPERTS, prefill, tokens_of, topk_output, wanted

LAYERS = 2


@contextlib.contextmanager
def eplb(rank, world, redundant, mode, location="trivial", enable=True):
    """SGLang with EPLB, its recorder and its initial placement of experts. Yields its manager. mode: of DeepEP."""
    from sglang.srt.eplb import eplb_manager, expert_distribution, expert_location
    from sglang.srt.layers.moe.utils import DeepEPMode
    from sglang.srt.runtime_context import get_device, get_exec, get_flags, get_parallel

    answer = expert_location.ModelConfigForExpertLocation(LAYERS, EXPERTS, 1)
    asked, device = expert_location.ModelConfigForExpertLocation.from_model_config, expert_distribution.get_device
    expert_distribution.get_device = lambda: "cpu"
    expert_location.ModelConfigForExpertLocation.from_model_config = staticmethod(lambda model_config: answer)
    options = {"enable_eplb": enable, "ep_num_redundant_experts": redundant, "expert_distribution_recorder_mode": "stat",
               "ep_dispatch_algorithm": "static", "moe_a2a_backend": "deepep", "deepep_mode": mode, "eplb_algorithm": "auto",
               "expert_distribution_recorder_buffer_size": 4, "eplb_rebalance_num_iterations": 4,
               "eplb_rebalance_layers_per_chunk": 1, "init_expert_location": location,
               "eplb_min_rebalancing_utilization_threshold": 1.0}
    try:
        with get_exec().moe.override(**options), get_flags().moe.override(deepep_mode=DeepEPMode(mode)), \
                get_parallel().override(ep_size=world, tp_rank=rank, nnodes=1), get_device().override(device="cpu"):
            placed = expert_location.compute_initial_expert_location_metadata(None, rank)
            expert_location.set_global_expert_location_metadata(placed, allow_overwrite=True)
            recorder = expert_distribution.ExpertDistributionRecorder.init_new(placed, rank)
            expert_distribution.set_global_expert_distribution_recorder(recorder)
            yield eplb_manager
    finally:
        expert_location.ModelConfigForExpertLocation.from_model_config, expert_distribution.get_device = asked, device


def map_now():
    """Returns the logical expert of each physical expert, [layers, physical experts]."""
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    return get_global_expert_location_metadata().physical_to_logical_map.clone()


def dispatch_now():
    """Returns the physical expert to which this rank sends the tokens of each logical expert, [layers, logical experts]."""
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    return get_global_expert_location_metadata().logical_to_rank_dispatch_physical_map.clone()


def skewed(world, hidden, seed):
    """Returns tokens of all ranks with logical ids, most of them of the first experts."""
    made = tokens_of(world, hidden, seed)
    first = [(torch.arange(len(ids)).unsqueeze(1) % 3 > 0) & (ids >= 0) for _, ids, _ in made]
    return [(x, torch.where(chosen, torch.arange(ids.shape[1]), ids).int(), weights)
            for (x, ids, weights), chosen in zip(made, first)]


def routed(layer_id, ids, weights):
    """Returns SGLang's routing of logical ids: physical ids, counted by its recorder."""
    from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder
    from sglang.srt.eplb.expert_location_dispatch import ExpertLocationDispatchInfo, topk_ids_logical_to_physical

    known = ids.clamp(min=0)  # SGLang masks padded rows after the mapping
    ids = torch.where(ids < 0, -1, topk_ids_logical_to_physical(known, ExpertLocationDispatchInfo.init_new(layer_id)))
    get_global_expert_distribution_recorder().on_select_experts(topk_ids=ids)
    return topk_output(ids, weights)


def run(layers, rank, inputs, weights, extend, number=0):
    """Runs all layers in a forward pass that the recorder counts; returns the largest relative error against logical experts.
    layers: by number, a function of (x, SGLang's routing). weights: by layer, those of all logical experts."""
    from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder
    from sglang_ranks import off

    recorder, (x, ids, factors), errors = get_global_expert_distribution_recorder(), inputs[rank], []
    batch = types.SimpleNamespace(extend_num_tokens=len(x))
    with recorder.with_forward_pass(number, batch):
        for layer_id, (layer, (w13, w2)) in enumerate(zip(layers, weights)):
            with recorder.with_current_layer(layer_id), prefill(extend):
                out = layer(x, routed(layer_id, ids, factors))
            errors.append(off(out, wanted(x, ids, factors, w13, w2)))
    return max(errors)


def manager_of(module, tensors):
    """Returns SGLang's manager for a model with these weights by layer."""
    from sglang.srt.eplb.expert_location_updater import ExpertLocationUpdater

    updater, model = ExpertLocationUpdater(), types.SimpleNamespace(routed_experts_weights_of_layer=dict(enumerate(tensors)))
    return module.EPLBManager(model_config=None, get_model=lambda: model, get_expert_location_updater=lambda: updater,
                              get_expert_backup_client=lambda: None, get_weight_updater=lambda: types.SimpleNamespace(
                                  update_weights_from_disk=None))


def slots_of(rank, world, physical):
    return slice(rank * physical // world, (rank + 1) * physical // world)
