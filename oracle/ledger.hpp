// SPDX-License-Identifier: Apache-2.0
// The published ledger format: the positions of its entries and its deterministic fixture. Shares no code with src/.
#pragma once

#include <cstdint>
#include <vector>

#include "oracle/routing.hpp"

namespace oracle {

/// Route f = t * K + k of each row in `rank`'s return buffer, which holds the rank's valid routes, stably sorted by expert.
std::vector<int64_t> returned_routes(const Problem& problem, int rank);

/// Experts are the identity on closed-form rows: every result equals the input, within 1e-6 before rounding.
struct LedgerFixture {
  int world = 2;
  int64_t tokens = 64;  ///< per rank
  int topk = 8;
  int experts_per_rank = 2;
  uint64_t seed = 1234;
  uint64_t drop_percent = 0;  ///< of the routes, selected by rank and f

  int64_t routes() const { return tokens * topk; }  ///< per rank
  /// (f + rank) mod E; -1 if the route is dropped.
  int64_t expert(int rank, int64_t route) const;
  Problem problem() const;
  /// ((seed + 131 rank + 17 t + 3 c) mod 251) / 32, which is exact in f16.
  float input(int rank, int64_t token, int64_t column) const;
  /// [T, K], proportional to (seed + rank + f) mod 7 + 1, normalized per token.
  std::vector<float> probs(int rank) const;
};

}  // namespace oracle
