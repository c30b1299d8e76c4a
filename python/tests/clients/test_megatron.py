# SPDX-License-Identifier: Apache-2.0
"""Megatron-core's unmodified MoE layer with its flex dispatcher (backend "deepep") on the drop-in: router, dispatcher, experts,
outputs and gradients. helpers/megatron_ranks.py lists what is replaced."""
import pytest

torch = pytest.importorskip("torch")

from deep_ep_ranks import over_groups  # noqa: E402
from megatron_ranks import HIDDEN, compare, fill, gradients_of, inputs_of, megatron  # noqa: E402

TOKENS = 20


def _tokens(rank, empty):
    return 0 if rank == empty else TOKENS - 6 * (rank % 2)


def _layer(group, skewed, empty):
    rank, world = group.rank(), group.size()
    inputs = [inputs_of(r, _tokens(r, empty), skewed) for r in range(world)]
    with megatron(group) as (_, make, fused_a2a):
        layer = fill(make(), rank, world)
        assert type(layer.token_dispatcher._comm_manager).__name__ == "_DeepepManager"
        assert fused_a2a.Buffer.__module__ == "switchyard.deep_ep._buffer"
        for _ in range(2):  # the second time with the buffer of the first
            layer.zero_grad()
            x = inputs[rank][0].clone().requires_grad_()
            out, bias = layer(x.view(-1, 2, HIDDEN))
            assert bias is None and out.dtype == x.dtype and fused_a2a._buffer is not None
            out.backward(inputs[rank][1].view(out.shape))
            compare(out.detach(), gradients_of(layer, x), rank, world, inputs)


@pytest.mark.parametrize("where", ["cpu", "copies"])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("routing", ["any", "skewed", "empty"])
def test_layer(routing, world, where):
    over_groups(where, world, _layer, routing == "skewed", 1 if routing == "empty" else None)


def _without_drop_in(group):
    """Megatron's own all-to-all dispatcher with the same layer: the comparison does not depend on the drop-in."""
    rank, world = group.rank(), group.size()
    inputs = [inputs_of(r, _tokens(r, None)) for r in range(world)]
    with megatron(group, moe_token_dispatcher_type="alltoall") as (_, make, fused_a2a):
        layer = fill(make(), rank, world)
        x = inputs[rank][0].clone().requires_grad_()
        out, _ = layer(x.view(-1, 2, HIDDEN))
        out.backward(inputs[rank][1].view(out.shape))
        compare(out.detach(), gradients_of(layer, x), rank, world, inputs)
        assert fused_a2a._buffer is None


def _dropped(group):
    """Tokens beyond an expert's capacity have id -1."""
    rank, world = group.rank(), group.size()
    x = inputs_of(rank, TOKENS, True)[0].requires_grad_()
    with megatron(group, moe_expert_capacity_factor=1.0) as (_, make, _):
        layer = fill(make(), rank, world)
        out, _ = layer(x.view(-1, 2, HIDDEN))
        out.float().sum().backward()
        ids = layer.token_dispatcher._comm_manager.token_indices
        left = (ids >= 0).any(1)
        assert 0 < left.sum() < TOKENS
        assert (out.view(-1, HIDDEN)[~left] == 0).all() and (out.view(-1, HIDDEN)[left] != 0).any(1).all()


@pytest.mark.parametrize("scenario", [_dropped], ids=lambda scenario: scenario.__name__[1:])
def test_other_layers(scenario):
    over_groups("cpu", 2, scenario)
