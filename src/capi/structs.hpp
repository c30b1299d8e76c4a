// SPDX-License-Identifier: Apache-2.0
// Generated from include/switchyard/c by scripts/interface/generate.py; change the headers and run it.
// Structs of libswitchyard and their C++ counterparts. from_c() reads a struct of any version and throws ArgumentError for a
// value that the C++ type cannot express; twin_of() converts a struct that has been read; fill() writes the members of the
// caller's version. A struct with members that C++ does not have has no from_c(): capi/call_options.hpp.
#pragma once

// clang-format off
#include <chrono>
#include <cstddef>
#include <cstdint>
#include "capi/views.hpp"
#include "switchyard/c/expert_map.h"
#include "switchyard/c/ledger.h"
#include "switchyard/c/low_latency.h"
#include "switchyard/c/switchyard.h"
#include "switchyard/c/trace.h"
#include "switchyard/c/tuning.h"
#include "switchyard/expert_map.hpp"
#include "switchyard/ledger.hpp"
#include "switchyard/low_latency.hpp"
#include "switchyard/normal.hpp"
#include "switchyard/trace.hpp"
#include "switchyard/tuning.hpp"

namespace switchyard::detail {

// Values of the enumerations.
static_assert(SY_OK == static_cast<int>(ErrorCode::ok) &&
              SY_INVALID_ARGUMENT == static_cast<int>(ErrorCode::invalid_argument) &&
              SY_UNSUPPORTED == static_cast<int>(ErrorCode::unsupported) &&
              SY_HEAP_EXHAUSTED == static_cast<int>(ErrorCode::heap_exhausted) &&
              SY_POOL_EXHAUSTED == static_cast<int>(ErrorCode::pool_exhausted) &&
              SY_CAPACITY_EXCEEDED == static_cast<int>(ErrorCode::capacity_exceeded) &&
              SY_PEER_TIMEOUT == static_cast<int>(ErrorCode::peer_timeout) &&
              SY_PEER_FAILED == static_cast<int>(ErrorCode::peer_failed) &&
              SY_MISMATCH == static_cast<int>(ErrorCode::mismatch) &&
              SY_RENDEZVOUS == static_cast<int>(ErrorCode::rendezvous) && SY_IO == static_cast<int>(ErrorCode::io) &&
              SY_SYSTEM == static_cast<int>(ErrorCode::system));
static_assert(SY_BACKEND_CPU == static_cast<int>(Backend::cpu) && SY_BACKEND_CUDA == static_cast<int>(Backend::cuda));
static_assert(SY_NETWORK_SOCKETS == static_cast<int>(HostNetwork::sockets) &&
              SY_NETWORK_MPI == static_cast<int>(HostNetwork::mpi) && SY_NETWORK_NCCL == static_cast<int>(HostNetwork::nccl));
static_assert(SY_DTYPE_BF16 == static_cast<int>(DType::bf16) && SY_DTYPE_F16 == static_cast<int>(DType::f16) &&
              SY_DTYPE_F32 == static_cast<int>(DType::f32) && SY_DTYPE_FP8_E4M3 == static_cast<int>(DType::fp8_e4m3));
static_assert(SY_SCALE_NONE == static_cast<int>(ScaleKind::none) && SY_SCALE_F32 == static_cast<int>(ScaleKind::f32) &&
              SY_SCALE_UE8M0 == static_cast<int>(ScaleKind::ue8m0));
static_assert(SY_ACCUMULATE_EXACT == static_cast<int>(Accumulate::exact) &&
              SY_ACCUMULATE_FAST == static_cast<int>(Accumulate::fast));
static_assert(SY_LAYOUT_RANK_MAJOR == static_cast<int>(Layout::rank_major) &&
              SY_LAYOUT_EXPERT_MAJOR == static_cast<int>(Layout::expert_major));
static_assert(SY_STAGING_DIRECT == static_cast<int>(Staging::direct) && SY_STAGING_RING == static_cast<int>(Staging::ring));
static_assert(SY_SIZE_EXACT == static_cast<int>(SizePolicy::exact) &&
              SY_SIZE_CAPACITY == static_cast<int>(SizePolicy::capacity) &&
              SY_SIZE_WORST_CASE == static_cast<int>(SizePolicy::worst_case) &&
              SY_SIZE_AUTOMATIC == static_cast<int>(SizePolicy::automatic));
static_assert(SY_OVERFLOW_FAIL == static_cast<int>(Overflow::fail) &&
              SY_OVERFLOW_DROP_AND_REPORT == static_cast<int>(Overflow::drop_and_report) &&
              SY_OVERFLOW_SPLIT == static_cast<int>(Overflow::split));
static_assert(SY_INVALID_IDS_RAISE == static_cast<int>(InvalidIds::raise) &&
              SY_INVALID_IDS_COUNT == static_cast<int>(InvalidIds::count));
static_assert(SY_PADDING_ZERO == static_cast<int>(Padding::zero) &&
              SY_PADDING_UNSPECIFIED == static_cast<int>(Padding::unspecified));
static_assert(SY_ORDER_PER_RANK == static_cast<int>(CombineOrder::per_rank) &&
              SY_ORDER_PER_ROUTE == static_cast<int>(CombineOrder::per_route) &&
              SY_ORDER_PER_HOST == static_cast<int>(CombineOrder::per_host));
static_assert(SY_SCALES_ROW_MAJOR == static_cast<int>(ScaleOrder::row_major) &&
              SY_SCALES_COLUMN_MAJOR == static_cast<int>(ScaleOrder::column_major));
static_assert(SY_SENDING_PER_RANK == static_cast<int>(Sending::per_rank) &&
              SY_SENDING_PER_ROUTE == static_cast<int>(Sending::per_route));
static_assert(SY_TUNING_NORMAL == static_cast<int>(TuningMode::normal) &&
              SY_TUNING_LOW_LATENCY == static_cast<int>(TuningMode::low_latency) &&
              SY_TUNING_FLAT == static_cast<int>(TuningMode::flat) &&
              SY_TUNING_LEDGER == static_cast<int>(TuningMode::ledger) &&
              SY_TUNING_NORMAL_EXPERT_MAJOR == static_cast<int>(TuningMode::normal_expert_major));

// Members never move; new members are appended. No struct has padding, so every byte belongs to a member.
static_assert(sizeof(sy_const_row_view) == 48 && offsetof(sy_const_row_view, data) == 8 &&
              offsetof(sy_const_row_view, rows) == 16 && offsetof(sy_const_row_view, cols) == 24 &&
              offsetof(sy_const_row_view, dtype) == 32 && offsetof(sy_const_row_view, scale_kind) == 36 &&
              offsetof(sy_const_row_view, scales) == 40);
static_assert(sizeof(sy_row_view) == 48 && offsetof(sy_row_view, data) == 8 && offsetof(sy_row_view, rows) == 16 &&
              offsetof(sy_row_view, cols) == 24 && offsetof(sy_row_view, dtype) == 32 &&
              offsetof(sy_row_view, scale_kind) == 36 && offsetof(sy_row_view, scales) == 40);
static_assert(sizeof(sy_expert_ids) == 32 && offsetof(sy_expert_ids, data) == 8 &&
              offsetof(sy_expert_ids, num_tokens) == 16 && offsetof(sy_expert_ids, topk) == 24 &&
              offsetof(sy_expert_ids, is_int64) == 28);
static_assert(sizeof(sy_expert_map) == 32 && offsetof(sy_expert_map, num_experts) == 8 &&
              offsetof(sy_expert_map, world) == 12 && offsetof(sy_expert_map, slots_per_rank) == 16 &&
              offsetof(sy_expert_map, reserved) == 20 && offsetof(sy_expert_map, expert_of_slot) == 24);
static_assert(sizeof(sy_balance_options) == 48 && offsetof(sy_balance_options, tile) == 8 &&
              offsetof(sy_balance_options, link_bytes_per_s) == 16 && offsetof(sy_balance_options, seconds_per_row) == 24 &&
              offsetof(sy_balance_options, seconds_per_move) == 32 && offsetof(sy_balance_options, staging_bytes) == 40);
static_assert(sizeof(sy_balance_report) == 48 && offsetof(sy_balance_report, max_before) == 8 &&
              offsetof(sy_balance_report, max_after) == 16 && offsetof(sy_balance_report, mean) == 24 &&
              offsetof(sy_balance_report, fetched) == 32 && offsetof(sy_balance_report, received_bytes) == 40);
static_assert(sizeof(sy_ledger_config) == 48 && offsetof(sy_ledger_config, hidden) == 8 &&
              offsetof(sy_ledger_config, max_tokens) == 16 && offsetof(sy_ledger_config, max_rows) == 24 &&
              offsetof(sy_ledger_config, num_experts) == 32 && offsetof(sy_ledger_config, topk) == 36 &&
              offsetof(sy_ledger_config, dtype) == 40 && offsetof(sy_ledger_config, max_ledgers) == 44);
static_assert(sizeof(sy_ledger_format) == 40 && offsetof(sy_ledger_format, workspace_bytes) == 8 &&
              offsetof(sy_ledger_format, route_meta_bytes) == 16 && offsetof(sy_ledger_format, window_bytes) == 24 &&
              offsetof(sy_ledger_format, guard_bytes) == 32);
static_assert(sizeof(sy_ledger_combine_options) == 24 && offsetof(sy_ledger_combine_options, stream) == 8 &&
              offsetof(sy_ledger_combine_options, num_sms) == 16 && offsetof(sy_ledger_combine_options, reserved) == 20);
static_assert(sizeof(sy_low_latency_config) == 64 && offsetof(sy_low_latency_config, hidden) == 8 &&
              offsetof(sy_low_latency_config, max_tokens) == 16 && offsetof(sy_low_latency_config, num_experts) == 24 &&
              offsetof(sy_low_latency_config, topk) == 28 && offsetof(sy_low_latency_config, dtype) == 32 &&
              offsetof(sy_low_latency_config, scales) == 36 && offsetof(sy_low_latency_config, scale_group) == 40 &&
              offsetof(sy_low_latency_config, scale_order) == 44 && offsetof(sy_low_latency_config, sending) == 48 &&
              offsetof(sy_low_latency_config, pieces) == 52 && offsetof(sy_low_latency_config, invalid_ids) == 56 &&
              offsetof(sy_low_latency_config, reserved) == 60);
static_assert(sizeof(sy_low_latency_view) == 104 && offsetof(sy_low_latency_view, x) == 8 &&
              offsetof(sy_low_latency_view, x_rows) == 16 && offsetof(sy_low_latency_view, x_cols) == 24 &&
              offsetof(sy_low_latency_view, x_dtype) == 32 && offsetof(sy_low_latency_view, x_scale_kind) == 36 &&
              offsetof(sy_low_latency_view, x_scales) == 40 && offsetof(sy_low_latency_view, rows_per_expert) == 48 &&
              offsetof(sy_low_latency_view, scale_rows) == 56 && offsetof(sy_low_latency_view, world) == 64 &&
              offsetof(sy_low_latency_view, num_local_experts) == 68 &&
              offsetof(sy_low_latency_view, rows_of_expert) == 72 && offsetof(sy_low_latency_view, source_range) == 80 &&
              offsetof(sy_low_latency_view, row_source) == 88 && offsetof(sy_low_latency_view, scale_order) == 96 &&
              offsetof(sy_low_latency_view, scale_group) == 100);
static_assert(sizeof(sy_low_latency_dispatch_options) == 48 &&
              offsetof(sy_low_latency_dispatch_options, topk_weights) == 8 &&
              offsetof(sy_low_latency_dispatch_options, stream) == 16 &&
              offsetof(sy_low_latency_dispatch_options, device_tokens) == 24 &&
              offsetof(sy_low_latency_dispatch_options, num_sms) == 32 &&
              offsetof(sy_low_latency_dispatch_options, known_memory) == 36 &&
              offsetof(sy_low_latency_dispatch_options, selector) == 40);
static_assert(sizeof(sy_low_latency_combine_options) == 48 && offsetof(sy_low_latency_combine_options, order) == 8 &&
              offsetof(sy_low_latency_combine_options, num_sms) == 12 &&
              offsetof(sy_low_latency_combine_options, topk_weights) == 16 &&
              offsetof(sy_low_latency_combine_options, expert_scale) == 24 &&
              offsetof(sy_low_latency_combine_options, stream) == 32 &&
              offsetof(sy_low_latency_combine_options, known_memory) == 40 &&
              offsetof(sy_low_latency_combine_options, reserved) == 44);
static_assert(sizeof(sy_row_origin) == 16 && offsetof(sy_row_origin, expert) == 0 && offsetof(sy_row_origin, rank) == 4 &&
              offsetof(sy_row_origin, token) == 8 && offsetof(sy_row_origin, k) == 12);
static_assert(sizeof(sy_all_to_all_options) == 72 && offsetof(sy_all_to_all_options, topk_weights) == 8 &&
              offsetof(sy_all_to_all_options, expert_scale) == 16 && offsetof(sy_all_to_all_options, row_function) == 24 &&
              offsetof(sy_all_to_all_options, row_function_user) == 32 && offsetof(sy_all_to_all_options, stream) == 40 &&
              offsetof(sy_all_to_all_options, device_tokens) == 48 && offsetof(sy_all_to_all_options, num_sms) == 56 &&
              offsetof(sy_all_to_all_options, reserved) == 60 && offsetof(sy_all_to_all_options, selector) == 64);
static_assert(sizeof(sy_wait_report) == 72 && offsetof(sy_wait_report, operation) == 8 &&
              offsetof(sy_wait_report, site) == 16 && offsetof(sy_wait_report, call) == 24 &&
              offsetof(sy_wait_report, waiting_rank) == 32 && offsetof(sy_wait_report, awaited_rank) == 36 &&
              offsetof(sy_wait_report, expected) == 40 && offsetof(sy_wait_report, seen) == 48 &&
              offsetof(sy_wait_report, waited_ms) == 56 && offsetof(sy_wait_report, silent_ms) == 64);
static_assert(sizeof(sy_group_options) == 80 && offsetof(sy_group_options, heap_bytes) == 8 &&
              offsetof(sy_group_options, timeout_ms) == 16 && offsetof(sy_group_options, rendezvous_timeout_ms) == 24 &&
              offsetof(sy_group_options, num_blocks) == 32 && offsetof(sy_group_options, num_warps) == 36 &&
              offsetof(sy_group_options, reserved) == 40 && offsetof(sy_group_options, num_sms) == 44 &&
              offsetof(sy_group_options, backend) == 48 && offsetof(sy_group_options, device) == 52 &&
              offsetof(sy_group_options, host) == 56 && offsetof(sy_group_options, silence_ms) == 64 &&
              offsetof(sy_group_options, network) == 72 && offsetof(sy_group_options, reserved2) == 76);
static_assert(sizeof(sy_normal_config) == 80 && offsetof(sy_normal_config, hidden) == 8 &&
              offsetof(sy_normal_config, max_tokens) == 16 && offsetof(sy_normal_config, num_experts) == 24 &&
              offsetof(sy_normal_config, topk) == 28 && offsetof(sy_normal_config, layout) == 32 &&
              offsetof(sy_normal_config, expert_alignment) == 36 && offsetof(sy_normal_config, dtype) == 40 &&
              offsetof(sy_normal_config, staging) == 44 && offsetof(sy_normal_config, ring_num_channels) == 48 &&
              offsetof(sy_normal_config, ring_send_chunk) == 52 && offsetof(sy_normal_config, ring_slots) == 56 &&
              offsetof(sy_normal_config, invalid_ids) == 60 && offsetof(sy_normal_config, pool_bytes) == 64 &&
              offsetof(sy_normal_config, ring_max_bytes) == 72);
static_assert(sizeof(sy_memory_requirement) == 48 && offsetof(sy_memory_requirement, control_bytes) == 8 &&
              offsetof(sy_memory_requirement, pool_bytes) == 16 && offsetof(sy_memory_requirement, ring_bytes) == 24 &&
              offsetof(sy_memory_requirement, total_bytes) == 32 && offsetof(sy_memory_requirement, private_bytes) == 40);
static_assert(sizeof(sy_dispatch_options) == 64 && offsetof(sy_dispatch_options, quantize) == 8 &&
              offsetof(sy_dispatch_options, size) == 12 && offsetof(sy_dispatch_options, overflow) == 16 &&
              offsetof(sy_dispatch_options, padding) == 20 && offsetof(sy_dispatch_options, capacity) == 24 &&
              offsetof(sy_dispatch_options, stream) == 32 && offsetof(sy_dispatch_options, device_tokens) == 40 &&
              offsetof(sy_dispatch_options, num_sms) == 48 && offsetof(sy_dispatch_options, known_memory) == 52 &&
              offsetof(sy_dispatch_options, out) == 56);
static_assert(sizeof(sy_dispatched_view) == 176 && offsetof(sy_dispatched_view, x) == 8 &&
              offsetof(sy_dispatched_view, x_rows) == 16 && offsetof(sy_dispatched_view, x_cols) == 24 &&
              offsetof(sy_dispatched_view, x_dtype) == 32 && offsetof(sy_dispatched_view, x_scale_kind) == 36 &&
              offsetof(sy_dispatched_view, x_scales) == 40 && offsetof(sy_dispatched_view, rows) == 48 &&
              offsetof(sy_dispatched_view, num_tokens) == 56 && offsetof(sy_dispatched_view, world) == 64 &&
              offsetof(sy_dispatched_view, topk) == 68 && offsetof(sy_dispatched_view, num_local_experts) == 72 &&
              offsetof(sy_dispatched_view, reserved) == 76 && offsetof(sy_dispatched_view, handle) == 80 &&
              offsetof(sy_dispatched_view, topk_ids) == 88 && offsetof(sy_dispatched_view, topk_weights) == 96 &&
              offsetof(sy_dispatched_view, source_token) == 104 && offsetof(sy_dispatched_view, row_source) == 112 &&
              offsetof(sy_dispatched_view, row_weights) == 120 && offsetof(sy_dispatched_view, expert_first_row) == 128 &&
              offsetof(sy_dispatched_view, tokens_per_expert) == 136 &&
              offsetof(sy_dispatched_view, aligned_per_expert) == 144 && offsetof(sy_dispatched_view, dropped) == 152 &&
              offsetof(sy_dispatched_view, dropped_per_source) == 160 && offsetof(sy_dispatched_view, invalid_ids) == 168);
static_assert(sizeof(sy_combine_options) == 56 && offsetof(sy_combine_options, order) == 8 &&
              offsetof(sy_combine_options, apply_weights) == 12 && offsetof(sy_combine_options, topk_weights) == 16 &&
              offsetof(sy_combine_options, bias) == 24 && offsetof(sy_combine_options, stream) == 40 &&
              offsetof(sy_combine_options, num_sms) == 48 && offsetof(sy_combine_options, known_memory) == 52);
static_assert(sizeof(sy_call_statistics) == 72 && offsetof(sy_call_statistics, remote_bytes) == 8 &&
              offsetof(sy_call_statistics, local_bytes) == 16 && offsetof(sy_call_statistics, copied_bytes) == 24 &&
              offsetof(sy_call_statistics, payload_rows) == 32 && offsetof(sy_call_statistics, metadata_bytes) == 40 &&
              offsetof(sy_call_statistics, plan_us) == 48 && offsetof(sy_call_statistics, total_us) == 56 &&
              offsetof(sy_call_statistics, network_bytes) == 64);
static_assert(sizeof(sy_counts) == 56 && offsetof(sy_counts, storage) == 8 && offsetof(sy_counts, rows) == 16 &&
              offsetof(sy_counts, num_local_experts) == 24 && offsetof(sy_counts, tokens_per_expert) == 32 &&
              offsetof(sy_counts, aligned_per_expert) == 40 && offsetof(sy_counts, expert_first_row) == 48);
static_assert(sizeof(sy_bytes) == 32 && offsetof(sy_bytes, storage) == 8 && offsetof(sy_bytes, data) == 16 &&
              offsetof(sy_bytes, size) == 24);
static_assert(sizeof(sy_matrices) == 88 && offsetof(sy_matrices, storage) == 8 && offsetof(sy_matrices, world) == 16 &&
              offsetof(sy_matrices, num_channels) == 20 && offsetof(sy_matrices, num_tokens) == 24 &&
              offsetof(sy_matrices, num_recv) == 32 && offsetof(sy_matrices, rank_prefix_matrix) == 40 &&
              offsetof(sy_matrices, channel_prefix_matrix) == 48 &&
              offsetof(sy_matrices, recv_channel_prefix_matrix) == 56 && offsetof(sy_matrices, recv_src_idx) == 64 &&
              offsetof(sy_matrices, is_token_in_rank) == 72 && offsetof(sy_matrices, send_head) == 80);
static_assert(sizeof(sy_ledger) == 80 && offsetof(sy_ledger, storage) == 8 && offsetof(sy_ledger, world) == 16 &&
              offsetof(sy_ledger, num_experts) == 20 && offsetof(sy_ledger, num_experts_padded) == 24 &&
              offsetof(sy_ledger, num_local_experts) == 28 && offsetof(sy_ledger, num_routes) == 32 &&
              offsetof(sy_ledger, peer_token_per_expert) == 40 && offsetof(sy_ledger, expanded_row_idx) == 48 &&
              offsetof(sy_ledger, cumsum_per_expert) == 56 && offsetof(sy_ledger, dispatch_offset) == 64 &&
              offsetof(sy_ledger, prev_sum_before_rank) == 72);
static_assert(sizeof(sy_routing_layout) == 56 && offsetof(sy_routing_layout, storage) == 8 &&
              offsetof(sy_routing_layout, world) == 16 && offsetof(sy_routing_layout, num_experts) == 20 &&
              offsetof(sy_routing_layout, num_tokens) == 24 && offsetof(sy_routing_layout, num_tokens_per_rank) == 32 &&
              offsetof(sy_routing_layout, num_tokens_per_expert) == 40 && offsetof(sy_routing_layout, is_token_in_rank) == 48);
static_assert(sizeof(sy_trace_options) == 24 && offsetof(sy_trace_options, num_blocks) == 8 &&
              offsetof(sy_trace_options, num_warps) == 12 && offsetof(sy_trace_options, events_per_track) == 16);
static_assert(sizeof(sy_trace_phase) == 80 && offsetof(sy_trace_phase, name) == 0 &&
              offsetof(sy_trace_phase, category) == 8 && offsetof(sy_trace_phase, unit) == 16 &&
              offsetof(sy_trace_phase, rank) == 24 && offsetof(sy_trace_phase, reserved) == 28 &&
              offsetof(sy_trace_phase, count) == 32 && offsetof(sy_trace_phase, total_ms) == 40 &&
              offsetof(sy_trace_phase, max_ms) == 48 && offsetof(sy_trace_phase, slowest_ms) == 56 &&
              offsetof(sy_trace_phase, arg_sum) == 64 && offsetof(sy_trace_phase, bytes) == 72);
static_assert(sizeof(sy_trace_summary) == 40 && offsetof(sy_trace_summary, storage) == 8 &&
              offsetof(sy_trace_summary, phases) == 16 && offsetof(sy_trace_summary, count) == 24 &&
              offsetof(sy_trace_summary, phase_bytes) == 32);
static_assert(sizeof(sy_wait_statistics) == 32 && offsetof(sy_wait_statistics, total_ms) == 8 &&
              offsetof(sy_wait_statistics, max_ms) == 16 && offsetof(sy_wait_statistics, waits) == 24);
static_assert(sizeof(sy_tuning_key) == 40 && offsetof(sy_tuning_key, device) == 8 && offsetof(sy_tuning_key, hidden) == 16 &&
              offsetof(sy_tuning_key, max_tokens) == 24 && offsetof(sy_tuning_key, ranks) == 32 &&
              offsetof(sy_tuning_key, mode) == 36);
static_assert(sizeof(sy_tuning_values) == 48 && offsetof(sy_tuning_values, dispatch_sms) == 8 &&
              offsetof(sy_tuning_values, combine_sms) == 12 && offsetof(sy_tuning_values, sms) == 16 &&
              offsetof(sy_tuning_values, dispatch_warps) == 20 && offsetof(sy_tuning_values, dispatch_stages) == 24 &&
              offsetof(sy_tuning_values, combine_warps) == 28 && offsetof(sy_tuning_values, pieces) == 32 &&
              offsetof(sy_tuning_values, warps) == 36 && offsetof(sy_tuning_values, chunk_kib) == 40 &&
              offsetof(sy_tuning_values, quantized_dispatch_sms) == 44);

/// The value of the INIT macro of T.
template <class T>
inline constexpr T kInit{};

// sy_const_row_view
template <>
inline constexpr sy_const_row_view kInit<sy_const_row_view> = SY_CONST_ROW_VIEW_INIT;
static_assert(kInit<sy_const_row_view>.data == ConstRows{}.data && kInit<sy_const_row_view>.rows == ConstRows{}.rows &&
              kInit<sy_const_row_view>.cols == ConstRows{}.cols &&
              kInit<sy_const_row_view>.dtype == static_cast<int>(ConstRows{}.dtype) &&
              kInit<sy_const_row_view>.scale_kind == static_cast<int>(ConstRows{}.scale_kind) &&
              kInit<sy_const_row_view>.scales == ConstRows{}.scales);
inline ConstRows twin_of(const sy_const_row_view& c, [[maybe_unused]] const char* name) {
  ConstRows twin;
  twin.data = c.data;
  twin.rows = c.rows;
  twin.cols = c.cols;
  twin.dtype = to_enum_of<DType>(name, "dtype", c.dtype);
  twin.scale_kind = to_enum_of<ScaleKind>(name, "scale_kind", c.scale_kind);
  twin.scales = c.scales;
  return twin;
}
inline ConstRows from_c(const sy_const_row_view* given, const char* name) {
  return twin_of(read_struct(given, kInit<sy_const_row_view>, name), name);
}
inline void fill(sy_const_row_view* to, const ConstRows& from) {
  write_struct(to, sy_const_row_view{
      sizeof(sy_const_row_view), from.data, from.rows, from.cols, static_cast<sy_dtype>(from.dtype),
      static_cast<sy_scale_kind>(from.scale_kind), from.scales});
}

// sy_row_view
template <>
inline constexpr sy_row_view kInit<sy_row_view> = SY_ROW_VIEW_INIT;
static_assert(kInit<sy_row_view>.data == Rows{}.data && kInit<sy_row_view>.rows == Rows{}.rows &&
              kInit<sy_row_view>.cols == Rows{}.cols && kInit<sy_row_view>.dtype == static_cast<int>(Rows{}.dtype) &&
              kInit<sy_row_view>.scale_kind == static_cast<int>(Rows{}.scale_kind) &&
              kInit<sy_row_view>.scales == Rows{}.scales);
inline Rows twin_of(const sy_row_view& c, [[maybe_unused]] const char* name) {
  Rows twin;
  twin.data = c.data;
  twin.rows = c.rows;
  twin.cols = c.cols;
  twin.dtype = to_enum_of<DType>(name, "dtype", c.dtype);
  twin.scale_kind = to_enum_of<ScaleKind>(name, "scale_kind", c.scale_kind);
  twin.scales = c.scales;
  return twin;
}
inline Rows from_c(const sy_row_view* given, const char* name) {
  return twin_of(read_struct(given, kInit<sy_row_view>, name), name);
}
inline void fill(sy_row_view* to, const Rows& from) {
  write_struct(to, sy_row_view{sizeof(sy_row_view), from.data, from.rows, from.cols, static_cast<sy_dtype>(from.dtype),
                    static_cast<sy_scale_kind>(from.scale_kind), from.scales});
}

// sy_expert_ids
template <>
inline constexpr sy_expert_ids kInit<sy_expert_ids> = SY_EXPERT_IDS_INIT;
static_assert(kInit<sy_expert_ids>.data == ExpertIds{}.data && kInit<sy_expert_ids>.num_tokens == ExpertIds{}.num_tokens &&
              kInit<sy_expert_ids>.topk == ExpertIds{}.topk &&
              kInit<sy_expert_ids>.is_int64 == static_cast<int>(ExpertIds{}.is_int64));
inline ExpertIds twin_of(const sy_expert_ids& c, [[maybe_unused]] const char* name) {
  ExpertIds twin;
  twin.data = c.data;
  twin.num_tokens = c.num_tokens;
  twin.topk = c.topk;
  twin.is_int64 = to_bool_of(name, "is_int64", c.is_int64);
  return twin;
}
inline ExpertIds from_c(const sy_expert_ids* given, const char* name = "topk_ids") {
  return twin_of(read_struct(given, kInit<sy_expert_ids>, name), name);
}

// sy_balance_options
template <>
inline constexpr sy_balance_options kInit<sy_balance_options> = SY_BALANCE_OPTIONS_INIT;
static_assert(kInit<sy_balance_options>.tile == BalanceOptions{}.plan.tile &&
              kInit<sy_balance_options>.link_bytes_per_s == BalanceOptions{}.plan.link_bytes_per_s &&
              kInit<sy_balance_options>.seconds_per_row == BalanceOptions{}.plan.seconds_per_row &&
              kInit<sy_balance_options>.seconds_per_move == BalanceOptions{}.plan.seconds_per_move &&
              kInit<sy_balance_options>.staging_bytes == BalanceOptions{}.move.staging_bytes);
inline BalanceOptions twin_of(const sy_balance_options& c, [[maybe_unused]] const char* name) {
  BalanceOptions twin;
  twin.plan.tile = c.tile;
  twin.plan.link_bytes_per_s = c.link_bytes_per_s;
  twin.plan.seconds_per_row = c.seconds_per_row;
  twin.plan.seconds_per_move = c.seconds_per_move;
  twin.move.staging_bytes = c.staging_bytes;
  return twin;
}
inline BalanceOptions from_c(const sy_balance_options* given, const char* name = "options") {
  if (!given) return {};
  return twin_of(read_struct(given, kInit<sy_balance_options>, name), name);
}

// sy_balance_report
inline void fill(sy_balance_report* to, const BalanceReport& from) {
  write_struct(to, sy_balance_report{sizeof(sy_balance_report), from.max_before, from.max_after, from.mean, from.fetched,
                    from.received_bytes});
}

// sy_ledger_config
template <>
inline constexpr sy_ledger_config kInit<sy_ledger_config> = SY_LEDGER_CONFIG_INIT;
static_assert(kInit<sy_ledger_config>.hidden == LedgerConfig{}.hidden &&
              kInit<sy_ledger_config>.max_tokens == LedgerConfig{}.max_tokens &&
              kInit<sy_ledger_config>.max_rows == LedgerConfig{}.max_rows &&
              kInit<sy_ledger_config>.num_experts == LedgerConfig{}.num_experts &&
              kInit<sy_ledger_config>.topk == LedgerConfig{}.topk &&
              kInit<sy_ledger_config>.dtype == static_cast<int>(LedgerConfig{}.dtype) &&
              kInit<sy_ledger_config>.max_ledgers == LedgerConfig{}.max_ledgers);
inline LedgerConfig twin_of(const sy_ledger_config& c, [[maybe_unused]] const char* name) {
  LedgerConfig twin;
  twin.hidden = c.hidden;
  twin.max_tokens = c.max_tokens;
  twin.max_rows = c.max_rows;
  twin.num_experts = c.num_experts;
  twin.topk = c.topk;
  twin.dtype = to_enum_of<DType>(name, "dtype", c.dtype);
  twin.max_ledgers = c.max_ledgers;
  return twin;
}
inline LedgerConfig from_c(const sy_ledger_config* given, const char* name = "config") {
  return twin_of(read_struct(given, kInit<sy_ledger_config>, name), name);
}

// sy_ledger_format
inline void fill(sy_ledger_format* to, const LedgerFormatBytes& from) {
  write_struct(to, sy_ledger_format{sizeof(sy_ledger_format), from.workspace, from.route_meta, from.window, from.guard});
}

// sy_ledger_combine_options
template <>
inline constexpr sy_ledger_combine_options kInit<sy_ledger_combine_options> = SY_LEDGER_COMBINE_OPTIONS_INIT;
static_assert(kInit<sy_ledger_combine_options>.stream == LedgerCombineOptions{}.stream &&
              kInit<sy_ledger_combine_options>.num_sms == LedgerCombineOptions{}.num_sms);
inline LedgerCombineOptions twin_of(const sy_ledger_combine_options& c, [[maybe_unused]] const char* name) {
  LedgerCombineOptions twin;
  twin.stream = c.stream;
  twin.num_sms = c.num_sms;
  require_range_of(name, "reserved", c.reserved, 0, 0);
  return twin;
}
inline LedgerCombineOptions from_c(const sy_ledger_combine_options* given, const char* name = "options") {
  if (!given) return {};
  return twin_of(read_struct(given, kInit<sy_ledger_combine_options>, name), name);
}

// sy_low_latency_config
template <>
inline constexpr sy_low_latency_config kInit<sy_low_latency_config> = SY_LOW_LATENCY_CONFIG_INIT;
static_assert(kInit<sy_low_latency_config>.hidden == LowLatencyConfig{}.hidden &&
              kInit<sy_low_latency_config>.max_tokens == LowLatencyConfig{}.max_tokens &&
              kInit<sy_low_latency_config>.num_experts == LowLatencyConfig{}.num_experts &&
              kInit<sy_low_latency_config>.topk == LowLatencyConfig{}.topk &&
              kInit<sy_low_latency_config>.dtype == static_cast<int>(LowLatencyConfig{}.dtype) &&
              kInit<sy_low_latency_config>.scales == static_cast<int>(LowLatencyConfig{}.scales) &&
              kInit<sy_low_latency_config>.scale_group == LowLatencyConfig{}.scale_group &&
              kInit<sy_low_latency_config>.scale_order == static_cast<int>(LowLatencyConfig{}.scale_order) &&
              kInit<sy_low_latency_config>.sending == static_cast<int>(LowLatencyConfig{}.sending) &&
              kInit<sy_low_latency_config>.pieces == LowLatencyConfig{}.pieces &&
              kInit<sy_low_latency_config>.invalid_ids == static_cast<int>(LowLatencyConfig{}.invalid_ids));
inline LowLatencyConfig twin_of(const sy_low_latency_config& c, [[maybe_unused]] const char* name) {
  LowLatencyConfig twin;
  twin.hidden = c.hidden;
  twin.max_tokens = c.max_tokens;
  twin.num_experts = c.num_experts;
  twin.topk = c.topk;
  twin.dtype = to_enum_of<DType>(name, "dtype", c.dtype);
  twin.scales = to_enum_of<ScaleKind>(name, "scales", c.scales);
  twin.scale_group = c.scale_group;
  twin.scale_order = to_enum_of<ScaleOrder>(name, "scale_order", c.scale_order);
  twin.sending = to_enum_of<Sending>(name, "sending", c.sending);
  twin.pieces = c.pieces;
  twin.invalid_ids = to_enum_of<InvalidIds>(name, "invalid_ids", c.invalid_ids);
  require_range_of(name, "reserved", c.reserved, 0, 0);
  return twin;
}
inline LowLatencyConfig from_c(const sy_low_latency_config* given, const char* name = "config") {
  return twin_of(read_struct(given, kInit<sy_low_latency_config>, name), name);
}

// sy_low_latency_dispatch_options
template <>
inline constexpr sy_low_latency_dispatch_options kInit<sy_low_latency_dispatch_options> = SY_LOW_LATENCY_DISPATCH_OPTIONS_INIT;
static_assert(kInit<sy_low_latency_dispatch_options>.topk_weights == LowLatencyDispatchOptions{}.topk_weights &&
              kInit<sy_low_latency_dispatch_options>.stream == LowLatencyDispatchOptions{}.stream &&
              kInit<sy_low_latency_dispatch_options>.device_tokens == LowLatencyDispatchOptions{}.device_tokens &&
              kInit<sy_low_latency_dispatch_options>.num_sms == LowLatencyDispatchOptions{}.num_sms);
inline LowLatencyDispatchOptions twin_of(const sy_low_latency_dispatch_options& c, [[maybe_unused]] const char* name) {
  LowLatencyDispatchOptions twin;
  twin.topk_weights = c.topk_weights;
  twin.stream = c.stream;
  twin.device_tokens = c.device_tokens;
  twin.num_sms = c.num_sms;
  return twin;
}

// sy_low_latency_combine_options
template <>
inline constexpr sy_low_latency_combine_options kInit<sy_low_latency_combine_options> = SY_LOW_LATENCY_COMBINE_OPTIONS_INIT;
static_assert(kInit<sy_low_latency_combine_options>.order == static_cast<int>(LowLatencyCombineOptions{}.order) &&
              kInit<sy_low_latency_combine_options>.num_sms == LowLatencyCombineOptions{}.num_sms &&
              kInit<sy_low_latency_combine_options>.topk_weights == LowLatencyCombineOptions{}.topk_weights &&
              kInit<sy_low_latency_combine_options>.expert_scale == LowLatencyCombineOptions{}.expert_scale &&
              kInit<sy_low_latency_combine_options>.stream == LowLatencyCombineOptions{}.stream);
inline LowLatencyCombineOptions twin_of(const sy_low_latency_combine_options& c, [[maybe_unused]] const char* name) {
  LowLatencyCombineOptions twin;
  twin.order = to_enum_of<CombineOrder>(name, "order", c.order);
  twin.num_sms = c.num_sms;
  twin.topk_weights = c.topk_weights;
  twin.expert_scale = c.expert_scale;
  twin.stream = c.stream;
  require_range_of(name, "reserved", c.reserved, 0, 0);
  return twin;
}

// sy_all_to_all_options
template <>
inline constexpr sy_all_to_all_options kInit<sy_all_to_all_options> = SY_ALL_TO_ALL_OPTIONS_INIT;
static_assert(kInit<sy_all_to_all_options>.topk_weights == AllToAllOptions{}.topk_weights &&
              kInit<sy_all_to_all_options>.expert_scale == AllToAllOptions{}.expert_scale &&
              kInit<sy_all_to_all_options>.stream == AllToAllOptions{}.stream &&
              kInit<sy_all_to_all_options>.device_tokens == AllToAllOptions{}.device_tokens &&
              kInit<sy_all_to_all_options>.num_sms == AllToAllOptions{}.num_sms);
inline AllToAllOptions twin_of(const sy_all_to_all_options& c, [[maybe_unused]] const char* name) {
  AllToAllOptions twin;
  twin.topk_weights = c.topk_weights;
  twin.expert_scale = c.expert_scale;
  twin.stream = c.stream;
  twin.device_tokens = c.device_tokens;
  twin.num_sms = c.num_sms;
  require_range_of(name, "reserved", c.reserved, 0, 0);
  return twin;
}

// sy_wait_report
inline void fill(sy_wait_report* to, const WaitReport& from) {
  write_struct(to, sy_wait_report{
      sizeof(sy_wait_report), from.operation, from.site, from.call, from.waiting_rank, from.awaited_rank, from.expected,
      from.seen, from.waited_ms, from.silent_ms});
}

// sy_group_options
template <>
inline constexpr sy_group_options kInit<sy_group_options> = SY_GROUP_OPTIONS_INIT;
inline GroupOptions twin_of(const sy_group_options& c, [[maybe_unused]] const char* name) {
  GroupOptions twin;
  twin.heap_bytes = c.heap_bytes;
  require_range_of(name, "timeout_ms", c.timeout_ms, 1, INT64_MAX);
  twin.timeout = std::chrono::milliseconds(c.timeout_ms);
  require_range_of(name, "rendezvous_timeout_ms", c.rendezvous_timeout_ms, 1, INT64_MAX);
  twin.rendezvous_timeout = std::chrono::milliseconds(c.rendezvous_timeout_ms);
  twin.num_blocks = c.num_blocks;
  twin.num_warps = c.num_warps;
  require_range_of(name, "reserved", c.reserved, 0, 0);
  require_range_of(name, "num_sms", c.num_sms, 0, INT32_MAX);
  twin.num_sms = c.num_sms;
  twin.backend = to_enum_of<Backend>(name, "backend", c.backend);
  require_range_of(name, "device", c.device, -1, INT32_MAX);
  twin.device = c.device;
  if (c.host) twin.host = c.host;
  require_range_of(name, "silence_ms", c.silence_ms, 0, INT64_MAX);
  twin.silence = std::chrono::milliseconds(c.silence_ms);
  twin.network = to_enum_of<HostNetwork>(name, "network", c.network);
  require_range_of(name, "reserved2", c.reserved2, 0, 0);
  return twin;
}
inline GroupOptions from_c(const sy_group_options* given, const char* name = "options") {
  if (!given) return {};
  return twin_of(read_struct(given, kInit<sy_group_options>, name), name);
}

// sy_normal_config
template <>
inline constexpr sy_normal_config kInit<sy_normal_config> = SY_NORMAL_CONFIG_INIT;
static_assert(kInit<sy_normal_config>.hidden == NormalConfig{}.hidden &&
              kInit<sy_normal_config>.max_tokens == NormalConfig{}.max_tokens &&
              kInit<sy_normal_config>.num_experts == NormalConfig{}.num_experts &&
              kInit<sy_normal_config>.topk == NormalConfig{}.topk &&
              kInit<sy_normal_config>.layout == static_cast<int>(NormalConfig{}.layout) &&
              kInit<sy_normal_config>.expert_alignment == NormalConfig{}.expert_alignment &&
              kInit<sy_normal_config>.dtype == static_cast<int>(NormalConfig{}.dtype) &&
              kInit<sy_normal_config>.staging == static_cast<int>(NormalConfig{}.staging) &&
              kInit<sy_normal_config>.ring_num_channels == NormalConfig{}.ring.num_channels &&
              kInit<sy_normal_config>.ring_send_chunk == NormalConfig{}.ring.send_chunk &&
              kInit<sy_normal_config>.ring_slots == NormalConfig{}.ring.slots &&
              kInit<sy_normal_config>.invalid_ids == static_cast<int>(NormalConfig{}.invalid_ids) &&
              kInit<sy_normal_config>.pool_bytes == NormalConfig{}.pool_bytes &&
              kInit<sy_normal_config>.ring_max_bytes == NormalConfig{}.ring.max_bytes);
inline NormalConfig twin_of(const sy_normal_config& c, [[maybe_unused]] const char* name) {
  NormalConfig twin;
  twin.hidden = c.hidden;
  twin.max_tokens = c.max_tokens;
  twin.num_experts = c.num_experts;
  twin.topk = c.topk;
  twin.layout = to_enum_of<Layout>(name, "layout", c.layout);
  twin.expert_alignment = c.expert_alignment;
  twin.dtype = to_enum_of<DType>(name, "dtype", c.dtype);
  twin.staging = to_enum_of<Staging>(name, "staging", c.staging);
  twin.ring.num_channels = c.ring_num_channels;
  twin.ring.send_chunk = c.ring_send_chunk;
  twin.ring.slots = c.ring_slots;
  twin.invalid_ids = to_enum_of<InvalidIds>(name, "invalid_ids", c.invalid_ids);
  twin.pool_bytes = c.pool_bytes;
  twin.ring.max_bytes = c.ring_max_bytes;
  return twin;
}
inline NormalConfig from_c(const sy_normal_config* given, const char* name = "config") {
  return twin_of(read_struct(given, kInit<sy_normal_config>, name), name);
}

// sy_memory_requirement
inline void fill(sy_memory_requirement* to, const MemoryRequirement& from) {
  write_struct(to, sy_memory_requirement{
      sizeof(sy_memory_requirement), from.control_bytes, from.pool_bytes, from.ring_bytes, from.total(), from.private_bytes});
}

// sy_dispatch_options
template <>
inline constexpr sy_dispatch_options kInit<sy_dispatch_options> = SY_DISPATCH_OPTIONS_INIT;
static_assert(kInit<sy_dispatch_options>.quantize == static_cast<int>(DispatchOptions{}.quantize) &&
              kInit<sy_dispatch_options>.size == static_cast<int>(DispatchOptions{}.size) &&
              kInit<sy_dispatch_options>.overflow == static_cast<int>(DispatchOptions{}.overflow) &&
              kInit<sy_dispatch_options>.padding == static_cast<int>(DispatchOptions{}.padding) &&
              kInit<sy_dispatch_options>.capacity == DispatchOptions{}.capacity &&
              kInit<sy_dispatch_options>.stream == DispatchOptions{}.stream &&
              kInit<sy_dispatch_options>.device_tokens == DispatchOptions{}.device_tokens &&
              kInit<sy_dispatch_options>.num_sms == DispatchOptions{}.num_sms);
inline DispatchOptions twin_of(const sy_dispatch_options& c, [[maybe_unused]] const char* name) {
  DispatchOptions twin;
  twin.quantize = to_enum_of<ScaleKind>(name, "quantize", c.quantize);
  twin.size = to_enum_of<SizePolicy>(name, "size", c.size);
  twin.overflow = to_enum_of<Overflow>(name, "overflow", c.overflow);
  twin.padding = to_enum_of<Padding>(name, "padding", c.padding);
  twin.capacity = c.capacity;
  twin.stream = c.stream;
  twin.device_tokens = c.device_tokens;
  twin.num_sms = c.num_sms;
  return twin;
}

// sy_combine_options
template <>
inline constexpr sy_combine_options kInit<sy_combine_options> = SY_COMBINE_OPTIONS_INIT;
static_assert(kInit<sy_combine_options>.order == static_cast<int>(CombineOptions{}.order) &&
              kInit<sy_combine_options>.apply_weights == static_cast<int>(CombineOptions{}.apply_weights) &&
              kInit<sy_combine_options>.topk_weights == CombineOptions{}.topk_weights &&
              kInit<sy_combine_options>.stream == CombineOptions{}.stream &&
              kInit<sy_combine_options>.num_sms == CombineOptions{}.num_sms);
inline CombineOptions twin_of(const sy_combine_options& c, [[maybe_unused]] const char* name) {
  CombineOptions twin;
  twin.order = to_enum_of<CombineOrder>(name, "order", c.order);
  twin.apply_weights = to_bool_of(name, "apply_weights", c.apply_weights);
  twin.topk_weights = c.topk_weights;
  twin.bias[0] = c.bias[0];
  twin.bias[1] = c.bias[1];
  twin.stream = c.stream;
  twin.num_sms = c.num_sms;
  return twin;
}

// sy_call_statistics
inline void fill(sy_call_statistics* to, const CallStatistics& from) {
  write_struct(to, sy_call_statistics{
      sizeof(sy_call_statistics), from.remote_bytes, from.local_bytes, from.copied_bytes, from.payload_rows,
      from.metadata_bytes, from.plan_us, from.total_us, from.network_bytes});
}

// sy_trace_options
template <>
inline constexpr sy_trace_options kInit<sy_trace_options> = SY_TRACE_OPTIONS_INIT;
static_assert(kInit<sy_trace_options>.num_blocks == TraceOptions{}.num_blocks &&
              kInit<sy_trace_options>.num_warps == TraceOptions{}.num_warps &&
              kInit<sy_trace_options>.events_per_track == TraceOptions{}.events_per_track);
inline TraceOptions twin_of(const sy_trace_options& c, [[maybe_unused]] const char* name) {
  TraceOptions twin;
  twin.num_blocks = c.num_blocks;
  twin.num_warps = c.num_warps;
  twin.events_per_track = c.events_per_track;
  return twin;
}
inline TraceOptions from_c(const sy_trace_options* given, const char* name = "options") {
  if (!given) return {};
  return twin_of(read_struct(given, kInit<sy_trace_options>, name), name);
}

// sy_wait_statistics
inline void fill(sy_wait_statistics* to, const WaitStatistics& from) {
  write_struct(to, sy_wait_statistics{sizeof(sy_wait_statistics), from.total_ms, from.max_ms, from.waits});
}

// sy_tuning_key
template <>
inline constexpr sy_tuning_key kInit<sy_tuning_key> = SY_TUNING_KEY_INIT;
inline TuningKey twin_of(const sy_tuning_key& c, [[maybe_unused]] const char* name) {
  TuningKey twin;
  require_of(name, "device", c.device);
  twin.device = c.device;
  require_range_of(name, "hidden", c.hidden, 1, INT64_MAX);
  twin.hidden = c.hidden;
  require_range_of(name, "max_tokens", c.max_tokens, 1, INT64_MAX);
  twin.max_tokens = c.max_tokens;
  require_range_of(name, "ranks", c.ranks, 1, INT32_MAX);
  twin.ranks = c.ranks;
  twin.mode = to_enum_of<TuningMode>(name, "mode", c.mode);
  return twin;
}
inline TuningKey from_c(const sy_tuning_key* given, const char* name = "key") {
  return twin_of(read_struct(given, kInit<sy_tuning_key>, name), name);
}

// sy_tuning_values
inline void fill(sy_tuning_values* to, const TuningValues& from) {
  write_struct(to, sy_tuning_values{
      sizeof(sy_tuning_values), from.dispatch_sms, from.combine_sms, from.sms, from.dispatch_warps, from.dispatch_stages,
      from.combine_warps, from.pieces, from.warps, from.chunk_kib, from.quantized_dispatch_sms});
}

}  // namespace switchyard::detail
// clang-format on
