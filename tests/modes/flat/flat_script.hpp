// SPDX-License-Identifier: Apache-2.0
// Whole exchanges with scaling experts as a script: every rank runs its calls on one object, one after the other without
// meeting in between, and every element that comes out is compared with the oracle, bit by bit.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "modes/low_latency/low_latency_settings.hpp"

namespace harness {

/// One exchange of all ranks.
struct FlatCall {
  std::vector<int64_t> tokens;  ///< per rank
  Routing routing = Routing::uniform;
  int drop_percent = 0;
  bool two_calls = false;  ///< dispatch, then combine with expert_scale from where the rows lie; else moe_all_to_all
  bool weights = true;
  bool scaled = true;  ///< expert_scale given
  /// Not with two_calls: experts make of x[c] of choice k (the token's first that is expert e) of token t of rank r
  /// x[c] * 0.75 (e mod 5 - 2) + (s mod 4 + (64 r + t mod 32 + k) / 8 + c mod 13), s the script's seed, each operation rounded.
  bool function = false;
  bool int64_ids = true;
  Pattern x_pattern = Pattern::random_values;
};

/// Rows are not quantised: `config.scales` is none.
struct FlatScript : LowLatencySettings {
  std::vector<FlatCall> calls;
  /// The contest's data: x normal, weights in [0, 1), experts multiply by 1 + their rank; and also its check: within
  /// 1e-2 |y| + 5e-3 of the closed form y = sum_k w_k round(x (1 + rank of expert k)).
  bool contest = false;

  FlatCall& call(std::vector<int64_t> tokens, Routing routing = Routing::uniform);
};

/// What a call is given and must bring about, for all ranks; index: rank.
struct FlatExpectation {
  oracle::Problem problem;
  std::vector<oracle::LowLatencyView> views;  ///< two_calls
  std::vector<std::vector<std::byte>> x, out;
  std::vector<std::vector<float>> closed;       ///< contest: [T, H]
  std::vector<oracle::Traffic> sent, returned;  ///< rows of each way
};

/// A script and what must come of it, computed once and shared by all ranks.
struct FlatCase {
  FlatScript script;
  std::vector<float> scale;  ///< by expert
  std::vector<FlatExpectation> calls;

  int64_t row_bytes() const { return script.row_bytes(script.config.row_type); }
};
std::shared_ptr<const FlatCase> make_flat_case(const FlatScript& script);

/// The body of one rank: all calls on `exchange`, everything checked. Collective.
void run_on(switchyard::Group& group, switchyard::LowLatencyExchange& exchange, const FlatCase& c, Failures& failures);
/// Forms a group, runs all scripts on it one after the other, each on its own object, returns the mismatches as one text.
std::string run_scripts(Ranks ranks, const Workers& workers, const std::vector<FlatScript>& scripts);

}  // namespace harness
