// SPDX-License-Identifier: Apache-2.0
// What an exchange must deliver, computed the straightforward way from the routing of all ranks. Uses none of the library's
// plan.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "run/rows.hpp"
#include "switchyard/normal.hpp"
#include "switchyard/routing.hpp"

namespace switchyard::tool {

/// One exchange as seen from above. `routing[r]` is rank r's.
struct Scenario {
  int world = 1;
  int experts = 1;
  int topk = 1;
  int64_t hidden = 0;
  Layout layout = Layout::rank_major;
  int alignment = 1;
  uint64_t seed = 1;
  std::vector<Routing> routing;

  int first_expert(int rank) const;
  int owner(int expert) const;
  bool valid(int32_t id) const { return id >= 0 && id < experts; }
  int32_t id(int rank, int64_t token, int k) const {
    return routing[static_cast<size_t>(rank)].ids[static_cast<size_t>(token * topk + k)];
  }
  float weight(int rank, int64_t token, int k) const {
    return routing[static_cast<size_t>(rank)].weights[static_cast<size_t>(token * topk + k)];
  }
  bool weighted() const { return !routing.empty() && !routing[0].weights.empty(); }
  int64_t tokens(int rank) const { return routing[static_cast<size_t>(rank)].tokens; }
};

/// Where a delivered row comes from: source -1 is padding; k is -1 in rank-major rows.
struct RowOrigin {
  int source = -1;
  int64_t token = -1;
  int k = -1;
};
/// The rows that `dest` must receive, in order, without any capacity.
std::vector<RowOrigin> expected_rows(const Scenario& s, int dest);
/// Routes of all sources to each expert of `dest`.
std::vector<int64_t> expected_expert_counts(const Scenario& s, int dest);
/// expected_rows cut at `capacity` rows; kept[source][t * K + k] says which routes of any source to `dest` survive.
struct Kept {
  std::vector<std::vector<uint8_t>> route;  ///< [W][T * K] 1 = valid and below its rank's capacity
};
Kept kept_routes(const Scenario& s, const std::vector<int64_t>& capacity);

/// Key of what the experts return for a row: by (rank, source, token), or for expert-major rows by (expert, source, token, k).
uint64_t output_key(const Scenario& s, uint64_t set, int dest, const RowOrigin& origin);

/// What combine must give for one token of `source`. `kept` may be null: all valid routes.
struct CombineCase {
  CombineOrder order = CombineOrder::per_rank;
  DType type = DType::bf16;
  bool apply_weights = true;
  uint64_t set = 0;
  int num_bias = 0;
  bool identity = false;  ///< experts return the dispatched rows of token_rows(seed, set, ...) unchanged, or scaled:
  const std::vector<float>* expert_scale = nullptr;  ///< by expert; with identity: rows are round(row * scale)
  bool repeats_alias = false;  ///< low latency: an expert that a token names again is one row, of its first k
  const Kept* kept = nullptr;
};
void expected_combine(const Scenario& s, const CombineCase& c, int source, int64_t token, void* out);

/// "" if the rows are equal bit by bit (any NaN equals any NaN), else "column 17: 1.5 (0x3fc0), expected 2 (0x4000)".
std::string row_difference(const void* got, const void* expected, DType type, int64_t hidden);

}  // namespace switchyard::tool
