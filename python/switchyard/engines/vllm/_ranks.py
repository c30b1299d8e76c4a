# SPDX-License-Identifier: Apache-2.0
"""Groups and exchanges of one expert-parallel process group of vLLM, and the checks that both forms share."""
from __future__ import annotations

import weakref
from typing import Any, Callable, Dict, Hashable, Tuple

import torch
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.platforms import current_platform

from ..._abi import names as _names
from ..._abi.ffi import library
from ...exchange import Exchange
from ...group import Group
from ...layer import MoeLayer
from ...low_latency import LowLatency, Received

logger = init_logger("vllm.switchyard")

#: Seconds that a construction waits for other ranks, which load weights at different speeds.
_LOADING = 1800.0
_INSTEAD = "SWITCHYARD_DEEP_EP=1 with --all2all-backend deepep_low_latency, or an all-to-all backend of vLLM"
_groups: "weakref.WeakSet[Group]" = weakref.WeakSet()


def version() -> str:
    """Returns the version of the shared library."""
    return library().version


def refuse(what: str, instead: str) -> None:
    """Raises InvalidArgument for a configuration that the plug-in does not support.

    Args:
        what: the configuration, as the subject of "is not supported".
        instead: the alternative, as a clause.
    """
    _names.invalid(f"SWITCHYARD_VLLM: {what} is not supported; {instead}")


def backend() -> str:
    """Returns the backend for vLLM's platform, "cuda" or "cpu". Refuses other platforms."""
    if current_platform.is_cuda():
        return "cuda"
    if current_platform.is_rocm() or current_platform.is_xpu() or current_platform.is_tpu():
        refuse(f"the platform {current_platform.device_type}", "unset SWITCHYARD_VLLM and use an all-to-all backend of vLLM")
    return "cpu"


def check_parallel(tcp_store_group: Any = None) -> None:
    """Refuses parallel configurations of vLLM that the plug-in does not support.

    Args:
        tcp_store_group: vLLM's stateless process group, or None.
    """
    backend()
    config = get_current_vllm_config_or_none()
    parallel = None if config is None else config.parallel_config
    if tcp_store_group is not None or getattr(parallel, "enable_elastic_ep", False):
        refuse("elastic expert parallelism (--enable-elastic-ep)", "use --all2all-backend nixl_ep without SWITCHYARD_VLLM")
    if getattr(parallel, "enable_fault_tolerance", False):
        refuse("fault tolerance (--enable-fault-tolerance), which masks ranks,", "a failed rank ends the engine; restart it, or "
               "use --all2all-backend nixl_ep without SWITCHYARD_VLLM")
    if getattr(parallel, "use_ubatching", False):
        refuse("dual batch overlap (--enable-dbo)", f"disable it, or use {_INSTEAD}")


def check_experts(group: Group, moe: Any) -> None:
    """Refuses a division of experts among ranks that differs from Switchyard's.

    Args:
        group: the ranks.
        moe: vLLM's FusedMoEConfig.
    """
    here = len(group.experts_of(moe.num_experts))
    if here != moe.num_local_experts or group.rank != moe.ep_rank:
        refuse(f"a division that gives rank {moe.ep_rank} of {group.size} {moe.num_local_experts} of {moe.num_experts} experts",
               f"Switchyard gives rank {group.rank} {here}: use a linear expert placement without fused shared experts")


class Ranks:
    """This rank's objects in one process group. Objects are created collectively, once per configuration, and shared by all of
    vLLM's MoE layers with that configuration. Each has its own group, with a heap of exactly the required size.

    Args:
        process_group: the ``torch.distributed`` process group of vLLM's expert-parallel ranks, on the CPU.
    """

    def __init__(self, process_group: Any) -> None:
        self._process_group = process_group
        self._made: Dict[Hashable, Any] = {}
        self._layers: Dict[Hashable, MoeLayer] = {}

    def exchange(self, captured_tokens: int, **config: Any) -> Exchange:
        """Returns the :class:`Exchange` with these keywords. Collective if it does not exist yet. captured_tokens: maximum number
        of tokens on any rank in a CUDA graph; the pool is sized for such a call in addition to one outside graphs. 0: no graphs."""
        return self._once("normal mode", config, lambda: self._exchange(captured_tokens, config))

    def low_latency(self, **config: Any) -> Tuple[LowLatency, Received]:
        """Returns the :class:`LowLatency` with these keywords and its output. Collective if they do not exist yet."""
        return self._once("low-latency mode", config, lambda: self._low_latency(config))

    def layer(self, weights: Tuple[Any, Any, Any, Any], **config: Any) -> MoeLayer:
        """Returns the :class:`MoeLayer` that reads `weights` (w13, w2 and their scales or None) in place and shares all other
        memory with the layers of the same keywords. Collective if it does not exist yet: all ranks create the same layers in the
        same order. A layer exists until :meth:`close`, because graphs may contain its calls, and is reused for weights at the same
        addresses."""
        scales = {"w13_scales": weights[2], "w2_scales": weights[3]}
        first = self._once("the whole layer", config, lambda: self._layer(weights, scales, config))
        at = (*sorted(config.items()), *(None if each is None else each.data_ptr() for each in weights))
        if at not in self._layers:
            self._layers[at] = first.with_weights(weights[0], weights[1], **scales)
        return self._layers[at]

    def close(self) -> None:
        """Local. Closes all groups; later calls of peers end with PeerFailed."""
        for group, _ in self._made.values():
            group.close()
        self._made.clear()
        self._layers.clear()

    def _once(self, form: str, config: Dict[str, Any], make: Callable[[], Any]) -> Any:
        key = (form, *sorted(config.items()))
        if key not in self._made:
            made = self._made[key] = make()
            group = made[0]
            if group.rank == 0:
                logger.info("Switchyard %s: %s, %d ranks on %d hosts (%s), hidden %d, %d experts, topk %d, at most %d tokens per "
                            "rank, %.1f MiB of heap per rank", version(), form, group.size, group.hosts, group.backend,
                            config["hidden"], config["num_experts"], config["topk"], config["max_tokens"], group.heap[1] / 2**20)
        return self._made[key][1]

    def _group(self, heap_bytes: int) -> Group:
        """Collective. Creates a group. Waits end with PeerTimeout after vLLM's own timeout of a step."""
        device = {"device": torch.cuda.current_device()} if backend() == "cuda" else {}
        group = Group.from_process_group(self._process_group, heap_bytes, backend=backend(), rendezvous_timeout=_LOADING,
                                         timeout=float(envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS), **device)
        _groups.add(group)
        return group

    def _exchange(self, captured_tokens: int, config: Dict[str, Any]) -> Tuple[Group, Exchange]:
        if backend() == "cuda" and captured_tokens:
            sizes = ({**config, "max_tokens": each} for each in (config["max_tokens"], min(captured_tokens, config["max_tokens"])))
            pools = (Exchange.memory_required(self._process_group.size(), backend="cuda", **each).pool_bytes for each in sizes)
            config = {**config, "pool_bytes": sum(pools)}
        group = self._group(Exchange.heap_bytes(self._process_group.size(), backend=backend(), **config))
        made = Exchange(group, **config)
        if group.backend == "cuda":  # vLLM replays one graph at a time
            made.use_graph_memory(made.make_graph_memory())
        return group, made

    def _low_latency(self, config: Dict[str, Any]) -> Tuple[Group, Tuple[LowLatency, Received]]:
        group = self._group(LowLatency.heap_bytes(self._process_group.size(), **config))
        made, device = LowLatency(group, **config), "cuda" if group.backend == "cuda" else "cpu"
        return group, (made, made.make_output(torch.empty((0, config["hidden"]), dtype=config["dtype"], device=device)))

    def _layer(self, weights: Tuple[Any, ...], scales: Dict[str, Any], config: Dict[str, Any]) -> Tuple[Group, MoeLayer]:
        group = self._group(MoeLayer.heap_bytes(self._process_group.size(), backend=backend(), **config))
        return group, MoeLayer(group, weights[0], weights[1], **scales, **config)


def check_groups() -> None:
    """Local. Raises the pending error of this rank, if any, for example PeerTimeout of a call in a replayed graph."""
    for group in list(_groups):
        if not group.closed:
            group.check()


def watch_workers(patches: Any) -> None:
    """Makes each step of a worker, also one of an idle data-parallel rank, raise pending errors, because replayed graphs execute no
    Python code. The executor then reports a failed worker and ends the engine. With asynchronous scheduling, the error of a replayed
    call is raised in the next step."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    def execute_model(self: Any, *arguments: Any, **keywords: Any) -> Any:
        result = original(self, *arguments, **keywords)
        check_groups()
        return result

    def delegated(name: str) -> Callable[..., Any]:
        def step(self: Any, *arguments: Any, **keywords: Any) -> Any:
            result = getattr(self.worker, name)(*arguments, **keywords)
            check_groups()
            return result

        return step

    original = patches.replace(WorkerWrapperBase, "execute_model", execute_model)
    for name in ("sample_tokens", "execute_dummy_batch"):  # the wrapper delegates both to its worker by __getattr__
        patches.provide(WorkerWrapperBase, name, delegated(name))
