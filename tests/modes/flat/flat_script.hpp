// SPDX-License-Identifier: Apache-2.0
// A script of whole exchanges with scaling experts: every rank makes the script's calls consecutively on one object without
// synchronization in between, and every output element is compared with the oracle, bit by bit.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "modes/low_latency/low_latency_settings.hpp"

namespace harness {

/// One exchange between all ranks.
struct FlatCall {
  std::vector<int64_t> tokens;  ///< per rank
  Routing routing = Routing::uniform;
  int drop_percent = 0;
  bool two_calls = false;  ///< dispatch, then an in-place combine with expert_scale; else moe_all_to_all
  bool weights = true;
  bool scaled = true;  ///< whether expert_scale is passed
  /// Not with two_calls. For x[c] of choice k of token t of rank r (the token's first choice that is expert e), the expert
  /// returns x[c] * 0.75 (e mod 5 - 2) + (s mod 4 + (64 r + t mod 32 + k) / 8 + c mod 13), where s is the script's seed and
  /// each operation is rounded.
  bool function = false;
  bool int64_ids = true;
  Pattern x_pattern = Pattern::random_values;
};

/// Rows are not quantized: `config.scales` is none.
struct FlatScript : LowLatencySettings {
  std::vector<FlatCall> calls;
  /// The contest's data: x normal, weights in [0, 1), experts multiply by 1 + their rank. Also applies the contest's check:
  /// within 1e-2 |y| + 5e-3 of the closed form y = sum_k w_k round(x (1 + rank of expert k)).
  bool contest = false;

  FlatCall& call(std::vector<int64_t> tokens, Routing routing = Routing::uniform);
};

/// Inputs and expected results of a call for all ranks, indexed by rank.
struct FlatExpectation {
  oracle::Problem problem;
  std::vector<oracle::LowLatencyView> views;  ///< two_calls
  std::vector<std::vector<std::byte>> x, out;
  std::vector<std::vector<float>> closed;       ///< contest: [T, H]
  std::vector<oracle::Traffic> sent, returned;  ///< rows in each direction
};

/// A script and its expected results, computed once and shared by all ranks.
struct FlatCase {
  FlatScript script;
  std::vector<float> scale;  ///< by expert
  std::vector<FlatExpectation> calls;

  int64_t row_bytes() const { return script.row_bytes(script.config.dtype); }
};
std::shared_ptr<const FlatCase> make_flat_case(const FlatScript& script);

/// The body of one rank: makes all calls on `exchange` and checks all results. Collective.
void run_on(switchyard::Group& group, switchyard::LowLatencyExchange& exchange, const FlatCase& c, Failures& failures);
/// Forms a group, runs each script on a separate object in it, and returns the mismatches as one string.
std::string run_scripts(Ranks ranks, const Workers& workers, const std::vector<FlatScript>& scripts);

}  // namespace harness
