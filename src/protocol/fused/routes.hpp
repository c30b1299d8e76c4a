// SPDX-License-Identifier: Apache-2.0
// Routes that the ranks of a fused layer announce to each other before any rows are moved; for host and device.
#pragma once

#include <cstdint>

#include "layout/fused_layout.hpp"

namespace switchyard::detail {

/// Destinations of a rank's routes, taken from the plan.
struct RouteTables {
  const int32_t* ids = nullptr;        ///< [T, K] expert, or negative
  const int32_t* route_row = nullptr;  ///< [T, K] row at the expert's rank, or -1: dropped
  ExpertRanges map;
  int topk = 1;
};

/// Writes to the rank of route f's expert the source of the row and, if the row is the lowest of its token's rows there, its
/// destination rows. Uses ordinary stores, which Site::layer_told orders. Writes nothing if the route is dropped.
SWITCHYARD_INLINE void publish_route(const HeapView& heap, const FusedLayout& layout, const RouteTables& routes, int64_t f) {
  const int topk = routes.topk;
  const int64_t t = f / topk;
  const int32_t id = routes.ids[f], row = routes.route_row[f];
  if (id < 0 || row < 0) return;
  const int rank = routes.map.owner(id), first = routes.map.first(rank), last = first + routes.map.count(rank);
  const auto row_of = [&](int64_t g) { return routes.ids[g] >= first && routes.ids[g] < last ? routes.route_row[g] : -1; };
  *heap.at(rank, layout.source(row)) = pack_source(heap.rank, static_cast<int>(f - t * topk), t);
  int32_t* const places = heap.at(rank, layout.places(row));
  bool lowest = true;
  for (int64_t g = t * topk; g < (t + 1) * topk; ++g) {
    const int32_t other = row_of(g);
    lowest = lowest && (other < 0 || other >= row);
  }
  places[0] = lowest ? row : -1;
  if (!lowest) return;
  int n = 1;
  for (int64_t g = t * topk; g < (t + 1) * topk; ++g)
    if (const int32_t other = row_of(g); other > row) places[n++] = other;
  for (; n < topk; ++n) places[n] = -1;
}

}  // namespace switchyard::detail
