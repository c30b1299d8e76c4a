// SPDX-License-Identifier: Apache-2.0
// Calls of SlotSelector::balance(), each of which moves weights.
#pragma once

#include <cstdint>
#include <vector>

#include "device/rank_device.hpp"
#include "switchyard/expert_map.hpp"
#include "switchyard/routing.hpp"

namespace switchyard::tool {

class BalancedCalls {
 public:
  static constexpr size_t kStagingBytes = size_t{64} << 20;  ///< of the group's heap
  static size_t device_bytes(int slots, size_t expert_bytes, const Routing& ids);

  /// Collective. `ids`: the rank's routing; `home`: the map without replicas; `expert_bytes`: weights of an expert. `group` and
  /// `device` must outlive this object.
  BalancedCalls(Group& group, RankDevice& device, const Routing& ids, const ExpertMap& home, size_t expert_bytes);

  /// Collective. Sets the map without replicas and balances the routing, so weights move in each call. Moves the weights
  /// that level the ranks best, regardless of cost.
  void run();
  /// Collective. Measures the rates of this machine; seconds_per_row is that of the slowest rank (measure_step_rates).
  StepOptions measure_rates(double seconds_per_row);
  /// The report of the last call.
  const BalanceReport& report() const { return report_; }

 private:
  Group& group_;
  RankDevice& device_;
  ExpertMap home_;
  SlotSelector selector_;
  std::vector<SlotArray> arrays_;
  ExpertIds ids_;
  void* slots_;
  BalanceReport report_;
};

}  // namespace switchyard::tool
