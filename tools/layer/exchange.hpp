// SPDX-License-Identifier: Apache-2.0
// The exchange of a layer: rows go to experts and come back, in normal or in low-latency mode. What experts read is what a
// dispatch delivered, and what they write combine reads: nothing is copied between the calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <variant>

#include "check/low_latency_rank.hpp"
#include "check/scenario.hpp"
#include "switchyard/gemm.hpp"
#include "switchyard/low_latency.hpp"
#include "switchyard/normal.hpp"

namespace switchyard::tool {

/// The mode, by its config. The tokens are bf16.
using LayerExchangeConfig = std::variant<NormalConfig, LowLatencyConfig>;

/// Normal mode: bf16 rows of the scenario, which has its routes, expert-major.
NormalConfig layer_normal_config(const Scenario& s);
/// Low-latency mode, likewise. `quantize`: not none: rows become fp8 on the way, with these scales.
LowLatencyConfig layer_low_latency_config(const Scenario& s, ScaleKind quantize = ScaleKind::none);

/// Symmetric memory of each rank.
size_t exchange_heap_bytes(const LayerExchangeConfig& config, int world, Backend backend);
/// Rows that experts get at most, of a rank with most experts: delivered or not, the array has so many.
int64_t exchange_max_rows(const LayerExchangeConfig& config, int world);

/// A rank's tokens, in memory of its device.
struct LayerInput {
  ConstRows x;
  ExpertIds ids;
  const float* weights = nullptr;
};

class LayerExchange {
 public:
  virtual ~LayerExchange() = default;
  /// Collective. What an earlier dispatch delivered is gone.
  virtual void dispatch(const LayerInput& input) = 0;
  /// What the last dispatch delivered, where its rows lie, and where experts write.
  virtual ConstRows x() const = 0;
  virtual ExpertRows rows() const = 0;
  virtual Rows y() const = 0;
  /// Collective. Into `out`, [T, H].
  virtual void combine(CombineOrder order, void* out) = 0;
};

/// Collective. Calls are enqueued on `stream`. `quantize`: what a dispatch makes of the tokens; of low latency that of the
/// config.
std::unique_ptr<LayerExchange> make_layer_exchange(const LayerExchangeConfig& config, ScaleKind quantize, Group& group,
                                                   CallSms sms, void* stream);

}  // namespace switchyard::tool
