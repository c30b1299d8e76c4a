// SPDX-License-Identifier: Apache-2.0
// The MoE layer on one rank: all experts, no exchange, plain float32 loops. What the demo's result is compared with.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "switchyard/expert.hpp"
#include "switchyard/routing.hpp"

namespace switchyard::tool {

/// Rows of all ranks of one step, one after the other.
struct ReferenceInput {
  std::vector<const uint16_t*> rows;  ///< per rank, bf16 [T, H]
  std::vector<Routing> routing;       ///< per rank
};

/// out[r] is float32 [T, H]: sum over k of weight * mlp_expert(x), float32 throughout, nothing rounded in between.
/// Uses `threads` threads; `on_progress` gets the number of experts done.
std::vector<std::vector<float>> moe_reference(const ReferenceInput& input, const ExpertWeights& weights, int64_t hidden,
                                              int64_t intermediate, int threads,
                                              const std::function<void(int64_t)>& on_progress);

/// Relative distance |got - expected| / |expected| of one token's row, in the 2-norm. bf16 against float32.
double row_error(const uint16_t* got, const float* expected, int64_t hidden);

}  // namespace switchyard::tool
