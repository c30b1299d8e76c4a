// SPDX-License-Identifier: Apache-2.0
// One rank of an MoE layer, on the CPU and on a GPU alike: dispatch, experts and combine in separate calls, and the same layer
// in one (MoeForm::fused), with closed-form rows and weights, and a check of what comes out against one rank that computes
// everything without exchange.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "check/check_result.hpp"
#include "layer/exchange.hpp"
#include "layer/experts.hpp"
#include "switchyard/fused.hpp"
#include "switchyard/layer.hpp"

namespace switchyard::tool {

/// A layer; equal on all ranks.
struct LayerSpec {
  Scenario scenario;  ///< expert-major, with its routes
  int64_t intermediate = 0;
  Backend backend = Backend::cpu;
  LayerExchangeConfig exchange;
  CallSms sms;
  /// GPUs. Not none: a layer in fp8: rows cross with scales of this kind, and those between the products have such too; a
  /// low-latency exchange is configured for them.
  ScaleKind quantize = ScaleKind::none;
  bool fused = false;   ///< the rank also has the same layer in its fused form: only where why_not_fused() is empty
  bool halves = false;  ///< and, on GPUs, its two halves as calls of their own, which take memory of their own
  int fused_sms = 0;    ///< GPUs: multiprocessors of a call of it; 0: the library's default
};
/// Why the library has no fused form of a layer, as it says itself; empty if it has, as far as one can know before a group is
/// there: LayerRank::why_not_fused().
std::string why_not_fused(const LayerSpec& spec);
/// What experts on GPUs take: multiples of 16 in fp8, else of 8.
bool layer_widths_allowed(int64_t hidden, int64_t intermediate, ScaleKind quantize);
/// \throws UsageError naming the option
void check_layer_widths(int64_t hidden, int64_t intermediate, ScaleKind quantize);
/// Symmetric memory of each rank.
size_t layer_heap_bytes(const LayerSpec& spec);
/// Of the rank that takes most: memory of its device besides.
size_t layer_device_bytes(const LayerSpec& spec);
/// Of the rank that takes most: memory that the fused form takes by itself.
size_t layer_fused_bytes(const LayerSpec& spec);

class LayerRank {
 public:
  /// Collective. `device` has room for layer_device_bytes(spec); it must outlive this, as `spec` must.
  LayerRank(const LayerSpec& spec, Group& group, RankDevice& device);

  /// Collective. The inputs are those of data set `set`; the outputs are NaN.
  void prepare(uint64_t set);
  // The calls. Phases are called in this order; layer() is all of them.
  void dispatch() { exchange_->dispatch(input_); }
  void up() { experts_.up(exchange_->x(), exchange_->rows()); }
  void down() { experts_.down(exchange_->rows(), exchange_->y()); }
  void experts() { experts_.forward(exchange_->x(), exchange_->rows(), exchange_->y()); }
  void combine(CombineOrder order) { exchange_->combine(order, out_); }
  void layer(CombineOrder order);
  /// The same as layer() with CombineOrder::per_route, in one call; only if fuses().
  void fused();
  bool fuses() const { return fused_.has_value(); }
  /// Its halves, in turn; only if has_halves(). The second writes the outputs.
  void dispatch_up();
  void down_combine();
  bool has_halves() const { return halves_.has_value(); }
  /// If the spec asks for it and there is none: why, as the library says. The same on all ranks.
  const std::string& why_not_fused() const { return why_not_fused_; }
  int rank() const { return rank_; }
  /// Rows that the last dispatch delivered, as far as the host knows.
  int64_t delivered() const { return exchange_->x().rows; }
  /// up() and down() can be called instead of experts(): on GPUs.
  bool in_parts() const { return experts_.in_parts(); }

  /// Waits. The outputs, [T, H].
  std::vector<std::byte> outputs() const;
  /// Local. Compares `outputs`, as outputs() returned them after prepare(set) and a layer, with the single-rank reference: of
  /// `max_tokens` tokens, evenly spread, which are computed by `threads` threads.
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
  std::optional<FusedMoe> halves_;
  std::string why_not_fused_;
  RowArray x_;  ///< on the host
  LayerInput input_;
  void *rows_ = nullptr, *out_ = nullptr;
};

}  // namespace switchyard::tool
