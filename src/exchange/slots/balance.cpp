// SPDX-License-Identifier: Apache-2.0
// SlotSelector::balance(). The host chooses the slots, so each rank receives the planned number of rows.
#include <bit>
#include <string>

#include "exchange/slots/impl.hpp"
#include "exchange/slots/move.hpp"
#include "plan/expert_division.hpp"

namespace switchyard::detail {

namespace {

constexpr const char* kBalance = "SlotSelector::balance";

/// Adds the routes to each expert.
template <class Id>
void count_routes(const std::vector<Id>& ids, std::vector<int64_t>& counts) {
  for (const Id id : ids)
    if (id >= 0 && static_cast<uint64_t>(id) < counts.size()) ++counts[static_cast<size_t>(id)];
}

/// Replaces ids with slots in routing order. The id -1 is kept; any other id that is not an expert is replaced with its
/// refused_slot().
template <class Id>
void replace_ids(std::vector<Id>& ids, const SlotRuns& runs) {
  SlotSequence slots(runs);
  for (Id& id : ids) {
    const bool is_expert = id >= 0 && static_cast<uint64_t>(id) < slots.num_experts();
    id = static_cast<Id>(is_expert ? slots.next(static_cast<size_t>(id)) : refused_slot(id));
  }
}

double bytes_of_expert(std::span<const SlotArray> arrays) {
  double bytes = 0;
  for (const SlotArray& array : arrays) bytes += static_cast<double>(array.slot_bytes);
  return bytes;
}

AgreedField agreed_rate(const char* name, double value) {
  return {name, std::bit_cast<int64_t>(value), [](int64_t bits) { return std::to_string(std::bit_cast<double>(bits)); }};
}

}  // namespace

AgreedFields SlotSelectorImpl::fields_of_balance(std::span<const SlotArray> arrays, const BalanceOptions& options) const {
  AgreedFields all = fields(map_, {}), of_arrays = agreed_arrays(arrays, options.move);
  all.insert(all.end(), of_arrays.begin(), of_arrays.end());
  for (const AgreedField& field : {agreed("StepOptions::tile", options.plan.tile),
                                   agreed_rate("StepOptions::link_bytes_per_s", options.plan.link_bytes_per_s),
                                   agreed_rate("StepOptions::seconds_per_row", options.plan.seconds_per_row),
                                   agreed_rate("StepOptions::seconds_per_move", options.plan.seconds_per_move)})
    all.push_back(field);
  return all;
}

BalanceReport SlotSelectorImpl::balance(Group& group, const ExpertIds& topk_ids, void* slots, std::span<const SlotArray> arrays,
                                        const BalanceOptions& options, SlotWeightsImpl* weights) {
  void* const stream = options.move.stream;
  const auto experts = static_cast<size_t>(map_.num_experts);
  std::vector<int64_t> mine(experts, 0), all(experts * static_cast<size_t>(world())), sums(experts, 0);
  const auto on_ids = [&](const auto& f) { topk_ids.is_int64 ? f(wide_ids_) : f(narrow_ids_); };
  ConstructionReport report;
  report.report = attempt([&] {
    if (&group.impl() != &group_) invalid("group", " is not the group of the selector");
    if (weights) weights->check_joined(group_, map_.slots_per_rank);
    check_ids(topk_ids, slots);
    check_stream(kBalance, stream);
    check_arrays(arrays);
    check_step(bytes_of_expert(arrays), options.plan);
    on_ids([&](auto& ids) {
      ids.resize(static_cast<size_t>(topk_ids.num_tokens * topk_ids.topk));
      if (!ids.empty()) read_ids(topk_ids, ids.data(), stream);
      count_routes(ids, mine);
    });
  });
  agree(kBalance, fields_of_balance(arrays, options), report, mine.data(), experts * sizeof(int64_t), all.data());

  for (size_t i = 0; i < all.size(); ++i) sums[i % experts] += all[i];
  const StepPlan plan = plan_step(sums, map_, bytes_of_expert(arrays), options.plan);
  BalanceReport result{plan.max_before, plan.loads.max(), plan.mean, static_cast<int64_t>(plan.fetched.size()), 0};
  if (plan.map != map_) {
    prepare_map(plan.map, all, stream);  // its errors precede the copies, so the map in force still describes the weights
    result.received_bytes = weights ? weights->move(group, vacate(map_, plan.map), plan.map, stream)
                                    : move_weights(group, map_, plan.map, arrays, options.move);
    use_map(plan.map, stream);
  }
  ++calls_;
  if (topk_ids.num_tokens == 0) return result;
  run(topk_ids, {slots}, stream, nullptr);  // counts the routes
  const SlotRuns runs = divide_source(map_, all, rank());
  on_ids([&](auto& ids) {
    replace_ids(ids, runs);
    write_slots(topk_ids, ids.data(), slots, stream);
  });
  return result;
}

}  // namespace switchyard::detail
