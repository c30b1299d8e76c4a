// SPDX-License-Identifier: Apache-2.0
#include "oracle/routing.hpp"

#include <algorithm>
#include <limits>

namespace oracle {

namespace {

template <class V>
auto& at(V& v, int64_t i) {
  return v[static_cast<size_t>(i)];
}

int64_t aligned(int64_t n, int alignment) { return (n + alignment - 1) / alignment * alignment; }

/// Maximum number of rows that may be delivered to `rank`.
int64_t row_limit(const Problem& p, int rank) {
  const bool cut = p.size == SizePolicy::capacity && p.overflow == Overflow::drop_and_report;
  return cut ? at(p.capacity, rank) : std::numeric_limits<int64_t>::max();
}

/// Expert-major, before capacity: the first row of each expert of `rank`, with each expert's rows padded, followed by the total
/// number of rows.
std::vector<int64_t> first_rows(const Problem& p, int rank) {
  const int first = p.first_expert(rank), last = p.first_expert(rank + 1);
  std::vector<int64_t> count(static_cast<size_t>(last - first), 0), rows{0};
  for (const auto& ids : p.ids) {
    for (const int64_t id : ids)
      if (id >= first && id < last) ++at(count, id - first);
  }
  for (const int64_t n : count) rows.push_back(rows.back() + aligned(n, p.alignment));
  return rows;
}

/// Calls visit(route, pair) for every route to `rank`, in order of (source, token, k). `pair` is the number of preceding
/// (source, token) pairs with a route to the rank. Rank-major rows correspond to these pairs; expert-major rows correspond to
/// routes, ordered by (expert, source, token, k).
template <class Visit>
void each_route_to(const Problem& p, int rank, const Visit& visit) {
  const int first = p.first_expert(rank), last = p.first_expert(rank + 1);
  const bool by_expert = p.layout == Layout::expert_major;
  const int64_t limit = row_limit(p, rank);
  std::vector<int64_t> next = by_expert ? first_rows(p, rank) : std::vector<int64_t>();
  int64_t pairs = 0;
  for (int source = 0; source < p.world; ++source) {
    const int64_t* id = at(p.ids, source).data();
    for (int64_t t = 0; t < p.tokens(source); ++t) {
      bool touches = false;
      for (int k = 0; k < p.topk; ++k, ++id) {
        if (*id < first || *id >= last) continue;
        if (!touches) ++pairs;
        touches = true;
        const int64_t slot = by_expert ? at(next, *id - first)++ : pairs - 1;
        visit(Route{source, t, k, static_cast<int>(*id), rank, slot, slot < limit}, pairs - 1);
      }
    }
  }
}

/// Builds one rank's Received, route by route.
class Receiver {
 public:
  Receiver(const Problem& p, int rank)
      : p_(p),
        first_(p.first_expert(rank)),
        local_experts_(p.first_expert(rank + 1) - first_),
        by_expert_(p.layout == Layout::expert_major),
        weighted_(!p.weights.empty()),
        limit_(row_limit(p, rank)) {
    v_.tokens_per_expert.assign(static_cast<size_t>(local_experts_), 0);
    v_.dropped_per_source.assign(static_cast<size_t>(int64_t{local_experts_} * p.world), 0);
    if (!by_expert_) return;
    v_.expert_first_row = first_rows(p, rank);
    v_.rows_needed = v_.expert_first_row.back();
    v_.expert_first_row.pop_back();
    const auto rows = static_cast<size_t>(std::min(v_.rows_needed, limit_));
    v_.origin.resize(rows);
    v_.row_source.assign(rows, -1);
    if (weighted_) v_.row_weights.assign(rows, 0.0f);
  }

  void add(const Route& r, int64_t pair) {
    const int local = r.expert - first_;
    if (!by_expert_) v_.rows_needed = pair + 1;
    // A rank-major pair beyond capacity has neither a row nor a record.
    if ((by_expert_ || r.kept) && pair == static_cast<int64_t>(v_.records.size())) add_record(r);
    if (!r.kept) {
      ++at(v_.dropped_per_source, int64_t{r.source} * local_experts_ + local);
      return;
    }
    ++at(v_.tokens_per_expert, local);
    const int64_t slot = pair * p_.topk + r.k;
    const float weight = weighted_ ? at(at(p_.weights, r.source), r.token * p_.topk + r.k) : 0.0f;
    at(v_.record_route, slot) = by_expert_ ? static_cast<int32_t>(r.slot) : local;
    if (weighted_) at(v_.record_weight, slot) = weight;
    if (by_expert_) {
      at(v_.origin, r.slot) = {r.source, r.token, r.k};
      at(v_.row_source, r.slot) = int64_t{r.source} << 48 | int64_t{r.k} << 32 | r.token;
      if (weighted_) at(v_.row_weights, r.slot) = weight;
    } else {
      at(v_.topk_ids, slot) = local;
      if (weighted_) at(v_.topk_weights, slot) = weight;
    }
  }

  Received take() {
    v_.rows = std::min(v_.rows_needed, limit_);
    for (int64_t& first : v_.expert_first_row) first = std::min(first, v_.rows);
    for (int e = 0; e < local_experts_; ++e) {
      int64_t rows = aligned(at(v_.tokens_per_expert, e), p_.alignment);
      if (by_expert_) rows = std::min(rows, v_.rows - at(v_.expert_first_row, e));  // capacity may cut an expert's padding
      v_.aligned_per_expert.push_back(rows);
    }
    if (p_.overflow == Overflow::fail) v_.dropped_per_source.clear();
    return std::move(v_);
  }

 private:
  void add_record(const Route& r) {
    v_.records.push_back({r.source, r.token});
    const size_t slots = v_.records.size() * static_cast<size_t>(p_.topk);
    v_.record_route.resize(slots, -1);
    if (weighted_) v_.record_weight.resize(slots, 0.0f);
    if (by_expert_) return;
    v_.origin.push_back({r.source, r.token, -1});
    v_.topk_ids.resize(slots, -1);
    if (weighted_) v_.topk_weights.resize(slots, 0.0f);
  }

  const Problem& p_;
  const int first_, local_experts_;
  const bool by_expert_, weighted_;
  const int64_t limit_;
  Received v_;
};

Owned nothing_kept(const Problem& p, int rank) {
  const size_t slots = at(p.ids, rank).size();
  Owned v;
  v.kept_ids.assign(slots, -1);
  v.route_row.assign(slots, -1);
  v.route_record.assign(slots, -1);
  if (p.overflow == Overflow::drop_and_report) v.dropped.assign(slots, 0);
  v.sends.resize(static_cast<size_t>(p.tokens(rank)));
  return v;
}

/// Adds a route to its owner's view. Routes must be added in order of rank, token and k.
void add_owned(const Problem& p, const Route& r, int64_t pair, Owned& v) {
  const int64_t f = r.token * p.topk + r.k;
  if (!r.kept) at(v.dropped, f) = 1;
  if (!r.kept && p.layout == Layout::rank_major) return;
  auto& sends = at(v.sends, r.token);
  if (sends.empty() || sends.back().rank != r.dest) sends.push_back({r.dest, -1, pair});
  at(v.route_record, f) = static_cast<int32_t>(pair);
  if (!r.kept) return;
  if (sends.back().row < 0) sends.back().row = r.slot;
  at(v.kept_ids, f) = r.expert;
  at(v.route_row, f) = static_cast<int32_t>(r.slot);
}

}  // namespace

int first_expert(int experts, int world, int rank) { return rank * (experts / world) + std::min(rank, experts % world); }

int owner(int experts, int world, int64_t expert) {
  int rank = 0;
  while (expert >= first_expert(experts, world, rank + 1)) ++rank;
  return rank;
}

int64_t invalid_ids(const Problem& p, int rank) {
  int64_t n = 0;
  for (const int64_t id : at(p.ids, rank)) n += id < -1 || id >= p.experts ? 1 : 0;
  return n;
}

std::vector<Origin> rows_to(const Problem& p, int rank) {
  std::vector<Origin> rows;
  if (p.layout == Layout::expert_major) rows.resize(static_cast<size_t>(first_rows(p, rank).back()));
  each_route_to(p, rank, [&](const Route& r, int64_t pair) {
    if (p.layout == Layout::expert_major) {
      at(rows, r.slot) = {r.source, r.token, r.k};
    } else if (pair == static_cast<int64_t>(rows.size())) {
      rows.push_back({r.source, r.token, -1});
    }
  });
  return rows;
}

Received received(const Problem& p, int rank) {
  Receiver receiver(p, rank);
  each_route_to(p, rank, [&](const Route& r, int64_t pair) { receiver.add(r, pair); });
  return receiver.take();
}

Owned owned(const Problem& p, int rank) {
  Owned v = nothing_kept(p, rank);
  for (int dest = 0; dest < p.world; ++dest) {
    each_route_to(p, dest, [&](const Route& r, int64_t pair) {
      if (r.source == rank) add_owned(p, r, pair, v);
    });
  }
  return v;
}

Expected expect(const Problem& p) {
  Expected out;
  out.ranks.resize(static_cast<size_t>(p.world));
  out.routes_per_expert.assign(static_cast<size_t>(p.world), std::vector<int32_t>(static_cast<size_t>(p.experts), 0));
  out.touching.assign(static_cast<size_t>(p.world), std::vector<int32_t>(static_cast<size_t>(p.world), 0));
  std::vector<std::vector<size_t>> number;  // index of each choice among the routes
  size_t routes = 0;
  for (int rank = 0; rank < p.world; ++rank) {
    static_cast<Owned&>(at(out.ranks, rank)) = nothing_kept(p, rank);
    number.emplace_back();
    for (const int64_t id : at(p.ids, rank)) number.back().push_back(p.valid(id) ? routes++ : routes);
  }
  out.routes.resize(routes);
  for (int dest = 0; dest < p.world; ++dest) {
    Receiver receiver(p, dest);
    int64_t last = -1;
    each_route_to(p, dest, [&](const Route& r, int64_t pair) {
      out.routes[at(at(number, r.source), r.token * p.topk + r.k)] = r;
      out.any_dropped |= !r.kept;
      ++at(at(out.routes_per_expert, r.source), r.expert);
      at(at(out.touching, r.source), dest) += pair != last ? 1 : 0;
      last = pair;
      receiver.add(r, pair);
      add_owned(p, r, pair, at(out.ranks, r.source));
    });
    static_cast<Received&>(at(out.ranks, dest)) = receiver.take();
    const bool bounded = p.size == SizePolicy::capacity && p.overflow == Overflow::fail;
    out.capacity_exceeded |= bounded && at(out.ranks, dest).rows_needed > at(p.capacity, dest);
  }
  return out;
}

int64_t worst_case_rows(const Problem& p, int rank) {
  if (p.layout == Layout::rank_major) return p.first_expert(rank + 1) > p.first_expert(rank) ? p.world * p.max_tokens : 0;
  const int64_t routes = p.world * p.max_tokens * p.topk;
  const int64_t num_local_experts = p.first_expert(rank + 1) - p.first_expert(rank);
  // Every non-empty expert except the last holds a single route; the last one holds the rest.
  const int64_t nonempty = std::min(routes, num_local_experts);
  if (nonempty == 0) return 0;
  return (nonempty - 1) * p.alignment + aligned(routes - (nonempty - 1), p.alignment);
}

}  // namespace oracle
