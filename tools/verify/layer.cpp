// SPDX-License-Identifier: Apache-2.0
// Whole layers in separate calls: dispatch, experts, combine.
#include "layer/layer_rank.hpp"

#include <algorithm>
#include <limits>

#include "verify/setup.hpp"

namespace switchyard::tool {
namespace {

/// A layer around each exchange; in fp8 around low latency with scales in either order.
std::vector<LayerSpec> layer_specs(const VerifyCase& c, const Scenario& s) {
  const ScaleKind quantize = scales_named(c.quantize);
  const LayerSpec normal{s, c.intermediate, backend_of(c), layer_normal_config(s), {c.sms, c.sms}, quantize};
  LowLatencyConfig masked = layer_low_latency_config(s, quantize);
  std::vector<LayerSpec> all{normal, normal};
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

/// The largest that `bytes` says of a layer.
size_t most(const VerifyCase& c, const Scenario& s, size_t (*bytes)(const LayerSpec&)) {
  size_t found = 0;
  for (const LayerSpec& spec : layer_specs(c, s)) found = std::max(found, bytes(spec));
  return found;
}

}  // namespace

size_t layer_heap_bytes(const VerifyCase& c, const Scenario& s) { return most(c, s, layer_heap_bytes); }
size_t layer_device_bytes(const VerifyCase& c, const Scenario& s) { return most(c, s, layer_device_bytes); }

std::vector<CheckResult> layer_checks(const VerifyCase& c, const Scenario& s, Group& group, RankDevice& device) {
  constexpr int64_t kAllTokens = std::numeric_limits<int64_t>::max();
  std::vector<CheckResult> results;
  uint64_t set = 0;
  for (const LayerSpec& spec : layer_specs(c, s)) {
    device.release();
    LayerRank rank(spec, group, device);
    for (const std::string& order : c.orders) {
      rank.prepare(set++);
      rank.layer(order_named(order));
      results.push_back(rank.check("layer, " + exchange_text(spec) + ", " + order, rank.outputs(), kAllTokens, 1));
      group.barrier();
    }
  }
  return results;
}

}  // namespace switchyard::tool
