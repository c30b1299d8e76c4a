# SPDX-License-Identifier: Apache-2.0
"""Passes of one rank through SGLang's dispatcher and layer with the plug-in, on the CPU or a GPU, compared with plain torch."""
import os

import torch

import sglang_ranks
import switchyard as sy
from fp8_values import blocks_of, fp8_mlp, fp8_of
from sglang_ranks import (EXPERTS, INNER, TOPK, deep_gemm_available, dispatcher_of, mlp, off, prefill, tokens_of, topk_output, wanted,
                          weights_of)

BAR, FP8_BAR = 1e-2, 4e-2  # of the relative error; fp8 rows and weights are compared with their values


# ---- Dispatcher ----


def experts_on(output, w13, w2):
    """Computes this rank's experts on the result of a dispatch, in plain torch, and returns SGLang's input of a combine."""
    from sglang.srt.layers.moe.token_dispatcher.base import DispatchOutputChecker
    from sglang.srt.layers.moe.token_dispatcher.deepep import DeepEPLLCombineInput, DeepEPNormalCombineInput

    x = output.hidden_states.float()
    if output.hidden_states_scale is not None:
        assert output.hidden_states.dtype == torch.float8_e4m3fn and output.hidden_states_scale.dtype == torch.float32
        x = x * output.hidden_states_scale.repeat_interleave(128, -1)
    if DispatchOutputChecker.format_is_deepep_normal(output):
        assert output.topk_ids.dtype == torch.int64 and x.dim() == 2
        y = torch.zeros(x.shape, device=x.device)
        for row, k in (output.topk_ids >= 0).nonzero().tolist():
            expert = output.topk_ids[row, k]
            y[row] += output.topk_weights[row, k] * mlp(x[row:row + 1], w13[expert], w2[expert])[0]
        return DeepEPNormalCombineInput(y.bfloat16(), output.topk_ids, output.topk_weights)
    y = torch.full(x.shape, float("nan"), device=x.device)  # rows beyond the counts are not read
    for expert, rows in enumerate(output.masked_m.tolist()):
        y[expert, :rows] = mlp(x[expert, :rows], w13[expert], w2[expert])
    return DeepEPLLCombineInput(y.bfloat16(), output.topk_ids, output.topk_weights)


def installed(choice="all2all"):
    from switchyard.engines import sglang

    sglang.install(choice)


def counts_of(inputs, rank, world):
    """Returns the number of routes to each of this rank's experts."""
    here = EXPERTS // world
    return [sum(int((ids == e).sum()) for _, ids, _ in inputs) for e in range(rank * here, (rank + 1) * here)]


def check_pass(made, inputs, rank, world, hidden, extend, fp8=False, alignment=1):
    """One dispatch, experts and combine."""
    w13, w2 = weights_of(hidden)
    here = slice(rank * EXPERTS // world, (rank + 1) * EXPERTS // world)
    x, ids, weights = inputs[rank]
    with prefill(extend):
        output = made.dispatch(hidden_states=x, topk_output=topk_output(ids, weights))
        assert output.format.value == ("deepep_normal" if extend else "deepep_ll")
        want = counts_of(inputs, rank, world)
        if extend:
            assert output.num_recv_tokens_per_expert == [-(-each // alignment) * alignment for each in want]
            assert output.hidden_states.shape[0] == sum(int(((each >= here.start) & (each < here.stop)).any(1).sum())
                                                        for _, each, _ in inputs)
        else:
            assert output.masked_m.dtype == torch.int32 and output.masked_m.tolist() == want
            assert output.expected_m == (len(x) * world * TOPK + EXPERTS) // EXPERTS
        out = made.combine(combine_input=experts_on(output, w13[here], w2[here]))
    assert out.dtype == torch.bfloat16
    assert (output.hidden_states_scale is not None) == fp8
    error = off(out, wanted(fp8_of(x) if fp8 else x, ids, weights, w13, w2))
    assert error < BAR, error
    return error


def check_bf16(rank, world):
    """T = 0, skew, several layers, and a hidden size that DeepEP does not have."""
    from sglang.srt.batch_overlap.two_batch_overlap import MaybeTboDeepEPDispatcher
    from switchyard.engines.sglang._dispatcher import Dispatcher

    installed()
    layers = [dispatcher_of(world, 328) for _ in range(2)]
    assert all(isinstance(each, MaybeTboDeepEPDispatcher) and type(each) is Dispatcher for each in layers)
    assert layers[0].expert_mask_gpu is None
    errors = []
    for step, (made, extend) in enumerate([(layers[0], True), (layers[1], True), (layers[0], False), (layers[1], False),
                                           (layers[0], True), (layers[0], False), (layers[0], False)]):
        inputs = tokens_of(world, 328, seed=step, skew=step % 3 == 2)
        errors.append(check_pass(made, inputs, rank, world, 328, extend))
    print(f"relative errors {errors}")


def check_fp8(rank, world):
    installed()
    with deep_gemm_available():
        made = dispatcher_of(world, 384, rows="fp8")
        for step, extend in enumerate([True, False, True]):
            check_pass(made, tokens_of(world, 384, seed=step), rank, world, 384, extend, fp8=True, alignment=128)
    made.set_quant_config({"normal_dispatcher_output_dtype": "bf16", "low_latency_dispatcher_output_dtype": "fp8"})
    for extend in (True, False):
        check_pass(made, tokens_of(world, 384, seed=5), rank, world, 384, extend, fp8=not extend)


# ---- Layer ----


def layer_of(world, hidden, quant_config=None, **changes):
    """Returns SGLang's layer, with unspecified weights. Its operator takes the CUDA path, which calls the runner."""
    from sglang.srt.layers.moe.ep_moe.layer import DeepEPMoE

    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(sglang_ranks.place):
            made = DeepEPMoE(**{"num_experts": EXPERTS, "top_k": TOPK, "hidden_size": hidden, "intermediate_size": INNER, "layer_id": 0,
                                "quant_config": quant_config, "prefix": "experts", **changes})
    finally:
        torch.set_default_dtype(torch.float32)
    made.quant_method._forward_method = getattr(made.quant_method, "forward_cuda", None)
    return made


def load(made, rank, world, w13, w2, scales=()):
    """Writes this rank's weights into the layer and completes loading as SGLang does."""
    here = slice(rank * EXPERTS // world, (rank + 1) * EXPERTS // world)
    with torch.no_grad():
        for name, values in (("w13_weight", w13), ("w2_weight", w2), *scales):
            getattr(made, name).copy_(values[here])
    made.quant_method.process_weights_after_loading(made)


def check(made, inputs, rank, w13, w2, extend, fp8=False):
    """Compares a pass with plain torch. fp8: the layer computes with fp8 operands, as on GPUs."""
    x, ids, weights = inputs[rank]
    with prefill(extend):
        out = made(x, topk_output(ids, weights))
    error = off(out, wanted(fp8_of(x), ids, weights, w13, w2, fp8_mlp) if fp8 else wanted(x, ids, weights, w13, w2))
    assert out.dtype == torch.bfloat16 and error < (FP8_BAR if fp8 else BAR), error


def install_layer(variables):
    from switchyard.engines import sglang

    os.environ.update(variables)
    sglang.install("layer")


def check_layer_bf16(rank, world):
    """Two layers that share memory, T = 0, skew, an odd hidden size, both kinds of pass, and a reload of the weights."""
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
    from switchyard.engines.sglang import _layer as ours

    install_layer({"SWITCHYARD_SGLANG_MAX_TOKENS": "24"})
    hidden, used, forward = 328, [], sy.MoeLayer.forward
    sy.MoeLayer.forward = lambda self, *arguments: used.append(self) or forward(self, *arguments)
    with deep_gemm_available():
        layers = [layer_of(world, hidden, layer_id=number) for number in range(2)]
        weights = [weights_of(hidden, seed=number) for number in range(2)]
        for made, (w13, w2) in zip(layers, weights):
            assert isinstance(made.runner.runner_core, ours.Core) and isinstance(made.dispatcher, ours.Dispatcher)
            load(made, rank, world, w13, w2)
        for step, (number, extend) in enumerate([(0, True), (1, True), (1, False), (0, False), (0, True), (1, False)]):
            inputs = tokens_of(world, hidden, seed=step, skew=step % 3 == 2)
            check(layers[number], inputs, rank, *weights[number], extend)
            assert used.pop() is layers[number].runner.runner_core._made["prefill" if extend else "decode"] and not used
        fresh = weights_of(hidden, seed=7)
        load(layers[0], rank, world, *fresh)
        check(layers[0], tokens_of(world, hidden), rank, *fresh, True)
        check(layers[1], tokens_of(world, hidden), rank, *weights[1], False)
        given = layers[0].dispatcher.dispatch(hidden_states=tokens_of(world, hidden)[rank][0], topk_output=None)
        assert isinstance(given, StandardDispatchOutput)
    sy.MoeLayer.forward = forward


def check_layer_fp8(rank, world):
    from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod

    install_layer({"SWITCHYARD_SGLANG_MAX_TOKENS": "24"})
    config = Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[128, 128])
    hidden, made = 384, None
    with deep_gemm_available():
        made = layer_of(world, hidden, config)
        assert isinstance(made.quant_method, Fp8MoEMethod) and made.w13_weight.dtype == torch.float8_e4m3fn
        for seed in range(2):  # the second time is a reload
            w13, w2 = weights_of(hidden, seed=seed)
            (q13, s13, v13), (q2, s2, v2) = blocks_of(w13), blocks_of(w2)
            load(made, rank, world, q13, q2, (("w13_weight_scale_inv", s13), ("w2_weight_scale_inv", s2)))
            for extend in (True, False):
                check(made, tokens_of(world, hidden, seed=seed), rank, v13, v2, extend, fp8=sglang_ranks.place == "cuda")
