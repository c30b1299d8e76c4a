// SPDX-License-Identifier: Apache-2.0
// Small low-latency calls for object and fault tests.
#pragma once

#include <vector>

#include "harness/outcome.hpp"
#include "harness/small_arguments.hpp"
#include "switchyard/low_latency.hpp"

namespace harness {

/// An object with valid arguments for every call. Each test invalidates one of them.
struct LowLatencyRig : SmallArguments {
  static switchyard::LowLatencyConfig config() { return sized(switchyard::LowLatencyConfig()); }

  explicit LowLatencyRig(switchyard::Group& group, const switchyard::LowLatencyConfig& c = config())
      : SmallArguments(group.rank(), c.num_experts), exchange(group, c), output(exchange.make_output()) {
    y_memory.assign(static_cast<size_t>(output.x.rows * c.hidden) + 1, 0x3F80);
  }
  switchyard::ConstRows y() const { return {y_memory.data(), output.x.rows, kHidden, switchyard::DType::bf16}; }
  switchyard::LowLatencyDispatchOptions options() const {
    switchyard::LowLatencyDispatchOptions o;
    o.topk_weights = weights.data();
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
  std::vector<uint16_t> y_memory;
};

}  // namespace harness
