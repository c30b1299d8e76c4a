// SPDX-License-Identifier: Apache-2.0
// The MoE layer on one rank: all experts, no exchange, plain float32 loops. Reference for layers over several ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "switchyard/expert.hpp"
#include "switchyard/routing.hpp"

namespace switchyard::tool {

/// Rows of all ranks of one step, in rank order.
struct ReferenceInput {
  std::vector<const uint16_t*> rows;  ///< per rank, bf16 [T, H]
  std::vector<Routing> routing;       ///< per rank
  /// If not none, the layer is fp8: the operands are the values that codes and scales of this kind represent. Quantized
  /// operands are the rows, the intermediate row after rounding to bf16, and the weights of fp8_weight_forms.
  ScaleKind quantize = ScaleKind::none;
};

/// out[r] is float32 [T, H]: the sum over k of weight * mlp_expert(x) in float32 throughout, with no rounding in between except
/// that of fp8. Uses `threads` threads; `on_progress` receives the number of finished experts. `ambiguity` receives a norm for
/// each token, 0 except for fp8: how far its result may lie from `out` because elements of intermediate rows are close to a
/// boundary between two codes, so that sums in another order end on the other side.
std::vector<std::vector<float>> moe_reference(const ReferenceInput& input, const ExpertWeights& weights, int64_t hidden,
                                              int64_t intermediate, int threads,
                                              const std::function<void(int64_t)>& on_progress,
                                              std::vector<std::vector<double>>* ambiguity = nullptr);

/// Relative distance |got - expected| / |expected| of one token's row, in the 2-norm. bf16 against float32.
double row_error(const uint16_t* got, const float* expected, int64_t hidden);

/// Maximum allowed relative distance of a token's result from the single-rank reference. bf16 keeps 8 significant bits: the
/// intermediate row, each expert's row, each rank's partial sum and the result are rounded, each by at most 2^-9 of its size,
/// and errors of many elements grow like the square root of their number: about 2^-8 in total. The tolerance is four times
/// that. One wrong or missing route of eight with average weights causes an error above 2^-2.
inline constexpr double kLayerTolerance = 1.0 / 64;
/// Tolerance of an fp8 layer. A sum of fp8 products is off by about 2^-12 of its size, because the tensor cores add with 14
/// bits. Therefore one of 100 elements of an intermediate row gets the code next to the reference's, 2^-4 away. In rows of many
/// elements that is 0.5 % of their norm, to which the roundings of the other rows add little.
inline constexpr double kFp8LayerTolerance = 1e-2;
/// Rows of fewer elements than this: one element can be a large part of the norm, so 2^-8 for the roundings and the `ambiguity`
/// from moe_reference() are allowed in addition. `norm`: that of the token's result.
inline constexpr int64_t kFewElements = 1024;
double layer_tolerance(ScaleKind quantize, int64_t intermediate, double norm, double ambiguity);
double norm_of(const float* row, int64_t hidden);

}  // namespace switchyard::tool
