// SPDX-License-Identifier: Apache-2.0
#include "verify/setup.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "cli/outputs.hpp"
#include "run/routing_source.hpp"

namespace switchyard::tool {
namespace {

/// Ranks have different numbers of tokens: all, three quarters, none, half, all, ...
int64_t tokens_of(int rank, int64_t tokens, bool equal) {
  if (equal) return tokens;
  constexpr int64_t kQuarters[] = {4, 3, 0, 2};
  return tokens * kQuarters[rank % 4] / 4;
}

RoutingSource source_of(const VerifyCase& c, const VerifyOptions& options) {
  return RoutingSource("--routing", c.routing, {options.experts, options.topk, c.ranks, c.seed, 64});
}

/// A scenario without routes in which the fullest rank has the full number of tokens and the others have none.
Scenario sizes_of(const VerifyCase& c, const VerifyOptions& options, const RoutingSource& source) {
  Scenario s;
  s.world = c.ranks;
  s.experts = source.experts();
  s.topk = source.topk();
  s.hidden = c.hidden;
  const bool has_layouts = mode_named(c.mode).has_layouts;
  s.layout = has_layouts ? layout_named(c.layout) : Layout::expert_major;
  s.alignment = has_layouts ? static_cast<int>(options.alignment) : 1;
  s.seed = c.seed;
  s.routing.resize(static_cast<size_t>(c.ranks));
  s.routing.front().num_tokens = c.tokens;
  return s;
}

/// Memory for outputs, inside or outside the heap.
size_t pool_of(const NormalConfig& config, int world, Backend backend) {
  const switchyard::MemoryRequirement need = NormalExchange::memory_required(config, world, backend);
  return need.pool_bytes + need.private_bytes;
}

}  // namespace

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
  config.dtype = rows_named(c.dtype).result_type();
  config.staging = staging_named(c.staging);
  config.ring = {3, 2, std::max(4, s.topk)};  // small rings, which wrap and block their producers
  for (int r = 0; r < s.world; ++r) config.max_tokens = std::max(config.max_tokens, s.tokens(r));
  // Up to three outputs and two row buffers are alive at the same time.
  if (const size_t pool = pool_of(config, s.world, backend_of(c)); pool > 0) config.pool_bytes = 4 * pool + (size_t{1} << 16);
  return config;
}

std::vector<LowLatencyConfig> low_latency_configs(const VerifyCase& c, const Scenario& s) {
  const SourceRows rows = rows_named(c.dtype);
  const ScaleKind made = scales_named(c.quantize), scales = made != ScaleKind::none ? made : rows.scales;
  const LowLatencyConfig plain = low_latency_config(s, rows.type, scales);
  std::vector<LowLatencyConfig> all{plain, plain};
  all[1].sending = Sending::per_route;
  if (scales != ScaleKind::none) {
    all[1].scale_order = ScaleOrder::column_major;
    if (made != ScaleKind::none) all[1].scale_group = 32;
  }
  return all;
}

size_t normal_heap_bytes(const VerifyCase& c, const Scenario& s) {
  return NormalExchange::heap_bytes(normal_config(c, s), c.ranks, backend_of(c));
}

size_t normal_device_bytes(const VerifyCase& c, const Scenario& s) {
  NormalConfig config = normal_config(c, s);
  config.pool_bytes = 0;  // with 0 the pool holds any output; combine may take that much from ordinary memory
  const auto tokens = static_cast<size_t>(config.max_tokens), row = static_cast<size_t>(s.hidden) * sizeof(float);
  const size_t inputs = tokens * (5 * row + static_cast<size_t>(s.topk) * 32);
  return pool_of(config, s.world, Backend::cuda) + inputs + (size_t{1} << 20);
}

size_t low_latency_heap_bytes(const VerifyCase& c, const Scenario& s) {
  size_t max = 0;
  for (const LowLatencyConfig& config : low_latency_configs(c, s))
    max = std::max(max, LowLatencyExchange::heap_bytes(config, c.ranks));
  return max;
}

size_t low_latency_device_bytes(const VerifyCase& c, const Scenario& s) {
  size_t max = 0;
  for (const LowLatencyConfig& config : low_latency_configs(c, s)) max = std::max(max, LowLatencyRank::device_bytes(s, config));
  return max + (size_t{1} << 20);
}

size_t heap_bytes(const VerifyCase& c, const Scenario& s) { return verify_mode(c).heap_bytes(c, s); }

std::string mode_text(const VerifyCase& c) {
  if (!mode_named(c.mode).has_layouts) return c.mode;
  return fmt::format("{}, {} rows, {} staging", c.mode, c.layout, c.staging);
}

size_t device_bytes(const VerifyCase& c, const VerifyOptions& options) {
  return verify_mode(c).device_bytes(c, sizes_of(c, options, source_of(c, options)));
}

double host_bytes(const VerifyCase& c, const VerifyOptions& options) {
  const Scenario s = sizes_of(c, options, source_of(c, options));
  const auto ranks = static_cast<double>(c.ranks), tokens = static_cast<double>(c.tokens);
  // The ids and weights of all ranks and, on every rank, the kept routes; also a rank's logits, or its batches again.
  const double routing = ranks * tokens * s.topk * (8 + ranks) + tokens * std::max(s.experts * 4, s.topk * 8);
  const VerifyMode& mode = verify_mode(c);
  const auto heap = static_cast<double>(mode.heap_bytes(c, s));
  return routing + ranks * ((c.gpus > 0 ? 0 : heap) + mode.copies(c) * static_cast<double>(mode.device_bytes(c, s)));
}

void check_verify_case(const VerifyCase& c, const VerifyOptions& options, size_t available) {
  require_memory(fmt::format("--tokens {} --hidden {} --ranks {} ({})", c.tokens, c.hidden, c.ranks, mode_text(c)),
                 host_bytes(c, options), available);
}

}  // namespace switchyard::tool
