// SPDX-License-Identifier: Apache-2.0
// The experts of one rank of a layer. Their weights equal those of ExpertWeights on both backends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "device/rank_device.hpp"
#include "layer/arithmetic.hpp"
#include "measure/gpu/expert_weights.hpp"
#include "switchyard/expert.hpp"
#include "switchyard/gemm.hpp"

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

/// A bf16 ExpertMlp on the host or, on a GPU, two grouped products that can be called separately: up (with SwiGLU) and down.
class LayerExperts {
 public:
  /// Experts starting at `first_expert`, for calls with at most `max_rows` rows, on one of `world` ranks, which may share GPUs;
  /// 0 rows: only the weights of a GPU. GPU memory is allocated from `device`, which must outlive this object. fp8, on
  /// GPUs: the weights and all rows but those of the result are fp8; H and I are multiples of 16.
  LayerExperts(const ExpertShape& shape, int first_expert, uint64_t seed, int64_t max_rows, const LayerArithmetic& arithmetic,
               int world, RankDevice& device);
  /// Memory of one object.
  static size_t device_bytes(const ExpertShape& shape, int64_t max_rows, const LayerArithmetic& arithmetic, Backend backend);

  /// Whether up() and down() are available.
  bool in_parts() const { return !mlp_; }
  void up(const ConstRows& x, const ExpertRows& rows);
  void down(const ExpertRows& rows, const Rows& y);
  /// The weights on a GPU, in the layout of ExpertMlp.
  const void* w13() const { return weights_.up.data; }
  const void* w2() const { return weights_.down.data; }
  const void* w13_scales() const { return weights_.up.scales; }
  const void* w2_scales() const { return weights_.down.scales; }
  /// OutputScaling::fixed: the scale, on a GPU; else null.
  const float* intermediate_scale() const { return intermediate_scale_; }
  /// Both products, on either backend.
  void forward(const ConstRows& x, const ExpertRows& rows, const Rows& y);

 private:
  /// The weights for one product of all experts; in fp8, with scales.
  struct Weights {
    void* data = nullptr;
    float* scales = nullptr;
  };
  struct BothWeights {
    Weights up, down;
  };
  BothWeights make_weights(int first_expert, uint64_t seed);
  BothWeights make_fp8_weights(int first_expert, uint64_t seed);
  void make_products(const BothWeights& weights);
  /// The first `rows` rows of [max_rows, I].
  Rows between(int64_t rows) const;

  ExpertShape shape_;
  LayerArithmetic arithmetic_;
  RankDevice& device_;
  int sms_;  ///< multiprocessors of a product; 0: all
  std::optional<ExpertMlp> mlp_;
  std::optional<GroupedGemm> up_, down_;  ///< neither on a rank without experts
  Rows between_;                          ///< [max_rows, I], in fp8 with scales
  const float* intermediate_scale_ = nullptr;
  void* scratch_ = nullptr;  ///< OutputScaling::per_row: bf16 [max_rows, I]
  BothWeights weights_;      ///< on a GPU
};

}  // namespace switchyard::tool
