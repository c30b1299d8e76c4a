# SPDX-License-Identifier: Apache-2.0
"""Scenarios that record the routing of vLLM's routers as docs/routing.md describes. Imported only in the processes of vllm_host."""
import importlib.util
import types

import numpy as np
import torch
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsCapturer
from vllm.model_executor.layers.fused_moe.router.router_factory import create_fused_moe_router
from vllm.outputs import CompletionOutput
from vllm.platforms import current_platform

from vllm_ranks import vllm_with

EXPERTS, TOPK, LAYERS, CALLS = 10, 3, 2, 3


def _routing(hidden_states, gating_output, topk, renormalize):
    """Returns the weights and ids that a model's router chooses."""
    weights, ids = torch.topk(torch.softmax(gating_output.float(), 1), topk)
    return weights, ids.int()


def _logits(layer, call):
    return torch.randn((5 + 3 * call, EXPERTS), generator=torch.Generator().manual_seed(10 * layer + call))


def _routers():
    return [create_fused_moe_router(top_k=TOPK, global_num_experts=EXPERTS, custom_routing_function=_routing) for _ in range(LAYERS)]


def _call(routers, call):
    return [each.select_experts(torch.zeros(5 + 3 * call, 8), _logits(layer, call), None) for layer, each in enumerate(routers)]


def _recorder(script):
    spec = importlib.util.spec_from_file_location("record_routing", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.RoutingRecorder(num_experts=EXPERTS, max_tokens=64)


def _expected():
    """Names and arrays of a recording of all calls by rank 4."""
    found = {}
    for layer in range(LAYERS):
        weights, ids = zip(*(_routing(None, _logits(layer, call), TOPK, False) for call in range(CALLS)))
        found[f"layer{layer}.rank4.topk_ids"] = torch.cat(ids).numpy()
        found[f"layer{layer}.rank4.topk_weights"] = torch.cat(weights).numpy()
    return found


def wrapped(rank, world, store, script, recipe):
    """Runs the recipe that wraps a method of vLLM's routers, then several passes. Returns the recording, and the expected one."""
    recorder = _recorder(script)
    with vllm_with(rank, world, store, "allgather_reducescatter"):
        exec(recipe, {"recorder": recorder, "dp_rank": 4})
        routers = _routers()
        for call in range(CALLS):
            _call(routers, call)
    return recorder.tensors(), _expected()


def returned(rank, world, store, script, recipe):
    """Runs passes whose experts vLLM captures for enable_return_routed_experts, then the recipe for its outputs. The model has a dense
    layer before those with experts."""
    recorder = _recorder(script)
    with vllm_with(rank, world, store, "allgather_reducescatter") as config:
        sizes = types.SimpleNamespace(get_total_num_hidden_layers=lambda: 1 + LAYERS, get_num_experts=lambda: EXPERTS,
                                      get_num_experts_per_tok=lambda: TOPK, hf_text_config=types.SimpleNamespace(model_type="test"))
        given = types.SimpleNamespace(model_config=sizes, parallel_config=config.parallel_config)
        kind, type(current_platform).device_type = type(current_platform).device_type, "cpu"
        try:
            capturer = RoutedExpertsCapturer(64, given)
        finally:
            type(current_platform).device_type = kind
        routers, chunks = _routers(), []
        for layer, each in enumerate(routers):
            each.set_capture_fn(lambda ids, layer=layer: capturer.capture(1 + layer, ids))
        with set_forward_context(None, config):
            for call in range(CALLS):
                _call(routers, call)
                chunks.append(capturer.snapshot_routing_data(5 + 3 * call).numpy())
    output = CompletionOutput(index=0, text="", token_ids=[], cumulative_logprob=None, logprobs=None,
                              routed_experts=np.concatenate(chunks))  # as vLLM's OutputProcessor does
    exec(recipe, {"recorder": recorder, "request_output": types.SimpleNamespace(outputs=[output]), "layers_with_experts": [1, 2], "rank": 4})
    expected = {name.replace(f"layer{layer}", f"layer{layer + 1}"): ids for layer in (0, 1) for name, ids in _expected().items()
                if name == f"layer{layer}.rank4.topk_ids"}
    return recorder.tensors(), expected
