// SPDX-License-Identifier: Apache-2.0
// Case A1: compares every field of every rank's plan, the matrices, the ledger and the strided slots with the oracle, without
// any exchange.
#include <gtest/gtest.h>

#include "modes/normal/compare_handle.hpp"
#include "oracle/views.hpp"
#include "plan/views.hpp"
#include "unit/plan/plan_cluster.hpp"

namespace plan_test {
namespace {

using switchyard::Error;
using switchyard::ErrorCode;
using switchyard::Layout;

class PlanParity : public testing::TestWithParam<Case> {};

TEST_P(PlanParity, A01_Handles) {
  const oracle::Problem p = make_problem(GetParam(), 11);
  const oracle::Expected expected = oracle::expect(p);
  const auto handles = make_handles(p, GetParam().wide, 3);
  for (int r = 0; r < p.world; ++r) {
    harness::Failures failures("rank " + std::to_string(r));
    harness::compare_handle(p, expected, r, *handles[static_cast<size_t>(r)], failures);
    EXPECT_EQ(failures.take(), std::vector<std::string>{});
  }
}

TEST_P(PlanParity, A01_Matrices) {
  const oracle::Problem p = make_problem(GetParam(), 12);
  const oracle::Expected expected = oracle::expect(p);
  const auto handles = make_handles(p, GetParam().wide, 0);
  for (int r = 0; r<p.world; r += p.world> 8 ? 7 : 1) {
    const auto& h = *handles[static_cast<size_t>(r)];
    EXPECT_EQ(dropped_at_capacity(h), expected.any_dropped);
    for (const int channels : {1, 3, 10, 64}) {
      if (p.layout == Layout::expert_major && expected.any_dropped) {
        EXPECT_THROW(make_matrices(h, channels), Error);
        continue;
      }
      harness::Failures failures("rank " + std::to_string(r) + " channels " + std::to_string(channels));
      harness::compare_matrices(p, expected, r, channels, make_matrices(h, channels), failures);
      EXPECT_EQ(failures.take(), std::vector<std::string>{});
    }
  }
}

TEST_P(PlanParity, A01_Ledger) {
  const oracle::Problem p = make_problem(GetParam(), 13);
  const oracle::Expected expected = oracle::expect(p);
  const auto handles = make_handles(p, GetParam().wide, 0);
  for (int r = 0; r < p.world; ++r) {
    const auto& h = *handles[static_cast<size_t>(r)];
    if (expected.any_dropped) {
      try {
        make_ledger(h);
        ADD_FAILURE() << "no error";
      } catch (const Error& e) {
        EXPECT_EQ(e.code(), ErrorCode::unsupported);
      }
      continue;
    }
    harness::Failures failures("rank " + std::to_string(r));
    harness::compare_ledger(p, r, make_ledger(h), failures);
    EXPECT_EQ(failures.take(), std::vector<std::string>{});
  }
}

INSTANTIATE_TEST_SUITE_P(All, PlanParity, testing::ValuesIn(all_cases()), [](const auto& c) { return to_string(c.param); });

}  // namespace
}  // namespace plan_test
