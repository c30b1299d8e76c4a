# SPDX-License-Identifier: Apache-2.0
"""Finds the experts modules of a model and the number of experts per token, and selects the experts' implementation."""
from __future__ import annotations

import copy
import inspect
from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple, Optional, Tuple

from .._abi.ffi import layer_library
from ..errors import InvalidArgument, LibraryNotFound

if TYPE_CHECKING:
    import torch

#: Names of the second and third arguments of an experts module's forward; the first is hidden_states.
_ARGUMENTS = (("top_k_index", "top_k_weights"), ("router_indices", "routing_weights"))
WAYS = ("automatic", "module", "grouped", "layer")
#: Attributes of routers and configs that contain the number of experts per token.
_TOPK = ("top_k", "topk", "num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k")


class Found(NamedTuple):
    """An experts module: its name in the model, the module, and the number of experts per token."""

    name: str
    module: Any
    topk: int


def _lacks(module: Any) -> Optional[str]:
    """Returns the reason why this module is not an experts module, or None if it is one. Returns "" if it does not resemble an
    experts module."""
    kind, parameters = type(module).__name__, dict(module.named_parameters(recurse=False))
    parametrized = getattr(module, "parametrizations", {})
    three = [name for name, each in parameters.items() if each.dim() == 3]
    if not three and not parametrized and "xperts" not in kind:
        return ""
    arguments = [each for each in inspect.signature(inspect.unwrap(type(module).forward)).parameters if each != "self"]
    called = f"{kind}.forward({', '.join(arguments)})"
    if not arguments[:1] == ["hidden_states"] or tuple(arguments[1:3]) not in _ARGUMENTS:
        return f"{called} is not forward(hidden_states, top_k_index, top_k_weights), which tells each token's experts" \
            if three or "xperts" in kind else ""
    if not hasattr(module, "num_experts"):
        return f"{kind} has no num_experts" + (f"; its weights have {sorted({parameters[each].shape[0] for each in three})} experts"
                                               if three else "")
    if parametrized:
        return f"{kind} has parametrizations ({', '.join(parametrized)}): divide the model first, then add them"
    if not three:
        return f"{kind} has no parameter of three dimensions [experts, rows, columns]"
    return None


def experts_modules(model: Any, topk: Optional[int]) -> List[Found]:
    """Returns all experts modules, none of which may already be divided. If there is none, raises InvalidArgument listing the
    closest candidates."""
    if type(model).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):
        raise InvalidArgument(f"model is a {type(model).__name__}: divide the model first, then wrap it")
    modules, found, near = dict(model.named_modules()), [], {}
    for name, module in modules.items():
        if share_of(module) is not None:
            raise InvalidArgument(f"model: the experts of {name or type(model).__name__} are divided already; parallelize_moe is called once, "
                                  "on a model with all of its experts")
        lacks = _lacks(module)
        if lacks is not None:
            if lacks:
                near[name] = lacks
            continue
        parent = modules.get(name.rpartition(".")[0]) if name else None
        if parent is not None and hasattr(parent, "base_layer") and hasattr(parent, "lora_A"):
            near[name] = "LoRA factors of all experts are on it already: divide the model first, then add LoRA"
            continue
        found.append(Found(name, module, _topk_of(model, parent, module, topk)))
    refused = [f"{name}: {why}" for name, why in near.items() if "divide the model first" in why]
    if refused:
        raise InvalidArgument("; ".join(refused))
    if not found:
        nearest = "; ".join(f"{name}: {why}" for name, why in list(near.items())[:3])
        raise InvalidArgument(f"{type(model).__name__} has no experts in one module with weights of three dimensions, num_experts and "
                              f"forward(hidden_states, top_k_index, top_k_weights){'. Nearest: ' + nearest if nearest else ''}")
    return found


def share_of(module: Any) -> Any:
    """Returns the share called by a divided experts module, or None."""
    return getattr(vars(module).get("forward"), "__self__", None) if hasattr(vars(module).get("forward"), "_is_a_share") else None


def _number(holder: Any) -> Optional[int]:
    for name in _TOPK:
        value = getattr(holder, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _topk_of(model: Any, parent: Any, module: Any, topk: Optional[int]) -> int:
    """Returns `topk` if given. Otherwise returns the first value found in the router next to the module, the block containing
    both, the module, its config, or the model's config."""
    if topk is not None:
        return topk
    config = getattr(model, "config", None)
    beside = [each for each in parent.children() if each is not module] if parent is not None else []
    for holder in (*beside, parent, module, getattr(module, "config", None), getattr(config, "text_config", None), config):
        number = _number(holder)
        if number is not None:
            return number
    raise InvalidArgument(f"topk: neither the router beside {type(module).__name__} nor a config has any of {', '.join(_TOPK)}; say how many "
                          "experts a token has")


def _row_type(model: Any, weights: "torch.Tensor") -> "torch.dtype":
    """Returns the widest row type to exchange: that of the weights, or, if these are quantized, that of the model's hidden
    states."""
    import torch

    rows = (torch.bfloat16, torch.float16, torch.float32)
    if weights.dtype in rows:
        return weights.dtype
    config = getattr(getattr(model, "config", None), "dtype", None)
    others = [each.dtype for each in model.parameters() if each.dtype in rows and each.dim() < 3]
    return config if config in rows else others[0] if others else torch.bfloat16


def exchange_config(model: Any, found: Found, max_tokens: int, backend: str, hosts: int, slots: Optional[int] = None) -> Dict[str, Any]:
    """Returns the :class:`Exchange` keywords for a module. slots: number of slots of its map, which are the experts of the
    exchange; None: the module has no replicas."""
    module = found.module
    weights = getattr(module, "down_proj", None)
    if weights is None or weights.dim() != 3:
        raise InvalidArgument(f"{type(module).__name__} has no down_proj of three dimensions, which would tell the size of a row")
    hidden = weights.shape[2] if getattr(module, "is_transposed", False) else weights.shape[1]
    # In the worst case, all rows from all ranks are sent to one rank. On the CPU, rings limit the memory if all ranks share a
    # host.
    return {"hidden": hidden, "num_experts": slots or int(module.num_experts), "topk": found.topk, "max_tokens": max_tokens, "layout": "expert_major",
            "dtype": _row_type(model, weights), "staging": "ring" if backend == "cpu" and hosts == 1 else "direct", "routing_gradients": True}


def layer_config(config: Dict[str, Any], module: Any) -> Dict[str, Any]:
    """Returns the :class:`MoeLayer` keywords for a module. Storage is a view even on the CPU, so in-place weight changes take
    effect."""
    shape = {name: config[name] for name in ("hidden", "num_experts", "topk", "max_tokens", "dtype")}
    return {**shape, "intermediate": module.down_proj.shape[2], "storage": "view"}


# ---- Implementations of experts in passes without gradients ----


def _computes_swiglu(module: Any) -> bool:
    """Returns whether the module's class computes SwiGLU with the gate rows first. Runs the class on the CPU with small
    weights. The inputs include values near zero, where activation functions differ, and large values, where limits take effect.
    H and I differ, so transposed weights do not fit."""
    import torch

    hidden, intermediate, generator = 24, 16, torch.Generator("cpu").manual_seed(0)

    def random(*shape: int) -> "torch.Tensor":
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    w13, w2 = random(2, 2 * intermediate, hidden) / 5, random(2, hidden, intermediate) / 4
    x = random(8, hidden) * torch.tensor([0.3, 30.0], device="cpu").repeat_interleave(4)[:, None]
    ids = torch.arange(8, device="cpu")[:, None] % 2
    twin = copy.copy(module)
    vars(twin).update(_parameters={"gate_up_proj": w13, "down_proj": w2}, num_experts=2)
    with torch.no_grad():
        try:
            got = inspect.unwrap(type(module).forward)(twin, x, ids, torch.ones((8, 1), device="cpu"))
        except Exception:  # a module that cannot run this way may compute anything
            return False
        gate, up = torch.einsum("tnk,tk->tn", w13[ids[:, 0]], x).chunk(2, dim=-1)
        want = torch.einsum("tnk,tk->tn", w2[ids[:, 0]], torch.nn.functional.silu(gate) * up)
        return got.shape == want.shape and bool(((got - want).norm(dim=-1) <= 1e-4 * want.norm(dim=-1)).all())


def _why_not(module: Any) -> Optional[str]:
    """Returns the reason why the library's products cannot replace this module, or None if they can."""
    kind, parameters = type(module).__name__, dict(module.named_parameters(recurse=False))
    if sorted(parameters) != ["down_proj", "gate_up_proj"]:
        return f"{kind} has the parameters {', '.join(sorted(parameters))}; allowed: gate_up_proj and down_proj"
    first, second = parameters["gate_up_proj"], parameters["down_proj"]
    experts, hidden, intermediate = second.shape
    if first.shape != (experts, 2 * intermediate, hidden):
        return (f"{kind} has weights of {list(first.shape)} and {list(second.shape)}; allowed: gate_up_proj [E, 2 I, H] and down_proj "
                "[E, H, I]")
    if str(first.dtype) != "torch.bfloat16" or first.dtype != second.dtype:
        return f"{kind} has weights of {first.dtype} and {second.dtype}; allowed: torch.bfloat16"
    if hidden % 8 or intermediate % 8:
        return f"{kind} has H {hidden} and I {intermediate}; allowed: multiples of 8"
    if not _computes_swiglu(module):
        return f"{kind} does not compute SwiGLU with the gate rows of gate_up_proj first"
    return None


def way_of(module: Any, experts: str, backend: str) -> str:
    """Returns the implementation of these experts for passes without gradients: "module", "grouped" or "layer". Identical on
    all ranks."""
    if experts not in WAYS:
        raise InvalidArgument(f"experts is {experts!r}; allowed: {', '.join(WAYS)}")
    if experts == "module" or (experts == "automatic" and backend == "cpu"):
        return "module"
    if experts == "grouped" and backend == "cpu":
        raise InvalidArgument("experts is 'grouped' in a group on the CPU; allowed there: automatic, module, layer")
    reason = _why_not(module)
    if experts == "automatic":
        try:
            layer_library()
        except LibraryNotFound:
            return "module"
        return "grouped" if reason is None else "module"
    if reason is not None:
        raise InvalidArgument(f"experts is {experts!r}, but {reason}")
    layer_library()  # raises LibraryNotFound here, not in the first pass
    return experts


def distinct(configs: List[Dict[str, Any]]) -> Dict[str, Dict[str, Any]]:
    """Returns the distinct configs, keyed by their text."""
    return {repr(each): each for each in configs}


__all__: Tuple[str, ...] = ("Found", "distinct", "exchange_config", "experts_modules", "layer_config", "share_of", "way_of")
