// SPDX-License-Identifier: Apache-2.0
// Kills one of several processes in the middle of a call.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <string>

#include "gpu/harness/object_rig.hpp"
#include "multiproc/fork_ranks.hpp"

namespace harness {

/// Runs run_rank(child, k) in k.kWorld processes. Each process prints "<n> calls queued", where n is k.kCalls if
/// k.queues_before(rank); then k.kVictim is killed and the others receive "killed". These must print "done" and exit normally.
template <class Case>
void kill_one(const Case& k, void (*run_rank)(switchyard::test::ChildRank&, const Case&)) {
  using namespace std::chrono_literals;
  const auto queued = [&](int rank) { return std::to_string(k.queues_before(rank) ? k.kCalls : 0) + " calls queued"; };
  switchyard::test::ForkedRanks ranks(k.kWorld, [&](switchyard::test::ChildRank& child) { run_rank(child, k); });
  for (int r = 0; r < k.kWorld; ++r) ASSERT_TRUE(ranks.wait_until_said(r, queued(r), 40s)) << "rank " << r;
  ::usleep(200000);  // gives the kernels time to run
  ranks.kill(k.kVictim);
  ASSERT_TRUE(ranks.wait_until_ended(k.kVictim, 10s));
  ranks.send_to_all("killed");
  const auto ends = ranks.finish(40s);
  for (int r = 0; r < k.kWorld; ++r) {
    if (r == k.kVictim) continue;
    const auto& end = ends[static_cast<size_t>(r)];
    EXPECT_TRUE(end.ok()) << end;
    EXPECT_EQ(joined(end.said), queued(r) + "\ndone\n");
  }
}

/// Joins the group formed by kill_one's processes.
template <class Case>
Group join_killed(const switchyard::test::ChildRank& child, const Case& k, size_t heap) {
  GroupOptions options;
  options.backend = kBackend;
  options.heap_bytes = heap;
  options.timeout = k.kDeadline;
  return Group::connect(child.rank(), k.kWorld, k.store, "token", options);
}

/// Runs one of the processes, starting with its queued calls. Never returns on the victim. When this returns on the other
/// ranks, all their calls have failed, after less than two deadlines in total. `queue()` makes calls until k.kCalls are queued,
/// `queued()` returns the number queued, and `release()` releases whatever holds the calls back.
template <class Case, class Queue, class Queued>
void be_killed_or_survive(
    switchyard::test::ChildRank& child, const Case& k, Station& me, const Queue& queue, const Queued& queued,
    const std::function<void()>& release = [] {}) {
  using Clock = std::chrono::steady_clock;
  auto start = Clock::now();
  if (k.queues_before(child.rank())) queue();
  child.say(std::to_string(queued()) + " calls queued");
  if (child.rank() == k.kVictim) {
    ::sleep(60);
    ::_exit(3);
  }
  child.await("killed");
  release();
  if (!k.queues_before(child.rank())) {
    start = Clock::now();
    (void)outcome_of(queue);  // may already raise the error
  }
  me.synchronize();
  child.require(Clock::now() - start < 2 * k.kDeadline, "the calls end within two deadlines");
  const Outcome o = outcome_of([&] { me.group.check(); });
  child.require(o.code == ErrorCode::peer_failed || o.code == ErrorCode::peer_timeout, shown(o));
  if (o.code == ErrorCode::peer_timeout) child.require(o.report.awaited_rank == k.kVictim, "awaited rank, " + shown(o));
  if (o.code == ErrorCode::peer_failed && o.reason == ErrorCode::system)
    child.require(o.failed_rank == k.kVictim, "failed rank, " + shown(o));
}

inline void require_failed(const switchyard::test::ChildRank& child, const Outcome& o, const std::string& what) {
  child.require(o.code == ErrorCode::peer_failed || o.code == ErrorCode::peer_timeout, what + ", " + shown(o));
}
inline void require_context_works(const switchyard::test::ChildRank& child) {
  child.require(cudaDeviceSynchronize() == cudaSuccess && cudaGetLastError() == cudaSuccess, "the context works");
}

}  // namespace harness
