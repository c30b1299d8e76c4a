// SPDX-License-Identifier: Apache-2.0
#include "oracle/routing.hpp"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

namespace oracle {

namespace {

template <class V>
auto& at(V& v, int64_t i) {
  return v[static_cast<size_t>(i)];
}

int64_t aligned(int64_t n, int alignment) {
  while (n % alignment != 0) ++n;
  return n;
}

std::vector<Route> list_routes(const Problem& p) {
  std::vector<Route> routes;
  for (int source = 0; source < p.world; ++source) {
    for (int64_t t = 0; t < p.tokens(source); ++t) {
      for (int k = 0; k < p.topk; ++k) {
        const int64_t id = at(at(p.ids, source), t * p.topk + k);
        if (id < 0 || id >= p.experts) continue;
        Route r;
        r.source = source;
        r.token = t;
        r.k = k;
        r.expert = static_cast<int>(id);
        r.dest = p.owner(id);
        routes.push_back(r);
      }
    }
  }
  return routes;
}

/// Rows by (local expert, source, token, k), each expert padded.
void place_expert_major(const Problem& p, std::vector<Route>& routes, Expected& out) {
  std::vector<Route*> order;
  for (auto& r : routes) order.push_back(&r);
  std::stable_sort(order.begin(), order.end(), [](const Route* a, const Route* b) { return a->expert < b->expert; });
  size_t i = 0;
  for (int rank = 0; rank < p.world; ++rank) {
    RankView& view = at(out.ranks, rank);
    int64_t next = 0;
    for (int e = p.first_expert(rank); e < p.first_expert(rank + 1); ++e) {
      view.expert_first_row.push_back(next);
      for (; i < order.size() && order[i]->expert == e; ++i) order[i]->slot = next++;
      next = aligned(next, p.alignment);
    }
    view.rows_needed = next;
  }
}

/// One row per (source, token) that touches the rank.
void place_rank_major(std::vector<Route>& routes, Expected& out) {
  for (auto& view : out.ranks) view.rows_needed = static_cast<int64_t>(view.records.size());
  std::map<std::tuple<int, int, int64_t>, int64_t> row_of;
  for (size_t rank = 0; rank < out.ranks.size(); ++rank) {
    for (size_t i = 0; i < out.ranks[rank].records.size(); ++i) {
      const Record& r = out.ranks[rank].records[i];
      row_of[{static_cast<int>(rank), r.source, r.token}] = static_cast<int64_t>(i);
    }
  }
  for (auto& r : routes) r.slot = row_of.at({r.dest, r.source, r.token});
}

/// (source, token) pairs of every rank, in order; routes come ordered by source and token.
void list_records(const std::vector<Route>& routes, Expected& out) {
  for (const auto& r : routes) {
    auto& records = at(out.ranks, r.dest).records;
    const bool known = !records.empty() && records.back().source == r.source && records.back().token == r.token;
    if (!known) records.push_back({r.source, r.token});
  }
}

void cut_at_capacity(const Problem& p, Expected& out) {
  for (int rank = 0; rank < p.world; ++rank) {
    RankView& view = at(out.ranks, rank);
    view.rows = view.rows_needed;
    if (p.size != SizePolicy::capacity || view.rows_needed <= at(p.capacity, rank)) continue;
    if (p.overflow == Overflow::fail) {
      out.capacity_exceeded = true;
    } else {
      view.rows = at(p.capacity, rank);
    }
  }
  for (auto& r : out.routes) {
    r.kept = r.slot < at(out.ranks, r.dest).rows;
    out.any_dropped |= !r.kept;
  }
  for (auto& view : out.ranks) {
    if (p.layout == Layout::rank_major) {
      view.records.resize(static_cast<size_t>(view.rows));  // a record beyond capacity has no row: it does not exist
    } else {
      for (int64_t& first : view.expert_first_row) first = std::min(first, view.rows);
    }
  }
}

void fill_receivers(const Problem& p, Expected& out) {
  const auto k64 = static_cast<int64_t>(p.topk);
  for (int rank = 0; rank < p.world; ++rank) {
    RankView& view = at(out.ranks, rank);
    const auto experts_here = static_cast<size_t>(p.first_expert(rank + 1) - p.first_expert(rank));
    view.origin.assign(static_cast<size_t>(view.rows), {});
    view.tokens_per_expert.assign(experts_here, 0);
    view.dropped_per_source.assign(experts_here * static_cast<size_t>(p.world), 0);
    const size_t slots = view.records.size() * static_cast<size_t>(p.topk);
    view.record_route.assign(slots, -1);
    if (!p.weights.empty()) view.record_weight.assign(slots, 0.0f);
    if (p.layout == Layout::expert_major) {
      view.row_source.assign(static_cast<size_t>(view.rows), -1);
      if (!p.weights.empty()) view.row_weights.assign(static_cast<size_t>(view.rows), 0.0f);
    } else {
      view.topk_ids.assign(static_cast<size_t>(view.rows * k64), -1);
      if (!p.weights.empty()) view.topk_weights.assign(static_cast<size_t>(view.rows * k64), 0.0f);
    }
  }
  std::vector<int64_t> record(static_cast<size_t>(p.world), 0);
  for (const auto& r : out.routes) {
    RankView& view = at(out.ranks, r.dest);
    const int local = r.expert - p.first_expert(r.dest);
    if (!r.kept) {
      at(view.dropped_per_source,
         static_cast<int64_t>(r.source) * (p.first_expert(r.dest + 1) - p.first_expert(r.dest)) + local)++;
      continue;
    }
    at(view.tokens_per_expert, local)++;
    int64_t& i = at(record, r.dest);
    while (at(view.records, i).source != r.source || at(view.records, i).token != r.token) ++i;
    const float weight = p.weights.empty() ? 0.0f : at(at(p.weights, r.source), r.token * k64 + r.k);
    if (!p.weights.empty()) at(view.record_weight, i * k64 + r.k) = weight;
    if (p.layout == Layout::expert_major) {
      at(view.record_route, i * k64 + r.k) = static_cast<int32_t>(r.slot);
      at(view.origin, r.slot) = {r.source, r.token, r.k};
      at(view.row_source, r.slot) = int64_t{r.source} << 48 | int64_t{r.k} << 32 | r.token;
      if (!p.weights.empty()) at(view.row_weights, r.slot) = weight;
    } else {
      at(view.record_route, i * k64 + r.k) = local;
      at(view.origin, r.slot) = {r.source, r.token, -1};
      at(view.topk_ids, r.slot * k64 + r.k) = local;
      if (!p.weights.empty()) at(view.topk_weights, r.slot * k64 + r.k) = weight;
    }
  }
  for (auto& view : out.ranks) {
    for (size_t e = 0; e < view.tokens_per_expert.size(); ++e) {
      const int64_t padded = aligned(view.tokens_per_expert[e], p.alignment);
      // Capacity may cut an expert's padding.
      const bool cut = p.layout == Layout::expert_major && padded > view.rows - view.expert_first_row[e];
      view.aligned_per_expert.push_back(cut ? view.rows - view.expert_first_row[e] : padded);
    }
    if (p.overflow == Overflow::fail) view.dropped_per_source.clear();
  }
}

void fill_owners(const Problem& p, Expected& out) {
  for (int rank = 0; rank < p.world; ++rank) {
    RankView& view = at(out.ranks, rank);
    const size_t slots = at(p.ids, rank).size();
    view.kept_ids.assign(slots, -1);
    view.route_row.assign(slots, -1);
    view.route_record.assign(slots, -1);
    view.dropped.assign(slots, 0);
    view.sends.resize(static_cast<size_t>(p.tokens(rank)));
  }
  std::vector<int64_t> record(static_cast<size_t>(p.world), -1);
  for (const auto& r : out.routes) {
    RankView& view = at(out.ranks, r.source);
    const int64_t f = r.token * p.topk + r.k;
    if (!r.kept) at(view.dropped, f) = 1;
    if (!r.kept && p.layout == Layout::rank_major) continue;
    auto& sends = at(view.sends, r.token);
    auto send = std::find_if(sends.begin(), sends.end(), [&](const Send& s) { return s.rank == r.dest; });
    if (send == sends.end()) send = sends.insert(sends.end(), Send{r.dest, -1, ++at(record, r.dest)});
    at(view.route_record, f) = static_cast<int32_t>(send->record);
    if (!r.kept) continue;
    if (send->row < 0) send->row = r.slot;
    at(view.kept_ids, f) = r.expert;
    at(view.route_row, f) = static_cast<int32_t>(r.slot);
  }
  for (auto& view : out.ranks) {
    for (auto& sends : view.sends) {
      std::sort(sends.begin(), sends.end(), [](const Send& a, const Send& b) { return a.rank < b.rank; });
    }
    if (p.overflow == Overflow::fail) view.dropped.clear();
  }
}

}  // namespace

int Problem::first_expert(int rank) const {
  int first = 0;
  for (int r = 0; r < rank; ++r) first += experts / world + (r < experts % world ? 1 : 0);
  return first;
}

int Problem::owner(int64_t expert) const {
  int rank = 0;
  while (expert >= first_expert(rank + 1)) ++rank;
  return rank;
}

Expected expect(const Problem& p) {
  Expected out;
  out.ranks.resize(static_cast<size_t>(p.world));
  out.routes = list_routes(p);
  out.routes_per_expert.assign(static_cast<size_t>(p.world), std::vector<int32_t>(static_cast<size_t>(p.experts), 0));
  out.touching.assign(static_cast<size_t>(p.world), std::vector<int32_t>(static_cast<size_t>(p.world), 0));
  for (const auto& r : out.routes) at(at(out.routes_per_expert, r.source), r.expert)++;
  list_records(out.routes, out);
  for (int rank = 0; rank < p.world; ++rank) {
    for (const auto& r : at(out.ranks, rank).records) at(at(out.touching, r.source), rank)++;
  }
  if (p.layout == Layout::expert_major) {
    place_expert_major(p, out.routes, out);
  } else {
    place_rank_major(out.routes, out);
  }
  cut_at_capacity(p, out);
  if (out.capacity_exceeded) return out;
  fill_receivers(p, out);
  fill_owners(p, out);
  return out;
}

int64_t worst_case_rows(const Problem& p, int rank) {
  if (p.layout == Layout::rank_major) return p.first_expert(rank + 1) > p.first_expert(rank) ? p.world * p.max_tokens : 0;
  const int64_t routes = p.world * p.max_tokens * p.topk;
  const int64_t experts_here = p.first_expert(rank + 1) - p.first_expert(rank);
  // Every non-empty expert but one holds a single route; the last one holds the rest.
  const int64_t nonempty = std::min(routes, experts_here);
  if (nonempty == 0) return 0;
  return (nonempty - 1) * p.alignment + aligned(routes - (nonempty - 1), p.alignment);
}

}  // namespace oracle
