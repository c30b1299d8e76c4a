# SPDX-License-Identifier: Apache-2.0
"""Groups and exchanges that all MoE layers of a process share, and the checks of SGLang's configuration common to both forms."""
from __future__ import annotations

import logging
import os
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch

from ... import deep_ep
from ..._abi import names as _names
from ...deep_ep._buffer import Buffer
from ...group import Group
from ...layer import MoeLayer
from ...low_latency import LowLatency, Received
from . import _hooks

_logger = logging.getLogger(__name__)

#: Environment variable: maximum number of tokens of a rank in a prefill pass, for ``layer``.
MAX_TOKENS = "SWITCHYARD_SGLANG_MAX_TOKENS"
#: Bytes of a group's heap in addition to those of its objects.
_SPARE = 1 << 20
#: Seconds before a call raises PeerTimeout (as in DeepEP), and before the construction of a group does, because ranks load weights
#: in between.
_TIMEOUTS = {"timeout": 100.0, "rendezvous_timeout": 600.0}


class Shape(NamedTuple):
    """Sizes of a low-latency exchange."""

    hidden: int
    experts: int
    topk: int
    tokens: int  #: maximum number of tokens of a rank in a low-latency call


class Shared:
    """Exchanges of one process group. All ranks create the same objects in the same order."""

    def __init__(self, process_group: Any, hidden: int) -> None:
        world = torch.distributed.get_world_size(process_group)
        size = deep_ep.Config().get_nvl_buffer_size_hint(2 * hidden, world)
        self.buffer = Buffer(process_group, size, explicitly_destroy=True)
        group = self.buffer.runtime
        assert group is not None
        if group.hosts > 1:
            hosts = group.hosts
            self.buffer.destroy()
            _names.invalid(f"the {world} ranks are on {hosts} hosts: the plug-in needs all on one host; unset SWITCHYARD_SGLANG to "
                           f"use SGLang's own deepep")
        group.set_timeout(_TIMEOUTS["timeout"])
        self.group, self._process_group = group, process_group
        self._low_latency: Dict[Tuple[Any, ...], List[LowLatencyCalls]] = {}
        self._layers: Dict[Tuple[Any, ...], Layers] = {}
        _logger.info("Switchyard moves the tokens of MoE layers between %d ranks (%s)", world, group.backend)

    def _another(self, heap_bytes: int) -> Group:
        """Collective. Returns another group of the same ranks."""
        device = {} if self.group.backend == "cpu" else {"device": self.buffer._index}
        return Group.from_process_group(self._process_group, heap_bytes + _SPARE, backend=self.group.backend, **_TIMEOUTS, **device)

    def low_latency(self, shape: Shape, halves: int, scales: Optional[str]) -> List["LowLatencyCalls"]:
        """Returns the low-latency calls of each half of a batch. Calls of different halves may be in flight concurrently. The first
        call with these arguments is collective."""
        key = (shape, halves, scales)
        if key not in self._low_latency:
            config = {"hidden": shape.hidden, "num_experts": shape.experts, "topk": shape.topk, "max_tokens": shape.tokens,
                      "scales": scales, "dtype": "bf16", "scale_order": "column_major"}
            group = self._another(halves * LowLatency.heap_bytes(self.group.size, **config))
            device = torch.device("cpu") if group.backend == "cpu" else torch.device("cuda", self.buffer._index)
            like = torch.empty((0, shape.hidden), dtype=torch.bfloat16, device=device)
            self._low_latency[key] = [LowLatencyCalls(LowLatency(group, **config), like, self.buffer._streams) for _ in range(halves)]
        return self._low_latency[key]

    def layers(self, configs: Dict[str, Dict[str, Any]]) -> "Layers":
        """Returns the layers with these keywords of :class:`MoeLayer`, by name. The first call with them is collective."""
        key = tuple((name, tuple(each.items())) for name, each in configs.items())
        if key not in self._layers:
            heap = sum(MoeLayer.heap_bytes(self.group.size, backend=self.group.backend, **each) for each in configs.values())
            self._layers[key] = Layers(self._another(heap), configs)
        return self._layers[key]

    def _others(self) -> List[Group]:
        """Returns the groups of low-latency objects and layers."""
        groups = [each[0].exchange.group for each in self._low_latency.values()] + [each.group for each in self._layers.values()]
        return list({id(each): each for each in groups}.values())

    def check(self) -> None:
        """Local. Raises the pending error of this rank in any open group, if any."""
        for group in [self.group, *self.buffer._normal.groups(), *self._others()]:
            if not group.closed:
                group.check()

    def close(self) -> None:
        for group in self._others():
            group.close()
        self.buffer.destroy()


class LowLatencyCalls:
    """Calls of one :class:`LowLatency`, whose dispatches fill two outputs alternately. `streams` orders them with all other calls of
    the process. `like`: a tensor of the kind of the outputs.

    Each method returns a function that returns the call's result. If `split`, the method executes the sending half of the call,
    and the function the other half, on the same stream; otherwise, the method executes the whole call. If the function was not
    called before the next call, for example because the model raised an exception, that call first executes the missing half."""

    def __init__(self, exchange: LowLatency, like: torch.Tensor, streams: Any) -> None:
        self.exchange, self._streams = exchange, streams
        self._next, self._last = exchange.make_output(like), exchange.make_output(like)
        self._missing: Optional[Callable[[], Any]] = None

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, split: bool) -> Callable[[], Received]:
        """Collective. Sends rows with their ids and weights into the output that the previous dispatch did not use."""
        call, into = self.exchange.dispatch_async if split else self.exchange.dispatch, self._next
        made = self._call(lambda: call(x, ids, weights, output=into), split)
        self._next, self._last = self._last, into
        return made

    def combine(self, y: torch.Tensor, received: Received, weights: Optional[torch.Tensor], split: bool) -> Callable[[], torch.Tensor]:
        """Collective. Sums the rows `y`. weights: None: each rank multiplies its experts' rows by the weights of the dispatch
        and returns one sum per token; otherwise, each expert's row returns, and this rank multiplies it by `weights`. Must be
        None on all ranks or on none."""
        call, order = self.exchange.combine_async if split else self.exchange.combine, "per_rank" if weights is None else "per_route"
        return self._call(lambda: call(y, received, topk_weights=weights, order=order), split)

    def _call(self, call: Callable[[], Any], split: bool) -> Callable[[], Any]:
        missing, self._missing = self._missing, None
        if missing is not None:
            missing()
        made = self._streams.here(call)
        if not split:
            return lambda: made
        other_half = self._streams.on_stream_of(made.wait)

        def receive() -> Any:
            if self._missing is receive:
                self._missing = None
            return other_half()

        self._missing = receive
        return receive


class Layers:
    """Layers of all modules of one shape, which share all memory except their weights."""

    def __init__(self, group: Group, configs: Dict[str, Dict[str, Any]]) -> None:
        self.group, self._configs = group, configs
        self._first: Dict[str, MoeLayer] = {}

    def make(self, w13: Any, w2: Any, scales: Dict[str, Any]) -> Dict[str, MoeLayer]:
        """Returns the layers of one module, by name. Collective for the first module; all ranks create them in the same order."""
        made = {}
        for name, config in self._configs.items():
            first = self._first.get(name)
            made[name] = (MoeLayer(self.group, w13, w2, **scales, **config) if first is None else
                          first.with_weights(w13, w2, **scales))
        if not self._first:
            chosen = "; ".join(f"{name}: {each.implementation}" for name, each in made.items())
            _logger.info("Switchyard computes MoE layers: %s", chosen)
            self._first = dict(made)
        return made

    def drop(self, made: Dict[str, MoeLayer]) -> None:
        """Closes the layers of a module, except those of the first module, on which all others depend."""
        for name, each in made.items():
            if each is not self._first[name]:
                each.close()


_shared: List[Tuple[Any, Shared]] = []


def shared(hidden: int) -> Shared:
    """Returns the exchanges of SGLang's tensor-parallel group, which is also the group of SGLang's DeepEP dispatcher. The first
    call is collective."""
    from sglang.srt.layers.moe.token_dispatcher.deepep import DeepEPBuffer
    from sglang.srt.runtime_context import get_parallel

    process_group = get_parallel().tp_group.device_group
    for known, each in _shared:
        if known is process_group:
            return each
    STEPS.attach()
    made = Shared(process_group, hidden)
    _shared.append((process_group, made))
    DeepEPBuffer._state().buffer = made.buffer  # for SGLang's clean_buffer, which reads its low_latency_mode
    return made


def check_groups() -> None:
    """Local. Raises the pending error of this rank, if any, for example PeerTimeout of a call in a replayed graph."""
    for _, each in _shared:
        each.check()


#: Makes each pass of a model runner raise pending errors, because replayed graphs execute no Python code. Passes of idle
#: data-parallel ranks, draft models and split prefills are calls of this method, too. Attached when the first layer is built.
STEPS = _hooks.AfterEach("sglang.srt.model_executor.model_runner", "ModelRunner.forward", check_groups)


def close() -> None:
    """Closes the exchanges of all process groups."""
    from sglang.srt.layers.moe.token_dispatcher.deepep import DeepEPBuffer

    state = DeepEPBuffer._state()
    while _shared:
        made = _shared.pop()[1]
        if state.buffer is made.buffer:
            state.buffer = None
        made.close()


# ---- Configuration ----


def world_of(config: Any) -> int:
    """Returns the number of ranks that exchange the tokens of a layer.

    Args:
        config: SGLang's MoeRunnerConfig.

    Raises:
        InvalidArgument: a combination that neither form supports.
    """
    from sglang.srt.layers import deep_gemm_wrapper
    from sglang.srt.layers.moe.utils import is_sbo_enabled
    from sglang.srt.runtime_context import get_exec, get_parallel

    parallel, elastic = get_parallel(), get_exec().moe.elastic_ep_backend
    world = torch.distributed.get_world_size(parallel.tp_group.device_group)
    if parallel.moe_tp_size != 1 or parallel.moe_ep_size != world:
        _names.invalid(f"--ep-size {parallel.moe_ep_size} with --tp-size {world}: Switchyard needs --ep-size {world}, so that each "
                       f"expert is on one rank")
    if elastic is not None:
        _names.invalid(f"--elastic-ep-backend {elastic}: the number of physical experts may change; unset SWITCHYARD_SGLANG")
    if config.num_experts % world:
        _names.invalid(f"{config.num_experts} experts on {world} ranks: must be a multiple; --ep-num-redundant-experts adds some")
    if config.params_dtype not in (None, torch.bfloat16):
        _names.invalid(f"--dtype {config.params_dtype}: Switchyard's plug-in needs --dtype bfloat16")
    if config.hidden_size % 8:
        _names.invalid(f"hidden size {config.hidden_size}: must be a multiple of 8; use --moe-a2a-backend none")
    if not 1 <= config.top_k <= 32:
        _names.invalid(f"{config.top_k} experts per token: must be 1 to 32; use --moe-a2a-backend none")
    if is_sbo_enabled():
        _names.invalid("--enable-single-batch-overlap: not available with Switchyard's plug-in (SGLang refuses it on Hopper GPUs); "
                       "use --enable-two-batch-overlap")
    if deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0:
        _names.invalid("DeepGEMM packs scales on this GPU (Blackwell): Switchyard is for Hopper GPUs; unset SWITCHYARD_SGLANG to "
                       "use SGLang's own deepep")
    return world


def decode_tokens() -> int:
    """Returns the maximum number of tokens of a rank in a decode pass, from SGLang's own variable. It may exceed 1024."""
    from sglang.srt.environ import envs

    tokens = int(envs.SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK.get())
    if not 1 <= tokens <= 65535:
        _names.invalid(f"SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK = {tokens}: must be 1 to 65535")
    return tokens


def prefill_tokens() -> int:
    """Returns the maximum number of tokens of a rank in a prefill pass: MAX_TOKENS, or a number derived from the size of
    SGLang's chunks.

    Raises:
        InvalidArgument: MAX_TOKENS is invalid, or neither is set.
    """
    given = os.environ.get(MAX_TOKENS, "")
    if given:
        if not given.isdecimal() or int(given) < 1:
            _names.invalid(f"{MAX_TOKENS} = {given!r}: must be a number of tokens, at least 1")
        return int(given)
    from sglang.srt.runtime_context import get_schedule, max_prefill_buffer_tokens

    chunk = max_prefill_buffer_tokens()
    if chunk < 1:
        _names.invalid(f"without --chunked-prefill-size, the tokens of a prefill pass have no limit: set it, or {MAX_TOKENS}")
    most = max(chunk, decode_tokens()) + (decode_tokens() if get_schedule().enable_mixed_chunk else 0)
    return -(-most // 128) * 128  # SGLang pads batches to a multiple of the ranks that share attention
