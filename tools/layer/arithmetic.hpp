// SPDX-License-Identifier: Apache-2.0
// Number formats of a layer's products.
#pragma once

#include <cstdint>

#include "switchyard/gemm.hpp"
#include "switchyard/types.hpp"

namespace switchyard::tool {

/// bf16 or, on GPUs, fp8. Fields other than `quantize` affect only fp8 layers.
struct LayerArithmetic {
  /// If not none, the layer is fp8: rows in flight have scales of this kind, and the rows between the products have float32
  /// scales.
  ScaleKind quantize = ScaleKind::none;
  Accumulate accumulate = Accumulate::exact;  ///< fast: only without a fused form
  // As in MoeLayerConfig; OutputScaling::fixed uses kIntermediateScale.
  ScaleGranularity scaling = ScaleGranularity::block;
  OutputScaling intermediate_scaling = OutputScaling::per_group;

  bool fp8() const { return quantize != ScaleKind::none; }
  /// Whether the tensor cores sum over all of a product's inputs.
  bool long_sums_up() const { return long_sums(scaling); }
  bool long_sums_down() const { return long_sums(down_scaling()); }

 private:
  ScaleGranularity down_scaling() const {
    if (scaling == ScaleGranularity::block) return scaling;
    return intermediate_scaling == OutputScaling::per_group ? ScaleGranularity::group_channel : ScaleGranularity::per_channel;
  }
  bool long_sums(ScaleGranularity of) const {
    return fp8() && (accumulate == Accumulate::fast || of == ScaleGranularity::per_channel);
  }
};

/// Scale of the rows between the products with OutputScaling::fixed. With the weights of WeightForms, both sums of an element
/// have about unit variance, and fewer than one element in 10^12 exceeds 448 times this scale.
inline constexpr float kIntermediateScale = 0.07f;

}  // namespace switchyard::tool
