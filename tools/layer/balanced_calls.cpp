// SPDX-License-Identifier: Apache-2.0
#include "layer/balanced_calls.hpp"

namespace switchyard::tool {

size_t BalancedCalls::device_bytes(int slots, size_t expert_bytes, const Routing& ids) {
  return static_cast<size_t>(slots) * expert_bytes + 2 * ids.topk_ids.size() * sizeof ids.topk_ids[0];
}

BalancedCalls::BalancedCalls(Group& group, RankDevice& device, const Routing& ids, const ExpertMap& home, size_t expert_bytes)
    : group_(group), device_(device), home_(home), selector_(group, home) {
  arrays_.push_back({device.allocate(static_cast<size_t>(home.slots_per_rank) * expert_bytes), expert_bytes});
  const size_t bytes = ids.topk_ids.size() * sizeof ids.topk_ids[0];
  void* const copy = device.allocate(bytes);
  device.write(copy, ids.topk_ids.data(), bytes);
  ids_ = ids.expert_ids();
  ids_.data = copy;
  slots_ = device.allocate(bytes);
}

void BalancedCalls::run() {
  BalanceOptions options;
  options.plan.link_bytes_per_s = 1e18;
  options.plan.seconds_per_move = 0;
  options.move.staging_bytes = kStagingBytes;
  options.move.stream = device_.stream();
  selector_.set_map(home_, {}, device_.stream());
  report_ = selector_.balance(group_, ids_, slots_, arrays_, options);
}

StepOptions BalancedCalls::measure_rates(double seconds_per_row) {
  StepOptions mine;
  mine.seconds_per_row = seconds_per_row;
  return measure_step_rates(group_, mine, {kStagingBytes, device_.stream()});
}

}  // namespace switchyard::tool
