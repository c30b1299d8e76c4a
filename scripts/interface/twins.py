# SPDX-License-Identifier: Apache-2.0
"""The C++ types that correspond to the types in the C headers, and their differences. Anything not listed has the same name in
both.

A conversion copies members of the same name. `members` lists the exceptions: the C++ expression, or None for a member that
hand-written code converts or passes beside the C++ struct, which has no such member. A `range` is checked before the conversion, because the C++ type cannot hold other values or because the value has
a different meaning in C.
"""
from __future__ import annotations

from dataclasses import dataclass, field

INT32_MAX, INT64_MAX = (1 << 31) - 1, (1 << 63) - 1

#: For each enumeration: the C++ type, the prefix of the enumerators in C, and the table of words in Python
#: (_abi/enumerations.py).
ENUMERATIONS = {
    "sy_code": ("ErrorCode", "SY_", None),
    "sy_backend": ("Backend", "SY_BACKEND_", "BACKENDS"),
    "sy_host_network": ("HostNetwork", "SY_NETWORK_", "NETWORKS"),
    "sy_dtype": ("DType", "SY_DTYPE_", "DTYPES"),
    "sy_scale_kind": ("ScaleKind", "SY_SCALE_", "SCALES"),
    "sy_accumulate": ("Accumulate", "SY_ACCUMULATE_", "ACCUMULATIONS"),
    "sy_layout": ("Layout", "SY_LAYOUT_", "LAYOUTS"),
    "sy_staging": ("Staging", "SY_STAGING_", "STAGINGS"),
    "sy_size_policy": ("SizePolicy", "SY_SIZE_", "SIZES"),
    "sy_overflow": ("Overflow", "SY_OVERFLOW_", "OVERFLOWS"),
    "sy_invalid_ids": ("InvalidIds", "SY_INVALID_IDS_", "INVALID_IDS"),
    "sy_padding": ("Padding", "SY_PADDING_", "PADDINGS"),
    "sy_combine_order": ("CombineOrder", "SY_ORDER_", "ORDERS"),
    "sy_scale_order": ("ScaleOrder", "SY_SCALES_", "SCALE_ORDERS"),
    "sy_sending": ("Sending", "SY_SENDING_", "SENDINGS"),
    "sy_tuning_mode": ("TuningMode", "SY_TUNING_", "TUNING_MODES"),
    "sy_weight_storage": ("WeightStorage", "SY_WEIGHTS_", "STORAGES"),
    "sy_weight_order": ("WeightOrder", "SY_WEIGHTS_", "WEIGHT_ORDERS"),
    "sy_epilogue": ("Epilogue", "SY_EPILOGUE_", "EPILOGUES"),
    "sy_scale_granularity": ("ScaleGranularity", "SY_GRANULARITY_", "GRANULARITIES"),
    "sy_output_scaling": ("OutputScaling", "SY_OUTPUT_", "OUTPUT_SCALINGS"),
    "sy_moe_exchange": ("MoeExchange", "SY_MOE_EXCHANGE_", "MOE_EXCHANGES"),
    "sy_moe_form": ("MoeForm", "SY_MOE_FORM_", "MOE_FORMS"),
}


@dataclass
class Twin:
    """`argument`: name of the struct in errors, or None if the caller supplies it. `optional`: NULL means defaults. `literal`:
    the C++ struct can be constant-evaluated, so its defaults are compared with those of C at compile time. `needed`: strings
    that must not be NULL."""

    type: str
    argument: str | None = "options"
    optional: bool = True
    literal: bool = True
    members: dict = field(default_factory=dict)
    ranges: dict = field(default_factory=dict)
    needed: tuple = ()


def config(type: str, **more: object) -> Twin:
    return Twin(type, "config", False, **more)  # type: ignore[arg-type]


_SWIGLU = {f"swiglu_{name}": f"swiglu.{name}" for name in ("limit", "alpha", "up_shift")}

#: Structs passed by callers.
TAKEN = {
    "sy_const_row_view": Twin("ConstRows", None, False),
    "sy_row_view": Twin("Rows", None, False),
    "sy_expert_ids": Twin("ExpertIds", "topk_ids", False),
    "sy_group_options": Twin("GroupOptions", literal=False, members={
        "timeout_ms": "timeout", "rendezvous_timeout_ms": "rendezvous_timeout", "silence_ms": "silence"}, ranges={
            "timeout_ms": (1, INT64_MAX), "rendezvous_timeout_ms": (1, INT64_MAX), "silence_ms": (0, INT64_MAX),
            "num_sms": (0, INT32_MAX), "device": (-1, INT32_MAX)}),
    "sy_normal_config": config("NormalConfig", members={
        f"ring_{name}": f"ring.{name}" for name in ("num_channels", "send_chunk", "slots", "max_bytes")}),
    "sy_dispatch_options": Twin("DispatchOptions", members={"out": None, "known_memory": None}),
    "sy_combine_options": Twin("CombineOptions", members={"known_memory": None}),
    "sy_low_latency_config": config("LowLatencyConfig"),
    "sy_low_latency_dispatch_options": Twin("LowLatencyDispatchOptions", members={"known_memory": None, "selector": None}),
    "sy_low_latency_combine_options": Twin("LowLatencyCombineOptions", members={"known_memory": None}),
    "sy_all_to_all_options": Twin("AllToAllOptions", members={
        "row_function": None, "row_function_user": None, "selector": None}),
    "sy_ledger_config": config("LedgerConfig"),
    "sy_ledger_combine_options": Twin("LedgerCombineOptions"),
    "sy_balance_options": Twin("BalanceOptions", members={
        **{name: f"plan.{name}" for name in ("tile", "link_bytes_per_s", "seconds_per_row", "seconds_per_move")},
        "staging_bytes": "move.staging_bytes"}),
    "sy_trace_options": Twin("TraceOptions"),
    "sy_tuning_key": Twin("TuningKey", "key", False, literal=False, needed=("device",), ranges={
        "hidden": (1, INT64_MAX), "max_tokens": (1, INT64_MAX), "ranks": (1, INT32_MAX)}),
    "sy_expert_shape": Twin("ExpertShape", "shape", False),
    "sy_expert_options": Twin("ExpertOptions"),
    "sy_expert_call": Twin("ExpertCall", "call"),
    "sy_expert_rows": Twin("ExpertRows", "rows", False),
    "sy_grouped_gemm_config": config("GroupedGemmConfig", members=_SWIGLU),
    "sy_grouped_gemm_options": Twin("GroupedGemmOptions"),
    "sy_weight_gradient_config": config("WeightGradientConfig"),
    "sy_swiglu_gradient_config": config("SwigluGradientConfig", members=_SWIGLU),
    "sy_routing_gradient_config": config("RoutingGradientConfig"),
    "sy_moe_layer_config": config("MoeLayerConfig"),
    "sy_moe_layer_call": Twin("MoeLayerCall", "call", members={"known_memory": None, "selector": None}),
}

_TOTAL = {"total_bytes": "total()"}

#: Structs filled by the library. Those with a `storage` and the views of outputs are filled by hand-written code.
FILLED = {
    "sy_const_row_view": Twin("ConstRows"),
    "sy_row_view": Twin("Rows"),
    "sy_expert_rows": Twin("ExpertRows"),
    "sy_wait_report": Twin("WaitReport"),
    "sy_memory_requirement": Twin("MemoryRequirement", members=_TOTAL),
    "sy_balance_report": Twin("BalanceReport"),
    "sy_call_statistics": Twin("CallStatistics"),
    "sy_wait_statistics": Twin("WaitStatistics"),
    "sy_tuning_values": Twin("TuningValues"),
    "sy_ledger_format": Twin("LedgerFormatBytes", members={
        f"{name}_bytes": name for name in ("workspace", "route_meta", "window", "guard")}),
    "sy_expert_memory": Twin("ExpertMemory", members=_TOTAL),
    "sy_moe_layer_memory": Twin("MoeLayerMemory", members=_TOTAL),
}
