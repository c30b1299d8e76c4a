# SPDX-License-Identifier: Apache-2.0
"""The whole layer in SGLang by the plug-in, ``SWITCHYARD_SGLANG=layer``: SGLang's own DeepEPMoE layer, quantisation methods and
runner registry, on CPU ranks, compared with plain torch."""
import os

import pytest

torch = pytest.importorskip("torch")

import switchyard as sy  # noqa: E402
from sglang_ranks import (EXPERTS, INNER, TOPK, config_of, deep_gemm_available, off, over_ranks, prefill, tokens_of,  # noqa: E402
                          topk_output, wanted, weights_of)

BAR = 1e-2  # of the relative error; fp8 weights are compared with their values


def _needs_layer():
    try:
        sy.MoeLayer.heap_bytes(2, hidden=64, intermediate=64, num_experts=2, topk=1, max_tokens=2)
    except sy.errors.LibraryNotFound:
        pytest.skip("no library switchyard_layer")


def _layer(world, hidden, quant_config=None, **changes):
    """Returns SGLang's layer, with unspecified weights. Its operator runs the path of CUDA, which calls the runner."""
    from sglang.srt.layers.moe.ep_moe.layer import DeepEPMoE

    torch.set_default_dtype(torch.bfloat16)
    try:
        made = DeepEPMoE(**{"num_experts": EXPERTS, "top_k": TOPK, "hidden_size": hidden, "intermediate_size": INNER, "layer_id": 0,
                            "quant_config": quant_config, "prefix": "experts", **changes})
    finally:
        torch.set_default_dtype(torch.float32)
    made.quant_method._forward_method = getattr(made.quant_method, "forward_cuda", None)
    return made


def _load(made, rank, world, w13, w2, scales=()):
    """Writes this rank's weights into the layer and ends the loading as SGLang does."""
    here = slice(rank * EXPERTS // world, (rank + 1) * EXPERTS // world)
    with torch.no_grad():
        for name, values in (("w13_weight", w13), ("w2_weight", w2), *scales):
            getattr(made, name).copy_(values[here])
    made.quant_method.process_weights_after_loading(made)


def _check(made, inputs, rank, w13, w2, extend):
    x, ids, weights = inputs[rank]
    with prefill(extend):
        out = made(x, topk_output(ids, weights))
    error = off(out, wanted(x, ids, weights, w13, w2))
    assert out.dtype == torch.bfloat16 and error < BAR, error


def _install(variables):
    from switchyard.engines import sglang

    os.environ.update(variables)
    sglang.install("layer")


def _bf16(rank, world):
    """Two layers that share memory, T = 0, skew, an odd hidden size, both kinds of pass, and a reload of the weights."""
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
    from switchyard.engines.sglang import _layer as ours

    _install({"SWITCHYARD_SGLANG_MAX_TOKENS": "24"})
    hidden, used, forward = 328, [], sy.MoeLayer.forward
    sy.MoeLayer.forward = lambda self, *arguments: used.append(self) or forward(self, *arguments)
    with deep_gemm_available():
        layers = [_layer(world, hidden, layer_id=number) for number in range(2)]
        weights = [weights_of(hidden, seed=number) for number in range(2)]
        for made, (w13, w2) in zip(layers, weights):
            assert isinstance(made.runner.runner_core, ours.Core) and isinstance(made.dispatcher, ours.Dispatcher)
            _load(made, rank, world, w13, w2)
        for step, (number, extend) in enumerate([(0, True), (1, True), (1, False), (0, False), (0, True), (1, False)]):
            inputs = tokens_of(world, hidden, seed=step, skew=step % 3 == 2)
            _check(layers[number], inputs, rank, *weights[number], extend)
            assert used.pop() is layers[number].runner.runner_core._made["prefill" if extend else "decode"] and not used
        fresh = weights_of(hidden, seed=7)
        _load(layers[0], rank, world, *fresh)
        _check(layers[0], tokens_of(world, hidden), rank, *fresh, True)
        _check(layers[1], tokens_of(world, hidden), rank, *weights[1], False)
        given = layers[0].dispatcher.dispatch(hidden_states=tokens_of(world, hidden)[rank][0], topk_output=None)
        assert isinstance(given, StandardDispatchOutput)
    sy.MoeLayer.forward = forward


@pytest.mark.parametrize("world", [2, 4])
def test_bf16(world):
    _needs_layer()
    over_ranks(world, _bf16)


def _blocks(weights):
    """Returns fp8 weights with scales of 128 x 128, and their values."""
    experts, rows, columns = weights.shape
    blocks = weights.float().view(experts, rows // 128, 128, columns // 128, 128)
    scales = blocks.abs().amax((2, 4), keepdim=True) / 448
    q = (blocks / scales).to(torch.float8_e4m3fn)
    return q.view(weights.shape), scales.view(experts, rows // 128, columns // 128), (q.float() * scales).view(weights.shape)


def _block_fp8(rank, world):
    from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod

    _install({"SWITCHYARD_SGLANG_MAX_TOKENS": "24"})
    config = Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[128, 128])
    hidden, made = 384, None
    with deep_gemm_available():
        made = _layer(world, hidden, config)
        assert isinstance(made.quant_method, Fp8MoEMethod) and made.w13_weight.dtype == torch.float8_e4m3fn
        for seed in range(2):  # the second time is a reload
            w13, w2 = weights_of(hidden, seed=seed)
            (q13, s13, v13), (q2, s2, v2) = _blocks(w13), _blocks(w2)
            _load(made, rank, world, q13, q2, (("w13_weight_scale_inv", s13), ("w2_weight_scale_inv", s2)))
            for extend in (True, False):
                _check(made, tokens_of(world, hidden, seed=seed), rank, v13, v2, extend)


@pytest.mark.parametrize("world", [2, 4])
def test_block_fp8(world):
    _needs_layer()
    over_ranks(world, _block_fp8)


def _two_batches(rank, world):
    from sglang.srt.runtime_context import get_flags

    _install({"SWITCHYARD_SGLANG_MAX_TOKENS": "24"})
    w13, w2 = weights_of(64)
    with deep_gemm_available(), get_flags().moe.override(tbo_enabled=True), prefill(False):
        made = _layer(world, 64)
        _load(made, rank, world, w13, w2)
        halves = [tokens_of(world, 64, seed=half)[rank] for half in range(2)]
        for half, (x, ids, weights) in enumerate(halves):
            made.dispatcher.dispatch_a(hidden_states=x, topk_output=topk_output(ids, weights), tbo_subbatch_index=half)
        for half in range(2):
            output = made.dispatcher.dispatch_b(tbo_subbatch_index=half)
            made.dispatcher.combine_a(combine_input=made.run_moe_core(output), tbo_subbatch_index=half)
        for half, (x, ids, weights) in enumerate(halves):
            assert off(made.dispatcher.combine_b(tbo_subbatch_index=half), wanted(x, ids, weights, w13, w2)) < BAR


def test_two_batch_overlap():
    _needs_layer()
    over_ranks(2, _two_batches)


def _refused(rank, world):
    """Each is refused when the layer is built, and nothing hangs afterwards."""
    from sglang.srt.layers.moe.moe_runner import MoeRunner
    from sglang.srt.layers.moe.utils import MoeA2ABackend, MoeRunnerBackend
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.runtime_context import get_exec, get_flags, get_schedule

    _install({"SWITCHYARD_SGLANG_MAX_TOKENS": "24"})

    def refused(match, hidden=64, quant_config=None, **changes):
        with pytest.raises(sy.InvalidArgument, match=match):
            _layer(world, hidden, quant_config, **changes)

    instead = "; use SWITCHYARD_SGLANG=all2all"
    with deep_gemm_available():
        refused(f"activation 'gelu': the layer computes SwiGLU{instead}", activation="gelu")
        refused(f"activation 'silu' without a gate: the layer computes SwiGLU{instead}", is_gated=False)
        refused(f"swiglu_limit = 7.0: the layer computes SwiGLU without limits{instead}", swiglu_limit=7.0)
        refused(f"gemm1_alpha = 1.7: the layer computes SwiGLU without limits{instead}", gemm1_alpha=1.7)
        refused(f"apply_router_weight_on_input: the layer multiplies outputs{'.*'}{instead}", apply_router_weight_on_input=True)
        refused(f"biases of experts: the layer has none{instead}", with_bias=True)
        refused(f"Fp8MoEMethod: the layer takes bf16 weights, or fp8 weights with scales of 128 x 128{instead}",
                quant_config=Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="dynamic"))
        with get_exec().moe.override(enable_eplb=True):
            refused(f"--enable-eplb: the layer does not count tokens per expert{instead}")
        elsewhere = get_flags().moe.override(a2a_backend=MoeA2ABackend.NONE)
        with elsewhere, pytest.raises(sy.InvalidArgument, match="layer needs deepep"):
            MoeRunner(MoeRunnerBackend.DEEP_GEMM, config_of(world, 64))
        with get_flags().moe.override(runner_backend=MoeRunnerBackend.TRITON):
            refused("has not selected the runner deep_gemm: SWITCHYARD_SGLANG=layer needs --moe-runner-backend deep_gemm")
        os.environ["SWITCHYARD_SGLANG_MAX_TOKENS"] = "many"
        refused("SWITCHYARD_SGLANG_MAX_TOKENS = 'many': must be a number of tokens")
        del os.environ["SWITCHYARD_SGLANG_MAX_TOKENS"]
        refused("without --chunked-prefill-size, the tokens of a prefill pass have no limit: set it, or SWITCHYARD_SGLANG")
        with get_schedule().override(chunked_prefill_size=200):
            made = _layer(world, 64)
        assert made.runner.runner_core._configs["prefill"]["max_tokens"] == 256
        _load(made, rank, world, *weights_of(64))
        _check(made, tokens_of(world, 64), rank, *weights_of(64), True)


def test_refused_layers():
    _needs_layer()
    over_ranks(2, _refused)
