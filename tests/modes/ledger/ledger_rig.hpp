// SPDX-License-Identifier: Apache-2.0
// One ledger combine: its description, its execution on every rank, and the bitwise comparison with the oracle.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "harness/routings.hpp"
#include "harness/run_cases.hpp"
#include "oracle/ledger.hpp"
#include "oracle/low_latency.hpp"
#include "oracle/rows.hpp"
#include "switchyard/ledger.hpp"

namespace harness {

using oracle::Pattern;
using switchyard::CombineOrder;
using switchyard::DType;
using switchyard::Layout;

struct LedgerScenario {
  std::string name;
  // Routing: `problem` without ids; make_ledger_case fills them in, unless `fixture` is set.
  oracle::Problem problem;
  Routing routing = Routing::uniform;
  std::vector<int64_t> tokens;  ///< per rank
  int drop_percent = 0;         ///< ids outside [0, E), which are not counted
  int mask_percent = 0;         ///< further routes that are -1 in the ledger, although their rows are returned
  bool shuffled = false;        ///< routes have rows in arbitrary order instead of that of a stable sort
  bool fixture = false;         ///< rows, probabilities and ids of the published fixture

  int64_t hidden = 64;
  DType type = DType::f16;
  Pattern pattern = Pattern::random_values;
  bool probs = true;
  uint64_t seed = 1;
  uint64_t first_epoch = 1;
  int repeats = 2;  ///< calls on one object, each with different rows, masks and probabilities
  int max_delay_us = 200;
  int num_sms = 2;  ///< CUDA
};

/// A scenario and the oracle's view of it, shared by all ranks.
struct LedgerCase {
  LedgerScenario scenario;
  oracle::Problem problem;
  oracle::Expected expected;
  oracle::LedgerFixture fixture;
};
std::shared_ptr<const LedgerCase> make_ledger_case(const LedgerScenario& scenario);
switchyard::LedgerConfig make_config(const LedgerCase& c);
/// The oracle's tables, converted to the library's form.
switchyard::LedgerTables golden_tables(const LedgerCase& c, int rank);

/// This rank's inputs and expected results for one call. Everything is a function of (scenario, rank, repetition).
class LedgerRankData {
 public:
  LedgerRankData(const LedgerCase& c, int rank, int repetition);

  const switchyard::LedgerTables& tables() const { return tables_; }
  switchyard::ConstRows y() const;
  const float* probs() const { return probs_.empty() ? nullptr : probs_.data(); }
  size_t num_probs() const { return probs_.size(); }
  std::vector<std::byte>& out() { return out_; }
  /// `rows`: the return buffer in host memory. It is compared bit by bit, except for patterns with words that may arrive as
  /// other NaNs.
  void check_returned(const void* rows, int64_t num_rows, Failures& failures) const;
  void check_out(Failures& failures) const;
  /// Number of rows that a call sends.
  oracle::Traffic traffic() const;
  int64_t row_bytes() const;

 private:
  void fill_row(const oracle::Route& route, void* out) const;

  const LedgerCase& c_;
  const LedgerScenario& s_;
  int rank_;
  uint64_t seed_;
  switchyard::LedgerTables tables_;
  std::vector<std::byte> y_, out_;
  int64_t rows_ = 0;
  std::vector<float> probs_;
};

CaseInfo info_of(const LedgerCase& c);
/// The body of one rank: makes all repetitions on a separate object and checks all results. Collective.
void run_object(switchyard::Group& group, const LedgerCase& c, Failures& failures);
/// Forms a group, runs all cases on it, and returns the mismatches as one string.
std::string run_cases(Ranks ranks, const Workers& workers, const std::vector<std::shared_ptr<const LedgerCase>>& cases);

/// Config for the published format. Its rows are f16.
inline switchyard::LedgerConfig published_config(int64_t tokens, int64_t hidden, int topk, int experts) {
  switchyard::LedgerConfig c;
  c.max_tokens = tokens;
  c.hidden = hidden;
  c.topk = topk;
  c.num_experts = experts;
  return c;
}

}  // namespace harness
