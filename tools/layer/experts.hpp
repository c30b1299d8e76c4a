// SPDX-License-Identifier: Apache-2.0
// Weights of one rank's experts, which equal those of ExpertWeights on both backends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "device/rank_device.hpp"
#include "layer/arithmetic.hpp"
#include "measure/gpu/expert_weights.hpp"
#include "switchyard/expert.hpp"
#include "switchyard/layer.hpp"

namespace switchyard::tool {

/// Type of a layer's tokens and outputs and, except in fp8 layers, of its weights and all intermediate rows.
inline constexpr DType kLayerType = DType::bf16;

/// The closed form of the matrices of ExpertWeights(seed, hidden, intermediate).
struct WeightForms {
  measure::WeightForm gate_up, down;
};
WeightForms weight_forms(uint64_t seed, int64_t hidden, int64_t intermediate);
/// Enqueues on a GPU. Writes the bf16 weights of the experts from `first_expert` on, in the layout of ExpertMlp. H and I are
/// multiples of 8.
void write_weights(const ExpertShape& shape, int first_expert, uint64_t seed, void* w13, void* w2, RankDevice& device);

/// The same matrices in e4m3: each bf16 value of ExpertWeights is divided by the float32 scale of its block or output and
/// rounded once. A scale is the smallest one that can represent the largest value, or 1.25, 1.5 or 1.75 times that.
struct Fp8WeightForms {
  measure::Fp8WeightForm gate_up, down;
};
Fp8WeightForms fp8_weight_forms(uint64_t seed, int64_t hidden, int64_t intermediate);

/// Weights of a rank's experts, in memory of the rank's device, in the layout of MoeLayer.
class LayerWeights {
 public:
  /// Experts from `first_expert` on. GPU memory is allocated from `device` and remains valid after this object. fp8, on GPUs: H
  /// and I are multiples of 16.
  LayerWeights(const ExpertShape& shape, int first_expert, uint64_t seed, const LayerArithmetic& arithmetic,
               RankDevice& device);
  /// GPU memory of one object.
  static size_t device_bytes(const ExpertShape& shape, const LayerArithmetic& arithmetic);

  const void* w13() const { return up_.data; }
  const void* w2() const { return down_.data; }
  /// Sets the scales of fp8 weights and, with OutputScaling::fixed, of the rows between the products.
  void set_scales(MoeLayerConfig& config) const;

 private:
  struct Matrices {
    const void* data = nullptr;
    const float* scales = nullptr;
  };
  void fill(const ExpertShape& shape, int first_expert, uint64_t seed);

  Matrices up_, down_;  ///< null on a rank without experts
  const float* intermediate_scale_ = nullptr;
  std::vector<uint16_t> gate_up_on_host_, down_on_host_;
};

}  // namespace switchyard::tool
