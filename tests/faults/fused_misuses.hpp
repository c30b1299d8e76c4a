// SPDX-License-Identifier: Apache-2.0
// Misuse of a fused layer that the host can detect, with one case for each kind.
#pragma once

#include <vector>

#include "faults/misuses.hpp"
#include "modes/fused/fused_moe_rig.hpp"

namespace harness {

/// Arguments of a call.
struct FusedArguments {
  explicit FusedArguments(FusedMoeRig& rig)
      : x(rig.rows.data()), ids(rig.expert_ids()), weights(rig.weights.data()), out(rig.out.data()) {}
  const void* x;
  switchyard::ExpertIds ids;
  const float* weights;
  void* out;
};

inline std::vector<Misuse> fused_misuses() {
  struct Case {
    const char* name;
    const char* in_text;
    void (*spoil)(FusedArguments&);
  };
  const Case cases[] = {
      {"topk", "topk_ids.topk = 3: must equal MoeLayerConfig::topk, 2", [](FusedArguments& a) { a.ids.topk = 3; }},
      {"tokens", "topk_ids.num_tokens = 7: must be in [0, 6]", [](FusedArguments& a) { a.ids.num_tokens = 7; }},
      {"negative_tokens", "topk_ids.num_tokens = -1: must be in [0, 6]", [](FusedArguments& a) { a.ids.num_tokens = -1; }},
      {"no_x", "x is null", [](FusedArguments& a) { a.x = nullptr; }},
      {"id_beyond",
       "topk_ids[2][1] = 8 (token 2, k = 1): must be an expert in [0, 8), or -1 for none; 1 of the ids of this call",
       [](FusedArguments& a) { a.ids = SmallArguments::ids_with<SmallArguments::kExperts>(); }},
      {"negative_id", "topk_ids[2][1] = -2 (token 2, k = 1)",
       [](FusedArguments& a) { a.ids = SmallArguments::ids_with<-2>(); }},
      {"wide_id", "topk_ids[2][1] = 4294967299 (token 2, k = 1)",
       [](FusedArguments& a) { a.ids = SmallArguments::ids_with<SmallArguments::kWideId>(); }},
      {"no_ids", "topk_ids.data is null", [](FusedArguments& a) { a.ids.data = nullptr; }},
      {"no_out", "out is null", [](FusedArguments& a) { a.out = nullptr; }},
  };
  std::vector<MisuseOf<FusedMoeRig>> all;
  for (const Case& c : cases)
    all.push_back({c.name, c.in_text, [spoil = c.spoil](FusedMoeRig& rig, bool bad) {
                     FusedArguments a(rig);
                     if (bad) spoil(a);
                     rig.layer.forward(a.x, a.ids, a.weights, a.out);
                   }});
  return on_rigs(all, [](switchyard::Group& group) { return FusedMoeRig(group); });
}

}  // namespace harness
