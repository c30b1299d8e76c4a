// SPDX-License-Identifier: Apache-2.0
// Tests the second purpose of the flags that announce a rank's entry into a call: a rank may overwrite data that it sent
// several calls earlier only because the peers have announced their entry into a call in between. A fast rank sends rows to a
// slow rank that reads them. If either side of the flag is weakened, ThreadSanitizer must report that the rows are overwritten
// without being ordered after the owner's use of them. The race on the data next to the flag is reported first, so the run,
// which is a separate process, continues after a report.
//
// Low-latency mode sends rows in calls 1, 3, 5, ...; the calls in between consist of headers only. Ledger combine sends
// sentinel rows in every call and overwrites each buffer three calls later.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "arch/cpu/order_table.hpp"
#include "harness/rank_steps.hpp"
#include "layout/sites.hpp"
#include "modes/ledger/ledger_rig.hpp"
#include "modes/low_latency/low_latency_script.hpp"

namespace harness {
namespace {

using switchyard::detail::Side;
using switchyard::detail::Site;

constexpr const char* kVariable = "SWITCHYARD_TEST_WEAKENED_SIDE";

/// Started by a test below, which sets the mutation in the environment.
void weaken(Site site) {
  const char* side = std::getenv(kVariable);
  ASSERT_NE(side, nullptr);
  if (std::strcmp(side, "acquire") == 0) set_order(site, Side::acquire, std::memory_order_relaxed);
  if (std::strcmp(side, "release") == 0) set_order(site, Side::release, std::memory_order_relaxed);
}

TEST(ReuseOfBuffers, DISABLED_LowLatency) {
  LowLatencyScript s;
  s.world = 2;
  s.config.hidden = 256;
  s.config.num_experts = 1;  // on rank 0: rank 1 receives only headers
  s.config.topk = 1;
  s.config.max_tokens = 6;
  s.slow_rank = 0;
  s.slow_us = 2000;
  for (int i = 0; i < 12; ++i) s.dispatch({0, i % 2 ? 0 : 6}).x_pattern = Pattern::random_values;
  weaken(Site::call_header);
  EXPECT_EQ(run_scripts(Ranks::threads, {1, 1, false}, {s}), "");
}

TEST(ReuseOfBuffers, DISABLED_Ledger) {
  LedgerScenario s;
  s.problem.world = 2;
  s.problem.experts = 1;  // on rank 0, which receives only flags
  s.problem.topk = 1;
  s.tokens = {0, 6};
  s.hidden = 256;
  const auto c = make_ledger_case(s);
  Fleet fleet;
  fleet.world = 2;
  fleet.options.heap_bytes = switchyard::LedgerCombine::heap_bytes(make_config(*c), 2);
  fleet.options.num_blocks = fleet.options.num_warps = 1;
  weaken(Site::ledger_rows);
  EXPECT_EQ(joined(run_threads(fleet,
                               [&](switchyard::Group& group, Failures& f) {
                                 switchyard::LedgerCombine ledger(group, make_config(*c));
                                 LedgerRankData data(*c, group.rank(), 0);
                                 const auto prepared = ledger.prepare(data.tables());
                                 for (int call = 0; call < 12; ++call) {
                                   ledger.combine(data.y(), data.probs(), prepared, data.out().data());
                                   if (group.rank() == 1) random_delay(2000, 99, 1, static_cast<uint64_t>(call));
                                 }
                                 data.check_out(f);
                               })),
            "");
}

/// Returns the output of the child, which continues after races.
std::string run_child(const char* side, const char* test) {
  int ends[2];
  if (::pipe(ends) != 0) return "no pipe";
  std::fflush(nullptr);
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::dup2(ends[1], 1);
    ::dup2(ends[1], 2);
    ::setenv(kVariable, side, 1);
    ::setenv("TSAN_OPTIONS", "halt_on_error=0:exitcode=66:report_signal_unsafe=0", 1);
    const std::string filter = std::string("--gtest_filter=ReuseOfBuffers.DISABLED_") + test;
    ::execl("/proc/self/exe", "mutation_test", filter.c_str(), "--gtest_also_run_disabled_tests", nullptr);
    ::_exit(99);
  }
  ::close(ends[1]);
  std::string output;
  char buffer[4096];
  for (ssize_t n; (n = ::read(ends[0], buffer, sizeof buffer)) > 0;) output.append(buffer, static_cast<size_t>(n));
  ::close(ends[0]);
  int status = 0;
  ::waitpid(pid, &status, 0);
  return output;
}

/// Counts the reports of a write by `writer` that races with an earlier `access` ("read" or "write") by the owner in `user`.
int races_on_rows(const std::string& output, const char* writer, const char* access, const char* user) {
  int found = 0;
  for (size_t at = output.find("WARNING: ThreadSanitizer"); at != std::string::npos;) {
    const size_t next = output.find("WARNING: ThreadSanitizer", at + 1);
    const std::string report = output.substr(at, next - at);
    const size_t previous = report.find(std::string("Previous ") + access);
    if (previous != std::string::npos) {
      const bool writes_rows = report.substr(0, previous).find(writer) != std::string::npos;
      const bool used_rows = report.find(user, previous) != std::string::npos;
      found += writes_rows && used_rows;
    }
    at = next;
  }
  return found;
}

void expect_reuse_ordered_by_flag(const char* test, const char* writer, const char* access, const char* user) {
  for (const char* side : {"acquire", "release"}) {
    const std::string output = run_child(side, test);
    EXPECT_NE(output.find("1 test"), std::string::npos) << output;
    EXPECT_GT(races_on_rows(output, writer, access, user), 0) << side << ": " << output;
  }
  const std::string output = run_child("neither", test);
  EXPECT_NE(output.find("[  PASSED  ] 1 test"), std::string::npos) << output;
  EXPECT_EQ(output.find("WARNING: ThreadSanitizer"), std::string::npos) << output;
}

TEST(ReuseOfBuffers, NeedsTheHeaderOfTheCallBetween) {
  expect_reuse_ordered_by_flag("LowLatency", "send_part", "read", "place_piece");
}
// The owner's last access to a buffer occurs in the next call and blanks the buffer.
TEST(ReuseOfBuffers, NeedsTheEntryIntoTheCallBetween) {
  expect_reuse_ordered_by_flag("Ledger", "return_segments", "write", "blank_last_rows");
}

}  // namespace
}  // namespace harness
