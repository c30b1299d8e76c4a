// SPDX-License-Identifier: Apache-2.0
#include "check/oracle.hpp"

#include <fmt/core.h>

#include <cmath>
#include <cstring>

#include "check/numbers.hpp"

namespace switchyard::tool {
namespace {

/// Adds `weight * row` to the float32 sums, multiply then add; without a weight the row as it is.
void add_row(std::vector<float>& sum, const void* row, DType type, const float* weight) {
  for (size_t c = 0; c < sum.size(); ++c) {
    const float value = element(row, type, static_cast<int64_t>(c));
    const float term = weight != nullptr ? *weight * value : value;
    sum[c] = sum[c] + term;
  }
}

std::string code_text(const void* row, DType type, int64_t c) {
  uint32_t bits = 0;
  std::memcpy(&bits, static_cast<const char*>(row) + static_cast<size_t>(c) * dtype_bytes(type), dtype_bytes(type));
  return fmt::format("{:g} (0x{:0{}x})", element(row, type, c), bits, 2 * dtype_bytes(type));
}

}  // namespace

int Scenario::first_expert(int rank) const {
  int first = 0;
  for (int r = 0; r < rank; ++r) first += experts / world + (r < experts % world ? 1 : 0);
  return first;
}

int Scenario::owner(int expert) const {
  int rank = 0;
  while (expert >= first_expert(rank + 1)) ++rank;
  return rank;
}

std::vector<RowOrigin> expected_rows(const Scenario& s, int dest) {
  const int first = s.first_expert(dest);
  const int last = s.first_expert(dest + 1);
  std::vector<RowOrigin> rows;
  if (s.layout == Layout::rank_major) {
    for (int source = 0; source < s.world; ++source) {
      for (int64_t t = 0; t < s.tokens(source); ++t) {
        bool touches = false;
        for (int k = 0; k < s.topk; ++k) touches = touches || (s.id(source, t, k) >= first && s.id(source, t, k) < last);
        if (touches) rows.push_back({source, t, -1});
      }
    }
    return rows;
  }
  std::vector<std::vector<RowOrigin>> per_expert(static_cast<size_t>(last - first));
  for (int source = 0; source < s.world; ++source) {
    for (int64_t t = 0; t < s.tokens(source); ++t) {
      for (int k = 0; k < s.topk; ++k) {
        const int32_t id = s.id(source, t, k);
        if (id >= first && id < last) per_expert[static_cast<size_t>(id - first)].push_back({source, t, k});
      }
    }
  }
  for (const auto& expert : per_expert) {
    rows.insert(rows.end(), expert.begin(), expert.end());
    while (rows.size() % static_cast<size_t>(s.alignment) != 0) rows.push_back({});
  }
  return rows;
}

std::vector<int64_t> expected_expert_counts(const Scenario& s, int dest) {
  std::vector<int64_t> counts(static_cast<size_t>(s.first_expert(dest + 1) - s.first_expert(dest)));
  for (const Routing& r : s.routing) {
    for (const int32_t id : r.ids) {
      if (s.valid(id) && s.owner(id) == dest) ++counts[static_cast<size_t>(id - s.first_expert(dest))];
    }
  }
  return counts;
}

Kept kept_routes(const Scenario& s, const std::vector<int64_t>& capacity) {
  Kept kept;
  for (const Routing& r : s.routing) kept.route.emplace_back(r.ids.size(), uint8_t{0});
  for (int dest = 0; dest < s.world; ++dest) {
    const std::vector<RowOrigin> rows = expected_rows(s, dest);
    const auto limit = static_cast<size_t>(capacity[static_cast<size_t>(dest)]);
    for (size_t i = 0; i < rows.size() && i < limit; ++i) {
      if (rows[i].source < 0) continue;
      auto& flags = kept.route[static_cast<size_t>(rows[i].source)];
      for (int k = 0; k < s.topk; ++k) {
        const int32_t id = s.id(rows[i].source, rows[i].token, k);
        const bool of_row = rows[i].k < 0 ? s.valid(id) && s.owner(id) == dest : k == rows[i].k;
        if (of_row) flags[static_cast<size_t>(rows[i].token * s.topk + k)] = 1;
      }
    }
  }
  return kept;
}

uint64_t output_key(const Scenario& s, uint64_t set, int dest, const RowOrigin& origin) {
  const auto source = static_cast<uint64_t>(origin.source);
  const auto token = static_cast<uint64_t>(origin.token);
  if (origin.k < 0) return row_key(s.seed, set, RowKind::rank_output, static_cast<uint64_t>(dest), token, source);
  const auto expert = static_cast<uint64_t>(s.id(origin.source, origin.token, origin.k));
  const uint64_t route = token * static_cast<uint64_t>(s.topk) + static_cast<uint64_t>(origin.k);
  return row_key(s.seed, set, RowKind::expert_output, expert, route, source);
}

namespace {

int first_with_expert(const Scenario& s, int source, int64_t token, int k) {
  int first = 0;
  while (s.id(source, token, first) != s.id(source, token, k)) ++first;
  return first;
}

}  // namespace

void expected_combine(const Scenario& s, const CombineCase& c, int source, int64_t token, void* out) {
  std::vector<std::byte> row(static_cast<size_t>(s.hidden) * dtype_bytes(c.type));
  std::vector<float> sum(static_cast<size_t>(s.hidden), 0.0f);
  for (int b = 0; b < c.num_bias; ++b) {
    fill_row(row.data(), c.type, s.hidden,
             row_key(s.seed, c.set, RowKind::bias, static_cast<uint64_t>(source), static_cast<uint64_t>(token),
                     static_cast<uint64_t>(b)));
    if (b == 0) {
      for (size_t i = 0; i < sum.size(); ++i) sum[i] = element(row.data(), c.type, static_cast<int64_t>(i));
    } else {
      add_row(sum, row.data(), c.type, nullptr);
    }
  }
  const auto survives = [&](int k) {
    if (!s.valid(s.id(source, token, k))) return false;
    return c.kept == nullptr || c.kept->route[static_cast<size_t>(source)][static_cast<size_t>(token * s.topk + k)] != 0;
  };
  const auto fetch = [&](int dest, int k) {
    const uint64_t key =
        c.identity ? row_key(s.seed, c.set, RowKind::token, static_cast<uint64_t>(source), static_cast<uint64_t>(token))
                   : output_key(s, c.set, dest, {source, token, c.repeats_alias ? first_with_expert(s, source, token, k) : k});
    fill_row(row.data(), c.type, s.hidden, key);
    if (!c.expert_scale) return;
    const float scale = (*c.expert_scale)[static_cast<size_t>(s.id(source, token, k))];
    for (int64_t i = 0; i < s.hidden; ++i) store_element(row.data(), c.type, i, element(row.data(), c.type, i) * scale);
  };
  const bool weighted = s.layout == Layout::expert_major && c.apply_weights && s.weighted();
  const bool per_route = s.layout == Layout::expert_major && c.order == CombineOrder::per_route;
  for (int rank = 0; rank < s.world && !per_route; ++rank) {
    std::vector<float> partial(sum.size(), 0.0f);
    bool any = false;
    for (int k = 0; k < s.topk; ++k) {
      if (!survives(k) || s.owner(s.id(source, token, k)) != rank) continue;
      if (s.layout == Layout::rank_major && any) continue;  // one row per (token, rank)
      any = true;
      fetch(rank, s.layout == Layout::rank_major ? -1 : k);
      const float weight = weighted ? s.weight(source, token, k) : 1.0f;
      add_row(partial, row.data(), c.type, weighted ? &weight : nullptr);
    }
    if (!any) continue;
    for (size_t i = 0; i < sum.size(); ++i)
      sum[i] = sum[i] + (s.layout == Layout::rank_major ? partial[i] : rounded(partial[i], c.type));
  }
  for (int k = 0; k < s.topk && per_route; ++k) {
    if (!survives(k)) continue;
    fetch(s.owner(s.id(source, token, k)), k);
    const float weight = weighted ? s.weight(source, token, k) : 1.0f;
    add_row(sum, row.data(), c.type, weighted ? &weight : nullptr);
  }
  for (size_t i = 0; i < sum.size(); ++i) store_element(out, c.type, static_cast<int64_t>(i), sum[i]);
}

std::string row_difference(const void* got, const void* expected, DType type, int64_t hidden) {
  if (std::memcmp(got, expected, static_cast<size_t>(hidden) * dtype_bytes(type)) == 0) return "";
  const size_t bytes = dtype_bytes(type);
  for (int64_t c = 0; c < hidden; ++c) {
    const size_t at = static_cast<size_t>(c) * bytes;
    if (std::memcmp(static_cast<const char*>(got) + at, static_cast<const char*>(expected) + at, bytes) == 0) continue;
    if (std::isnan(element(got, type, c)) && std::isnan(element(expected, type, c))) continue;
    return fmt::format("column {}: {}, expected {}", c, code_text(got, type, c), code_text(expected, type, c));
  }
  return "";
}

}  // namespace switchyard::tool
