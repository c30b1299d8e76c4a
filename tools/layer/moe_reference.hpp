// SPDX-License-Identifier: Apache-2.0
// The MoE layer on one rank: all experts, no exchange, plain float32 loops. What a layer over several ranks is compared with.
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
  /// Not none: a layer in fp8. Operands are what the codes and scales of quantised rows stand for, with scales of this kind:
  /// the rows; the intermediate row, after it was rounded to bf16; and the weights of fp8_weight_forms.
  ScaleKind quantize = ScaleKind::none;
};

/// out[r] is float32 [T, H]: sum over k of weight * mlp_expert(x), float32 throughout, nothing rounded in between but what
/// fp8 rounds. Uses `threads` threads; `on_progress` gets the number of experts done. `ambiguity`: filled with a norm for each
/// token, 0 but for fp8: how far its result may lie from `out` because elements of intermediate rows are close to a boundary
/// between two codes, so that sums in another order fall to the other side.
std::vector<std::vector<float>> moe_reference(const ReferenceInput& input, const ExpertWeights& weights, int64_t hidden,
                                              int64_t intermediate, int threads,
                                              const std::function<void(int64_t)>& on_progress,
                                              std::vector<std::vector<double>>* ambiguity = nullptr);

/// Relative distance |got - expected| / |expected| of one token's row, in the 2-norm. bf16 against float32.
double row_error(const uint16_t* got, const float* expected, int64_t hidden);

/// The largest relative distance of a token's result from the single-rank reference that passes. bf16 keeps 8 significant bits:
/// the intermediate row, each expert's row, each rank's partial sum and the result are rounded, each by at most 2^-9 of its
/// size, and errors of many elements add up like their root: about 2^-8 in all. Four times that is allowed; one wrong or
/// missing route of eight with average weights is off by more than 2^-2.
inline constexpr double kLayerTolerance = 1.0 / 64;
/// The same of a layer in fp8. A sum of fp8 products is off by about 2^-12 of its size, because the tensor cores add with 14
/// bits; so one of 100 elements of an intermediate row gets the code beside the reference's, 2^-4 away. In rows of many
/// elements that is 0.5 % of their norm, to which the roundings of the other rows add little.
inline constexpr double kFp8LayerTolerance = 1e-2;
/// In rows of fewer elements one can be a large part of the norm: there 2^-8 for the roundings and the `ambiguity` that
/// moe_reference() found are allowed, too. `norm`: of the token's result.
inline constexpr int64_t kFewElements = 1024;
double layer_tolerance(ScaleKind quantize, int64_t intermediate, double norm, double ambiguity);
double norm_of(const float* row, int64_t hidden);

}  // namespace switchyard::tool
