// SPDX-License-Identifier: Apache-2.0
// SlotSelector::balance: slots, rows of each rank, weights and maps of several calls, and calls on which ranks disagree.
//
// Entries: balance_threads and balance_processes (label multiproc).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "harness/outcome.hpp"
#include "harness/suite_hosts.hpp"
#include "modes/slots/slot_ranks.hpp"

namespace harness {
namespace {

using switchyard::BalanceOptions;
using switchyard::BalanceReport;
using switchyard::ErrorCode;
using switchyard::ExpertIds;
using switchyard::ExpertMap;
using switchyard::Group;
using switchyard::SlotArray;
using switchyard::SlotSelector;
using switchyard::StepOptions;

constexpr int kTopk = 3;
constexpr size_t kSlotBytes[] = {40, 5000};

BalanceOptions options_of(Group& group, int64_t tile = 1) {
  BalanceOptions options;
  options.plan.tile = tile;
  options.plan.seconds_per_move = 0;
  options.plan.link_bytes_per_s = 1e15;
  options.move.staging_bytes = size_t{1} << 20;
  options.move.stream = rank_memory(group).stream();
  return options;
}

uint8_t weight_byte(size_t array, int e, size_t i) {
  return static_cast<uint8_t>(static_cast<size_t>(e) * 37 + array * 11 + i * (i % 7 + 1));
}

/// A rank's weights, in the memory of its backend: those of the home map's experts.
struct Weights {
  Weights(Group& group, const ExpertMap& home) : memory(rank_memory(group)), rank(group.rank()) {
    size_t bytes = 0;
    for (const size_t each : kSlotBytes) bytes += each * static_cast<size_t>(home.slots_per_rank);
    auto* at = static_cast<std::byte*>(memory.keep(bytes));
    for (size_t a = 0; a < std::size(kSlotBytes); ++a) {
      arrays.push_back({at, kSlotBytes[a]});
      const std::vector<uint8_t> content = expected(home, a, std::vector<uint8_t>());
      memory.write(at, content.data(), content.size());
      at += content.size();
    }
  }
  /// Array `a` with the weights of the map's experts and `before` in empty slots.
  std::vector<uint8_t> expected(const ExpertMap& map, size_t a, std::vector<uint8_t> before) const {
    before.resize(kSlotBytes[a] * static_cast<size_t>(map.slots_per_rank), 0xee);
    for (int s = 0; s < map.slots_per_rank; ++s)
      if (const int e = map.expert_of_slot[static_cast<size_t>(rank * map.slots_per_rank + s)]; e >= 0)
        for (size_t i = 0; i < kSlotBytes[a]; ++i) before[static_cast<size_t>(s) * kSlotBytes[a] + i] = weight_byte(a, e, i);
    return before;
  }
  void check(const ExpertMap& map, Failures& failures) const {
    for (size_t a = 0; a < arrays.size(); ++a) {
      std::vector<uint8_t> found(kSlotBytes[a] * static_cast<size_t>(map.slots_per_rank));
      memory.read(found.data(), arrays[a].data, found.size());
      failures.equal_range(expected(map, a, found), found, "array " + std::to_string(a));
    }
  }

  RankMemory& memory;
  int rank;
  std::vector<SlotArray> arrays;
};

template <class Id>
std::vector<Id> balance(Group& group, SlotSelector& selector, const std::vector<Id>& ids, const Weights& weights,
                        const BalanceOptions& options, BalanceReport& report, bool in_place = false) {
  RankMemory& memory = rank_memory(group);
  std::vector<Id> slots = ids;
  const size_t bytes = ids.size() * sizeof(Id);
  auto* const out = static_cast<Id*>(memory.lend(slots.data(), bytes));
  const auto* const in = in_place ? out : static_cast<Id*>(memory.give(ids.data(), bytes));
  report =
      selector.balance(group, ExpertIds::of(in, static_cast<int64_t>(ids.size()) / kTopk, kTopk), out, weights.arrays, options);
  if (!ids.empty()) memory.read(slots.data(), out, bytes);
  memory.release();
  return slots;
}

/// Skewed ids with some -1; popular experts differ by step.
template <class Id>
std::vector<Id> ids_of(int rank, uint64_t step, int experts) {
  Draw draw(step * 100 + static_cast<uint64_t>(rank));
  const int64_t tokens = rank == static_cast<int>(step % 3) ? 0 : 40 + 30 * rank;
  std::vector<Id> ids(static_cast<size_t>(tokens * kTopk));
  for (Id& id : ids) {
    const int64_t popular = (static_cast<int64_t>(step) * 5 + draw.between(0, 1)) % experts;
    id = static_cast<Id>(draw.one_in(9) ? -1 : draw.one_in(3) ? draw.between(0, experts - 1) : popular);
  }
  return ids;
}

/// [W, E]
std::vector<int64_t> routes_of(int world, uint64_t step, int experts) {
  std::vector<int64_t> routes(static_cast<size_t>(world * experts), 0);
  for (int r = 0; r < world; ++r)
    for (const int64_t id : ids_of<int64_t>(r, step, experts))
      if (id >= 0) ++routes[static_cast<size_t>(r * experts) + static_cast<size_t>(id)];
  return routes;
}

/// Calls `step` of several calls on one selector.
template <class Id>
void check_call(Group& group, SlotSelector& selector, const Weights& weights, uint64_t step, bool levels, Failures& failures) {
  const ExpertMap before = selector.map();
  const int world = group.size(), experts = before.num_experts;
  const std::vector<Id> ids = ids_of<Id>(group.rank(), step, experts);
  BalanceReport report;
  const std::vector<Id> slots = balance(group, selector, ids, weights, options_of(group), report, step % 2 == 0);
  const ExpertMap& map = selector.map();

  std::vector<int64_t> rows(static_cast<size_t>(map.num_slots()), 0), all(rows.size() * static_cast<size_t>(world));
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0) {
      failures.equal(-1, slots[i], "slot of a dropped route");
    } else if (failures.check(slots[i] >= 0 && slots[i] < map.num_slots(), "no slot")) {
      failures.equal(ids[i], map.expert_of_slot[static_cast<size_t>(slots[i])], "expert of a slot");
      ++rows[static_cast<size_t>(slots[i])];
    }
  }
  group.all_gather(rows.data(), rows.size() * sizeof rows[0], all.data());
  std::vector<int64_t> of_rank(static_cast<size_t>(world), 0);
  for (size_t i = 0; i < all.size(); ++i) of_rank[i % rows.size() / static_cast<size_t>(map.slots_per_rank)] += all[i];

  const std::vector<int64_t> routes = routes_of(world, step, experts);
  std::vector<int64_t> sums(static_cast<size_t>(experts), 0);
  for (size_t i = 0; i < routes.size(); ++i) sums[i % sums.size()] += routes[i];
  const int64_t total = std::accumulate(sums.begin(), sums.end(), int64_t{0});
  failures.equal((total + world - 1) / world, report.mean, "mean");
  failures.equal(switchyard::divide_routes(before, sums).max(), report.max_before, "max_before");
  failures.equal(switchyard::divide_routes(map, sums).max(), report.max_after, "max_after");
  failures.equal(*std::max_element(of_rank.begin(), of_rank.end()), report.max_after, "rows of the busiest rank");
  failures.equal(switchyard::count_moved(before, map), report.fetched, "fetched");
  const ExpertMap home = switchyard::home_map(experts, world, map.slots_per_rank);
  for (size_t p = 0; p < home.expert_of_slot.size(); ++p)
    failures.check(home.expert_of_slot[p] < 0 || map.expert_of_slot[p] == home.expert_of_slot[p], "a home slot has changed");
  if (levels) failures.check(report.max_after <= report.mean + 1, "the ranks are not level");
  weights.check(map, failures);
}

TEST(Balance, RowsAndWeightsAreThoseOfThePlan) {
  for (const int world : {1, 2, 3, 4})
    EXPECT_EQ(on_ranks(world,
                       [&](Group& group, Failures& failures) {
                         const int experts = 13, home = (experts + world - 1) / world;
                         const int bound = switchyard::spare_slots_to_level(experts, world);
                         for (const int spare : {0, 1, bound}) {
                           const ExpertMap first = switchyard::home_map(experts, world, home + spare);
                           const Weights weights(group, first);
                           SlotSelector selector(group, first);
                           std::vector<int64_t> counted(static_cast<size_t>(world * experts), 0);
                           for (uint64_t step = 1; step <= 5; ++step) {
                             failures.set_context(std::to_string(spare) + " spare slots, call " + std::to_string(step));
                             if (step % 2 == 0)
                               check_call<int32_t>(group, selector, weights, step, spare == bound, failures);
                             else
                               check_call<int64_t>(group, selector, weights, step, spare == bound, failures);
                             const std::vector<int64_t> routes = routes_of(world, step, experts);
                             for (size_t i = 0; i < routes.size(); ++i) counted[i] += routes[i];
                           }
                           failures.check(spare == 0 || world == 1 || selector.version() > 3, "the map has hardly changed");
                           failures.equal_range(counted, selector.gather_routes(), "counted routes");
                         }
                       }),
              "");
}

/// The same routes again move nothing, and later calls of select() use the map.
TEST(Balance, WeightsStay) {
  EXPECT_EQ(on_ranks(3,
                     [](Group& group, Failures& failures) {
                       const int experts = 9;
                       const ExpertMap home = switchyard::home_map(experts, 3, 6);
                       const Weights weights(group, home);
                       SlotSelector selector(group, home);
                       BalanceReport first, second;
                       const auto ids = ids_of<int32_t>(group.rank(), 7, experts);
                       const auto slots = balance(group, selector, ids, weights, options_of(group), first);
                       failures.check(first.fetched > 0 && first.max_after < first.max_before, "nothing is balanced");
                       failures.equal_range(slots, balance(group, selector, ids, weights, options_of(group), second), "slots");
                       failures.equal(0, second.fetched, "fetched again");
                       failures.equal(0, second.received_bytes, "bytes of the second call");
                       failures.equal(first.max_after, second.max_before, "rows with the map of the first call");
                       failures.equal(int64_t{2}, selector.version(), "version");

                       // Fetches that cost more than they save.
                       BalanceOptions slow = options_of(group);
                       slow.plan.link_bytes_per_s = 1;
                       BalanceReport third;
                       const auto others = ids_of<int32_t>(group.rank(), 8, experts);
                       balance(group, selector, others, weights, slow, third);
                       failures.equal(0, third.fetched, "fetches that do not pay");
                       failures.equal(third.max_before, third.max_after, "rows without fetches");
                       failures.equal(int64_t{2}, selector.version(), "version");
                     }),
            "");
}

TEST(Balance, InvalidIds) {
  EXPECT_EQ(on_ranks(2,
                     [](Group& group, Failures& failures) {
                       const ExpertMap home = switchyard::home_map(3, 2, 3);
                       const Weights weights(group, home);
                       SlotSelector selector(group, home);
                       BalanceReport report;
                       const std::vector<int64_t> ids{2, -1, 3, int64_t{1} << 40, -2, 1};
                       const auto slots = balance(group, selector, ids, weights, options_of(group, 128), report);
                       const int64_t refused = std::numeric_limits<int32_t>::min() + int64_t{3};
                       failures.equal_range(std::vector<int64_t>{3, -1, refused, int64_t{1} << 40, -2, 1}, slots, "slots");
                       failures.equal(int64_t{2}, report.max_after, "rows");
                       failures.equal_range(std::vector<int64_t>{0, 1, 1, 0, 1, 1}, selector.gather_routes(), "routes");
                     }),
            "");
}

struct Mistake {
  const char* text;
  ErrorCode code;
  std::function<void(BalanceOptions&, std::vector<SlotArray>&)> make;  ///< on rank 1
};
const Mistake kMistakes[] = {
    {"StepOptions::tile = 1 on rank 0 and 2", ErrorCode::mismatch, [](auto& o, auto&) { o.plan.tile = 2; }},
    {"StepOptions::link_bytes_per_s", ErrorCode::mismatch, [](auto& o, auto&) { o.plan.link_bytes_per_s = 5e9; }},
    {"StepOptions::seconds_per_row", ErrorCode::mismatch, [](auto& o, auto&) { o.plan.seconds_per_row = 1; }},
    {"StepOptions::seconds_per_move", ErrorCode::mismatch, [](auto& o, auto&) { o.plan.seconds_per_move = 2; }},
    {"MoveOptions::staging_bytes", ErrorCode::mismatch, [](auto& o, auto&) { o.move.staging_bytes = 4096; }},
    {"the number of arrays = 2 on rank 0 and 1", ErrorCode::mismatch, [](auto&, auto& a) { a.pop_back(); }},
    {"slot_bytes", ErrorCode::mismatch, [](auto&, auto& a) { a[0].slot_bytes = 39; }},
    {"StepOptions::tile = 0", ErrorCode::invalid_argument, [](auto& o, auto&) { o.plan.tile = 0; }},
    {"StepOptions::seconds_per_row = -1", ErrorCode::invalid_argument, [](auto& o, auto&) { o.plan.seconds_per_row = -1; }},
    {"arrays[1].data", ErrorCode::invalid_argument, [](auto&, auto& a) { a[1].data = nullptr; }},
};

/// Arguments that differ by rank or are invalid on one rank cause an error on all ranks and change nothing.
TEST(Balance, RanksThatDisagree) {
  EXPECT_EQ(on_ranks(2,
                     [&](Group& group, Failures& failures) {
                       const ExpertMap home = switchyard::home_map(8, 2, 6);
                       const Weights weights(group, home);
                       SlotSelector selector(group, home);
                       const std::vector<int32_t> ids(30 * kTopk, 1);
                       const auto expect = [&](const Outcome& o, ErrorCode code, const char* text) {
                         failures.set_context(text);
                         failures.equal(code_name(code), code_name(o.code), "code");
                         failures.check(o.text.find(text) != std::string::npos, "'" + o.text + "' does not contain it");
                         failures.check(selector.map() == home && selector.version() == 1, "the map has changed");
                         weights.check(home, failures);
                       };
                       BalanceReport report;
                       for (const Mistake& m : kMistakes) {
                         BalanceOptions options = options_of(group);
                         Weights given = weights;
                         if (group.rank() == 1) m.make(options, given.arrays);
                         for (const auto& routes : {ids, std::vector<int32_t>()})  // weights would move, or not
                           expect(outcome_of([&] { balance(group, selector, routes, given, options, report); }), m.code,
                                  m.text);
                       }
                       BalanceOptions small = options_of(group);
                       small.move.staging_bytes = 1;
                       expect(outcome_of([&] { balance(group, selector, ids, weights, small, report); }),
                              ErrorCode::invalid_argument, "MoveOptions::staging_bytes = 1");
                       expect(outcome_of([&] {
                                const ExpertIds narrow = ExpertIds::of(ids.data(), group.rank() == 1 ? -1 : 0, kTopk);
                                selector.balance(group, narrow, nullptr, weights.arrays, options_of(group));
                              }),
                              ErrorCode::invalid_argument, "topk_ids.num_tokens = -1");
                       if (kBackend == switchyard::Backend::cpu && !spans_hosts(2)) {
                         Group other = std::move(Group::in_process(1, fleet_of(1, {}, kSlotHeap).options).front());
                         expect(outcome_of([&] {
                                  selector.balance(other, ExpertIds::of(ids.data(), 0, kTopk), nullptr, {}, options_of(group));
                                }),
                                ErrorCode::invalid_argument, "group is not the group of the selector");
                       }
                       failures.set_context("after the errors");
                       balance(group, selector, ids, weights, options_of(group), report);
                       failures.equal(int64_t{30 * kTopk}, report.max_after, "rows");
                       weights.check(selector.map(), failures);
                       if (group.rank() == 1) selector.select(ExpertIds::of(ids.data(), 0, kTopk), nullptr);
                       const Outcome o = outcome_of([&] { balance(group, selector, ids, weights, options_of(group), report); });
                       failures.equal(code_name(ErrorCode::mismatch), code_name(o.code), "other numbers of calls");
                       failures.set_context("after other numbers of calls");
                       balance(group, selector, ids, weights, options_of(group), report);
                       selector.set_map(home);
                     }),
            "");
}

/// A rank leaves instead of calling: the others report it, and the map stays in force.
TEST(Balance, ARankThatLeaves) {
  EXPECT_EQ(on_ranks(3,
                     [](Group& group, Failures& failures) {
                       const ExpertMap home = switchyard::home_map(6, 3, 4);
                       const Weights weights(group, home);
                       SlotSelector selector(group, home);
                       if (group.rank() == 2) {
                         group.leave();
                         return;
                       }
                       BalanceReport report;
                       const std::vector<int32_t> ids(30 * kTopk, 1);
                       const Outcome o = outcome_of([&] { balance(group, selector, ids, weights, options_of(group), report); });
                       failures.equal(code_name(ErrorCode::peer_failed), code_name(o.code), o.text);
                       failures.check(selector.map() == home && selector.version() == 1, "the map has changed");
                       weights.check(home, failures);
                     }),
            "");
}

#if !defined(SWITCHYARD_TEST_CUDA)
/// A rank terminates during the copies: its second array is not writable. The other ranks report it, and keep the map and the
/// weights of their own experts.
TEST(Balance, ARankThatDiesWhileWeightsMove) {
  if (ranks_of_suite() != Ranks::processes || spans_hosts(3)) GTEST_SKIP() << "needs processes of one host";
  const auto failures = run_processes(
      fleet_of(3, {}, kSlotHeap),
      [](Group& group, Failures& f) {
        const ExpertMap home = switchyard::home_map(6, 3, 4);
        Weights weights(group, home);
        SlotSelector selector(group, home);
        if (group.rank() == 1) weights.arrays[1].data = deadly_memory(4 * kSlotBytes[1]);
        BalanceReport report;
        const std::vector<int32_t> ids(30 * kTopk, 1);  // rank 0 sends expert 1 to both others
        const Outcome o = outcome_of([&] { balance(group, selector, ids, weights, options_of(group), report); });
        f.equal(code_name(ErrorCode::peer_failed), code_name(o.code), o.text);
        f.equal(1, o.failed_rank, "the rank that died");
        f.check(selector.map() == home && selector.version() == 1, "the map has changed");
        weights.check(home, f);
        if (group.rank() != 2) return;
        // The first array has arrived.
        std::vector<uint8_t> found(4 * kSlotBytes[0]), expected(kSlotBytes[0]);
        weights.memory.read(found.data(), weights.arrays[0].data, found.size());
        for (size_t i = 0; i < expected.size(); ++i) expected[i] = weight_byte(0, 1, i);
        f.check(std::search(found.begin(), found.end(), expected.begin(), expected.end()) != found.end(),
                "rank 1 died before the copies");
      },
      1u << 1);
  EXPECT_EQ(joined(failures), "");
}
#endif

// --- Rates

/// Ranks that have measured different rates plan alike with those of the slowest rank.
TEST(StepRates, RanksAgreeOnTheSlowest) {
  EXPECT_EQ(on_ranks(3,
                     [](Group& group, Failures& failures) {
                       StepOptions mine;
                       mine.tile = 1;
                       mine.link_bytes_per_s = 1e9 * (3 - group.rank());
                       mine.seconds_per_row = 1e-6 * (group.rank() == 1 ? 5 : 1);
                       mine.seconds_per_move = 1e-9 * (group.rank() + 1);
                       const ExpertMap home = switchyard::home_map(6, 3, 4);
                       BalanceOptions options = options_of(group);
                       options.plan = mine;
                       {
                         Weights weights(group, home);
                         SlotSelector selector(group, home);
                         BalanceReport report;
                         const Outcome o = outcome_of(
                             [&] { balance(group, selector, ids_of<int32_t>(group.rank(), 1, 6), weights, options, report); });
                         failures.equal(code_name(ErrorCode::mismatch), code_name(o.code), "rates that differ: " + o.text);
                       }
                       options.plan = switchyard::agree_on_step_rates(group, mine);
                       failures.equal(1e9, options.plan.link_bytes_per_s, "link_bytes_per_s");
                       failures.equal(1e-6 * 5, options.plan.seconds_per_row, "seconds_per_row");
                       failures.equal(1e-9 * 3, options.plan.seconds_per_move, "seconds_per_move");
                       Weights weights(group, home);
                       SlotSelector selector(group, home);
                       for (uint64_t step = 1; step <= 3; ++step) {
                         BalanceReport report;
                         balance(group, selector, ids_of<int32_t>(group.rank(), step, 6), weights, options, report);
                         std::vector<int64_t> fetched(3);
                         group.all_gather(&report.fetched, sizeof report.fetched, fetched.data());
                         failures.equal_range(std::vector<int64_t>(3, report.fetched), fetched, "weights fetched");
                         if (step == 1) failures.check(report.fetched > 0, "nothing was fetched");
                       }
                       StepOptions tiles;
                       tiles.tile = 1 + group.rank();
                       const Outcome o = outcome_of([&] { switchyard::agree_on_step_rates(group, tiles); });
                       failures.equal(code_name(ErrorCode::mismatch), code_name(o.code), o.text);
                       if (group.rank() == 2) mine.seconds_per_row = -1;
                       const Outcome wrong = outcome_of([&] { switchyard::agree_on_step_rates(group, mine); });
                       failures.equal(code_name(ErrorCode::invalid_argument), code_name(wrong.code), wrong.text);
                     }),
            "");
}

TEST(StepRates, MeasuredRatesAreEqualOnAllRanks) {
  for (const int world : {1, 2, 3})
    EXPECT_EQ(on_ranks(world,
                       [&](Group& group, Failures& failures) {
                         StepOptions mine;
                         mine.tile = 7;
                         mine.seconds_per_row = 1e-6 * (1 + group.rank());
                         const size_t used = group.heap_used();
                         const StepOptions rates = switchyard::measure_step_rates(group, mine, options_of(group).move);
                         failures.equal(int64_t{7}, rates.tile, "tile");
                         failures.equal(1e-6 * world, rates.seconds_per_row, "seconds_per_row");
                         const double found[] = {rates.link_bytes_per_s, rates.seconds_per_move};
                         for (const double each : found)
                           failures.check(std::isfinite(each) && each > 0, "a rate is not positive");
                         if (world == 1) failures.equal(StepOptions().link_bytes_per_s, found[0], "measured on one rank");
                         if (world > 1)
                           failures.check(
                               found[0] != StepOptions().link_bytes_per_s && found[1] != StepOptions().seconds_per_move,
                               "nothing was measured");
                         std::vector<double> all(2 * static_cast<size_t>(world));
                         group.all_gather(found, sizeof found, all.data());
                         for (size_t i = 0; i < all.size(); ++i)
                           failures.equal(found[i % 2], all[i], "of rank " + std::to_string(i / 2));
                         failures.equal(used, group.heap_used(), "heap_used");
                       }),
              "");
}

}  // namespace
}  // namespace harness
