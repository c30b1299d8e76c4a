// SPDX-License-Identifier: Apache-2.0
// Small whole exchanges for tests of the object, and host-checkable misuse of them, one case each.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "modes/normal/normal_rig.hpp"
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

/// An object with valid arguments for every call; a test spoils one of them.
struct FlatRig {
  static constexpr int kExperts = 8, kTopk = 2;
  static constexpr int64_t kHidden = 64, kTokens = 6;

  static LowLatencyConfig config() {
    LowLatencyConfig c;
    c.hidden = kHidden;
    c.num_experts = kExperts;
    c.topk = kTopk;
    c.max_tokens = kTokens;
    c.scales = ScaleKind::none;
    return c;
  }
  /// What a call is given.
  struct Arguments {
    ConstRows x;
    ExpertIds ids;
    void* out;
    AllToAllOptions options;
  };

  explicit FlatRig(Group& group, const LowLatencyConfig& c = config()) : exchange(group, c), output(exchange.make_output()) {
    for (int64_t f = 0; f < kTokens * kTopk; ++f) ids.push_back(static_cast<int32_t>((f * 3 + group.rank()) % kExperts));
    scale.assign(kExperts, 2.0f);
  }
  Arguments arguments() {
    Arguments a{{rows.data(), kTokens, kHidden, DType::bf16}, ExpertIds::of(ids.data(), kTokens, kTopk), out.data(), {}};
    a.options.weights = weights.data();
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
  std::vector<int32_t> ids;
  std::vector<uint16_t> rows = std::vector<uint16_t>(kTokens * kHidden, 0x3F80), out = std::vector<uint16_t>(kTokens * kHidden);
  std::vector<float> weights = std::vector<float>(kTokens * kTopk, 0.5f), scale;
};

struct FlatMisuse {
  const char* name;
  const char* in_text;  ///< the error must name the argument
  std::function<void(FlatRig::Arguments&)> spoil;
};
inline std::ostream& operator<<(std::ostream& out, const FlatMisuse& m) { return out << m.name; }

inline std::vector<FlatMisuse> flat_misuses() {
  using A = FlatRig::Arguments;
  constexpr int64_t kOutWords = FlatRig::kTokens * FlatRig::kHidden / 2;  // of out
  return {
      {"wrong_hidden", "x.cols = 72", [](A& a) { a.x.cols = 72; }},
      {"wrong_rows", "x.rows = 5", [](A& a) { a.x.rows = 5; }},
      {"null_rows", "x.data", [](A& a) { a.x.data = nullptr; }},
      {"other_type", "x.dtype = f16", [](A& a) { a.x.dtype = DType::f16; }},
      {"fp8", "x.dtype = fp8_e4m3", [](A& a) { a.x.dtype = DType::fp8_e4m3; }},
      {"scales", "x.scale_kind", [](A& a) { a.x.scale_kind = ScaleKind::f32; }},
      {"too_many_tokens", "ids.tokens = 7", [](A& a) { a.ids.tokens = 7; }},
      {"wrong_topk", "ids.topk = 3", [](A& a) { a.ids.topk = 3; }},
      {"null_ids", "ids.data", [](A& a) { a.ids.data = nullptr; }},
      {"null_out", "out is null", [](A& a) { a.out = nullptr; }},
      {"in_place", "out overlaps x.data", [](A& a) { a.out = const_cast<void*>(a.x.data); }},
      {"partly_in_place", "out overlaps x.data",
       [](A& a) { a.out = static_cast<std::byte*>(const_cast<void*>(a.x.data)) - 16; }},
      // What is given is moved, not out: that would lie over its neighbours in memory, too.
      {"out_over_ids", "out overlaps ids.data", [](A& a) { a.ids.data = a.out; }},
      {"out_begins_in_ids", "out overlaps ids.data",
       [](A& a) { a.ids.data = static_cast<std::byte*>(a.out) - a.ids.tokens * a.ids.topk * 4 + 4; }},
      {"out_over_weights", "out overlaps AllToAllOptions::weights",
       [](A& a) { a.options.weights = static_cast<const float*>(a.out) + 1; }},
      {"out_ends_in_weights", "out overlaps AllToAllOptions::weights",
       [](A& a) { a.options.weights = static_cast<const float*>(a.out) + kOutWords - 1; }},
      {"out_over_expert_scale", "out overlaps AllToAllOptions::expert_scale",
       [](A& a) { a.options.expert_scale = static_cast<const float*>(a.out) + 1; }},
      {"out_over_device_tokens", "out overlaps AllToAllOptions::device_tokens",
       [](A& a) { a.options.device_tokens = static_cast<const int32_t*>(a.out) + 1; }},
  };
}

}  // namespace harness
