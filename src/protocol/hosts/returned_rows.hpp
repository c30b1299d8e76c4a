// SPDX-License-Identifier: Apache-2.0
// Rows returned over a rail in the rounds of a combine. Both ends compute the same values.
#pragma once

#include "plan/hosts.hpp"
#include "protocol/hosts/rounds.hpp"

namespace switchyard::detail {

/// Rows that one rank returns for an owner's tokens. Rows are `stride` bytes long and end with the token's weights if the owner
/// takes weights. A round covers `tokens_per_round` of the owner's tokens and contains their rows in order.
struct ReturnedRows {
  int64_t tokens = 0;  ///< of the owner
  int64_t tokens_per_round = 1;
  int64_t stride = 0;
  bool weights = false;
  /// Number of rows of all tokens before each token. Proxy: [count + 1], by number; owner: [T + 1], by token.
  const int64_t* rows_before = nullptr;
  std::byte* slots[kRoundSlots] = {};

  int64_t rounds() const { return (tokens + tokens_per_round - 1) / tokens_per_round; }
  int64_t first_token(int64_t k) const { return k * tokens_per_round < tokens ? k * tokens_per_round : tokens; }
  std::byte* slot(int64_t k) const { return slots[k % kRoundSlots]; }
};

/// Both directions of one rail.
struct ReturnRail {
  int peer = -1;
  bool is_proxy_of_peer = false;  ///< `out` is sent to the peer, for its tokens
  const CrossedTokens* crossed = nullptr;
  ReturnedRows out;
  bool peer_is_my_proxy = false;  ///< `in` is received from the peer
  ReturnedRows in;

  int64_t number(int64_t k) const { return crossed->first_from(out.first_token(k)); }
  int64_t out_bytes(int64_t k) const {
    return is_proxy_of_peer ? (out.rows_before[number(k + 1)] - out.rows_before[number(k)]) * out.stride : 0;
  }
  int64_t in_bytes(int64_t k) const {
    return peer_is_my_proxy ? (in.rows_before[in.first_token(k + 1)] - in.rows_before[in.first_token(k)]) * in.stride : 0;
  }
  PeerTransfer transfer(int64_t k) const {
    return {peer, {out.slot(k), static_cast<size_t>(out_bytes(k))}, {in.slot(k), static_cast<size_t>(in_bytes(k))}};
  }
};

/// Maximum size of a round in bytes.
template <class Bytes>
int64_t largest_round(int64_t rounds, Bytes&& bytes) {
  int64_t max = 0;
  for (int64_t k = 0; k < rounds; ++k) max = bytes(k) > max ? bytes(k) : max;
  return max;
}

}  // namespace switchyard::detail
