# SPDX-License-Identifier: Apache-2.0
"""Every experts module in the sources of the installed transformers: on two ranks `parallelize_moe` must either give correct
results (results within 1e-6, gradients within 1e-5, float32) or refuse the module with a reason. This also applies to modules
of later releases."""
import ast
import contextlib
import importlib
from pathlib import Path

import pytest

import switchyard as sy

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

EXPERTS, TOPK, TOKENS, HIDDEN, INNER = 6, 2, 10, 32, 16
#: Sizes in configs, by name.
SIZES = {"hidden_size": HIDDEN, "text_hidden_size": HIDDEN, "hidden_dim": HIDDEN, "d_model": HIDDEN, "ffn_hidden_size": INNER, "d_ff": INNER,
         "expert_ffn_hidden_size": INNER, "decoder_ffn_dim": INNER, "encoder_ffn_dim": INNER,
         "intermediate_size": INNER,
         "moe_intermediate_size": INNER, "expert_intermediate_size": INNER, "ffn_dim": INNER,  "vision_moe_intermediate_size": INNER, "moe_ffn_hidden_size": INNER, "expert_dim": INNER, "moe_hidden_size": HIDDEN, "zero_expert_num": 2,
         "num_experts": EXPERTS, "num_local_experts": EXPERTS, "n_routed_experts": EXPERTS, "moe_num_experts": EXPERTS,
         "num_routed_experts": EXPERTS, "num_experts_per_tok": TOPK}


def classes():
    """Returns (module, class) of everything in the sources that is named like an experts module or has weights of all
    experts."""
    found = []
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        text = path.read_text(encoding="utf-8")
        if "xperts" not in text:
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and node.name.endswith("Experts"):
                arguments = [each.arg for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "forward" for each in one.args.args]
                if node.name.endswith("SharedExperts") and "top_k_index" not in arguments:
                    continue  # applies to all tokens
                found.append((f"transformers.models.{path.parent.name}.{path.stem}", node.name))
    return found


def configs(module):
    """Yields small configs of a model, nested configs first."""
    for name, kind in vars(module).items():
        if name.endswith("Config") and isinstance(kind, type) and issubclass(kind, transformers.PreTrainedConfig) and kind.model_type:
            try:
                config = kind()
            except Exception:
                continue
            nested = [getattr(config, key) for key in getattr(config, "sub_configs", {})] + [getattr(config, "ffn_config", None)]
            for each in [one for one in nested if one is not None] + [config]:
                for size, value in SIZES.items():
                    before = vars(each).get(size, "absent")
                    if before is None or isinstance(before, (int, list)):
                        with contextlib.suppress(Exception):  # strict configs reject values of another type
                            setattr(each, size, [value] * len(before) if isinstance(before, list) else value)
                each._experts_implementation = "eager"
                yield each


def a_module(kind, module):
    """Returns an instance of the class with random weights, or None if no config of its model fits."""
    for config in configs(module):
        for arguments in ((config,), (config, INNER), (EXPERTS, HIDDEN, INNER)):
            try:
                made = kind(*arguments)
            except Exception:
                continue
            if not list(made.parameters()) or max(each.numel() for each in made.parameters()) > 1 << 20:
                continue
            generator = torch.Generator().manual_seed(0)
            for each in made.parameters():
                each.data = torch.randn(each.shape, generator=generator) / each.shape[-1] ** 0.5
            return made.float().eval()
    return None


class Block(torch.nn.Module):
    """Experts after a linear layer, with the router's topk alongside."""

    def __init__(self, experts):
        super().__init__()
        self.top_k, self.experts = TOPK, experts

    def forward(self, x):
        tokens = len(x)
        ids = (torch.arange(tokens * TOPK).reshape(tokens, TOPK) * 5 + torch.arange(tokens)[:, None]) % EXPERTS
        weights = torch.linspace(0.1, 0.9, tokens * TOPK).reshape(tokens, TOPK)
        return self.experts(x, ids, weights)


def inputs(rank):
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(rank)).requires_grad_()


def passes(block, x, upstream):
    out = block(x)
    (out * upstream).sum().backward()
    return out.detach()


def distance(a, b):
    return ((a - b).norm() / b.norm().clamp(min=1e-20)).item()


def check(name, make):
    """Compares two ranks with the undivided module."""
    upstream = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(9))
    whole, wants, xs = Block(make()), [], []
    for r in range(2):
        xs.append(inputs(r))
        wants.append(passes(whole, xs[r], upstream))
    blocks = [Block(make()) for _ in range(2)]

    def rank(group):
        block, x = blocks[group.rank], inputs(group.rank)
        assert sy.parallelize_moe(block, group, max_tokens=TOKENS) == ["experts"]
        out = passes(block, x, upstream)
        assert distance(out, wants[group.rank]) < 1e-6, f"{name}: results off by {distance(out, wants[group.rank]):.1e}"
        assert distance(x.grad, xs[group.rank].grad) < 1e-5, f"{name}: gradient of hidden states"
        group.barrier()
        return {key: parameter.grad for key, parameter in block.named_parameters()}, [each.shape[:1] for each in block.parameters()]

    (first, shapes), (second, _) = sy.run_ranks(rank, 2, heap_bytes=8 << 20, timeout=60)
    for (key, parameter), shape in zip(whole.named_parameters(), shapes):
        if parameter.grad is not None:  # outside the share, such as a norm: each rank has part of the gradient
            got = torch.cat([first[key], second[key]]) if shape != parameter.shape[:1] else first[key] + second[key]
            assert distance(got, parameter.grad) < 1e-5, f"{name}: gradient of {key} off by {distance(got, parameter.grad):.1e}"


def test_every_module_of_experts():
    right, refused, wrong = [], {}, []
    for module_name, class_name in classes():
        try:
            module = importlib.import_module(module_name)
        except ImportError:  # from a package that is not installed
            continue
        kind = getattr(module, class_name)
        made = a_module(kind, module)
        if made is None:
            wrong.append(f"{class_name}: no small instance of it could be made; teach SIZES its config")
            continue
        try:
            sy.moe_heap_bytes(Block(made), 2, max_tokens=TOKENS)
        except sy.InvalidArgument as error:
            refused[class_name] = str(error)
            continue
        try:
            check(class_name, lambda: a_module(kind, module))
            right.append(class_name)
        except Exception as error:
            wrong.append(f"{class_name}: {type(error).__name__}: {error}"[:400])
    assert not wrong, "\n".join(wrong)
    silent = {name: text for name, text in refused.items() if f"Nearest: experts: {name}" not in text}
    assert not silent and len(right) > 40, (silent, right)
    print(f"{len(right)} right, refused: {refused}")
