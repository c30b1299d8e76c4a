# SPDX-License-Identifier: Apache-2.0
# Generated from include/switchyard/c by scripts/interface/generate.py; change the headers and run it.
"""The structs of include/switchyard/c with their members and the defaults of their SY_..._INIT macros."""
from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_double, c_float, c_int32, c_int64, c_size_t, c_uint64, c_void_p

from .struct import Struct


class ConstRowView(Struct):
    name = "sy_const_row_view"
    _fields_ = [("struct_size", c_size_t), ("data", c_void_p), ("rows", c_int64), ("cols", c_int64), ("dtype", c_int32),
                ("scale_kind", c_int32), ("scales", c_void_p)]


class RowView(Struct):
    name = "sy_row_view"
    _fields_ = [("struct_size", c_size_t), ("data", c_void_p), ("rows", c_int64), ("cols", c_int64), ("dtype", c_int32),
                ("scale_kind", c_int32), ("scales", c_void_p)]


class ExpertIds(Struct):
    name = "sy_expert_ids"
    _fields_ = [("struct_size", c_size_t), ("data", c_void_p), ("num_tokens", c_int64), ("topk", c_int32), ("is_int64", c_int32)]


class ExpertShape(Struct):
    name = "sy_expert_shape"
    _fields_ = [("struct_size", c_size_t), ("hidden", c_int64), ("intermediate", c_int64), ("num_local_experts", c_int32),
                ("reserved", c_int32)]


class ExpertOptions(Struct):
    name = "sy_expert_options"
    defaults = {"route_scratch_bytes": 67108864, "weight_scales": 1}
    _fields_ = [("struct_size", c_size_t), ("backend", c_int32), ("dtype", c_int32), ("storage", c_int32), ("reserved", c_int32),
                ("route_scratch_bytes", c_size_t), ("max_rows", c_int64), ("w13_scales", c_void_p), ("w2_scales", c_void_p),
                ("weight_scales", c_int32), ("accumulate", c_int32), ("scaling", c_int32), ("intermediate_scaling", c_int32),
                ("intermediate_scale", c_void_p)]


class ExpertMemory(Struct):
    name = "sy_expert_memory"
    _fields_ = [("struct_size", c_size_t), ("weight_bytes", c_size_t), ("scratch_bytes", c_size_t), ("total_bytes", c_size_t)]


class ExpertCall(Struct):
    name = "sy_expert_call"
    _fields_ = [("struct_size", c_size_t), ("stream", c_void_p), ("num_sms", c_int32), ("reserved", c_int32)]


class ExpertMap(Struct):
    name = "sy_expert_map"
    _fields_ = [("struct_size", c_size_t), ("num_experts", c_int32), ("world", c_int32), ("slots_per_rank", c_int32),
                ("reserved", c_int32), ("expert_of_slot", c_void_p)]


class BalanceOptions(Struct):
    name = "sy_balance_options"
    defaults = {"tile": 128, "link_bytes_per_s": 300e9, "seconds_per_row": 0.14e-6, "seconds_per_move": 0.5e-3, "staging_bytes": 67108864}
    _fields_ = [("struct_size", c_size_t), ("tile", c_int64), ("link_bytes_per_s", c_double), ("seconds_per_row", c_double),
                ("seconds_per_move", c_double), ("staging_bytes", c_size_t)]


class BalanceReport(Struct):
    name = "sy_balance_report"
    _fields_ = [("struct_size", c_size_t), ("max_before", c_int64), ("max_after", c_int64), ("mean", c_int64), ("fetched", c_int64),
                ("received_bytes", c_int64)]


class GroupedGemmConfig(Struct):
    name = "sy_grouped_gemm_config"
    defaults = {"swiglu_limit": float("inf"), "swiglu_alpha": 1.0, "weight_scales": 1}
    _fields_ = [("struct_size", c_size_t), ("n", c_int64), ("k", c_int64), ("num_experts", c_int32), ("dtype", c_int32),
                ("order", c_int32), ("epilogue", c_int32), ("swiglu_limit", c_float), ("swiglu_alpha", c_float),
                ("swiglu_up_shift", c_float), ("weight_scales", c_int32), ("quantize", c_int32), ("accumulate", c_int32),
                ("scaling", c_int32), ("output_scaling", c_int32)]


class ExpertRows(Struct):
    name = "sy_expert_rows"
    _fields_ = [("struct_size", c_size_t), ("num_rows", c_void_p), ("num_rows_32", c_void_p), ("first_row", c_void_p),
                ("rows_per_expert", c_int64), ("scale_rows", c_int64), ("scale_stride", c_int64)]


class GroupedGemmOptions(Struct):
    name = "sy_grouped_gemm_options"
    _fields_ = [("struct_size", c_size_t), ("stream", c_void_p), ("num_sms", c_int32), ("reserved", c_int32), ("output_scale", c_void_p),
                ("scratch", c_void_p)]


class WeightGradientConfig(Struct):
    name = "sy_weight_gradient_config"
    defaults = {"out_dtype": 2}
    _fields_ = [("struct_size", c_size_t), ("n", c_int64), ("k", c_int64), ("num_experts", c_int32), ("dtype", c_int32),
                ("out_dtype", c_int32), ("add", c_int32)]


class SwigluGradientConfig(Struct):
    name = "sy_swiglu_gradient_config"
    defaults = {"swiglu_limit": float("inf"), "swiglu_alpha": 1.0}
    _fields_ = [("struct_size", c_size_t), ("columns", c_int64), ("num_experts", c_int32), ("dtype", c_int32), ("swiglu_limit", c_float),
                ("swiglu_alpha", c_float), ("swiglu_up_shift", c_float), ("reserved", c_int32)]


class RoutingGradientConfig(Struct):
    name = "sy_routing_gradient_config"
    _fields_ = [("struct_size", c_size_t), ("columns", c_int64), ("num_experts", c_int32), ("dtype", c_int32)]


class MoeLayerConfig(Struct):
    name = "sy_moe_layer_config"
    defaults = {"order": 1, "captured": 1, "row_scales": 1, "weight_scales": 1}
    _fields_ = [("struct_size", c_size_t), ("hidden", c_int64), ("intermediate", c_int64), ("max_tokens", c_int64), ("capacity", c_int64),
                ("num_experts", c_int32), ("topk", c_int32), ("dtype", c_int32), ("order", c_int32), ("exchange", c_int32),
                ("form", c_int32), ("overflow", c_int32), ("captured", c_int32), ("storage", c_int32), ("row_scales", c_int32),
                ("weight_scales", c_int32), ("invalid_ids", c_int32), ("w13_scales", c_void_p), ("w2_scales", c_void_p),
                ("accumulate", c_int32), ("scaling", c_int32), ("intermediate_scaling", c_int32), ("reserved", c_int32),
                ("intermediate_scale", c_void_p)]


class MoeLayerMemory(Struct):
    name = "sy_moe_layer_memory"
    _fields_ = [("struct_size", c_size_t), ("heap_bytes", c_size_t), ("private_bytes", c_size_t), ("weight_bytes", c_size_t),
                ("scratch_bytes", c_size_t), ("total_bytes", c_size_t)]


class MoeLayerCall(Struct):
    name = "sy_moe_layer_call"
    _fields_ = [("struct_size", c_size_t), ("stream", c_void_p), ("device_tokens", c_void_p), ("num_sms", c_int32), ("add", c_int32),
                ("known_memory", c_int32), ("reserved", c_int32), ("selector", c_void_p), ("weights_ready", c_void_p)]


class LedgerConfig(Struct):
    name = "sy_ledger_config"
    defaults = {"dtype": 1, "max_ledgers": 4}
    _fields_ = [("struct_size", c_size_t), ("hidden", c_int64), ("max_tokens", c_int64), ("max_rows", c_int64), ("num_experts", c_int32),
                ("topk", c_int32), ("dtype", c_int32), ("max_ledgers", c_int32)]


class LedgerFormat(Struct):
    name = "sy_ledger_format"
    _fields_ = [("struct_size", c_size_t), ("workspace_bytes", c_size_t), ("route_meta_bytes", c_size_t), ("window_bytes", c_size_t),
                ("guard_bytes", c_size_t)]


class LedgerCombineOptions(Struct):
    name = "sy_ledger_combine_options"
    _fields_ = [("struct_size", c_size_t), ("stream", c_void_p), ("num_sms", c_int32), ("reserved", c_int32)]


class LowLatencyConfig(Struct):
    name = "sy_low_latency_config"
    defaults = {"scales": 1, "scale_group": 128}
    _fields_ = [("struct_size", c_size_t), ("hidden", c_int64), ("max_tokens", c_int64), ("num_experts", c_int32), ("topk", c_int32),
                ("dtype", c_int32), ("scales", c_int32), ("scale_group", c_int32), ("scale_order", c_int32), ("sending", c_int32),
                ("pieces", c_int32), ("invalid_ids", c_int32), ("reserved", c_int32)]


class LowLatencyView(Struct):
    name = "sy_low_latency_view"
    _fields_ = [("struct_size", c_size_t), ("x", c_void_p), ("x_rows", c_int64), ("x_cols", c_int64), ("x_dtype", c_int32),
                ("x_scale_kind", c_int32), ("x_scales", c_void_p), ("rows_per_expert", c_int64), ("scale_rows", c_int64),
                ("world", c_int32), ("num_local_experts", c_int32), ("rows_of_expert", c_void_p), ("source_range", c_void_p),
                ("row_source", c_void_p), ("scale_order", c_int32), ("scale_group", c_int32)]


class LowLatencyDispatchOptions(Struct):
    name = "sy_low_latency_dispatch_options"
    _fields_ = [("struct_size", c_size_t), ("topk_weights", c_void_p), ("stream", c_void_p), ("device_tokens", c_void_p),
                ("num_sms", c_int32), ("known_memory", c_int32), ("selector", c_void_p)]


class LowLatencyCombineOptions(Struct):
    name = "sy_low_latency_combine_options"
    defaults = {"order": 1}
    _fields_ = [("struct_size", c_size_t), ("order", c_int32), ("num_sms", c_int32), ("topk_weights", c_void_p),
                ("expert_scale", c_void_p), ("stream", c_void_p), ("known_memory", c_int32), ("reserved", c_int32)]


class RowOrigin(ctypes.Structure):
    """sy_row_origin"""

    _fields_ = [("expert", c_int32), ("rank", c_int32), ("token", c_int32), ("k", c_int32)]


class AllToAllOptions(Struct):
    name = "sy_all_to_all_options"
    _fields_ = [("struct_size", c_size_t), ("topk_weights", c_void_p), ("expert_scale", c_void_p), ("row_function", c_void_p),
                ("row_function_user", c_void_p), ("stream", c_void_p), ("device_tokens", c_void_p), ("num_sms", c_int32),
                ("reserved", c_int32), ("selector", c_void_p)]


class WaitReport(Struct):
    name = "sy_wait_report"
    _fields_ = [("struct_size", c_size_t), ("operation", c_char_p), ("site", c_char_p), ("call", c_uint64), ("waiting_rank", c_int32),
                ("awaited_rank", c_int32), ("expected", c_uint64), ("seen", c_uint64), ("waited_ms", c_double), ("silent_ms", c_double)]


class GroupOptions(Struct):
    name = "sy_group_options"
    defaults = {"heap_bytes": 268435456, "timeout_ms": 30000, "rendezvous_timeout_ms": 60000, "num_blocks": 1, "num_warps": 1,
                "device": -1}
    _fields_ = [("struct_size", c_size_t), ("heap_bytes", c_size_t), ("timeout_ms", c_int64), ("rendezvous_timeout_ms", c_int64),
                ("num_blocks", c_int32), ("num_warps", c_int32), ("reserved", c_int32), ("num_sms", c_int32), ("backend", c_int32),
                ("device", c_int32), ("host", c_char_p), ("silence_ms", c_int64), ("network", c_int32), ("reserved2", c_int32)]


class NormalConfig(Struct):
    name = "sy_normal_config"
    defaults = {"expert_alignment": 1, "ring_send_chunk": 6}
    _fields_ = [("struct_size", c_size_t), ("hidden", c_int64), ("max_tokens", c_int64), ("num_experts", c_int32), ("topk", c_int32),
                ("layout", c_int32), ("expert_alignment", c_int32), ("dtype", c_int32), ("staging", c_int32),
                ("ring_num_channels", c_int32), ("ring_send_chunk", c_int32), ("ring_slots", c_int32), ("invalid_ids", c_int32),
                ("pool_bytes", c_size_t), ("ring_max_bytes", c_size_t)]


class MemoryRequirement(Struct):
    name = "sy_memory_requirement"
    _fields_ = [("struct_size", c_size_t), ("control_bytes", c_size_t), ("pool_bytes", c_size_t), ("ring_bytes", c_size_t),
                ("total_bytes", c_size_t), ("private_bytes", c_size_t)]


class DispatchOptions(Struct):
    name = "sy_dispatch_options"
    defaults = {"size": 3}
    _fields_ = [("struct_size", c_size_t), ("quantize", c_int32), ("size", c_int32), ("overflow", c_int32), ("padding", c_int32),
                ("capacity", c_int64), ("stream", c_void_p), ("device_tokens", c_void_p), ("num_sms", c_int32), ("known_memory", c_int32),
                ("out", c_void_p)]


class DispatchedView(Struct):
    name = "sy_dispatched_view"
    _fields_ = [("struct_size", c_size_t), ("x", c_void_p), ("x_rows", c_int64), ("x_cols", c_int64), ("x_dtype", c_int32),
                ("x_scale_kind", c_int32), ("x_scales", c_void_p), ("rows", c_int64), ("num_tokens", c_int64), ("world", c_int32),
                ("topk", c_int32), ("num_local_experts", c_int32), ("reserved", c_int32), ("handle", c_void_p), ("topk_ids", c_void_p),
                ("topk_weights", c_void_p), ("source_token", c_void_p), ("row_source", c_void_p), ("row_weights", c_void_p),
                ("expert_first_row", c_void_p), ("tokens_per_expert", c_void_p), ("aligned_per_expert", c_void_p), ("dropped", c_void_p),
                ("dropped_per_source", c_void_p), ("invalid_ids", c_void_p)]


class CombineOptions(Struct):
    name = "sy_combine_options"
    defaults = {"apply_weights": 1}
    _fields_ = [("struct_size", c_size_t), ("order", c_int32), ("apply_weights", c_int32), ("topk_weights", c_void_p),
                ("bias", c_void_p * 2), ("stream", c_void_p), ("num_sms", c_int32), ("known_memory", c_int32)]


class CallStatistics(Struct):
    name = "sy_call_statistics"
    _fields_ = [("struct_size", c_size_t), ("remote_bytes", c_uint64), ("local_bytes", c_uint64), ("copied_bytes", c_uint64),
                ("payload_rows", c_uint64), ("metadata_bytes", c_uint64), ("plan_us", c_double), ("total_us", c_double),
                ("network_bytes", c_uint64)]


class Counts(Struct):
    name = "sy_counts"
    _fields_ = [("struct_size", c_size_t), ("storage", c_void_p), ("rows", c_int64), ("num_local_experts", c_int64),
                ("tokens_per_expert", c_void_p), ("aligned_per_expert", c_void_p), ("expert_first_row", c_void_p)]


class Bytes(Struct):
    name = "sy_bytes"
    _fields_ = [("struct_size", c_size_t), ("storage", c_void_p), ("data", c_void_p), ("size", c_size_t)]


class Matrices(Struct):
    name = "sy_matrices"
    _fields_ = [("struct_size", c_size_t), ("storage", c_void_p), ("world", c_int32), ("num_channels", c_int32), ("num_tokens", c_int64),
                ("num_recv", c_int64), ("rank_prefix_matrix", c_void_p), ("channel_prefix_matrix", c_void_p),
                ("recv_channel_prefix_matrix", c_void_p), ("recv_src_idx", c_void_p), ("is_token_in_rank", c_void_p),
                ("send_head", c_void_p)]


class Ledger(Struct):
    name = "sy_ledger"
    _fields_ = [("struct_size", c_size_t), ("storage", c_void_p), ("world", c_int32), ("num_experts", c_int32),
                ("num_experts_padded", c_int32), ("num_local_experts", c_int32), ("num_routes", c_int64),
                ("peer_token_per_expert", c_void_p), ("expanded_row_idx", c_void_p), ("cumsum_per_expert", c_void_p),
                ("dispatch_offset", c_void_p), ("prev_sum_before_rank", c_void_p)]


class RoutingLayout(Struct):
    name = "sy_routing_layout"
    _fields_ = [("struct_size", c_size_t), ("storage", c_void_p), ("world", c_int32), ("num_experts", c_int32), ("num_tokens", c_int64),
                ("num_tokens_per_rank", c_void_p), ("num_tokens_per_expert", c_void_p), ("is_token_in_rank", c_void_p)]


class TraceOptions(Struct):
    name = "sy_trace_options"
    defaults = {"num_blocks": 1, "num_warps": 1, "events_per_track": 16384}
    _fields_ = [("struct_size", c_size_t), ("num_blocks", c_int32), ("num_warps", c_int32), ("events_per_track", c_size_t)]


class TracePhase(ctypes.Structure):
    """sy_trace_phase"""

    _fields_ = [("name", c_char_p), ("category", c_char_p), ("unit", c_char_p), ("rank", c_int32), ("reserved", c_int32),
                ("count", c_uint64), ("total_ms", c_double), ("max_ms", c_double), ("slowest_ms", c_double), ("arg_sum", c_int64),
                ("bytes", c_uint64)]


class TraceSummary(Struct):
    name = "sy_trace_summary"
    _fields_ = [("struct_size", c_size_t), ("storage", c_void_p), ("phases", c_void_p), ("count", c_int64), ("phase_bytes", c_size_t)]


class WaitStatistics(Struct):
    name = "sy_wait_statistics"
    _fields_ = [("struct_size", c_size_t), ("total_ms", c_double), ("max_ms", c_double), ("waits", c_uint64)]


class TuningKey(Struct):
    name = "sy_tuning_key"
    defaults = {"hidden": 1, "max_tokens": 1, "ranks": 1}
    _fields_ = [("struct_size", c_size_t), ("device", c_char_p), ("hidden", c_int64), ("max_tokens", c_int64), ("ranks", c_int32),
                ("mode", c_int32)]


class TuningValues(Struct):
    name = "sy_tuning_values"
    _fields_ = [("struct_size", c_size_t), ("dispatch_sms", c_int32), ("combine_sms", c_int32), ("sms", c_int32),
                ("dispatch_warps", c_int32), ("dispatch_stages", c_int32), ("combine_warps", c_int32), ("pieces", c_int32),
                ("warps", c_int32), ("chunk_kib", c_int32), ("quantized_dispatch_sms", c_int32)]


ALL = (ConstRowView, RowView, ExpertIds, ExpertShape, ExpertOptions, ExpertMemory, ExpertCall, ExpertMap, BalanceOptions, BalanceReport,
       GroupedGemmConfig, ExpertRows, GroupedGemmOptions, WeightGradientConfig, SwigluGradientConfig, RoutingGradientConfig,
       MoeLayerConfig, MoeLayerMemory, MoeLayerCall, LedgerConfig, LedgerFormat, LedgerCombineOptions, LowLatencyConfig, LowLatencyView,
       LowLatencyDispatchOptions, LowLatencyCombineOptions, AllToAllOptions, WaitReport, GroupOptions, NormalConfig, MemoryRequirement,
       DispatchOptions, DispatchedView, CombineOptions, CallStatistics, Counts, Bytes, Matrices, Ledger, RoutingLayout, TraceOptions,
       TraceSummary, WaitStatistics, TuningKey, TuningValues)
