# SPDX-License-Identifier: Apache-2.0
"""Placement of experts by Switchyard's planner in vLLM's expert load balancer (``--enable-eplb``)."""
from __future__ import annotations

from typing import Any, Optional

import torch
from vllm.distributed.eplb import eplb_state
from vllm.distributed.eplb.policy import AbstractEplbPolicy

from ..._abi import names as _names
from .. import expert_location


class SwitchyardPolicy(AbstractEplbPolicy):  # type: ignore[misc]
    """Balances the ranks to within 2 % of the mean, if possible, and moves few weights. Ignores hosts and groups of experts."""

    @classmethod
    def rebalance_experts(cls, weight: torch.Tensor, num_replicas: int, num_groups: int, num_nodes: int, num_ranks: int,
                          old_global_expert_indices: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Returns the logical expert of each physical expert, int64 [layers, num_replicas].

        Args:
            weight: routes per logical expert, [layers, experts].
            num_replicas: number of physical experts.
            num_groups, num_nodes: not used.
            num_ranks: number of ranks.
            old_global_expert_indices: the current placement, [layers, num_replicas].
        """
        before = None if old_global_expert_indices is None else old_global_expert_indices.cpu().numpy()
        return torch.from_numpy(expert_location.place(weight.cpu().numpy(), world=num_ranks, slots_per_rank=num_replicas // num_ranks,
                                                      before=before))


def install(patches: Any) -> None:
    """Replaces vLLM's only policy, because vLLM's configuration accepts only the name ``default``."""
    name = eplb_state.EPLB_POLICIES["default"].__module__
    if name.split(".")[0] != "vllm":
        _names.invalid(f"vLLM's EPLB policy was replaced by {name}: two plug-ins cannot replace the same place; disable one of them")
    patches.replace(eplb_state, "EPLB_POLICIES", {**eplb_state.EPLB_POLICIES, "default": SwitchyardPolicy})
