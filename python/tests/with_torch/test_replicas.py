# SPDX-License-Identifier: Apache-2.0
"""Training with replicas of experts (parallelize_moe(..., replicas=...)), compared with the undivided model and with the divided
model without replicas."""
import copy
import types

import numpy as np
import pytest

import switchyard as sy

torch = pytest.importorskip("torch")

from plain_moe import EXPERTS, HIDDEN, TOPK, Experts, off, seeded  # noqa: E402
from replicated_training import MAPS, MAX_TOKENS, REPLICATED, check_training, family, home_map, map_of  # noqa: E402
from switchyard._models.replicas import Layout, sum_gradients  # noqa: E402

TOKENS = 48
class RowExperts(Experts):
    """Experts whose products round each row independently of the number of rows."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for e in range(self.num_experts):
            tokens, places = torch.where(top_k_index == e)
            gate, up = _Product.apply(hidden_states[tokens], self.gate_up_proj[e]).chunk(2, dim=-1)
            made = _Product.apply(torch.nn.functional.silu(gate) * up, self.down_proj[e])
            out = out.index_add(0, tokens, made * top_k_weights[tokens, places, None].to(made.dtype))
        return out


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return (x[:, None, :] * weight).sum(-1)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return (grad[:, :, None] * weight).sum(1), grad.T @ x


class Skewed(torch.nn.Module):
    """Half of the first choices are expert 0; the routing depends on the rank and the step."""

    def __init__(self, kind=Experts, **options):
        super().__init__()
        with seeded():
            self.first, self.experts = torch.nn.Linear(HIDDEN, HIDDEN), kind(**options)
        self.config = types.SimpleNamespace(num_experts_per_tok=TOPK)

    def forward(self, x, rank, step=0):
        rng = np.random.default_rng(10 * step + rank)
        ids = np.stack([rng.permutation(EXPERTS)[:TOPK] for _ in range(TOKENS)])
        swap = (rng.random(TOKENS) < 0.5) & (ids[:, 1] != 0)
        ids[swap, 0] = 0
        return self.experts(self.first(x), torch.from_numpy(ids)[:len(x)], torch.full((len(x), TOPK), 0.5))


def tokens_of(rank, step=0, count=TOKENS):
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model, rank, step=0, count=TOKENS):
    return (model(tokens_of(rank, step, count), rank, step) - 1).square().sum() / TOKENS


def divided(group, expert_map, kind=Experts, dtype=None, **options):
    model = Skewed(kind) if dtype is None else Skewed(kind).to(dtype)
    sy.parallelize_moe(model, group, max_tokens=TOKENS, replicas=expert_map, **options)
    return model


def count_and_set(model, group, expert_map):
    """Counts the routes of a pass; the counts then determine the division of routes among replicas."""
    with torch.no_grad():
        model(tokens_of(group.rank).to(model.first.weight.dtype), group.rank)
    sy.set_replicas(model, expert_map)


# ---- Sums of gradients ----


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("world", [2, 4])
def test_gradients_are_summed_in_order_of_rank(ranks, world, kind):
    """Values of very different sizes, so any other order or an intermediate rounding yields other bits."""
    rng = np.random.default_rng(1)
    parts = torch.from_numpy(rng.standard_normal((world, EXPERTS, 7, 5)) * 10.0 ** rng.integers(-3, 4, (world, EXPERTS, 7, 5))).to(kind)
    wide = torch.float64 if kind == torch.float64 else torch.float32

    def rank(group):
        layout = Layout(map_of(world), group.rank)
        mine, own = parts[group.rank], torch.zeros((len(layout.mine), 7, 5), dtype=kind)
        own[layout.owned] = mine[[layout.mine.start + each for each in layout.owned]]
        total, = sum_gradients(layout, group, [own], [own], [mine[layout.replicas]])
        for e, got in zip(layout.mine, total):
            want = [parts[r, e].to(wide) for r in range(world) if e in MAPS[world][r]]
            wanted = want[0].clone()
            for each in want[1:]:
                wanted += each
            assert torch.equal(got, wanted.to(kind)), e
            assert len(want) < 3 or not torch.equal(wanted.to(kind), sum(reversed(want)).to(kind)) or kind == torch.bfloat16

    ranks(rank, world)


@pytest.mark.parametrize("kind, within", [(torch.float32, 1e-6), (torch.bfloat16, 2 ** -8)], ids=str)
@pytest.mark.parametrize("world", [2, 4])
def test_bits_of_a_step(ranks, world, kind, within):
    """With products that round rows independently, outputs and the gradients of everything but replicated experts have the bits of
    the divided model without replicas, and two runs have the same bits. Gradients of replicated experts differ by rounding:
    in float32 by the order of the sum over rows; in bf16, each part is rounded as well."""
    def rank(group):
        runs, worst = [], []
        for expert_map in (None, map_of(world), map_of(world)):
            model = divided(group, expert_map, RowExperts, dtype=kind)
            if expert_map:
                count_and_set(model, group, expert_map)
            out = model(tokens_of(group.rank).to(kind), group.rank)
            (out - 1).float().square().sum().backward()
            runs.append((out.detach(), model.first.weight.grad, *(each.grad for each in model.experts.parameters())))
        assert all(map(torch.equal, runs[1], runs[2])) and all(map(torch.equal, runs[0][:2], runs[1][:2]))
        for e, expert in enumerate(group.experts_of(EXPERTS)):
            for want, got in zip(runs[0][2:], runs[1][2:]):
                assert expert in REPLICATED[world] or torch.equal(got[e], want[e]), expert
                worst.append(off(got[e].float(), want[e].float()))
        return worst

    worst = max(map(max, filter(None, ranks(rank, world))))
    assert 0 < worst <= within, worst  # not 0: several replicas compute rows


@pytest.mark.parametrize("world", [2, 4, 8])
def test_exact_gradients(ranks, world):
    """Integers, whose sums are exact in float32: the gradients are those of the undivided model, element for element."""
    class Whole(Experts):
        def forward(self, hidden_states, top_k_index, top_k_weights):
            out = torch.zeros_like(hidden_states)
            for e in range(self.num_experts):
                tokens, places = torch.where(top_k_index == e)
                made = hidden_states[tokens] @ self.gate_up_proj[e][:HIDDEN].T @ self.down_proj[e].T
                out = out.index_add(0, tokens, made * (2 * top_k_weights[tokens, places, None]))
            return out

    def made():
        model = Skewed(Whole)
        for each in model.parameters():
            each.data.mul_(6).round_()
        return model

    whole = made()
    sum((whole(tokens_of(r).round(), r) * (r + 1)).sum() for r in range(world)).backward()

    def rank(group):
        model = made()
        sy.parallelize_moe(model, group, max_tokens=TOKENS, replicas=map_of(world))
        count_and_set(model, group, map_of(world))
        (model(tokens_of(group.rank).round(), group.rank) * (group.rank + 1)).sum().backward()
        mine = group.experts_of(EXPERTS)
        for name in ("gate_up_proj", "down_proj"):
            want = getattr(whole.experts, name).grad[mine.start:mine.stop]
            assert torch.equal(getattr(model.experts, name).grad, want) and (world > 2 or want.abs().sum() > 0)

    ranks(rank, world)


# ---- Training ----


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", ["mixtral", "qwen3"])
def test_training_of_models(name, world):
    heap = sy.moe_heap_bytes(family(name), world, max_tokens=MAX_TOKENS, replicas=home_map(world))
    assert heap > sy.moe_heap_bytes(family(name), world, max_tokens=MAX_TOKENS)
    sy.run_ranks(check_training, world, name, heap_bytes=heap, timeout=60)


@pytest.mark.parametrize("host", ["a", "a,b"])
def test_without_rows_on_a_rank(ranks, host):
    """Rank 1 has no tokens; in the second step, no rank has."""
    def rank(group):
        model, whole = divided(group, map_of(2)), Skewed()
        for step, counts in enumerate([(TOKENS, 0), (0, 0), (5, TOKENS)]):
            loss_of(model, group.rank, step, counts[group.rank]).backward()
            sum(loss_of(whole, r, step, counts[r]) for r in range(2)).backward()
        mine = group.experts_of(EXPERTS)
        for name in ("gate_up_proj", "down_proj"):
            assert off(getattr(model.experts, name).grad, getattr(whole.experts, name).grad[mine.start:mine.stop]) < 1e-5

    ranks(rank, 2, host=host)


def test_bf16_mean_and_checkpointing(ranks):
    """bf16 parts are rounded once each and once after the sum. Passes repeated by checkpointing yield the same bits."""
    from torch.utils.checkpoint import checkpoint

    def rank(group):
        found = []
        for reentrant in (None, False, True):
            model = divided(group, map_of(2), dtype=torch.bfloat16, gradients="mean")
            x = tokens_of(group.rank).bfloat16().requires_grad_()
            out = model(x, group.rank) if reentrant is None else checkpoint(model, x, group.rank, use_reentrant=reentrant)
            (out.float() - 1).square().sum().backward()
            found.append(model.experts.down_proj.grad)
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
        whole = Skewed()
        sum((whole(tokens_of(r), r) - 1).square().sum() for r in range(2)).backward()
        mine = group.experts_of(EXPERTS)
        assert off(2 * found[0].float(), whole.experts.down_proj.grad[mine.start:mine.stop]) < 2e-2

    ranks(rank, 2)


class LowRank(torch.nn.Module):
    def __init__(self, like):
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.full((like.shape[0], *shape), 0.1)) for shape in ((like.shape[1], 2), (2, like.shape[2])))

    def forward(self, weights):
        return weights + self.a @ self.b


def test_factors_and_frozen_experts(ranks):
    """Only the factors are trained; those of a replicated expert receive the gradients of all replicas. Frozen experts have no
    gradients, and the gradients of everything else are the same."""
    from torch.nn.utils import parametrize

    def rank(group):
        found = []
        for expert_map in (None, map_of(2)):
            model = divided(group, expert_map)
            model.experts.requires_grad_(False)
            loss_of(model, group.rank).backward()
            assert model.experts.down_proj.grad is None
            parametrize.register_parametrization(model.experts, "down_proj", LowRank(model.experts.down_proj))
            model.experts.parametrizations.down_proj.original.requires_grad_(False)
            loss_of(model, group.rank).backward()
            factors = model.experts.parametrizations.down_proj[0]
            with torch.no_grad():
                factors.a.add_(0.1)
                out = model(tokens_of(group.rank), group.rank)
            found.append((model.first.weight.grad, factors.a.grad, factors.b.grad, out))
        for want, got in zip(*found):
            assert off(got, want) < 1e-5

    ranks(rank, 2)


# ---- Weights that change ----


def test_replicas_have_the_weights_of_their_owners(ranks):
    """Passes without gradients detect changes in place on one rank, moved memory, and changes through .data after a pass with
    gradients. A copy of the model has its own replicas. Unchanged weights are not copied again."""
    def rank(group):
        model, whole = divided(group, map_of(2)), Skewed()
        copied, x = copy.deepcopy(model), tokens_of(group.rank)
        mine, held = group.experts_of(EXPERTS), model.experts.forward.__self__._held

        def check(one=model):
            with torch.no_grad():
                assert off(one(x, group.rank), whole(x, group.rank)) < 1e-6
            return held.tensors

        first = check()
        assert check() is first
        with torch.no_grad():
            whole.experts.down_proj[0] *= 2
            if group.rank == 0:
                model.experts.down_proj[0] *= 2
        second = check()
        assert second is not first
        for each, theirs in zip(model.experts.parameters(), whole.experts.parameters()):
            each.data = each.data * 3
            theirs.data *= 3
        third = check()
        assert third is not second
        loss_of(model, group.rank).backward()
        for each, theirs in zip(model.experts.parameters(), whole.experts.parameters()):
            each.data.mul_(0.5)
            theirs.data *= 0.5
        check()
        model.load_state_dict({key: value * 2 for key, value in whole.state_dict().items()})
        whole.load_state_dict({key: value * 2 for key, value in whole.state_dict().items()})
        check()
        sy.set_replicas(model, map_of(2, [[4, 0, 1, 2, 5], [3, 4, 5, 1, 2]]))
        check()
        sy.set_replicas(model, map_of(2))
        fourth = check()
        whole.load_state_dict(Skewed().state_dict())
        assert check(copied) is fourth
        assert [each.shape[0] for each in held.tensors] == [2 - group.rank] * 2 and len(mine) == model.experts.num_experts == 3

    ranks(rank, 2)


def test_passes_that_overlap(ranks):
    """Two forward passes before their backward passes, and a step between a forward and its backward pass, which raises."""
    def rank(group):
        model, whole = divided(group, map_of(2)), Skewed()
        losses = [loss_of(model, group.rank, step) for step in range(2)]
        for each in losses:
            each.backward()
        sum(loss_of(whole, r, step) for r in range(2) for step in range(2)).backward()
        mine = group.experts_of(EXPERTS)
        assert off(model.experts.down_proj.grad, whole.experts.down_proj.grad[mine.start:mine.stop]) < 1e-5
        loss = loss_of(model, group.rank)
        torch.optim.SGD(model.experts.parameters(), lr=1.0).step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    ranks(rank, 2)


def test_compiled_model(ranks):
    """A graph ends before the experts with replicas and continues after them."""
    def rank(group):
        home = sy.ExpertMap.home(num_experts=EXPERTS, world=1, slots_per_rank=8)
        model = divided(group, home)
        compiled = torch.compile(model.experts, backend="eager")
        x, ids, weights = tokens_of(0), torch.arange(2 * TOKENS).reshape(TOKENS, 2) % EXPERTS, torch.full((TOKENS, 2), 0.5)
        out = compiled(x, ids, weights)
        out.sum().backward()
        assert off(out, Skewed().experts(x, ids, weights)) < 1e-6 and model.experts.down_proj.grad.abs().sum() > 0

    ranks(rank, 1)


# ---- Refusals ----


def test_maps_that_do_not_fit(ranks):
    def rank(group):
        def refuse(text, replicas, error=sy.InvalidArgument, **options):
            model = Skewed()
            with pytest.raises(error, match=text):
                divide(model, replicas, **options)
            assert model.experts.down_proj.shape[0] == EXPERTS and "forward" not in vars(model.experts)

        def divide(model, replicas, **options):
            sy.parallelize_moe(model, group, max_tokens=TOKENS, replicas=replicas, **options)

        good, r = map_of(2), group.rank
        refuse(r"replicas contains .* \(list\): must be an ExpertMap, a dict", [good], sy.InvalidType)
        refuse(r"replicas contains 3 \(int\): must be an ExpertMap, a dict", {"experts": 3}, sy.InvalidType)
        refuse("replicas: 'layer' is not an experts module; allowed: experts", {"layer": good})
        refuse("replicas: the map of experts has 4 experts; the module has 6", sy.ExpertMap.home(num_experts=4, world=2, slots_per_rank=3))
        refuse("replicas: the map of experts is for 4 ranks; the group has 2", map_of(4))
        refuse("experts is 'layer', but Experts has weights of torch.float32", good, experts="layer")
        refuse("experts is 'grouped' in a group on the CPU; allowed there: automatic, module, layer", good, experts="grouped")
        refuse("experts is 'grouped' in a group on the CPU", good, sy.SwitchyardError, experts="module" if r else "grouped")  # on one rank
        refuse("replicas differ between rank 0 and rank 1", good if r else map_of(2, [[0, 1, 2, 3, 4], [3, 4, 5, 0, 1]]), sy.Mismatch)
        refuse("replicas differ between rank 0 and rank 1", good if r else None, sy.Mismatch)
        refuse("the map of experts is for 4 ranks", map_of(4) if r else good)  # on one rank only
        model = Skewed()
        model.experts.forward = types.MethodType(Experts.forward, model.experts)
        with pytest.raises(sy.InvalidArgument, match="replicas: the forward of experts is replaced on the module"):
            divide(model, good)
        with pytest.raises(sy.InvalidArgument, match="expert 5 has no slot|5"):
            map_of(2, [[0, 1, 2], [3, 4, 4]])
        with pytest.raises(sy.InvalidArgument, match="replicas: the map of experts has 4 experts"):
            sy.moe_heap_bytes(Skewed(), 2, max_tokens=4, replicas=sy.ExpertMap.home(num_experts=4, world=2, slots_per_rank=3))

    ranks(rank, 2)


def test_refusals_of_a_new_map(ranks):
    """The previous map stays in force, and training continues."""
    def rank(group):
        model, good, r = divided(group, map_of(2)), map_of(2), group.rank
        home = sy.ExpertMap.home(num_experts=EXPERTS, world=2, slots_per_rank=5)
        with pytest.raises(sy.InvalidArgument, match="replicas: the map of experts has 4 slots per rank; the map in force has 5"):
            sy.set_replicas(model, sy.ExpertMap.home(num_experts=EXPERTS, world=2, slots_per_rank=4) if r else home)
        with pytest.raises(sy.Mismatch, match="set_replicas: replicas differ between rank 0 and rank 1"):
            sy.set_replicas(model, home if r else good)
        with pytest.raises(sy.Mismatch, match="set_replicas: replicas differ between rank 0 and rank 1"):
            sy.set_replicas(model, {} if r else None)
        with pytest.raises(sy.InvalidType, match=r"replicas contains 5 \(int\): must be an ExpertMap"):
            sy.set_replicas(model, 5)
        with pytest.raises(sy.SwitchyardError, match=r"replicas contains 5 \(int\): must be an ExpertMap"):
            sy.set_replicas(model, 5 if r else None)  # on one rank only
        assert sy.set_replicas(model, {}) == {"experts": good}
        with pytest.raises(sy.InvalidArgument, match="model has no replicas"):
            sy.set_replicas(Skewed())
        loss_of(model, r).backward()
        assert sy.set_replicas(model, home) == {"experts": home}
        loss_of(model, r).backward()

    ranks(rank, 2)


def test_a_model_and_its_copy_have_one_map(ranks):
    """The routes counted by both determine the division of routes."""
    def rank(group):
        model = divided(group, map_of(2))
        loss_of(model, group.rank)
        replicas = model.experts.forward.__self__.replicas
        counted = []
        replicas.set_map = lambda expert_map, routes, original=replicas.set_map: (counted.append(int(routes.sum())), original(expert_map, routes))
        sy.set_replicas(torch.nn.ModuleList([model, copy.deepcopy(model)]))
        assert len(counted) == 1 and counted[0] > 0 and replicas.version == 2
        loss_of(model, group.rank).backward()

    ranks(rank, 2)


def test_gradients_on_one_rank_only(ranks):
    def rank(group):
        model = divided(group, map_of(2))
        model.experts.down_proj.requires_grad_(group.rank == 0)
        with pytest.raises(sy.Mismatch, match="experts: either all ranks or none must record gradients of down_proj"):
            loss_of(model, group.rank)

    ranks(rank, 2)
