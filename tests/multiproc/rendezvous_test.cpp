// SPDX-License-Identifier: Apache-2.0
// The rendezvous under attacks and faults: strangers, impostors, broken ranks and corrupt bytes.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <deque>

#include "bootstrap/bootstrap.hpp"
#include "bootstrap/net/connection.hpp"
#include "bootstrap/net/socket.hpp"
#include "bootstrap/net/wire.hpp"
#include "multiproc/fork_ranks.hpp"
#include "multiproc/meeting.hpp"
#include "switchyard/status.hpp"

namespace switchyard {
namespace {

using namespace detail;
using namespace test;

/// Both ranks of a two-rank group join while a third process runs `intrude`.
std::vector<RankEnd> with_intruder(const std::string& kind,
                                   const std::function<void(ChildRank&, const std::string&)>& intrude) {
  const Place place(kind);
  ForkedRanks processes(3, [&](ChildRank& me) {
    if (me.rank() == 2) return intrude(me, place.store());
    if (me.rank() == 1) me.await("go");
    say_outcome(me, {me.rank(), 2, place.store(), "token"}, kLong);
  });
  EXPECT_TRUE(processes.wait_until_said(2, "done", kLong));
  processes.send(1, "go");
  return processes.finish(kLong);
}

class Intruders : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Stores, Intruders, testing::Values("path", "127.0.0.1"));

TEST_P(Intruders, WithAnotherTokenIsRefused) {
  // Over TCP, a rank cannot distinguish rank 0 from a stranger in its place, so it retries until its deadline.
  const bool at_once = GetParam() == "path";
  const auto ends = with_enough_time(
      [&](Milliseconds deadline) {
        return with_intruder(GetParam(), [&](ChildRank& me, const std::string& store) {
          say_outcome(me, {1, 2, store, "another token"}, at_once ? kLong : deadline);
          me.say("done");
        });
      },
      [](const std::vector<RankEnd>& all) { return got_no_answer(all[2]); });
  EXPECT_TRUE(said(ends[0], "joined")) << all_said(ends[0]);
  EXPECT_TRUE(said(ends[1], "joined")) << all_said(ends[1]);
  EXPECT_TRUE(said(ends[2], at_once ? "refused by rank 0" : "turned away before, without proof")) << all_said(ends[2]);
  EXPECT_TRUE(said(ends[2], "its job token is another one")) << all_said(ends[2]);
}

TEST_P(Intruders, WithAnotherWorldIsRefused) {
  const auto ends = with_intruder(GetParam(), [](ChildRank& me, const std::string& store) {
    say_outcome(me, {1, 3, store, "token"}, kLong);
    me.say("done");
  });
  EXPECT_TRUE(said(ends[1], "joined")) << all_said(ends[1]);
  EXPECT_TRUE(said(ends[2], "expects 3 ranks and rank 0 expects 2")) << all_said(ends[2]);
}

TEST_P(Intruders, GarbageIsIgnored) {
  const auto ends = with_intruder(GetParam(), [](ChildRank& me, const std::string& store) {
    for (int i = 0; i < 20; ++i) {
      const UniqueFd fd = knock(store);
      std::vector<std::byte> garbage(static_cast<size_t>(1 + i * 997));
      fill_random(garbage);
      send_some(fd.get(), garbage);
    }
    const std::string request = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
    const UniqueFd fd = knock(store);
    send_some(fd.get(), std::as_bytes(std::span(request)));
    me.say("done");
    ::usleep(200000);  // while the others are joining
  });
  EXPECT_TRUE(said(ends[0], "joined")) << all_said(ends[0]);
  EXPECT_TRUE(said(ends[1], "joined")) << all_said(ends[1]);
}

TEST_P(Intruders, SilenceHoldsNobodyUp) {
  // More connections than rank 0 serves at a time plus its backlog are opened and stay open until the end. The ranks must join
  // without waiting for a handshake deadline of these connections: none of them is refused because it did not identify itself
  // within that deadline. A loaded machine may need longer than that deadline to open them.
  bool waited = true;
  for (int attempt = 0; attempt < 3 && waited; ++attempt) {
    const Place place(GetParam());
    ForkedRanks processes(3, [&](ChildRank& me) {
      if (me.rank() == 2) {
        std::deque<Connection> held;
        for (int i = 0; i < 700; ++i) held.emplace_back(knock(place.store()), kMaxHandshakeBytes);
        me.say("done");
        me.await("end");
        for (Connection& connection : held) {
          connection.receive();
          while (const auto frame = connection.take())
            if (frame->kind == FrameKind::refusal) return me.say("refused");
        }
        return;
      }
      if (me.rank() == 1) me.await("go");
      say_outcome(me, {me.rank(), 2, place.store(), "token"}, kLong);
    });
    ASSERT_TRUE(processes.wait_until_said(2, "done", kLong));
    processes.send(1, "go");
    EXPECT_TRUE(processes.wait_until_said(1, "joined", kLong));
    EXPECT_TRUE(processes.wait_until_said(0, "joined", kLong));
    processes.send(2, "end");
    const auto ends = processes.finish(kLong);
    expect_ok(ends);
    waited = said(ends[2], "refused");
  }
  EXPECT_FALSE(waited) << "a handshake deadline has passed in each attempt";
}

/// Before rank 0 listens, strangers occupy its address and send messages that only rank 0 may send: that a rank is rejected,
/// that everything has failed, or that a rank is admitted.
TEST(Rendezvous, AStrangerInThePlaceOfRankZeroEndsNobody) {
  const Place place("127.0.0.1");
  ForkedRanks ranks(3, [&](ChildRank& me) {
    if (me.rank() < 2) {
      if (me.rank() == 0) me.await("go");
      return say_outcome(me, {me.rank(), 2, place.store(), "token"}, kLong);
    }
    for (int lie = 0; lie < 6; ++lie) {
      Listener listener = listen_at(parse_endpoint(place.store()), Deadline(kLong));
      std::optional<Listener::Accepted> accepted;
      while (!(accepted = listener.accept())) ::usleep(1000);
      Connection connection(std::move(accepted->fd), kMaxHandshakeBytes);
      if (lie == 0) connection.queue(FrameKind::refusal, encode(Refusal{"before any greeting", {}}));
      if (lie == 1) connection.queue(FrameKind::failure, encode(Failure{-1, 0, "before any greeting"}));
      connection.queue(FrameKind::greeting, encode(Greeting{}));
      connection.flush();
      std::optional<Frame> hello;
      while (connection.receive() && !(hello = connection.take())) ::usleep(1000);
      if (lie == 2) connection.queue(FrameKind::refusal, encode(Refusal{"go away", {}}));
      if (lie == 3) connection.queue(FrameKind::failure, encode(Failure{0, 0, "all is lost"}));
      if (lie == 4) connection.queue(FrameKind::progress, encode(Progress{3, 0}));
      if (lie == 5) connection.queue(FrameKind::welcome, encode(Welcome{}));
      connection.flush();
      while (connection.receive()) ::usleep(1000);  // until the rank leaves
    }
    me.say("done");
  });
  ASSERT_TRUE(ranks.wait_until_said(2, "done", kLong));
  ranks.send(0, "go");
  const auto ends = ranks.finish(kLong);
  for (size_t r = 0; r < 2; ++r) EXPECT_TRUE(said(ends[r], "joined")) << r << ": " << all_said(ends[r]);
}

/// Ranks meet at the address derived from a launcher's variables, in a folder that is created if necessary.
TEST(Rendezvous, RanksMeetAtTheDerivedPlace) {
  const std::string run = random_token();
  const auto ends = run_ranks(2, [&](ChildRank& me) {
    const std::string rank = std::to_string(me.rank());
    const JoinSpec spec = join_spec_from_environment([&](const char* name) -> const char* {
      const std::string variable = name;
      if (variable == "RANK") return rank.c_str();
      if (variable == "WORLD_SIZE" || variable == "LOCAL_WORLD_SIZE") return "2";
      if (variable == "MASTER_ADDR") return "here";
      if (variable == "MASTER_PORT") return "29500";
      return variable == "TORCHELASTIC_RUN_ID" ? run.c_str() : nullptr;
    });
    me.say(spec.store);
    say_outcome(me, spec, kLong);
  });
  for (const RankEnd& end : ends) EXPECT_TRUE(said(end, "joined")) << all_said(end);
  struct stat info;
  EXPECT_NE(::lstat(ends[0].said.front().substr(5).c_str(), &info), 0) << "the socket is still there";
}

TEST(Rendezvous, AFolderOpenToOthersIsNotUsed) {
  const Place place("path");
  const std::string folder = place.path().substr(0, place.path().rfind('/'));
  ASSERT_EQ(::chmod(folder.c_str(), 0777), 0);
  const auto ends = run_ranks(1, [&](ChildRank& me) { say_outcome(me, {0, 2, place.store(), "token", folder}, kLong); });
  EXPECT_TRUE(said(ends[0], "closed to others")) << all_said(ends[0]);
}

/// Implements the protocol by hand for a rank that has the token.
class HandMadeRank {
 public:
  HandMadeRank(const std::string& store, int rank, int world) : connection_(knock(store), kMaxHandshakeBytes) {
    const auto greeting = decode_greeting(wait_for(FrameKind::greeting).payload);
    Hello hello;
    hello.rank = rank;
    hello.world = world;
    hello.host = this_host();
    hello.mesh_name = "switchyard-test-" + random_token();
    hello.proof = prove(hello, "token", greeting.value().nonce);
    connection_.queue(FrameKind::hello, encode(hello));
    connection_.flush();
  }
  Frame wait_for(FrameKind kind) {
    for (;;) {
      const bool open = connection_.receive();
      while (auto frame = connection_.take()) {
        if (frame->kind == kind) return *frame;
      }
      if (!open) throw std::runtime_error("the store closed the connection");
      ::usleep(1000);
    }
  }
  Connection& connection() { return connection_; }

 private:
  Connection connection_;
};

TEST(Rendezvous, TheSecondOfTwoEqualRanksIsRefusedAndTheFirstStays) {
  const Place place("abstract");
  ForkedRanks processes(4, [&](ChildRank& me) {  // ranks 0, 1 and 2 of 3, and a second rank 1
    if (me.rank() == 1) {
      HandMadeRank first(place.store(), 1, 3);
      while (decode_progress(first.wait_for(FrameKind::progress).payload).value().arrived != 0b011) continue;
      me.say("counted");
      while (decode_progress(first.wait_for(FrameKind::progress).payload).value().arrived != 0b111) continue;
      me.say("all here");
      return;
    }
    if (me.rank() != 0) me.await("go");
    say_outcome(me, {me.rank() == 3 ? 1 : me.rank(), 3, place.store(), "token"}, kLong);
  });
  ASSERT_TRUE(processes.wait_until_said(1, "counted", kLong));
  processes.send(3, "go");
  ASSERT_TRUE(processes.wait_until_ended(3, kLong));
  processes.send(2, "go");
  EXPECT_TRUE(processes.wait_until_said(1, "all here", kLong));
  const auto ends = processes.finish(kLong);
  EXPECT_TRUE(said(ends[3], "rank 1 is here already")) << all_said(ends[3]);
}

/// Two processes join as rank 0 while ranks 1 and 2 are missing; both are notified of each other long before the deadline.
TEST(Rendezvous, TwoRanksZeroEndEachOther) {
  for (const char* const kind : {"path", "abstract", "127.0.0.1"}) {
    const Place place(kind);
    const auto ends = run_ranks(2, [&](ChildRank& me) { say_outcome(me, {0, 3, place.store(), "token"}, kLong); });
    for (const RankEnd& end : ends) EXPECT_TRUE(said(end, "rank 0 is taken twice, by process ")) << all_said(end);
  }
}

/// A rank 0 from another job waits until the address becomes free.
TEST(Rendezvous, ARankZeroOfAnotherJobComesNext) {
  for (const char* const kind : {"path", "127.0.0.1"}) {
    const Place place(kind);
    ForkedRanks processes(4, [&](ChildRank& me) {
      const bool first = me.rank() < 2;
      if (me.rank() != 0) me.await("go");
      say_outcome(me, {me.rank() % 2, 2, place.store(), first ? "token" : "another token"}, kLong);
    });
    knock(place.store());  // the first rank 0 listens
    processes.send(2, "go");
    ::usleep(200000);  // the second one finds the address occupied; otherwise this test shows less
    processes.send(1, "go");
    ASSERT_TRUE(processes.wait_until_ended(0, kLong));
    processes.send(3, "go");
    const auto ends = processes.finish(kLong);
    for (const RankEnd& end : ends) EXPECT_TRUE(said(end, "joined")) << all_said(end);
  }
}

TEST(Rendezvous, RefusalsAreToldAtTheDeadline) {
  const auto ends = with_enough_time(
      [](Milliseconds deadline) {
        const Place place("path");
        return run_ranks(2, [&](ChildRank& me) {
          say_outcome(me, {me.rank(), 2, place.store(), me.rank() == 0 ? "token" : "tokem"}, deadline);
        });
      },
      [](const std::vector<RankEnd>& all) { return said(all[1], "missing 0 "); });
  EXPECT_TRUE(said(ends[0], "missing 1 ")) << all_said(ends[0]);
  EXPECT_TRUE(said(ends[0], "its job token is another one")) << all_said(ends[0]);
}

TEST(Rendezvous, ARankKilledBeforeTheOthersComeMayComeAgain) {
  const Place place("path");
  ForkedRanks processes(4, [&](ChildRank& me) {  // 3 is a restarted rank 1
    if (me.rank() == 1) {
      HandMadeRank(place.store(), 1, 3).wait_for(FrameKind::progress);
      me.say("counted");
      me.await("never");
    }
    if (me.rank() >= 2) me.await("go");
    say_outcome(me, {me.rank() == 3 ? 1 : me.rank(), 3, place.store(), "token"}, kLong);
  });
  ASSERT_TRUE(processes.wait_until_said(1, "counted", kLong));
  processes.kill(1);
  ASSERT_TRUE(processes.wait_until_ended(1, kLong));
  processes.send(3, "go");
  processes.send(2, "go");
  const auto ends = processes.finish(kLong);
  for (const size_t r : {0, 2, 3}) EXPECT_TRUE(said(ends[r], "joined")) << r << ": " << all_said(ends[r]);
}

TEST(Rendezvous, AStaleSocketFileIsReplacedAndAnotherFileIsNot) {
  const Place place("path");
  ForkedRanks first(2, [&](ChildRank& me) {
    if (me.rank() == 0) say_outcome(me, {0, 2, place.store(), "token"}, kLong);
    if (me.rank() == 1) {
      knock(place.store());
      me.say("it listens");
      me.await("never");
    }
  });
  ASSERT_TRUE(first.wait_until_said(1, "it listens", kLong));
  first.kill(0);
  first.kill(1);
  first.finish(kLong);
  struct stat info;
  ASSERT_EQ(::stat(place.path().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  const auto ends = run_ranks(2, [&](ChildRank& me) { say_outcome(me, {me.rank(), 2, place.store(), "token"}, kLong); });
  for (const RankEnd& end : ends) EXPECT_TRUE(said(end, "joined")) << all_said(end);

  const UniqueFd file(::open(place.path().c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
  ASSERT_TRUE(file);
  const auto refused = run_ranks(1, [&](ChildRank& me) { say_outcome(me, {0, 2, place.store(), "token"}, kLong); });
  EXPECT_TRUE(said(refused[0], "exists and is not a socket")) << all_said(refused[0]);
  EXPECT_EQ(::stat(place.path().c_str(), &info), 0) << "it removed a file that is not its own";
}

TEST(Rendezvous, ARankThatDiesWhileTheRanksConnectIsNamedToAll) {
  // Rank 3 arrives, receives the roster, and ends without connecting to any rank. No rank may wait for the deadline.
  const Place place("127.0.0.1");
  const auto ends = run_ranks(4, [&](ChildRank& me) {
    if (me.rank() < 3) return say_outcome(me, {me.rank(), 4, place.store(), "token"}, kLong);
    HandMadeRank(place.store(), 3, 4).wait_for(FrameKind::roster);
  });
  for (size_t r = 0; r < 3; ++r) EXPECT_TRUE(said(ends[r], "failed 3")) << r << ": " << all_said(ends[r]);
}

TEST(Rendezvous, AllRanksBlameTheSameOne) {
  // Rank 1 claims that rank 3 failed, and does not listen. Rank 2, which finds rank 1 gone, may report this to rank 0 before or
  // after that claim; it then blames the same rank as rank 0.
  for (int round = 0; round < 50; ++round) {
    const Place place("path");
    const auto ends = run_ranks(4, [&](ChildRank& me) {
      if (me.rank() % 2 == 0) return say_outcome(me, {me.rank(), 4, place.store(), "token"}, kLong);
      HandMadeRank rank(place.store(), me.rank(), 4);
      rank.wait_for(FrameKind::roster);
      if (me.rank() == 3) return;
      rank.connection().queue(FrameKind::failure, encode(Failure{3, 0, "rank 3 failed"}));
      rank.connection().flush();
    });
    const bool blames_1 = said(ends[0], "failed 1");
    EXPECT_TRUE(blames_1 || said(ends[0], "failed 3")) << all_said(ends[0]);
    EXPECT_TRUE(said(ends[2], blames_1 ? "failed 1" : "failed 3")) << all_said(ends[2]) << all_said(ends[0]);
  }
}

TEST(Rendezvous, ARankThatNeverConnectsIsMissedAtTheDeadline) {
  const auto ends = with_enough_time(
      [](Milliseconds deadline) {
        const Place place("path");
        ForkedRanks ranks(3, [&](ChildRank& me) {
          if (me.rank() < 2)
            return say_outcome(me, {me.rank(), 3, place.store(), "token"}, me.rank() == 0 ? deadline : 2 * deadline);
          HandMadeRank rank(place.store(), 2, 3);
          rank.wait_for(FrameKind::roster);
          me.await("end");
        });
        EXPECT_TRUE(ranks.wait_until_ended(0, kLong));
        EXPECT_TRUE(ranks.wait_until_ended(1, kLong));
        ranks.kill(2);  // it may still look for a rank 0
        return ranks.finish(kLong);
      },
      [](const std::vector<RankEnd>& all) { return said(all[0], "did not come to"); });
  for (size_t r = 0; r < 2; ++r) EXPECT_TRUE(said(ends[r], "2 ")) << r << ": " << all_said(ends[r]);
  EXPECT_TRUE(said(ends[0], "did not connect to all others")) << all_said(ends[0]);
}

TEST(Rendezvous, AServerWithoutTheTokenIsNotBelieved) {
  // Follows the protocol in everything except the proof.
  const auto lie = [](ChildRank& me, const std::string& store) {
    Listener listener = listen_at(parse_endpoint(store), Deadline(kLong));
    for (;;) {
      auto accepted = listener.accept();
      if (!accepted) {
        ::usleep(1000);
        continue;
      }
      Connection connection(std::move(accepted->fd), kMaxHandshakeBytes);
      connection.queue(FrameKind::greeting, encode(Greeting{}));
      connection.flush();
      std::optional<Frame> hello;
      while (connection.receive() && !(hello = connection.take())) ::usleep(1000);
      if (!hello) continue;  // its deadline has passed
      const Nonce nonce = decode_hello(hello->payload).value().nonce;
      connection.queue(FrameKind::welcome, encode(Welcome{prove(Welcome{}, "a guess", nonce)}));
      connection.queue(FrameKind::progress, encode(Progress{3, 0}));
      Roster roster;
      roster.mesh_names = {"switchyard-test-" + random_token(), "x"};
      roster.proof = prove(roster, "a guess", nonce);
      connection.queue(FrameKind::roster, encode(roster));
      connection.flush();
      me.say("lied");
    }
  };
  const auto ends = with_enough_time(
      [&](Milliseconds deadline) {
        const Place place("path");
        ForkedRanks ranks(2, [&](ChildRank& me) {
          if (me.rank() == 1) return say_outcome(me, {1, 2, place.store(), "token"}, deadline);
          lie(me, place.store());
        });
        EXPECT_TRUE(ranks.wait_until_ended(1, kLong));
        ranks.kill(0);
        return ranks.finish(kLong);
      },
      [](const std::vector<RankEnd>& all) { return got_no_answer(all[1]); });
  EXPECT_TRUE(said(ends[0], "lied"));
  EXPECT_TRUE(said(ends[1], "missing 0 ")) << all_said(ends[1]);
  EXPECT_TRUE(said(ends[1], "does not know the job token")) << all_said(ends[1]);
}

TEST(Rendezvous, AnotherServiceAtThePortIsNotMistakenForRankZero) {
  const auto serve_mail = [](const std::string& store) {
    Listener listener = listen_at(parse_endpoint(store), Deadline(kLong));
    for (;;) {
      if (auto accepted = listener.accept()) {
        const std::string banner = "220 mail.example.org ESMTP, talk to me now please\r\n";
        send_some(accepted->fd.get(), std::as_bytes(std::span(banner)));
        ::usleep(50000);
      }
      ::usleep(1000);
    }
  };
  const auto ends = with_enough_time(
      [&](Milliseconds deadline) {
        const Place place("127.0.0.1");
        ForkedRanks ranks(2, [&](ChildRank& me) {
          if (me.rank() == 0) serve_mail(place.store());
          say_outcome(me, {1, 2, place.store(), "token"}, deadline);
        });
        EXPECT_TRUE(ranks.wait_until_ended(1, kLong));
        return ranks.finish(Milliseconds{0});
      },
      [](const std::vector<RankEnd>& all) { return got_no_answer(all[1]); });
  EXPECT_TRUE(said(ends[1], "missing 0 ")) << all_said(ends[1]);
  EXPECT_TRUE(said(ends[1], "does not speak this protocol")) << all_said(ends[1]);
}

TEST(Rendezvous, StrangersInTheMeshAreIgnored) {
  // Rank 2 has the addresses of the others. Before it connects, it exposes them to silence, garbage, and every kind of invalid
  // hello.
  const Place place("path");
  ForkedRanks ranks(3, [&](ChildRank& me) {
    if (me.rank() < 2) {
      const auto link = connect_processes({me.rank(), 3, place.store(), "token"}, kLong);
      me.say("joined");
      return me.await("end");
    }
    HandMadeRank rank(place.store(), 2, 3);
    const Roster roster = decode_roster(rank.wait_for(FrameKind::roster).payload).value();
    std::deque<Connection> held;
    for (int to = 0; to < 2; ++to) {
      const auto connect = [&]() -> Connection& {
        return held.emplace_back(knock("unix:@" + roster.mesh_names[static_cast<size_t>(to)]), kMaxHandshakeBytes);
      };
      const auto greet = [&](Connection& connection, MeshHello hello, const std::string& token) {
        hello.proof = prove(hello, token);
        connection.queue(FrameKind::mesh_hello, encode(hello));
        return connection.flush();
      };
      connect();
      std::vector<std::byte> garbage(5000);
      fill_random(garbage);
      send_some(connect().fd(), garbage);
      me.require(greet(connect(), {2, to, roster.session, {}}, "a guess"), "send");
      me.require(greet(connect(), {2, to, Nonce{}, {}}, "token"), "of another rendezvous");
      me.require(greet(connect(), {2, 1 - to, roster.session, {}}, "token"), "meant for another rank");
      me.require(greet(connect(), {3, to, roster.session, {}}, "token"), "from no rank");
      me.require(greet(connect(), {to, to, roster.session, {}}, "token"), "from itself");
      Connection& second = connect();
      me.require(greet(connect(), {2, to, roster.session, {}}, "token"), "the right one");
      greet(second, {2, to, roster.session, {}}, "token");  // once more; the listener may already be closed
    }
    rank.connection().queue(FrameKind::ready);
    rank.connection().flush();
    rank.wait_for(FrameKind::go);
    me.say("joined");
    me.await("end");
  });
  for (int r = 0; r < 3; ++r) EXPECT_TRUE(ranks.wait_until_said(r, "joined", kLong)) << r;
  ranks.send_to_all("end");
  expect_ok(ranks.finish(kLong));
}

}  // namespace
}  // namespace switchyard
