// SPDX-License-Identifier: Apache-2.0
// The experts of one rank of a layer. Their weights are those of ExpertWeights on either backend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "device/rank_device.hpp"
#include "measure/gpu/expert_weights.hpp"
#include "switchyard/expert.hpp"
#include "switchyard/gemm.hpp"

namespace switchyard::tool {

/// Of the rows of a layer, between its experts' products too, and of their weights.
inline constexpr DType kLayerType = DType::bf16;

/// The closed form of the matrices of ExpertWeights(seed, hidden, intermediate).
struct WeightForms {
  measure::WeightForm gate_up, down;
};
WeightForms weight_forms(uint64_t seed, int64_t hidden, int64_t intermediate);
/// Enqueues on a GPU: writes the weights of the experts from `first_expert` on as ExpertMlp takes them, bf16. H and I are
/// multiples of 8.
void write_weights(const ExpertShape& shape, int first_expert, uint64_t seed, void* w13, void* w2, RankDevice& device);

/// On the host an ExpertMlp. On a GPU two grouped products, up with SwiGLU and down, which can be called one by one.
class LayerExperts {
 public:
  /// Experts from `first_expert` on, for calls with at most `max_rows` rows; one of `world` ranks, which may share GPUs. Memory
  /// of a GPU comes from `device`, which must outlive this.
  LayerExperts(const ExpertShape& shape, int first_expert, uint64_t seed, int64_t max_rows, int world, RankDevice& device);
  /// Memory of one of these.
  static size_t device_bytes(const ExpertShape& shape, int64_t max_rows, Backend backend);

  /// There are up() and down().
  bool in_parts() const { return !mlp_; }
  void up(const ConstRows& x, const ExpertRows& rows);
  void down(const ExpertRows& rows, const Rows& y);
  /// Both, on either backend.
  void forward(const ConstRows& x, const ExpertRows& rows, const Rows& y);

 private:
  void make_products(int first_expert, uint64_t seed, int64_t max_rows);

  ExpertShape shape_;
  RankDevice& device_;
  int sms_;  ///< of a product; 0: all
  std::optional<ExpertMlp> mlp_;
  std::optional<GroupedGemm> up_, down_;  ///< neither on a rank without experts
  Rows between_;                          ///< [max_rows, I]
};

}  // namespace switchyard::tool
