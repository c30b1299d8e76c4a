# SPDX-License-Identifier: Apache-2.0
"""Decode with the plug-in for SGLang: order of the sums, weights sent with the tokens, repeated calls, and alternating outputs."""
import pytest

torch = pytest.importorskip("torch")

import switchyard as sy  # noqa: E402
from sglang_decode import HIDDEN, PER_RANK, TOKENS, batch_of, check_order, decoder, ones  # noqa: E402
from sglang_ranks import EXPERTS, TOPK, over_ranks, prefill, tokens_of, topk_output  # noqa: E402


@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("rows", ["bf16", "fp8"])
@pytest.mark.parametrize("world", [2, 4])
def test_order_of_the_sums(world, rows, halves):
    over_ranks(world, check_order, rows, halves)


def _only_one(rank, world, split):
    """If only one rank passes other weights to combine, all ranks get an error instead of waiting for each other."""
    made, (x, ids, weights) = decoder(world), batch_of(4)
    with prefill(False), pytest.raises(sy.Mismatch, match="different calls: order = 'per_r.*rank .* and 'per_r"):
        given = ones(made.dispatch(hidden_states=x, topk_output=topk_output(ids, weights)), weights.clone() if rank == 1 else None)
        if split:
            made.combine_a(combine_input=given)
            made.combine_b()
        else:
            made.combine(combine_input=given)


@pytest.mark.parametrize("split", [False, True])
def test_other_weights_on_one_rank(split):
    over_ranks(2, _only_one, split)


# ---- Values ----


def _sums(y, ids, weights, world):
    """Returns the sums in the order per_rank, and the exact sums with the largest documented error of each, in float64.
    y: bf16 [T, K, H]."""
    here, (tokens, topk, hidden) = EXPERTS // world, y.shape
    total, parts, exact = torch.zeros(tokens, hidden), torch.zeros(tokens, hidden).double(), torch.zeros(tokens, hidden).double()
    size = exact.clone()
    for rank in range(world):
        part, exact_part = torch.zeros(tokens, hidden), torch.zeros(tokens, hidden).double()
        for k in range(topk):
            mine = (ids[:, k] // here == rank)[:, None] & (ids[:, k] >= 0)[:, None]
            product = weights[:, k, None] * y[:, k].float()
            part = torch.where(mine, part + product, part)
            precise = torch.where(mine, weights[:, k, None].double() * y[:, k].double(), 0)
            exact_part, size = exact_part + precise, size + precise.abs()
        total = total + part.bfloat16().float()
        exact, parts = exact + exact_part, parts + exact_part.abs()
    u, steps = 2.0 ** -8, topk + world
    return total.bfloat16(), exact, (u * exact.abs() + (1 + u) * u * parts + (1 + u) * steps * 2.0 ** -23 * size
                                     + (steps + 1) * 2.0 ** -133)


def _values(rank, world):
    """New weights, ids and rows in each call; all calls after the first take the short path. Weights of the id -1 are NaN."""
    made, factors = decoder(world), torch.linspace(-2, 3, EXPERTS)
    here = factors[rank * EXPERTS // world:(rank + 1) * EXPERTS // world, None, None]
    full = []
    for step in range(5):
        x, ids, weights = tokens_of(world, HIDDEN, seed=step)[rank]
        ids[:1] = -1
        weights[ids < 0] = float("nan")
        with prefill(False):
            output = made.dispatch(hidden_states=x, topk_output=topk_output(ids, weights))
            rows = (output.hidden_states.float() * here).bfloat16()
            out = made.combine(combine_input=ones(output)._replace(hidden_states=rows))
        y = (x.float()[:, None] * factors[ids.clamp(min=0)][..., None]).bfloat16()
        want, exact, bound = _sums(y, ids, weights, world)
        assert torch.equal(out, want) and ((out.double() - exact).abs() <= bound).all()
        assert not out[:1].any() and not out[:1].signbit().any()
        if step == 0:
            exchange = made._inners[0]._calls().exchange
            for name in ("_dispatch", "_combine"):
                whole = getattr(exchange, name)
                setattr(exchange, name, lambda *arguments, name=name, whole=whole: full.append(name) or whole(*arguments))
    assert not full, full


@pytest.mark.parametrize("world", [2, 4])
def test_values_and_repeated_calls(world):
    over_ranks(world, _values)


# ---- Outputs and calls in flight ----


def _alternating(rank, world):
    """An output, including its weights, is valid until the second dispatch after its own, also of other layers."""
    layers, (x, ids, weights) = [decoder(world) for _ in range(2)], batch_of(TOKENS[rank])
    with prefill(False):
        outputs = []
        for step, made in enumerate([layers[0], layers[1], layers[0]]):
            given = topk_output(ids, weights * 2 ** step)
            outputs.append(made.dispatch(hidden_states=x * (step + 1), topk_output=given))
            if step == 1:
                for number, output in enumerate(outputs):
                    for expert, count in enumerate(output.masked_m.tolist()):
                        assert (output.hidden_states[expert, :count] == number + 1).all()
                outs = [each.combine(combine_input=ones(output)) for each, output in zip(layers, outputs)]
                assert [out.unique().tolist() for out in outs] == ([[PER_RANK], [2 * PER_RANK]] if len(x) else [[], []])
    places = [each.hidden_states.data_ptr() for each in outputs]
    assert places[0] == places[2] != places[1]


def _left(rank, world):
    """A pass ends between the halves of a call, on all ranks. The next call of any layer completes the first; its second half has
    no effect later."""
    layers = [decoder(world) for _ in range(2)]
    x, ids, weights = batch_of(TOKENS[rank])

    def passed(made):
        output = made.dispatch(hidden_states=x, topk_output=topk_output(ids, weights))
        out = made.combine(combine_input=ones(output))
        assert torch.equal(out, torch.full((len(x), HIDDEN), PER_RANK, dtype=torch.bfloat16))

    with prefill(False):
        passed(layers[0])
        layers[0].dispatch_a(hidden_states=x, topk_output=topk_output(ids, weights))
        passed(layers[1])
        layers[1].dispatch_a(hidden_states=x, topk_output=topk_output(ids, weights))
        layers[0].dispatch_b()
        output = layers[1].dispatch_b()
        layers[1].combine_a(combine_input=ones(output))
        passed(layers[0])
        assert torch.equal(layers[1].combine_b(), torch.full((len(x), HIDDEN), PER_RANK, dtype=torch.bfloat16))
        passed(layers[1])


@pytest.mark.parametrize("scenario", [_alternating, _left], ids=lambda each: each.__name__[1:])
def test_calls(scenario):
    over_ranks(2, scenario)


def _refused(rank, world, tokens, topk, message):
    """Rank 1 passes wrong arguments. Rank 0 gets an error instead of waiting."""
    made = decoder(world)
    x, ids, weights = batch_of(tokens if rank == 1 else 4)
    if rank == 1:
        ids, weights = (torch.cat([each, each[:, :topk - TOPK]], 1) for each in (ids, weights))
    error, text = (sy.InvalidArgument, message) if rank == 1 else (sy.PeerFailed, "rank 1 reported the error invalid_argument")
    with prefill(False), pytest.raises(error, match=text):
        made.dispatch(hidden_states=x, topk_output=topk_output(ids, weights))
    with pytest.raises(sy.InvalidArgument, match="combine without dispatch"):
        made.combine(combine_input=(None, None, None))


@pytest.mark.parametrize("tokens, topk, message", [
    (129, TOPK, "hidden_states has 129 tokens: SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK = 128 allows no more"),
    (4, TOPK + 1, r"topk_ids has the shape \[4, 4\]: must be \[4, 3\]"),
])
def test_refused_calls(tokens, topk, message):
    over_ranks(2, _refused, tokens, topk, message)


def _after_a_failing_dispatch(rank, world, split):
    """Neither half of the dispatch before it can be used instead."""
    made, (x, ids, weights) = decoder(world), batch_of(4)
    with prefill(False):
        if split:
            made.dispatch_a(hidden_states=x, topk_output=topk_output(ids, weights))
        else:
            output = made.dispatch(hidden_states=x, topk_output=topk_output(ids, weights))
        with pytest.raises((sy.InvalidArgument, sy.PeerFailed), match="shape|rank [01] reported the error"):
            made.dispatch_a(hidden_states=x[:, 8:], topk_output=topk_output(ids, weights))
        with pytest.raises(sy.InvalidArgument, match="dispatch_b without dispatch_a" if split else "combine without dispatch"):
            made.dispatch_b() if split else made.combine(combine_input=ones(output))


@pytest.mark.parametrize("split", [False, True])
def test_failing_dispatch(split):
    over_ranks(2, _after_a_failing_dispatch, split)
