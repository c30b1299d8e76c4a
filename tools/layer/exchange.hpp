// SPDX-License-Identifier: Apache-2.0
// A layer's exchange in normal or low-latency mode: rows travel to the experts and back. Experts read the dispatched rows and
// write the rows for combine in place, so nothing is copied between the calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <variant>

#include "check/low_latency_rank.hpp"
#include "check/scenario.hpp"
#include "switchyard/expert_map.hpp"
#include "switchyard/gemm.hpp"
#include "switchyard/low_latency.hpp"
#include "switchyard/normal.hpp"

namespace switchyard::tool {

/// The config type selects the mode. The tokens are bf16.
using LayerExchangeConfig = std::variant<NormalConfig, LowLatencyConfig>;

/// Normal mode with the scenario's bf16 rows, expert-major. The scenario must include its routes.
NormalConfig layer_normal_config(const Scenario& s);
/// Low-latency mode for the same rows. `quantize`: if not none, rows travel as fp8 with scales of this kind.
LowLatencyConfig layer_low_latency_config(const Scenario& s, ScaleKind quantize = ScaleKind::none);

/// Symmetric memory per rank.
size_t exchange_heap_bytes(const LayerExchangeConfig& config, int world, Backend backend);
/// Maximum number of expert rows on any rank. The array always has this many rows.
int64_t exchange_max_rows(const LayerExchangeConfig& config, int world);

/// A rank's tokens, in memory of the rank's device.
struct LayerInput {
  ConstRows x;
  ExpertIds ids;
  const float* weights = nullptr;
  SlotSelector* selector = nullptr;  ///< if not null, the ids are expert ids, which the call replaces with slots
  void* slots = nullptr;             ///< with a selector: memory for the slots
};

class LayerExchange {
 public:
  virtual ~LayerExchange() = default;
  /// Collective. Invalidates the results of earlier dispatches.
  virtual void dispatch(const LayerInput& input) = 0;
  /// Results of the last dispatch, the positions of its rows, and the experts' output rows.
  virtual ConstRows x() const = 0;
  virtual ExpertRows rows() const = 0;
  virtual Rows y() const = 0;
  /// Collective. Writes to `out`, [T, H].
  virtual void combine(CombineOrder order, void* out) = 0;
};

/// Collective. Calls are enqueued on `stream`. `quantize`: scales of the rows sent by a dispatch; low-latency mode ignores it
/// and uses its config.
std::unique_ptr<LayerExchange> make_layer_exchange(const LayerExchangeConfig& config, ScaleKind quantize, Group& group,
                                                   CallSms sms, void* stream);

}  // namespace switchyard::tool
