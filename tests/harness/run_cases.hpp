// SPDX-License-Identifier: Apache-2.0
// Runs the cases of a mode in sequence on one group. A Case contains the mode's input and the expected results. Its header
// declares `CaseInfo info_of(const Case&)` and `void run_object(Group&, const Case&, Failures&)`, which is the body of a rank
// with its own object.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "harness/fleet.hpp"
#include "testing/test_access.hpp"

namespace harness {

struct CaseInfo {
  std::string name;  ///< appears in every mismatch
  int world;
  uint64_t first_epoch;  ///< number of the object's first call
  size_t heap_bytes;     ///< heap bytes needed by the object
};

template <class Case>
void run_case(switchyard::Group& group, const Case& c, Failures& failures) {
  const CaseInfo info = info_of(c);
  failures.set_context(info.name + ", construction");
  const size_t before = group.heap_used();
  switchyard::detail::number_calls_from(group, info.first_epoch);
  constexpr int64_t kRoundBytes[] = {1, 1500, 20000, int64_t{4} << 20};  // from one row at a time to all at once
  switchyard::detail::cross_in_rounds_of(group, kRoundBytes[std::hash<std::string>()(info.name) % std::size(kRoundBytes)]);
  run_object(group, c, failures);
  failures.equal(before, switchyard::detail::heap_used_after_work(group), "heap_used after destruction");
}

/// Heap size for a group that runs these cases in sequence.
template <class Case>
size_t heap_of_largest(const std::vector<std::shared_ptr<const Case>>& cases) {
  size_t bytes = 0;
  for (const auto& c : cases) bytes = std::max(bytes, info_of(*c).heap_bytes);
  return bytes;
}

/// Forms a group, runs all cases on it, and returns the mismatches as one string.
template <class Case>
std::string run_each(Ranks ranks, const Workers& workers, const std::vector<std::shared_ptr<const Case>>& cases) {
  const Fleet fleet = fleet_of(info_of(*cases.front()).world, workers, heap_of_largest(cases));
  return joined(run_ranks(ranks, fleet, [&](switchyard::Group& group, Failures& failures) {
    for (const auto& c : cases) run_case(group, *c, failures);
  }));
}

}  // namespace harness
