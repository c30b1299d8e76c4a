# SPDX-License-Identifier: Apache-2.0
"""vLLM's expert load balancing (EPLB) with Switchyard: vLLM's own state, policy, movement of weights, router and kernel, against
float64 with logical experts. Stand-ins, with reasons: vllm_stand_ins.STAND_INS and vllm_eplb."""
import pytest

torch = pytest.importorskip("torch")

from vllm_host import in_vllm  # noqa: E402

#: hidden, intermediate, experts, topk.
SHAPE = (384, 128, 8, 3)
TWO, FOUR = (17, 5), (9, 0, 24, 1)
FORMS = ["layer", "deepep_high_throughput", "deepep_low_latency"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens, redundant", [(TWO, 4), (FOUR, 8)])
def test_rearrangement(form, tokens, redundant):
    results = in_vllm("vllm_eplb:rearranged", len(tokens), form, SHAPE, tokens, redundant, {})
    _, maps, counts, policy = results[0]
    assert policy == "DefaultEplbPolicy" and all(result[1:] == results[0][1:] for result in results)
    assert all(sum(each) == sum(tokens) * SHAPE[3] for each in counts[0])  # vLLM counted each route once
    assert all(was != now and set(now) == set(range(SHAPE[2])) for was, now in zip(*maps))
    print([result[0] for result in results])
    assert max(max(result[0]) for result in results) <= 1e-2


@pytest.mark.parametrize("form", FORMS)
def test_weights_that_are_not_moved_are_seen(form):
    results = in_vllm("vllm_eplb:rearranged", 2, form, SHAPE, TWO, 4, {"planted": True})
    assert max(result[0][0] for result in results) <= 1e-2
    assert max(result[0][1] for result in results) > 0.1


def test_policy():
    """Switchyard's planner as vLLM's policy: a second rearrangement with equal counts moves nothing."""
    results = in_vllm("vllm_eplb:rearranged", 2, "layer", SHAPE, TWO, 4, {"policy": "switchyard", "again": True})
    _, maps, _, policy = results[0]
    assert policy == "SwitchyardPolicy" and all(result[1:] == results[0][1:] for result in results)
    assert maps[0] != maps[1] == maps[2]
    assert max(max(result[0]) for result in results) <= 1e-2


def test_refused():
    found = in_vllm("vllm_eplb:refused", 2)[0]
    assert "elastic expert parallelism (--enable-elastic-ep) is not supported" in found["elastic"]
    assert found["policy"].startswith("SWITCHYARD_VLLM_EPLB = 'ours': must be 'switchyard' or '0'")
    assert "EPLB policy was replaced by vllm_eplb: two plug-ins cannot replace the same place" in found["another policy"]
