// SPDX-License-Identifier: Apache-2.0
// RouteCounter: routes of several calls by expert and by rank, of ids and of slots that a SlotSelector has selected.
//
// Entries: route_counter_threads and route_counter_processes (label multiproc); on GPUs, gpu_route_counter_*.
#include <gtest/gtest.h>

#include <map>
#include <utility>

#include "harness/outcome.hpp"
#include "modes/slots/slot_ranks.hpp"
#include "switchyard/normal.hpp"

namespace harness {
namespace {

using switchyard::ErrorCode;
using switchyard::ExpertIds;
using switchyard::ExpertMap;
using switchyard::Group;
using switchyard::RouteCounter;
using switchyard::RouteLoad;
using switchyard::SlotSelector;

constexpr int kExperts = 11, kTopk = 3;

/// Ids of call `call` of a rank, some of which are not experts. Rank 1 has no tokens in every third call.
std::vector<int64_t> ids_of(int rank, int call) {
  Draw draw(static_cast<uint64_t>(100 * call + rank + 1));
  std::vector<int64_t> ids(static_cast<size_t>(rank == 1 && call % 3 == 0 ? 0 : kTopk * (5 + 7 * rank)));
  for (int64_t& id : ids)
    id = draw.one_in(6) ? -1 : draw.one_in(9) ? kExperts + 3 : draw.one_in(2) ? 4 : draw.between(0, kExperts - 1);
  return ids;
}

/// Counts the ids, or the slots that `selector` selects, on this rank. Returns what was counted.
template <class Id>
std::vector<int64_t> count_call(Group& group, RouteCounter& counter, SlotSelector* selector, int call) {
  RankMemory& memory = rank_memory(group);
  const std::vector<int64_t> wide = ids_of(group.rank(), call);
  std::vector<Id> ids(wide.begin(), wide.end());
  auto* const at = static_cast<Id*>(memory.lend(ids.data(), ids.size() * sizeof(Id)));
  const ExpertIds given = ExpertIds::of(at, static_cast<int64_t>(ids.size()) / kTopk, kTopk);
  if (selector) selector->select(given, at, memory.stream());
  counter.count(given, memory.stream());
  if (!ids.empty()) memory.read(ids.data(), at, ids.size() * sizeof(Id));
  memory.release();
  return {ids.begin(), ids.end()};
}

TEST(RouteCounter, CountsTheRoutesOfAllRanks) {
  for (const int world : {1, 2, 3})
    EXPECT_EQ(on_ranks(world,
                       [&](Group& group, Failures& failures) {
                         RouteCounter counter(group, kExperts);
                         std::map<std::pair<int, int64_t>, int64_t> expected;
                         for (int call = 0; call < 5; ++call) {
                           call % 2 == 0 ? count_call<int32_t>(group, counter, nullptr, call)
                                         : count_call<int64_t>(group, counter, nullptr, call);
                           for (int r = 0; r < world; ++r)
                             for (const int64_t id : ids_of(r, call)) ++expected[{r, id}];
                           if (call % 2 == 1) continue;
                           const RouteLoad load = counter.load();  // does not reset the counters
                           std::vector<int64_t> of_rank(static_cast<size_t>(world)), of_expert;
                           for (int r = 0; r < world; ++r)
                             for (int e = 0, owner = 0; e < kExperts; ++e) {
                               while (e >= switchyard::first_expert(kExperts, world, owner + 1)) ++owner;
                               of_expert.push_back(expected[{r, e}]);
                               of_rank[static_cast<size_t>(owner)] += of_expert.back();
                             }
                           failures.equal_range(of_expert, load.of_expert, "of_expert");
                           failures.equal_range(of_rank, load.of_rank, "of_rank");
                         }
                         std::vector<int64_t> mine(kExperts);
                         rank_memory(group).read(mine.data(), counter.routes(), kExperts * sizeof(int64_t));
                         for (int e = 0; e < kExperts; ++e)
                           failures.equal(expected[{group.rank(), e}], mine[static_cast<size_t>(e)], "counters in memory");
                       }),
              "");
}

/// The exchange's experts are slots: ranks are counted by slot, experts by the selector, whose maps change.
TEST(RouteCounter, CountsSlotsByExpertAndRank) {
  for (const int world : {2, 3})
    EXPECT_EQ(on_ranks(world,
                       [&](Group& group, Failures& failures) {
                         const int slots = (kExperts + world - 1) / world + 2;
                         SlotSelector selector(group, map_with_replicas(kExperts, world, slots, 1));
                         RouteCounter counter(group, world * slots);
                         std::vector<int64_t> of_expert(static_cast<size_t>(world * kExperts)),
                             to_rank(static_cast<size_t>(world));
                         for (int call = 0; call < 6; ++call) {
                           if (call % 2 == 1)
                             selector.set_map(map_with_replicas(kExperts, world, slots, static_cast<uint64_t>(call)), {},
                                              rank_memory(group).stream());
                           for (const int64_t p : count_call<int64_t>(group, counter, &selector, call))
                             if (p >= 0) ++to_rank[static_cast<size_t>(p / slots)];
                           for (int r = 0; r < world; ++r)
                             for (const int64_t id : ids_of(r, call))
                               if (id >= 0 && id < kExperts) ++of_expert[static_cast<size_t>(r * kExperts + id)];
                           if (call == 2) (void)selector.gather_routes();  // resets only the counts of gather_routes()
                         }
                         std::vector<int64_t> all(static_cast<size_t>(world * world)), of_rank(static_cast<size_t>(world));
                         group.all_gather(to_rank.data(), to_rank.size() * sizeof(int64_t), all.data());
                         for (size_t i = 0; i < all.size(); ++i) of_rank[i % of_rank.size()] += all[i];
                         const RouteLoad load = counter.load(&selector);
                         failures.equal_range(of_expert, load.of_expert, "of_expert");
                         failures.equal_range(of_rank, load.of_rank, "of_rank");
                       }),
              "");
}

TEST(RouteCounter, RefusedArguments) {
  EXPECT_EQ(on_ranks(2,
                     [](Group& group, Failures& failures) {
                       const auto refused = [&](const std::function<void()>& call, ErrorCode code, const char* text) {
                         failures.set_context(text);
                         const Outcome o = outcome_of(call);
                         failures.equal(code_name(code), code_name(o.code), "code");
                         failures.check(o.text.find(text) != std::string::npos, "'" + o.text + "' does not contain it");
                       };
                       refused([&] { RouteCounter(group, 0); }, ErrorCode::invalid_argument, "num_experts = 0");
                       refused([&] { RouteCounter(group, 4 + group.rank()); }, ErrorCode::mismatch,
                               "RouteCounter::num_experts = 4 on rank 0 and 5 on rank 1");
                       RouteCounter counter(group, kExperts);
                       refused([&] { counter.count(ExpertIds::of(static_cast<int32_t*>(nullptr), 1, 1)); },
                               ErrorCode::invalid_argument, "topk_ids.data is null");
                       const int32_t id = 0;
                       refused([&] { counter.count(ExpertIds::of(&id, 1, 33)); }, ErrorCode::invalid_argument,
                               "topk_ids.topk = 33");
                       failures.equal(int64_t{0}, counter.load().of_rank[0], "nothing was counted");
                       SlotSelector selector(group, switchyard::home_map(kExperts, 2, kExperts));
                       RouteCounter of_slots(group, 2 * kExperts);
                       refused([&] { (void)of_slots.load(group.rank() == 0 ? &selector : nullptr); }, ErrorCode::mismatch,
                               "selector = given on rank 0 and null on rank 1");
                       refused([&] { (void)counter.load(&selector); }, ErrorCode::invalid_argument, "selector has");
                       SlotSelector small(group, switchyard::home_map(kExperts, 2, 6));
                       refused([&] { (void)of_slots.load(group.rank() == 0 ? &small : &selector); },
                               ErrorCode::invalid_argument, "selector has 12 slots: must be num_experts, 22");
                       SlotSelector other(group, switchyard::home_map(kExperts, 2, kExperts));
                       refused([&] { (void)of_slots.load(group.rank() == 0 ? &other : &selector); }, ErrorCode::mismatch,
                               "the number of the selector = ");
                       failures.set_context("after the errors");
                       failures.equal(int64_t{0}, of_slots.load(&selector).of_rank[0], "nothing was counted");
                     }),
            "");
}

}  // namespace
}  // namespace harness
