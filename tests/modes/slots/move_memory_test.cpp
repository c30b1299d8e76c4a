// SPDX-License-Identifier: Apache-2.0
// The memory of moves of weights is that of the formula in docs/how_to/replicate_experts.md.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "harness/fleet.hpp"
#include "harness/outcome.hpp"
#include "switchyard/expert_map.hpp"
#include "testing/test_access.hpp"

namespace harness {
namespace {

using switchyard::ExpertMap;
using switchyard::Group;
using switchyard::SlotArray;
using switchyard::SlotWeights;
using switchyard::detail::Carried;

constexpr int kSlots = 3;
constexpr size_t kHeap = size_t{1} << 20;

struct Case {
  const char* hosts;
  size_t staged, crossing;  ///< n and c of the formula for the maps below
  size_t transfers[4];      ///< slots that each rank sends to and receives from other hosts
};
/// Rank 0 sends expert 0 to ranks 2 and 3, rank 1 expert 1 to rank 3, and rank 2 expert 2 to ranks 0 and 1.
const Case kCases[] = {{"a", 1, 0, {}}, {"a,a,b,b", 1, 2, {2, 1, 2, 1}}, {"a,a,a,b", 2, 2, {1, 1, 0, 2}}};
const ExpertMap kBefore{4, 4, kSlots, {0, -1, -1, 1, -1, -1, 2, -1, -1, 3, -1, -1}};
const ExpertMap kAfter{4, 4, kSlots, {0, 2, -1, 1, 2, -1, 2, 0, -1, 3, 0, 1}};

/// Bytes of a range: a multiple of 256.
size_t range_of(const Case& c, size_t staging_bytes, size_t slot_bytes) {
  return std::min(staging_bytes / (2 * c.staged + c.crossing), slot_bytes + 255) / 256 * 256;
}

Fleet fleet_on(const char* hosts) {
  Fleet fleet = fleet_of(4, {}, kHeap);
  fleet.options.host = hosts;
  return fleet;
}

TEST(MoveMemory, HeapBytesAreThoseOfTheFormula) {
  for (const Case& c : kCases)
    for (const size_t staging : {size_t{64} << 20, size_t{5'000'001}})
      EXPECT_EQ(joined(run_threads(fleet_on(c.hosts),
                                   [&](Group& group, Failures& failures) {
                                     constexpr size_t kSlotBytes = size_t{5} << 20;
                                     std::vector<std::byte> memory(kSlots * kSlotBytes);
                                     const SlotArray array{memory.data(), kSlotBytes};
                                     const size_t used = group.heap_used();
                                     const Outcome o = outcome_of([&] {
                                       switchyard::move_weights(group, kBefore, kAfter, {&array, 1}, {staging});
                                     });
                                     const size_t needed = 2 * c.staged * range_of(c, staging, kSlotBytes);
                                     failures.check(o.text.find("needs " + std::to_string(needed) +
                                                                " bytes of the symmetric heap") != std::string::npos,
                                                    std::to_string(needed) + " bytes: " + o.text);
                                     failures.equal(used, group.heap_used(), "heap_used");
                                   })),
                "")
          << c.hosts << ", staging_bytes " << staging;
}

/// During a move: the heap bytes, and the bytes that a round sends and receives, of which the connections have one copy.
TEST(MoveMemory, BytesInUseDuringAMove) {
  for (const Case& c : kCases) {
    if (c.crossing == 0) continue;
    EXPECT_EQ(joined(run_threads(fleet_on(c.hosts),
                                 [&](Group& group, Failures& failures) {
                                   constexpr size_t kSlotBytes = 100'000, kStaging = 200'000;
                                   const size_t range = range_of(c, kStaging, kSlotBytes), used = group.heap_used();
                                   std::vector<std::byte> memory(kSlots * kSlotBytes);
                                   const SlotArray array{memory.data(), kSlotBytes};
                                   SlotWeights weights(group, kSlots, {&array, 1}, {kStaging});
                                   failures.equal(used, group.heap_used(), "SlotWeights has no memory of its own");
                                   uint64_t rounds = 0;
                                   size_t max_bytes = 0;
                                   switchyard::detail::watch_carried(group, [&](size_t bytes) {
                                     ++rounds;
                                     max_bytes = std::max(max_bytes, bytes);
                                     failures.equal(2 * c.staged * range, group.heap_used() - used, "heap bytes");
                                   });
                                   weights.move(group, kBefore, kAfter);
                                   if (c.transfers[group.rank()] > 0)
                                     failures.equal((kSlotBytes + range - 1) / range, rounds, "rounds");
                                   failures.equal(c.transfers[group.rank()] * range, max_bytes, "bytes of a round");
                                   failures.check(
                                       max_bytes <= c.crossing * range && (2 * c.staged + c.crossing) * range <= kStaging,
                                       "the limit");
                                   failures.equal(used, group.heap_used(), "heap_used after the move");
                                 })),
              "")
        << c.hosts;
  }
}

}  // namespace
}  // namespace harness
