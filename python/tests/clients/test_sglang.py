# SPDX-License-Identifier: Apache-2.0
"""SGLang's dispatcher by the plug-in, ``SWITCHYARD_SGLANG=all2all``: its own factory, formats and permutations, on CPU ranks,
compared with plain torch."""
import os

import pytest

torch = pytest.importorskip("torch")

from sglang_passes import BAR, check_bf16, check_fp8, check_pass, counts_of, experts_on, installed  # noqa: E402
from sglang_ranks import EXPERTS, INNER, config_of, dispatcher_of, off, over_ranks, prefill, tokens_of, topk_output, wanted, weights_of  # noqa: E402

@pytest.mark.parametrize("world", [2, 4])
def test_bf16(world):
    over_ranks(world, check_bf16)


@pytest.mark.parametrize("world", [2, 4])
def test_fp8(world):
    over_ranks(world, check_fp8)


def _many_tokens(rank, world):
    """SGLang asserts at most 1024 tokens for DeepEP; experts multiply by their number plus one."""
    from sglang.srt.layers.moe.token_dispatcher.deepep import DeepEPLLCombineInput

    os.environ["SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"] = "1500"
    installed()
    made, inputs = dispatcher_of(world, 64), tokens_of(world, 64, tokens=(1500, 1100))
    x, ids, weights = inputs[rank]
    here = EXPERTS // world
    with prefill(False):
        output = made.dispatch(hidden_states=x, topk_output=topk_output(ids, weights))
        assert output.masked_m.tolist() == counts_of(inputs, rank, world) and max(counts_of(inputs, rank, world)) > 500
        factors = torch.arange(rank * here, (rank + 1) * here).add(1)[:, None, None]
        out = made.combine(combine_input=DeepEPLLCombineInput((output.hidden_states.float() * factors).bfloat16(), ids, weights))
    want = x.float() * (torch.where(ids >= 0, ids + 1, 0) * weights).sum(1, keepdim=True)
    assert off(out, want) < BAR


def test_more_tokens_than_deep_ep_takes():
    over_ranks(2, _many_tokens)


def _two_batches(rank, world, extend):
    """The order of calls of SGLang's two-batch overlap: both halves are under way at the same time."""
    from sglang.srt.runtime_context import get_flags

    installed()
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
                made.combine_a(combine_input=experts_on(output, w13[here], w2[here]), tbo_subbatch_index=half)

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
    installed()
    made, inputs, seen = dispatcher_of(world, 64), tokens_of(world, 64), []
    made.register_deepep_dispatch_hook(lambda dispatcher: seen.append("between"))
    made.register_post_dispatch_hook(lambda dispatcher, output: seen.append(output.format.value))
    for extend in (True, False):
        check_pass(made, inputs, rank, world, 64, extend)
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

    installed()
    made, inputs, config = dispatcher_of(world, 64), tokens_of(world, 64), config_of(world, 64)
    x, ids, weights = inputs[rank]
    w13, w2 = weights_of(64)
    here, state = slice(rank * EXPERTS // world, (rank + 1) * EXPERTS // world), {}
    with prefill(False):
        output = made.dispatch(hidden_states=x, topk_output=topk_output(ids, weights))
        given = PermuteMethodPool.get_pre_permute("deepep_ll", "deep_gemm")(output, None, config, state)
        assert given.use_masked_gemm and given.masked_m is output.masked_m
        rows = experts_on(output._replace(hidden_states=given.hidden_states), w13[here], w2[here]).hidden_states
        back = PermuteMethodPool.get_post_permute("deep_gemm", "deepep_ll")
        out = made.combine(combine_input=back(DeepGemmRunnerOutput(hidden_states=rows), None, config, state))
    assert INNER == w2.shape[2] and off(out, wanted(x, ids, weights, w13, w2)) < BAR


def test_permutations_of_the_runner():
    over_ranks(2, _permuted)
