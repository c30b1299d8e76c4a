# SPDX-License-Identifier: Apache-2.0
"""The plug-in for vLLM 0.33: what it changes and restores, what it refuses and with which sentence, and ranks that fail. Stand-ins,
with reasons: vllm_stand_ins.STAND_INS."""
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from vllm_host import in_vllm  # noqa: E402


def test_importing_the_plug_in_imports_no_engine(environment):
    code = ("import sys; import switchyard.plugins, switchyard.engines.vllm; switchyard.plugins.vllm(); "
            "print([m for m in ('torch', 'vllm') if m in sys.modules])")
    unset = {**environment, "SWITCHYARD_VLLM": ""}
    answer = subprocess.run([sys.executable, "-c", code], env=unset, capture_output=True, text=True)
    assert answer.stdout.strip() == "[]", answer.stderr


def test_vllm_differs_only_while_the_plug_in_is_installed():
    in_vllm("only_while_requested", 1)


def test_a_place_of_another_plug_in_is_an_error():
    *before, after = in_vllm("conflicts", 1)[0]
    assert all("was replaced by vllm_checks: two plug-ins cannot replace the same place" in each for each in before), before
    assert "was replaced after this plug-in: remove the other plug-in first" in after


@pytest.mark.parametrize("version", ["0.32.1", "0.34.0", "1.0"])
def test_other_versions(version):
    assert in_vllm("other_version", 1, version)[0] == (
        f"vllm {version}: this plug-in was tested with vllm 0.33 and its extension points change between versions; "
        "SWITCHYARD_DEEP_EP=1 supports every version that calls DeepEP V1")


def test_cuda_graphs_of_high_throughput():
    assert in_vllm("graphs", 1)[0] == ["NONE", "FULL_AND_PIECEWISE", "NONE"]


def test_refused_by_all2all():
    found, other = in_vllm("refused_by_all2all", 2)
    assert {**found, "experts": ""} == {**other, "experts": ""} and "rank 1 of 2" in other["experts"]
    assert found.pop("supported") == ""
    for subject, words in {
        "enable_dbo": "dual batch overlap (--enable-dbo) is not supported; disable it, or use SWITCHYARD_DEEP_EP=1",
        "enable_elastic_ep": "elastic expert parallelism (--enable-elastic-ep) is not supported; use --all2all-backend nixl_ep",
        "enable_fault_tolerance": "fault tolerance (--enable-fault-tolerance), which masks ranks, is not supported; a failed rank",
        "one scale": "one dynamic torch.float8_e4m3fn scale for all rows, of which some are unspecified in batches, is not",
        "reduces": "BatchedExperts, which reduces rows itself, with deepep_low_latency is not supported; use --all2all-backend",
        "nvfp4": "VLLM_DEEPEPLL_NVFP4_DISPATCH=1 is not supported; unset it",
        "tokens": "max_tokens = 70000",
        "experts": "3 of 8 experts is not supported; Switchyard gives rank",
    }.items():
        assert words in found.pop(subject), subject
    assert not found


def test_refused_by_layer():
    found, other = in_vllm("refused_by_layer", 2)
    assert found == other
    for subject, words in {
        "moe_backend": "--moe-backend triton with 'layer', which computes the experts itself, is not supported; omit it",
        "all2all_backend": "--all2all-backend deepep_high_throughput with 'layer', which exchanges rows itself, is not supported",
        "use_ep": "an MoE layer without expert parallelism is not supported; start vLLM with --enable-expert-parallel",
        "dp_size": "tensor parallelism of 2 without data parallelism",
        "activation": "the activation 'gelu' with 'layer'",
        "has_bias": "a bias of experts, or a limit, alpha or beta of SwiGLU",
        "swiglu_limit": "a bias of experts, or a limit, alpha or beta of SwiGLU",
        "in_dtype": "a layer with dtype = 'f32': must be 'bf16', and on GPUs f16 or fp8_e4m3",
        "topk": "a layer with topk = 33",
        "tensor scales": "is not supported; use SWITCHYARD_VLLM=all2all",
        "block scales on the CPU": "a layer with dtype = 'fp8_e4m3': must be 'bf16' on the CPU",
        "enable_dbo": "dual batch overlap",
        "other backend": "the MoE backend DEEPGEMM with 'layer', which computes the experts itself, is not supported; unset",
        "lora": "LoRA (--enable-lora) with 'layer' is not supported",
        "other experts": "RowExperts, which vLLM chose for this quantization, with 'layer' is not supported",
    }.items():
        assert words in found.pop(subject), subject
    assert not found


@pytest.mark.parametrize("backend", ["deepep_high_throughput", "deepep_low_latency"])
def test_a_failing_rank_ends_the_workers_step(backend):
    found = in_vllm("failing_rank", 2, backend)[0]
    assert all(each.startswith(("PeerFailed", "PeerTimeout")) and "rank 1" in each for each in found), found


def test_heap_for_graphs_beside_other_calls():
    plain, with_graphs, small = in_vllm("heap_with_graphs", 1)[0]
    assert plain + small // 2 < with_graphs <= plain + small


def test_a_failing_rank_ends_a_pass_of_the_layer():
    found = in_vllm("failing_layer", 2, without=(1,))[0]
    assert found.startswith(("PeerFailed", "PeerTimeout")) and "rank 1" in found, found


def test_the_last_output_of_a_rank_that_dies_is_shown():
    with pytest.raises(AssertionError, match="rank 0:\nno answer, exit code -6; its last output:\nterminate called: the cause\nFatal Python"):
        in_vllm("terminated", 1)


def test_vllm_ends_the_groups_of_layers():
    assert in_vllm("destroyed_manager", 2) == [(1, 0)] * 2


def test_one_line_in_the_log():
    first, other = in_vllm("log", 2)
    assert len(other) == 1 and "plugs into vLLM 0.33.0 (SWITCHYARD_VLLM=all2all)" in other[0]
    assert len(first) == 2 and "normal mode, 2 ranks on 1 hosts (cpu), hidden 384, 8 experts, topk 3" in first[1], first


def test_tokens_of_tensor_parallel_ranks():
    assert in_vllm("token_counts", 2) == [[8, 16, 64]] * 2
