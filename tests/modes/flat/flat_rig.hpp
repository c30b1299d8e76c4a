// SPDX-License-Identifier: Apache-2.0
// Small whole exchanges for object and fault tests.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "harness/outcome.hpp"
#include "harness/small_arguments.hpp"
#include "switchyard/low_latency.hpp"

namespace harness {

using switchyard::AllToAllOptions;
using switchyard::CombineOrder;
using switchyard::ConstRows;
using switchyard::DType;
using switchyard::ExpertIds;
using switchyard::Group;
using switchyard::LowLatencyConfig;
using switchyard::LowLatencyExchange;
using switchyard::ScaleKind;

/// An object with valid arguments for every call. Each test invalidates one of them.
struct FlatRig : SmallArguments {
  static LowLatencyConfig config() {
    auto c = sized(LowLatencyConfig());
    c.scales = ScaleKind::none;
    return c;
  }
  /// Arguments of a call.
  struct Arguments {
    ConstRows x;
    ExpertIds ids;
    void* out;
    AllToAllOptions options;
  };

  explicit FlatRig(Group& group, const LowLatencyConfig& c = config())
      : SmallArguments(group.rank()), exchange(group, c), output(exchange.make_output()), scale(kExperts, 2.0f) {}
  Arguments arguments() {
    Arguments a{x(), expert_ids(), out.data(), {}};
    a.options.topk_weights = weights.data();
    a.options.expert_scale = scale.data();
    return a;
  }
  void call(const Arguments& a) { exchange.moe_all_to_all(a.x, a.ids, a.out, a.options); }
  void round() { call(arguments()); }
  void dispatch() {
    const Arguments a = arguments();
    exchange.dispatch(a.x, a.ids, output);
  }
  void combine(CombineOrder order = CombineOrder::per_route, const float* expert_scale = nullptr) {
    switchyard::LowLatencyCombineOptions o;
    o.order = order;
    o.expert_scale = expert_scale;
    exchange.combine({output.x.data, output.x.rows, kHidden, DType::bf16}, output, out.data(), o);
  }

  LowLatencyExchange exchange;
  switchyard::LowLatencyOutput output;
  std::vector<float> scale;
};

}  // namespace harness
