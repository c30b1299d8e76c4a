# SPDX-License-Identifier: Apache-2.0
"""A whole MoE layer of vLLM 0.33 on Switchyard: vLLM's own factory, router, runner, quantization method and modular kernel, against
float64. Stand-ins, with reasons: vllm_stand_ins.STAND_INS."""
import pytest

torch = pytest.importorskip("torch")

from vllm_host import in_vllm  # noqa: E402

SHAPE = (384, 128, 8, 3)


@pytest.mark.parametrize("world, tokens, shared", [(2, (17, 5), False), (2, (3, 24), True), (4, (9, 0, 24, 1), False)])
def test_layer(world, tokens, shared):
    for errors, name, _ in in_vllm("whole_layer", world, SHAPE, tokens, {"shared": shared}):
        assert name == "SwitchyardExperts" and max(errors) <= 1e-2, errors
