// SPDX-License-Identifier: Apache-2.0
// A process of several is killed in the middle of a call.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <string>

#include "gpu/harness/object_rig.hpp"
#include "multiproc/fork_ranks.hpp"

namespace harness {

/// Runs run_rank(child, k) in k.kWorld processes. Each says "<n> calls queued", k.kCalls of them if k.queues_before(rank); then
/// k.kVictim is killed and the others are told "killed". They must say "done" and end well.
template <class Case>
void kill_one(const Case& k, void (*run_rank)(switchyard::test::ChildRank&, const Case&)) {
  using namespace std::chrono_literals;
  const auto queued = [&](int rank) { return std::to_string(k.queues_before(rank) ? k.kCalls : 0) + " calls queued"; };
  switchyard::test::ForkedRanks ranks(k.kWorld, [&](switchyard::test::ChildRank& child) { run_rank(child, k); });
  for (int r = 0; r < k.kWorld; ++r) ASSERT_TRUE(ranks.wait_until_said(r, queued(r), 40s)) << "rank " << r;
  ::usleep(200000);  // the kernels run
  ranks.kill(k.kVictim);
  ASSERT_TRUE(ranks.wait_until_ended(k.kVictim, 10s));
  ranks.tell_all("killed");
  const auto ends = ranks.finish(40s);
  for (int r = 0; r < k.kWorld; ++r) {
    if (r == k.kVictim) continue;
    const auto& end = ends[static_cast<size_t>(r)];
    EXPECT_TRUE(end.ok()) << end;
    EXPECT_EQ(joined(end.said), queued(r) + "\ndone\n");
  }
}

}  // namespace harness
