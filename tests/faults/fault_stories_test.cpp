// SPDX-License-Identifier: Apache-2.0
// Faults inside calls; each test covers the calls of all modes. Departing ranks are tested in fault_departure_test.cpp, killed
// ranks in tests/multiproc/exchange_test.cpp, and calls that differ from those of the peers in different_calls_test.cpp.
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <thread>

#include "faults/flat_misuses.hpp"
#include "faults/fused_misuses.hpp"
#include "faults/ledger_misuses.hpp"
#include "faults/low_latency_misuses.hpp"
#include "faults/normal_misuses.hpp"
#include "faults/watched_calls.hpp"
#include "testing/test_access.hpp"

namespace harness {
namespace {

using namespace std::chrono_literals;
using switchyard::ErrorCode;
using switchyard::Group;

constexpr auto name_of = [](const auto& info) { return std::string(info.param.name); };

// --- A rank that never makes the call

class SilentRank : public testing::TestWithParam<WatchedCall> {};

void expect_report(const Outcome& o, const WatchedCall& c, int waiting, int silent) {
  EXPECT_EQ(code_name(o.code), "peer_timeout") << o.text;
  EXPECT_STREQ(o.report.operation, c.operation);
  EXPECT_STREQ(o.report.site, c.site);
  EXPECT_EQ(o.report.call, c.number);
  EXPECT_EQ(o.report.waiting_rank, waiting);
  EXPECT_EQ(o.report.awaited_rank, silent);
  EXPECT_GT(static_cast<int64_t>(o.report.expected - o.report.seen), 0);
  EXPECT_GT(o.report.waited_ms, 0);
  EXPECT_NE(o.text.find("rank " + std::to_string(silent)), std::string::npos) << o.text;
}

/// The error is sticky: a hundred later calls return at once; if each waited for its deadline, the test would not end in time.
/// A new object is rejected, and the silent rank receives the error when it makes the call.
TEST_P(SilentRank, OthersReportItInFull) {
  const WatchedCall& c = GetParam();
  for (const int world : {2, 4, 8}) {
    if (world == 8 && std::string(c.site) != "call_header") continue;  // only low latency has groups of this size
    const int silent = world - 1;
    std::barrier gone(world);
    const auto all = outcomes(world, options_with(kSoon), [&](Group& group) {
      switchyard::detail::number_calls_from(group, uint64_t{1} << 40);  // lets the report contain the number of this call
      c.play(group, [&](const std::function<void()>& call) {
        group.barrier();
        Outcome first;
        if (group.rank() != silent) first = outcome_of(call);
        gone.arrive_and_wait();
        const Outcome late = outcome_of(call);
        EXPECT_EQ(code_name(late.code), "peer_failed") << late.text;
        if (group.rank() != silent) {
          expect_report(first, c, group.rank(), silent);
          for (int i = 0; i < 100; ++i) EXPECT_EQ(code_name(outcome_of(call).code), "peer_failed");
        } else {
          EXPECT_EQ(code_name(late.reason), "peer_timeout") << late.text;
        }
        EXPECT_EQ(code_name(outcome_of([&] { group.check(); }).code), "peer_failed");
      });
      EXPECT_EQ(code_name(outcome_of([&] { c.play(group, [](const auto&) {}); }).code), "peer_failed") << "another object";
    });
    for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
  }
}

INSTANTIATE_TEST_SUITE_P(Faults, SilentRank, testing::ValuesIn(exchange_calls()), name_of);

class SilentInSetUp : public testing::TestWithParam<WatchedCall> {};

TEST_P(SilentInSetUp, IsNamed) {
  auto options = options_with(kSoon);
  options.rendezvous_timeout = kSoon;
  const auto all = outcomes(3, options, [&](Group& group) {
    GetParam().play(group, [&](const std::function<void()>& call) {
      if (group.rank() != 1) call();
    });
  });
  EXPECT_EQ(code_name(all[1].code), "ok");
  for (const int r : {0, 2}) {
    const Outcome& o = all[static_cast<size_t>(r)];
    EXPECT_EQ(code_name(o.code), "peer_timeout") << o.text;
    EXPECT_EQ(o.report.awaited_rank, 1);
    EXPECT_EQ(o.report.waiting_rank, r);
  }
}

INSTANTIATE_TEST_SUITE_P(Faults, SilentInSetUp, testing::ValuesIn(set_up_calls()), name_of);

/// Makes a call for which rank 1 is late by `delay`. Returns true if the others' statistics attribute the longest waits to it.
bool late_rank_waited_for_longest(const WatchedCall& watched, std::chrono::milliseconds delay) {
  std::atomic<bool> longest{true};
  const auto all = outcomes(3, options_with(60s), [&](Group& group) {
    watched.play(group, [&](const std::function<void()>& call) {
      group.barrier();
      const auto before = group.wait_statistics();
      if (group.rank() == 1) std::this_thread::sleep_for(delay);
      call();
      const auto after = group.wait_statistics();
      ASSERT_EQ(after.size(), 3u);
      if (group.rank() == 1) return;
      EXPECT_GT(after[1].waits, before[1].waits);
      EXPECT_GT(after[1].total_ms, before[1].total_ms);
      EXPECT_GE(after[1].total_ms, after[1].max_ms);
      for (size_t r = 0; r < 3; ++r)
        if (after[1].total_ms - before[1].total_ms < after[r].total_ms - before[r].total_ms) longest = false;
    });
  });
  for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
  return longest;
}

/// A rank that is late but within the deadline causes no fault, and the statistics name it.
class SlowRank : public testing::TestWithParam<WatchedCall> {};

TEST_P(SlowRank, IsNamedByTheWaitStatistics) {
  // Other programs may delay the other ranks as well; a longer delay then exceeds theirs.
  EXPECT_TRUE(late_rank_waited_for_longest(GetParam(), 200ms) || late_rank_waited_for_longest(GetParam(), 2s) ||
              late_rank_waited_for_longest(GetParam(), 20s));
}

INSTANTIATE_TEST_SUITE_P(Faults, SlowRank, testing::ValuesIn(exchange_calls()), name_of);

// --- Abort

class Abort : public testing::TestWithParam<WatchedCall> {};

/// All deadlines are longer than the time limit of this program.
TEST_P(Abort, EndsEveryWaitAndNamesTheRank) {
  auto options = options_with(600s);
  options.rendezvous_timeout = 600s;
  const auto all = outcomes(3, options, [&](Group& group) {
    GetParam().play(group, [&](const std::function<void()>& call) {
      if (group.rank() != 2) return call();
      group.abort(static_cast<int32_t>(ErrorCode::io));
      group.abort(static_cast<int32_t>(ErrorCode::system));  // only the first abort counts
    });
  });
  for (const size_t r : {size_t{0}, size_t{1}}) {
    EXPECT_EQ(code_name(all[r].code), "peer_failed") << all[r].text;
    EXPECT_EQ(all[r].failed_rank, 2);
    EXPECT_EQ(code_name(all[r].reason), "io");
  }
}

INSTANTIATE_TEST_SUITE_P(Faults, Abort, testing::ValuesIn(all_calls()), name_of);

// --- Misuse on one rank

class MisuseOnOneRank : public testing::TestWithParam<Misuse> {};

TEST_P(MisuseOnOneRank, ThrowsThereAndEndsThePeers) {
  const Misuse& m = GetParam();
  constexpr int kBad = 1;
  const auto all = outcomes(3, options_with(60s), [&](Group& group) { m.body(group, group.rank() == kBad); });
  expect_misuse(all, kBad, m.code, m.in_text);
}

INSTANTIATE_TEST_SUITE_P(Faults, MisuseOnOneRank, testing::ValuesIn(normal_misuses(switchyard::Staging::direct)), name_of);
INSTANTIATE_TEST_SUITE_P(Ring, MisuseOnOneRank, testing::ValuesIn(normal_misuses(switchyard::Staging::ring)), name_of);
INSTANTIATE_TEST_SUITE_P(LowLatencyDispatch, MisuseOnOneRank, testing::ValuesIn(low_latency_dispatch_misuses()), name_of);
INSTANTIATE_TEST_SUITE_P(LowLatencyCombine, MisuseOnOneRank, testing::ValuesIn(low_latency_combine_misuses()), name_of);
INSTANTIATE_TEST_SUITE_P(Flat, MisuseOnOneRank, testing::ValuesIn(flat_misuses()), name_of);
INSTANTIATE_TEST_SUITE_P(Fused, MisuseOnOneRank, testing::ValuesIn(fused_misuses()), name_of);
INSTANTIATE_TEST_SUITE_P(Ledger, MisuseOnOneRank, testing::ValuesIn(ledger_misuses()), name_of);

}  // namespace
}  // namespace harness
