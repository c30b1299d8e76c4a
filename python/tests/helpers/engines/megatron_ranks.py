# SPDX-License-Identifier: Apache-2.0
"""MoE layers of Megatron-core on ranks of gloo, with the drop-in as deep_ep, and the same layer in float64.

    replaced                       reason
    torch.cuda.current_device      the router moves its weight to the current GPU; without one, the device is "cpu"
    megatron.core.jit.jit_fuser    Megatron's own switch disable_jit_fuser(): compiled functions are slow to start
"""
import contextlib
import gc

import pytest

import deep_ep_ranks
from clients import source_of

torch = pytest.importorskip("torch")


def fetched(name):
    """Appends the sources of a client to ``sys.path``, or skips the module that imports this one."""
    try:
        source_of(name)
    except pytest.skip.Exception as absent:
        pytest.skip(str(absent), allow_module_level=True)


fetched("megatron-core")

HIDDEN, INNER, EXPERTS, TOPK = 128, 96, 8, 3
DTYPE = torch.bfloat16


def swiglu_experts(x, scores, ids, first, second):
    """``sum over k of scores[t, k] * expert_(ids[t, k])(x[t])``. first: [E, 2 I, H], gate rows before up rows. second: [E, H, I]."""
    out = torch.zeros_like(x)
    for e in range(len(first)):
        tokens, places = torch.where(ids == e)
        gate, up = (x[tokens] @ first[e].T).chunk(2, dim=-1)
        out = out.index_add(0, tokens, ((torch.nn.functional.silu(gate) * up) @ second[e].T) * scores[tokens, places, None])
    return out


def gradients(out, grad, inputs):
    """Gradients of all `inputs`, zeros for those that `out` does not depend on."""
    found = torch.autograd.grad(out, inputs, grad, allow_unused=True)
    return [torch.zeros_like(of) if each is None else each for each, of in zip(found, inputs)]


def parameters(seed=0):
    """Router [E, H], first [E, 2 I, H] and second [E, H, I], the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (EXPERTS, HIDDEN), (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)
    return [(torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(DTYPE).to(deep_ep_ranks.memory()) for shape in shapes]


def inputs_of(rank, tokens, skewed=False):
    """Tokens [T, H] and the gradient of their output. `skewed`: all tokens are alike, so they have the same experts."""
    generator = torch.Generator().manual_seed(100 + rank)
    x, grad = (torch.randn(tokens, HIDDEN, generator=generator) for _ in range(2))
    if skewed:
        x = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(7)) + x / 8
    return x.to(DTYPE).to(deep_ep_ranks.memory()), grad.to(DTYPE).to(deep_ep_ranks.memory())


def in_double(x, grad, seed=0):
    """Output and gradients of the tokens and of all parameters, in float64. The router's softmax is over the selected experts."""
    inputs = [each.double().requires_grad_() for each in (x, *parameters(seed))]
    logits, ids = (inputs[0] @ inputs[1].T).topk(TOPK, dim=1)
    out = swiglu_experts(inputs[0], logits.softmax(1), ids, *inputs[2:])
    return out.detach(), gradients(out, grad.double(), inputs)


def off(made, want):
    """The relative distance, or the distance if nothing is wanted."""
    made, want = made.double().reshape(want.shape), want.double()
    return ((made - want).norm() / (want.norm() if want.norm() > 0 else 1)).item()


def compare(out, found, rank, world, inputs):
    """Compares an output with that in float64, and gradients of tokens, router, first and second, of which the experts' are
    summed over all ranks. `inputs`: for each rank, its tokens and the gradient of its output."""
    made = [in_double(*each) for each in inputs]
    here = slice(rank * EXPERTS // world, (rank + 1) * EXPERTS // world)
    want = made[rank][1][:2] + [sum(each[1][i] for each in made)[here] for i in (2, 3)]
    assert off(out, made[rank][0]) < 1e-2
    for name, each, of in zip(("tokens", "router", "first", "second"), found, want):
        assert off(each, of) < 2e-2, (name, off(each, of))


@contextlib.contextmanager
def megatron(group, **options):
    """Provides the configuration and a function that makes its MoE layer, in a program where `import deep_ep` finds the drop-in."""
    from switchyard import deep_ep
    own = torch.cuda.current_device
    if deep_ep_ranks.memory() == "cpu":
        torch.cuda.current_device = lambda: torch.device("cpu")
    deep_ep.install()
    try:
        from megatron.core import jit
        jit.disable_jit_fuser()
        from megatron.core import parallel_state
        from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
        from megatron.core.transformer.moe import fused_a2a
        from megatron.core.transformer.transformer_config import TransformerConfig

        fused_a2a.Buffer = deep_ep.Buffer  # that of this test, whichever test imported the module first
        parallel_state.initialize_model_parallel(expert_model_parallel_size=group.size())
        config = TransformerConfig(**{**dict(
            num_layers=1, hidden_size=HIDDEN, ffn_hidden_size=INNER, moe_ffn_hidden_size=INNER, num_attention_heads=4, num_moe_experts=EXPERTS,
            moe_router_topk=TOPK, moe_router_load_balancing_type="none", moe_router_dtype="fp32", moe_token_dispatcher_type="flex",
            moe_flex_dispatcher_backend="deepep", expert_model_parallel_size=group.size(), use_cpu_initialization=True,
            params_dtype=DTYPE, bf16=True, add_bias_linear=False, gated_linear_unit=True, activation_func=torch.nn.functional.silu,
            gradient_accumulation_fusion=False), **options})
        spec = get_moe_module_spec(use_te=False, num_experts=EXPERTS, moe_grouped_gemm=False)
        yield config, lambda: spec(config).to(deep_ep_ranks.memory()), fused_a2a
    finally:
        fused_a2a._buffer = None
        gc.collect()
        parallel_state.destroy_model_parallel()
        deep_ep.uninstall()
        torch.cuda.current_device = own


def fill(layer, rank, world, seed=0):
    """Sets the parameters of Megatron's layer and returns them as router, first [L, 2 I, H] and second [L, H, I]."""
    router, first, second = parameters(seed)
    experts = layer.experts.local_experts
    with torch.no_grad():
        layer.router.weight.copy_(router)
        for e, expert in enumerate(experts, rank * EXPERTS // world):
            expert.linear_fc1.weight.copy_(first[e])
            expert.linear_fc2.weight.copy_(second[e])
    return layer


def gradients_of(layer, x):
    experts = layer.experts.local_experts
    return [x.grad, layer.router.weight.grad, torch.stack([each.linear_fc1.weight.grad for each in experts]),
            torch.stack([each.linear_fc2.weight.grad for each in experts])]


def check_megatron(group, tokens, skewed=False):
    """Runs Megatron's layer twice and compares outputs and gradients with float64. tokens: of the even ranks."""
    from switchyard import deep_ep

    rank, world = group.rank(), group.size()
    inputs = [inputs_of(r, tokens - 6 * (r % 2), skewed) for r in range(world)]
    with megatron(group) as (_, make, fused_a2a):
        layer = fill(make(), rank, world)
        assert type(layer.token_dispatcher._comm_manager).__name__ == "_DeepepManager" and issubclass(fused_a2a.Buffer, deep_ep.Buffer)
        for _ in range(2):  # the second time with the buffer of the first
            layer.zero_grad()
            x = inputs[rank][0].clone().requires_grad_()
            out, bias = layer(x.view(-1, 2, HIDDEN))
            assert bias is None and out.dtype == x.dtype and fused_a2a._buffer is not None
            out.backward(inputs[rank][1].view(out.shape))
            compare(out.detach(), gradients_of(layer, x), rank, world, inputs)
