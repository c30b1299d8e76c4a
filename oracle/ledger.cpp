// SPDX-License-Identifier: Apache-2.0
#include "oracle/ledger.hpp"

namespace oracle {

std::vector<int64_t> returned_routes(const Problem& p, int rank) {
  const std::vector<int64_t>& ids = p.ids[static_cast<size_t>(rank)];
  std::vector<int64_t> routes;
  for (int e = 0; e < p.experts; ++e) {
    for (size_t f = 0; f < ids.size(); ++f) {
      if (ids[f] == e) routes.push_back(static_cast<int64_t>(f));
    }
  }
  return routes;
}

int64_t LedgerFixture::expert(int rank, int64_t f) const {
  const uint64_t bits = (static_cast<uint64_t>(f) * 977 + static_cast<uint64_t>(rank) * 131 + 7) * 0x9E3779B97F4A7C15u >> 32;
  return bits % 100 < drop_percent ? -1 : (f + rank) % (int64_t{world} * experts_per_rank);
}

Problem LedgerFixture::problem() const {
  Problem p;
  p.world = world;
  p.experts = world * experts_per_rank;
  p.topk = topk;
  p.max_tokens = tokens;
  p.layout = Layout::expert_major;
  for (int rank = 0; rank < world; ++rank) {
    p.ids.emplace_back();
    for (int64_t f = 0; f < routes(); ++f) p.ids.back().push_back(expert(rank, f));
  }
  return p;
}

float LedgerFixture::input(int rank, int64_t token, int64_t column) const {
  const uint64_t n =
      seed + 131 * static_cast<uint64_t>(rank) + 17 * static_cast<uint64_t>(token) + 3 * static_cast<uint64_t>(column);
  return static_cast<float>(n % 251) / 32.0f;
}

std::vector<float> LedgerFixture::probs(int rank) const {
  std::vector<float> all;
  for (int64_t t = 0; t < tokens; ++t) {
    std::vector<float> shares;
    float sum = 0.0f;
    for (int k = 0; k < topk; ++k) {
      const uint64_t f = static_cast<uint64_t>(t * topk + k);
      shares.push_back(static_cast<float>((seed + static_cast<uint64_t>(rank) + f) % 7 + 1));
      sum += shares.back();
    }
    for (const float share : shares) all.push_back(share / sum);
  }
  return all;
}

}  // namespace oracle
