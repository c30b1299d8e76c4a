// SPDX-License-Identifier: Apache-2.0
// Routings for tests, generated from a seed. Shares no code with src/routing.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace harness {

enum class Routing {
  uniform,      ///< K distinct experts per token (repeats only if K > E)
  zipf,         ///< skewed: expert e with weight 1 / (e + 1), distinct
  one_rank,     ///< all tokens of all ranks go to experts of the last rank that has experts
  one_expert,   ///< every route to the middle expert: K duplicates per token
  round_robin,  ///< (t * K + k) mod E
  duplicates,   ///< experts drawn with repetition from a small set
  own_rank,     ///< only the rank's own experts (if it has none: no expert): no row leaves the rank
  single_peer,  ///< rank r sends only to rank r + 1: every other pair is empty
};
inline constexpr Routing kAllRoutings[] = {Routing::uniform,     Routing::zipf,       Routing::one_rank, Routing::one_expert,
                                           Routing::round_robin, Routing::duplicates, Routing::own_rank, Routing::single_peer};
std::string to_string(Routing routing);

struct RoutingShape {
  int world = 1;
  int experts = 1;
  int topk = 1;
};
/// Ids [tokens, topk] of one rank. `drop_percent` percent of the routes get an id outside [0, E), and a tenth of that
/// percentage of the tokens lose all their routes. Ids beyond int32 occur only if `wide` is true.
std::vector<int64_t> make_ids(Routing routing, const RoutingShape& shape, uint64_t seed, int rank, int64_t tokens,
                              int drop_percent = 0, bool wide = false);
/// Weights [tokens, topk] in (-0.5, 1): not normalized, some negative, some tiny.
std::vector<float> make_weights(uint64_t seed, int rank, int64_t tokens, int topk);
/// Softmax of random numbers: the weights of a token are positive and add up to 1.
std::vector<float> make_probabilities(uint64_t seed, int rank, int64_t tokens, int topk);

}  // namespace harness
