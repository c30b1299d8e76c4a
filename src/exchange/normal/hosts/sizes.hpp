// SPDX-License-Identifier: Apache-2.0
// Sizes of normal mode's messages between hosts, for both backends.
#pragma once

#include <algorithm>

#include "bootstrap/host_map.hpp"
#include "carrier/carrier.hpp"
#include "protocol/hosts/combine.hpp"
#include "protocol/hosts/dispatch.hpp"

namespace switchyard::detail {

inline uint64_t ranks_as_bits(const HostMap& map, int host) {
  uint64_t ranks = 0;
  for (const int r : map.ranks_of(host)) ranks |= uint64_t{1} << r;
  return ranks;
}

/// `places`: maximum places per token on the destination host. `weights`: whether rows cross with weights.
inline CrossingLayout crossing_layout(const MoveShape& s, int places, bool weights) {
  return {s.topk,      places,       s.with_records, s.layout == Layout::expert_major, weights && s.with_records,
          s.row_bytes, s.scale_bytes};
}

/// Rounds of an owner's tokens, identical at both ends. A round is about `round_bytes` long if every token has the maximum
/// number of rows.
inline ReturnedTokens returned_tokens(const SumShape& s, const HostMap& map, int64_t round_bytes, int64_t tokens) {
  ReturnedTokens rows;
  rows.kind = return_kind_of(s);
  size_t ranks = 0;
  for (int host = 0; host < map.hosts(); ++host) ranks = std::max(ranks, map.ranks_of(host).size());
  const int max = rows.kind == ReturnKind::per_host    ? 1
                  : rows.kind == ReturnKind::per_route ? s.topk
                                                       : std::min(s.topk, static_cast<int>(ranks));
  rows.tokens = tokens;
  rows.tokens_per_round = std::max<int64_t>(1, round_bytes / (max * returned_stride(s, s.layout == Layout::rank_major)));
  return rows;
}

/// Bytes of round k. `cuts`: readable by the host.
inline size_t returned_bytes(const ReturnedTokens& rows, const RoundCut* cuts, int64_t k) {
  return k < rows.rounds() ? static_cast<size_t>((cuts[k + 1].rows - cuts[k].rows) * rows.stride) : 0;
}
inline int64_t largest_round(const ReturnedTokens& rows, const RoundCut* cuts) {
  size_t max = 0;
  for (int64_t k = 0; k < rows.rounds(); ++k) max = std::max(max, returned_bytes(rows, cuts, k));
  return static_cast<int64_t>(max);
}

/// What a rail carries in round k.
inline PeerTransfer transfer_of(const DispatchRail& rail, int64_t k) {
  return {rail.peer,
          {rail.out.slot(k), static_cast<size_t>(rail.out.bytes(k))},
          {rail.in.slot(k), static_cast<size_t>(rail.in.bytes(k))}};
}
inline PeerTransfer transfer_of(const CombineRail& rail, int64_t k, const RoundCut* out, const RoundCut* in) {
  return {rail.peer,
          {rail.out.slot(k), rail.is_proxy_of_peer ? returned_bytes(rail.out, out, k) : 0},
          {rail.in.slot(k), rail.peer_is_my_proxy ? returned_bytes(rail.in, in, k) : 0}};
}

}  // namespace switchyard::detail
