# SPDX-License-Identifier: Apache-2.0
"""Scenarios of one rank in vLLM on a GPU: decode steps in vLLM's own CUDAGraphWrapper, and layers of block-fp8 weights. Imported
only in the processes of vllm_host."""
import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.model_executor.layers.fused_moe import all2all_utils
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel
from vllm.model_executor.layers.quantization.fp8 import Fp8Config

import vllm_ranks
from fp8_values import blocks_of, fp8_mlp, fp8_of
from switchyard.engines import vllm as plugin
from vllm_ranks import (BatchedExperts, dequantized, error_of, expected, inputs_of, layers_of, manager_of, map_of, moe_config,
                        quant_config_of, use_plain_operators, vllm_with)


class CapturedExperts(BatchedExperts):
    """BatchedExperts whose shapes and calls do not depend on the counts, so graphs can contain them."""

    def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map, a1q_scale, *others,
              **more):
        gate, up = torch.bmm(dequantized(hidden_states, a1q_scale), w1.float().transpose(1, 2)).chunk(2, -1)
        output.copy_(torch.bmm(torch.nn.functional.silu(gate) * up, w2.float().transpose(1, 2)))


def _kernel_step(config, shape, world, rank, w13, w2, options):
    """Returns a step of vLLM's modular kernel in low-latency format."""
    use_plain_operators()
    moe, quant, _ = moe_config(config, shape), quant_config_of(options), manager_of("deepep_low_latency")
    made = all2all_utils.maybe_make_prepare_finalize(moe, quant, allow_new_interface=True)
    experts = CapturedExperts(moe, quant, max_num_tokens=made.max_num_tokens_per_rank(), num_dispatchers=world)
    whole = FusedMoEKernel(made, experts)
    here = slice(rank * shape[2] // world, (rank + 1) * shape[2] // world)
    matrices, expert_map = (w13[here].to(vllm_ranks.DEVICE), w2[here].to(vllm_ranks.DEVICE)), map_of(here, shape[2])

    def step(x, ids, weights):
        return whole.apply(x, *matrices, weights, ids, MoEActivation.SILU, shape[2], expert_map, False)

    return step


def _layer_step(config, shape, world, rank, w13, w2, routing):
    """Returns a step of vLLM's runner on the whole layer. routing: the tensors (weights, ids) that its router returns."""
    config.kernel_config.set_platform_defaults(config)
    layer = layers_of(config, shape, routing, {})[0]
    here, its = slice(rank * shape[2] // world, (rank + 1) * shape[2] // world), layer.routed_experts
    its.w13_weight.data.copy_(w13[here])
    its.w2_weight.data.copy_(w2[here])
    its.quant_method.process_weights_after_loading(its)
    return lambda x, ids, weights: layer(x, torch.zeros(len(x), shape[2], device=x.device))


def replayed_steps(rank, world, store, form, shape, tokens, options):
    """Captures a step with vLLM's wrapper and replays it with other tokens and routing. Returns, by replay, the error against plain
    torch and against an eager step. form: "all2all" (low-latency format) or "layer"."""
    plugin.install(form)
    given = [inputs_of(world, shape, tokens, skew) for skew in (False, True, False)]
    w13, w2 = given[0][:2]
    x, ids, weights = (torch.empty_like(each, device=vllm_ranks.DEVICE) for each in given[0][2][rank])
    backend = "deepep_low_latency" if form == "all2all" else "allgather_reducescatter"
    with vllm_with(rank, world, store, backend) as config, torch.no_grad():
        config.compilation_config.max_cudagraph_capture_size = max(tokens)
        if form == "all2all":
            step = _kernel_step(config, shape, world, rank, w13, w2, options)
        else:
            step = _layer_step(config, shape, world, rank, w13, w2, (weights, ids))
        wrapper, found = CUDAGraphWrapper(step, config, CUDAGraphMode.FULL), []

        def run(mode):
            with set_forward_context(None, config, num_tokens=len(x), num_tokens_across_dp=torch.tensor(tokens),
                                     cudagraph_runtime_mode=mode, batch_descriptor=BatchDescriptor(num_tokens=len(x))):
                return wrapper(x, ids, weights)

        def load(turn):
            """Writes the inputs of a turn; the third has the tokens of the first in reverse order."""
            order = slice(None) if turn < 2 else torch.arange(len(x) - 1, -1, -1)
            sent = [each[order] for each in given[turn][2][rank]]
            for buffer, each in zip((x, ids, weights), sent):
                buffer.copy_(each)
            return sent

        load(0)
        run(CUDAGraphMode.NONE)
        torch.cuda.synchronize()
        torch.distributed.barrier()
        run(CUDAGraphMode.FULL)  # captures without computing
        for turn in (1, 2, 0):
            sent = load(turn)
            eager = run(CUDAGraphMode.NONE).clone()
            out = run(CUDAGraphMode.FULL)
            seen = fp8_of(sent[0]) if options.get("fp8") else None
            right = expected(*sent, w13, w2, None if seen is None else lambda expert: seen)
            found.append((error_of(out, right), error_of(out, eager.cpu().double())))
        captured = [entry.cudagraph is not None for entry in wrapper.concrete_cudagraph_entries.values()]
        assert captured == [True], captured
        return found


# ---- Whole layers of block-fp8 weights ----


def block_fp8_layer(rank, world, store, shape, tokens):
    """Builds a layer of an fp8 checkpoint, loads weights and runs it twice. Returns the errors against the layer with the quantized
    operands. shape: hidden and intermediate are multiples of 128."""
    plugin.install("layer")
    w13, w2, by_rank = inputs_of(world, shape, tokens)
    (q13, s13, v13), (q2, s2, v2) = blocks_of(w13), blocks_of(w2)
    x, ids, weights = by_rank[rank]
    given, *routing = (each.to(vllm_ranks.DEVICE) for each in by_rank[rank])
    here = slice(rank * shape[2] // world, (rank + 1) * shape[2] // world)
    with vllm_with(rank, world, store, "allgather_reducescatter") as config, torch.no_grad():
        config.kernel_config.set_platform_defaults(config)
        quantization = Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[128, 128])
        runner = layers_of(config, shape, tuple(routing[::-1]), {}, quant_config=quantization)[0]
        its = runner.routed_experts
        for name, values in (("w13_weight", q13), ("w2_weight", q2), ("w13_weight_scale_inv", s13), ("w2_weight_scale_inv", s2)):
            getattr(its, name).data.copy_(values[here])
        its.quant_method.process_weights_after_loading(its)
        seen = fp8_of(x)
        right = expected(x, ids, weights, v13, v2, lambda expert: seen, fp8_mlp)
        errors = []
        for _ in range(2):
            with set_forward_context(None, config, num_tokens=len(x), num_tokens_across_dp=torch.tensor(tokens)):
                errors.append(error_of(runner(given.clone(), torch.zeros(len(x), shape[2], device=given.device)), right))
        made = its.quant_method.moe_kernel
        return errors, type(made.fused_experts).__name__
