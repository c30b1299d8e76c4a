// SPDX-License-Identifier: Apache-2.0
// SlotSelector: the slot of every route, replacement of the map, counts of routes, and maps on which ranks disagree. The
// expected slots are derived here from the division of routes, with arithmetic of their own. move_weights: the bytes of every
// slot.
//
// Entries: slots_threads and slots_processes (label multiproc).
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "harness/outcome.hpp"
#include "harness/suite_hosts.hpp"
#include "modes/slots/slot_ranks.hpp"

namespace harness {
namespace {

using switchyard::ErrorCode;
using switchyard::ExpertIds;
using switchyard::ExpertMap;
using switchyard::Group;
using switchyard::SlotSelector;

constexpr int kTopk = 4;
using Ids = std::vector<int32_t>;

ExpertMap random_map(int experts, int world, int spare, uint64_t seed) {
  return map_with_replicas(experts, world, (experts + world - 1) / world + spare, seed);
}
std::vector<int64_t> random_routes(int experts, int world, uint64_t seed) { return skewed_routes(experts, world, seed, 29); }

/// Random ids with some -1.
Ids random_ids(int64_t tokens, int experts, uint64_t seed) {
  Draw draw(seed);
  Ids ids(static_cast<size_t>(tokens * kTopk));
  for (int32_t& id : ids) id = static_cast<int32_t>(draw.between(-1, experts - 1));
  return ids;
}

/// Slots of one expert with their shares of a rank's routes, in order.
using Shares = std::vector<std::pair<int32_t, int64_t>>;

Shares expected_shares(const ExpertMap& map, const std::vector<int64_t>& routes, int source, int expert) {
  const auto runs = switchyard::divide_source(map, routes, source);
  const auto e = static_cast<size_t>(expert);
  Shares shares;
  for (size_t i = runs.begin[e]; i < runs.begin[e + 1]; ++i) shares.emplace_back(runs.runs[i].slot, runs.runs[i].count);
  return shares;
}

/// The position of a token: the number of its run of 8 plus the rank, as a binary fraction with the lowest bit first.
double position_of(int64_t token, int rank) {
  double position = 0, bit = 0.5;
  for (int64_t run = token / 8 + rank; run > 0; run /= 2, bit /= 2) position += run % 2 != 0 ? bit : 0;
  return position;
}

/// Checks the slots of one call. Positions within 2^-28 of a boundary may fall on either side, because shares are rounded.
void check_slots(const ExpertMap& map, const std::vector<int64_t>& routes, int rank, const Ids& ids, const Ids& slots,
                 Failures& failures) {
  std::vector<Shares> shares;
  for (int e = 0; e < map.num_experts; ++e) shares.push_back(expected_shares(map, routes, rank, e));
  for (size_t i = 0; i < ids.size(); ++i) {
    const std::string name = "slot of route " + std::to_string(i) + ", expert " + std::to_string(ids[i]);
    if (ids[i] < 0) {
      failures.equal(-1, slots[i], name);
      continue;
    }
    if (!failures.check(slots[i] >= 0 && slots[i] < map.num_slots(), name + " is no slot")) continue;
    failures.equal(ids[i], map.expert_of_slot[static_cast<size_t>(slots[i])], name + " holds");
    const Shares& of = shares[static_cast<size_t>(ids[i])];
    if (of.empty()) {  // no routes were expected
      const auto own = map.expert_of_slot.begin() + rank * map.slots_per_rank;
      const bool is_local = std::find(own, own + map.slots_per_rank, ids[i]) != own + map.slots_per_rank;
      failures.check(!is_local || slots[i] / map.slots_per_rank == rank, name + " is remote");
      continue;
    }
    double whole = 0, end = 0;
    for (const auto& [slot, count] : of) whole += static_cast<double>(count);
    const double at = position_of(static_cast<int64_t>(i) / kTopk, rank), slack = 1.0 / (1 << 28);
    bool found = false;
    for (const auto& [slot, count] : of) {
      const double begin = end;
      end += static_cast<double>(count) / whole;
      found |= slot == slots[i] && at >= begin - slack && at < end + slack;
    }
    failures.check(found, name + " is " + std::to_string(slots[i]) + ", at position " + std::to_string(at));
  }
}

/// Runs one call and returns the slots. With `in_place`, the slots overwrite the ids.
Ids select(Group& group, SlotSelector& selector, const Ids& ids, bool in_place = false) {
  RankMemory& memory = rank_memory(group);
  Ids slots(ids.size(), -7);
  Ids work = ids;
  auto* const in =
      static_cast<int32_t*>(in_place ? memory.lend(work.data(), work.size() * 4) : memory.give(ids.data(), ids.size() * 4));
  auto* const out = in_place ? in : static_cast<int32_t*>(memory.lend(slots.data(), slots.size() * 4));
  selector.select(ExpertIds::of(in, static_cast<int64_t>(ids.size()) / kTopk, kTopk), out, memory.stream());
  if (!ids.empty()) memory.read(slots.data(), out, slots.size() * 4);
  memory.release();
  return slots;
}

constexpr int kWorlds[] = {1, 2, 3, 4, 8};

TEST(Slots, AreThoseOfTheDivision) {
  for (const int world : kWorlds)
    EXPECT_EQ(on_ranks(world,
                       [&](Group& group, Failures& failures) {
                         for (uint64_t seed = 1; seed <= 6; ++seed) {
                           const int experts = 5 + static_cast<int>(seed) * 7;
                           failures.set_context("seed " + std::to_string(seed));
                           const ExpertMap map = random_map(experts, world, static_cast<int>(seed % 4), seed);
                           const std::vector<int64_t> routes = random_routes(experts, world, seed);
                           SlotSelector selector(group, map, routes);
                           const int64_t tokens = (group.rank() + static_cast<int>(seed)) % 3 * 500;  // 0 on some ranks
                           const Ids ids = random_ids(tokens, experts, seed * 100 + static_cast<uint64_t>(group.rank()));
                           check_slots(map, routes, group.rank(), ids, select(group, selector, ids, seed % 2 == 0), failures);
                         }
                       }),
              "");
}

/// Any range of tokens is divided in nearly the same proportions: at most one run of 8 tokens more or less per bit.
TEST(Slots, EveryRangeOfTokensIsDividedAlike) {
  EXPECT_EQ(
      on_ranks(2,
               [&](Group& group, Failures& failures) {
                 ExpertMap map{1, 2, 1, {0, 0}};
                 SlotSelector selector(group, map, std::vector<int64_t>{1000, 0});  // 500 routes to each rank's slot
                 const int64_t tokens = 4096;
                 const Ids slots = select(group, selector, Ids(static_cast<size_t>(tokens * kTopk), 0));
                 if (group.rank() == 1) {  // has no routes in the division: its own slot
                   failures.equal(0, std::count(slots.begin(), slots.end(), 0), "routes of rank 1 to rank 0");
                   return;
                 }
                 for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, 4096}, {0, 128}, {1000, 512}, {3001, 77}}) {
                   int64_t remote = 0;
                   for (int64_t t = first; t < first + count; ++t) remote += slots[static_cast<size_t>(t * kTopk)];
                   failures.check(std::abs(2 * remote - count) <= 2 * 8 * 2,
                                  std::to_string(remote) + " of " + std::to_string(count) + " tokens are remote");
                 }
               }),
      "");
}

TEST(Slots, OfWideAndInvalidIds) {
  EXPECT_EQ(on_ranks(2,
                     [&](Group& group, Failures& failures) {
                       const ExpertMap map{3, 2, 2, {0, 1, 2, 0}};
                       SlotSelector selector(group, map);
                       RankMemory& memory = rank_memory(group);
                       const std::vector<int64_t> ids = {2, -1, 3, int64_t{1} << 40, -2, 1};
                       std::vector<int64_t> slots(ids.size());
                       auto* const in = static_cast<int64_t*>(memory.give(ids.data(), ids.size() * 8));
                       auto* const out = static_cast<int64_t*>(memory.lend(slots.data(), slots.size() * 8));
                       selector.select(ExpertIds::of(in, 3, 2), out, memory.stream());
                       memory.read(slots.data(), out, slots.size() * 8);
                       memory.release();
                       const int64_t refused = std::numeric_limits<int32_t>::min() + int64_t{3};
                       failures.equal_range(std::vector<int64_t>{2, -1, refused, int64_t{1} << 40, -2, 1}, slots, "slots");
                       const std::vector<int64_t> routes = selector.gather_routes();
                       failures.equal_range(std::vector<int64_t>{0, 1, 1, 0, 1, 1}, routes, "routes");
                     }),
            "");
}

/// Shares at the limits of the division: one route of 2^39, sums of 2^40, and experts without expected routes.
TEST(Slots, ExtremeShares) {
  EXPECT_EQ(on_ranks(3,
                     [&](Group& group, Failures& failures) {
                       // Rank 0 keeps one of its 2^39 routes to expert 0, because it alone has expert 1. Expert 2 has two slots
                       // and no routes; only ranks 0 and 1 have it. Expert 3: sums of 2^40, half of which rank 2 keeps.
                       const int64_t half = int64_t{1} << 39;
                       const ExpertMap uneven{4, 3, 3, {0, 1, 2, 0, 2, -1, 3, -1, -1}};
                       std::vector<int64_t> routes(12, 0);
                       routes[0] = half;
                       routes[1] = half - 2;
                       const Ids ids = random_ids(2000, 4, 5);
                       SlotSelector selector(group, uneven, routes);
                       const Ids slots = select(group, selector, ids);
                       check_slots(uneven, routes, group.rank(), ids, slots, failures);
                       int64_t without[2] = {0, 0};
                       for (size_t i = 0; i < ids.size(); ++i) {
                         if (group.rank() == 0 && ids[i] == 0) failures.equal(3, slots[i], "slot of a route of 2^39 - 1");
                         if (ids[i] == 2) ++without[slots[i] == 2 ? 0 : 1];
                       }
                       if (group.rank() == 2)
                         failures.check(std::abs(without[0] - without[1]) < without[0] / 4,
                                        "expert 2 without expected routes: " + std::to_string(without[0]) + " and " +
                                            std::to_string(without[1]));
                       const ExpertMap even{4, 3, 3, {3, 0, 1, 2, -1, -1, 3, -1, -1}};
                       std::vector<int64_t> large(12, 0);
                       large[11] = 2 * half;  // of rank 2
                       selector.set_map(even, large);
                       check_slots(even, large, group.rank(), ids, select(group, selector, ids), failures);
                       selector.set_map(even);
                       check_slots(even, std::vector<int64_t>(12, 1 << 20), group.rank(), ids, select(group, selector, ids),
                                   failures);
                     }),
            "");
}

TEST(Slots, FollowTheMap) {
  for (const int world : {1, 2, 4})
    EXPECT_EQ(on_ranks(world,
                       [&](Group& group, Failures& failures) {
                         constexpr int kExperts = 12;
                         ExpertMap map = random_map(kExperts, world, 2, 1);
                         SlotSelector selector(group, map);
                         std::vector<int64_t> expected(static_cast<size_t>(world * kExperts), 0);
                         for (uint64_t step = 1; step <= 9; ++step) {
                           failures.set_context("step " + std::to_string(step));
                           map = random_map(kExperts, world, 2, step);
                           const std::vector<int64_t> routes = random_routes(kExperts, world, step);
                           selector.set_map(map, routes, rank_memory(group).stream());
                           failures.check(selector.map() == map, "the map in force is another");
                           failures.equal(static_cast<int64_t>(step) + 1, selector.version(), "version");
                           for (int rank = 0; rank < world; ++rank) {
                             const Ids ids = random_ids(40, kExperts, step * 10 + static_cast<uint64_t>(rank));
                             for (const int32_t id : ids)
                               if (id >= 0) ++expected[static_cast<size_t>(rank * kExperts + id)];
                             if (rank == group.rank())
                               check_slots(map, routes, rank, ids, select(group, selector, ids), failures);
                           }
                           if (step % 3 != 0) continue;
                           failures.equal_range(expected, selector.gather_routes(), "routes");
                           std::fill(expected.begin(), expected.end(), 0);
                         }
                       }),
              "");
}

/// Maps, routes or numbers of calls that differ by rank: an error on all ranks, and the former map stays.
TEST(Slots, RanksThatDisagree) {
  const ExpertMap first{2, 2, 2, {0, -1, 1, -1}}, second{2, 2, 2, {0, 1, 1, -1}};
  const std::vector<int64_t> routes = {5, 1, 2, 3};
  struct Disagreement {
    const char* name;
    std::function<void(SlotSelector&, int rank)> call;
    ErrorCode code;
    const char* text;
  };
  const Disagreement all[] = {
      {"map", [&](SlotSelector& s, int rank) { s.set_map(rank == 0 ? first : second); }, ErrorCode::mismatch,
       "ExpertMap::expert_of_slot"},
      {"routes", [&](SlotSelector& s, int rank) { s.set_map(second, rank == 0 ? routes : std::vector<int64_t>()); },
       ErrorCode::mismatch, "routes"},
      {"invalid on one rank",
       [&](SlotSelector& s, int rank) {
         s.set_map(rank == 0 ? second : ExpertMap{2, 2, 2, {0, 0, 0, 0}});
       },
       ErrorCode::invalid_argument, "no slot of expert 1"},
      {"other sizes",
       [&](SlotSelector& s, int) {
         s.set_map({2, 2, 1, {0, 1}});
       },
       ErrorCode::invalid_argument, "slots_per_rank = 1"},
      {"negative routes",
       [&](SlotSelector& s, int) {
         s.set_map(second, std::vector<int64_t>{1, 1, 1, -1});
       },
       ErrorCode::invalid_argument, "routes"},
  };
  EXPECT_EQ(on_ranks(2,
                     [&](Group& group, Failures& failures) {
                       SlotSelector selector(group, first);
                       for (const Disagreement& d : all) {
                         failures.set_context(d.name);
                         const Outcome o = outcome_of([&] { d.call(selector, group.rank()); });
                         failures.equal(code_name(d.code), code_name(o.code), "code");
                         failures.check(o.text.find(d.text) != std::string::npos,
                                        "'" + o.text + "' does not contain " + d.text);
                         failures.check(selector.map() == first && selector.version() == 1, "the former map is not in force");
                         failures.equal_range(Ids{0, 2, -1, -1}, select(group, selector, {0, 1, -1, -1}), "slots");
                       }
                     }),
            "");
}

/// A call of one rank too many fails the next map on all ranks, and only that one.
TEST(Slots, NumbersOfCallsThatDiffer) {
  const ExpertMap first{2, 2, 2, {0, -1, 1, -1}}, second{2, 2, 2, {0, 1, 1, -1}};
  EXPECT_EQ(on_ranks(2,
                     [&](Group& group, Failures& failures) {
                       SlotSelector selector(group, first);
                       for (int call = 0; call < 5; ++call) select(group, selector, {0, 1, -1, -1});
                       if (group.rank() == 1) select(group, selector, {});
                       const auto refused = [&](SlotSelector& s, const char* text) {
                         failures.set_context(text);
                         const Outcome o = outcome_of([&] { s.set_map(second); });
                         failures.equal(code_name(ErrorCode::mismatch), code_name(o.code), "code");
                         failures.check(o.text.find(text) != std::string::npos, o.text);
                       };
                       refused(selector, "the number of select calls = 5 on rank 0 and 6 on rank 1");
                       failures.check(selector.map() == first && selector.version() == 1, "the former map is not in force");
                       selector.set_map(second);
                       failures.check(selector.map() == second && selector.version() == 2, "the map is not in force");
                       SlotSelector another(group, first);
                       if (group.rank() == 1) select(group, another, {});
                       refused(group.rank() == 0 ? selector : another, "the number of the selector");
                       selector.set_map(first);
                       refused(another, "the number of select calls = 0 on rank 0 and 1 on rank 1");
                     }),
            "");
}

TEST(Slots, RefusedConstructions) {
  EXPECT_EQ(
      on_ranks(
          2,
          [&](Group& group, Failures& failures) {
            const auto refused = [&](const ExpertMap& map, std::vector<int64_t> routes, ErrorCode code, const char* text) {
              const Outcome o = outcome_of([&] { SlotSelector(group, map, routes); });
              failures.equal(code_name(code), code_name(o.code), text);
              failures.check(o.text.find(text) != std::string::npos, "'" + o.text + "' does not contain " + text);
            };
            refused({2, 1, 2, {0, 1}}, {}, ErrorCode::invalid_argument, "ExpertMap::world = 1: must be 2");
            refused({2, 2, 1, {0, 2}}, {}, ErrorCode::invalid_argument, "expert_of_slot[1] is 2");
            refused({2, 2, 1, {0, 1}}, {1, 2, 3}, ErrorCode::invalid_argument, "routes");
            refused({2, 2, 1, group.rank() == 0 ? Ids{0, 1} : Ids{1, 0}}, {}, ErrorCode::mismatch, "ExpertMap::expert_of_slot");
            SlotSelector usable(group, {2, 2, 1, {0, 1}});
            const Ids ids(kTopk, 0);
            const Outcome o = outcome_of([&] { usable.select(ExpertIds::of(ids.data(), 1, 0), nullptr); });
            failures.equal(code_name(ErrorCode::invalid_argument), code_name(cause_of(o)), "topk = 0");  // on the faster rank
            if (o.code != ErrorCode::peer_failed) failures.check(o.text.find("topk_ids.topk = 0") != std::string::npos, o.text);
          }),
      "");
}

// --- move_weights

/// Byte `i` of expert `e` in array `a`; `e` may also be a number for the initial content of an empty slot.
uint8_t weight_byte(int a, int e, size_t i) {
  return static_cast<uint8_t>(static_cast<size_t>(e) * 31 + static_cast<size_t>(a) * 7 + i * (i % 251 + 1) % 257);
}
constexpr size_t kSlotBytes[] = {1, 0, 300, 70'001};

/// This rank's arrays, in host memory.
struct Weights {
  std::vector<std::vector<uint8_t>> arrays;

  /// The bytes of expert `expert_of[p]` in each slot p of the rank.
  Weights(const std::vector<int>& expert_of) {
    for (size_t a = 0; a < std::size(kSlotBytes); ++a) {
      arrays.emplace_back();
      for (const int e : expert_of)
        for (size_t i = 0; i < kSlotBytes[a]; ++i) arrays[a].push_back(weight_byte(static_cast<int>(a), e, i));
    }
  }
  /// Runs move_weights on copies in the rank's memory and reads them back.
  int64_t move(Group& group, const ExpertMap& from, const ExpertMap& to, size_t staging_bytes) {
    RankMemory& memory = rank_memory(group);
    std::vector<switchyard::SlotArray> given;
    for (size_t a = 0; a < arrays.size(); ++a)
      given.push_back({arrays[a].empty() ? nullptr : memory.lend(arrays[a].data(), arrays[a].size()), kSlotBytes[a]});
    const int64_t received = switchyard::move_weights(group, from, to, given, {staging_bytes, memory.stream()});
    for (size_t a = 0; a < arrays.size(); ++a)
      if (!arrays[a].empty()) memory.read(arrays[a].data(), given[a].data, arrays[a].size());
    memory.release();
    return received;
  }
};

/// The experts of this rank's slots; an empty slot has a number that is no expert.
std::vector<int> experts_of(const ExpertMap& map, int rank) {
  std::vector<int> experts;
  for (int p = rank * map.slots_per_rank; p < (rank + 1) * map.slots_per_rank; ++p)
    experts.push_back(map.expert_of_slot[static_cast<size_t>(p)] >= 0 ? map.expert_of_slot[static_cast<size_t>(p)] : 1000 + p);
  return experts;
}

/// A random permutation of experts over the slots, so that slots exchange their experts in chains and cycles; spare slots have
/// random experts or none.
ExpertMap shuffled_map(int experts, int world, int slots_per_rank, uint64_t seed) {
  Draw draw(seed);
  ExpertMap map = switchyard::home_map(experts, world, slots_per_rank);
  std::vector<int32_t>& slots = map.expert_of_slot;
  std::iota(slots.begin(), slots.end(), 0);
  for (int32_t& e : slots)
    if (e >= experts) e = static_cast<int32_t>(draw.between(-1, experts - 1));
  for (size_t i = slots.size(); i > 1; --i)
    std::swap(slots[i - 1], slots[static_cast<size_t>(draw.between(0, static_cast<int64_t>(i) - 1))]);
  return map;
}

TEST(MoveWeights, EverySlotHasItsExpert) {
  for (const int world : {1, 2, 3, 5})
    EXPECT_EQ(on_ranks(world,
                       [&](Group& group, Failures& failures) {
                         constexpr int kExperts = 7, kPerRank = 9;
                         ExpertMap from = switchyard::home_map(kExperts, world, kPerRank);
                         std::vector<int> held = experts_of(from, group.rank());
                         Weights weights(held);
                         for (uint64_t step = 1; step <= 6; ++step) {
                           failures.set_context("step " + std::to_string(step));
                           const ExpertMap to =
                               shuffled_map(kExperts, world, kPerRank, step + 100 * static_cast<uint64_t>(world));
                           const size_t small = (spans_hosts(world) ? 1024 : 512) * static_cast<size_t>(kPerRank) * step;
                           const size_t staging = step % 2 == 0 ? size_t{1} << 20 : small;
                           const int64_t received = weights.move(group, from, to, staging);
                           const int first = group.rank() * kPerRank;
                           int64_t expected = 0;
                           for (int p = first; p < first + kPerRank; ++p) {
                             const int32_t e = to.expert_of_slot[static_cast<size_t>(p)];
                             if (e < 0 || e == from.expert_of_slot[static_cast<size_t>(p)]) continue;
                             const auto mine = from.expert_of_slot.begin() + first;
                             if (std::find(mine, mine + kPerRank, e) == mine + kPerRank)
                               expected += std::accumulate(std::begin(kSlotBytes), std::end(kSlotBytes), int64_t{0});
                             held[static_cast<size_t>(p - first)] = e;
                           }
                           failures.equal(expected, received, "received bytes");
                           const Weights wanted(held);
                           for (size_t a = 0; a < weights.arrays.size(); ++a)
                             failures.equal_range(wanted.arrays[a], weights.arrays[a], "array " + std::to_string(a));
                           from = to;  // an emptied slot keeps its bytes
                           failures.equal(size_t{0}, group.heap_used(), "heap_used");
                         }
                       }),
              "");
}

TEST(MoveWeights, RefusedArguments) {
  const ExpertMap home{2, 2, 2, {0, -1, 1, -1}}, both{2, 2, 2, {0, 1, 1, 0}};
  EXPECT_EQ(on_ranks(
                2,
                [&](Group& group, Failures& failures) {
                  const auto refused = [&](const std::function<void()>& call, ErrorCode code, const char* text) {
                    failures.set_context(text);
                    const Outcome o = outcome_of(call);
                    failures.equal(code_name(code), code_name(o.code), "code");
                    failures.check(o.text.find(text) != std::string::npos, "'" + o.text + "' does not contain it");
                  };
                  Weights weights(experts_of(home, group.rank()));
                  const auto move = [&](const ExpertMap& to, size_t staging) { weights.move(group, home, to, staging); };
                  refused([&] { move({2, 2, 1, {0, 1}}, 4096); }, ErrorCode::invalid_argument, "different numbers");
                  refused([&] { move({2, 2, 2, {0, 0, 0, 0}}, 4096); }, ErrorCode::invalid_argument, "no slot of expert 1");
                  // One range in each half of the staging memory and, between hosts, one to send and one to receive.
                  const size_t least = spans_hosts(2) ? 1024 : 512;
                  refused([&] { move(both, least - 1); }, ErrorCode::invalid_argument,
                          spans_hosts(2) ? "MoveOptions::staging_bytes = 1023: must be at least 1024"
                                         : "MoveOptions::staging_bytes = 511: must be at least 512");
                  std::byte* const large = static_cast<std::byte*>(rank_memory(group).keep(size_t{8} << 20));
                  const auto move_arrays = [&](const ExpertMap& before, std::vector<size_t> slot_bytes, size_t staging) {
                    std::vector<switchyard::SlotArray> arrays;
                    for (const size_t bytes : slot_bytes) arrays.push_back({large, bytes});
                    switchyard::move_weights(group, before, both, arrays, {staging, rank_memory(group).stream()});
                  };
                  const bool first = group.rank() == 0;
                  refused([&] { move_arrays(home, {size_t{4} << 20}, size_t{1} << 30); }, ErrorCode::heap_exhausted,
                          "MoveOptions::staging_bytes");
                  refused(
                      [&] {
                        move_arrays(home, first ? std::vector<size_t>{8} : std::vector<size_t>{8, 8}, 4096);
                      },
                      ErrorCode::mismatch, "the number of arrays = 1 on rank 0 and 2");
                  refused([&] { move_arrays(home, {SIZE_MAX}, 4096); }, ErrorCode::invalid_argument,
                          "arrays[0].slot_bytes = 18446744073709551615: must be at most 9223372036854775807");
                  refused([&] { move_arrays(home, {first ? size_t{8} : size_t{16}}, 4096); }, ErrorCode::mismatch,
                          "hash of slot_bytes");
                  refused(
                      [&] {
                        move_arrays(first ? home : ExpertMap{2, 2, 2, {0, -1, -1, 1}}, {8}, 4096);
                      },
                      ErrorCode::mismatch, "hash of from and to");
                  refused([&] { move(group.rank() == 0 ? both : home, 4096); }, ErrorCode::mismatch, "hash of from and to");
                  refused([&] { move(both, group.rank() == 0 ? 4096 : 8192); }, ErrorCode::mismatch,
                          "MoveOptions::staging_bytes");
                  failures.set_context("after the errors");
                  weights.move(group, home, both, 4096);
                  const Weights wanted(experts_of(both, group.rank()));
                  for (size_t a = 0; a < weights.arrays.size(); ++a)
                    failures.equal_range(wanted.arrays[a], weights.arrays[a], "array");
                },
                size_t{1} << 20),
            "");
}

}  // namespace
}  // namespace harness
