// SPDX-License-Identifier: Apache-2.0
#include "oracle/low_latency.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

namespace oracle {

namespace {

/// A token's distinct experts.
std::set<int64_t> experts_of(const Problem& p, int source, int64_t token) {
  std::set<int64_t> experts;
  for (int k = 0; k < p.topk; ++k) {
    const int64_t id = p.id(source, token, k);
    if (p.valid(id)) experts.insert(id);
  }
  return experts;
}

std::set<int> ranks_of(const Problem& p, int source, int64_t token) {
  std::set<int> ranks;
  for (const int64_t expert : experts_of(p, source, token)) ranks.insert(p.owner(expert));
  return ranks;
}

}  // namespace

int64_t Arrival::packed() const { return int64_t{source} * (int64_t{1} << 48) + int64_t{k} * (int64_t{1} << 32) + token; }

LowLatencyView low_latency_view(const Problem& p, int rank) {
  const int first = p.first_expert(rank), local_experts = p.first_expert(rank + 1) - first;
  LowLatencyView view;
  view.rows_per_expert = p.world * p.max_tokens;
  view.arrivals.resize(static_cast<size_t>(local_experts));
  view.source_range.resize(static_cast<size_t>(local_experts) * static_cast<size_t>(p.world));
  for (int source = 0; source < p.world; ++source) {
    std::vector<size_t> before;
    for (const auto& rows : view.arrivals) before.push_back(rows.size());
    for (int64_t token = 0; token < p.tokens(source); ++token) {
      for (int k = 0; k < p.topk; ++k) {
        const int64_t id = p.id(source, token, k);  // any value
        if (id < first || id - first >= local_experts) continue;
        auto& rows = view.arrivals[static_cast<size_t>(id - first)];
        const bool again = !rows.empty() && rows.back().source == source && rows.back().token == token;
        if (!again) rows.push_back({source, token, k});
      }
    }
    for (size_t e = 0; e < view.arrivals.size(); ++e) {
      const auto begin = static_cast<int64_t>(before[e]), end = static_cast<int64_t>(view.arrivals[e].size());
      view.source_range[e * static_cast<size_t>(p.world) + static_cast<size_t>(source)] =
          begin * (int64_t{1} << 32) + end - begin;
    }
  }
  for (const auto& rows : view.arrivals) view.rows_of_expert.push_back(static_cast<int32_t>(rows.size()));
  return view;
}

Traffic dispatch_traffic(const Problem& p, int rank, switchyard::Sending sending) {
  Traffic t;
  for (int64_t token = 0; token < p.tokens(rank); ++token) {
    if (sending == switchyard::Sending::per_rank) {
      for (const int to : ranks_of(p, rank, token)) ++(to == rank ? t.local : t.remote);
    } else {
      for (const int64_t expert : experts_of(p, rank, token)) ++(p.owner(expert) == rank ? t.local : t.remote);
    }
  }
  return t;
}

Traffic combine_traffic(const Problem& p, int rank, CombineOrder order) {
  Traffic t;
  for (int source = 0; source < p.world; ++source) {
    for (int64_t token = 0; token < p.tokens(source); ++token) {
      uint64_t rows = 0;
      for (const int64_t expert : experts_of(p, source, token)) rows += p.owner(expert) == rank ? 1u : 0u;
      if (order == CombineOrder::per_rank) rows = std::min<uint64_t>(rows, 1);
      (source == rank ? t.local : t.remote) += rows;
    }
  }
  return t;
}

uint64_t dispatch_crossings(const Problem& p, int rank, const std::vector<int>& host_of) {
  const auto host = [&](int r) { return host_of[static_cast<size_t>(r)]; };
  uint64_t rows = 0;
  for (int64_t token = 0; token < p.tokens(rank); ++token) {
    std::set<int> hosts;
    for (const int r : ranks_of(p, rank, token)) hosts.insert(host(r));
    rows += hosts.size() - hosts.count(host(rank));
  }
  return rows;
}

uint64_t combine_crossings(const Problem& p, int rank, CombineOrder order, const std::vector<int>& host_of) {
  const auto remote = [&](int r) { return host_of[static_cast<size_t>(r)] != host_of[static_cast<size_t>(rank)]; };
  uint64_t rows = 0;
  for (int64_t token = 0; token < p.tokens(rank); ++token) {
    if (order == CombineOrder::per_rank) {
      for (const int r : ranks_of(p, rank, token)) rows += remote(r) ? 1 : 0;
    } else {
      for (const int64_t expert : experts_of(p, rank, token)) rows += remote(p.owner(expert)) ? 1 : 0;
    }
  }
  return rows;
}

int64_t ScaleShape::groups() const { return (hidden + row_scales - 1) / row_scales; }

int64_t ScaleShape::places() const {
  const int64_t bytes = kind == ScaleKind::f32 ? 4 : 1;
  if (order == switchyard::ScaleOrder::column_major) return kind == ScaleKind::f32 ? groups() : (groups() + 3) / 4 * 4;
  return (groups() * bytes + 15) / 16 * 16 / bytes;
}

int64_t ScaleShape::column() const {
  int64_t words = rows_per_expert;
  if (order == switchyard::ScaleOrder::column_major)
    while (words * 4 % 16 != 0) ++words;
  return words;
}

int64_t ScaleShape::offset(int64_t expert, int64_t row, int64_t group) const {
  const int64_t bytes = kind == ScaleKind::f32 ? 4 : 1;
  if (order == switchyard::ScaleOrder::row_major) return ((expert * rows_per_expert + row) * places() + group) * bytes;
  if (kind == ScaleKind::f32) return ((expert * places() + group) * column() + row) * 4;
  return ((expert * (places() / 4) + group / 4) * column() + row) * 4 + group % 4;  // byte 0 is the lowest of the int32
}

ErrorBound error_bound(DType type, int world, const std::vector<double>& terms, const std::vector<int>& ranks) {
  double unit = 0x1p-24, smallest = 0x1p-149;
  if (type == DType::bf16) unit = 0x1p-8, smallest = 0x1p-133;
  if (type == DType::f16) unit = 0x1p-11, smallest = 0x1p-24;
  ErrorBound b;
  double all = 0;  // sum of |w_k * x_k|
  std::map<int, double> partial;
  for (size_t k = 0; k < terms.size(); ++k) {
    b.exact += terms[k];
    all += std::fabs(terms[k]);
    partial[ranks[k]] += terms[k];
  }
  double partials = 0;
  for (const auto& [rank, sum] : partial) partials += std::fabs(sum);
  const auto count = static_cast<double>(terms.size()) + world;
  const double f32 = count * 0x1p-23 * all, tiny = (count + 1) * smallest;
  b.per_route = unit * std::fabs(b.exact) + f32 + tiny;
  b.per_rank = unit * std::fabs(b.exact) + (1 + unit) * (unit * partials + f32) + tiny;
  return b;
}

}  // namespace oracle
