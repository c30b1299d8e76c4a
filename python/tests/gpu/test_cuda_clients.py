# SPDX-License-Identifier: Apache-2.0
"""Engines and training frameworks with Switchyard on GPUs: their unmodified files (scripts/clients.sh) against plain torch, on 2
ranks distributed over the GPUs. The scenarios are those of the CPU tests in clients/. Stand-ins, with reasons:
vllm_stand_ins.STAND_INS, vllm_ranks.use_device and use_plain_operators, sglang_sources.STAND_INS, megatron_ranks. Process groups
use gloo, so both ranks may share a GPU."""
import pytest

import switchyard as sy
from switchyard._abi import ffi as _ffi

torch = pytest.importorskip("torch")

from deep_ep_ranks import over_groups  # noqa: E402
from vllm_host import in_vllm  # noqa: E402

#: Largest relative errors; fp8 results are compared with those of the quantized values.
BAR, FP8_BAR, GRAPH_BAR = 1e-2, 4e-2, 1e-3
NORMAL, BATCHED = "deepep_high_throughput", "deepep_low_latency"
#: hidden, intermediate, experts, topk. DeepEP's kernels do not have this hidden size.
SHAPE, BLOCKS, ONE = (384, 128, 8, 3), (384, 256, 8, 3), (384, 128, 8, 1)
TWO, EMPTY, DECODE = (17, 5), (9, 0), (8, 8)


@pytest.fixture(autouse=True)
def gpus():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")


@pytest.fixture
def layers():
    try:
        _ffi.layer_library()
    except sy.LibraryNotFound as error:
        pytest.skip(str(error))


# ---- vLLM ----


@pytest.mark.parametrize("backend", [NORMAL, BATCHED])
@pytest.mark.parametrize("shape, tokens, options", [
    (SHAPE, TWO, {}),
    (SHAPE, EMPTY, {"known": True, "skew": True}),
    (SHAPE, TWO, {"fp8": "block", "known": True}),
    (ONE, TWO, {"on_input": True}),
])
def test_vllm_kernel(backend, shape, tokens, options):
    results = in_vllm("kernel", 2, backend, shape, tokens, options, device="cuda")
    print([error for error, _, _ in results])
    assert max(error for error, _, _ in results) <= (FP8_BAR if options.get("fp8") else BAR), results
    seen = [each for _, each, _ in results if each]
    assert {each[0] for each in seen} == {torch.float8_e4m3fn if options.get("fp8") else torch.bfloat16}
    assert sum(each[2] for each in seen) == sum(tokens) * shape[3]
    print("experts write the rows that combine reads:", [in_place for _, _, in_place in results])


@pytest.mark.parametrize("options", [{"routes": True}, {"fp8": "one_scale", "known": True}])
def test_vllm_forms_of_standard_experts(options):
    found = in_vllm("kernel", 2, NORMAL, SHAPE, TWO, options, device="cuda")
    assert max(error for error, _, _ in found) <= (FP8_BAR if options.get("fp8") else BAR)


@pytest.mark.parametrize("shape, tokens, options", [(SHAPE, TWO, {"moved": True, "shared": True}), (ONE, TWO, {"on_input": True}),
                                                    (SHAPE, EMPTY, {"skew": True})])
def test_vllm_layer(shape, tokens, options, layers):
    for errors, experts, prepare, fast in in_vllm("whole_layer", 2, shape, tokens, options, device="cuda"):
        print(errors)
        assert (experts, prepare, fast) == ("SwitchyardExperts", "SwitchyardPassThrough", [True] * 4)
        assert max(errors) <= BAR, errors


def test_vllm_layer_of_block_fp8(layers):
    for errors, experts in in_vllm("block_fp8_layer", 2, BLOCKS, TWO, device="cuda"):
        print(errors)
        assert experts == "SwitchyardExperts" and max(errors) <= FP8_BAR, errors


@pytest.mark.parametrize("form, options", [("all2all", {}), ("all2all", {"fp8": "block"}), ("layer", {})])
def test_vllm_graphs(form, options, request):
    """vLLM's CUDAGraphWrapper replays a decode step with tokens and routing other than the captured ones."""
    if form == "layer":
        request.getfixturevalue("layers")
    for found in in_vllm("replayed_steps", 2, form, SHAPE, DECODE, options, device="cuda"):
        print(found)
        assert max(error for error, _ in found) <= (FP8_BAR if options.get("fp8") else BAR), found
        assert max(error for _, error in found) <= GRAPH_BAR, found


# ---- SGLang ----


@pytest.mark.parametrize("scenario", ["check_bf16", "check_fp8"])
def test_sglang_dispatcher(scenario):
    import sglang_passes
    from sglang_ranks import over_ranks

    over_ranks(2, getattr(sglang_passes, scenario), ranks=2, device="cuda")


@pytest.mark.parametrize("rows", ["bf16", "fp8"])
@pytest.mark.parametrize("scenario, options", [("check_order", (1,)), ("check_order", (2,)), ("check_graph", ())])
def test_sglang_decode(scenario, options, rows):
    """Order of the sums and weights of one batch, of two in flight together, and in a graph."""
    import sglang_decode
    from sglang_ranks import over_ranks

    over_ranks(2, getattr(sglang_decode, scenario), rows, *options, ranks=2, device="cuda")


@pytest.mark.parametrize("scenario", ["check_layer_bf16", "check_layer_fp8"])
def test_sglang_layer(scenario, layers):
    import sglang_passes
    from sglang_ranks import over_ranks

    over_ranks(2, getattr(sglang_passes, scenario), ranks=2, device="cuda")


# ---- Training frameworks: outputs and gradients ----


@pytest.mark.parametrize("routing, backend, given", [("any", "partial_dtensor", {}), ("skewed", "spmd_types", {}),
                                                     ("empty", "partial_dtensor", {}), ("any", "partial_dtensor", {"static_shapes": True})])
def test_torchtitan(routing, backend, given):
    from torchtitan_ranks import check_torchtitan

    over_groups("cuda", 2, check_torchtitan, backend, torch.bfloat16, routing == "skewed", 1 if routing == "empty" else None, given)


@pytest.mark.parametrize("routing", ["any", "skewed"])
def test_megatron(routing):
    from megatron_ranks import check_megatron

    over_groups("cuda", 2, check_megatron, 20, routing == "skewed")


@pytest.mark.parametrize("routing", ["any", "skewed", "empty"])
def test_automodel(routing):
    from automodel_ranks import check_automodel

    over_groups("cuda", 2, check_automodel, 20, routing == "skewed", 1 if routing == "empty" else None, {})
