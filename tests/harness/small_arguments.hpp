// SPDX-License-Identifier: Apache-2.0
// Valid arguments for small calls, which a test can make invalid.
#pragma once

#include <cstdint>
#include <type_traits>
#include <vector>

#include "switchyard/types.hpp"

namespace harness {

struct SmallArguments {
  static constexpr int kExperts = 8, kTopk = 2;
  static constexpr int64_t kHidden = 64, kTokens = 6;

  explicit SmallArguments(int rank, int num_experts = kExperts) {
    for (int64_t f = 0; f < kTokens * kTopk; ++f) ids.push_back(static_cast<int32_t>((f * 3 + rank) % num_experts));
  }
  /// Sets the sizes in a config to match these arguments.
  template <class Config>
  static Config sized(Config c) {
    c.hidden = kHidden;
    c.num_experts = kExperts;
    c.topk = kTopk;
    c.max_tokens = kTokens;
    return c;
  }
  switchyard::ConstRows x() const { return {rows.data(), kTokens, kHidden, switchyard::DType::bf16}; }
  switchyard::ExpertIds expert_ids() const { return switchyard::ExpertIds::of(ids.data(), kTokens, kTopk); }

  /// Expert ids, all valid except that of token 2, k = 1: this is `id`, which is neither -1 nor an expert. Usable on any rank;
  /// never freed.
  template <int64_t id>
  static switchyard::ExpertIds ids_with() {
    using Id = std::conditional_t<id == static_cast<int32_t>(id), int32_t, int64_t>;
    static const std::vector<Id> all = [] {
      std::vector<Id> made;
      for (int f = 0; f < kTokens * kTopk; ++f) made.push_back(static_cast<Id>(f % kExperts));
      made[2 * kTopk + 1] = static_cast<Id>(id);
      return made;
    }();
    return switchyard::ExpertIds::of(all.data(), kTokens, kTopk);
  }
  static constexpr int64_t kWideId = (int64_t{1} << 32) + 3;  ///< its lower half is a valid expert

  std::vector<int32_t> ids;
  std::vector<uint16_t> rows = std::vector<uint16_t>(kTokens * kHidden, 0x3F80), out = std::vector<uint16_t>(kTokens * kHidden);
  std::vector<float> weights = std::vector<float>(kTokens * kTopk, 0.5f);
};

}  // namespace harness
