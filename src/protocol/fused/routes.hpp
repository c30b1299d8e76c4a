// SPDX-License-Identifier: Apache-2.0
// Routes that the ranks of a fused layer announce to each other before any rows are moved; for host and device.
#pragma once

#include <cstdint>

#include "arch/bits.hpp"
#include "layout/fused_layout.hpp"

namespace switchyard::detail {

/// Destinations of a rank's routes, taken from the plan.
struct RouteTables {
  const int32_t* ids = nullptr;        ///< [T, K] expert, or negative
  const int32_t* route_row = nullptr;  ///< [T, K] row at the expert's rank, or -1: dropped
  ExpertRanges map;
  int topk = 1;
  const float* weights = nullptr;  ///< [T, K], or null: all 1; read if rows are returned per rank
};

/// The ranks with rows of token t.
SWITCHYARD_INLINE uint64_t ranks_of(const RouteTables& routes, int64_t t) {
  uint64_t ranks = 0;
  for (int64_t g = t * routes.topk; g < (t + 1) * routes.topk; ++g)
    if (routes.ids[g] >= 0 && routes.route_row[g] >= 0) ranks |= uint64_t{1} << routes.map.owner(routes.ids[g]);
  return ranks;
}

/// If `row` is the highest of its token's rows on this rank, returns the lowest, whose places() are all these rows; else -1.
SWITCHYARD_INLINE int64_t summed_places(const HeapView& heap, const FusedLayout& layout, int64_t row) {
  const int32_t* const places = heap.local(layout.places(row));
  if (places[0] < 0) return places[0] == -1 ? -1 : after_lowest(places[0]);
  return layout.topk == 1 || places[1] < 0 ? row : -1;
}
/// The index for inbox() and returned() of what a row with this source returns.
SWITCHYARD_INLINE int64_t returned_row(const FusedLayout& layout, int64_t source) {
  return source_token(source) * layout.returned_rows() + source_k(source);
}

/// Writes to the rank of route f's expert the source of the row and, if the row is the lowest of its token's rows there, its
/// destination rows (kPerRank: and their weights). Uses ordinary stores, which Site::layer_told orders. Writes nothing if the
/// route is dropped. `kPerRank`: layout.per_rank.
template <bool kPerRank>
SWITCHYARD_INLINE void publish_route(const HeapView& heap, const FusedLayout& layout, const RouteTables& routes, int64_t f) {
  const int topk = routes.topk;
  const int64_t t = f / topk;
  const int32_t id = routes.ids[f], row = routes.route_row[f];
  if (id < 0 || row < 0) return;
  const int rank = routes.map.owner(id), first = routes.map.first(rank), last = first + routes.map.count(rank);
  const auto row_of = [&](int64_t g) { return routes.ids[g] >= first && routes.ids[g] < last ? routes.route_row[g] : -1; };
  int32_t lowest = row, highest = row;
  for (int64_t g = t * topk; g < (t + 1) * topk; ++g) {
    const int32_t other = row_of(g);
    if (other >= 0 && other < lowest) lowest = other;
    if (other > highest) highest = other;
  }
  int j = static_cast<int>(f - t * topk);
  if constexpr (kPerRank) j = row == highest ? bits(ranks_of(routes, t) & ((uint64_t{1} << rank) - 1)) : 0;
  *heap.at(rank, layout.source(row)) = pack_source(heap.rank, j, t);
  int32_t* const places = heap.at(rank, layout.places(row));
  if (row != lowest) {
    places[0] = row == highest ? after_lowest(lowest) : -1;
    return;
  }
  int n = 0;
  for (int64_t g = t * topk; g < (t + 1) * topk; ++g) {
    const int32_t place = row_of(g);
    if (place < 0) continue;
    if constexpr (kPerRank) heap.at(rank, layout.place_weights(row))[n] = routes.weights != nullptr ? routes.weights[g] : 1.F;
    places[n++] = place;
  }
  for (; n < topk; ++n) places[n] = -1;
}

}  // namespace switchyard::detail
