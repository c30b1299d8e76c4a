# SPDX-License-Identifier: Apache-2.0
"""Small transformers models with random weights, and passes through them with known routing."""
import torch
import transformers

EXPERTS, TOPK, WORDS = 6, 2, 50


def _common(scale):
    return {"vocab_size": WORDS, "hidden_size": 32 * scale, "intermediate_size": 48 * scale, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": TOPK, "max_position_embeddings": 32,
            "pad_token_id": 0}


def mixtral(scale=1, **other):
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(num_local_experts=EXPERTS, **_common(scale), **other))


def qwen3(scale=1):
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(
        num_experts=EXPERTS, moe_intermediate_size=24 * scale, head_dim=8 * scale, **_common(scale)))


def deepseek(scale=1):
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(
        n_routed_experts=EXPERTS, n_group=2, topk_group=2, moe_intermediate_size=24 * scale, first_k_dense_replace=1,
        q_lora_rank=16 * scale, kv_lora_rank=16 * scale, qk_rope_head_dim=8 * scale, qk_nope_head_dim=8 * scale, v_head_dim=8 * scale,
        n_shared_experts=1, **{**_common(scale), "num_key_value_heads": 4}))


MODELS = {make.__name__: make for make in (mixtral, qwen3, deepseek)}


def in_bf16(name, scale=1):
    """Equal at every call, with experts whose contribution is as large as that of the residual path."""
    torch.manual_seed(0)
    model = MODELS[name](scale).bfloat16().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 3:
                parameter.mul_(3 / scale ** 0.5)
    return model


def logits_of(model, ids, chosen=None):
    """Returns the logits and the output of each router. `chosen`: router outputs to use instead, because different rounding may
    change a close choice."""
    returned = []

    def hook(_module, _inputs, output):
        returned.append(output if chosen is None else chosen[len(returned)])
        return returned[-1]

    hooks = [module.register_forward_hook(hook) for name, module in model.named_modules() if name.endswith(".gate")]
    try:
        return model(input_ids=ids).logits.float(), returned
    finally:
        for each in hooks:
            each.remove()


def distance(model, whole, ids):
    """Returns the relative distance of logits in passes without gradients, with the routing of `whole`."""
    with torch.no_grad():
        want, chosen = logits_of(whole, ids)
        got, _ = logits_of(model, ids, chosen)
    assert chosen
    return ((got - want).norm() / want.norm()).item()


def change_experts(model, whole, names, mine, factor):
    """Changes the down projections of both models in place: in `model`, which has the experts `mine`, by load_state_dict."""
    for name in names:
        theirs, ours = whole.get_submodule(name), model.get_submodule(name)
        with torch.no_grad():
            theirs.down_proj.mul_(factor)
        address = ours.down_proj.data_ptr()
        ours.load_state_dict({key: value[mine.start:mine.stop] for key, value in theirs.state_dict().items()})
        assert ours.down_proj.data_ptr() == address


def move_experts(models, names, factor):
    """Changes the down projections and moves them to other memory."""
    for model in models:
        for name in names:
            module = model.get_submodule(name)
            module.down_proj.data = module.down_proj.data.clone().mul_(factor)


def check_products(group, model, whole, ids, names):
    """Checks a converted model against `whole`, with experts computed by the library in passes without gradients: unchanged,
    with weights changed in place, with moved weights, and after a pass with gradients, which uses the module."""
    mine, shares, errors = group.experts_of(EXPERTS), [model.get_submodule(each).forward.__self__ for each in names], []
    own = [share._experts for share in shares]
    for share in shares:
        share._experts = None  # a pass through the module would fail
    errors.append(distance(model, whole, ids))
    change_experts(model, whole, names, mine, 1.5)
    errors.append(distance(model, whole, ids))
    move_experts([model, whole], names, 0.5)
    errors.append(distance(model, whole, ids))
    for share, experts in zip(shares, own):
        share._experts = experts
    model(input_ids=ids).logits.square().mean().backward()
    grads = [model.get_submodule(each).down_proj.grad for each in names]
    assert not len(mine) or all(each is not None and each.abs().sum() > 0 for each in grads)
    errors.append(distance(model, whole, ids))
    assert max(errors) <= 1e-2, errors
