// SPDX-License-Identifier: Apache-2.0
// A global description of an exchange with closed-form rows: the oracle's input, and the rows of the expected sums.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "oracle/routing.hpp"
#include "oracle/rows.hpp"
#include "run/rows.hpp"
#include "switchyard/normal.hpp"
#include "switchyard/routing.hpp"

namespace switchyard::tool {

/// One exchange. `routing[r]` belongs to rank r.
struct Scenario {
  int world = 1;
  int experts = 1;
  int topk = 1;
  int64_t hidden = 0;
  Layout layout = Layout::rank_major;
  int alignment = 1;
  uint64_t seed = 1;
  std::vector<Routing> routing;

  int first_expert(int rank) const { return oracle::first_expert(experts, world, rank); }
  int owner(int expert) const { return oracle::owner(experts, world, expert); }
  bool valid(int32_t id) const { return id >= 0 && id < experts; }
  int32_t id(int rank, int64_t token, int k) const {
    return routing[static_cast<size_t>(rank)].topk_ids[static_cast<size_t>(token * topk + k)];
  }
  float weight(int rank, int64_t token, int k) const {
    return routing[static_cast<size_t>(rank)].topk_weights[static_cast<size_t>(token * topk + k)];
  }
  bool weighted() const { return !routing.empty() && !routing[0].topk_weights.empty(); }
  int64_t tokens(int rank) const { return routing[static_cast<size_t>(rank)].num_tokens; }

  /// The exchange as the oracle's input. `capacity` applies to every rank, and rows beyond it are dropped; a negative value
  /// means no limit.
  oracle::Problem problem(int64_t capacity = -1) const;
};

/// Key of an expert output: (rank, source, token) or, for expert-major rows, (expert, source, token, k).
uint64_t output_key(const Scenario& s, uint64_t set, int dest, const oracle::Origin& origin);

/// Parameters of a combine.
struct CombineCase {
  CombineOrder order = CombineOrder::per_rank;
  std::vector<int> host_of;  ///< per_host: host of each rank; empty: one host
  DType type = DType::bf16;
  bool apply_weights = true;
  uint64_t set = 0;
  int num_bias = 0;
  bool identity = false;  ///< experts return the dispatched rows of token_rows(seed, set, ...), unchanged or scaled:
  const std::vector<float>* expert_scale = nullptr;  ///< by expert; with identity: rows are round(row * scale)
  bool repeats_alias = false;  ///< low latency: an expert that a token names repeatedly has one row, for its first k
  int64_t capacity = -1;       ///< of every rank in the preceding dispatch; < 0: none
};

/// The sums that a combine must produce on one rank.
class ExpectedSums {
 public:
  /// `s` must outlive this object.
  ExpectedSums(const Scenario& s, const CombineCase& c, int rank);
  /// Writes the sum for one of the rank's tokens.
  void make(int64_t token, void* out);

 private:
  void add_term(int dest, int64_t token, int k);

  const Scenario& s_;
  const CombineCase c_;
  const int rank_;
  const oracle::Owned owned_;
  const bool weighted_;
  const size_t row_bytes_;
  std::vector<std::vector<std::byte>> rows_;  ///< rows of the terms, reused for every token
  std::vector<std::byte> bias_[2];
  std::vector<float> values_;
  std::vector<oracle::Term> terms_;
};

/// "" if the rows are identical bit by bit (any NaN equals any other), else "column 17: 1.5 (0x3fc0), expected 2 (0x4000)".
std::string row_difference(const void* got, const void* expected, DType type, int64_t hidden);

}  // namespace switchyard::tool
