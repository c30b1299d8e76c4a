# SPDX-License-Identifier: Apache-2.0
"""The whole layer in SGLang by the plug-in, ``SWITCHYARD_SGLANG=layer``: SGLang's own DeepEPMoE layer, quantisation methods and
runner registry, on CPU ranks, compared with plain torch."""
import os

import pytest

torch = pytest.importorskip("torch")

import switchyard as sy  # noqa: E402
from sglang_passes import BAR, check, check_layer_bf16, check_layer_fp8, install_layer, layer_of, load  # noqa: E402
from sglang_ranks import config_of, deep_gemm_available, off, over_ranks, prefill, tokens_of, topk_output, wanted, weights_of  # noqa: E402


def _needs_layer():
    try:
        sy.MoeLayer.heap_bytes(2, hidden=64, intermediate=64, num_experts=2, topk=1, max_tokens=2)
    except sy.errors.LibraryNotFound:
        pytest.skip("no library switchyard_layer")


@pytest.mark.parametrize("world", [2, 4])
def test_bf16(world):
    _needs_layer()
    over_ranks(world, check_layer_bf16)


@pytest.mark.parametrize("world", [2, 4])
def test_block_fp8(world):
    _needs_layer()
    over_ranks(world, check_layer_fp8)


def _two_batches(rank, world):
    from sglang.srt.runtime_context import get_flags

    install_layer({"SWITCHYARD_SGLANG_MAX_TOKENS": "24"})
    w13, w2 = weights_of(64)
    with deep_gemm_available(), get_flags().moe.override(tbo_enabled=True), prefill(False):
        made = layer_of(world, 64)
        load(made, rank, world, w13, w2)
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

    install_layer({"SWITCHYARD_SGLANG_MAX_TOKENS": "24"})

    def refused(match, hidden=64, quant_config=None, **changes):
        with pytest.raises(sy.InvalidArgument, match=match):
            layer_of(world, hidden, quant_config, **changes)

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
            refused("--deepep-mode auto .--enable-eplb.: the layer does not count tokens per expert")
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
            made = layer_of(world, 64)
        assert made.runner.runner_core._configs["prefill"]["max_tokens"] == 256
        load(made, rank, world, *weights_of(64))
        check(made, tokens_of(world, 64), rank, *weights_of(64), True)


def test_refused_layers():
    _needs_layer()
    over_ranks(2, _refused)
