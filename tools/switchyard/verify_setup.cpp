// SPDX-License-Identifier: Apache-2.0
#include "verify_setup.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "cli.hpp"

namespace switchyard::tool {
namespace {

/// Ranks hold different numbers of tokens: all, three quarters, none, a half, all, ...
int64_t tokens_of(int rank, int64_t tokens, bool equal) {
  if (equal) return tokens;
  constexpr int64_t kQuarters[] = {4, 3, 0, 2};
  return tokens * kQuarters[rank % 4] / 4;
}

RoutingSource source_of(const VerifyCase& c, const VerifyOptions& options) {
  return RoutingSource("--routings", c.routing, {options.experts, options.topk, c.ranks, c.seed, 64});
}

/// A scenario but for its routes: the fullest rank has its number of tokens, the others none.
Scenario sizes_of(const VerifyCase& c, const VerifyOptions& options, const RoutingSource& source) {
  Scenario s;
  s.world = c.ranks;
  s.experts = source.experts();
  s.topk = source.topk();
  s.hidden = c.hidden;
  const bool low_latency = c.mode != "normal";
  s.layout = low_latency || c.layout == "expert_major" ? Layout::expert_major : Layout::rank_major;
  s.alignment = low_latency ? 1 : static_cast<int>(options.alignment);
  s.seed = c.seed;
  s.routing.resize(static_cast<size_t>(c.ranks));
  s.routing.front().tokens = c.tokens;
  return s;
}

/// Memory for outputs, in the heap or not.
size_t pool_of(const NormalConfig& config, int world, Backend backend) {
  const switchyard::MemoryRequirement need = NormalExchange::memory_required(config, world, backend);
  return need.pool_bytes + need.private_bytes;
}

/// Of device_bytes, for these sizes.
size_t device_bytes(const VerifyCase& c, const Scenario& s) {
  if (c.mode != "normal") {
    size_t most = 0;
    for (const LowLatencyConfig& config : low_latency_configs(c, s))
      most = std::max(most, LowLatencyRank::device_bytes(s, config));
    return most + (size_t{1} << 20);
  }
  NormalConfig config = normal_config(c, s);
  config.pool_bytes = 0;  // then the pool holds any output: so much may be given to combine from ordinary memory
  const auto tokens = static_cast<size_t>(config.max_tokens), row = static_cast<size_t>(s.hidden) * sizeof(float);
  const size_t inputs = tokens * (5 * row + static_cast<size_t>(s.topk) * 32);
  return pool_of(config, s.world, Backend::cuda) + inputs + (size_t{1} << 20);
}

}  // namespace

CaseRows rows_of(const VerifyCase& c) {
  if (c.dtype == "f16") return {DType::f16, ScaleKind::none};
  if (c.dtype == "f32") return {DType::f32, ScaleKind::none};
  if (c.dtype == "fp8") return {DType::fp8_e4m3, ScaleKind::f32};
  if (c.dtype == "fp8_ue8m0") return {DType::fp8_e4m3, ScaleKind::ue8m0};
  return {DType::bf16, ScaleKind::none};
}

ScaleKind quantize_of(const VerifyCase& c) {
  return c.quantize == "f32" ? ScaleKind::f32 : c.quantize == "ue8m0" ? ScaleKind::ue8m0 : ScaleKind::none;
}

Backend backend_of(const VerifyCase& c) { return c.gpus > 0 ? Backend::cuda : Backend::cpu; }

Scenario scenario_of(const VerifyCase& c, const VerifyOptions& options) {
  const RoutingSource source = source_of(c, options);
  Scenario s = sizes_of(c, options, source);
  for (int r = 0; r < c.ranks; ++r) {
    const int64_t tokens = tokens_of(r, c.tokens, options.equal_tokens);
    s.routing[static_cast<size_t>(r)] = std::move(source.batches(r, tokens, 1).front());
  }
  return s;
}

NormalConfig normal_config(const VerifyCase& c, const Scenario& s) {
  NormalConfig config;
  config.hidden = s.hidden;
  config.num_experts = s.experts;
  config.topk = s.topk;
  config.layout = s.layout;
  config.expert_alignment = s.alignment;
  config.row_type = rows_of(c).type == DType::fp8_e4m3 ? DType::bf16 : rows_of(c).type;
  config.staging = c.staging == "ring" ? Staging::ring : Staging::direct;
  config.ring = {3, 2, std::max(4, s.topk)};  // small rings: they wrap and hold their producers back
  for (int r = 0; r < s.world; ++r) config.max_tokens = std::max(config.max_tokens, s.tokens(r));
  // Up to three outputs and two row buffers are alive at once.
  if (const size_t pool = pool_of(config, s.world, backend_of(c)); pool > 0) config.pool_bytes = 4 * pool + (size_t{1} << 16);
  return config;
}

std::vector<LowLatencyConfig> low_latency_configs(const VerifyCase& c, const Scenario& s) {
  const ScaleKind scales = c.quantize != "none" ? quantize_of(c) : rows_of(c).scales;
  const LowLatencyConfig plain = low_latency_config(s, rows_of(c).type, scales);
  std::vector<LowLatencyConfig> all{plain, plain};
  all[1].sending = Sending::per_route;
  if (scales != ScaleKind::none) {
    all[1].scale_order = ScaleOrder::column_major;
    if (c.quantize != "none") all[1].scale_group = 32;
  }
  return all;
}

size_t heap_bytes(const VerifyCase& c, const Scenario& s) {
  if (c.mode == "normal") return NormalExchange::heap_bytes_for(normal_config(c, s), c.ranks, backend_of(c));
  size_t most = 0;
  for (const LowLatencyConfig& config : low_latency_configs(c, s))
    most = std::max(most, LowLatencyExchange::heap_bytes_for(config, c.ranks));
  return most;
}

size_t device_bytes(const VerifyCase& c, const VerifyOptions& options) {
  return device_bytes(c, sizes_of(c, options, source_of(c, options)));
}

double host_bytes(const VerifyCase& c, const VerifyOptions& options) {
  const Scenario s = sizes_of(c, options, source_of(c, options));
  const auto ranks = static_cast<double>(c.ranks), tokens = static_cast<double>(c.tokens);
  // Ids and weights of all ranks, kept routes on every rank; a rank's logits, or its batches once more.
  const double routing = ranks * tokens * s.topk * (8 + ranks) + tokens * std::max(s.experts * 4, s.topk * 8);
  // Ring staging: outputs are not in the heap. Low latency: what was received, what the experts made of it, a copy of either.
  const double copies = c.mode != "normal" ? 3 : c.staging == "ring" ? 2 : 1;
  const auto heap = static_cast<double>(heap_bytes(c, s));
  return routing + ranks * ((c.gpus > 0 ? 0 : heap) + copies * static_cast<double>(device_bytes(c, s)));
}

void check_verify_case(const VerifyCase& c, const VerifyOptions& options, size_t available) {
  const std::string mode = c.mode == "normal" ? fmt::format("normal, {} rows, {} staging", c.layout, c.staging) : c.mode;
  require_memory(fmt::format("--tokens {} --hidden {} --ranks {} ({})", c.tokens, c.hidden, c.ranks, mode),
                 host_bytes(c, options), available);
}

}  // namespace switchyard::tool
