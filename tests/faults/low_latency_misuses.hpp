// SPDX-License-Identifier: Apache-2.0
// Misuse of low-latency mode that the host can detect. Each case is a valid call and the way in which one rank makes it
// invalid.
#pragma once

#include <functional>
#include <vector>

#include "faults/misuses.hpp"
#include "modes/low_latency/low_latency_rig.hpp"

namespace harness {

using LowLatencyMisuse = MisuseOf<LowLatencyRig>;

/// Arguments of a dispatch.
struct DispatchArguments {
  switchyard::ConstRows x;
  switchyard::ExpertIds ids;
  switchyard::LowLatencyOutput output;
};
inline LowLatencyMisuse spoil_dispatch(const char* name, const char* in_text, std::function<void(DispatchArguments&)> spoil) {
  return {name, in_text, [spoil](LowLatencyRig& rig, bool bad) {
            DispatchArguments a{rig.x(), rig.expert_ids(), rig.output};
            if (bad) spoil(a);
            rig.exchange.dispatch(a.x, a.ids, a.output, rig.options());
          }};
}

/// Arguments of a combine.
struct CombineArguments {
  switchyard::ConstRows y;
  switchyard::LowLatencyOutput output;
  void* out;
  switchyard::LowLatencyCombineOptions options;
};
inline LowLatencyMisuse spoil_combine(const char* name, const char* in_text, std::function<void(CombineArguments&)> spoil,
                                      switchyard::ErrorCode code = switchyard::ErrorCode::invalid_argument) {
  return {name, in_text,
          [spoil](LowLatencyRig& rig, bool bad) {
            rig.dispatch();
            CombineArguments a{rig.y(), rig.output, rig.out.data(), {}};
            if (bad) spoil(a);
            rig.exchange.combine(a.y, a.output, a.out, a.options);
          },
          code};
}

inline std::vector<Misuse> low_latency_dispatch_misuses() {
  using A = DispatchArguments;
  using switchyard::DType;
  using switchyard::ScaleKind;
  const std::vector<LowLatencyMisuse> all = {
      spoil_dispatch("no_output", "make_output", [](A& a) { a.output = {}; }),
      spoil_dispatch("wrong_hidden", "x.cols = 72", [](A& a) { a.x.cols = 72; }),
      spoil_dispatch("wrong_rows", "x.rows = 5", [](A& a) { a.x.rows = 5; }),
      spoil_dispatch("null_rows", "x.data", [](A& a) { a.x.data = nullptr; }),
      spoil_dispatch("other_type", "x.dtype = f32", [](A& a) { a.x.dtype = DType::f32; }),
      spoil_dispatch("no_type", "x.dtype", [](A& a) { a.x.dtype = static_cast<DType>(9); }),
      spoil_dispatch("fp8_without_kind", "x.scale_kind = none", [](A& a) { a.x.dtype = DType::fp8_e4m3; }),
      spoil_dispatch("fp8_of_other_kind", "x.scale_kind = ue8m0",
                     [](A& a) {
                       a.x.dtype = DType::fp8_e4m3;
                       a.x.scales = a.x.data;
                       a.x.scale_kind = ScaleKind::ue8m0;
                     }),
      spoil_dispatch("fp8_without_scales", "x.scales is null",
                     [](A& a) {
                       a.x.dtype = DType::fp8_e4m3;
                       a.x.scale_kind = ScaleKind::f32;
                     }),
      spoil_dispatch("scales_on_bf16", "x.scale_kind", [](A& a) { a.x.scale_kind = ScaleKind::f32; }),
      spoil_dispatch("too_many_tokens", "topk_ids.num_tokens = 7", [](A& a) { a.ids.num_tokens = 7; }),
      spoil_dispatch("negative_tokens", "topk_ids.num_tokens = -1", [](A& a) { a.ids.num_tokens = -1; }),
      spoil_dispatch("wrong_topk", "topk_ids.topk = 3", [](A& a) { a.ids.topk = 3; }),
      spoil_dispatch(
          "id_beyond",
          "topk_ids[2][1] = 8 (token 2, k = 1): must be an expert in [0, 8), or -1 for none; 1 of the ids of this call",
          [](A& a) { a.ids = SmallArguments::ids_with<SmallArguments::kExperts>(); }),
      spoil_dispatch("negative_id", "topk_ids[2][1] = -2 (token 2, k = 1)",
                     [](A& a) { a.ids = SmallArguments::ids_with<-2>(); }),
      spoil_dispatch("wide_id", "topk_ids[2][1] = 4294967299 (token 2, k = 1)",
                     [](A& a) { a.ids = SmallArguments::ids_with<SmallArguments::kWideId>(); }),
      spoil_dispatch("null_ids", "topk_ids.data", [](A& a) { a.ids.data = nullptr; }),
  };
  return on_rigs(all, [](switchyard::Group& group) { return LowLatencyRig(group); });
}

inline std::vector<Misuse> low_latency_combine_misuses() {
  using A = CombineArguments;
  using switchyard::CombineOrder;
  using switchyard::DType;
  using switchyard::ErrorCode;
  static const float weights[64] = {};
  constexpr int64_t kOutWords = LowLatencyRig::kTokens * LowLatencyRig::kHidden / 2;
  const std::vector<LowLatencyMisuse> all = {
      spoil_combine("out_over_y", "out overlaps y.data", [](A& a) { a.y.data = a.out; }),
      spoil_combine("out_ends_in_y", "out overlaps y.data",
                    [](A& a) { a.y.data = static_cast<const float*>(a.out) + kOutWords - 1; }),
      spoil_combine("out_over_weights", "out overlaps LowLatencyCombineOptions::topk_weights",
                    [](A& a) { a.options.topk_weights = static_cast<const float*>(a.out) + kOutWords - 1; }),
      spoil_combine("out_over_expert_scale", "out overlaps LowLatencyCombineOptions::expert_scale",
                    [](A& a) { a.options.expert_scale = static_cast<const float*>(a.out) + 1; }),
      spoil_combine("no_output_to_combine", "make_output", [](A& a) { a.output = {}; }),
      spoil_combine(
          "fp8_y", "fp8", [](A& a) { a.y.dtype = DType::fp8_e4m3; }, ErrorCode::unsupported),
      spoil_combine("no_y_type", "y.dtype = 9", [](A& a) { a.y.dtype = static_cast<DType>(9); }),
      spoil_combine("wider_y", "y.dtype = f32", [](A& a) { a.y.dtype = DType::f32; }),
      spoil_combine("wrong_y_rows", "y.rows = 1", [](A& a) { a.y.rows = 1; }),
      spoil_combine("wrong_y_hidden", "y.cols = 56", [](A& a) { a.y.cols = 56; }),
      spoil_combine("null_y", "y.data", [](A& a) { a.y.data = nullptr; }),
      spoil_combine("null_out", "out is null", [](A& a) { a.out = nullptr; }),
      spoil_combine("no_order", "order = 3", [](A& a) { a.options.order = static_cast<CombineOrder>(3); }),
      spoil_combine(
          "order_of_hosts", "order = per_host", [](A& a) { a.options.order = CombineOrder::per_host; }, ErrorCode::unsupported),
      spoil_combine(
          "weights_of_per_rank", "pass them to dispatch",
          [](A& a) {
            a.options.order = CombineOrder::per_rank;
            a.options.topk_weights = weights;
          },
          ErrorCode::unsupported),
      {"never_filled", "no dispatch has filled it",
       [](LowLatencyRig& rig, bool bad) {
         rig.dispatch();
         if (bad) rig.output = rig.exchange.make_output();
         rig.combine();
       }},
  };
  return on_rigs(all, [](switchyard::Group& group) { return LowLatencyRig(group); });
}

}  // namespace harness
