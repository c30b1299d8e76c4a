# SPDX-License-Identifier: Apache-2.0
"""Divided models: detection of modules, experts per token, types of rows, weights with factors, moving weights, ranks whose
module calls are out of step, and torch.compile."""
import copy
import types

import pytest

import switchyard as sy
from switchyard._abi import ffi as _ffi

torch = pytest.importorskip("torch")

from processes import a_store  # noqa: E402
from team import run_on_team  # noqa: E402
from plain_moe import EXPERTS, HIDDEN, TOKENS, Experts, Model, StaticExperts, off, seeded, tokens_of  # noqa: E402


def needs_the_layer():
    try:
        _ffi.layer_library()
    except sy.LibraryNotFound as error:
        pytest.skip(str(error))


def routing(topk=2, tokens=TOKENS):
    return torch.arange(tokens * topk).reshape(tokens, topk) % EXPERTS, torch.full((tokens, topk), 0.5)


# ---- Detection of modules ----


class RouterNames(Experts):
    """Uses the argument names of GPT-OSS, in calls by position and by name."""

    def forward(self, hidden_states, router_indices, routing_weights):
        return Experts.forward(self, hidden_states, router_indices, routing_weights)


def test_other_names_of_arguments(ranks):
    def rank(group):
        whole, model = Model(RouterNames), Model(RouterNames)
        assert sy.parallelize_moe(model, group, max_tokens=TOKENS) == ["experts"]
        x, (ids, weights) = tokens_of(group.rank), routing()
        want = whole.experts(x, ids, weights)
        assert off(model.experts(x, ids, weights), want) < 1e-5
        assert off(model.experts(x, router_indices=ids, routing_weights=weights), want) < 1e-5

    ranks(rank, 2)


def reason_of(module):
    model = torch.nn.Sequential(module)
    model.config = types.SimpleNamespace(num_experts_per_tok=2)
    with pytest.raises(sy.InvalidArgument) as caught:
        sy.moe_heap_bytes(model, 2, max_tokens=8)
    return str(caught.value)


def test_reasons_of_what_cannot_be_divided():
    class SortedExperts(Experts):
        def forward(self, hidden_states):
            return hidden_states

    class FlatExperts(torch.nn.Module):
        num_experts = 4

        def forward(self, hidden_states, top_k_index, top_k_weights):
            return hidden_states

    class Uncounted(Experts):
        def __init__(self):
            super().__init__()
            del self.num_experts

    assert reason_of(torch.nn.Linear(4, 4)).startswith("Sequential has no experts in one module")
    assert "Nearest: 0: SortedExperts.forward(hidden_states) is not forward(hidden_states, top_k_index, top_k_weights)" in reason_of(SortedExperts())
    assert "FlatExperts has no parameter of three dimensions [experts, rows, columns]" in reason_of(FlatExperts())
    assert "Uncounted has no num_experts; its weights have [6] experts" in reason_of(Uncounted())


class Router(torch.nn.Module):
    def __init__(self, name, topk):
        super().__init__()
        setattr(self, name, topk)


def test_experts_of_a_token_are_each_modules_own(ranks):
    """From the adjacent router, the surrounding block, or the config; topk= sets it for all."""
    class Block(torch.nn.Module):
        def __init__(self, name, topk):
            super().__init__()
            with seeded():
                self.gate, self.experts = Router(name, topk), Experts()

    class Blocks(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.text, self.image, self.third = Block("top_k", 3), Block("num_experts_per_tok", 1), Block("unknown", 5)
            self.config = types.SimpleNamespace(top_k_experts=2)

    def rank(group):
        whole, model = Blocks(), Blocks()
        assert len(sy.parallelize_moe(model, group, max_tokens=TOKENS)) == 3
        for name, topk in (("text", 3), ("image", 1), ("third", 2)):
            ids, weights = routing(topk)
            x = tokens_of(group.rank)
            assert off(getattr(model, name).experts(x, ids, weights), getattr(whole, name).experts(x, ids, weights)) < 1e-5
        model = Blocks()
        del model.config
        with pytest.raises(sy.InvalidArgument, match="topk: neither the router beside Experts nor a config has any of top_k"):
            sy.parallelize_moe(model, group, max_tokens=TOKENS)

    ranks(rank, 2)


class QuantizedExperts(Experts):
    """One-byte weights with a scale for each expert, as in fp8 checkpoints; hidden states are bf16."""

    def __init__(self):
        super().__init__()
        for name in ("gate_up_proj", "down_proj"):
            weights = getattr(self, name).data
            scale = weights.abs().amax((1, 2), keepdim=True) / 448
            setattr(self, name, torch.nn.Parameter((weights / scale).to(torch.float8_e4m3fn), requires_grad=False))
            setattr(self, f"{name}_scale_inv", torch.nn.Parameter(scale, requires_grad=False))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        plain = Experts.__new__(Experts)
        torch.nn.Module.__init__(plain)
        plain.num_experts = self.num_experts
        for name in ("gate_up_proj", "down_proj"):
            setattr(plain, name, torch.nn.Parameter((getattr(self, name).float() * getattr(self, f"{name}_scale_inv")).to(hidden_states.dtype)))
        return Experts.forward(plain, hidden_states, top_k_index, top_k_weights)


def test_rows_have_the_type_of_hidden_states(ranks):
    """fp8 weights: rows have the model's type, and scales are divided in the same way as the weights."""
    def rank(group):
        whole, model = Model(QuantizedExperts), Model(QuantizedExperts)
        model.config.dtype = torch.bfloat16
        sy.parallelize_moe(model, group, max_tokens=TOKENS)
        assert model.experts.down_proj_scale_inv.shape[0] == len(group.experts_of(EXPERTS))
        x, (ids, weights) = tokens_of(group.rank).bfloat16(), routing()
        with torch.no_grad():
            assert off(model.experts(x, ids, weights).float(), whole.experts(x, ids, weights).float()) < 2e-2

    ranks(rank, 2)


# ---- Weights in use ----


class LowRank(torch.nn.Module):
    def __init__(self, like):
        super().__init__()
        with seeded():
            self.a = torch.nn.Parameter(torch.randn(like.shape[0], like.shape[1], 2, dtype=like.dtype) / 10)
            self.b = torch.nn.Parameter(torch.randn(like.shape[0], 2, like.shape[2], dtype=like.dtype) / 10)

    def forward(self, weights):
        return weights + self.a @ self.b


@pytest.mark.parametrize("way", ["module", "layer"])
def test_parametrized_weights(ranks, way):
    """Factors receive gradients. In passes without gradients every implementation of the experts applies the factors."""
    from torch.nn.utils import parametrize

    needs_the_layer()

    def rank(group):
        model = Model(dtype=torch.bfloat16).bfloat16()
        sy.parallelize_moe(model, group, max_tokens=TOKENS, experts=way)
        experts, x = model.experts, tokens_of(group.rank).bfloat16()
        ids, weights = routing()
        parametrize.register_parametrization(experts, "down_proj", LowRank(experts.down_proj))
        experts.requires_grad_(False)
        experts.parametrizations.down_proj[0].requires_grad_(True)
        out = experts(x, ids, weights)
        out.float().sum().backward()
        assert all(each.grad is not None and each.grad.abs().sum() > 0 for each in experts.parametrizations.down_proj[0].parameters())
        with torch.no_grad():
            assert off(experts(x, ids, weights).float(), out.detach().float()) < 2e-2

    ranks(rank, 2)


@pytest.mark.parametrize("way", ["module", "layer"])
def test_factors_of_peft(ranks, way):
    """target_parameters adds factors to the share, recomputes the weights in each pass, and wraps the module."""
    peft = pytest.importorskip("peft")
    needs_the_layer()

    def rank(group):
        model, x = Model(dtype=torch.bfloat16).bfloat16(), tokens_of(group.rank).bfloat16()
        sy.parallelize_moe(model, group, max_tokens=TOKENS, experts=way)
        config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["experts.down_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model, config)
        out = model(x)
        out.float().sum().backward()
        factors = {name: each for name, each in model.named_parameters() if "lora" in name}
        assert len(factors) == 2 and all(each.grad is not None for each in factors.values())
        with torch.no_grad():
            assert off(model(x).float(), out.detach().float()) < 2e-2
        sy.keep_out_of_ddp(model)
        assert set(factors) <= set(model._ddp_params_and_buffers_to_ignore)

    ranks(rank, 1)


def test_factors_before_the_division_are_refused(ranks):
    from torch.nn.utils import parametrize

    class Wrapper(torch.nn.Module):  # as in PEFT
        def __init__(self, base):
            super().__init__()
            self.base_layer, self.lora_A = base, torch.nn.ModuleDict()

    def rank(group):
        model = Model()
        parametrize.register_parametrization(model.experts, "down_proj", LowRank(model.experts.down_proj))
        with pytest.raises(sy.InvalidArgument, match="has parametrizations .down_proj.: divide the model first"):
            sy.parallelize_moe(model, group, max_tokens=TOKENS)
        model = Model()
        model.experts = Wrapper(model.experts)
        with pytest.raises(sy.InvalidArgument, match="experts.base_layer: LoRA factors of all experts.*divide the model first"):
            sy.parallelize_moe(model, group, max_tokens=TOKENS)

    ranks(rank, 1)


def test_a_storage_that_is_given_other_memory(ranks):
    """As in FSDP1 and offloading: the same storage at another address."""
    needs_the_layer()

    def rank(group):
        model, (ids, weights) = Model(dtype=torch.bfloat16).bfloat16(), routing()
        sy.parallelize_moe(model, group, max_tokens=TOKENS, experts="layer")
        x, held = tokens_of(group.rank).bfloat16(), []
        with torch.no_grad():
            first = model.experts(x, ids, weights)
            for parameter in (model.experts.gate_up_proj, model.experts.down_proj):
                kept, size = parameter.detach().clone(), parameter.untyped_storage().nbytes()
                parameter.untyped_storage().resize_(0)
                held.append(torch.full_like(kept, 3.0))  # occupies the memory in the meantime
                parameter.untyped_storage().resize_(size)
                parameter.copy_(kept)
            assert torch.equal(model.experts(x, ids, weights), first)

    ranks(rank, 1)


# ---- Ranks that are out of step ----


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        with seeded():
            self.text, self.vision = Experts(), Experts()
        self.config = types.SimpleNamespace(num_experts_per_tok=2)


@pytest.mark.parametrize("backward", [False, True])
def test_modules_that_are_out_of_step_are_named(backward):
    def rank(group):
        model, (ids, weights) = Two(), routing()
        sy.parallelize_moe(model, group, max_tokens=TOKENS)
        names = ("text", "vision") if group.rank == 0 else ("vision", "text")
        x = tokens_of(group.rank)
        if backward:  # the same calls in the forward pass, different calls in the backward pass
            outs = {name: getattr(model, name)(x, ids, weights) for name in ("text", "vision")}
            for name in names:
                outs[name].sum().backward()
        else:
            getattr(model, names[0])(x, ids, weights)

    with pytest.raises(sy.Mismatch) as caught:
        sy.run_ranks(rank, 2, heap_bytes=32 << 20, timeout=20)
    if not backward:
        text = str(caught.value)
        assert "dispatch in text" in text and "dispatch in vision" in text and "this rank was in" in text


# ---- torch.compile ----


def play_whole_graph(rank, world, store):
    """Compares a compiled, divided model with the undivided one, forward and backward."""
    whole, model = Model(StaticExperts), Model(StaticExperts)
    ids, weights = routing()
    ids = torch.zeros_like(ids) if world == 4 else ids
    with sy.Group.connect(rank, world, store, "token", heap_bytes=32 << 20, timeout=120) as group:
        sy.parallelize_moe(model, group, max_tokens=TOKENS)
        x = tokens_of(rank)
        compiled = torch.compile(model.experts, fullgraph=True, backend="aot_eager")
        out = compiled(x, ids, weights)
        assert off(out, whole.experts(x, ids, weights)) < 1e-5
        out.square().sum().backward()
        sum(whole.experts(tokens_of(r), ids, weights).square().sum() for r in range(world)).backward()
        mine = group.experts_of(EXPERTS)
        for name in ("gate_up_proj", "down_proj"):
            want = getattr(whole.experts, name).grad[mine.start:mine.stop]
            assert torch.allclose(getattr(model.experts, name).grad, want, rtol=1e-4, atol=1e-5)
        group.barrier()


def play_whole_graphs(rank, world, store):
    play_whole_graph(rank, world, store)
    if world == 2:
        play_whole_graph(0, 1, a_store())


@pytest.mark.parametrize("world", [2, 4])
def test_whole_graphs(world):
    """torch.compile(fullgraph=True) also works on one rank and on a rank without rows or experts. The ranks are spawned
    processes, because Dynamo does not support several threads and torch.autograd does not support forks of a process that has
    used it."""
    run_on_team("spawn", world, play_whole_graphs, a_store(), seconds=400)


def test_weights_keep_their_identity():
    model = Model()
    before = dict(model.named_parameters())

    def rank(group):
        sy.parallelize_moe(model, group, max_tokens=TOKENS)
        assert all(parameter is before[name] for name, parameter in model.named_parameters())
        assert copy.deepcopy(model).experts.down_proj is not model.experts.down_proj and HIDDEN == model.experts.down_proj.shape[1]

    sy.run_ranks(rank, 1)
