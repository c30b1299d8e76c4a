// SPDX-License-Identifier: Apache-2.0
// One rank of an MoE layer, on the CPU or a GPU: a MoeLayer in either form, or one in each. Rows and weights are in closed
// form. Results are checked against those of a single rank that computes everything without an exchange.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "check/check_result.hpp"
#include "check/scenario.hpp"
#include "device/rank_device.hpp"
#include "layer/arithmetic.hpp"
#include "layer/experts.hpp"
#include "switchyard/expert_map.hpp"
#include "switchyard/layer.hpp"

namespace switchyard::tool {

/// Expert ids for a scenario whose routes are slots: SlotSelector selects these slots for these ids.
struct SelectedRoutes {
  ExpertMap map;
  std::vector<int64_t> expected;    ///< the selector's routes, [W, E]
  std::vector<Routing> of_experts;  ///< by rank
};

/// Description of a layer, identical on all ranks.
struct LayerSpec {
  Scenario scenario;  ///< with its routes
  int64_t intermediate = 0;
  Backend backend = Backend::cpu;
  MoeExchange exchange = MoeExchange::normal;   ///< not automatic
  CombineOrder order = CombineOrder::per_rank;  ///< of the separate form
  int sms = 0;                                  ///< GPUs: MoeLayerCall::num_sms
  LayerArithmetic arithmetic;
  bool separate = true;  ///< the rank has the separate form
  bool fused = false;    ///< the rank has the fused form: only if why_not_fused() is empty
  CombineOrder fused_order = CombineOrder::per_route;
  int64_t fused_rows = 0;                    ///< capacity of the fused form, beyond which a call is split; 0: its default
  bool fused_per_rank = false;               ///< with `fused`: the rank also has the fused form in order per_rank
  std::optional<SelectedRoutes> selected{};  ///< only with `separate`
};
/// The library's reason for not having a fused form of a layer, as far as this can be determined before a group exists; empty
/// if it has one. See also LayerRank::why_not_fused().
std::string why_not_fused(const LayerSpec& spec);
/// Widths accepted by experts on GPUs: multiples of 16 in fp8, otherwise of 8.
bool layer_widths_allowed(int64_t hidden, int64_t intermediate, ScaleKind quantize);
/// \throws UsageError naming the option
void check_layer_widths(int64_t hidden, int64_t intermediate, ScaleKind quantize);
/// Symmetric memory per rank.
size_t layer_heap_bytes(const LayerSpec& spec);
/// Additional device memory: the maximum over all ranks.
size_t layer_device_bytes(const LayerSpec& spec);
/// Memory that the MoeLayers allocate outside of heap and device: the maximum over all ranks.
size_t layer_private_bytes(const LayerSpec& spec);

class LayerRank {
 public:
  /// Collective. `device` must have space for layer_device_bytes(spec). `device` and `spec` must outlive this object.
  LayerRank(const LayerSpec& spec, Group& group, RankDevice& device);

  /// Collective. Sets the inputs of data set `set` and fills the outputs with NaN.
  void prepare(uint64_t set);
  /// Runs the layer in separate form.
  void layer() { forward(*separate_); }
  /// Variant of layer() with expert ids and a selector (MoeLayerCall::selector), which selects the scenario's slots. Requires
  /// selects().
  void selecting_layer();
  bool selects() const { return selector_.has_value(); }
  /// Runs the layer in fused form. Requires fuses().
  void fused() { forward(*fused_); }
  bool fuses() const { return fused_.has_value(); }
  /// Requires fuses_per_rank().
  void fused_per_rank() { forward(*fused_per_rank_); }
  bool fuses_per_rank() const { return fused_per_rank_.has_value(); }
  /// The library's reason if the spec requests the fused form but it is not available. Equal on all ranks.
  const std::string& why_not_fused() const { return why_not_fused_; }
  /// Collective: no rank waits before all ranks have enqueued their calls. Waits, then returns the outputs, [T, H].
  std::vector<std::byte> outputs() const;
  /// Local. Compares `outputs`, as returned by outputs() after prepare(set) and a layer, with the single-rank reference for
  /// `max_tokens` evenly spread tokens, using `threads` threads.
  CheckResult check(const std::string& name, const std::vector<std::byte>& outputs, int64_t max_tokens, int threads) const;

 private:
  void make_layers(const LayerWeights& weights);
  void forward(MoeLayer& layer);
  size_t out_bytes() const { return static_cast<size_t>(x_.rows()) * x_.row_bytes(); }

  const LayerSpec& spec_;
  Group& group_;
  RankDevice& device_;
  int rank_;
  std::optional<MoeLayer> separate_, fused_, fused_per_rank_;
  std::string why_not_fused_;
  RowArray x_;  ///< on the host
  ExpertIds ids_;
  const float* weights_ = nullptr;
  std::optional<SlotSelector> selector_;
  ExpertIds expert_ids_;  ///< with a selector
  void *rows_ = nullptr, *out_ = nullptr;
};

}  // namespace switchyard::tool
