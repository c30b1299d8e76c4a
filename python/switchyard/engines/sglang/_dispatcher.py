# SPDX-License-Identifier: Apache-2.0
"""Token dispatcher for SGLang's ``--moe-a2a-backend deepep``. It returns SGLang's formats deepep_normal and deepep_ll, so SGLang's
runners for DeepEP compute the experts."""
from __future__ import annotations

import logging
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch
from sglang.srt.batch_overlap.two_batch_overlap import MaybeTboDeepEPDispatcher
from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder
from sglang.srt.layers import deep_gemm_wrapper
from sglang.srt.layers.dp_attention import get_is_extend_in_batch
from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher
from sglang.srt.layers.moe.token_dispatcher.deepep import (DeepEPLLDispatchOutput, DeepEPNormalDispatchOutput,
                                                           DeepEPPDispatchHooks, _deepep_precompile_tp_barrier)
from sglang.srt.layers.moe.utils import (DeepEPMode, get_deepep_config, get_deepep_mode, get_deepep_output_dtype,
                                         get_moe_a2a_backend, is_tbo_enabled)
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.utils import load_json_config

from ..._abi import names as _names
from ...deep_ep import _normal
from ...deep_ep._copies import Shape as NormalShape
from ...deep_ep._events import EventHandle, EventOverlap
from . import _shared

_logger = logging.getLogger(__name__)

#: Codes of the arguments quantize="f32" and size="exact" of Exchange.dispatch.
_FP8, _EXACT = 1, 0
#: Supported row formats; True: rows are sent as fp8. On GPUs, SGLang also replaces int8 by fp8.
_SENT = {"bf16": False, "fp8": True, "int8": True}


def around_factory(original: Callable[..., Any], moe_runner_config: Any, quant_method: Any) -> Any:
    """Hook of type AROUND on SGLang's create_moe_dispatcher."""
    backend = get_moe_a2a_backend()
    if not backend.is_deepep():
        _logger.warning("SWITCHYARD_SGLANG=all2all has no effect with --moe-a2a-backend %s; it needs deepep", backend.value)
        return original(moe_runner_config, quant_method)
    return Dispatcher(moe_runner_config, quant_method)


class Dispatcher(MaybeTboDeepEPDispatcher):
    """Dispatcher of one MoE layer: SGLang's class for one batch or two half-batches, with one dispatcher of Switchyard's for each.

    Args:
        config: SGLang's MoeRunnerConfig.
        quant_method: SGLang's quantization method of the layer.

    Raises:
        InvalidArgument: a configuration that is not supported.
    """

    def __init__(self, config: Any, quant_method: Any) -> None:
        BaseDispatcher.__init__(self)
        _shared.world_of(config)
        shape = _shared.Shape(config.hidden_size, config.num_experts, config.top_k, _shared.decode_tokens())
        exchanges, halves = _shared.shared(config.hidden_size), 2 if is_tbo_enabled() else 1
        self._inners = [_Half(exchanges, shape, halves, half, config.runner_backend) for half in range(halves)]
        if not isinstance(quant_method, UnquantizedFusedMoEMethod):  # that method selects bf16 rows when the weights are loaded
            self.set_quant_config({})


class _Query(NamedTuple):
    """Argument of SGLang's get_deepep_output_dtype for one mode."""

    quant_config: Dict[str, Any]
    runner_backend: Any
    dispatch_mode: DeepEPMode


class _Half(BaseDispatcher):
    """Dispatcher of the batch or, in two-batch overlap, of one half of it. Steps of the two halves may interleave in any order
    that is the same on all ranks."""

    expert_mask_gpu = None  #: part of the interface; only AITER uses it

    def __init__(self, exchanges: _shared.Shared, shape: _shared.Shape, halves: int, half: int, runner_backend: Any) -> None:
        super().__init__()
        self._exchanges, self._shape, self._halves, self._half = exchanges, shape, halves, half
        self._modes, self.runner_backend = get_deepep_mode(), runner_backend
        self._dispatch_hooks = DeepEPPDispatchHooks()
        self._continue: Optional[Callable[[], Any]] = None
        self._handle: Any = None
        self._fp8: Dict[DeepEPMode, bool] = {}
        self._decode: Optional[_shared.LowLatencyCalls] = None  #: calls of decode in the chosen format; None: not created yet
        given = get_deepep_config()
        self._sms = int(load_json_config(given)["normal_dispatch"]["num_sms"]) if given else 0
        self._choose({})

    # ---- Configuration ----

    def set_quant_config(self, quant_config: Dict[str, Any]) -> None:
        """Collective. Chooses the row format by SGLang's rules for DeepEP, and creates the low-latency objects for it.

        Raises:
            InvalidArgument: a format that is not available.
        """
        super().set_quant_config(quant_config)
        self._choose(quant_config)
        if any(self._fp8.values()) and self._shape.hidden % 128:
            _names.invalid(f"fp8 rows of hidden size {self._shape.hidden}: SGLang's runners need a multiple of 128; use "
                           f"--deepep-dispatcher-output-dtype bf16")
        if self._modes.enable_low_latency():  # now, because SGLang sizes its caches, and captures graphs, before the first decode
            self._calls()

    def _calls(self) -> _shared.LowLatencyCalls:
        """Returns the calls of decode. The first call after a choice of format is collective."""
        if self._decode is None:
            scales = "f32" if self._fp8[DeepEPMode.LOW_LATENCY] else None
            self._decode = self._exchanges.low_latency(self._shape, self._halves, scales)[self._half]
        return self._decode

    def _choose(self, quant_config: Dict[str, Any]) -> None:
        for mode in (DeepEPMode.NORMAL, DeepEPMode.LOW_LATENCY):
            name = get_deepep_output_dtype(_Query(quant_config, self.runner_backend, mode)).value
            if name not in _SENT:
                _names.invalid(f"rows in {name}: Switchyard sends bf16 or fp8; use --deepep-dispatcher-output-dtype bf16 or fp8")
            self._fp8[mode] = _SENT[name]
        self._decode = None

    def register_deepep_dispatch_hook(self, hook: Callable[[Any], None]) -> Any:
        """Registers a callback that enqueues work between sending and receiving."""
        return self._dispatch_hooks.register_hook(hook)

    def set_overlap_args(self, combine_overlap_args: Any, meta_overlap_args: Any) -> None:
        if combine_overlap_args is not None:
            _names.invalid("single-batch overlap is not available with Switchyard's plug-in; use --enable-two-batch-overlap")

    # ---- Dispatch ----

    def dispatch(self, hidden_states: torch.Tensor, topk_output: Any) -> Any:
        """Collective. Sends the tokens to their experts.

        Args:
            hidden_states: bf16 [T, H].
            topk_output: SGLang's StandardTopKOutput with topk_ids int32 or int64 [T, K], -1 for no expert, and topk_weights
                float32 [T, K]. In decode, the weights are sent with the tokens.

        Returns:
            DeepEPNormalDispatchOutput in normal mode (prefill), DeepEPLLDispatchOutput in low-latency mode (decode). The latter is
            valid until the second next low-latency dispatch.
        """
        hooked = bool(self._dispatch_hooks.hook_dict)
        self._send(hidden_states, topk_output, split=hooked)
        if hooked:
            self._dispatch_hooks(self)
        return self.dispatch_b()

    def dispatch_a(self, hidden_states: torch.Tensor, topk_output: Any) -> None:
        """First half of :meth:`dispatch`."""
        self._send(hidden_states, topk_output, split=True)

    def dispatch_b(self) -> Any:
        """Second half of :meth:`dispatch`."""
        return self._next("dispatch_b", "dispatch_a")

    def _send(self, x: torch.Tensor, topk_output: Any, split: bool) -> None:
        self._continue = self._handle = None  # those of an abandoned pass, also if this call fails
        _deepep_precompile_tp_barrier()  # ranks reach this call at very different times while DeepGEMM compiles
        low_latency = self._modes.resolve(get_is_extend_in_batch()) == DeepEPMode.LOW_LATENCY
        ids, weights = topk_output.topk_ids, topk_output.topk_weights
        self._continue = (self._low_latency if low_latency else self._normal)(x.contiguous(), ids, weights, split)

    def _next(self, step: str, before: str) -> Any:
        following, self._continue = self._continue, None
        if following is None:
            _names.invalid(f"{step} without {before}")
        return following()

    def _low_latency(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, split: bool) -> Callable[[], Any]:
        calls, shape, tokens = self._calls(), self._shape, x.shape[0]
        if tokens > shape.tokens:
            with calls.exchange.group._call:  # reports the error to the other ranks
                _names.invalid(f"hidden_states has {tokens} tokens: SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK = {shape.tokens} "
                               f"allows no more")
        arrived = calls.dispatch(x, ids.contiguous(), weights.contiguous(), split)
        expected = (tokens * self._exchanges.group.size * ids.shape[1] + shape.experts) // shape.experts

        def receive() -> DeepEPLLDispatchOutput:
            received = arrived()
            self._handle = (calls, received, weights)
            get_global_expert_distribution_recorder().on_deepep_dispatch_low_latency(received.rows)
            return DeepEPLLDispatchOutput(received.x, received.scales, ids, weights, received.rows, expected)

        return receive

    def _normal(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, split: bool) -> Callable[[], Any]:
        before = EventOverlap(EventHandle()) if split else None

        def receive() -> DeepEPNormalDispatchOutput:
            (rows, scales, its_ids, its_weights, counts, self._handle), event = self._exchanges.buffer._streams.run(
                lambda: self._exchange(x, ids, weights), (x, ids, weights), before, split)
            if split:
                event.current_stream_wait()
            recorder = get_global_expert_distribution_recorder()
            per_rank, per_expert, _ = (_normal.layout_of(ids, self._shape.experts, self._exchanges.group.size) if recorder.recording
                                       else (None, None, None))
            recorder.on_deepep_dispatch_normal(counts, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=None,
                                               num_tokens_per_expert=per_expert)
            return DeepEPNormalDispatchOutput(rows, scales, its_ids, its_weights, counts)

        return receive

    def _num_sms(self) -> int:
        """Returns the number of multiprocessors from ``--deepep-config``, or 0, for which the library chooses the number."""
        return max(min(self._sms, self._exchanges.buffer._most_sms), 0)

    def _exchange(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Tuple[Any, ...]:
        """Returns rows, scales or None, local ids int64, weights, the aligned counts of this rank's experts, and the handle. The
        host waits for the counts, because the format requires them in host memory."""
        buffer, jit = self._exchanges.buffer, deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM
        shape = NormalShape(self._shape.hidden, self._shape.experts, ids.shape[1])
        quantize = _FP8 if jit and self._fp8[DeepEPMode.NORMAL] else 0  # without DeepGEMM, SGLang's prefill takes bf16 rows
        exchange, generation = buffer._normal.choose(shape, x.shape[0], 0)
        options = (quantize, _EXACT, 0, 0, 0, self._num_sms())
        rows, scales, handle = exchange._dispatch(x, ids.contiguous(), weights.contiguous(), None, options)
        its_ids, its_weights = handle.topk_ids.long(), handle.topk_weights.clone()
        call = _normal.Call(x, ids, weights, ids, ids, 128 if jit else 1, 0, 1, 0)
        counts: List[int] = _normal._counts(buffer._normal, call, handle, buffer._streams)
        kept = buffer._normal.keep(generation, shape, x.shape[0], rows.shape[0])
        return (rows, None if scales is None else scales.contiguous(), its_ids, its_weights, counts,
                _normal.NormalHandle.of(exchange, handle, 1, x.device, kept))

    # ---- Combine ----

    def combine(self, combine_input: Any) -> torch.Tensor:
        """Collective. Returns the sums of the experts' rows for the tokens of the last dispatch, bf16 [T, H].

        In decode, each rank multiplies its experts' rows by the weights passed to dispatch and returns one bf16 sum per token
        (``order="per_rank"``); later changes of that tensor have no effect. If all ranks pass another tensor of weights, for
        example from a hook, each expert's row returns and is multiplied by these weights (``"per_route"``). If only some ranks do,
        all raise Mismatch.

        Args:
            combine_input: DeepEPNormalCombineInput, with rows already multiplied by their weights, or DeepEPLLCombineInput.
        """
        self._return(combine_input, split=False)
        return self.combine_b()

    def combine_a(self, combine_input: Any) -> None:
        """First half of :meth:`combine`."""
        self._return(combine_input, split=True)

    def combine_b(self) -> torch.Tensor:
        """Second half of :meth:`combine`."""
        return self._next("combine_b", "combine_a")

    def _return(self, combine_input: Any, split: bool) -> None:
        known, self._handle = self._handle, None
        if known is None or self._continue is not None:
            _names.invalid("combine without dispatch")
        _deepep_precompile_tp_barrier()
        y, _, weights = combine_input
        if not isinstance(known, _normal.NormalHandle):
            calls, received, sent = known
            self._continue = calls.combine(y, received, None if weights is sent else weights, split)
            return
        sms = self._num_sms()
        (out, _), event = self._exchanges.buffer._streams.run(
            lambda: known.exchange._combine(y, known.handle, None, num_sms=sms), (y,), None, split)

        def receive() -> torch.Tensor:
            if split:
                event.current_stream_wait()
            return out

        self._continue = receive
