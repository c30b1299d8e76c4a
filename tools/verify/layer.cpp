// SPDX-License-Identifier: Apache-2.0
// Whole layers: dispatch, experts and combine in separate calls, and the fused form if the library supports it.
#include "layer/layer_rank.hpp"

#include <algorithm>
#include <limits>

#include "verify/setup.hpp"

namespace switchyard::tool {
namespace {

constexpr const char* kPerRoute = "per_route";
constexpr const char* kFused = "layer, fused, per_route";
constexpr const char* kFusedBits = "layer, fused, bits of separate calls";
constexpr int64_t kAllTokens = std::numeric_limits<int64_t>::max();

/// The fused form requires bf16 and the combine order per_route.
bool may_fuse(const VerifyCase& c) {
  return scales_named(c.quantize) == ScaleKind::none &&
         std::find(c.orders.begin(), c.orders.end(), kPerRoute) != c.orders.end();
}

/// One layer for each exchange; in fp8, with low latency and scales in either order. The first layer also runs in fused form if
/// possible.
std::vector<LayerSpec> layer_specs(const VerifyCase& c, const Scenario& s) {
  const ScaleKind quantize = scales_named(c.quantize);
  LayerSpec normal{s, c.intermediate, backend_of(c), layer_normal_config(s), {c.sms, c.sms}, quantize};
  normal.fused_sms = c.sms;
  LowLatencyConfig masked = layer_low_latency_config(s, quantize);
  std::vector<LayerSpec> all{normal, normal};
  all.front().fused = may_fuse(c) && why_not_fused(normal).empty();
  all.back().exchange = masked;
  if (quantize == ScaleKind::none) return all;
  masked.scale_order = ScaleOrder::column_major;
  all.push_back(normal);
  all.back().exchange = masked;
  return all;
}

std::string exchange_text(const LayerSpec& spec) {
  const auto* masked = std::get_if<LowLatencyConfig>(&spec.exchange);
  if (!masked) return kNormal.name;
  return std::string(kLowLatency.name) + (masked->scale_order == ScaleOrder::column_major ? ", column-major scales" : "");
}

/// Maximum of `bytes` over all layers.
size_t max_of(const VerifyCase& c, const Scenario& s, size_t (*bytes)(const LayerSpec&)) {
  size_t found = 0;
  for (const LayerSpec& spec : layer_specs(c, s)) found = std::max(found, bytes(spec));
  return found;
}

/// Collective. Checks the fused form on data set `set` against the reference and, bit by bit, against the separate calls.
void check_fused(LayerRank& rank, uint64_t set, Group& group, std::vector<CheckResult>& results) {
  rank.prepare(set);
  rank.layer(CombineOrder::per_route);
  const std::vector<std::byte> separate = rank.outputs();
  group.barrier();
  rank.prepare(set);
  rank.fused();
  const std::vector<std::byte> fused = rank.outputs();
  results.push_back(rank.check(kFused, fused, kAllTokens, 1));
  const bool same = fused == separate;
  results.push_back(
      {kFusedBits, same, same ? "" : "they differ", 8 * static_cast<int64_t>(fused.size()) / dtype_bits(kLayerType)});
  group.barrier();
}

}  // namespace

size_t layer_heap_bytes(const VerifyCase& c, const Scenario& s) { return max_of(c, s, layer_heap_bytes); }
size_t layer_device_bytes(const VerifyCase& c, const Scenario& s) {
  // On the host, the library's own allocations are taken from the same memory.
  return max_of(c, s, layer_device_bytes) + (c.gpus > 0 ? 0 : max_of(c, s, layer_fused_bytes));
}

std::vector<CheckResult> layer_checks(const VerifyCase& c, const Scenario& s, Group& group, RankDevice& device) {
  const std::vector<LayerSpec> specs = layer_specs(c, s);
  std::vector<CheckResult> results;
  uint64_t set = 0;
  for (const LayerSpec& spec : specs) {
    device.release();
    LayerRank rank(spec, group, device);
    for (const std::string& order : c.orders) {
      if (order_named(order) == CombineOrder::per_host) continue;  // covered by normal mode's own checks
      rank.prepare(set++);
      rank.layer(order_named(order));
      results.push_back(rank.check("layer, " + exchange_text(spec) + ", " + order, rank.outputs(), kAllTokens, 1));
      group.barrier();
    }
    if (&spec != &specs.front() || !may_fuse(c)) continue;
    if (rank.fuses())
      check_fused(rank, set++, group, results);
    else
      results.push_back(skipped(kFused, spec.fused ? rank.why_not_fused() : why_not_fused(spec)));
  }
  return results;
}

}  // namespace switchyard::tool
