# SPDX-License-Identifier: Apache-2.0
"""A whole MoE layer of vLLM 0.33 on Switchyard: vLLM's own factory, router, runner, quantization methods and modular kernel,
against float64. Stand-ins, with reasons: vllm_stand_ins.STAND_INS."""
import pytest

torch = pytest.importorskip("torch")

from vllm_host import in_vllm  # noqa: E402

#: hidden, intermediate, experts, topk.
SHAPE, UNEVEN, ONE = (384, 128, 8, 3), (200, 72, 10, 3), (384, 128, 8, 1)
TWO, FOUR = (17, 5), (9, 0, 24, 1)


@pytest.mark.parametrize("shape, tokens, options", [
    (SHAPE, TWO, {"moved": True}),
    (SHAPE, TWO, {"shared": True}),
    (SHAPE, FOUR, {}),
    (SHAPE, FOUR, {"skew": True}),
    (UNEVEN, FOUR, {}),
    (ONE, TWO, {"on_input": True}),
])
def test_layer(shape, tokens, options):
    results = in_vllm("whole_layer", len(tokens), shape, tokens, options)
    print([max(errors) for errors, *_ in results])
    for errors, experts, prepare, fast in results:
        assert (experts, prepare) == ("SwitchyardExperts", "SwitchyardPassThrough")
        assert fast == [True] * 4  # all calls except the first with weights at these addresses
        assert max(errors) <= 1e-2, errors


def test_layer_of_an_fp8_checkpoint():
    for rank, (weights, config, calls, out) in enumerate(in_vllm("fp8_layer", 2, (384, 256, 8, 3))):
        f8, f32 = torch.float8_e4m3fn, torch.float32
        assert weights == [(f8, (4, 512, 384)), (f8, (4, 384, 256)), (f32, (4, 4, 3)), (f32, (4, 3, 2))]
        assert (config["dtype"], config["storage"], config["hidden"], config["intermediate"]) == ("fp8_e4m3", "view", 384, 256)
        assert calls == [(torch.bfloat16, (6, 384), True, torch.bfloat16)] and out == [rank + 1]
