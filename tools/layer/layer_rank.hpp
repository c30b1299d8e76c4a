// SPDX-License-Identifier: Apache-2.0
// One rank of an MoE layer, on the CPU or a GPU: dispatch, experts and combine in separate calls, and the same layer in a
// single call (MoeForm::fused). Rows and weights are in closed form. Results are checked against those of a single rank that
// computes everything without an exchange.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "check/check_result.hpp"
#include "layer/exchange.hpp"
#include "layer/experts.hpp"
#include "switchyard/layer.hpp"

namespace switchyard::tool {

/// Description of a layer, identical on all ranks.
struct LayerSpec {
  Scenario scenario;  ///< expert-major, with its routes
  int64_t intermediate = 0;
  Backend backend = Backend::cpu;
  LayerExchangeConfig exchange;
  CallSms sms;
  /// GPUs. If not none, the layer is fp8: rows in flight and the rows between the products have scales of this kind. A
  /// low-latency exchange must be configured for them.
  ScaleKind quantize = ScaleKind::none;
  bool fused = false;  ///< the rank also has the fused form: only if why_not_fused() is empty
  int fused_sms = 0;   ///< GPUs: multiprocessors of a fused call; 0: the library's default
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
/// Memory of the fused form alone: the maximum over all ranks.
size_t layer_fused_bytes(const LayerSpec& spec);

class LayerRank {
 public:
  /// Collective. `device` must have space for layer_device_bytes(spec). `device` and `spec` must outlive this object.
  LayerRank(const LayerSpec& spec, Group& group, RankDevice& device);

  /// Collective. Sets the inputs of data set `set` and fills the outputs with NaN.
  void prepare(uint64_t set);
  // The calls. The phases must be called in this order; layer() calls all of them.
  void dispatch() { exchange_->dispatch(input_); }
  void up() { experts_.up(exchange_->x(), exchange_->rows()); }
  void down() { experts_.down(exchange_->rows(), exchange_->y()); }
  void experts() { experts_.forward(exchange_->x(), exchange_->rows(), exchange_->y()); }
  void combine(CombineOrder order) { exchange_->combine(order, out_); }
  void layer(CombineOrder order);
  /// Runs layer() with CombineOrder::per_route in a single call. Call it only if fuses().
  void fused();
  bool fuses() const { return fused_.has_value(); }
  /// The library's reason if the spec requests the fused form but it is not available. Equal on all ranks.
  const std::string& why_not_fused() const { return why_not_fused_; }
  int rank() const { return rank_; }
  /// Number of rows in the last dispatch, as far as it is known to the host.
  int64_t delivered() const { return exchange_->x().rows; }
  /// Whether up() and down() can be called instead of experts(); true on GPUs.
  bool in_parts() const { return experts_.in_parts(); }

  /// Waits, then returns the outputs, [T, H].
  std::vector<std::byte> outputs() const;
  /// Local. Compares `outputs`, as returned by outputs() after prepare(set) and a layer, with the single-rank reference for
  /// `max_tokens` evenly spread tokens, using `threads` threads.
  CheckResult check(const std::string& name, const std::vector<std::byte>& outputs, int64_t max_tokens, int threads) const;

 private:
  void make_fused();
  size_t out_bytes() const { return static_cast<size_t>(x_.rows()) * x_.row_bytes(); }

  const LayerSpec& spec_;
  Group& group_;
  RankDevice& device_;
  int rank_;
  LayerExperts experts_;
  std::unique_ptr<LayerExchange> exchange_;
  std::optional<MoeLayer> fused_;
  std::string why_not_fused_;
  RowArray x_;  ///< on the host
  LayerInput input_;
  void *rows_ = nullptr, *out_ = nullptr;
};

}  // namespace switchyard::tool
