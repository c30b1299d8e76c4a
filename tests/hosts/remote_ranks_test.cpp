// SPDX-License-Identifier: Apache-2.0
// Reports about ranks on other hosts are delivered in order of arrival, including reports that arrived before the first query.
#include "bootstrap/mesh/remote_ranks.hpp"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <vector>

#include "base/unique_fd.hpp"

namespace switchyard::detail {
namespace {

struct Heard final : RemoteObserver {
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

class RemoteRanksTest : public testing::Test {
 protected:
  void SetUp() override {
    int fds[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    mine_.reset(fds[0]);
    theirs_.reset(fds[1]);
    remote_.add(1, mine_.get());
  }
  UniqueFd mine_, theirs_;
  RemoteRanks remote_{2};
  Heard heard_;
};

TEST_F(RemoteRanksTest, EarlyNewsComeBeforeLaterOnes) {
  EXPECT_TRUE(remote_.take(1, pulse(1)));
  EXPECT_TRUE(remote_.take(1, pulse(2)));
  EXPECT_TRUE(heard_.calls.empty());
  remote_.set_side(&heard_);
  EXPECT_EQ(heard_.calls, (std::vector<uint64_t>{1, 2})) << "what came before is known once there is somebody to tell";
  EXPECT_TRUE(remote_.take(1, pulse(3)));
  remote_.beat();
  EXPECT_EQ(heard_.calls, (std::vector<uint64_t>{1, 2, 3}));
}

TEST_F(RemoteRanksTest, AnAbortIsNews) {
  EXPECT_TRUE(remote_.take(1, {FrameKind::aborted, 0, encode(uint64_t{77})}));
  remote_.set_side(&heard_);
  EXPECT_EQ(heard_.aborts, std::vector<uint64_t>{77});
}

TEST_F(RemoteRanksTest, MalformedNewsAreRefused) {
  remote_.set_side(&heard_);
  EXPECT_FALSE(remote_.take(1, {FrameKind::pulse, 0, Bytes(3)}));
  EXPECT_FALSE(remote_.take(1, {FrameKind::aborted, 0, {}}));
  EXPECT_TRUE(heard_.calls.empty() && heard_.aborts.empty());
}

}  // namespace
}  // namespace switchyard::detail
