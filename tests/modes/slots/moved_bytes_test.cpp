// SPDX-License-Identifier: Apache-2.0
// Bytes that moves of weights transfer between ranks and between hosts, and a rank that terminates between two rounds.
//
// Entries: moved_bytes_threads and moved_bytes_processes (label multiproc), both also over hosts; on GPUs, gpu_moved_bytes_*.
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <set>
#include <utility>

#include "harness/outcome.hpp"
#include "harness/suite_hosts.hpp"
#include "modes/slots/slot_ranks.hpp"
#include "testing/test_access.hpp"

namespace harness {
namespace {

using switchyard::ErrorCode;
using switchyard::ExpertMap;
using switchyard::Group;
using switchyard::SlotArray;
using switchyard::SlotSelector;
using switchyard::SlotWeights;
using switchyard::detail::Carried;

constexpr size_t kSlotBytes[] = {100, 0, 9'000};

uint8_t weight_byte(size_t array, int e, size_t i) {
  return static_cast<uint8_t>(static_cast<size_t>(e) * 41 + array * 17 + i * (i % 9 + 1));
}

/// A rank's weights: the bytes of the map's experts, in the memory of its backend.
struct Weights {
  Weights(Group& group, const ExpertMap& map) : memory(rank_memory(group)), slots(map.slots_per_rank), rank(group.rank()) {
    size_t bytes = 0;
    for (const size_t each : kSlotBytes) bytes += each * static_cast<size_t>(slots);
    auto* at = static_cast<std::byte*>(memory.keep(bytes));
    for (size_t a = 0; a < std::size(kSlotBytes); ++a) {
      arrays.push_back({at, kSlotBytes[a]});
      content.emplace_back(kSlotBytes[a] * static_cast<size_t>(slots), uint8_t{0xee});
      note(map);
      if (!content[a].empty()) memory.write(at, content[a].data(), content[a].size());
      at += content[a].size();
    }
  }
  /// The slots contain the experts of `map` from now on; empty ones keep their bytes.
  void note(const ExpertMap& map) {
    for (size_t a = 0; a < content.size(); ++a)
      for (int s = 0; s < slots; ++s)
        if (const int e = map.expert_of_slot[static_cast<size_t>(rank * slots + s)]; e >= 0)
          for (size_t i = 0; i < kSlotBytes[a]; ++i)
            content[a][static_cast<size_t>(s) * kSlotBytes[a] + i] = weight_byte(a, e, i);
  }
  void check(Failures& failures, int slots_checked) const {
    for (size_t a = 0; a < arrays.size(); ++a) {
      std::vector<uint8_t> found(content[a].size()), expected = content[a];
      if (!found.empty()) memory.read(found.data(), arrays[a].data, found.size());
      for (std::vector<uint8_t>* each : {&found, &expected}) each->resize(kSlotBytes[a] * static_cast<size_t>(slots_checked));
      failures.equal_range(expected, found, "array " + std::to_string(a));
    }
  }

  RankMemory& memory;
  int slots, rank;
  std::vector<SlotArray> arrays;
  std::vector<std::vector<uint8_t>> content;
};

/// The pairs (group of ranks, expert) of which the group holds the expert in `to` and not in `from`. of_rank: its group.
std::set<std::pair<int, int>> lacking(const ExpertMap& from, const ExpertMap& to, const std::vector<int>& of_rank) {
  const auto held = [&](const ExpertMap& map) {
    std::set<std::pair<int, int>> all;
    for (int p = 0; p < map.num_slots(); ++p)
      if (const int e = map.expert_of_slot[static_cast<size_t>(p)]; e >= 0)
        all.emplace(of_rank[static_cast<size_t>(p / map.slots_per_rank)], e);
    return all;
  };
  std::set<std::pair<int, int>> missing = held(to);
  for (const auto& each : held(from)) missing.erase(each);
  return missing;
}

/// Slots that receive an expert that their rank does not hold.
int64_t slots_lacking(const ExpertMap& from, const ExpertMap& to, int rank) {
  std::vector<int> ranks(static_cast<size_t>(from.world));
  for (int r = 0; r < from.world; ++r) ranks[static_cast<size_t>(r)] = r;
  const auto missing = lacking(from, to, ranks);
  int64_t slots = 0;
  for (int p = rank * to.slots_per_rank; p < (rank + 1) * to.slots_per_rank; ++p)
    slots += static_cast<int64_t>(missing.count({rank, to.expert_of_slot[static_cast<size_t>(p)]}));
  return slots;
}

/// A rank receives the weights that it lacks; between hosts, the weights of an expert cross once for all ranks of a host.
class MovedBytesOf : public testing::TestWithParam<int> {};

TEST_P(MovedBytesOf, AreThoseThatRanksAndHostsLack) {
  const int world = GetParam();
  EXPECT_EQ(on_ranks(world,
                     [&](Group& group, Failures& failures) {
                       Carried carried;
                       switchyard::detail::count_carried(group, carried);
                       const int experts = 9, slots = (experts + world - 1) / world + 3;
                       ExpertMap map = map_with_replicas(experts, world, slots, 1, 3);
                       Weights weights(group, map);
                       const size_t before = group.heap_used();
                       for (uint64_t step = 2; step <= 9; ++step) {
                         failures.set_context("step " + std::to_string(step));
                         const ExpertMap to = map_with_replicas(experts, world, slots, step, 3);
                         const uint64_t sent = carried.sent, received = carried.received;
                         const int64_t moved = switchyard::move_weights(
                             group, map, to, weights.arrays,
                             {step % 2 == 0 ? size_t{1} << 20 : size_t{20'000}, weights.memory.stream()});
                         constexpr int64_t kBytes = 100 + 9'000;
                         failures.equal(kBytes * slots_lacking(map, to, group.rank()), moved, "bytes received");
                         weights.note(to);
                         weights.check(failures, slots);
                         const auto crossed = lacking(map, to, hosts_of_suite(world));
                         const int64_t mine[] = {static_cast<int64_t>(carried.sent - sent),
                                                 static_cast<int64_t>(carried.received - received)};
                         std::vector<int64_t> all(2 * static_cast<size_t>(world));
                         group.all_gather(mine, sizeof mine, all.data());
                         int64_t total[2] = {};
                         for (size_t i = 0; i < all.size(); ++i) total[i % 2] += all[i];
                         if (step > 2 || kBackend == switchyard::Backend::cpu)  // GPUs: the first round connects the ranks
                           for (const int64_t each : total)
                             failures.equal(kBytes * static_cast<int64_t>(spans_hosts(world) ? crossed.size() : 0), each,
                                            "bytes between hosts");
                         failures.equal(before, group.heap_used(), "heap_used");
                         map = to;
                       }
                     }),
            "");
}

INSTANTIATE_TEST_SUITE_P(Worlds, MovedBytesOf, testing::Values(2, 3, 4, 6),
                         [](const auto& world) { return "W" + std::to_string(world.param); });

/// A rank terminates before its third round between hosts. The other ranks report it; the map in force and the weights of its
/// slots do not change.
TEST(MovedBytes, ARankThatDiesBetweenRounds) {
  if (ranks_of_suite() != Ranks::processes || !spans_hosts(4)) GTEST_SKIP() << "needs processes of several hosts";
  const auto failures = run_processes(
      fleet_of(4, {}, kSlotHeap),
      [](Group& group, Failures& f) {
        int rounds = 0;
        if (group.rank() == 1)
          switchyard::detail::before_rounds(group, [&rounds] {
            if (++rounds == 3) ::kill(::getpid(), SIGKILL);
          });
        const ExpertMap home = switchyard::home_map(8, 4, 4);  // 0 1 - - 2 3 - - 4 5 - - 6 7 - -
        ExpertMap to = home;
        for (int r = 0; r < 4; ++r)  // an expert of the rank on the other host, for any two hosts
          for (const int s : {2, 3}) to.expert_of_slot[static_cast<size_t>(4 * r + s)] = (2 * r + 2 * s - 2) % 8;
        Weights weights(group, home);
        SlotSelector selector(group, home);
        SlotWeights moving(group, 4, weights.arrays, {size_t{8} << 10, weights.memory.stream()});
        const Outcome o = outcome_of([&] {
          moving.move(group, home, to, weights.memory.stream());
          selector.set_map(to);
        });
        f.equal(code_name(ErrorCode::peer_failed), code_name(o.code), o.text);
        f.equal(1, o.failed_rank, "the rank that died");
        f.check(selector.map() == home && selector.version() == 1, "the map has changed");
        weights.check(f, 2);
      },
      1u << 1);
  EXPECT_EQ(joined(failures), "");
}

}  // namespace
}  // namespace harness
