# SPDX-License-Identifier: Apache-2.0
"""Models of transformers, from random configurations, against the same models unconverted."""
import copy

import pytest

import switchyard as sy

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

EXPERTS, LENGTH, BATCH = 6, 5, 2
COMMON = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 32, "pad_token_id": 0}


def mixtral():
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(num_local_experts=EXPERTS, **COMMON))


def qwen3():
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(num_experts=EXPERTS, moe_intermediate_size=24, head_dim=8,
                                                                        **COMMON))


def deepseek():
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(
        n_routed_experts=EXPERTS, n_group=2, topk_group=2, moe_intermediate_size=24, first_k_dense_replace=1, q_lora_rank=16,
        kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, n_shared_experts=1,
        **{**COMMON, "num_key_value_heads": 4}))


def tokens_of(rank):
    """Different texts, and on the last rank a shorter one."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 50, (BATCH, LENGTH if rank != 1 else 3), generator=generator)


def loss_of(model, ids):
    return model(input_ids=ids).logits.square().mean()


@pytest.mark.parametrize("world", [1, 2, 4, 8])  # of 8 ranks two have no experts
@pytest.mark.parametrize("make, layers", [(mixtral, 2), (qwen3, 2), (deepseek, 1)], ids=lambda value: getattr(value, "__name__", ""))
def test_logits_and_gradients(make, layers, world):
    """Of every rank's tokens; experts' gradients are those of all ranks' tokens together."""
    torch.manual_seed(0)
    whole = make().float().eval()
    heap = sy.moe_heap_bytes(whole, world, max_tokens=BATCH * LENGTH)
    models = [copy.deepcopy(whole) for _ in range(world)]

    def rank(group):
        model = models[group.rank]
        names = sy.parallelize_moe(model, group, max_tokens=BATCH * LENGTH)
        assert len(names) == layers
        mine = group.experts_of(EXPERTS)
        assert all(module.down_proj.shape[0] == len(mine) for name, module in model.named_modules() if name in names)
        with torch.no_grad():
            logits = model(input_ids=tokens_of(group.rank)).logits
        loss_of(model, tokens_of(group.rank)).backward()
        return names, mine, logits, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    results = sy.run_ranks(rank, world, heap_bytes=heap, timeout=60)
    totals = {}
    for r, (names, mine, logits, grads) in enumerate(results):
        with torch.no_grad():
            want = whole(input_ids=tokens_of(r)).logits
        assert (logits - want).norm() / want.norm() < 1e-5
        whole.zero_grad()
        loss_of(whole, tokens_of(r)).backward()
        for name, parameter in whole.named_parameters():
            if name.rpartition(".")[0] in names:
                totals[name] = totals.get(name, 0) + (0 if parameter.grad is None else parameter.grad)
            elif parameter.grad is not None:
                torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-3, atol=1e-6)
    for _, mine, _, grads in results:
        for name, total in totals.items():
            if len(mine):
                torch.testing.assert_close(grads[name], total[mine.start:mine.stop], rtol=1e-3, atol=1e-6)


def test_bf16():
    torch.manual_seed(0)
    whole = mixtral().bfloat16().eval()
    models = [copy.deepcopy(whole) for _ in range(2)]

    def rank(group):
        sy.parallelize_moe(models[group.rank], group, max_tokens=BATCH * LENGTH)
        with torch.no_grad():
            return models[group.rank](input_ids=tokens_of(group.rank)).logits

    for r, logits in enumerate(sy.run_ranks(rank, 2, timeout=60)):
        with torch.no_grad():
            want = whole(input_ids=tokens_of(r)).logits.float()
        assert (logits.float() - want).norm() / want.norm() < 1e-2


def test_what_has_no_experts():
    class Config:
        num_experts_per_tok = 2

    model = torch.nn.Linear(4, 4)

    def rank(group):
        with pytest.raises(sy.InvalidArgument, match="no num_experts_per_tok"):
            sy.parallelize_moe(model, group, max_tokens=4)
        model.config = Config()
        with pytest.raises(sy.InvalidArgument, match="Linear has no experts"):
            sy.parallelize_moe(model, group, max_tokens=4)

    sy.run_ranks(rank, 1)
