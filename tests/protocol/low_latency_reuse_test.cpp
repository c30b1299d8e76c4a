// SPDX-License-Identifier: Apache-2.0
// The second duty of call_header: a rank may overwrite what it sent two calls ago only because the peers' headers of the call
// between say that they have left that call. A fast rank sends rows in calls 1, 3, 5, ... to a slow one that reads them; in the
// calls between there is nothing but headers. ThreadSanitizer must see the rows overwritten while unordered with their reading
// if either side of the header is weakened. The race on the header's own value comes first, so the run goes on after a report,
// in a process of its own.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "arch/cpu/order_table.hpp"
#include "protocol/low_latency_harness.hpp"

namespace harness {
namespace {

using switchyard::detail::Side;
using switchyard::detail::Site;

constexpr const char* kVariable = "SWITCHYARD_TEST_WEAKENED_HEADER";

/// Started by WeakenedHeader below.
TEST(ReuseOfBuffers, DISABLED_Child) {
  const char* side = std::getenv(kVariable);
  ASSERT_NE(side, nullptr);
  LowLatencyScript s;
  s.world = 2;
  s.config.hidden = 256;
  s.config.num_experts = 1;  // rank 0 has it: nothing but headers goes to rank 1
  s.config.topk = 1;
  s.config.max_tokens = 6;
  s.slow_rank = 0;
  s.slow_us = 2000;
  for (int i = 0; i < 12; ++i) s.dispatch({0, i % 2 ? 0 : 6}).x_pattern = Pattern::random_values;
  if (std::strcmp(side, "acquire") == 0) set_order(Site::call_header, Side::acquire, std::memory_order_relaxed);
  if (std::strcmp(side, "release") == 0) set_order(Site::call_header, Side::release, std::memory_order_relaxed);
  EXPECT_EQ(run_scripts(Ranks::threads, {1, 1, false}, {s}), "");
}

/// What the child printed; it goes on after races.
std::string run_child(const char* side) {
  int ends[2];
  if (::pipe(ends) != 0) return "no pipe";
  std::fflush(nullptr);
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::dup2(ends[1], 1);
    ::dup2(ends[1], 2);
    ::setenv(kVariable, side, 1);
    ::setenv("TSAN_OPTIONS", "halt_on_error=0:exitcode=66:report_signal_unsafe=0", 1);
    ::execl("/proc/self/exe", "mutation_test", "--gtest_filter=ReuseOfBuffers.DISABLED_Child",
            "--gtest_also_run_disabled_tests", nullptr);
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

/// Reports of a write of rows that races with an earlier read of rows.
int races_on_rows(const std::string& output) {
  int found = 0;
  for (size_t at = output.find("WARNING: ThreadSanitizer"); at != std::string::npos;) {
    const size_t next = output.find("WARNING: ThreadSanitizer", at + 1);
    const std::string report = output.substr(at, next - at);
    const size_t previous = report.find("Previous read");
    if (previous != std::string::npos) {
      const bool writes_rows = report.substr(0, previous).find("send_part") != std::string::npos;
      const bool read_rows = report.find("place_piece", previous) != std::string::npos;
      found += writes_rows && read_rows;
    }
    at = next;
  }
  return found;
}

TEST(ReuseOfBuffers, NeedsTheHeaderOfTheCallBetween) {
  for (const char* side : {"acquire", "release"}) {
    const std::string output = run_child(side);
    EXPECT_NE(output.find("1 test"), std::string::npos) << output;
    EXPECT_GT(races_on_rows(output), 0) << side << ": " << output;
  }
  const std::string output = run_child("neither");
  EXPECT_NE(output.find("[  PASSED  ] 1 test"), std::string::npos) << output;
  EXPECT_EQ(output.find("WARNING: ThreadSanitizer"), std::string::npos) << output;
}

}  // namespace
}  // namespace harness
