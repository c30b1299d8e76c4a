# SPDX-License-Identifier: Apache-2.0
"""vLLM's prepare and finalize in the activation format BatchedExperts, on :class:`switchyard.LowLatency`."""
from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm import envs
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceDelegate
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input, normalize_batched_scales_shape

from ._ranks import Ranks, check_experts, refuse
from ._standard import GROUP, PrepareAndFinalize, rounded, weighted


class SwitchyardBatched(PrepareAndFinalize):
    """Dispatches tokens to rows by expert: [L, world * max_tokens, H] for the L experts of this rank. Shapes are fixed, counts
    remain on the device, and all calls can be captured. Dispatch sends each token once per rank, with its routing weights. Combine
    multiplies the experts' rows by these weights on this rank and returns one sum per (token, rank) (``order="per_rank"``).

    Args:
        buffer: objects of the process group.
        max_tokens_per_rank: maximum number of tokens on any rank.
        num_dispatchers: number of expert-parallel ranks.
        use_fp8_dispatch: send rows as fp8 with one scale per 128 columns.
        global_to_physical: int [E], physical ids of experts under round-robin placement, or None.
        physical_to_global, local_expert_global_ids: not used.
    """

    @staticmethod
    def maybe_roundup_layer_hidden_size(hidden_size: int) -> int:
        return rounded(hidden_size)

    def __init__(self, buffer: Ranks, max_tokens_per_rank: int, num_dispatchers: int, use_fp8_dispatch: bool = False,
                 global_to_physical: Optional[torch.Tensor] = None, physical_to_global: Optional[torch.Tensor] = None,
                 local_expert_global_ids: Optional[torch.Tensor] = None) -> None:
        super().__init__(buffer, num_dispatchers)
        self._max_tokens = max_tokens_per_rank
        self._fp8, self._physical = use_fp8_dispatch, global_to_physical

    def post_init_setup(self, fused_experts: Any) -> None:
        """Collective. Creates the exchange when vLLM builds the kernel.

        Raises:
            InvalidArgument: experts that reduce rows themselves, NVFP4 rows, one dynamic scale for all rows, or a shape, type or
                division of experts that a :class:`LowLatency` does not support.
        """
        moe, quant = fused_experts.moe_config, fused_experts.quant_config
        name, deferred = type(fused_experts).__name__, fused_experts.expects_unquantized_inputs
        if not isinstance(fused_experts.finalize_weight_and_reduce_impl(), TopKWeightAndReduceDelegate):
            refuse(f"{name}, which reduces rows itself, with deepep_low_latency", "use --all2all-backend deepep_high_throughput")
        if quant.quant_dtype == "nvfp4" and envs.VLLM_DEEPEPLL_NVFP4_DISPATCH:
            refuse("VLLM_DEEPEPLL_NVFP4_DISPATCH=1", "unset it: rows are then sent in bf16")
        self._quantized = quant.quant_dtype not in (None, "nvfp4") and not self._fp8 and not deferred  # after dispatch
        if self._quantized and quant.a1_scale is None and quant.block_shape is None and not quant.per_act_token_quant:
            refuse(f"one dynamic {quant.quant_dtype} scale for all rows, of which some are unspecified in batches,",
                   "use --all2all-backend deepep_high_throughput, or a checkpoint with static or block scales")
        scales = ("ue8m0" if fused_experts.supports_packed_ue8m0_act_scales() else "f32") if self._fp8 and not deferred else None
        self._exchange, self._received = self._ranks.low_latency(
            hidden=moe.hidden_dim, num_experts=moe.num_experts, topk=moe.experts_per_token, max_tokens=self._max_tokens,
            dtype=moe.in_dtype, scales=scales, scale_group=GROUP, scale_order="column_major", invalid_ids="count")
        check_experts(self._exchange.group, moe)
        self._counts = mk.ExpertTokensMetadata(expert_num_tokens=self._received.rows, expert_num_tokens_cpu=None)

    # ---- Properties that the kernel reads ----

    @property
    def activation_format(self) -> Any:
        return mk.FusedMoEActivationFormat.BatchedExperts

    def max_num_tokens_per_rank(self) -> Optional[int]:
        return self._max_tokens

    # ---- Prepare and finalize ----

    def prepare(self, a1: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, num_experts: int,
                expert_map: Optional[torch.Tensor], apply_router_weight_on_input: bool, quant_config: Any,
                defer_input_quant: bool = False) -> Tuple[Any, ...]:
        """Collective. Returns the received rows [L, R, H], their scales [L, R, groups] or None, and int32 counts [L] on the device.
        Rows after an expert's count are unspecified. The next prepare of a layer with the same shape overwrites the rows."""
        if apply_router_weight_on_input:
            a1 = weighted(a1, topk_weights)
        ids = topk_ids if self._physical is None else self._physical[topk_ids]
        received = self._exchange.dispatch(a1, ids, None if apply_router_weight_on_input else topk_weights, output=self._received)
        x, scales = received.x, received.scales
        if self._quantized:
            x, scales = moe_kernel_quantize_input(x.view(-1, x.shape[-1]), quant_config.a1_scale, quant_config.quant_dtype,
                                                  quant_config.per_act_token_quant, quant_config.block_shape)
            x, scales = x.view(received.x.shape), normalize_batched_scales_shape(scales, received.x.shape[0])
        return x, scales, self._counts, None, None

    def finalize(self, output: torch.Tensor, fused_expert_output: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor,
                 apply_router_weight_on_input: bool, weight_and_reduce_impl: Any) -> None:
        """Collective. Writes to `output` [T, H] the weighted sum of the experts' rows [L, R, H], which are read in place. The
        weights are those passed to prepare."""
        self._exchange.combine(fused_expert_output, self._received, order="per_rank", out=output)
