// SPDX-License-Identifier: Apache-2.0
// Misuse of normal mode that the host can detect. Each case is a valid call and the way in which one rank makes it invalid.
#pragma once

#include <functional>
#include <vector>

#include "faults/misuses.hpp"
#include "modes/normal/normal_rig.hpp"

namespace harness {

using switchyard::CombineOptions;
using switchyard::ConstRows;
using switchyard::Dispatched;
using switchyard::DispatchOptions;
using switchyard::DType;
using switchyard::ErrorCode;
using switchyard::ExpertIds;
using switchyard::ScaleKind;

using NormalMisuse = MisuseOf<NormalRig>;

inline NormalMisuse spoil_x(const char* name, const char* in_text, std::function<void(ConstRows&)> spoil) {
  return {name, in_text, [spoil](NormalRig& rig, bool bad) {
            ConstRows x = rig.x();
            if (bad) spoil(x);
            (void)rig.exchange.dispatch(x, rig.expert_ids(), rig.weights.data());
          }};
}
inline NormalMisuse spoil_ids(const char* name, const char* in_text, std::function<void(ExpertIds&)> spoil) {
  return {name, in_text, [spoil](NormalRig& rig, bool bad) {
            ExpertIds ids = rig.expert_ids();
            if (bad) spoil(ids);
            (void)rig.exchange.dispatch(rig.x(), ids, rig.weights.data());
          }};
}
inline NormalMisuse spoil_dispatch(const char* name, const char* in_text, std::function<void(DispatchOptions&)> spoil) {
  return {name, in_text, [spoil](NormalRig& rig, bool bad) {
            DispatchOptions options;
            if (bad) spoil(options);
            (void)rig.exchange.dispatch(rig.x(), rig.expert_ids(), rig.weights.data(), options);
          }};
}
inline NormalMisuse spoil_combine(const char* name, const char* in_text,
                                  std::function<void(ConstRows&, CombineOptions&, void*&, float*&)> spoil,
                                  ErrorCode code = ErrorCode::invalid_argument) {
  return {name, in_text,
          [spoil](NormalRig& rig, bool bad) {
            const Dispatched d = rig.dispatch();
            ConstRows y = d.x;
            CombineOptions options;
            void* out = rig.out.data();
            float* out_weights = nullptr;
            if (bad) spoil(y, options, out, out_weights);
            rig.exchange.combine(y, d.handle, out, options, out_weights);
          },
          code};
}

inline std::vector<Misuse> normal_misuses(switchyard::Staging staging) {
  static float weight_space[64];
  const std::vector<NormalMisuse> all = {
      spoil_x("wrong_hidden", "x.cols = 72", [](ConstRows& x) { x.cols = 72; }),
      spoil_x("null_rows", "x.data", [](ConstRows& x) { x.data = nullptr; }),
      spoil_x("wrong_rows", "x.rows = 5", [](ConstRows& x) { x.rows = 5; }),
      spoil_x("fp8_without_scales", "scale", [](ConstRows& x) { x.dtype = DType::fp8_e4m3; }),
      spoil_x("scales_on_bf16", "x.scale_kind", [](ConstRows& x) { x.scale_kind = ScaleKind::f32; }),
      spoil_x("bad_dtype", "x.dtype", [](ConstRows& x) { x.dtype = static_cast<DType>(9); }),
      spoil_ids("too_many_tokens", "topk_ids.num_tokens = 7", [](ExpertIds& ids) { ids.num_tokens = 7; }),
      spoil_ids("negative_tokens", "topk_ids.num_tokens = -1", [](ExpertIds& ids) { ids.num_tokens = -1; }),
      spoil_ids("wrong_topk", "topk_ids.topk = 3", [](ExpertIds& ids) { ids.topk = 3; }),
      spoil_ids("null_ids", "topk_ids.data", [](ExpertIds& ids) { ids.data = nullptr; }),
      spoil_ids("id_beyond",
                "topk_ids[2][1] = 8 (token 2, k = 1): must be an expert in [0, 8), or -1 for none; 1 of the ids of this call",
                [](ExpertIds& ids) { ids = SmallArguments::ids_with<SmallArguments::kExperts>(); }),
      spoil_ids("negative_id", "topk_ids[2][1] = -2 (token 2, k = 1)",
                [](ExpertIds& ids) { ids = SmallArguments::ids_with<-2>(); }),
      spoil_ids("wide_id", "topk_ids[2][1] = 4294967299 (token 2, k = 1)",
                [](ExpertIds& ids) { ids = SmallArguments::ids_with<SmallArguments::kWideId>(); }),
      spoil_dispatch("negative_capacity", "capacity = -1",
                     [](DispatchOptions& o) {
                       o.size = switchyard::SizePolicy::capacity;
                       o.capacity = -1;
                     }),
      spoil_dispatch("bad_quantize", "quantize", [](DispatchOptions& o) { o.quantize = static_cast<ScaleKind>(7); }),
      spoil_dispatch("bad_size_policy", "size", [](DispatchOptions& o) { o.size = static_cast<switchyard::SizePolicy>(7); }),
      spoil_combine("null_out", "out is null", [](ConstRows&, CombineOptions&, void*& out, float*&) { out = nullptr; }),
      spoil_combine("null_y", "y.data", [](ConstRows& y, CombineOptions&, void*&, float*&) { y.data = nullptr; }),
      spoil_combine("wrong_y_hidden", "y.cols = 56", [](ConstRows& y, CombineOptions&, void*&, float*&) { y.cols = 56; }),
      spoil_combine("too_few_y_rows", "y.rows = 0", [](ConstRows& y, CombineOptions&, void*&, float*&) { y.rows = 0; }),
      spoil_combine(
          "fp8_y", "fp8", [](ConstRows& y, CombineOptions&, void*&, float*&) { y.dtype = DType::fp8_e4m3; },
          ErrorCode::unsupported),
      spoil_combine("second_bias_alone", "bias", [](ConstRows& y, CombineOptions& o, void*&, float*&) { o.bias[1] = y.data; }),
      spoil_combine("weights_nowhere_to_go", "out_weights",
                    [](ConstRows&, CombineOptions& o, void*&, float*&) { o.topk_weights = weight_space; }),
      spoil_combine("out_weights_without_weights", "out_weights",
                    [](ConstRows&, CombineOptions&, void*&, float*& out_weights) { out_weights = weight_space; }),
      spoil_combine(
          "per_route_of_rank_major", "per_route",
          [](ConstRows&, CombineOptions& o, void*&, float*&) { o.order = switchyard::CombineOrder::per_route; },
          ErrorCode::unsupported),
      {"empty_handle", "handle",
       [](NormalRig& rig, bool bad) {
         const Dispatched d = rig.dispatch();
         (void)rig.exchange.dispatch(rig.x(), bad ? switchyard::Handle() : d.handle);
       }},
      {"handle_of_empty_shape", "handle",
       [](NormalRig& rig, bool bad) {
         const Dispatched d = rig.dispatch();
         rig.exchange.combine(d.x, bad ? switchyard::Handle() : d.handle, rig.out.data());
       }},
  };
  return on_rigs(all, [staging](switchyard::Group& group) { return NormalRig(group, NormalRig::config(staging)); });
}

}  // namespace harness
