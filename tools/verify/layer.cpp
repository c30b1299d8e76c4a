// SPDX-License-Identifier: Apache-2.0
// Whole layers in separate form, and in fused form if the library supports it.
#include "layer/layer_rank.hpp"

#include <algorithm>
#include <limits>

#include "verify/setup.hpp"

namespace switchyard::tool {
namespace {

std::string fused_name(const LayerSpec& spec) { return std::string("layer, fused, ") + to_string(spec.order); }
constexpr int64_t kAllTokens = std::numeric_limits<int64_t>::max();

/// Whether the fused form is compared with this layer, bit for bit: bf16 and normal mode.
bool fuses(const LayerSpec& spec) { return !spec.arithmetic.fp8() && spec.exchange == MoeExchange::normal; }

/// A layer for each exchange and order of the sum and, with float32 scales, layers with scales per channel. Those of normal
/// mode also have the fused form if possible.
std::vector<LayerSpec> layer_specs(const VerifyCase& c, const Scenario& s) {
  const ScaleKind quantize = scales_named(c.quantize);
  std::vector<LayerSpec> all;
  for (const MoeExchange exchange : {MoeExchange::normal, MoeExchange::low_latency})
    for (const std::string& order : c.orders) {
      LayerSpec spec{s, c.intermediate, backend_of(c), exchange, order_named(order), c.sms, {quantize}};
      if (spec.order == CombineOrder::per_host) continue;  // covered by normal mode's own checks
      spec.fused_order = spec.order;
      spec.fused = fuses(spec) && why_not_fused(spec).empty();
      all.push_back(std::move(spec));
    }
  if (quantize != ScaleKind::f32) return all;
  const auto add = [&](MoeExchange exchange, ScaleGranularity scaling, OutputScaling intermediate) {
    const auto found = std::find_if(all.begin(), all.end(), [&](const LayerSpec& spec) { return spec.exchange == exchange; });
    if (found == all.end()) return;
    LayerSpec spec = *found;
    spec.arithmetic.scaling = scaling;
    spec.arithmetic.intermediate_scaling = intermediate;
    all.push_back(std::move(spec));
  };
  for (const auto intermediate : {OutputScaling::per_group, OutputScaling::fixed, OutputScaling::per_row})
    add(MoeExchange::normal, ScaleGranularity::per_channel, intermediate);
  add(MoeExchange::low_latency, ScaleGranularity::group_channel, OutputScaling::per_group);
  return all;
}

std::string scaling_text(const LayerSpec& spec) {
  const LayerArithmetic& numbers = spec.arithmetic;
  if (numbers.scaling == ScaleGranularity::block) return "";
  return std::string(", ") + to_string(numbers.scaling) + " " + to_string(numbers.intermediate_scaling);
}

/// Maximum of `bytes` over all layers.
size_t max_of(const VerifyCase& c, const Scenario& s, size_t (*bytes)(const LayerSpec&)) {
  size_t found = 0;
  for (const LayerSpec& spec : layer_specs(c, s)) found = std::max(found, bytes(spec));
  return found;
}

/// Collective. Checks the fused form on data set `set` against the reference and, bit by bit, against the separate form.
void check_fused(const std::string& name, LayerRank& rank, uint64_t set, Group& group, std::vector<CheckResult>& results) {
  rank.prepare(set);
  rank.layer();
  const std::vector<std::byte> separate = rank.outputs();
  group.barrier();
  rank.prepare(set);
  rank.fused();
  const std::vector<std::byte> fused = rank.outputs();
  results.push_back(rank.check(name, fused, kAllTokens, 1));
  const bool same = fused == separate;
  results.push_back({name + ", bits of separate calls", same, same ? "" : "they differ",
                     8 * static_cast<int64_t>(fused.size()) / dtype_bits(kLayerType)});
  group.barrier();
}

}  // namespace

size_t layer_heap_bytes(const VerifyCase& c, const Scenario& s) { return max_of(c, s, layer_heap_bytes); }
size_t layer_device_bytes(const VerifyCase& c, const Scenario& s) {
  // On the host, the library's own allocations are taken from the same memory.
  return max_of(c, s, layer_device_bytes) + (c.gpus > 0 ? 0 : max_of(c, s, layer_private_bytes));
}

std::vector<CheckResult> layer_checks(const VerifyCase& c, const Scenario& s, Group& group, RankDevice& device) {
  const std::vector<LayerSpec> specs = layer_specs(c, s);
  std::vector<CheckResult> results;
  uint64_t set = 0;
  for (const LayerSpec& spec : specs) {
    device.release();
    LayerRank rank(spec, group, device);
    rank.prepare(set++);
    rank.layer();
    const std::string name =
        std::string("layer, ") + to_string(spec.exchange) + ", " + to_string(spec.order) + scaling_text(spec);
    results.push_back(rank.check(name, rank.outputs(), kAllTokens, 1));
    group.barrier();
    if (!fuses(spec)) continue;
    if (rank.fuses())
      check_fused(fused_name(spec), rank, set++, group, results);
    else
      results.push_back(skipped(fused_name(spec), spec.fused ? rank.why_not_fused() : why_not_fused(spec)));
  }
  return results;
}

}  // namespace switchyard::tool
