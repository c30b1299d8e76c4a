// SPDX-License-Identifier: Apache-2.0
// Valid arguments of small calls, which a test may spoil.
#pragma once

#include <cstdint>
#include <vector>

#include "switchyard/types.hpp"

namespace harness {

struct SmallArguments {
  static constexpr int kExperts = 8, kTopk = 2;
  static constexpr int64_t kHidden = 64, kTokens = 6;

  explicit SmallArguments(int rank, int num_experts = kExperts) {
    for (int64_t f = 0; f < kTokens * kTopk; ++f) ids.push_back(static_cast<int32_t>((f * 3 + rank) % num_experts));
  }
  /// What an object of these sizes needs.
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

  std::vector<int32_t> ids;
  std::vector<uint16_t> rows = std::vector<uint16_t>(kTokens * kHidden, 0x3F80), out = std::vector<uint16_t>(kTokens * kHidden);
  std::vector<float> weights = std::vector<float>(kTokens * kTopk, 0.5f);
};

}  // namespace harness
