// SPDX-License-Identifier: Apache-2.0
// Rounds whose bytes are determined by (sender, receiver, round), for testing any carrier.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "arch/cpu/polite_wait.hpp"
#include "carrier/carrier.hpp"

namespace switchyard::detail::carrier_rounds {

using Bytes = std::vector<std::byte>;

/// Waits until the round is no longer in flight.
inline RoundStatus finish(Carrier& carrier, uint64_t round) {
  RoundStatus status;
  for (int64_t polls = 0; (status = carrier.advance(round)).state == RoundState::in_progress; ++polls) polite_wait(polls);
  return status;
}

/// Number of bytes that rank `from` sends to rank `to` in a round. Sizes differ by direction; some are zero, and some exceed
/// any socket buffer.
inline size_t bytes_of(int from, int to, uint64_t round) {
  const uint64_t n = static_cast<uint64_t>(from) * 7 + static_cast<uint64_t>(to) * 3 + round;
  return n % 5 == 0 ? 0 : n % 11 == 3 ? size_t{3} << 20 : static_cast<size_t>(n * 977 % 5000 + 1);
}
inline std::byte value_of(int from, int to, uint64_t round, size_t i) {
  return static_cast<std::byte>((static_cast<uint64_t>(from) * 31 + static_cast<uint64_t>(to) * 17 + round * 5 + i) % 251);
}
inline Bytes content(int from, int to, uint64_t round) {
  Bytes bytes(bytes_of(from, to, round));
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = value_of(from, to, round, i);
  return bytes;
}

/// Runs all rounds of one rank with `peers`, with three rounds in flight at a time.
inline void exchange_with(Carrier& carrier, int rank, const std::vector<int>& peers, uint64_t rounds) {
  struct Round {
    std::vector<Bytes> out, in;
  };
  std::vector<Round> slots(3);
  const auto check = [&](uint64_t n) {
    ASSERT_EQ(finish(carrier, n + 100).state, RoundState::done);
    for (size_t i = 0; i < peers.size(); ++i)
      ASSERT_EQ(slots[n % 3].in[i], content(peers[i], rank, n)) << "round " << n << " from " << peers[i];
  };
  for (uint64_t n = 0; n < rounds; ++n) {
    if (n >= 3) check(n - 3);
    Round& slot = slots[n % 3];
    slot = {};
    for (const int peer : peers) {
      slot.out.push_back(content(rank, peer, n));
      slot.in.emplace_back(bytes_of(peer, rank, n));
    }
    std::vector<PeerTransfer> transfers;
    for (size_t i = 0; i < peers.size(); ++i) transfers.push_back({peers[i], slot.out[i], slot.in[i]});
    carrier.post(n + 100, transfers, nullptr);
  }
  for (uint64_t n = rounds > 3 ? rounds - 3 : 0; n < rounds; ++n) check(n);
}
/// Runs all rounds of one rank with all other ranks.
inline void exchange(Carrier& carrier, int rank, int world, uint64_t rounds) {
  std::vector<int> peers;
  for (int peer = 0; peer < world; ++peer)
    if (peer != rank) peers.push_back(peer);
  exchange_with(carrier, rank, peers, rounds);
}

}  // namespace switchyard::detail::carrier_rounds
