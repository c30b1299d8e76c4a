// SPDX-License-Identifier: Apache-2.0
// SlotWeights: the bytes of every slot after moves in the background, maps that they refuse, and SlotSelector::balance with
// them.
//
// Entries: background_threads and background_processes (label multiproc); on GPUs, gpu_background_*.
#include <gtest/gtest.h>

#include <algorithm>

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
using switchyard::MoveOptions;
using switchyard::SlotArray;
using switchyard::SlotSelector;
using switchyard::SlotWeights;

constexpr int kTopk = 2;
constexpr size_t kSlotBytes[] = {48, 3000};
constexpr uint8_t kEmpty = 0xee;

uint8_t weight_byte(size_t array, int e, size_t i) {
  return static_cast<uint8_t>(static_cast<size_t>(e) * 29 + array * 13 + i * (i % 5 + 1));
}

/// A rank's weights in the memory of its backend, and what each slot should hold: an expert, or -1 for kEmpty. `others` are
/// equal at first.
struct Weights {
  Weights(Group& group, const ExpertMap& map)
      : memory(rank_memory(group)), slots(map.slots_per_rank), first(group.rank() * slots) {
    size_t bytes = 0;
    for (const size_t each : kSlotBytes) bytes += each * static_cast<size_t>(slots);
    auto* at = static_cast<std::byte*>(memory.keep(2 * bytes));
    content.assign(static_cast<size_t>(slots), -1);
    note(map);
    for (std::vector<SlotArray>* each : {&arrays, &others})
      for (size_t a = 0; a < std::size(kSlotBytes); ++a) {
        each->push_back({at, kSlotBytes[a]});
        const std::vector<uint8_t> now = expected(a);
        memory.write(at, now.data(), now.size());
        at += now.size();
      }
  }
  MoveOptions options() const { return {size_t{1} << 20, memory.stream()}; }
  /// Slots that are empty in the map keep their content.
  void note(const ExpertMap& map) {
    for (int s = 0; s < slots; ++s)
      if (const int e = map.expert_of_slot[static_cast<size_t>(first + s)]; e >= 0) content[static_cast<size_t>(s)] = e;
  }
  std::vector<uint8_t> expected(size_t a) const {
    std::vector<uint8_t> bytes;
    for (const int e : content)
      for (size_t i = 0; i < kSlotBytes[a]; ++i) bytes.push_back(e < 0 ? kEmpty : weight_byte(a, e, i));
    return bytes;
  }
  void check(const SlotWeights& moving, Failures& failures) const {
    moving.wait(memory.stream());
    for (size_t a = 0; a < arrays.size(); ++a) {
      std::vector<uint8_t> found(kSlotBytes[a] * static_cast<size_t>(slots));
      memory.read(found.data(), arrays[a].data, found.size());
      failures.equal_range(expected(a), found, "array " + std::to_string(a));
    }
    failures.check(moving.ready(), "the copies have not completed");
  }

  RankMemory& memory;
  int slots, first;
  std::vector<int> content;
  std::vector<SlotArray> arrays, others;
};

TEST(Background, MovesWriteTheSlotsThatWereEmpty) {
  for (const int world : {1, 2, 3, 5})
    EXPECT_EQ(on_ranks(world,
                       [&](Group& group, Failures& failures) {
                         const int experts = 11, slots = (experts + world - 1) / world + 3;
                         ExpertMap map = map_with_replicas(experts, world, slots, 1, 3);
                         Weights weights(group, map);
                         SlotWeights moving(group, slots, weights.arrays, weights.options());
                         failures.check(moving.ready() && moving.ready_event() == nullptr, "nothing has moved");
                         for (uint64_t step = 2; step <= 7; ++step) {
                           failures.set_context("step " + std::to_string(step));
                           const ExpertMap next = step == 5 ? map : map_with_replicas(experts, world, slots, step, 3);
                           const ExpertMap from = switchyard::vacate(map, next);
                           int64_t received = 0;
                           for (int s = 0; s < slots; ++s) {
                             const auto p = static_cast<size_t>(group.rank() * slots + s);
                             const int e = next.expert_of_slot[p];
                             const auto own = from.expert_of_slot.begin() + group.rank() * slots;
                             if (e >= 0 && from.expert_of_slot[p] < 0 && std::find(own, own + slots, e) == own + slots)
                               received += static_cast<int64_t>(kSlotBytes[0] + kSlotBytes[1]);
                           }
                           failures.equal(received, moving.move(group, from, next, weights.memory.stream()), "bytes received");
                           weights.note(next);
                           weights.check(moving, failures);
                           map = next;
                         }
                         group.barrier();
                       }),
              "");
}

struct Mistake {
  const char* text;
  ErrorCode code;
  std::function<void(ExpertMap& from, ExpertMap& to)> make;  ///< on rank 1
};
const Mistake kMistakes[] = {
    {"slot 0 holds expert 0, and expert 1", ErrorCode::invalid_argument, [](auto&, auto& to) { to.expert_of_slot[0] = 1; }},
    {"a hash of from and to", ErrorCode::mismatch, [](auto&, auto& to) { to.expert_of_slot[2] = 3; }},
    {"as in the constructor of SlotWeights", ErrorCode::invalid_argument,
     [](auto& from, auto& to) { from = to = switchyard::home_map(4, 2, 5); }},
    {"ExpertMap::world", ErrorCode::invalid_argument, [](auto& from, auto& to) { from = to = switchyard::home_map(4, 1, 4); }},
};

/// An error on one rank is an error on all, and changes nothing.
TEST(Background, RefusedMaps) {
  EXPECT_EQ(on_ranks(2,
                     [](Group& group, Failures& failures) {
                       const ExpertMap from = switchyard::home_map(4, 2, 4);  // 0 1 - - 2 3 - -
                       ExpertMap to = from;
                       to.expert_of_slot[2] = 2;
                       to.expert_of_slot[6] = 0;
                       Weights weights(group, from);
                       SlotWeights moving(group, 4, weights.arrays, weights.options());
                       for (const Mistake& m : kMistakes) {
                         failures.set_context(m.text);
                         ExpertMap mine = from, then = to;
                         if (group.rank() == 1) m.make(mine, then);
                         const Outcome o = outcome_of([&] { moving.move(group, mine, then, weights.memory.stream()); });
                         failures.equal(code_name(m.code), code_name(o.code), "code");
                         failures.check(o.text.find(m.text) != std::string::npos, "'" + o.text + "' does not contain it");
                         weights.check(moving, failures);
                       }
                       failures.set_context("after the errors");
                       moving.move(group, from, to, weights.memory.stream());
                       weights.note(to);
                       weights.check(moving, failures);
                       group.barrier();
                     }),
            "");
}

TEST(Background, ObjectsOfOtherSizes) {
  EXPECT_EQ(on_ranks(2,
                     [](Group& group, Failures& failures) {
                       const ExpertMap home = switchyard::home_map(4, 2, 4);
                       Weights weights(group, home);
                       const int slots = group.rank() == 1 ? 3 : 4;
                       const Outcome o = outcome_of([&] { SlotWeights(group, slots, weights.arrays, weights.options()); });
                       failures.equal(code_name(ErrorCode::mismatch), code_name(o.code), o.text);
                       SlotWeights moving(group, 4, weights.arrays, weights.options());
                       SlotSelector selector(group, switchyard::home_map(4, 2, 3));
                       const Outcome balanced = outcome_of([&] {
                         selector.balance(group, ExpertIds{nullptr, 0, kTopk}, nullptr, moving,
                                          {{}, {size_t{1} << 20, weights.memory.stream()}});
                       });
                       failures.equal(code_name(ErrorCode::invalid_argument), code_name(balanced.code), balanced.text);
                       group.barrier();
                     }),
            "");
}

/// balance() in the background writes the slots and reports of balance() in the foreground, and fetches the planned weights.
TEST(Background, BalanceIsThatOfTheForeground) {
  for (const int world : {2, 3})
    EXPECT_EQ(
        on_ranks(world,
                 [&](Group& group, Failures& failures) {
                   const int experts = 9, slots = (experts + world - 1) / world + 2;
                   const ExpertMap home = switchyard::home_map(experts, world, slots);
                   Weights weights(group, home);
                   SlotWeights moving(group, slots, weights.arrays, weights.options());
                   SlotSelector behind(group, home), before(group, home);
                   BalanceOptions options;
                   options.plan = {1, 1e15, 0.14e-6, 0};
                   options.move = weights.options();
                   RankMemory& memory = weights.memory;
                   int64_t fetched = 0;
                   for (uint64_t step = 1; step <= 6; ++step) {
                     failures.set_context("call " + std::to_string(step));
                     Draw draw(step * 10 + static_cast<uint64_t>(group.rank()));
                     std::vector<int32_t> ids(step % 3 == 0 && group.rank() == 0 ? 0 : 60), slots_of[2] = {ids, ids};
                     for (int32_t& id : ids)
                       id = static_cast<int32_t>(draw.one_in(8) ? -1 : draw.one_in(2) ? draw.between(0, experts - 1) : step);
                     BalanceReport reports[2];
                     for (const bool background : {false, true}) {
                       auto& result = slots_of[background ? 1 : 0];
                       result = ids;
                       auto* const in = static_cast<int32_t*>(memory.give(ids.data(), ids.size() * 4));
                       auto* const out = static_cast<int32_t*>(memory.lend(result.data(), result.size() * 4));
                       const ExpertIds given = ExpertIds::of(in, static_cast<int64_t>(ids.size()) / kTopk, kTopk);
                       reports[background ? 1 : 0] = background ? behind.balance(group, given, out, moving, options)
                                                                : before.balance(group, given, out, weights.others, options);
                       if (!result.empty()) memory.read(result.data(), out, result.size() * 4);
                       memory.release();
                     }
                     failures.equal_range(slots_of[0], slots_of[1], "slots");
                     failures.equal(reports[0].max_after, reports[1].max_after, "max_after");
                     failures.equal(reports[0].fetched, reports[1].fetched, "fetched");
                     failures.equal(reports[0].received_bytes, reports[1].received_bytes, "received_bytes");
                     failures.check(before.map() == behind.map(), "the maps differ");
                     weights.note(behind.map());
                     weights.check(moving, failures);
                     fetched += reports[1].fetched;
                   }
                   failures.check(fetched > 0, "nothing was fetched");
                   failures.equal_range(before.gather_routes(), behind.gather_routes(), "routes");
                   group.barrier();
                 }),
        "");
}

#if !defined(SWITCHYARD_TEST_CUDA)
/// A rank terminates during the copies: its second array is not writable. The other ranks report it; the map in force and the
/// weights of its slots stay, so calls of select() continue with it.
TEST(Background, ARankThatDiesWhileWeightsMove) {
  if (ranks_of_suite() != Ranks::processes || spans_hosts(3)) GTEST_SKIP() << "needs processes of one host";
  const auto failures = run_processes(
      fleet_of(3, {}, kSlotHeap),
      [](Group& group, Failures& f) {
        const ExpertMap home = switchyard::home_map(6, 3, 4);
        ExpertMap to = home;
        for (int r = 0; r < 3; ++r) to.expert_of_slot[static_cast<size_t>(4 * r + 2)] = 0;
        Weights weights(group, home);
        std::vector<SlotArray> arrays = weights.arrays;
        SlotSelector selector(group, home);
        if (group.rank() == 1) arrays[1].data = deadly_memory(4 * kSlotBytes[1]);
        SlotWeights moving(group, 4, arrays, weights.options());
        const Outcome o = outcome_of([&] {
          moving.move(group, home, to);
          selector.set_map(to);
        });
        f.equal(code_name(ErrorCode::peer_failed), code_name(o.code), o.text);
        f.equal(1, o.failed_rank, "the rank that died");
        f.check(selector.map() == home && selector.version() == 1, "the map has changed");
        // The slots that the map in force uses are whole; the first array of the spare slot has arrived on rank 2.
        for (size_t a = 0; a < 2; ++a) {
          std::vector<uint8_t> found(4 * kSlotBytes[a]), expected = weights.expected(a);
          weights.memory.read(found.data(), arrays[a].data, found.size());
          found.resize(2 * kSlotBytes[a]);
          expected.resize(2 * kSlotBytes[a]);
          f.equal_range(expected, found, "slots in use of array " + std::to_string(a));
        }
        if (group.rank() == 2)
          f.equal(static_cast<int>(weight_byte(0, 0, 1)),
                  static_cast<int>(static_cast<const uint8_t*>(arrays[0].data)[2 * kSlotBytes[0] + 1]),
                  "rank 1 died before the copies");
      },
      1u << 1);
  EXPECT_EQ(joined(failures), "");
}
#endif

}  // namespace
}  // namespace harness
