// SPDX-License-Identifier: Apache-2.0
#include "bench/options.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "check/low_latency_rank.hpp"
#include "cli/verb.hpp"
#include "switchyard/normal.hpp"
#include "switchyard/tuning.hpp"

namespace switchyard::tool {

const Mode& exchange_of(const BenchOptions& o) {
  const Mode& mode = mode_named(o.mode);
  return mode.has_experts ? mode_named(o.exchange) : mode;
}

RoutingSource routing_source(const BenchOptions& o) {
  return {"--routing", o.routing, {o.experts, o.topk, static_cast<int>(o.ranks), static_cast<uint64_t>(o.seed)}};
}

Scenario shape_of(const BenchOptions& o, const RoutingSource& source) {
  const bool has_layouts = mode_named(o.mode).has_layouts;
  Scenario s;
  s.world = static_cast<int>(o.ranks);
  s.experts = source.experts();
  s.topk = source.topk();
  s.hidden = o.hidden;
  s.layout = has_layouts ? layout_named(o.layout) : Layout::expert_major;
  s.alignment = has_layouts ? static_cast<int>(o.alignment) : 1;
  s.seed = static_cast<uint64_t>(o.seed);
  return s;
}

NormalConfig normal_config(const BenchOptions& o, const Scenario& s) {
  NormalConfig c;
  c.hidden = s.hidden;
  c.num_experts = s.experts;
  c.topk = s.topk;
  c.max_tokens = o.tokens;
  c.layout = s.layout;
  c.expert_alignment = s.alignment;
  c.dtype = rows_named(o.dtype).result_type();
  c.staging = staging_named(o.staging);
  if (o.channels > 0) c.ring.num_channels = static_cast<int>(o.channels);
  if (o.send_chunk > 0) c.ring.send_chunk = static_cast<int>(o.send_chunk);
  if (o.slots > 0) c.ring.slots = static_cast<int>(o.slots);
  return c;
}

LowLatencyConfig low_latency_config(const BenchOptions& o, const Scenario& s) {
  LowLatencyConfig c = low_latency_config(s, rows_named(o.dtype).type, sent_scales(o));
  c.scale_order = scale_order_named(o.scale_order);
  c.sending = sending_named(o.sending);
  c.pieces = static_cast<int>(o.pieces);
  return c;
}

ScaleKind sent_scales(const BenchOptions& o) {
  const ScaleKind made = scales_named(o.quantize);
  return made != ScaleKind::none ? made : rows_named(o.dtype).scales;
}

size_t sent_row_bytes(const BenchOptions& o) {
  const ScaleKind scales = sent_scales(o);
  if (scales == ScaleKind::none) return returned_row_bytes(o);
  return dtype_bytes(DType::fp8_e4m3, o.hidden) + scale_row_bytes(o.hidden, scales);
}

size_t returned_row_bytes(const BenchOptions& o) { return dtype_bytes(rows_named(o.dtype).result_type(), o.hidden); }

void check_words(const BenchOptions& o) {
  const Mode& mode = mode_named(o.mode);
  const bool fp8 = rows_named(o.dtype).quantised(), quantised = scales_named(o.quantize) != ScaleKind::none;
  if (mode.has_layouts && order_named(o.order) == CombineOrder::per_route && layout_named(o.layout) == Layout::rank_major)
    throw UsageError(
        "--order: 'per_route' given with --layout rank_major, whose rows are one per (token, rank); allowed: per_rank, or "
        "--layout expert_major");
  if (!mode.has_layouts && order_named(o.order) == CombineOrder::per_host)
    throw UsageError(fmt::format(
        "--order: 'per_host' given with --mode {}; allowed with --mode normal, or per_rank or per_route", mode.name));
  if (mode.has_experts && o.dtype != to_string(DType::bf16))
    throw UsageError(
        fmt::format("--mode: '{}' given with {} rows; its tokens are bf16, and --quantize f32 or ue8m0 makes rows and experts "
                    "fp8; allowed: --dtype bf16",
                    mode.name, o.dtype));
  if (mode.has_experts && quantised && backend_named(o.backend) == Backend::cpu)
    throw UsageError(
        fmt::format("--quantize: '{}' given with --mode {} --backend cpu, whose experts compute in bf16; allowed: "
                    "none, or --backend cuda",
                    o.quantize, mode.name));
  if (mode.has_experts && !quantised && accumulate_named(o.accumulate) != Accumulate::exact)
    throw UsageError(
        fmt::format("--accumulate: '{}' given with bf16 experts; allowed with --quantize f32 or ue8m0", o.accumulate));
  if (o.balance && o.spare_slots == 0 && std::count(o.swept.begin(), o.swept.end(), "spare-slots") == 0)
    throw UsageError("--balance: given without --spare-slots, the slots for replicas");
  if (o.balance && &exchange_of(o) != &kNormal && backend_named(o.backend) == Backend::cuda)
    throw UsageError(
        "--balance: given with --exchange low_latency --backend cuda, whose calls are timed in graphs; allowed: --exchange "
        "normal");
  if (o.capacity > 0 && mode.has_experts && &exchange_of(o) != &kNormal)
    throw UsageError(
        "--capacity: given with --exchange low_latency, whose layers have no fused form; allowed: --exchange normal");
  if (mode.plain_rows && (fp8 || quantised))
    throw UsageError(fmt::format(
        "--mode: '{}' given with fp8 rows; its rows travel unchanged; allowed: --dtype bf16, f16 or f32, --quantize none",
        mode.name));
  if (fp8 && quantised) throw UsageError("--quantize: fp8 rows are quantized already; allowed with --dtype bf16, f16 or f32");
  if (sent_scales(o) == ScaleKind::none && scale_order_named(o.scale_order) == ScaleOrder::column_major)
    throw UsageError(
        "--scale-order: 'column_major' given for rows without scales; allowed with --quantize f32 or ue8m0, or --dtype fp8");
  if (const int64_t max = exchange_of(o).max_tokens; o.tokens > max)
    throw UsageError(fmt::format("--tokens: {} given; low-latency mode takes at most {}", o.tokens, max));
}

void choose_sms(BenchOptions& o, const std::string& gpu, int64_t max) {
  if (o.combine_sms == 0) o.combine_sms = o.sms;
  if (o.sms > 0) return;
  const Mode& mode = mode_named(o.mode);
  const Layout layout = mode.has_layouts ? layout_named(o.layout) : Layout::expert_major;
  const TuningKey key{gpu, mode.tuning_of(layout), static_cast<int>(o.ranks), o.hidden, o.tokens};
  const bool direct = staging_named(o.staging) == Staging::direct;  // rings ignore tunings
  const TuningValues tuned = direct ? Tuning::from_environment().find(key) : TuningValues{};
  const auto chosen = [&](int value, int default_value) {
    return std::min<int64_t>(value > 0 ? value : default_value > 0 ? default_value : max, max);
  };
  const bool quantises = &mode == &kNormal && direct && scales_named(o.quantize) != ScaleKind::none;
  o.sms = quantises ? chosen(tuned.quantized_dispatch_sms, kDefaultQuantizingSms)
                    : chosen(mode.one_launch ? tuned.sms : tuned.dispatch_sms, mode.default_sms);
  o.combine_sms = chosen(mode.one_launch ? tuned.sms : tuned.combine_sms, mode.default_sms);
}

}  // namespace switchyard::tool
