# SPDX-License-Identifier: Apache-2.0
"""Switchyard as the all-to-all backend of vLLM 0.33: vLLM's own parallel state, factory of prepare/finalize and modular kernel,
with plain torch experts, against float64. Stand-ins, with reasons: vllm_stand_ins.STAND_INS; vllm_ranks.use_plain_operators (three
operators of vLLM's GPU extension); vllm_ranks.manager_of (a branch of CudaCommunicator, which needs NCCL)."""
import pytest

torch = pytest.importorskip("torch")

from vllm_host import in_vllm  # noqa: E402

NORMAL, BATCHED = "deepep_high_throughput", "deepep_low_latency"
#: hidden, intermediate, experts, topk. DeepEP's kernels do not have this hidden size: vLLM would pad rows to 512 and to 2048.
SHAPE, UNEVEN, ONE = (384, 128, 8, 3), (384, 128, 10, 3), (384, 128, 8, 1)
TWO, FOUR = (17, 5), (9, 0, 24, 1)


@pytest.mark.parametrize("backend", [NORMAL, BATCHED])
@pytest.mark.parametrize("shape, tokens, options", [
    (SHAPE, TWO, {}),
    (SHAPE, FOUR, {"known": True}),
    (SHAPE, TWO, {"fp8": "block"}),
    (SHAPE, FOUR, {"fp8": "block", "known": True}),
    (SHAPE, FOUR, {"skew": True}),
    (UNEVEN, FOUR, {}),
    (ONE, TWO, {"on_input": True}),
])
def test_modular_kernel(backend, shape, tokens, options):
    results = in_vllm("kernel", len(tokens), backend, shape, tokens, options)
    print([error for error, _, _ in results])
    assert max(error for error, _, _ in results) <= 1e-2, results
    seen = [each for _, each, _ in results if each]
    assert {each[0] for each in seen} == {torch.float8_e4m3fn if options.get("fp8") else torch.bfloat16}
    assert sum(each[2] for each in seen) == sum(tokens) * shape[3]
    if options.get("known") and backend == NORMAL:
        assert {each[1] for each in seen} == {(sum(tokens), shape[0])}  # known without counts of this pass


def test_experts_write_rows_that_combine_reads():
    assert all(in_place for _, _, in_place in in_vllm("kernel", 2, NORMAL, SHAPE, TWO, {}))


@pytest.mark.parametrize("options", [{"routes": True}, {"fp8": "one_scale", "known": True}])
def test_forms_of_standard_experts(options):
    assert max(error for error, _, _ in in_vllm("kernel", 2, NORMAL, SHAPE, TWO, options)) <= 1e-2


def test_round_robin_placement():
    assert max(error for error, _, _ in in_vllm("kernel", 2, BATCHED, SHAPE, TWO, {"physical": True})) <= 1e-2
