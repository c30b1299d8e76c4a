# SPDX-License-Identifier: Apache-2.0
"""Switchyard as vLLM's all-to-all backend: the manager, and the replacement of vLLM's references to DeepEP's classes."""
from __future__ import annotations

from typing import Any

from vllm.config import CompilationConfig
from vllm.distributed.device_communicators import all2all
from vllm.distributed.device_communicators.base_device_communicator import All2AllManagerBase
from vllm.model_executor.layers.fused_moe import all2all_utils

from ._batched import SwitchyardBatched
from ._ranks import Ranks, check_parallel
from ._standard import SwitchyardStandard

#: A backend with fixed shapes and device-side counts, for which vLLM does not restrict CUDA graphs.
_CAPTURABLE = "deepep_low_latency"


class SwitchyardAll2AllManager(All2AllManagerBase):  # type: ignore[misc]
    """vLLM's all-to-all manager for both activation formats. vLLM constructs it with its process groups; the constructor refuses
    configurations that the plug-in does not support.

    Args:
        cpu_group: the process group of the expert-parallel ranks.
        tcp_store_group: must be None.

    Raises:
        InvalidArgument: elastic expert parallelism, fault tolerance, dual batch overlap, or a platform without NVIDIA GPUs.
    """

    def __init__(self, cpu_group: Any, tcp_store_group: Any = None) -> None:
        check_parallel(tcp_store_group)
        super().__init__(cpu_group, tcp_store_group)
        self._ranks = Ranks(cpu_group)

    def get_handle(self, kwargs: Any) -> Ranks:
        """Returns the objects of this process group. `kwargs` have no effect: kernels pass their shapes in post_init_setup."""
        return self._ranks

    def destroy(self) -> None:
        """Local. Closes the groups of all objects; later calls of peers end with PeerFailed."""
        self._ranks.close()


def install(patches: Any) -> None:
    """Replaces vLLM's classes for DeepEP V1, and the rule that disables CUDA graphs for deepep_high_throughput."""
    patches.replace(all2all, "DeepEPHTAll2AllManager", SwitchyardAll2AllManager)
    patches.replace(all2all, "DeepEPLLAll2AllManager", SwitchyardAll2AllManager)
    # vLLM defines these names only if deep_ep is installed.
    patches.provide(all2all_utils, "DeepEPHTPrepareAndFinalize", SwitchyardStandard)
    patches.provide(all2all_utils, "DeepEPLLPrepareAndFinalize", SwitchyardBatched)
    patches.provide(all2all_utils, "DEEPEP_QUANT_BLOCK_SHAPE", [128, 128])

    def set_splitting_ops_for_v1(self: Any, all2all_backend: str, *arguments: Any, **keywords: Any) -> Any:
        named = _CAPTURABLE if all2all_backend == "deepep_high_throughput" else all2all_backend
        return original(self, named, *arguments, **keywords)

    original = patches.replace(CompilationConfig, "set_splitting_ops_for_v1", set_splitting_ops_for_v1)
