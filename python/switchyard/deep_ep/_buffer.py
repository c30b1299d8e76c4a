# SPDX-License-Identifier: Apache-2.0
"""DeepEP's Buffer."""
from __future__ import annotations

import os
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

import torch

from ..errors import InvalidArgument, Unsupported
from ..group import Construction, Group
from ..low_latency import LowLatency
from . import _copies, _low_latency, _normal
from ._config import UNCHOSEN, Config, Sms, config_for
from ._events import EventHandle, EventOverlap, check_events
from ._streams import NoStreams, Streams

__all__ = ["Buffer"]

Rows = Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]
Scratch = 1 << 20


def _backend_of(group: Any, backend: Optional[str]) -> str:
    """Returns "cuda" or "cpu" for a Buffer that has not yet received a tensor."""
    chosen = backend or os.environ.get("SWITCHYARD_DEEP_EP_BACKEND") or ""
    if chosen:
        return chosen
    if group is not None and "nccl" in str(torch.distributed.get_backend(group)):
        return "cuda"
    return "cuda" if torch.cuda.is_available() else "cpu"


def _most_sms(group: Group, device: int) -> int:
    """Collective. Returns the number of multiprocessors available to a call on every rank: those of a GPU divided by the number
    of ranks on it, or the limit set by the environment, if lower."""
    properties = torch.cuda.get_device_properties(device)
    everybody = group._agree("Buffer", str(getattr(properties, "uuid", device)).encode().ljust(64)[:64])
    most = properties.multi_processor_count // max(map(everybody.count, everybody))
    return max(min(most, int(os.environ.get("SWITCHYARD_NUM_SMS") or most)), 1)


class Buffer:
    """Buffers of one rank in a group of ranks on one host.

    group: a ``torch.distributed`` process group with any backend, or None with comm, an mpi4py communicator.
    num_nvl_bytes: minimum memory for normal mode.
    num_rdma_bytes: memory for low-latency mode; see get_low_latency_rdma_size_hint.
    backend: "cuda" or "cpu", the location of tensors; None: the environment variable SWITCHYARD_DEEP_EP_BACKEND, else "cuda" on
    the current GPU if torch can use a GPU, else "cpu".
    explicitly_destroy: must be set for destroy() to be called.
    The other arguments are accepted but have no effect.
    """

    num_sms: int = UNCHOSEN

    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, low_latency_mode: bool = False,
                 num_qps_per_rank: int = 24, allow_nvlink_for_low_latency_mode: bool = True, allow_mnnvl: bool = False,
                 use_fabric: bool = False, explicitly_destroy: bool = False, enable_shrink: bool = False, comm: Any = None,
                 backend: Optional[str] = None) -> None:
        if group is None and comm is None:
            raise InvalidArgument("Buffer: either group or comm must be given")
        options: Dict[str, Any] = {"backend": _backend_of(group, backend)}
        on_gpu = options["backend"] == "cuda"
        if on_gpu:
            options["device"] = torch.cuda.current_device()
        heap = int(num_rdma_bytes) + (1 << 20) + (0 if on_gpu else int(num_nvl_bytes))
        made = Group.from_process_group(group, heap, **options) if group is not None else Group.from_mpi4py(comm, heap, **options)
        self.group = group
        self.rank, self.group_size = made.rank, made.size
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.explicitly_destroy, self.enable_shrink = low_latency_mode, explicitly_destroy, enable_shrink
        self.runtime: Optional[Group] = made
        self._device = torch.device("cuda", options["device"]) if on_gpu else torch.device("cpu")
        self._index = options["device"] if on_gpu else -1
        with Construction(made, "Buffer", settles=True):
            self._most_sms = _most_sms(made, options["device"]) if on_gpu else 1 << 30
            self._streams: Union[Streams, NoStreams] = Streams(options["device"]) if on_gpu else NoStreams()
            self._normal = _normal.Normal(made, int(num_nvl_bytes), _copies.Generations(made, int(num_nvl_bytes), options) if on_gpu
                                          else _normal.Rings(made, int(num_nvl_bytes)))
            self._low_latency = _low_latency.LowLatencyMode(made, self._streams)

    def destroy(self) -> None:
        """Local. Releases everything."""
        assert self.explicitly_destroy, "destroy() needs explicitly_destroy=True"
        if self.runtime is not None:
            self._low_latency.close()
            self._normal.close()
            self.runtime.close()
            self.runtime = None

    # ---- Functions without a buffer ----

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Returns whether fp8 is available: true on every backend."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0, f"num_sms = {new_num_sms}: must be even"
        Buffer.num_sms = Sms(new_num_sms)

    @staticmethod
    def capture() -> EventOverlap:
        """Returns an event recorded at this point."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return config_for(Buffer.num_sms, num_ranks)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return config_for(Buffer.num_sms, num_ranks)

    @staticmethod
    def get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int) -> int:
        """Returns ``num_rdma_bytes`` for objects of this shape: bf16, and fp8 with both kinds of scales."""
        shape = {"hidden": hidden, "num_experts": num_experts, "topk": min(num_experts, 32), "max_tokens": num_max_dispatch_tokens_per_rank}
        kinds = [None] + (["f32", "ue8m0"] if hidden % 16 == 0 else [])
        return sum(LowLatency.heap_bytes(num_ranks, scales=kind, **shape) for kind in kinds)

    def get_comm_stream(self) -> torch.cuda.Stream:
        """Returns the stream used by calls that overlap other work. After the first request, work that callers enqueue on this
        stream runs between calls, as in DeepEP."""
        stream = self._streams.communication()
        if stream is None:
            raise Unsupported("get_comm_stream: there are no streams on the CPU")
        return stream

    def _check_device(self, x: torch.Tensor, name: str) -> None:
        if x.get_device() != self._index if x.is_cuda else not x.is_cpu or self._index >= 0:
            raise InvalidArgument(f"{name} is on {x.device}: this Buffer is for tensors on {self._device} (Buffer(backend=...) or "
                                  f"SWITCHYARD_DEEP_EP_BACKEND chooses)")

    def _sms(self, config: Optional[Config]) -> int:
        """Returns the number of multiprocessors for a normal-mode call: the caller's number, limited to those available; or 0,
        the library's choice, if neither set_num_sms nor a Config has set one."""
        asked = Buffer.num_sms if config is None else config.num_sms
        return 0 if asked is UNCHOSEN else max(min(asked, self._most_sms), 1)

    def get_local_buffer_tensor(self, dtype: torch.dtype, size: Optional[torch.Size] = None, offset: int = 0,
                                use_rdma_buffer: bool = False) -> torch.Tensor:
        """Returns separate scratch memory, never memory in use, of the requested size or 1 MiB."""
        if size is None:
            size = torch.Size((Scratch // torch.empty((), dtype=dtype).element_size(),))
        return torch.empty(size, dtype=dtype, device=self._device)

    # ---- Normal mode ----

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int, previous_event: Optional[EventOverlap] = None,
                            async_finish: bool = False, allocate_on_comm_stream: bool = False) \
            -> Tuple[torch.Tensor, Optional[torch.Tensor], torch.Tensor, torch.Tensor, EventOverlap]:
        """Returns num_tokens_per_rank int32 [W], None, num_tokens_per_expert int32 [E], is_token_in_rank bool [T, W], event.
        topk_idx: int64 [T, K], where -1 means no expert."""
        if allocate_on_comm_stream:
            check_events(previous_event, async_finish)
        self._check_device(topk_idx, "topk_idx")
        (per_rank, per_expert, where), event = self._streams.run(
            lambda: _normal.layout_of(topk_idx, num_experts, self.group_size), (topk_idx,), previous_event, async_finish)
        return per_rank, None, per_expert, where, event

    def dispatch(self, x: Rows, handle: Optional[Tuple] = None, num_tokens_per_rank: Optional[torch.Tensor] = None,
                 num_tokens_per_rdma_rank: Optional[torch.Tensor] = None, is_token_in_rank: Optional[torch.Tensor] = None,
                 num_tokens_per_expert: Optional[torch.Tensor] = None, topk_idx: Optional[torch.Tensor] = None,
                 topk_weights: Optional[torch.Tensor] = None, expert_alignment: int = 1, num_worst_tokens: int = 0,
                 config: Optional[Config] = None, previous_event: Optional[EventOverlap] = None, async_finish: bool = False,
                 allocate_on_comm_stream: bool = False) \
            -> Tuple[Rows, Optional[torch.Tensor], Optional[torch.Tensor], Optional[List[int]], Optional[Tuple], EventOverlap]:
        """Collective. Returns recv_x, recv_topk_idx int64 (local, -1 elsewhere), recv_topk_weights, tokens per local expert
        (aligned; empty with num_worst_tokens), handle, event. x: bf16 [T, H], or fp8 with scales [T, H / 128] of float32, or of
        packed int32. With a handle, repeats its routing and returns None for everything except x and the event."""
        if previous_event is None and not (async_finish or allocate_on_comm_stream) and type(handle) is _normal.NormalHandle \
                and type(x) is torch.Tensor and topk_idx is None and topk_weights is None and x.get_device() == self._index:
            again, stream = handle.exchange._dispatch_again, self._streams.ready()
            if again is not None and stream is not None:
                fresh = again(x, handle.handle, self._sms(config), stream)
                if fresh is not None:
                    return fresh, None, None, None, None, EventOverlap()
        if allocate_on_comm_stream:
            check_events(previous_event, async_finish)
        self._check_device(x[0] if isinstance(x, tuple) else x, "x")
        sms = self._sms(config)
        if handle is not None:
            if topk_idx is not None or topk_weights is not None:
                raise InvalidArgument("dispatch: topk_idx and topk_weights are those of the handle")
            known = _normal.handle_of(handle)
            rows, event = self._streams.run(lambda: _normal.cached_dispatch(x, known, sms), (x,), previous_event, async_finish)
            return rows, None, None, None, None, event
        if is_token_in_rank is None or num_tokens_per_expert is None or num_tokens_per_rank is None:
            raise InvalidArgument("dispatch: num_tokens_per_rank, is_token_in_rank and num_tokens_per_expert are needed without a "
                                  "handle; get_dispatch_layout makes them")
        channels = max((config.num_sms if config is not None else Buffer.num_sms) // 2, 1)
        call = _normal.Call(x, topk_idx, topk_weights, is_token_in_rank, num_tokens_per_expert, expert_alignment, num_worst_tokens,
                            channels, sms)
        given = (x, topk_idx, topk_weights, is_token_in_rank, num_tokens_per_rank, num_tokens_per_expert)
        results, event = self._streams.run(lambda: _normal.dispatch(self._normal, call, self._streams), given, previous_event,
                                           async_finish)
        return (*results, event)

    def combine(self, x: torch.Tensor, handle: Tuple, topk_weights: Optional[torch.Tensor] = None,
                bias: Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor], None] = None, config: Optional[Config] = None,
                previous_event: Optional[EventOverlap] = None, async_finish: bool = False, allocate_on_comm_stream: bool = False) \
            -> Tuple[torch.Tensor, Optional[torch.Tensor], EventOverlap]:
        """Collective. Returns the unweighted sums of rows over ranks; sums of topk_weights float32 [rows, K], or None;
        event."""
        if previous_event is None and not (async_finish or allocate_on_comm_stream) and type(handle) is _normal.NormalHandle \
                and topk_weights is None and bias is None and x.get_device() == self._index:
            again, stream = handle.exchange._combine_again, self._streams.ready()
            if again is not None and stream is not None:
                sums = again(x, handle.handle, self._sms(config), stream)
                if sums is not None:
                    return sums, None, EventOverlap()
        if allocate_on_comm_stream:
            check_events(previous_event, async_finish)
        self._check_device(x, "x")
        known, sms = _normal.handle_of(handle), self._sms(config)
        biases = () if bias is None else tuple(bias) if isinstance(bias, (tuple, list)) else (bias,)
        (out, weights), event = self._streams.run(
            lambda: known.exchange._combine(x, known.handle, topk_weights, biases=biases, num_sms=sms), (x, topk_weights, biases),
            previous_event, async_finish)
        return out, weights, event

    def internode_dispatch(self, *arguments: Any, **keywords: Any) -> Any:
        raise Unsupported("internode_dispatch: all ranks of a group are on one host; use dispatch")

    def internode_combine(self, *arguments: Any, **keywords: Any) -> Any:
        raise Unsupported("internode_combine: all ranks of a group are on one host; use combine")

    # ---- Low latency ----

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Does nothing, because each mode has separate memory."""

    def low_latency_dispatch(self, x: torch.Tensor, topk_idx: torch.Tensor, num_max_dispatch_tokens_per_rank: int, num_experts: int,
                             cumulative_local_expert_recv_stats: Optional[torch.Tensor] = None,
                             dispatch_wait_recv_cost_stats: Optional[torch.Tensor] = None, use_fp8: bool = True,
                             round_scale: bool = False, use_ue8m0: bool = False, async_finish: bool = False,
                             return_recv_hook: bool = False, use_nvfp4: bool = False,
                             x_global_scale: Optional[torch.Tensor] = None) \
            -> Tuple[Rows, torch.Tensor, Tuple, EventOverlap, Optional[Callable[[], None]]]:
        """Collective. Returns recv_x [L, W * T, H], or a pair with scales, column-major; recv_count int32 [L]; handle; event;
        hook. For each shape, the results of at most two calls are valid at a time. dispatch_wait_recv_cost_stats is left
        unchanged.

        Raises:
            Unsupported: use_nvfp4 or x_global_scale, which SGLang's DeepEP has.
        """
        if use_nvfp4 or x_global_scale is not None:
            raise Unsupported(f"low_latency_dispatch: {'use_nvfp4' if use_nvfp4 else 'x_global_scale'}: NVFP4 rows are not available; "
                              f"rows are sent as bf16 (use_fp8=False) or as fp8 with scales of 128 columns (use_fp8=True)")
        if cumulative_local_expert_recv_stats is None and not (round_scale or use_ue8m0 or async_finish or return_recv_hook):
            stream = self._streams.ready() if x.get_device() == self._index else None
            output = None if stream is None else _low_latency.dispatch_again(
                self._low_latency, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, "f32" if use_fp8 else None, stream)
            if output is not None:
                return output.packed, output.received.rows, output.handle, EventOverlap(), None
        self._check_device(x, "x")
        if use_ue8m0 and not round_scale:
            raise InvalidArgument("low_latency_dispatch: use_ue8m0 needs round_scale")
        if async_finish and return_recv_hook:
            raise InvalidArgument("low_latency_dispatch: async_finish and return_recv_hook exclude each other")
        sending, stats = _low_latency.sending_of(use_fp8, round_scale, use_ue8m0), cumulative_local_expert_recv_stats
        (received, count, handle, hook), event = self._streams.run(
            lambda: _low_latency.dispatch(self._low_latency, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, sending, stats,
                                          return_recv_hook), (x, topk_idx, stats), None, async_finish)
        return received, count, handle, event, hook

    def low_latency_combine(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, handle: Tuple,
                            use_logfmt: bool = False, zero_copy: bool = False, async_finish: bool = False,
                            return_recv_hook: bool = False, out: Optional[torch.Tensor] = None,
                            combine_wait_recv_cost_stats: Optional[torch.Tensor] = None, overlap: bool = False,
                            packed_recv_count: Optional[torch.Tensor] = None, comp_signal: Optional[torch.Tensor] = None,
                            block_m: int = 64, threshold: int = 0, num_sms: Optional[int] = None,
                            src_signals: Optional[torch.Tensor] = None, src_signal_expect_value: int = 0) \
            -> Tuple[torch.Tensor, EventOverlap, Optional[Callable[[], None]]]:
        """Collective. Returns weighted sums [T, H]; event; hook. x: bf16 [L, W * T, H]; with zero_copy, the rows from
        get_next_low_latency_combine_buffer are used instead. combine_wait_recv_cost_stats is left unchanged.

        The arguments from overlap on are those of SGLang's DeepEP. overlap: the product that computes x may still be running;
        no row is read before comp_signal, int32 [L * ceil(W * T / block_m)], reports at least `threshold` for its block (CPU
        only). packed_recv_count: unused, because the handle has the counts. num_sms: GPUs, the maximum number of
        multiprocessors of this call, also without overlap.

        Raises:
            Unsupported: use_logfmt, src_signals, or overlap on a GPU.
            InvalidArgument: overlap without comp_signal, or with a comp_signal of another type or size.
            PeerTimeout: blocks are not complete after 100 seconds.
        """
        if src_signals is not None:
            raise Unsupported("low_latency_combine: src_signals counts per expert, for Blackwell, and is not available; comp_signal "
                              "counts per block of rows")
        if overlap and comp_signal is None:
            raise InvalidArgument("low_latency_combine: overlap=True needs comp_signal")
        signals = None
        if overlap and comp_signal is not None:
            signals = _low_latency.Signals(comp_signal, block_m, threshold)
        if out is None and signals is None and not (num_sms or use_logfmt or async_finish or return_recv_hook):
            stream = self._streams.ready() if x.get_device() == self._index else None
            if stream is not None:
                rows = _low_latency.rows_of(handle) if zero_copy else x
                sums = _low_latency.combine_again(self._low_latency, rows, topk_weights, handle, stream)
                if sums is not None:
                    return sums, EventOverlap(), None
        self._check_device(x, "x")
        if use_logfmt:
            raise Unsupported("low_latency_combine: use_logfmt is not available; rows go back as bf16")
        if async_finish and return_recv_hook:
            raise InvalidArgument("low_latency_combine: async_finish and return_recv_hook exclude each other")
        sms = max(min(int(num_sms), self._most_sms), 0) if num_sms else 0
        (summed, hook), event = self._streams.run(
            lambda: _low_latency.combine(self._low_latency, x, topk_weights, handle, zero_copy, return_recv_hook, out, sms, signals),
            (topk_weights, out), None, async_finish, x)
        return summed, event, hook

    def get_next_low_latency_combine_buffer(self, handle: object) -> torch.Tensor:
        """Returns rows, bf16 [L, W * T, H], that combine reads in place."""
        return _low_latency.rows_of(handle)

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        if mask:
            raise Unsupported("low_latency_update_mask_buffer: ranks cannot be left out of a group that runs")

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Reports that no rank is masked."""
        mask_status.zero_()

    def low_latency_clean_mask_buffer(self) -> None:
        """Does nothing, because no rank is masked."""
