# SPDX-License-Identifier: Apache-2.0
"""Token dispatcher for torchtitan on :class:`switchyard.Exchange`. :func:`token_dispatcher` and :func:`selective_checkpoint` are
torchtitan overrides; a training run enables them by name::

    --override.imports switchyard.engines.torchtitan.token_dispatcher switchyard.engines.torchtitan.selective_checkpoint
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, NoReturn, Optional, Set, Tuple

import torch
from torchtitan.config import override
from torchtitan.config.override import derive
from torchtitan.distributed.activation_checkpoint import SelectiveAC as _SelectiveAC
from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher
from torchtitan.tools.logging import logger

from .._abi import names as _names
from .._torch import autograd as _autograd  # noqa: F401  (registers the operators)
from ..exchange import Exchange
from ..group import Group
from ..handle import Handle
from ._patches import require_version

__all__ = ["SelectiveAC", "TokenDispatcher", "close", "selective_checkpoint", "token_dispatcher"]

#: Versions whose extension points were tested.
SUPPORTED = ("0.3",)
_ROWS = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
_ROWS_NAMED = {of: name for name, of in _ROWS.items()}

#: Exchanges by process group and keywords. All layers of one shape share one exchange.
_shared: Dict[Tuple[Any, ...], Exchange] = {}


def _supported() -> None:
    require_version("torchtitan", SUPPORTED, "without this override, torchtitan uses its own dispatcher")


def close() -> None:
    """Leaves the groups of all dispatchers. Call it after their last call on every rank; they cannot be used afterwards."""
    while _shared:
        _shared.popitem()[1].group.close()


def _exchange_of(mesh: Any, config: Dict[str, Any], timeout: float) -> Exchange:
    """Collective. Returns the exchange of the ranks of `mesh` with these keywords, in a group of its own."""
    process_group = mesh.get_group()
    key = (process_group, *config.items())
    if key not in _shared:
        backend = "cuda" if mesh.device_type == "cuda" else "cpu"
        heap = Exchange.heap_bytes(mesh.size(), backend=backend, routing_gradients=True, **config)
        group = Group.from_process_group(process_group, heap, backend=backend, timeout=timeout, rendezvous_timeout=timeout)
        _shared[key] = Exchange(group, routing_gradients=True, **config)
        logger.info(f"Switchyard dispatches tokens of {mesh.size()} ranks: {config}, {heap} bytes of symmetric memory")
    return _shared[key]


class TokenDispatcher(BaseEPTokenDispatcher):
    """Dispatch and combine by an expert-major exchange. Both are differentiable in the tokens, the expert outputs and the
    routing scores; combine multiplies expert outputs by the scores and sums them in float32.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):
        """
        hidden_dim: columns of a token. num_max_tokens_per_rank: maximum number of tokens of a rank per call.
        pad_multiple: the rows of each expert are padded with zeros to a multiple of this number; None: no padding.
        dtype: widest type of tokens, "bf16", "f16" or "f32". It determines the size of the symmetric memory.
        static_shapes: allocates the worst-case number of rows, so that the host does not wait for the row count.
        timeout: seconds before a wait for another rank raises PeerTimeout; also applies to parallelize().
        """

        hidden_dim: Optional[int] = None
        num_max_tokens_per_rank: Optional[int] = None
        pad_multiple: Optional[int] = None
        dtype: str = "bf16"
        static_shapes: bool = False
        timeout: float = 600.0

    def __init__(self, config: Config) -> None:
        _supported()
        super().__init__(config)
        for name in ("hidden_dim", "num_max_tokens_per_rank"):
            value = getattr(config, name)
            if not isinstance(value, int) or value <= 0:
                _names.invalid(f"{name} = {value!r}: must be a positive integer; a model with comm_backend='deepep' supplies it, "
                               "others pass it as an argument of the override")
        if config.dtype not in _ROWS:
            _names.invalid(f"dtype = {config.dtype!r}: must be {_names.listed(map(repr, _ROWS))}")
        self._config = config
        self._size = "worst_case" if config.static_shapes else "exact"
        self._exchange: Optional[Exchange] = None

    def init_buffer(self) -> None:
        """Collective over the EP mesh. Creates the exchange, or shares that of an earlier layer."""
        mesh, c = self.ep_mesh, self._config
        if mesh is None:
            _names.invalid("expert_parallel_degree = 1: this dispatcher requires at least 2; without the override, torchtitan "
                           "sorts tokens on one rank")
        if self.num_experts % mesh.size():
            _names.invalid(f"num_experts = {self.num_experts}: must be a multiple of expert_parallel_degree, {mesh.size()}")
        self._exchange = _exchange_of(mesh, dict(
            hidden=c.hidden_dim, num_experts=self.num_experts, topk=self.top_k, max_tokens=c.num_max_tokens_per_rank, dtype=c.dtype,
            layout="expert_major", expert_alignment=c.pad_multiple or 1), c.timeout)

    def dispatch(self, x_TD: torch.Tensor, topk_scores_TK: torch.Tensor, topk_expert_ids_TK: torch.Tensor,
                 num_local_tokens_per_expert_E: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, Handle]:
        """Collective. Sends each token to the ranks of its experts.

        Args:
            x_TD: [T, D], of the configured type or a narrower one.
            topk_scores_TK: [T, K]; :meth:`combine` multiplies expert outputs by them.
            topk_expert_ids_TK: int32 or int64 [T, K].
            num_local_tokens_per_expert_E: not used.

        Returns:
            Rows [R, D] grouped by this rank's experts; rows per expert, int64 [E / ranks], padding included; the routing.

        Raises:
            InvalidArgument: the tokens have a wider type, or exceed the maximum number.
        """
        exchange = self._exchange
        if exchange is None:
            _names.invalid("dispatch: the model was not parallelized; call parallelize() on it first")
        if x_TD.dtype.itemsize > _ROWS[self._config.dtype].itemsize:
            _names.invalid(f"tokens are {x_TD.dtype}: the exchange is for dtype = {self._config.dtype!r}; pass dtype = 'f32' to "
                           "the override, or train with mixed_precision_param = 'bfloat16'")
        rows: Any
        rows, handle = exchange.dispatch(x_TD.contiguous(), topk_expert_ids_TK.contiguous(), topk_scores_TK.float().contiguous(),
                                         size=self._size)
        return rows, handle.aligned_per_expert, handle

    def combine(self, routed_output_RD: torch.Tensor, metadata: Handle, x_TD: torch.Tensor) -> torch.Tensor:
        """Collective. Returns the sums of weighted expert outputs, [T, D]. `metadata`: the routing from :meth:`dispatch`."""
        assert self._exchange is not None
        return self._exchange.combine(routed_output_RD.contiguous(), metadata).type_as(x_TD)


def _refuse_drops(factor: float) -> NoReturn:
    _names.invalid(f"non_blocking_capacity_factor = {factor}: this dispatcher drops no tokens; use 1.0, which allocates rows "
                   "for any routing, or None")


@override(target=BaseEPTokenDispatcher.Config, description="Expert parallelism by Switchyard.")
def token_dispatcher(cfg: Any, **given: Any) -> Any:
    """Replaces the dispatcher of every MoE layer. `given`: fields of :class:`TokenDispatcher.Config`; all other fields are copied
    from the replaced dispatcher.

    Raises:
        InvalidArgument: another version of torchtitan, or a dispatcher that drops tokens.
        ValueError: an unknown field.
    """
    _supported()
    factor = getattr(cfg, "non_blocking_capacity_factor", None)
    if factor not in (None, 1.0):
        _refuse_drops(factor)
    if factor == 1.0 or getattr(cfg, "cudagraphable", False):
        given.setdefault("static_shapes", True)
    theirs = getattr(cfg, "dtype", None)  # MinimalAsyncEP; a torch.dtype
    if theirs is not None:
        given.setdefault("dtype", _ROWS_NAMED.get(theirs, str(theirs)))
    return derive(cfg, TokenDispatcher.Config, **given)


class SelectiveAC(_SelectiveAC):
    """Selective activation checkpointing that also saves the results of dispatch and combine, so that backward does not repeat the
    communication of forward."""

    @dataclass(kw_only=True, slots=True)
    class Config(_SelectiveAC.Config):
        pass

    def get_save_ops(self) -> Set[Any]:
        operators = torch.ops.switchyard
        return {*super().get_save_ops(), operators.plan.default, operators.dispatch.default, operators.combine.default}


@override(target=_SelectiveAC.Config, exact=True, description="Selective checkpoints save what Switchyard receives.")
def selective_checkpoint(cfg: Any) -> Any:
    """Replaces selective activation checkpointing by :class:`SelectiveAC`."""
    _supported()
    return derive(cfg, SelectiveAC.Config)
