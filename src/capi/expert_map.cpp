// SPDX-License-Identifier: Apache-2.0
// C functions for replicated experts.

#include <algorithm>
#include <span>

#include "capi/internal_exports.hpp"
#include "capi/objects.hpp"
#include "capi/structs.hpp"
#include "switchyard/c/expert_map.h"
#include "switchyard/expert_map.hpp"

using namespace switchyard;
using namespace switchyard::detail;

namespace switchyard::detail {

using SelectorState = Grouped<SlotSelector>;

}  // namespace switchyard::detail

// NOLINTBEGIN(readability-identifier-naming): names of the C ABI
struct sy_slot_selector {
  std::shared_ptr<SelectorState> state;
};
struct sy_slot_weights {
  std::shared_ptr<Grouped<SlotWeights>> state;
};
struct sy_route_counter {
  std::shared_ptr<Grouped<RouteCounter>> state;
};
// NOLINTEND(readability-identifier-naming)

namespace {

constexpr sy_expert_map kMap = SY_EXPERT_MAP_INIT;
constexpr int kMaxSlots = 1 << 20;  // of all ranks

/// The sizes of the caller's map, checked, and its slots if `with_slots`.
ExpertMap to_map(const sy_expert_map* given, const char* name, bool with_slots = true) {
  const sy_expert_map m = read_struct(given, kMap, name);
  const auto member = [&](const char* of) { return std::string(name) + "->" + of; };
  require_range(member("reserved").c_str(), m.reserved, 0, 0);
  require_range(member("num_experts").c_str(), m.num_experts, 1, kMaxSlots);
  require_range(member("world").c_str(), m.world, 1, SY_MAX_RANKS);
  require_range(member("slots_per_rank").c_str(), m.slots_per_rank, 1, kMaxSlots / m.world);
  require(m.expert_of_slot, member("expert_of_slot").c_str());
  ExpertMap map{m.num_experts, m.world, m.slots_per_rank, {}};
  if (with_slots) map.expert_of_slot.assign(m.expert_of_slot, m.expert_of_slot + map.num_slots());
  return map;
}

std::span<const int64_t> routes_of(const int64_t* routes, const char* name, int64_t count) {
  require(routes, name);
  return {routes, static_cast<size_t>(count)};
}

/// The expected routes of `map`, or none if `routes` is null.
std::span<const int64_t> expected_routes(const int64_t* routes, const ExpertMap& map) {
  return routes ? routes_of(routes, "routes", int64_t{map.world} * map.num_experts) : std::span<const int64_t>();
}

using Planner = ExpertMap(std::span<const int64_t> routes_per_expert, const ExpertMap& current, double tolerance);

sy_code plan_by(Planner* plan, const sy_expert_map* current, const int64_t* routes_per_expert, double tolerance,
                int32_t* expert_of_slot) {
  return guarded([&] {
    const ExpertMap from = to_map(current, "current");
    require(expert_of_slot, "expert_of_slot");
    const ExpertMap to = plan(routes_of(routes_per_expert, "routes_per_expert", from.num_experts), from, tolerance);
    std::copy(to.expert_of_slot.begin(), to.expert_of_slot.end(), expert_of_slot);
  });
}

std::vector<SlotArray> slot_arrays(void* const* arrays, const size_t* slot_bytes, int32_t num_arrays) {
  require_range("num_arrays", num_arrays, 0, 1 << 20);
  if (num_arrays > 0) {
    require(arrays, "arrays");
    require(slot_bytes, "slot_bytes");
  }
  std::vector<SlotArray> given;
  for (int32_t i = 0; i < num_arrays; ++i) given.push_back({arrays[i], slot_bytes[i]});
  return given;
}

/// Writes the rates that are within the struct of the caller, which may be older.
void write_rates(sy_balance_options* to, const StepOptions& from) {
  const auto write = [&](double& field, double value) {
    const auto at = static_cast<size_t>(reinterpret_cast<char*>(&field) - reinterpret_cast<char*>(to));
    if (at + sizeof field <= to->struct_size) field = value;
  };
  write(to->link_bytes_per_s, from.link_bytes_per_s);
  write(to->seconds_per_row, from.seconds_per_row);
  write(to->seconds_per_move, from.seconds_per_move);
}

}  // namespace

sy_code sy_expert_map_check(const sy_expert_map* map) {
  return guarded([&] { check_expert_map(to_map(map, "map")); });
}

sy_code sy_expert_map_home(const sy_expert_map* map) {
  return guarded([&] {
    const ExpertMap m = to_map(map, "map", false);
    const ExpertMap home = home_map(m.num_experts, m.world, m.slots_per_rank);
    std::copy(home.expert_of_slot.begin(), home.expert_of_slot.end(), map->expert_of_slot);
  });
}

sy_code sy_expert_map_plan(const sy_expert_map* current, const int64_t* routes_per_expert, double tolerance,
                           int32_t* expert_of_slot) {
  return plan_by(plan_experts, current, routes_per_expert, tolerance, expert_of_slot);
}

sy_code sy_expert_map_plan_replicas(const sy_expert_map* current, const int64_t* routes_per_expert, double tolerance,
                                    int32_t* expert_of_slot) {
  return plan_by(plan_replicas, current, routes_per_expert, tolerance, expert_of_slot);
}

sy_code sy_expert_map_divide(const sy_expert_map* map, const int64_t* routes_per_expert, int64_t* of_slot, int64_t* of_rank) {
  return guarded([&] {
    const ExpertMap m = to_map(map, "map");
    const SlotLoads loads = divide_routes(m, routes_of(routes_per_expert, "routes_per_expert", m.num_experts));
    if (of_slot) std::copy(loads.of_slot.begin(), loads.of_slot.end(), of_slot);
    if (of_rank) std::copy(loads.of_rank.begin(), loads.of_rank.end(), of_rank);
  });
}

sy_code sy_expert_map_replace(const sy_expert_map* map, const int64_t* routes, int32_t source, int32_t* ids, int64_t num_ids) {
  return guarded([&] {
    const ExpertMap m = to_map(map, "map");
    require_range("num_ids", num_ids, 0, INT64_MAX / 4);
    if (num_ids > 0) require(ids, "ids");
    const SlotRuns runs = divide_source(m, routes_of(routes, "routes", int64_t{m.world} * m.num_experts), source);
    replace_by_slots({ids, static_cast<size_t>(num_ids)}, runs);
  });
}

sy_code sy_expert_map_vacate(const sy_expert_map* from, const sy_expert_map* to, int32_t* expert_of_slot) {
  return guarded([&] {
    require(expert_of_slot, "expert_of_slot");
    const ExpertMap vacated = vacate(to_map(from, "from"), to_map(to, "to"));
    std::copy(vacated.expert_of_slot.begin(), vacated.expert_of_slot.end(), expert_of_slot);
  });
}

sy_code sy_expert_map_count_moved(const sy_expert_map* from, const sy_expert_map* to, int32_t* moved) {
  return guarded([&] {
    require(moved, "moved");
    *moved = count_moved(to_map(from, "from"), to_map(to, "to"));
  });
}

sy_code sy_move_weights(sy_group* group, const sy_expert_map* from, const sy_expert_map* to, void* const* arrays,
                        const size_t* slot_bytes, int32_t num_arrays, size_t staging_bytes, void* stream, int64_t* received) {
  return collective_on(group, "group", [&] {
    const std::vector<SlotArray> given = slot_arrays(arrays, slot_bytes, num_arrays);
    const int64_t bytes = move_weights(*group->group, to_map(from, "from"), to_map(to, "to"), given, {staging_bytes, stream});
    if (received) *received = bytes;
  });
}

sy_code sy_slot_weights_create(sy_group* group, int32_t slots_per_rank, void* const* arrays, const size_t* slot_bytes,
                               int32_t num_arrays, size_t staging_bytes, void* stream, sy_slot_weights** weights) {
  return create(group, "weights", weights, [&] {
    return std::make_shared<Grouped<SlotWeights>>(group->group, slots_per_rank, slot_arrays(arrays, slot_bytes, num_arrays),
                                                  MoveOptions{staging_bytes, stream});
  });
}

sy_code sy_slot_weights_destroy(sy_slot_weights* weights) {
  delete weights;
  return SY_OK;
}

sy_code sy_slot_weights_move(sy_slot_weights* weights, const sy_expert_map* from, const sy_expert_map* to, void* after,
                             int64_t* received) {
  return collective_on(weights, "weights", [&] {
    auto& state = *weights->state;
    const int64_t bytes = state.object.move(*state.group, to_map(from, "from"), to_map(to, "to"), after);
    if (received) *received = bytes;
  });
}

sy_code sy_slot_weights_wait(const sy_slot_weights* weights, void* stream) {
  return guarded([&] {
    require(weights, "weights");
    weights->state->object.wait(stream);
  });
}

sy_code sy_slot_weights_ready(const sy_slot_weights* weights, sy_bool* done, void** event) {
  return guarded([&] {
    require(weights, "weights");
    if (done) *done = weights->state->object.ready() ? 1 : 0;
    if (event) *event = weights->state->object.ready_event();
  });
}

SlotSelector* sy_internal_slot_selector_1(sy_slot_selector* selector) noexcept {
  return selector ? &selector->state->object : nullptr;
}

sy_code sy_slot_selector_create(sy_group* group, const sy_expert_map* map, const int64_t* routes, sy_slot_selector** selector) {
  return create(group, "selector", selector, [&] {
    const ExpertMap m = to_map(map, "map");
    return std::make_shared<SelectorState>(group->group, m, expected_routes(routes, m));
  });
}

sy_code sy_slot_selector_destroy(sy_slot_selector* selector) {
  delete selector;
  return SY_OK;
}

sy_code sy_slot_selector_select(sy_slot_selector* selector, const sy_expert_ids* topk_ids, void* slots, void* stream) {
  return collective_on(selector, "selector", [&] { selector->state->object.select(from_c(topk_ids), slots, stream); });
}

sy_code sy_slot_selector_set_map(sy_slot_selector* selector, const sy_expert_map* map, const int64_t* routes, void* stream) {
  return collective_on(selector, "selector", [&] {
    const ExpertMap m = to_map(map, "map");
    selector->state->object.set_map(m, expected_routes(routes, m), stream);
  });
}

sy_code sy_slot_selector_balance(sy_slot_selector* selector, const sy_expert_ids* topk_ids, void* slots, void* const* arrays,
                                 const size_t* slot_bytes, int32_t num_arrays, const sy_balance_options* options, void* stream,
                                 sy_balance_report* report) {
  return collective_on(selector, "selector", [&] {
    BalanceOptions given = from_c(options);
    given.move.stream = stream;
    const BalanceReport made = selector->state->object.balance(*selector->state->group, from_c(topk_ids), slots,
                                                               slot_arrays(arrays, slot_bytes, num_arrays), given);
    if (report) fill(report, made);
  });
}

sy_code sy_agree_on_step_rates(sy_group* group, sy_balance_options* options) {
  return collective_on(group, "group", [&] {
    require(options, "options");
    write_rates(options, agree_on_step_rates(*group->group, from_c(options).plan));
  });
}

sy_code sy_measure_step_rates(sy_group* group, sy_balance_options* options, void* stream) {
  return collective_on(group, "group", [&] {
    require(options, "options");
    BalanceOptions given = from_c(options);
    given.move.stream = stream;
    write_rates(options, measure_step_rates(*group->group, given.plan, given.move));
  });
}

sy_code sy_slot_selector_balance_in_background(sy_slot_selector* selector, const sy_expert_ids* topk_ids, void* slots,
                                               sy_slot_weights* weights, const sy_balance_options* options, void* stream,
                                               sy_balance_report* report) {
  return collective_on(selector, "selector", [&] {
    require(weights, "weights");
    BalanceOptions given = from_c(options);
    given.move.stream = stream;
    auto& state = *selector->state;
    const BalanceReport made = state.object.balance(*state.group, from_c(topk_ids), slots, weights->state->object, given);
    if (report) fill(report, made);
  });
}

sy_code sy_slot_selector_gather_routes(sy_slot_selector* selector, int64_t* routes) {
  return collective_on(selector, "selector", [&] {
    require(routes, "routes");
    const std::vector<int64_t> all = selector->state->object.gather_routes();
    std::copy(all.begin(), all.end(), routes);
  });
}

sy_code sy_slot_selector_state(const sy_slot_selector* selector, int32_t* expert_of_slot, int64_t* version,
                               const int64_t** routes) {
  return guarded([&] {
    require(selector, "selector");
    const std::vector<int32_t>& slots = selector->state->object.map().expert_of_slot;
    if (expert_of_slot) std::copy(slots.begin(), slots.end(), expert_of_slot);
    if (version) *version = selector->state->object.version();
    if (routes) *routes = selector->state->object.routes();
  });
}

sy_code sy_route_counter_create(sy_group* group, int32_t num_experts, sy_route_counter** counter) {
  return create(group, "counter", counter, [&] { return std::make_shared<Grouped<RouteCounter>>(group->group, num_experts); });
}

sy_code sy_route_counter_destroy(sy_route_counter* counter) {
  delete counter;
  return SY_OK;
}

sy_code sy_route_counter_count(sy_route_counter* counter, const sy_expert_ids* topk_ids, void* stream) {
  return guarded([&] {
    require(counter, "counter");
    counter->state->object.count(from_c(topk_ids), stream);
  });
}

sy_code sy_route_counter_load(sy_route_counter* counter, sy_slot_selector* selector, int64_t* of_expert, int64_t* of_rank) {
  return collective_on(counter, "counter", [&] {
    const RouteLoad load = counter->state->object.load(selector ? &selector->state->object : nullptr);
    if (of_expert) std::copy(load.of_expert.begin(), load.of_expert.end(), of_expert);
    if (of_rank) std::copy(load.of_rank.begin(), load.of_rank.end(), of_rank);
  });
}

sy_code sy_route_counter_routes(const sy_route_counter* counter, const int64_t** routes) {
  return guarded([&] {
    require(counter, "counter");
    require(routes, "routes");
    *routes = counter->state->object.routes();
  });
}
