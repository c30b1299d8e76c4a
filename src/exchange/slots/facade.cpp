// SPDX-License-Identifier: Apache-2.0
// The public class SlotSelector and the parts common to its backends.
#include <cinttypes>
#include <cstdio>
#include <string>

#include "base/as_error.hpp"
#include "base/call_signature.hpp"
#include "exchange/group/make.hpp"
#include "exchange/slots/impl.hpp"

namespace switchyard {

using namespace detail;

namespace {

uint64_t hash_of_values(const auto& values) {
  uint64_t hash = 0;
  for (const auto value : values) hash = mix_hash(hash, static_cast<uint64_t>(value));
  return hash;
}

constexpr const char* kCalls = "the number of select calls";

std::string hash_text(int64_t hash) {
  char text[32];
  std::snprintf(text, sizeof text, "(hash %016" PRIx64 ")", static_cast<uint64_t>(hash));
  return text;
}

}  // namespace

namespace detail {

std::vector<uint32_t> SlotSelectorImpl::make_table(const ExpertMap& map, std::span<const int64_t> routes,
                                                   int64_t version) const {
  if (map.world != world())
    invalid_value("ExpertMap::world", std::to_string(map.world), std::to_string(world()) + ", the number of ranks");
  if (map.num_experts != map_.num_experts || map.slots_per_rank != map_.slots_per_rank)
    invalid("map has num_experts = " + std::to_string(map.num_experts) +
            " and slots_per_rank = " + std::to_string(map.slots_per_rank) + ": must be " + std::to_string(map_.num_experts) +
            " and " + std::to_string(map_.slots_per_rank) + ", as in the map in force");
  check_expert_map(map);
  const uint32_t compared = table_version(version, number_);
  if (!routes.empty()) return make_slot_table(map, routes, rank(), compared);
  // 2^20 routes per (rank, expert): enough to resolve the shares of an expert's slots.
  const std::vector<int64_t> equal(static_cast<size_t>(map.world) * static_cast<size_t>(map.num_experts), int64_t{1} << 20);
  return make_slot_table(map, equal, rank(), compared);
}

AgreedFields SlotSelectorImpl::fields(const ExpertMap& map, std::span<const int64_t> routes) const {
  const auto hashed = [](const char* name, uint64_t hash) { return AgreedField{name, static_cast<int64_t>(hash), hash_text}; };
  return {agreed("the number of the selector", object_),
          agreed(kCalls, calls_),
          agreed("ExpertMap::num_experts", map.num_experts),
          agreed("ExpertMap::slots_per_rank", map.slots_per_rank),
          hashed("ExpertMap::expert_of_slot", hash_of_values(map.expert_of_slot)),
          hashed("routes", hash_of_values(routes))};
}

void SlotSelectorImpl::agree(const char* call, const AgreedFields& fields, const ConstructionReport& mine, const void* data,
                             size_t bytes, void* all) {
  try {
    group_.agree(call, fields, mine, data, bytes, all);
  } catch (const AgreedError& error) {
    if (error.field() == kCalls) calls_ = 0;  // all ranks have this error
    throw;
  }
  calls_ = 0;
}

void SlotSelectorImpl::select(const ExpertIds& topk_ids, void* slots, void* stream) {
  group_.check_usable("SlotSelector::select");
  check_ids(topk_ids, slots);
  ++calls_;
  if (topk_ids.num_tokens > 0) run(topk_ids, {slots}, stream, nullptr);
}

void SlotSelectorImpl::count(const ExpertIds& topk_ids, void* stream) {
  group_.check_usable("RouteCounter::count");
  check_ids(topk_ids, nullptr, true);
  if (topk_ids.num_tokens > 0) run(topk_ids, {}, stream, nullptr);
}

void SlotSelectorImpl::check_joined(const char* name, const Group::Impl& group, int num_experts) const {
  if (&group != &group_) invalid(name, " belongs to another group");
  if (map_.num_slots() != num_experts)
    invalid(name, " has " + std::to_string(map_.num_slots()) + " slots: must be num_experts, " + std::to_string(num_experts));
}

void SlotSelectorImpl::check_ids(const ExpertIds& topk_ids, const void* slots, bool counts_only) const {
  check_range("topk_ids.topk", topk_ids.topk, 1, kMaxTopk);
  if (topk_ids.num_tokens < 0) invalid_value("topk_ids.num_tokens", std::to_string(topk_ids.num_tokens), "at least 0");
  if (topk_ids.num_tokens > 0) {
    if (topk_ids.data == nullptr) invalid("topk_ids.data", " is null");
    if (slots == nullptr && !counts_only) invalid("slots", " is null");
  }
  check_call(topk_ids, slots);
}

void SlotSelectorImpl::prepare_map(const ExpertMap& map, std::span<const int64_t> routes, void* stream) {
  group_.check_usable("SlotSelector::set_map");
  ConstructionReport mine;
  mine.report = attempt([&] {
    check_stream("SlotSelector::set_map", stream);
    stage_table(make_table(map, routes, version_ + 1));
  });
  agree("SlotSelector::set_map", fields(map, routes), mine);
}

void SlotSelectorImpl::use_map(const ExpertMap& map, void* stream) {
  use_table(stream);
  map_ = map;
  ++version_;
}

void SlotSelectorImpl::set_map(const ExpertMap& map, std::span<const int64_t> routes, void* stream) {
  prepare_map(map, routes, stream);
  use_map(map, stream);
}

std::vector<int64_t> SlotSelectorImpl::gather_routes() {
  const auto experts = static_cast<size_t>(map_.num_experts);
  std::vector<int64_t> mine(experts), all(experts * static_cast<size_t>(world()));
  group_.check_usable("SlotSelector::gather_routes");
  read_routes(mine.data(), true);
  reset_routes_.resize(experts);
  for (size_t e = 0; e < experts; ++e) reset_routes_[e] += mine[e];
  group_.all_gather(mine.data(), experts * sizeof(int64_t), all.data(), "SlotSelector::gather_routes", Operation::all_gather,
                    object_);
  return all;
}

void SlotSelectorImpl::agree_on_load(const char* call, const SlotSelectorImpl* selector) {
  const auto given = [](int64_t value) { return std::string(value != 0 ? "given" : "null"); };
  ConstructionReport mine;
  mine.report = attempt([&] {
    if (selector) selector->check_joined("selector", group_, map_.num_experts);
  });
  group_.agree(call,
               {agreed("the number of the counter", object_),
                {"selector", int64_t{selector != nullptr}, given},
                agreed("the number of the selector", selector ? selector->object_ : 0)},
               mine);
}

std::vector<int64_t> SlotSelectorImpl::gather_all_routes(const char* name) {
  const auto experts = static_cast<size_t>(map_.num_experts);
  std::vector<int64_t> mine(experts), all(experts * static_cast<size_t>(world()));
  group_.check_usable(name);
  read_routes(mine.data(), false);
  for (size_t e = 0; e < reset_routes_.size(); ++e) mine[e] += reset_routes_[e];
  group_.all_gather(mine.data(), experts * sizeof(int64_t), all.data(), name, Operation::all_gather, object_);
  return all;
}

}  // namespace detail

SlotSelector::SlotSelector(Group& group, const ExpertMap& map, std::span<const int64_t> routes)
    : impl_(group.impl().collective_call("SlotSelector", [&] {
        if constexpr (kHasGpuCode)
          if (group.impl().device) return SlotSelectorImpl::make_on_gpu(group, map, routes);
        return SlotSelectorImpl::make_on_cpu(group, map, routes);
      })) {}
SlotSelector::SlotSelector(SlotSelector&&) noexcept = default;
SlotSelector& SlotSelector::operator=(SlotSelector&& other) noexcept {
  if (this != &other) replace_at_home(impl_.pointer(), std::move(other.impl_.pointer()));
  return *this;
}
SlotSelector::~SlotSelector() { replace_at_home(impl_.pointer(), {}); }

void SlotSelector::select(const ExpertIds& topk_ids, void* slots, void* stream) {
  impl_->collective_call("SlotSelector::select", [&] { impl_->select(topk_ids, slots, stream); });
}
void SlotSelector::set_map(const ExpertMap& map, std::span<const int64_t> routes, void* stream) {
  impl_->collective_call("SlotSelector::set_map", [&] { impl_->set_map(map, routes, stream); });
}
BalanceReport SlotSelector::balance(Group& group, const ExpertIds& topk_ids, void* slots, std::span<const SlotArray> arrays,
                                    const BalanceOptions& options) {
  return impl_->collective_call("SlotSelector::balance",
                                [&] { return impl_->balance(group, topk_ids, slots, arrays, options, nullptr); });
}
BalanceReport SlotSelector::balance(Group& group, const ExpertIds& topk_ids, void* slots, SlotWeights& weights,
                                    const BalanceOptions& options) {
  return impl_->collective_call("SlotSelector::balance", [&] {
    SlotWeightsImpl& moving = SelectorAccess::impl(weights);
    return impl_->balance(group, topk_ids, slots, moving.arrays(), options, &moving);
  });
}
std::vector<int64_t> SlotSelector::gather_routes() {
  return impl_->collective_call("SlotSelector::gather_routes", [&] { return impl_->gather_routes(); });
}
const int64_t* SlotSelector::routes() const { return impl_->routes(); }
const ExpertMap& SlotSelector::map() const { return impl_->map(); }
int64_t SlotSelector::version() const { return impl_->version(); }

namespace {

/// Returns the map of an exchange without replicas. The backend's constructor rejects a wrong number of experts, on all ranks.
ExpertMap counted_map(int num_experts, int world) {
  const int per_rank = num_experts > 0 ? (num_experts - 1) / world + 1 : 1;
  if (num_experts >= 1 && num_experts <= 1 << 20) return home_map(num_experts, world, per_rank);
  return {num_experts, world, per_rank, {}};
}

}  // namespace

RouteCounter::RouteCounter(Group& group, int num_experts)
    : impl_(group.impl().collective_call("RouteCounter", [&] {
        ExpertMap map;
        ConstructionReport mine;
        mine.report = attempt([&] { map = counted_map(num_experts, group.size()); });
        group.impl().agree(kRouteCounterObject, {agreed("RouteCounter::num_experts", num_experts)}, mine);
        if constexpr (kHasGpuCode)
          if (group.impl().device) return SlotSelectorImpl::make_on_gpu(group, map, {}, kRouteCounterObject);
        return SlotSelectorImpl::make_on_cpu(group, map, {}, kRouteCounterObject);
      })) {}
RouteCounter::RouteCounter(RouteCounter&&) noexcept = default;
RouteCounter& RouteCounter::operator=(RouteCounter&& other) noexcept {
  if (this != &other) replace_at_home(impl_.pointer(), std::move(other.impl_.pointer()));
  return *this;
}
RouteCounter::~RouteCounter() { replace_at_home(impl_.pointer(), {}); }

void RouteCounter::count(const ExpertIds& topk_ids, void* stream) {
  as_error("RouteCounter::count", [&] { impl_->count(topk_ids, stream); });
}
RouteLoad RouteCounter::load(SlotSelector* selector) {
  constexpr const char* kLoad = "RouteCounter::load";
  return impl_->collective_call(kLoad, [&] {
    const ExpertMap& map = impl_->map();
    impl_->agree_on_load(kLoad, selector ? &SelectorAccess::impl(*selector) : nullptr);
    RouteLoad load{impl_->gather_all_routes(kLoad), std::vector<int64_t>(static_cast<size_t>(map.world), 0)};
    const auto experts = static_cast<size_t>(map.num_experts);
    std::vector<int> owner(experts, 0);
    for (size_t p = 0; p < map.expert_of_slot.size(); ++p)
      if (const int32_t e = map.expert_of_slot[p]; e >= 0)
        owner[static_cast<size_t>(e)] = static_cast<int>(p) / map.slots_per_rank;
    for (size_t i = 0; i < load.of_expert.size(); ++i)
      load.of_rank[static_cast<size_t>(owner[i % experts])] += load.of_expert[i];
    if (selector) load.of_expert = SelectorAccess::impl(*selector).gather_all_routes(kLoad);
    return load;
  });
}
const int64_t* RouteCounter::routes() const { return impl_->routes(); }

}  // namespace switchyard
