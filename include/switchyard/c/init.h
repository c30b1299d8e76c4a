// SPDX-License-Identifier: Apache-2.0
// Generated from include/switchyard/c by scripts/interface/generate.py; change the headers and run it.
/// \file
/// C ABI: the SY_..._INIT macros. Each initializes the struct of the same name: struct_size, and the defaults that SY_DEFAULT
/// marks in the struct. The headers of the structs include this header.
#pragma once

#include <stddef.h>

// clang-format off
#define SY_CONST_ROW_VIEW_INIT { sizeof(sy_const_row_view), NULL, 0, 0, 0, 0, NULL }
#define SY_ROW_VIEW_INIT { sizeof(sy_row_view), NULL, 0, 0, 0, 0, NULL }
#define SY_EXPERT_IDS_INIT { sizeof(sy_expert_ids), NULL, 0, 0, 0 }
#define SY_EXPERT_SHAPE_INIT { sizeof(sy_expert_shape), 0, 0, 0, 0 }
#define SY_EXPERT_OPTIONS_INIT { sizeof(sy_expert_options), 0, 0, 0, 0, 67108864, 0, NULL, NULL, SY_SCALE_F32, 0, 0, 0, NULL }
#define SY_EXPERT_MEMORY_INIT { sizeof(sy_expert_memory), 0, 0, 0 }
#define SY_EXPERT_CALL_INIT { sizeof(sy_expert_call), NULL, 0, 0 }
#define SY_EXPERT_MAP_INIT { sizeof(sy_expert_map), 0, 0, 0, 0, NULL }
#define SY_BALANCE_OPTIONS_INIT { sizeof(sy_balance_options), 128, 300e9, 0.14e-6, 0.5e-3, 67108864 }
#define SY_BALANCE_REPORT_INIT { sizeof(sy_balance_report), 0, 0, 0, 0, 0 }
#define SY_GROUPED_GEMM_CONFIG_INIT { \
    sizeof(sy_grouped_gemm_config), 0, 0, 0, 0, 0, 0, INFINITY, 1.0f, 0.0f, SY_SCALE_F32, 0, 0, 0, 0 }
#define SY_EXPERT_ROWS_INIT { sizeof(sy_expert_rows), NULL, NULL, NULL, 0, 0, 0 }
#define SY_GROUPED_GEMM_OPTIONS_INIT { sizeof(sy_grouped_gemm_options), NULL, 0, 0, NULL, NULL }
#define SY_WEIGHT_GRADIENT_CONFIG_INIT { sizeof(sy_weight_gradient_config), 0, 0, 0, 0, SY_DTYPE_F32, 0 }
#define SY_SWIGLU_GRADIENT_CONFIG_INIT { sizeof(sy_swiglu_gradient_config), 0, 0, 0, INFINITY, 1.0f, 0.0f, 0 }
#define SY_ROUTING_GRADIENT_CONFIG_INIT { sizeof(sy_routing_gradient_config), 0, 0, 0 }
#define SY_MOE_LAYER_CONFIG_INIT { \
    sizeof(sy_moe_layer_config), 0, 0, 0, 0, 0, 0, 0, SY_ORDER_PER_ROUTE, 0, 0, 0, 1, 0, SY_SCALE_F32, SY_SCALE_F32, 0, \
    NULL, NULL, 0, 0, 0, 0, NULL }
#define SY_MOE_LAYER_MEMORY_INIT { sizeof(sy_moe_layer_memory), 0, 0, 0, 0, 0 }
#define SY_MOE_LAYER_CALL_INIT { sizeof(sy_moe_layer_call), NULL, NULL, 0, 0, 0, 0, NULL, NULL }
#define SY_LEDGER_CONFIG_INIT { sizeof(sy_ledger_config), 0, 0, 0, 0, 0, SY_DTYPE_F16, 4 }
#define SY_LEDGER_FORMAT_INIT { sizeof(sy_ledger_format), 0, 0, 0, 0 }
#define SY_LEDGER_COMBINE_OPTIONS_INIT { sizeof(sy_ledger_combine_options), NULL, 0, 0 }
#define SY_LOW_LATENCY_CONFIG_INIT { sizeof(sy_low_latency_config), 0, 0, 0, 0, 0, SY_SCALE_F32, 128, 0, 0, 0, 0, 0 }
#define SY_LOW_LATENCY_VIEW_INIT { sizeof(sy_low_latency_view), NULL, 0, 0, 0, 0, NULL, 0, 0, 0, 0, NULL, NULL, NULL, 0, 0 }
#define SY_LOW_LATENCY_DISPATCH_OPTIONS_INIT { sizeof(sy_low_latency_dispatch_options), NULL, NULL, NULL, 0, 0, NULL }
#define SY_LOW_LATENCY_COMBINE_OPTIONS_INIT { \
    sizeof(sy_low_latency_combine_options), SY_ORDER_PER_ROUTE, 0, NULL, NULL, NULL, 0, 0 }
#define SY_ALL_TO_ALL_OPTIONS_INIT { sizeof(sy_all_to_all_options), NULL, NULL, NULL, NULL, NULL, NULL, 0, 0, NULL }
#define SY_WAIT_REPORT_INIT { sizeof(sy_wait_report), NULL, NULL, 0, 0, 0, 0, 0, 0.0, 0.0 }
#define SY_GROUP_OPTIONS_INIT { sizeof(sy_group_options), 268435456, 30000, 60000, 1, 1, 0, 0, 0, -1, NULL, 0, 0, 0 }
#define SY_NORMAL_CONFIG_INIT { sizeof(sy_normal_config), 0, 0, 0, 0, 0, 1, 0, 0, 0, 6, 0, 0, 0, 0 }
#define SY_MEMORY_REQUIREMENT_INIT { sizeof(sy_memory_requirement), 0, 0, 0, 0, 0 }
#define SY_DISPATCH_OPTIONS_INIT { sizeof(sy_dispatch_options), 0, SY_SIZE_AUTOMATIC, 0, 0, 0, NULL, NULL, 0, 0, NULL }
#define SY_DISPATCHED_VIEW_INIT { \
    sizeof(sy_dispatched_view), NULL, 0, 0, 0, 0, NULL, 0, 0, 0, 0, 0, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, \
    NULL, NULL, NULL, NULL }
#define SY_COMBINE_OPTIONS_INIT { sizeof(sy_combine_options), 0, 1, NULL, {NULL, NULL}, NULL, 0, 0 }
#define SY_CALL_STATISTICS_INIT { sizeof(sy_call_statistics), 0, 0, 0, 0, 0, 0.0, 0.0, 0 }
#define SY_COUNTS_INIT { sizeof(sy_counts), NULL, 0, 0, NULL, NULL, NULL }
#define SY_BYTES_INIT { sizeof(sy_bytes), NULL, NULL, 0 }
#define SY_MATRICES_INIT { sizeof(sy_matrices), NULL, 0, 0, 0, 0, NULL, NULL, NULL, NULL, NULL, NULL }
#define SY_LEDGER_INIT { sizeof(sy_ledger), NULL, 0, 0, 0, 0, 0, NULL, NULL, NULL, NULL, NULL }
#define SY_ROUTING_LAYOUT_INIT { sizeof(sy_routing_layout), NULL, 0, 0, 0, NULL, NULL, NULL }
#define SY_TRACE_OPTIONS_INIT { sizeof(sy_trace_options), 1, 1, 16384 }
#define SY_TRACE_SUMMARY_INIT { sizeof(sy_trace_summary), NULL, NULL, 0, 0 }
#define SY_WAIT_STATISTICS_INIT { sizeof(sy_wait_statistics), 0.0, 0.0, 0 }
#define SY_TUNING_KEY_INIT { sizeof(sy_tuning_key), NULL, 1, 1, 1, 0 }
#define SY_TUNING_VALUES_INIT { sizeof(sy_tuning_values), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
// clang-format on
