// SPDX-License-Identifier: Apache-2.0
// Faults between hosts, common to all modes: a rank that does not make the call, and a process that is killed.
#pragma once

#include <gtest/gtest.h>

#include <signal.h>

#include <barrier>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "faults/watched_calls.hpp"
#include "harness/fleet.hpp"
#include "testing/test_access.hpp"

namespace harness {

inline switchyard::GroupOptions options_on(const std::string& hosts, std::chrono::milliseconds timeout) {
  switchyard::GroupOptions o = options_with(timeout);
  o.host = hosts;
  return o;
}

inline void expect_all_ok(const std::vector<Outcome>& all) {
  for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
}

/// Rank `missing` of four makes the call only after the others have given up: all of them name it, and the error is sticky.
inline void expect_named_when_silent(const WatchedCall& c, const std::string& hosts, int missing) {
  std::barrier gone(4);
  const auto all = outcomes(4, options_on(hosts, kSoon), [&](switchyard::Group& group) {
    c.play(group, [&](const std::function<void()>& call) {
      group.barrier();
      Outcome first;
      if (group.rank() != missing) first = outcome_of(call);
      gone.arrive_and_wait();
      if (group.rank() == missing) {
        EXPECT_EQ(code_name(outcome_of(call).reason), "peer_timeout") << "told when it comes";
        return;
      }
      EXPECT_EQ(code_name(first.code), "peer_timeout") << hosts << ", " << missing << " is silent: " << first.text;
      EXPECT_EQ(first.report.awaited_rank, missing) << hosts << ", rank " << group.rank() << ": " << first.text;
      EXPECT_TRUE(first.report.site == std::string(c.site) || first.report.site == std::string("network")) << first.text;
      EXPECT_EQ(code_name(outcome_of(call).code), "peer_failed") << "it is sticky";
    });
  });
  expect_all_ok(all);
}

/// One of four processes on two hosts is killed while rows are in flight, at a different time in each trial. All others name
/// the killed process.
template <class Rig>
void expect_named_when_killed(int trial) {
  const int victim = trial % 4;
  Fleet fleet;
  fleet.world = 4;
  fleet.options = options_on("a,a,b,b", std::chrono::seconds(600));
  fleet.options.rendezvous_timeout = std::chrono::seconds(600);
  const auto failures = run_processes(
      fleet,
      [&](switchyard::Group& group, Failures& f) {
        switchyard::detail::cross_in_rounds_of(group, 1);
        const Outcome o = outcome_of([&] {
          Rig rig(group);
          if (group.rank() == victim)
            std::thread([&] {
              std::this_thread::sleep_for(std::chrono::microseconds(3000 + trial * 1713));
              ::kill(::getpid(), SIGKILL);
            }).detach();
          while (true) rig.round();
        });
        f.equal(std::string("peer_failed"), code_name(o.code), "code of " + o.text);
        f.equal(victim, o.failed_rank, "failed rank of " + o.text);
      },
      uint64_t{1} << victim);
  EXPECT_EQ(joined(failures), "");
}

}  // namespace harness
