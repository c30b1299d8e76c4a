// SPDX-License-Identifier: Apache-2.0
// Small low-latency calls for tests of objects and faults.
#pragma once

#include <vector>

#include "modes/normal/normal_rig.hpp"
#include "switchyard/low_latency.hpp"

namespace harness {

/// An object with valid arguments for every call; a test spoils one of them.
struct LowLatencyRig {
  static constexpr int kExperts = 8, kTopk = 2;
  static constexpr int64_t kHidden = 64, kTokens = 6;

  static switchyard::LowLatencyConfig config() {
    switchyard::LowLatencyConfig c;
    c.hidden = kHidden;
    c.num_experts = kExperts;
    c.topk = kTopk;
    c.max_tokens = kTokens;
    return c;
  }

  explicit LowLatencyRig(switchyard::Group& group, const switchyard::LowLatencyConfig& c = config())
      : exchange(group, c), output(exchange.make_output()) {
    for (int64_t f = 0; f < kTokens * kTopk; ++f) ids.push_back(static_cast<int32_t>((f * 3 + group.rank()) % c.num_experts));
    y_memory.assign(static_cast<size_t>(output.x.rows * c.hidden) + 1, 0x3F80);
  }
  switchyard::ConstRows x() const { return {rows.data(), kTokens, kHidden, switchyard::DType::bf16}; }
  switchyard::ExpertIds expert_ids() const { return switchyard::ExpertIds::of(ids.data(), kTokens, kTopk); }
  switchyard::ConstRows y() const { return {y_memory.data(), output.x.rows, kHidden, switchyard::DType::bf16}; }
  switchyard::LowLatencyDispatchOptions options() const {
    switchyard::LowLatencyDispatchOptions o;
    o.weights = weights.data();
    return o;
  }
  void dispatch() { exchange.dispatch(x(), expert_ids(), output, options()); }
  switchyard::ReceiveHook dispatch_send() { return exchange.dispatch_send(x(), expert_ids(), output, options()); }
  void combine(switchyard::CombineOrder order = switchyard::CombineOrder::per_route) {
    exchange.combine(y(), output, out.data(), {order});
  }
  switchyard::ReceiveHook combine_send() { return exchange.combine_send(y(), output, out.data()); }
  void round() {
    dispatch();
    combine();
  }

  switchyard::LowLatencyExchange exchange;
  switchyard::LowLatencyOutput output;
  std::vector<int32_t> ids;
  std::vector<uint16_t> rows = std::vector<uint16_t>(kTokens * kHidden, 0x3F80), out = std::vector<uint16_t>(kTokens * kHidden);
  std::vector<uint16_t> y_memory;
  std::vector<float> weights = std::vector<float>(kTokens * kTopk, 0.5f);
};

}  // namespace harness
