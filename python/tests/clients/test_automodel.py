# SPDX-License-Identifier: Apache-2.0
"""NeMo Automodel's unmodified MoE layer with its DeepEP dispatcher on the drop-in: router, dispatcher, experts, outputs and
gradients. No stand-ins."""
import pytest

torch = pytest.importorskip("torch")

from automodel_ranks import automodel, gradients_of  # noqa: E402
from deep_ep_ranks import over_groups  # noqa: E402
from megatron_ranks import compare, inputs_of  # noqa: E402
from switchyard import deep_ep  # noqa: E402

TOKENS = 20


def _layer(group, skewed, empty, backend):
    rank, world = group.rank(), group.size()
    inputs = [inputs_of(r, 0 if r == empty else TOKENS - 5 * (r % 2), skewed) for r in range(world)]
    with automodel(group, **backend) as (make, fused_a2a):
        layer = make()
        assert type(layer.experts).__name__ == "GroupedExpertsDeepEP" and issubclass(fused_a2a.Buffer, deep_ep.Buffer)
        for _ in range(2):  # the second time with the buffer of the first
            layer.zero_grad()
            x = inputs[rank][0].clone().requires_grad_()
            out = layer(x[None])
            assert out.dtype == x.dtype and fused_a2a._buffer is not None
            out.backward(inputs[rank][1][None])
            compare(out.detach(), gradients_of(layer, x), rank, world, inputs)


@pytest.mark.parametrize("routing, world, where", [("any", 2, "cpu"), ("skewed", 2, "copies"), ("empty", 2, "copies"), ("empty", 2, "cpu")])
def test_layer(routing, world, where):
    over_groups(where, world, _layer, routing == "skewed", 1 if routing == "empty" else None, {})


def test_asynchronous_dispatch():
    over_groups("copies", 2, _layer, False, None, {"dispatcher_async_dispatch": True})
