// SPDX-License-Identifier: Apache-2.0
// The MoE layer on a single rank: all experts, no exchange, plain float32 loops. It serves as the reference for layers over
// several ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "layer/arithmetic.hpp"
#include "switchyard/expert.hpp"
#include "switchyard/routing.hpp"

namespace switchyard::tool {

/// The rows of all ranks in one step, in rank order.
struct ReferenceInput {
  std::vector<const uint16_t*> rows;  ///< per rank, bf16 [T, H]
  std::vector<Routing> routing;       ///< per rank
  /// fp8: the operands are the values represented by codes and scales. The quantized operands are the rows, the intermediate
  /// row after rounding to bf16, and the weights from fp8_weight_forms. The order of the sums affects only the ambiguity.
  LayerArithmetic arithmetic;
};

/// out[r] is float32 [T, H]: the sum over k of weight * mlp_expert(x), computed in float32 without intermediate rounding except
/// in fp8. Uses `threads` threads; `on_progress` receives the number of finished experts. `ambiguity` receives a norm for each
/// token: the distance by which its result may differ from `out` because elements of intermediate rows are close to a boundary
/// between two codes, and a different order of summation may select the other code. It is 0 except in fp8.
std::vector<std::vector<float>> moe_reference(const ReferenceInput& input, const ExpertWeights& weights, int64_t hidden,
                                              int64_t intermediate, int threads,
                                              const std::function<void(int64_t)>& on_progress,
                                              std::vector<std::vector<double>>* ambiguity = nullptr);

/// Relative distance |got - expected| / |expected| of one token's row in the 2-norm: bf16 against float32.
double row_error(const uint16_t* got, const float* expected, int64_t hidden);

/// Maximum allowed relative distance between a token's result and the single-rank reference. bf16 keeps 8 significant bits. The
/// intermediate row, each expert's row, each rank's partial sum and the result are rounded, each by at most 2^-9 of its size.
/// Errors of many elements grow like the square root of their number, to about 2^-8 in total. The tolerance is four times that.
/// One wrong or missing route out of eight with average weights causes an error above 2^-2.
inline constexpr double kLayerTolerance = 1.0 / 64;
/// Tolerance of an fp8 layer. The relative error of a sum of fp8 products is about 2^-12, because the tensor cores add with 14
/// bits. About one in 100 elements of an intermediate row therefore gets the code next to the reference's, 2^-4 away. In long
/// rows, this amounts to 0.5 % of the norm; rounding of the other rows adds little.
inline constexpr double kFp8LayerTolerance = 1e-2;
/// In rows with fewer elements than this, a single element can be a large part of the norm, so 2^-8 for rounding and the
/// `ambiguity` from moe_reference() are allowed in addition. `norm`: the norm of the token's result.
inline constexpr int64_t kFewElements = 1024;
/// Relative error of a sum of `terms` fp8 products by the tensor cores, with Accumulate::fast or scales per channel, after
/// SwiGLU. The tensor cores align the sum and 32 products to the largest of them and truncate them to 14 bits. An emulation,
/// which reproduces the errors measured by tests to within 4 %, gives 0.16, 0.29, 0.43 and 0.88 % for 2048, 4096, 7168 and
/// 16 384 terms of the benchmark's data.
inline double fast_sum_error(int64_t terms) { return 1e-3 + 5e-7 * static_cast<double>(terms); }
/// Width of the allowed range, relative to the result. With such sums, truncating an intermediate element x by e selects
/// another code with probability e / d, where d, at most x / 8, is the distance between codes; the squared error of a row is
/// thus at most the relative error of its elements / 8. At H = 7168, the emulation gives 1.4 to 1.6 % for whole tokens, and the
/// limit is 2.6 %. With OutputScaling::per_row, the error of the largest element, or its rounding to bf16 (2^-8),
/// affects all elements of the row equally.
double layer_tolerance(const ReferenceInput& input, int64_t hidden, int64_t intermediate, double norm, double ambiguity);
double norm_of(const float* row, int64_t hidden);

}  // namespace switchyard::tool
