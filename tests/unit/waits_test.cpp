// SPDX-License-Identifier: Apache-2.0
// Tests which warps of a GPU poll host memory while they wait: never many at the same time, and each one repeatedly.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "protocol/call.hpp"

namespace switchyard::detail {
namespace {

class WarpsThatWait : public testing::TestWithParam<int> {};

TEST_P(WarpsThatWait, AskTheHostInTurn) {
  const int total = GetParam(), turns = std::max(total, 32);
  std::vector<int> asked(static_cast<size_t>(total), 0);
  for (int look = 1000; look < 1000 + 3 * turns; ++look) {
    int at_once = 0;
    for (int warp = 0; warp < total; ++warp) {
      if (!asks_host(look, warp, total)) continue;
      ++at_once;
      ++asked[static_cast<size_t>(warp)];
    }
    EXPECT_LE(at_once, 1) << "look " << look;
  }
  for (int warp = 0; warp < total; ++warp) EXPECT_EQ(asked[static_cast<size_t>(warp)], 3) << "warp " << warp;
}

INSTANTIATE_TEST_SUITE_P(Launches, WarpsThatWait, testing::Values(1, 2, 31, 32, 33, 672, 2112));

}  // namespace
}  // namespace switchyard::detail
