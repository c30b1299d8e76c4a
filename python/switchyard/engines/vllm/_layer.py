# SPDX-License-Identifier: Apache-2.0
"""Whole MoE layers of vLLM on :class:`switchyard.MoeLayer`: an experts class that includes dispatch and combine, for vLLM's
all-to-all backend ``passthrough``."""
from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.config import kernel
from vllm.distributed import get_ep_group
from vllm.distributed.device_communicators import all2all
from vllm.model_executor.layers.fused_moe import all2all_utils
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.oracle import fp8, unquantized
from vllm.model_executor.layers.fused_moe.prepare_finalize.passthrough import PassThroughPrepareAndFinalize
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8Dynamic128Sym, kFp8Static128BlockSym
from vllm.platforms import current_platform

from ..._abi import names as _names
from ...errors import SwitchyardError
from ...layer import MoeLayer
from ._ranks import Ranks, backend, check_experts, check_parallel, refuse
from ._standard import weighted

_ALL2ALL = "use SWITCHYARD_VLLM=all2all, which exchanges rows for vLLM's own experts"
_REDUCED = TopKWeightAndReduceNoOP()
#: By process group, until vLLM destroys the group's manager.
_ranks: Dict[Any, Ranks] = {}


class SwitchyardManager(all2all.PassThroughAll2AllManager):  # type: ignore[misc]
    """vLLM's manager for the passthrough backend."""

    def destroy(self) -> None:
        """Local. Closes the groups of all layers; later calls of peers end with PeerFailed."""
        if self.cpu_group in _ranks:
            _ranks.pop(self.cpu_group).close()


def _ranks_of(process_group: Any) -> Ranks:
    if process_group not in _ranks:
        _ranks[process_group] = Ranks(process_group)
    return _ranks[process_group]


def config_of(moe: Any, dtype: Any) -> Dict[str, Any]:
    """Returns the keywords of the :class:`MoeLayer` for a FusedMoEConfig.

    Args:
        moe: vLLM's FusedMoEConfig.
        dtype: type of the weights.
    """
    form = {"form": "automatic"}
    if dtype == "fp8_e4m3":  # the fused form keeps a copy of the scales; of separate calls, per_rank takes less time
        form = {"form": "separate", "order": "per_rank"}
    return {"hidden": moe.hidden_dim, "intermediate": moe.intermediate_size_per_partition, "num_experts": moe.num_experts,
            "topk": moe.experts_per_token, "max_tokens": moe.max_num_tokens, "dtype": dtype, "storage": "view",
            "invalid_ids": "count", "captured": bool(moe.max_capture_size), **form}


def check_layer(moe: Any, weight_key: Any, activation_key: Any) -> None:
    """Refuses layers that :class:`MoeLayer` does not support.

    Args:
        moe: vLLM's FusedMoEConfig.
        weight_key, activation_key: vLLM's descriptions of the quantization; None without quantization.

    Raises:
        InvalidArgument: the message names the unsupported part of the configuration and the alternative.
    """
    check_parallel()
    parallel = moe.moe_parallel_config
    if backend() == "cuda" and not current_platform.is_device_capability(90):
        refuse(f"the GPU {current_platform.get_device_name()} with 'layer', which needs compute capability 9.0,", _ALL2ALL)
    if not parallel.use_ep:
        refuse("an MoE layer without expert parallelism", "start vLLM with --enable-expert-parallel")
    if not parallel.use_all2all_kernels:
        refuse(f"tensor parallelism of {parallel.ep_size} without data parallelism, where all ranks have the same tokens,",
               "use --data-parallel-size, or unset SWITCHYARD_VLLM")
    if moe.is_lora_enabled:
        refuse("LoRA (--enable-lora) with 'layer'", "unset SWITCHYARD_VLLM and use --all2all-backend allgather_reducescatter")
    if moe.activation != MoEActivation.SILU:
        refuse(f"the activation {moe.activation.value!r} with 'layer', which computes SwiGLU ('silu'),", _ALL2ALL)
    if moe.has_bias or any(value is not None for value in (moe.swiglu_limit, moe.swiglu_alpha, moe.swiglu_beta)):
        refuse("a bias of experts, or a limit, alpha or beta of SwiGLU, with 'layer'", _ALL2ALL)
    if weight_key is not None and (weight_key != kFp8Static128BlockSym or activation_key != kFp8Dynamic128Sym):
        refuse(f"the quantization {weight_key} with activations {activation_key} with 'layer', which computes bf16 (GPUs: also "
               "f16) and fp8 with 128 x 128 weight scales,", _ALL2ALL)
    config = config_of(moe, moe.in_dtype if weight_key is None else "fp8_e4m3")
    try:
        MoeLayer.memory_required(parallel.ep_size, backend=backend(), **config)
    except SwitchyardError as error:
        refuse(f"a layer with {error.text}", _ALL2ALL)


class SwitchyardExperts(mk.FusedMoEExpertsModular):  # type: ignore[misc]
    """Experts that dispatch, compute and combine in one :class:`MoeLayer`. Each call reads the weights in place, including weights
    that vLLM has reloaded, restored after sleep, or rearranged (EPLB) at the same addresses; for weights at other addresses, the
    next call creates another layer. With EPLB, expert ids are vLLM's physical ids.

    Args:
        moe_config, quant_config: as for any FusedMoEExperts of vLLM.

    Raises:
        InvalidArgument: as for check_layer.
    """

    def __init__(self, moe_config: Any, quant_config: Any) -> None:
        quantized = quant_config.quant_dtype is not None or quant_config.weight_quant_dtype is not None
        block = quant_config.block_shape == [128, 128] and quant_config.quant_dtype == torch.float8_e4m3fn
        weight_key = None if not quantized else kFp8Static128BlockSym if block else quant_config.weight_quant_dtype
        check_layer(moe_config, weight_key, kFp8Dynamic128Sym if block else quant_config.quant_dtype)
        super().__init__(moe_config, quant_config)
        self._config = config_of(moe_config, "fp8_e4m3" if quantized else moe_config.in_dtype)
        self._peers = _ranks_of(get_ep_group().cpu_group)
        self._layer: Optional[MoeLayer] = None
        self._at: Tuple[int, ...] = ()  # addresses of its weights

    # ---- Properties that vLLM reads ----

    @staticmethod
    def is_supported_config(cls: Any, moe_config: Any, weight_key: Any, activation_key: Any, activation_format: Any) \
            -> Tuple[bool, Optional[str]]:
        check_layer(moe_config, weight_key, activation_key)
        return True, None

    @staticmethod
    def activation_format() -> Any:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return weight_key in (None, kFp8Static128BlockSym)

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return bool(activation == MoEActivation.SILU)

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return bool(moe_parallel_config.use_all2all_kernels)

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    def finalize_weight_and_reduce_impl(self) -> Any:
        return _REDUCED

    def workspace_shapes(self, M: int, N: int, K: int, topk: int, global_num_experts: int, local_num_experts: int,
                         expert_tokens_meta: Any, activation: Any) -> Tuple[Tuple[int, ...], Tuple[int, ...], Tuple[int, ...]]:
        return (0,), (0,), (M, K)

    # ---- Calls ----

    def process_weights_after_loading(self, layer: Any) -> None:
        """Collective. Creates the layer; vLLM calls this after it has loaded the weights."""
        self._bind(layer.w13_weight, layer.w2_weight)

    def _bind(self, w13: torch.Tensor, w2: torch.Tensor) -> MoeLayer:
        """Returns the layer for these weights, [L, 2 I, H] and [L, H, I], and their scales. Collective if no layer reads memory at
        these addresses yet."""
        scales = (self.w1_scale, self.w2_scale) if self._config["dtype"] == "fp8_e4m3" else (None, None)
        data = tuple(None if each is None else each.detach() for each in (w13, w2, *scales))
        layer = self._layer = self._peers.layer(data, **self._config)  # type: ignore[arg-type]
        self._at = (w13.data_ptr(), w2.data_ptr())
        check_experts(layer.group, self.moe_config)
        return layer

    def apply(self, output: torch.Tensor, hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor,
              topk_weights: torch.Tensor, topk_ids: torch.Tensor, activation: Any, global_num_experts: int,
              expert_map: Optional[torch.Tensor], a1q_scale: Optional[torch.Tensor], a2_scale: Optional[torch.Tensor],
              workspace13: torch.Tensor, workspace2: torch.Tensor, expert_tokens_meta: Any,
              apply_router_weight_on_input: bool) -> None:
        """Collective. Writes the layer's result [T, H] to `output`."""
        layer: Any = self._layer if self._at == (w1.data_ptr(), w2.data_ptr()) else self._bind(w1, w2)
        if apply_router_weight_on_input:
            layer.forward(weighted(hidden_states, topk_weights), topk_ids, out=output)
        else:
            layer.forward(hidden_states, topk_ids, topk_weights, out=output)

    def take_part(self, output: torch.Tensor) -> None:
        """Collective. Participates in the call of the other ranks if this rank has no tokens: vLLM does not call `apply` then.
        output: [0, H]."""
        if self._layer is None:
            _names.invalid("a rank has no tokens in the first call of a layer, which binds its weights: give each rank a token")
        ids = torch.empty((0, self._config["topk"]), dtype=torch.int32, device=output.device)
        self._layer.forward(torch.empty_like(output), ids, ids.to(torch.float32), out=output)


class SwitchyardPassThrough(PassThroughPrepareAndFinalize):  # type: ignore[misc]
    """Passes tokens and routing unchanged to :class:`SwitchyardExperts`, and refuses all other experts classes."""

    def post_init_setup(self, fused_experts: Any) -> None:
        if not isinstance(fused_experts, SwitchyardExperts):
            refuse(f"{type(fused_experts).__name__}, which vLLM chose for this quantization, with 'layer'", _ALL2ALL)
        self._experts = fused_experts

    def finalize(self, output: torch.Tensor, fused_expert_output: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor,
                 apply_router_weight_on_input: bool, weight_and_reduce_impl: Any) -> None:
        if output is fused_expert_output:  # usually, the experts have already written the result
            return
        if output.shape[0] == 0:
            self._experts.take_part(output)
        else:
            super().finalize(output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input, weight_and_reduce_impl)


def _bind_passthrough(original: Any) -> Any:
    """Returns a replacement of vLLM's bind_passthrough_all2all_backend that selects passthrough for expert parallelism."""

    def bind(moe_backend: str, parallel_config: Any) -> None:
        if not parallel_config.enable_expert_parallel:
            return original(moe_backend, parallel_config)
        if moe_backend != "auto":
            refuse(f"--moe-backend {moe_backend} with 'layer', which computes the experts itself,", "omit it, or " + _ALL2ALL)
        if parallel_config.all2all_backend not in ("allgather_reducescatter", kernel.PASSTHROUGH_ALL2ALL_BACKEND):
            refuse(f"--all2all-backend {parallel_config.all2all_backend} with 'layer', which exchanges rows itself,",
                   "omit it, or " + _ALL2ALL)
        parallel_config.all2all_backend = kernel.PASSTHROUGH_ALL2ALL_BACKEND
        return None

    return bind


def _backends(first: Any) -> Any:
    """Returns a replacement of an oracle's list of backends: all of them, starting with `first`, which is always supported. The
    oracle may remove others."""

    def priority_backends(moe_config: Any, weight_key: Any = None, activation_key: Any = None) -> List[Any]:
        check_layer(moe_config, weight_key, activation_key)
        return [first, *(each for each in type(first) if each is not first)]

    return priority_backends


def _experts(first: Any) -> Any:
    """Returns a replacement of an oracle's mapping from backends to experts classes. `first`: the backend that leaves weights in
    the checkpoint's format; all others are refused."""

    def experts_of(backend: Any) -> List[Any]:
        if backend is not first:
            refuse(f"the MoE backend {backend.value} with 'layer', which computes the experts itself,",
                   "unset the variable that selects it (VLLM_USE_DEEP_GEMM, VLLM_MOE_USE_DEEP_GEMM)")
        return [SwitchyardExperts]

    return experts_of


def install(patches: Any) -> None:
    """Selects the all-to-all backend passthrough for expert parallelism, and :class:`SwitchyardExperts` for unquantized and fp8
    weights."""
    patches.replace(kernel, "bind_passthrough_all2all_backend", _bind_passthrough(kernel.bind_passthrough_all2all_backend))
    patches.replace(all2all_utils, "PassThroughPrepareAndFinalize", SwitchyardPassThrough)
    patches.replace(all2all, "PassThroughAll2AllManager", SwitchyardManager)
    for oracle, first in ((unquantized, unquantized.UnquantizedMoeBackend.TRITON), (fp8, fp8.Fp8MoeBackend.TRITON)):
        patches.replace(oracle, "_get_priority_backends", _backends(first))
        patches.replace(oracle, "backend_to_kernel_cls", _experts(first))
