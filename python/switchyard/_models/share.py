# SPDX-License-Identifier: Apache-2.0
"""This rank's experts of one module, and the forward pass that sends tokens from all ranks to them."""
from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING, Any, Dict, List, MutableMapping, Optional, Sequence, Tuple

from .._torch.recorded import is_traced
from ..errors import Mismatch
from ..exchange import Exchange
from ..group import Group
from ..layer import MoeLayer
from . import products, states, wrappers
from .replicas import Replicas

if TYPE_CHECKING:
    import torch


class Layers:
    """Layers of modules with identical shapes; they share all memory except their weights. A layer ends with its module."""

    def __init__(self, group: Group, config: Dict[str, Any]) -> None:
        self._group, self._config = group, config
        self._of: MutableMapping[Any, MoeLayer] = weakref.WeakKeyDictionary()  # by module
        self._last: Optional[MoeLayer] = None  # the others share its memory; kept even if its module ends, at a time that differs by rank

    def __getitem__(self, module: Any) -> MoeLayer:
        return self._of[module]

    def make(self, module: Any, w13: Any, w2: Any) -> None:
        """Creates the layer of this module, replacing any previous one. Collective for the first module; all ranks create the
        layers in the same order."""
        last = self._last
        self._last = MoeLayer(self._group, w13, w2, **self._config) if last is None else last.with_weights(w13, w2)
        self._of[module] = self._last


def _held() -> Any:
    from .replica_pass import Held

    return Held()


class Share:
    """This rank's experts of one module. Its ``forward`` replaces that of `module`. The module's parameters keep their identity
    but contain only the share."""

    def __init__(self, name: str, module: Any, group: Group, exchange: Exchange, way: str, average: bool, above: List[Any],
                 replicas: Optional[Replicas] = None) -> None:
        self.name, self.group, self.experts, self.kind = name, group, int(module.num_experts), type(module)
        self._module, self._exchange, self._way, self._average, self._above = module, exchange, way, average, above
        self._experts, self.mine = module.forward, group.experts_of(self.experts)
        self.names = [each for each, parameter in module.named_parameters(recurse=False) if parameter.shape[:1] == (self.experts,)]
        for each in self.names:
            parameter = getattr(module, each)
            parameter.data, parameter.grad = parameter.detach()[self.mine.start:self.mine.stop].clone(), None
        self._count = module.num_experts = len(self.mine)
        self._layers: Optional[Layers] = None
        self._products: Optional[products.Products] = None
        self._places: Any = None
        self._kept: Dict[str, Any] = {}
        self.replicas, self._held = replicas, _held()
        self.saves_plain = False  #: whether state dicts contain the share as a plain tensor; set by full_state_dict
        self._follow()
        module.forward = self.forward
        states.connect(self, module)

    # ---- Copies ----

    def __deepcopy__(self, memo: Dict[int, Any]) -> "Share":
        """Returns the share for a copy of the module, with separate parameters and the same exchange."""
        twin = Share.__new__(Share)
        memo[id(self)] = twin
        vars(twin).update(vars(self), _products=None, _places=None, _kept={}, _held=_held())
        vars(twin).pop("_ddp", None)
        twin._module = copy.deepcopy(self._module, memo)
        twin._experts = copy.deepcopy(self._experts, memo)
        twin._above = [memo[id(each)] for each in self._above if id(each) in memo]  # those that are copied as well
        return twin

    def __reduce__(self) -> Any:
        raise TypeError(f"{self.name}: a divided model belongs to its group and cannot be pickled: save switchyard.full_state_dict(model), "
                        "or model.state_dict() by torch.distributed.checkpoint, and divide the model again where it is loaded")

    # ---- Parameters ----

    def _follow(self) -> None:
        """Marks the gradients of the module's current parameters."""
        from . import gradients

        for name in self.names:
            parameter = self._module._parameters.get(name)
            if parameter is not None:
                self._kept[name] = parameter
                if parameter.requires_grad:
                    gradients.follow(parameter, self, self.group.size if self._average else 1)

    def parameters(self) -> Dict[str, Any]:
        """Returns the share's parameters, keyed by their names in the module."""
        return {name: self._module._parameters[name] for name in self.names if self._module._parameters.get(name) is not None}

    @property
    def site(self) -> int:
        """The number that identifies the module in calls."""
        return self._exchange._site or 0

    def fetch_replicas(self) -> None:
        """Collective. Copies the weights of all replicas and discards the copies."""
        if self.replicas is not None and all(each.is_cuda == (self.group.backend == "cuda") for each in self.parameters().values()):
            self.replicas.fetch([each.detach() for each in self.parameters().values()])

    def compute_by(self, layers: Layers) -> None:
        """Uses one of these layers for passes without gradients. Collective."""
        self._layers = layers
        if self._module.down_proj.is_cuda == (self.group.backend == "cuda"):
            self.made_layer()

    # ---- Forward ----

    def forward(self, hidden_states: "torch.Tensor", top_k_index: Any = None, top_k_weights: Any = None, *, router_indices: Any = None,
                routing_weights: Any = None) -> "torch.Tensor":
        top_k_index = router_indices if top_k_index is None else top_k_index
        top_k_weights = routing_weights if top_k_weights is None else top_k_weights
        traced = is_traced()
        if not traced:
            self._look()
        try:
            return self._compute(hidden_states, top_k_index, top_k_weights, traced)
        except Mismatch as error:
            raise states.named(error, self) from None

    forward._is_a_share = True  # type: ignore[attr-defined]

    def _look(self) -> None:
        """Checks that all wrappers around the model support shares."""
        wrappers.check(self, self._above, self._average)
        if any(self._module._parameters.get(name) is not parameter for name, parameter in self._kept.items()) or not self._kept:
            wrappers.check_replaced(self, self._module, self._above)
        self._follow()

    def _compute(self, hidden_states: Any, ids: Any, weights: Any, traced: bool) -> Any:
        x, ids, weights = hidden_states.contiguous(), ids.contiguous(), weights.float().contiguous()
        if self.replicas is not None:
            from . import replica_pass

            return replica_pass.forward(self, self.replicas, self._held, x, ids, weights)
        way = "module" if traced else self.way(hidden_states, weights)
        if way == "layer":
            return self.made_layer()(x, ids, weights)
        rows: Any
        rows, handle = self._exchange.dispatch(x, ids, weights)
        if way == "grouped":
            rows = self._by_products(rows, handle) if rows.shape[0] > 0 and self._count > 0 else rows
        else:
            rows = self._by_module(rows, handle, traced)
        return self._exchange.combine(rows.contiguous(), handle, order="per_route")

    def way(self, *inputs: "torch.Tensor") -> str:
        """Returns the form of the experts in a pass with these inputs: "module" if the pass records gradients or the weights are
        computed from other tensors (LoRA), otherwise the form of the share."""
        import torch

        if self._way == "module" or any(self._module._parameters.get(name) is None for name in self.names):
            return "module"
        records = torch.is_grad_enabled() and any(each.requires_grad for each in (*inputs, *self._module.parameters()))
        return "module" if records else self._way

    def _by_module(self, rows: Any, handle: Any, traced: bool) -> Any:
        """Computes rows with the module. If the sizes are not known on the host, rows after those of the last expert belong to
        no expert. A graph does not test whether rows exist."""
        import torch

        if self._count > 0 and (traced or rows.shape[0] > 0):
            positions = torch.arange(rows.shape[0], device=rows.device)
            owners = torch.searchsorted(handle.offsets.long(), positions, right=True).clamp(max=self._count - 1)
            made = self._experts(rows, owners[:, None], torch.ones((rows.shape[0], 1), dtype=rows.dtype, device=rows.device))
            return made if made.dim() == 2 else made.reshape(rows.shape[0], -1)
        if not torch.is_grad_enabled():
            return rows
        # The backward pass is collective, and weights not multiplied by any row have zero gradients.
        nothing = [getattr(self._module, name).flatten()[:0].sum() for name in self.names if getattr(self._module, name).requires_grad]
        return rows + sum(nothing).to(rows.dtype) if nothing else rows

    def _by_products(self, rows: Any, handle: Any) -> Any:
        return products.multiply([(self.made_products(), handle)], rows, self._exchange.allocate_rows(handle))

    def made_products(self) -> products.Products:
        """Returns the products of the owned experts, recreating them if their weights have moved."""
        w13, w2, moved = self._weights([each.detach() for each in self.parameters().values()])
        if moved or self._products is None:
            self._products = None
            self._products = products.products_of(w13, w2)
        return self._products

    def made_layer(self) -> MoeLayer:
        """Returns the layer, recreating it if its weights have moved, which happens on all ranks or on none."""
        assert self._layers is not None
        weights = [each.detach() for each in self.parameters().values()]
        w13, w2, moved = self._weights(weights if self.replicas is None else self._held.slots(weights, self.replicas.layout))
        if moved:
            places, self._places = self._places, None  # if this fails, the next pass repeats it
            self._layers.make(self._module, w13, w2)
            self._places = places
        return self._layers[self._module]

    def pair(self, weights: Sequence[Any]) -> Tuple[Any, Any]:
        """Returns gate_up_proj and down_proj of `weights`, which are in the order of `names`."""
        by_name = dict(zip(self.names, weights))
        return by_name["gate_up_proj"], by_name["down_proj"]

    def _weights(self, weights: Sequence[Any]) -> Tuple[Any, Any, bool]:
        """Returns both weights and whether their memory has changed since the previous call. If so, calls that read the old
        memory have finished. The objects that read the weights keep their storages alive, so no other storage can have the same
        identity; the memory of a storage may still change. A move is also detected on ranks without experts."""
        import torch

        both = self.pair(weights)
        places = [(each.data_ptr(), each.untyped_storage()._cdata, each.storage_offset(), each.dtype) for each in both]
        moved = places != self._places
        if moved and self._places is not None and both[0].is_cuda:
            torch.cuda.synchronize(both[0].device)
        self._places = places
        return both[0], both[1], moved


__all__ = ["Layers", "Share"]
