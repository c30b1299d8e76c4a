// SPDX-License-Identifier: Apache-2.0
// Synthetic routings and what they must deliver, worked out from the definition of the layouts alone: shares nothing with
// src/plan.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

namespace switchyard::cuda_bench {

inline uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

/// Ids and weights of all ranks. `ids[r]` is [T_r, K].
struct Routing {
  int world = 1, experts = 1, topk = 1;
  std::vector<int64_t> tokens;
  std::vector<std::vector<int32_t>> ids;
  std::vector<std::vector<float>> weights;

  int first_expert(int rank) const {
    int first = 0;
    for (int r = 0; r < rank; ++r) first += experts / world + (r < experts % world ? 1 : 0);
    return first;
  }
};

/// Every token chooses `topk` distinct experts uniformly. One route in `drop_every` becomes -1 (0: none); with `repeats`
/// choices are not distinct.
inline Routing uniform_routing(int experts, int topk, const std::vector<int64_t>& tokens, uint64_t seed, int drop_every = 0,
                               bool repeats = false) {
  Routing out;
  out.world = static_cast<int>(tokens.size());
  out.experts = experts;
  out.topk = topk;
  out.tokens = tokens;
  std::vector<int32_t> deck(static_cast<size_t>(experts));
  for (int r = 0; r < out.world; ++r) {
    const auto routes = static_cast<size_t>(tokens[static_cast<size_t>(r)] * topk);
    std::vector<int32_t> ids(routes);
    std::vector<float> weights(routes);
    uint64_t state = mix(seed * 1000003 + static_cast<uint64_t>(r));
    for (size_t t = 0; t < routes / static_cast<size_t>(topk); ++t) {
      std::iota(deck.begin(), deck.end(), 0);
      for (int k = 0; k < topk; ++k) {
        state = mix(state);
        const auto left = static_cast<uint64_t>(experts - k % experts);
        const auto pick = static_cast<size_t>(k % experts) + static_cast<size_t>(repeats ? 0 : state % left);
        const size_t f = t * static_cast<size_t>(topk) + static_cast<size_t>(k);
        if (repeats) {
          ids[f] = static_cast<int32_t>(state % static_cast<uint64_t>(experts));
        } else {
          std::swap(deck[static_cast<size_t>(k % experts)], deck[pick]);
          ids[f] = deck[static_cast<size_t>(k % experts)];
        }
        if (drop_every > 0 && (state >> 40) % static_cast<uint64_t>(drop_every) == 0) ids[f] = -1;
        weights[f] = static_cast<float>(1 + (state >> 32) % 1000) / 1024.0f;
      }
    }
    out.ids.push_back(std::move(ids));
    out.weights.push_back(std::move(weights));
  }
  return out;
}

/// What one rank must receive.
struct Expected {
  std::vector<int64_t> rows;  ///< source << 32 | token, -1: zero padding
  std::vector<int32_t> record_token, record_route;
  std::vector<float> record_weight;
  std::vector<int64_t> record_begin;  ///< [W + 1]
  std::vector<int64_t> padding;       ///< row ranges [begin, end)
  int64_t rows_from_others = 0;       ///< rank-major rows, primaries: transfers from other ranks
};

inline Expected expect_rank_major(const Routing& routing, int rank) {
  Expected out;
  const int first = routing.first_expert(rank), last = routing.first_expert(rank + 1);
  for (int s = 0; s < routing.world; ++s) {
    out.record_begin.push_back(static_cast<int64_t>(out.rows.size()));
    const auto& ids = routing.ids[static_cast<size_t>(s)];
    for (int64_t t = 0; t < routing.tokens[static_cast<size_t>(s)]; ++t) {
      const auto begin = ids.begin() + t * routing.topk;
      const auto here = [&](int32_t id) { return id >= first && id < last; };
      if (std::none_of(begin, begin + routing.topk, here)) continue;
      out.rows.push_back((static_cast<int64_t>(s) << 32) | t);
      out.record_token.push_back(static_cast<int32_t>(t));
      out.rows_from_others += s != rank;
      for (int k = 0; k < routing.topk; ++k) {
        const auto f = static_cast<size_t>(t * routing.topk + k);
        out.record_route.push_back(here(ids[f]) ? ids[f] - first : -1);
        out.record_weight.push_back(here(ids[f]) ? routing.weights[static_cast<size_t>(s)][f] : 0.0f);
      }
    }
  }
  out.record_begin.push_back(static_cast<int64_t>(out.rows.size()));
  return out;
}

/// Records as in rank-major; rows by (local expert, source, token, k), every expert padded with zero rows to `alignment`.
inline Expected expect_expert_major(const Routing& routing, int rank, int alignment) {
  Expected out = expect_rank_major(routing, rank);
  const auto records = out.rows;
  out.rows.clear();
  const int here = routing.first_expert(rank + 1) - routing.first_expert(rank);
  std::vector<int32_t> row_of(out.record_route.size(), -1);
  for (int e = 0; e < here; ++e) {
    for (size_t f = 0; f < out.record_route.size(); ++f) {
      if (out.record_route[f] != e) continue;
      row_of[f] = static_cast<int32_t>(out.rows.size());
      out.rows.push_back(records[f / static_cast<size_t>(routing.topk)]);
    }
    out.padding.push_back(static_cast<int64_t>(out.rows.size()));
    while (out.rows.size() % static_cast<size_t>(alignment) != 0) out.rows.push_back(-1);
    out.padding.push_back(static_cast<int64_t>(out.rows.size()));
  }
  out.record_route = row_of;
  return out;
}

}  // namespace switchyard::cuda_bench
