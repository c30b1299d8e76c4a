# SPDX-License-Identifier: Apache-2.0
"""vLLM's prepare and finalize in the activation format Standard, on :class:`switchyard.Exchange`."""
from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (TopKWeightAndReduceContiguous, TopKWeightAndReduceDelegate,
                                                                         TopKWeightAndReduceNoOP)
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input

from ..._abi import names as _names
from ...handle import Handle
from ._ranks import Ranks, check_experts

#: Number of columns that share a scale of a dispatched fp8 row.
GROUP = 128


def rounded(hidden: int) -> int:
    """Returns the least multiple of 16 that is at least `hidden`: rows in bf16 and in fp8 are then multiples of 16 bytes. vLLM pads
    with zeros."""
    return -(-hidden // 16) * 16


def weighted(a1: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """Returns the tokens [T, H], multiplied by their routing weights [T, 1]."""
    if topk_weights.shape[1] != 1:
        _names.invalid(f"apply_router_weight_on_input: topk = {topk_weights.shape[1]}, but a token has one weight only with 1")
    return a1 * topk_weights.to(a1.dtype)


def tokens_of_all_ranks(world: int) -> Optional[int]:
    """Returns the number of tokens of all ranks in this pass, from host memory of vLLM, or None if vLLM has no such number."""
    context = get_forward_context() if is_forward_context_available() else None
    sizes = None if context is None or context.dp_metadata is None else context.dp_metadata.local_sizes
    # One size per data-parallel rank if all ranks of a tensor-parallel group dispatch the same tokens, else one per rank.
    return None if sizes is None else int(sum(sizes)) * (world // len(sizes))


class PrepareAndFinalize(mk.FusedMoEPrepareAndFinalizeModular):  # type: ignore[misc]
    """What the kernel reads of both formats."""

    def __init__(self, buffer: Ranks, num_dispatchers: int) -> None:
        super().__init__()
        self._ranks, self._world = buffer, num_dispatchers

    def topk_indices_dtype(self) -> Optional[torch.dtype]:
        return None

    def num_dispatchers(self) -> int:
        return self._world

    def output_is_reduced(self) -> bool:
        return True


class SwitchyardStandard(PrepareAndFinalize):
    """Sends each token once to every rank that owns one of its experts. The host determines the shapes of all results before the
    call, counts remain on the device, and no call waits for the GPU: calls can be captured.

    Args:
        buffer: objects of the process group.
        num_dispatchers: number of expert-parallel ranks.
        dp_size: not used.
        rank_expert_offset: not used, because it is wrong for an uneven division.
    """

    @staticmethod
    def maybe_roundup_layer_hidden_size(hidden_size: int, dtype: torch.dtype) -> int:
        return rounded(hidden_size)

    def __init__(self, buffer: Ranks, num_dispatchers: int, dp_size: int = 1, rank_expert_offset: int = 0) -> None:
        super().__init__(buffer, num_dispatchers)
        self._handle: Optional[Handle] = None

    def post_init_setup(self, fused_experts: Any) -> None:
        """Collective. Creates the exchange when vLLM builds the kernel.

        Raises:
            InvalidArgument: a shape, type or division of experts that an :class:`Exchange` does not support.
        """
        moe = fused_experts.moe_config
        self._exchange = self._ranks.exchange(moe.max_capture_size or 0, hidden=moe.hidden_dim, num_experts=moe.num_experts,
                                              topk=moe.experts_per_token, max_tokens=moe.max_num_tokens, dtype=moe.in_dtype,
                                              invalid_ids="count")
        check_experts(self._exchange.group, moe)
        self._first, self._experts = self._exchange.group.experts_of(moe.num_experts).start, moe.num_experts

    # ---- Properties that the kernel reads ----

    @property
    def activation_format(self) -> Any:
        return mk.FusedMoEActivationFormat.Standard

    def max_num_tokens_per_rank(self) -> Optional[int]:
        return None

    # ---- Prepare ----

    def prepare(self, a1: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, num_experts: int,
                expert_map: Optional[torch.Tensor], apply_router_weight_on_input: bool, quant_config: Any,
                defer_input_quant: bool = False) -> Tuple[Any, ...]:
        """Collective. Returns the received rows [R, H], their scales or None, the counts of the local experts on the device, the
        global expert ids [R, K] of the rows, and float32 weights [R, K]. R is the number of tokens of all ranks if vLLM's
        forward context contains it, else the worst case (CPU: the number of received rows). Rows after the received ones are
        unspecified; like routes to other ranks, they have the id of an expert of another rank, which `expert_map` excludes."""
        if apply_router_weight_on_input:
            a1 = weighted(a1, topk_weights)
        block, quantized = quant_config.block_shape, quant_config.quant_dtype
        before = block is not None and block[1] == GROUP and quantized == torch.float8_e4m3fn and not defer_input_quant
        x: Any = moe_kernel_quantize_input(a1, quant_config.a1_scale, quantized, False, block) if before else a1
        delivered: Any
        delivered, handle = self._exchange.dispatch(x, topk_ids, topk_weights, **self._size())
        self._handle = handle
        rows, scales = (delivered[0], delivered[1].contiguous()) if before else (delivered, None)
        counts = mk.ExpertTokensMetadata(expert_num_tokens=handle.tokens_per_expert.to(torch.int32), expert_num_tokens_cpu=None)
        # One kernel; -1 becomes an expert of another rank.
        ids = handle.topk_ids + self._first if self._first else torch.remainder(handle.topk_ids, self._experts)
        if not before and not defer_input_quant and rows.shape[0]:
            rows, scales = self._quantized(rows, handle, quant_config)
        return rows, scales, counts, ids, handle.topk_weights

    def _size(self) -> Dict[str, Any]:
        total = tokens_of_all_ranks(self._exchange.group.size)
        return {} if total is None else {"size": "capacity", "capacity": max(total, 1)}

    def _quantized(self, rows: torch.Tensor, handle: Handle, quant: Any) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """Quantizes received rows as the experts require."""
        scale = quant.a1_gscale if quant.quant_dtype == "nvfp4" else quant.a1_scale
        if quant.quant_dtype is not None and scale is None and quant.block_shape is None and not quant.per_act_token_quant:
            rows.masked_fill_((handle.source_token < 0).unsqueeze(1), 0)  # one scale for all rows, including unspecified ones
        return moe_kernel_quantize_input(rows, scale, quant_dtype=quant.quant_dtype, per_act_token_quant=quant.per_act_token_quant,
                                         block_shape=quant.block_shape, is_scale_swizzled=quant.is_scale_swizzled,
                                         is_scale_transposed=quant.is_scale_transposed, mx_alignment=quant.mx_alignment)

    # ---- Finalize ----

    def allocate_fused_expert_output(self, shape: Tuple[int, ...], dtype: torch.dtype, device: torch.device,
                                     weight_and_reduce_impl: Any) -> Optional[torch.Tensor]:
        """Returns rows [R, H] that combine reads in place, if the experts write reduced rows; else None."""
        if not isinstance(weight_and_reduce_impl, TopKWeightAndReduceNoOP) or self._handle is None or dtype not in _COMBINED:
            return None
        rows = self._exchange.allocate_rows(self._handle, dtype)
        return rows if tuple(rows.shape) == tuple(shape) else None

    def finalize(self, output: torch.Tensor, fused_expert_output: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor,
                 apply_router_weight_on_input: bool, weight_and_reduce_impl: Any) -> None:
        """Collective. Writes to `output` [T, H] the sum over ranks of the experts' rows; on each rank, the experts or
        `weight_and_reduce_impl` apply the weights and reduce the rows. `topk_weights`, `topk_ids`: as returned by prepare."""
        handle, self._handle = self._handle, None
        if handle is None:
            _names.invalid("finalize: no prepare precedes it")
        y = fused_expert_output
        if y.numel():
            if isinstance(weight_and_reduce_impl, TopKWeightAndReduceDelegate):
                weight_and_reduce_impl = TopKWeightAndReduceContiguous()
            y = weight_and_reduce_impl.apply(output=None, fused_expert_output=y, topk_weights=topk_weights, topk_ids=topk_ids,
                                             apply_router_weight_on_input=apply_router_weight_on_input)
        self._exchange.combine(y, handle, apply_weights=False, out=output)


_COMBINED = (torch.bfloat16, torch.float16, torch.float32)
