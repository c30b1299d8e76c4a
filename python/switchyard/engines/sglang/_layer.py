# SPDX-License-Identifier: Apache-2.0
"""The whole MoE layer as a runner core of SGLang: one call of :class:`switchyard.MoeLayer` dispatches tokens, computes experts and
combines the results.

The dispatcher passes tokens through, and the core replaces that of ``--moe-runner-backend deep_gemm``, which both the bf16 and
the block-fp8 quantization methods of SGLang can select. SGLang adds the shared expert after the layer, in the models' code, so
``MoeLayer.forward(add=True)`` is not used here.
"""
from __future__ import annotations

import logging
from typing import Any, Callable, Dict, Optional, Tuple

import torch
from sglang.srt.batch_overlap.two_batch_overlap import MaybeTboDeepEPDispatcher
from sglang.srt.layers.dp_attention import get_is_extend_in_batch
from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore
from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput, StandardDispatchOutput
from sglang.srt.layers.moe.utils import DeepEPMode, MoeRunnerBackend, get_deepep_mode, get_moe_a2a_backend, is_tbo_enabled
from sglang.srt.layers.quantization.fp8 import Fp8MoEMethod
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.runtime_context import get_exec, get_lora

from ..._abi import names as _names
from ...layer import MoeLayer
from . import _shared

_logger = logging.getLogger(__name__)

#: The runner whose core is replaced.
RUNNER = MoeRunnerBackend.DEEP_GEMM.value
#: Number of weight rows and of columns that share a scale.
_BLOCK = 128


def around_factory(original: Callable[..., Any], moe_runner_config: Any, quant_method: Any) -> Any:
    """Hook of type AROUND on SGLang's create_moe_dispatcher."""
    if not get_moe_a2a_backend().is_deepep():
        backend = get_moe_a2a_backend().value
        _logger.warning("SWITCHYARD_SGLANG=layer has no effect with --moe-a2a-backend %s; it needs deepep", backend)
        return original(moe_runner_config, quant_method)
    core = getattr(getattr(quant_method, "runner", None), "runner_core", None)
    if not isinstance(core, Core):
        _names.invalid(f"{type(quant_method).__name__} has not selected the runner {RUNNER}: SWITCHYARD_SGLANG=layer needs "
                       f"--moe-runner-backend {RUNNER} and bf16 or block-fp8 experts; SWITCHYARD_SGLANG=all2all does not")
    return Dispatcher(core)


def _check(config: Any) -> None:
    """Raises InvalidArgument if MoeLayer does not support the layer's function or formats."""
    instead = "use SWITCHYARD_SGLANG=all2all"
    if not get_moe_a2a_backend().is_deepep():
        _names.invalid(f"--moe-a2a-backend {get_moe_a2a_backend().value}: SWITCHYARD_SGLANG=layer needs deepep")
    if config.activation != "silu" or not config.is_gated:
        gate = "" if config.is_gated else " without a gate"
        _names.invalid(f"activation {config.activation!r}{gate}: the layer computes SwiGLU; {instead}")
    for name in ("swiglu_limit", "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit"):
        if getattr(config, name) is not None:
            _names.invalid(f"{name} = {getattr(config, name)}: the layer computes SwiGLU without limits; {instead}")
    for name in ("apply_router_weight_on_input", "no_combine"):
        if getattr(config, name):
            _names.invalid(f"{name}: the layer multiplies outputs by router weights and sums them; {instead}")
    if getattr(config.layer, "with_bias", False):
        _names.invalid(f"biases of experts: the layer has none; {instead}")
    if get_lora().enable_lora:
        _names.invalid("--enable-lora: the layer has no adapters; use --moe-a2a-backend none")
    _check_recorder(instead)
    _check_weights(config, getattr(config.layer, "quant_method", None), instead)


def _check_recorder(instead: str) -> None:
    """Refuses recorders of tokens per expert, including that of EPLB, that read the counts of SGLang's dispatcher instead of the
    router's ids."""
    moe, modes = get_exec().moe, get_deepep_mode()
    recorder = moe.expert_distribution_recorder_mode or ("stat" if moe.enable_eplb else None)
    if recorder not in (None, "per_token") and (recorder == "stat_approx" or modes != DeepEPMode.NORMAL):
        balancer = " (--enable-eplb)" if moe.enable_eplb else ""
        _names.invalid(f"--expert-distribution-recorder-mode {recorder} with --deepep-mode {modes.value}{balancer}: the layer does "
                       f"not count tokens per expert; use the recorder mode stat and --deepep-mode normal, or {instead}")


def _check_weights(config: Any, method: Any, instead: str) -> None:
    if isinstance(method, UnquantizedFusedMoEMethod):
        return
    if not isinstance(method, Fp8MoEMethod) or method.use_mxfp8 or method.is_fp4_expert \
            or list(method.weight_block_size or []) != [_BLOCK, _BLOCK]:
        _names.invalid(f"{type(method).__name__}: the layer takes bf16 weights, or fp8 weights with scales of {_BLOCK} x {_BLOCK}; "
                       f"{instead}")
    for name in ("hidden_size", "intermediate_size_per_partition"):
        if getattr(config, name) % _BLOCK:
            _names.invalid(f"{name} = {getattr(config, name)}: must be a multiple of {_BLOCK} for fp8 weights; {instead}")


class Core(DispatchMoeRunnerCore):
    """This rank's experts of one layer, and the exchange with the other ranks.

    Args:
        config: SGLang's MoeRunnerConfig, with its layer.

    Raises:
        InvalidArgument: a configuration that is not supported.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        _check(config)
        _shared.world_of(config)
        self._modes = get_deepep_mode()
        self._made: Dict[str, MoeLayer] = {}
        self._of: Tuple[Any, ...] = ()  #: addresses and shapes of the weights of `_made`
        shape: Dict[str, Any] = {"hidden": config.hidden_size, "intermediate": config.intermediate_size_per_partition,
                                 "num_experts": config.num_experts, "topk": config.top_k, "dtype": "bf16", "storage": "view"}
        self._shape = shape
        self._exchanges = _shared.shared(config.hidden_size)
        self._fp8 = isinstance(config.layer.quant_method, Fp8MoEMethod)
        self._copies: Tuple[torch.Tensor, ...] = ()  #: CPU: bf16 copies of fp8 weights that EPLB moves
        if self._fp8 and self._exchanges.group.backend == "cuda":
            # The fused form keeps a copy of the scales, which EPLB moves; of separate calls, per_rank takes less time.
            shape.update(dtype="fp8_e4m3", form="separate", order="per_rank")
        self._configs: Dict[str, Dict[str, Any]] = {}
        if self._modes.enable_normal():
            self._configs["prefill"] = {**shape, "max_tokens": _shared.prefill_tokens(), "exchange": "normal", "captured": False}
        if self._modes.enable_low_latency():
            self._configs["decode"] = {**shape, "max_tokens": _shared.decode_tokens()}
        for each in self._configs.values():  # refuses shapes that MoeLayer does not support
            MoeLayer.heap_bytes(self._exchanges.group.size, backend=self._exchanges.group.backend, **each)

    @property
    def runner_backend(self) -> MoeRunnerBackend:
        return MoeRunnerBackend.DEEP_GEMM

    def load(self) -> None:
        """Collective for the first layer of a shape. Creates the layers for the module's loaded weights. After a reload into the
        same memory, keeps the layers, so that GPU graphs remain valid; only converted fp8 weights (CPU) get new layers."""
        w13, w2, scales = self._weights()
        now = tuple((each.data_ptr(), tuple(each.shape)) for each in (w13, w2, *scales.values()))
        if self._made and now == self._of and not (self._fp8 and not scales):
            return
        self._copies = (w13, w2) if self._fp8 and not scales and get_exec().moe.enable_eplb else ()
        layers = self._exchanges.layers(self._configs)
        layers.drop(self._made)
        self._made, self._of = layers.make(w13, w2, scales), now

    def _weights(self) -> Tuple[torch.Tensor, torch.Tensor, Dict[str, torch.Tensor]]:
        """Returns w13 (gate rows first), w2, and the scales of fp8 weights as keywords of MoeLayer. On the CPU, where MoeLayer
        computes in bf16, converts fp8 weights to bf16."""
        layer = self.config.layer
        w13, w2 = layer.w13_weight.detach(), layer.w2_weight.detach()
        if not self._fp8:
            return w13, w2, {}
        s13, s2 = layer.w13_weight_scale_inv.detach(), layer.w2_weight_scale_inv.detach()
        if self._shape["dtype"] == "bf16":
            return _converted(w13, s13), _converted(w2, s2), {}
        return w13, w2, {"w13_scales": s13, "w2_scales": s2}

    def run_from_dispatch(self, dispatch_output: Any, quant_info: Any, runner_config: Any,
                          hooks: Any = None) -> StandardCombineInput:
        """Collective. Runs the layer.

        Args:
            dispatch_output: StandardDispatchOutput with hidden_states bf16 [T, H] and global expert ids [T, K], -1 for no expert.
            quant_info: not used; the layers refer to the module's weights.
            runner_config: not used; equal to that of the constructor.
            hooks: not used; the constructor refuses adapters.

        Returns:
            StandardCombineInput with bf16 [T, H].
        """
        if not self._made:
            self.load()
        low_latency = self._modes.resolve(get_is_extend_in_batch()) == DeepEPMode.LOW_LATENCY
        for copy, weights in zip(self._copies, self._weights()[:2] if self._copies else ()):
            copy.copy_(weights)
        topk = dispatch_output.topk_output
        x = dispatch_output.hidden_states.contiguous()
        layer = self._made["decode" if low_latency else "prefill"]
        return StandardCombineInput(layer.forward(x, topk.topk_ids, topk.topk_weights))


def _converted(weights: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Converts block-fp8 weights [L, R, C] with scales [L, ceil(R / 128), ceil(C / 128)] to bf16."""
    wide = scales.repeat_interleave(_BLOCK, 1)[:, :weights.shape[1]].repeat_interleave(_BLOCK, 2)[:, :, :weights.shape[2]]
    return (weights.float() * wide).bfloat16()


class Dispatcher(MaybeTboDeepEPDispatcher):
    """Passes tokens to the layer's core, and its results back. `core`: the core of the layer's runner."""

    def __init__(self, core: Core) -> None:
        BaseDispatcher.__init__(self)
        self._core = core
        self._inners = [_Through() for _ in range(2 if is_tbo_enabled() else 1)]

    def set_quant_config(self, quant_config: Dict[str, Any]) -> None:
        """SGLang's quantization methods call this after weights are loaded or reloaded."""
        super().set_quant_config(quant_config)
        self._core.load()


class _Through(BaseDispatcher):
    """Dispatcher of a batch or of one half of it."""

    expert_mask_gpu = None  #: part of the interface; only AITER uses it
    _given: Optional[Any] = None

    def dispatch(self, hidden_states: torch.Tensor, topk_output: Any) -> StandardDispatchOutput:
        return StandardDispatchOutput(hidden_states=hidden_states, hidden_states_scale=None, topk_output=topk_output)

    def dispatch_a(self, hidden_states: torch.Tensor, topk_output: Any) -> None:
        self._given = self.dispatch(hidden_states, topk_output)

    def dispatch_b(self) -> Any:
        given, self._given = self._given, None
        return given

    def combine(self, combine_input: StandardCombineInput) -> torch.Tensor:
        return combine_input.hidden_states

    def combine_a(self, combine_input: StandardCombineInput) -> None:
        self._given = combine_input

    def combine_b(self) -> torch.Tensor:
        given, self._given = self._given, None
        assert given is not None
        return given.hidden_states
