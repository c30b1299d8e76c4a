// SPDX-License-Identifier: Apache-2.0
// The contract of carriers, tested on the built-in carrier: rounds arrive complete and in order, nothing blocks, and a rank
// that breaks a round is named.
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "carrier/sockets.hpp"
#include "switchyard/status.hpp"
#include "unit/carrier/carrier_rounds.hpp"

namespace switchyard::detail {
namespace {

using carrier_rounds::Bytes, carrier_rounds::exchange, carrier_rounds::finish;

/// Creates ranks 0 to n - 1, each connected to every other.
std::vector<std::unique_ptr<Carrier>> make_ranks(int n) {
  std::vector<std::vector<CarrierSocket>> sockets(static_cast<size_t>(n));
  for (int a = 0; a < n; ++a)
    for (int b = a + 1; b < n; ++b) {
      int ends[2];
      EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
      sockets[static_cast<size_t>(a)].push_back({b, UniqueFd(ends[0])});
      sockets[static_cast<size_t>(b)].push_back({a, UniqueFd(ends[1])});
    }
  std::vector<std::unique_ptr<Carrier>> ranks;
  for (auto& of_rank : sockets) ranks.push_back(make_socket_carrier(std::move(of_rank)));
  return ranks;
}

TEST(Carrier, RoundsComeWholeAndInOrder) {
  for (const int world : {2, 3, 4}) {
    auto ranks = make_ranks(world);
    std::vector<std::thread> threads;
    for (int r = 0; r < world; ++r) threads.emplace_back([&, r] { exchange(*ranks[static_cast<size_t>(r)], r, world, 40); });
    for (auto& thread : threads) thread.join();
  }
}

TEST(Carrier, NeverWaitsAndNamesTheAwaitedPeer) {
  auto ranks = make_ranks(3);
  const Bytes out(size_t{8} << 20);
  Bytes in(16);
  const PeerTransfer transfers[] = {{1, out, {}}, {2, {}, in}};
  ranks[0]->post(1, transfers, nullptr);  // more than the socket accepts, and the peer does not read
  const RoundStatus status = ranks[0]->advance(1);
  EXPECT_EQ(status.state, RoundState::in_progress);
  EXPECT_EQ(status.peer, 1);
  EXPECT_EQ(ranks[0]->advance(0).state, RoundState::done) << "an earlier round has no legs";
  Bytes theirs(out.size());
  const PeerTransfer receiving[] = {{0, {}, theirs}};
  ranks[1]->post(7, receiving, nullptr);  // each rank may number its rounds freely
  for (bool here = false, there = false; !here || !there;) {
    here = here || ranks[1]->advance(7).state == RoundState::done;
    there = there || ranks[0]->advance(1).peer == 2;
  }
  EXPECT_EQ(ranks[0]->advance(1).state, RoundState::in_progress) << "rank 2 has sent nothing";
  const Bytes last(16, std::byte{9});
  const PeerTransfer sending[] = {{0, last, {}}};
  ranks[2]->post(1, sending, nullptr);
  EXPECT_EQ(finish(*ranks[2], 1).state, RoundState::done);
  EXPECT_EQ(finish(*ranks[0], 1).state, RoundState::done);
  EXPECT_EQ(in, last);
}

TEST(Carrier, OtherSizesAreUnlike) {
  auto ranks = make_ranks(2);
  const Bytes out(100);
  Bytes in(99);
  const PeerTransfer sending[] = {{1, out, {}}}, receiving[] = {{0, {}, in}};
  ranks[0]->post(1, sending, nullptr);
  ranks[1]->post(1, receiving, nullptr);
  (void)finish(*ranks[0], 1);
  const RoundStatus status = finish(*ranks[1], 1);
  EXPECT_EQ(status.state, RoundState::unlike);
  EXPECT_EQ(status.peer, 0);
  EXPECT_EQ(ranks[1]->advance(0).state, RoundState::unlike) << "what came before cannot be told from what did not";
}

TEST(Carrier, APeerThatIsGoneIsNamed) {
  auto ranks = make_ranks(3);
  const Bytes out(40, std::byte{5});
  Bytes in(40);
  const PeerTransfer sending[] = {{0, out, {}}};
  ranks[1]->post(1, sending, nullptr);
  EXPECT_EQ(finish(*ranks[1], 1).state, RoundState::done);
  ranks[1].reset();
  const PeerTransfer receiving[] = {{1, {}, in}};
  ranks[0]->post(1, receiving, nullptr);
  EXPECT_EQ(finish(*ranks[0], 1).state, RoundState::done) << "what it sent before is there";
  EXPECT_EQ(in, out);
  ranks[0]->post(2, receiving, nullptr);
  const RoundStatus status = finish(*ranks[0], 2);
  EXPECT_EQ(status.state, RoundState::broken);
  EXPECT_EQ(status.peer, 1);
  const PeerTransfer nowhere[] = {{7, out, {}}};
  ranks[2]->post(1, nowhere, nullptr);
  EXPECT_EQ(ranks[2]->advance(1).peer, 7) << "no connection leads there";
}

TEST(Carrier, AbortEndsRoundsHereAndThere) {
  auto ranks = make_ranks(2);
  Bytes in(8), theirs(8);
  const PeerTransfer mine[] = {{1, {}, in}}, other[] = {{0, {}, theirs}};
  ranks[0]->post(1, mine, nullptr);
  ranks[1]->post(1, other, nullptr);
  std::thread aborting([&] { ranks[0]->abort(); });
  EXPECT_EQ(finish(*ranks[0], 1).state, RoundState::broken);
  const RoundStatus status = finish(*ranks[1], 1);
  EXPECT_EQ(status.state, RoundState::broken);
  EXPECT_EQ(status.peer, 0);
  aborting.join();
}

TEST(Carrier, ADescriptorThatIsNoneIsRefused) {
  std::vector<CarrierSocket> sockets;
  sockets.push_back({3, UniqueFd()});
  try {
    (void)make_socket_carrier(std::move(sockets));
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::system);
    EXPECT_NE(std::string(error.what()).find("rank 3"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace switchyard::detail
