# SPDX-License-Identifier: Apache-2.0
"""Switchyard for Python: dispatch and combine of Mixture-of-Experts tokens.

    import numpy as np
    import switchyard as sy

    def rank(group):
        exchange = sy.Exchange(group, hidden=64, num_experts=8, topk=2, max_tokens=16, dtype="f32")
        x = np.full((16, 64), group.rank, np.float32)
        ids = np.random.default_rng(group.rank).integers(0, 8, (16, 2))
        rows, handle = exchange.dispatch(x, ids)
        return exchange.combine(rows, handle)

    print(sy.run_ranks(rank, 4)[3])

docs/python.md is the full guide.
"""
from __future__ import annotations

from ._abi.ffi import library as _library
from .checkpointing import keep_plans
from .errors import *
from .errors import __all__ as _errors
from .exchange import CallStatistics, Exchange, MemoryRequirement
from .expert_map import BalanceReport, ExpertMap, SlotLoads, SlotSelector, SlotWeights, move_weights
from .gemm import GroupedGemm
from .graph_memory import GraphMemory
from .group import Group, WaitStatistics, first_expert
from .handle import Counts, Handle, Ledger, Matrices, RoutingLayout
from .layer import LayerMemory, MoeLayer
from .ledger import LedgerCombine, PreparedLedger
from .low_latency import LowLatency, Pending, Received
from .parallelize import expert_parameters, full_state_dict, keep_out_of_ddp, moe_heap_bytes, parallelize_moe, set_replicas
from .route_counter import RouteCounter, RouteLoad
from .routing import routing_layout
from .row_memory import RowMemory
from .run import run_ranks
from .step_rates import StepRates, agree_on_step_rates, measure_step_rates
from .trace import Trace, TracePhase
from .tuning import TuningValues, tuned_values


def __getattr__(name: str) -> str:
    if name == "__version__":
        from importlib.metadata import version

        return version("switchyard-ep")
    raise AttributeError(f"module 'switchyard' has no attribute {name!r}")


def library_version() -> str:
    """Returns the version of the shared library, which is loaded on first use."""
    return _library().version


def library_path() -> str:
    """Returns the path of the shared library."""
    return _library().path


__all__ = [
    "BalanceReport", "CallStatistics", "Counts", "Exchange", "ExpertMap", "GraphMemory", "Group", "GroupedGemm", "Handle", "LayerMemory", "Ledger", "LedgerCombine",
    "LowLatency", "Matrices", "MemoryRequirement", "MoeLayer", "Pending", "PreparedLedger", "Received", "RouteCounter", "RouteLoad", "RoutingLayout", "RowMemory", "SlotLoads", "SlotSelector", "SlotWeights", "StepRates", "Trace", "TracePhase",
    "TuningValues", "WaitStatistics", "agree_on_step_rates", "expert_parameters", "first_expert", "full_state_dict", "keep_out_of_ddp", "keep_plans",
    "library_path", "library_version", "measure_step_rates", "moe_heap_bytes", "move_weights", "parallelize_moe",
    "routing_layout", "run_ranks", "set_replicas", "tuned_values", *_errors,
]
