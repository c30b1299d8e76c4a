// SPDX-License-Identifier: Apache-2.0
// The launcher of ranks as processes: messages arrive whole and in order, and each kind of end is recorded.
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <stdexcept>
#include <string>
#include <vector>

#include "launch/forked_ranks.hpp"

namespace switchyard::launch {
namespace {

using namespace std::chrono_literals;

TEST(ForkedRanks, MessagesAreAnyBytes) {
  const std::string bytes("a\nb\0!c", 6), large(size_t{3} << 20, 'x');
  const auto ends = run_ranks(2, [&](ChildRank& me) {
    me.say(bytes);
    me.say("");
    if (me.rank() == 1) me.say(large);
  });
  EXPECT_EQ(ends[0].said, (std::vector<std::string>{bytes, ""}));
  EXPECT_EQ(ends[1].said, (std::vector<std::string>{bytes, "", large}));
}

TEST(ForkedRanks, FinishPassesMessagesOnInsteadOfKeepingThem) {
  std::vector<std::string> heard;
  const auto ends = run_ranks(
      1, [](ChildRank& me) { me.say("one"), me.say("two"); }, 60s,
      [&](int rank, std::string&& message) { heard.push_back(std::to_string(rank) + message); });
  EXPECT_EQ(heard, (std::vector<std::string>{"0one", "0two"}));
  EXPECT_TRUE(ends[0].said.empty());
  EXPECT_TRUE(ends[0].ok());
}

TEST(ForkedRanks, EveryKindOfEndIsRecorded) {
  ForkedRanks ranks(5, [](ChildRank& me) {
    if (me.rank() == 1) throw std::runtime_error("two\nlines");
    if (me.rank() == 2) ::_exit(0);  // must not count as a body that returned
    if (me.rank() == 3) ::raise(SIGKILL);
    if (me.rank() == 4) me.await("never");
  });
  for (int r = 0; r < 4; ++r) ASSERT_TRUE(ranks.wait_until_ended(r, 60s)) << r;
  const auto ends = ranks.finish(0ms);
  EXPECT_TRUE(ends[0].ok()) << ends[0];
  EXPECT_EQ(ends[1].exit_code, 1);
  EXPECT_EQ(ends[1].error, "two\nlines");
  EXPECT_EQ(ends[2].exit_code, 0);
  EXPECT_FALSE(ends[2].ok()) << ends[2];
  EXPECT_EQ(ends[3].signal, SIGKILL);
  EXPECT_FALSE(ends[3].overdue);
  EXPECT_TRUE(ends[4].overdue);
  for (size_t r = 1; r < ends.size(); ++r) EXPECT_FALSE(ends[r].ok()) << ends[r];
}

TEST(ForkedRanks, AnotherMessageThanTheAwaitedOneIsAnError) {
  ForkedRanks ranks(1, [](ChildRank& me) {
    me.await("first");
    me.await("second");
  });
  ranks.send_to_all("first");
  ranks.send_to_all("third");
  EXPECT_EQ(ranks.finish(60s)[0].error, "received 'third', expected 'second'");
}

}  // namespace
}  // namespace switchyard::launch
