// SPDX-License-Identifier: Apache-2.0
// Misuse of the flat exchange that the host can detect, with one case for each kind.
#pragma once

#include <vector>

#include "faults/misuses.hpp"
#include "modes/flat/flat_rig.hpp"

namespace harness {

inline std::vector<Misuse> flat_misuses() {
  using A = FlatRig::Arguments;
  constexpr int64_t kOutWords = FlatRig::kTokens * FlatRig::kHidden / 2;  // size of out
  struct Case {
    const char* name;
    const char* in_text;
    void (*spoil)(A&);
  };
  const Case cases[] = {
      {"wrong_hidden", "x.cols = 72", [](A& a) { a.x.cols = 72; }},
      {"wrong_rows", "x.rows = 5", [](A& a) { a.x.rows = 5; }},
      {"null_rows", "x.data", [](A& a) { a.x.data = nullptr; }},
      {"other_type", "x.dtype = f16", [](A& a) { a.x.dtype = DType::f16; }},
      {"fp8", "x.dtype = fp8_e4m3", [](A& a) { a.x.dtype = DType::fp8_e4m3; }},
      {"scales", "x.scale_kind", [](A& a) { a.x.scale_kind = ScaleKind::f32; }},
      {"too_many_tokens", "topk_ids.num_tokens = 7", [](A& a) { a.ids.num_tokens = 7; }},
      {"wrong_topk", "topk_ids.topk = 3", [](A& a) { a.ids.topk = 3; }},
      {"id_beyond",
       "topk_ids[2][1] = 8 (token 2, k = 1): must be an expert in [0, 8), or -1 for none; 1 of the ids of this call",
       [](A& a) { a.ids = SmallArguments::ids_with<SmallArguments::kExperts>(); }},
      {"negative_id", "topk_ids[2][1] = -2 (token 2, k = 1)", [](A& a) { a.ids = SmallArguments::ids_with<-2>(); }},
      {"wide_id", "topk_ids[2][1] = 4294967299 (token 2, k = 1)",
       [](A& a) { a.ids = SmallArguments::ids_with<SmallArguments::kWideId>(); }},
      {"null_ids", "topk_ids.data", [](A& a) { a.ids.data = nullptr; }},
      {"null_out", "out is null", [](A& a) { a.out = nullptr; }},
      {"in_place", "out overlaps x.data", [](A& a) { a.out = const_cast<void*>(a.x.data); }},
      {"partly_in_place", "out overlaps x.data",
       [](A& a) { a.out = static_cast<std::byte*>(const_cast<void*>(a.x.data)) - 16; }},
      // The inputs are moved instead of `out`, because a moved `out` would also overlap its neighbors in memory.
      {"out_over_ids", "out overlaps topk_ids.data", [](A& a) { a.ids.data = a.out; }},
      {"out_begins_in_ids", "out overlaps topk_ids.data",
       [](A& a) { a.ids.data = static_cast<std::byte*>(a.out) - a.ids.num_tokens * a.ids.topk * 4 + 4; }},
      {"out_over_weights", "out overlaps AllToAllOptions::topk_weights",
       [](A& a) { a.options.topk_weights = static_cast<const float*>(a.out) + 1; }},
      {"out_ends_in_weights", "out overlaps AllToAllOptions::topk_weights",
       [](A& a) { a.options.topk_weights = static_cast<const float*>(a.out) + kOutWords - 1; }},
      {"out_over_expert_scale", "out overlaps AllToAllOptions::expert_scale",
       [](A& a) { a.options.expert_scale = static_cast<const float*>(a.out) + 1; }},
      {"out_over_device_tokens", "out overlaps AllToAllOptions::device_tokens",
       [](A& a) { a.options.device_tokens = static_cast<const int32_t*>(a.out) + 1; }},
  };
  std::vector<MisuseOf<FlatRig>> all;
  for (const Case& c : cases)
    all.push_back({c.name, c.in_text, [spoil = c.spoil](FlatRig& rig, bool bad) {
                     A a = rig.arguments();
                     if (bad) spoil(a);
                     rig.call(a);
                   }});
  return on_rigs(all, [](Group& group) { return FlatRig(group); });
}

}  // namespace harness
