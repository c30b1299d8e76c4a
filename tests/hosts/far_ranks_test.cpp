// SPDX-License-Identifier: Apache-2.0
// Reports about ranks of other hosts are delivered in the order of their arrival, including those that arrived before the first
// query.
#include "bootstrap/mesh/far_ranks.hpp"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <vector>

#include "base/unique_fd.hpp"

namespace switchyard::detail {
namespace {

struct Heard final : FarSide {
  std::vector<uint64_t> calls_after(uint64_t, uint64_t& last) const override {
    last = 0;
    return {};
  }
  void heard_calls(int rank, uint64_t last, std::span<const uint64_t> words) override {
    EXPECT_EQ(rank, 1);
    EXPECT_EQ(words.size(), 1u);
    calls.push_back(last);
  }
  void heard_abort(uint64_t word) override { aborts.push_back(word); }
  void heard_leave(int) override {}
  std::vector<uint64_t> calls, aborts;
};

Frame pulse(uint64_t last) { return {FrameKind::pulse, 0, encode(Pulse{last, {100 + last}})}; }

class FarRanksTest : public testing::Test {
 protected:
  void SetUp() override {
    int fds[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    mine_.reset(fds[0]);
    theirs_.reset(fds[1]);
    far_.add(1, mine_.get());
  }
  UniqueFd mine_, theirs_;
  FarRanks far_{2};
  Heard heard_;
};

TEST_F(FarRanksTest, EarlyNewsComeBeforeLaterOnes) {
  EXPECT_TRUE(far_.take(1, pulse(1)));
  EXPECT_TRUE(far_.take(1, pulse(2)));
  EXPECT_TRUE(heard_.calls.empty());
  far_.set_side(&heard_);
  EXPECT_EQ(heard_.calls, (std::vector<uint64_t>{1, 2})) << "what came before is known once there is somebody to tell";
  EXPECT_TRUE(far_.take(1, pulse(3)));
  far_.beat();
  EXPECT_EQ(heard_.calls, (std::vector<uint64_t>{1, 2, 3}));
}

TEST_F(FarRanksTest, AnAbortIsNews) {
  EXPECT_TRUE(far_.take(1, {FrameKind::aborted, 0, encode(uint64_t{77})}));
  far_.set_side(&heard_);
  EXPECT_EQ(heard_.aborts, std::vector<uint64_t>{77});
}

TEST_F(FarRanksTest, MalformedNewsAreRefused) {
  far_.set_side(&heard_);
  EXPECT_FALSE(far_.take(1, {FrameKind::pulse, 0, Bytes(3)}));
  EXPECT_FALSE(far_.take(1, {FrameKind::aborted, 0, {}}));
  EXPECT_TRUE(heard_.calls.empty() && heard_.aborts.empty());
}

}  // namespace
}  // namespace switchyard::detail
