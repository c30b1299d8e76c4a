// SPDX-License-Identifier: Apache-2.0
#include "harness/routings.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "oracle/routing.hpp"
#include "oracle/rows.hpp"

namespace harness {

namespace {

double unit(uint64_t bits) { return static_cast<double>(bits >> 11) * 0x1.0p-53; }

/// Draws one expert from [low, high), with weights 1 / (e + 1)^skew.
int64_t draw(uint64_t bits, int low, int high, double skew) {
  if (high <= low) return -1;
  if (skew == 0) return low + static_cast<int64_t>(bits % static_cast<uint64_t>(high - low));
  // Uses the inverse of the continuous distribution, which is fast and sufficiently skewed.
  const double n = high - low, x = std::exp(unit(bits) * std::log(n + 1)) - 1;
  return low + std::min<int64_t>(high - low - 1, static_cast<int64_t>(x));
}

struct Range {
  int low, high;
  double skew;
  bool distinct;
};

Range range_of(Routing routing, const oracle::Problem& p, int rank) {
  switch (routing) {
    case Routing::uniform:
    case Routing::round_robin: return {0, p.experts, 0, true};
    case Routing::zipf: return {0, p.experts, 1, true};
    case Routing::one_rank: {
      int last = p.world - 1;
      while (p.first_expert(last) == p.first_expert(last + 1)) --last;
      return {p.first_expert(last), p.first_expert(last + 1), 0, true};
    }
    case Routing::one_expert: return {p.experts / 2, p.experts / 2 + 1, 0, false};
    case Routing::duplicates: return {0, std::min(p.experts, 5), 0, false};
    case Routing::own_rank: return {p.first_expert(rank), p.first_expert(rank + 1), 0, true};
    case Routing::single_peer: {
      const int peer = (rank + 1) % p.world;
      return {p.first_expert(peer), p.first_expert(peer + 1), 0, true};
    }
  }
  return {0, p.experts, 0, true};
}

int64_t outside(uint64_t bits, int experts, bool wide) {
  switch (bits % (wide ? 8 : 6)) {
    case 0: return experts;
    case 1: return -7;
    case 2: return int64_t{experts} + 5;
    case 3: return std::numeric_limits<int32_t>::min();
    case 4: return std::numeric_limits<int32_t>::max();
    case 6: return int64_t{1} << 32;  // becomes 0 if truncated
    case 7: return std::numeric_limits<int64_t>::min() + 1;
    default: return -1;
  }
}

}  // namespace

std::string to_string(Routing routing) {
  switch (routing) {
    case Routing::uniform: return "uniform";
    case Routing::zipf: return "zipf";
    case Routing::one_rank: return "one_rank";
    case Routing::one_expert: return "one_expert";
    case Routing::round_robin: return "round_robin";
    case Routing::duplicates: return "duplicates";
    case Routing::own_rank: return "own_rank";
    case Routing::single_peer: return "single_peer";
  }
  return "?";
}

std::vector<int64_t> make_ids(Routing routing, const RoutingShape& shape, uint64_t seed, int rank, int64_t tokens,
                              int drop_percent, bool wide) {
  oracle::Problem p;
  p.world = shape.world;
  p.experts = shape.experts;
  const Range range = range_of(routing, p, rank);
  std::vector<int64_t> ids;
  ids.reserve(static_cast<size_t>(tokens * shape.topk));
  for (int64_t t = 0; t < tokens; ++t) {
    const auto token = static_cast<uint64_t>(t);
    const bool lost = oracle::mix(seed, 1, token, static_cast<uint64_t>(rank)) % 1000 < static_cast<uint64_t>(drop_percent);
    std::vector<int64_t> chosen;
    for (int k = 0; k < shape.topk; ++k) {
      int64_t id = routing == Routing::round_robin ? (t * shape.topk + k) % shape.experts : -1;
      const bool distinct = range.distinct && k < range.high - range.low;
      for (uint64_t attempt = 0; routing != Routing::round_robin; ++attempt) {
        const auto key = static_cast<uint64_t>(rank) << 32 | static_cast<uint64_t>(k) << 16 | attempt;
        id = draw(oracle::mix(seed, 2, token, key), range.low, range.high, attempt < 64 ? range.skew : 0);
        if (!distinct || std::find(chosen.begin(), chosen.end(), id) == chosen.end()) break;
      }
      chosen.push_back(id);
      const uint64_t bits = oracle::mix(seed, 3, token, static_cast<uint64_t>(rank) << 32 | static_cast<uint64_t>(k));
      const bool drop = lost || bits % 100 < static_cast<uint64_t>(drop_percent);
      ids.push_back(drop ? outside(bits >> 20, shape.experts, wide) : id);
    }
  }
  return ids;
}

std::vector<float> make_weights(uint64_t seed, int rank, int64_t tokens, int topk) {
  std::vector<float> weights(static_cast<size_t>(tokens * topk));
  for (size_t f = 0; f < weights.size(); ++f) {
    const uint64_t bits = oracle::mix(seed, 4, f, static_cast<uint64_t>(rank));
    weights[f] = static_cast<float>(unit(bits) * 1.5 - 0.5);
    if (bits % 31 == 0) weights[f] *= 1e-30f;
  }
  return weights;
}

std::vector<float> make_probabilities(uint64_t seed, int rank, int64_t tokens, int topk) {
  std::vector<float> p(static_cast<size_t>(tokens * topk));
  for (size_t first = 0; first < p.size(); first += static_cast<size_t>(topk)) {
    double sum = 0;
    for (size_t f = first; f < first + static_cast<size_t>(topk); ++f) {
      p[f] = std::exp(static_cast<float>(4 * unit(oracle::mix(seed, 5, f, static_cast<uint64_t>(rank))) - 2));
      sum += p[f];
    }
    for (size_t f = first; f < first + static_cast<size_t>(topk); ++f) p[f] = static_cast<float>(p[f] / sum);
  }
  return p;
}

}  // namespace harness
