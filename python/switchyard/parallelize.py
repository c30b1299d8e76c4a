# SPDX-License-Identifier: Apache-2.0
"""Experts of a model over the ranks of a group.

For models whose experts are one module with weights of all experts in parameters of three dimensions, and ``forward(hidden_states,
top_k_index, top_k_weights)``: those of transformers from 5.0 on. Nothing of transformers is imported.
"""
from __future__ import annotations

import copy
import functools
import inspect
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Optional, Tuple

from ._abi.arguments import checked
from ._abi.ffi import layer_library
from .errors import InvalidArgument, LibraryNotFound
from .exchange import Exchange, is_traced
from .gemm import GroupedGemm
from .group import Group, constructs
from .layer import MoeLayer

if TYPE_CHECKING:
    import torch

__all__ = ["moe_heap_bytes", "parallelize_moe"]

_ARGUMENTS = ["hidden_states", "top_k_index", "top_k_weights"]
_WAYS = ("automatic", "module", "grouped", "layer")


def _experts_modules(model: Any) -> Iterator[Tuple[str, Any]]:
    """Names and modules of experts, with all of their experts still there."""
    for name, module in model.named_modules():
        parameters = dict(module.named_parameters(recurse=False))
        if not any(parameter.dim() == 3 for parameter in parameters.values()) or not hasattr(module, "num_experts"):
            continue
        arguments = [each for each in inspect.signature(inspect.unwrap(type(module).forward)).parameters if each != "self"]
        if arguments[:3] == _ARGUMENTS:
            yield name, module


def _topk_of(model: Any, topk: Optional[int]) -> int:
    if topk is None:
        config = getattr(model, "config", None)
        config = getattr(config, "text_config", config)
        topk = getattr(config, "num_experts_per_tok", None)
    if topk is None:
        raise InvalidArgument("topk: the model's config has no num_experts_per_tok; say how many experts a token has")
    return topk


def _shape_of(module: Any) -> Tuple[int, int, "torch.dtype"]:
    """Hidden, experts, type of rows."""
    weights = getattr(module, "down_proj", None)
    if weights is None or weights.dim() != 3:
        raise InvalidArgument(f"{type(module).__name__} has no down_proj of three dimensions, which would tell the size of a row")
    hidden = weights.shape[2] if getattr(module, "is_transposed", False) else weights.shape[1]
    return hidden, int(module.num_experts), weights.dtype


def _config(module: Any, topk: int, max_tokens: int, backend: str, hosts: int) -> Dict[str, Any]:
    hidden, experts, dtype = _shape_of(module)
    # The worst routing sends all rows of all ranks to one: on the CPU rings bound the memory, where all ranks share a host.
    return {"hidden": hidden, "experts": experts, "topk": topk, "max_tokens": max_tokens, "layout": "expert_major", "dtype": dtype,
            "staging": "ring" if backend == "cpu" and hosts == 1 else "direct", "routing_gradients": True}


def _computes_swiglu(module: Any) -> bool:
    """Whether the module's class computes SwiGLU with the gate rows first: it is run on small weights on the CPU, with values near zero,
    where activations differ, and large ones, where limits show. H is not I, so that transposed weights do not fit."""
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
        except Exception:  # a module that cannot be run so may compute anything
            return False
        gate, up = torch.einsum("tnk,tk->tn", w13[ids[:, 0]], x).chunk(2, dim=-1)
        want = torch.einsum("tnk,tk->tn", w2[ids[:, 0]], torch.nn.functional.silu(gate) * up)
        return got.shape == want.shape and bool(((got - want).norm(dim=-1) <= 1e-4 * want.norm(dim=-1)).all())


def _why_not(module: Any) -> Optional[str]:
    """Why the library's own products cannot stand for this module; None: they can."""
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


def _way(module: Any, experts: str, backend: str) -> str:
    """Which of module, grouped and layer computes these experts in passes without gradients. The same on all ranks."""
    if experts not in _WAYS:
        raise InvalidArgument(f"experts is {experts!r}; allowed: {', '.join(_WAYS)}")
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
    layer_library()  # LibraryNotFound here, not in the first pass
    return experts


def _layer_config(config: Dict[str, Any], module: Any) -> Dict[str, Any]:
    """Keywords of the :class:`MoeLayer` of a module. A view, on the CPU too, so that weights that change in place are seen."""
    shape = {name: config[name] for name in ("hidden", "experts", "topk", "max_tokens", "dtype")}
    return {**shape, "intermediate": module.down_proj.shape[2], "storage": "view"}


@checked("moe_heap_bytes")
def moe_heap_bytes(model: Any, world: int, *, max_tokens: int, topk: Optional[int] = None, backend: str = "cpu",
                   experts: str = "automatic", hosts: int = 1) -> int:
    """``heap_bytes`` of a group for :func:`parallelize_moe` of this model, not converted yet. Needs no group. hosts: on how many hosts its
    ranks are; what several need, on the CPU, is not bounded by rings."""
    topk, exchanges, layers = _topk_of(model, topk), {}, {}  # type: ignore[var-annotated]
    for _, module in _experts_modules(model):
        config = _config(module, topk, max_tokens, backend, hosts)
        exchanges[repr(config)] = config
        if _way(module, experts, backend) == "layer":
            of_layer = _layer_config(config, module)
            layers[repr(of_layer)] = MoeLayer.heap_bytes(world, backend=backend, **of_layer)
    return sum(layers.values()) + sum(Exchange.heap_bytes(world, backend=backend, **each) for each in exchanges.values())


@functools.partial(constructs, settles=True)
@checked("parallelize_moe")
def parallelize_moe(model: Any, group: Group, *, max_tokens: int, topk: Optional[int] = None, experts: str = "automatic") -> List[str]:
    """Collective. Keeps this rank's experts of every layer, and lets tokens travel to their experts and back.

    model: a torch module, the same on all ranks. max_tokens: most tokens (batch times length) of any rank in a forward pass. topk:
    experts of a token; None: ``model.config.num_experts_per_tok``.

    experts: what computes them in passes that record no gradients and are not compiled. "module": the module itself, as in all other
    passes. "grouped": :class:`GroupedGemm` between dispatch and combine, on GPUs. "layer": a :class:`MoeLayer` for each module, in whose
    automatic form a GPU computes the whole layer by one kernel. Both read the module's
    parameters where they lie, need the library switchyard_layer, and are for SwiGLU of bf16 without biases; InvalidArgument says what a
    module lacks. Layers of modules of one shape share all memory but their weights. "automatic": "grouped" on GPUs where that can be, else "module".

    Experts' parameters become those of ``group.experts_of(num_experts)``, so that a state dict has this rank's share. Routers, shared
    experts and all else stay as they are, on every rank. Each forward and backward pass of the model is collective; all ranks record
    gradients in a pass, or none does. Gradients of experts are then those of all ranks' tokens, and gradients of the rest those of this
    rank's. Parameters may change in place at any time between passes; to other memory they move on all ranks or on none.

    Returns the names of the modules that were converted; InvalidArgument if there is none.
    """
    topk, exchanges, layers, converted = _topk_of(model, topk), {}, {}, []  # type: ignore[var-annotated]
    found = [(name, module, _way(module, experts, group.backend)) for name, module in _experts_modules(model)]
    for name, module, way in found:
        config = _config(module, topk, max_tokens, group.backend, group.hosts)
        key = repr(config)
        if key not in exchanges:
            exchanges[key] = Exchange(group, **config)
        share = _Share(module, group, exchanges[key], way)
        if way == "layer":
            of_layer = _layer_config(config, module)
            share.compute_by(layers.setdefault(repr(of_layer), _Layers(group, of_layer)))
        module.forward = share.forward
        converted.append(name)
    if not converted:
        raise InvalidArgument(f"{type(model).__name__} has no experts in one module with weights of three dimensions and "
                              f"forward({', '.join(_ARGUMENTS)})")
    return converted


class _Layers:
    """Layers of modules of one shape, which share all memory but their weights."""

    def __init__(self, group: Group, config: Dict[str, Any]) -> None:
        self._group, self._config = group, config
        self._of: Dict[int, MoeLayer] = {}  # by the module's identity

    def __getitem__(self, module: Any) -> MoeLayer:
        return self._of[id(module)]

    def make(self, module: Any, w13: Any, w2: Any) -> None:
        """The layer of this module, instead of one that it had. Collective for the first of all modules, and all ranks make them in
        the same order."""
        for each in self._of.values():
            self._of[id(module)] = each.with_weights(w13, w2)
            return
        self._of[id(module)] = MoeLayer(self._group, w13, w2, **self._config)


class _Share:
    """This rank's experts of one module, and the forward pass that brings all ranks' tokens to them."""

    def __init__(self, module: Any, group: Group, exchange: Exchange, way: str) -> None:
        import torch

        self._module, self._group, self._exchange, self._way = module, group, exchange, way
        self._experts, mine = module.forward, group.experts_of(module.num_experts)
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.shape[0] == module.num_experts:
                share = torch.nn.Parameter(parameter.detach()[mine.start:mine.stop].clone(), parameter.requires_grad)
                setattr(module, name, share)
        self._count = module.num_experts = len(mine)
        self._layers: Optional[_Layers] = None
        self._gemms: Tuple[GroupedGemm, ...] = ()
        self._places: Any = None

    def compute_by(self, layers: _Layers) -> None:
        """Passes without gradients are computed by one of these. Collective."""
        self._layers = layers
        if self._module.down_proj.is_cuda == (self._group.backend == "cuda"):
            self._made_layer()

    def forward(self, hidden_states: "torch.Tensor", top_k_index: "torch.Tensor", top_k_weights: "torch.Tensor") -> "torch.Tensor":
        x, ids, weights = hidden_states.contiguous(), top_k_index.contiguous(), top_k_weights.float().contiguous()
        way = self._way if self._is_plain(hidden_states, top_k_weights) else "module"
        if way == "layer":
            return self._made_layer()(x, ids, weights)
        rows: Any
        rows, handle = self._exchange.dispatch(x, ids, weights)
        if rows.shape[0] > 0 and self._count > 0:
            rows = self._by_gemms(rows, handle) if way == "grouped" else self._by_module(rows, handle)
        return self._exchange.combine(rows.contiguous(), handle, order="per_route")

    def _is_plain(self, *inputs: "torch.Tensor") -> bool:
        """Whether a pass records no gradients and is not traced by torch.compile."""
        import torch

        if is_traced():
            return False
        recorded = torch.is_grad_enabled() and any(each.requires_grad for each in (*inputs, *self._module.parameters(recurse=False)))
        return not recorded

    def _by_module(self, rows: Any, handle: Any) -> Any:
        """With sizes that the host does not know, rows behind the last expert's are of no one."""
        import torch

        positions = torch.arange(rows.shape[0], device=rows.device)
        owners = torch.searchsorted(handle.offsets.long(), positions, right=True).clamp(max=self._count - 1)
        return self._experts(rows, owners[:, None], torch.ones((rows.shape[0], 1), dtype=rows.dtype, device=rows.device))

    def _by_gemms(self, rows: Any, handle: Any) -> Any:
        w13, w2, moved = self._weights()
        if moved or not self._gemms:
            self._gemms = ()
            self._gemms = (GroupedGemm(w13, epilogue="swiglu"), GroupedGemm(w2))
        up, down = self._gemms
        return down(up(rows, handle), handle, out=self._exchange.allocate_rows(handle))

    def _made_layer(self) -> MoeLayer:
        """Where weights have moved, on all ranks alike, it is made anew."""
        assert self._layers is not None
        w13, w2, moved = self._weights()
        if moved:
            self._layers.make(self._module, w13, w2)
        return self._layers[self._module]

    def _weights(self) -> Tuple[Any, Any, bool]:
        """Both weights, and whether they lie elsewhere than in the call before; then calls that read them there are over. What reads them
        keeps their memory, so no other has its identity meanwhile; ranks without experts see a move too."""
        import torch

        both = [self._module.gate_up_proj.detach(), self._module.down_proj.detach()]
        places = [(each.untyped_storage()._cdata, each.storage_offset(), each.dtype) for each in both]
        moved = places != self._places
        if moved and self._places is not None and both[0].is_cuda:
            torch.cuda.synchronize(both[0].device)
        self._places = places
        return both[0], both[1], moved
