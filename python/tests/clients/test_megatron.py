# SPDX-License-Identifier: Apache-2.0
"""Megatron-core's unmodified MoE layer with its flex dispatcher (backend "deepep") on the drop-in: router, dispatcher, experts,
outputs and gradients. helpers/engines/megatron_ranks.py lists what is replaced."""
import pytest

torch = pytest.importorskip("torch")

from deep_ep_ranks import over_groups  # noqa: E402
from megatron_ranks import (EXPERTS, HIDDEN, TOPK, check_megatron, compare, fill, gradients_of, inputs_of, megatron, off,  # noqa: E402
                            parameters, swiglu_experts)

TOKENS = 20


@pytest.mark.parametrize("routing, world, where", [("any", 2, "cpu"), ("skewed", 2, "copies")])
def test_layer(routing, world, where):
    over_groups(where, world, check_megatron, TOKENS, routing == "skewed")


def _empty(group):
    """A rank without tokens, which Megatron's router does not accept: the steps of the layer after a router in plain torch."""
    rank, world = group.rank(), group.size()
    inputs = [inputs_of(r, TOKENS if r != 1 else 0) for r in range(world)]
    with megatron(group) as (_, make, _):
        layer, router = fill(make(), rank, world), parameters()[0].requires_grad_()
        x = inputs[rank][0].clone().requires_grad_()
        logits, ids = (x.float() @ router.float().T).topk(TOPK, dim=1)
        probs = torch.zeros(len(x), EXPERTS).scatter(1, ids, logits.softmax(1))
        steps = layer.token_dispatcher
        rows, scores = steps.token_dispatch(*steps.dispatch_preprocess(x.view(-1, 1, HIDDEN), probs > 0, probs))
        made, _ = layer.experts(*steps.dispatch_postprocess(rows, scores))
        out = steps.combine_postprocess(steps.token_combine(steps.combine_preprocess(made)))
        out.backward(inputs[rank][1].view(out.shape))
        layer.router.weight.grad = router.grad
        compare(out.detach(), gradients_of(layer, x), rank, world, inputs)


def _capacity(group):
    """Routes beyond an expert's capacity have id -1."""
    rank, world = group.rank(), group.size()
    x, grad = inputs_of(rank, TOKENS, True)
    x.requires_grad_()
    with megatron(group, moe_expert_capacity_factor=1.0) as (_, make, _):
        layer, given = fill(make(), rank, world), []
        manager = layer.token_dispatcher._comm_manager
        own = manager.setup_metadata

        def setup_metadata(*arguments):
            own(*arguments)
            given.extend((manager.token_probs.detach(), manager.token_indices))

        manager.setup_metadata = setup_metadata
        out, _ = layer(x.view(-1, 2, HIDDEN))
        out.backward(grad.view(out.shape))
    probs, ids = given
    assert 0 < (ids < 0).sum() < ids.numel()
    want = swiglu_experts(x.detach().double(), probs.double(), ids, *(each.double() for each in parameters()[1:]))
    assert off(out.detach(), want) < 1e-2 and x.grad.isfinite().all() and x.grad.norm() > 0


@pytest.mark.parametrize("scenario", [_empty, _capacity], ids=lambda scenario: scenario.__name__[1:])
def test_other_layers(scenario):
    over_groups("cpu", 2, scenario)
