# SPDX-License-Identifier: Apache-2.0
"""SGLang's dispatcher by the plug-in, ``SWITCHYARD_SGLANG=all2all``: its own factory, formats and permutations, on CPU ranks,
compared with plain torch."""
import os

import pytest

torch = pytest.importorskip("torch")

from sglang_ranks import (EXPERTS, INNER, TOPK, config_of, deep_gemm_available, dispatcher_of, mlp, off, over_ranks,  # noqa: E402
                          prefill, tokens_of, topk_output, wanted, weights_of)

BAR = 1e-2  # of the relative error


def _experts(output, w13, w2):
    """Computes this rank's experts on what a dispatch returned, in plain torch, and returns SGLang's input of a combine."""
    from sglang.srt.layers.moe.token_dispatcher.base import DispatchOutputChecker
    from sglang.srt.layers.moe.token_dispatcher.deepep import DeepEPLLCombineInput, DeepEPNormalCombineInput

    x = output.hidden_states.float()
    if output.hidden_states_scale is not None:
        assert output.hidden_states.dtype == torch.float8_e4m3fn and output.hidden_states_scale.dtype == torch.float32
        x = x * output.hidden_states_scale.repeat_interleave(128, -1)
    if DispatchOutputChecker.format_is_deepep_normal(output):
        assert output.topk_ids.dtype == torch.int64 and x.dim() == 2
        y = torch.zeros(x.shape)
        for row, k in (output.topk_ids >= 0).nonzero().tolist():
            expert = output.topk_ids[row, k]
            y[row] += output.topk_weights[row, k] * mlp(x[row:row + 1], w13[expert], w2[expert])[0]
        return DeepEPNormalCombineInput(y.bfloat16(), output.topk_ids, output.topk_weights)
    y = torch.full(x.shape, float("nan"))  # rows beyond the counts are not read
    for expert, rows in enumerate(output.masked_m.tolist()):
        y[expert, :rows] = mlp(x[expert, :rows], w13[expert], w2[expert])
    return DeepEPLLCombineInput(y.bfloat16(), output.topk_ids, output.topk_weights)


def _installed(choice="all2all"):
    from switchyard.engines import sglang

    sglang.install(choice)


def _counts(inputs, rank, world):
    """Returns the number of routes to each of this rank's experts."""
    here = EXPERTS // world
    return [sum(int((ids == e).sum()) for _, ids, _ in inputs) for e in range(rank * here, (rank + 1) * here)]


def _fp8_of(x):
    """Returns the values of rows sent as fp8: groups of 128 columns with the scale amax / 448."""
    groups = x.float().view(len(x), x.shape[1] // 128, 128)
    scales = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 448
    return ((groups / scales).to(torch.float8_e4m3fn).float() * scales).view(x.shape)


def _pass(made, inputs, rank, world, hidden, extend, fp8=False, alignment=1):
    """One dispatch, experts and combine."""
    w13, w2 = weights_of(hidden)
    here = slice(rank * EXPERTS // world, (rank + 1) * EXPERTS // world)
    x, ids, weights = inputs[rank]
    with prefill(extend):
        output = made.dispatch(hidden_states=x, topk_output=topk_output(ids, weights))
        assert output.format.value == ("deepep_normal" if extend else "deepep_ll")
        want = _counts(inputs, rank, world)
        if extend:
            assert output.num_recv_tokens_per_expert == [-(-each // alignment) * alignment for each in want]
            assert output.hidden_states.shape[0] == sum(int(((each >= here.start) & (each < here.stop)).any(1).sum())
                                                        for _, each, _ in inputs)
        else:
            assert output.masked_m.dtype == torch.int32 and output.masked_m.tolist() == want
            assert output.expected_m == (len(x) * world * TOPK + EXPERTS) // EXPERTS
        out = made.combine(combine_input=_experts(output, w13[here], w2[here]))
    assert out.dtype == torch.bfloat16
    assert (output.hidden_states_scale is not None) == fp8
    error = off(out, wanted(_fp8_of(x) if fp8 else x, ids, weights, w13, w2))
    assert error < BAR, error
    return error


def _bf16(rank, world):
    """T = 0, skew, several layers, and a hidden size that DeepEP does not have."""
    from sglang.srt.batch_overlap.two_batch_overlap import MaybeTboDeepEPDispatcher
    from switchyard.engines.sglang._dispatcher import Dispatcher

    _installed()
    layers = [dispatcher_of(world, 328) for _ in range(2)]
    assert all(isinstance(each, MaybeTboDeepEPDispatcher) and type(each) is Dispatcher for each in layers)
    assert layers[0].expert_mask_gpu is None
    errors = []
    for step, (made, extend) in enumerate([(layers[0], True), (layers[1], True), (layers[0], False), (layers[1], False),
                                           (layers[0], True), (layers[0], False), (layers[0], False)]):
        inputs = tokens_of(world, 328, seed=step, skew=step % 3 == 2)
        errors.append(_pass(made, inputs, rank, world, 328, extend))
    print(f"relative errors {errors}")


@pytest.mark.parametrize("world", [2, 4])
def test_bf16(world):
    over_ranks(world, _bf16)


def _fp8(rank, world):
    _installed()
    with deep_gemm_available():
        made = dispatcher_of(world, 384, rows="fp8")
        for step, extend in enumerate([True, False, True]):
            _pass(made, tokens_of(world, 384, seed=step), rank, world, 384, extend, fp8=True, alignment=128)
    made.set_quant_config({"normal_dispatcher_output_dtype": "bf16", "low_latency_dispatcher_output_dtype": "fp8"})
    for extend in (True, False):
        _pass(made, tokens_of(world, 384, seed=5), rank, world, 384, extend, fp8=not extend)


@pytest.mark.parametrize("world", [2, 4])
def test_fp8(world):
    over_ranks(world, _fp8)


def _many_tokens(rank, world):
    """SGLang asserts at most 1024 tokens for DeepEP; experts multiply by their number plus one."""
    from sglang.srt.layers.moe.token_dispatcher.deepep import DeepEPLLCombineInput

    os.environ["SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"] = "1500"
    _installed()
    made, inputs = dispatcher_of(world, 64), tokens_of(world, 64, tokens=(1500, 1100))
    x, ids, weights = inputs[rank]
    here = EXPERTS // world
    with prefill(False):
        output = made.dispatch(hidden_states=x, topk_output=topk_output(ids, weights))
        assert output.masked_m.tolist() == _counts(inputs, rank, world) and max(_counts(inputs, rank, world)) > 500
        factors = torch.arange(rank * here, (rank + 1) * here).add(1)[:, None, None]
        out = made.combine(combine_input=DeepEPLLCombineInput((output.hidden_states.float() * factors).bfloat16(), ids, weights))
    want = x.float() * (torch.where(ids >= 0, ids + 1, 0) * weights).sum(1, keepdim=True)
    assert off(out, want) < BAR


def test_more_tokens_than_deep_ep_takes():
    over_ranks(2, _many_tokens)


def _two_batches(rank, world, extend):
    """The order of calls of SGLang's two-batch overlap: both halves are under way at the same time."""
    from sglang.srt.runtime_context import get_flags

    _installed()
    hidden = 64
    w13, w2 = weights_of(hidden)
    here = slice(rank * EXPERTS // world, (rank + 1) * EXPERTS // world)
    with get_flags().moe.override(tbo_enabled=True), prefill(extend):
        made = dispatcher_of(world, hidden)
        for step in range(3):
            halves = [tokens_of(world, hidden, seed=2 * step + half)[rank] for half in range(2)]

            def dispatch_a(half):
                x, ids, weights = halves[half]
                made.dispatch_a(hidden_states=x, topk_output=topk_output(ids, weights), tbo_subbatch_index=half)

            def combine_a(half, output):
                made.combine_a(combine_input=_experts(output, w13[here], w2[here]), tbo_subbatch_index=half)

            dispatch_a(0)
            dispatch_a(1)
            first = made.dispatch_b(tbo_subbatch_index=0)
            combine_a(0, first)
            second = made.dispatch_b(tbo_subbatch_index=1)
            combine_a(1, second)
            outs = [made.combine_b(tbo_subbatch_index=half) for half in range(2)]
            for out, (x, ids, weights) in zip(outs, halves):
                assert off(out, wanted(x, ids, weights, w13, w2)) < BAR


@pytest.mark.parametrize("extend", [True, False], ids=["prefill", "decode"])
def test_two_batch_overlap(extend):
    over_ranks(2, _two_batches, extend)


def _between(rank, world):
    """SGLang's hooks: work between sending and receiving, and around the calls."""
    _installed()
    made, inputs, seen = dispatcher_of(world, 64), tokens_of(world, 64), []
    made.register_deepep_dispatch_hook(lambda dispatcher: seen.append("between"))
    made.register_post_dispatch_hook(lambda dispatcher, output: seen.append(output.format.value))
    for extend in (True, False):
        _pass(made, inputs, rank, world, 64, extend)
    assert seen == ["between", "deepep_normal", "between", "deepep_ll"]
    import switchyard as sy

    for step, match in ((made.dispatch_b, "dispatch_b without dispatch_a"), (made.combine_b, "combine_b without combine_a")):
        with pytest.raises(sy.InvalidArgument, match=match):
            step()


def test_hooks_of_the_dispatcher():
    over_ranks(2, _between)


def _permuted(rank, world):
    """SGLang's own permutations for its DeepGEMM runner take the output of decode and make the input of combine."""
    from sglang.srt.layers.moe.moe_runner.base import PermuteMethodPool
    from sglang.srt.layers.moe.moe_runner.deep_gemm import DeepGemmRunnerOutput

    _installed()
    made, inputs, config = dispatcher_of(world, 64), tokens_of(world, 64), config_of(world, 64)
    x, ids, weights = inputs[rank]
    w13, w2 = weights_of(64)
    here, state = slice(rank * EXPERTS // world, (rank + 1) * EXPERTS // world), {}
    with prefill(False):
        output = made.dispatch(hidden_states=x, topk_output=topk_output(ids, weights))
        given = PermuteMethodPool.get_pre_permute("deepep_ll", "deep_gemm")(output, None, config, state)
        assert given.use_masked_gemm and given.masked_m is output.masked_m
        rows = _experts(output._replace(hidden_states=given.hidden_states), w13[here], w2[here]).hidden_states
        back = PermuteMethodPool.get_post_permute("deep_gemm", "deepep_ll")
        out = made.combine(combine_input=back(DeepGemmRunnerOutput(hidden_states=rows), None, config, state))
    assert INNER == w2.shape[2] and off(out, wanted(x, ids, weights, w13, w2)) < BAR


def test_permutations_of_the_runner():
    over_ranks(2, _permuted)
