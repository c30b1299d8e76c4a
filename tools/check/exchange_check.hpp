// SPDX-License-Identifier: Apache-2.0
// Collective checks that compare one exchange with the oracle. They run on every rank of a group.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "check/check_result.hpp"
#include "check/scenario.hpp"
#include "switchyard/normal.hpp"

namespace switchyard::tool {

/// Collects differences: keeps the first one and counts comparisons.
class Comparison {
 public:
  explicit Comparison(std::string name) { result_.name = std::move(name); }
  template <class A, class B>
  void equal(const A& got, const B& expected, const char* what, int64_t index = -1) {
    ++result_.compared;
    if (got == static_cast<A>(expected)) return;
    fail_unequal(what, index, std::to_string(got), std::to_string(expected));
  }
  void rows_equal(const void* got, const void* expected, DType type, int64_t hidden, const std::string& where);
  void is_true(bool ok, const std::string& text) {
    ++result_.compared;
    if (!ok) fail(text);
  }
  void fail(const std::string& text) {
    if (result_.passed) result_.detail = text;
    result_.passed = false;
  }
  void fail_unequal(const char* what, int64_t index, const std::string& got, const std::string& expected);
  bool passed() const { return result_.passed; }
  CheckResult take() { return std::move(result_); }

 private:
  CheckResult result_;
};

/// Properties of dispatched rows that the scenario does not describe.
struct SentRows {
  DType type = DType::bf16;            ///< type of the source rows
  ScaleKind scales = ScaleKind::none;  ///< scales of fp8 source rows
  ScaleKind quantize = ScaleKind::none;
  uint64_t set = 0;
};

/// Checks all results of a dispatch: row counts, order, bytes and metadata. A negative `capacity` means no limit.
CheckResult check_dispatched(const std::string& name, const Scenario& s, int rank, const Dispatched& d, const SentRows& sent,
                             bool with_metadata, int64_t capacity = -1);
/// `out` is [T, H] of type `c.type`.
CheckResult check_combined(const std::string& name, const Scenario& s, int rank, const void* out, const CombineCase& c);
/// Writes the experts' outputs for the rows of a dispatch. Padding rows are filled with a NaN pattern, so any use of them
/// becomes visible.
void fill_outputs(const Scenario& s, int rank, uint64_t set, int64_t rows, DType type, void* y);
/// The other tables of the handle, and the layout query.
CheckResult check_layout_query(const Scenario& s, int rank);
CheckResult check_matrices(const Scenario& s, int rank, const Handle& handle, int num_channels);
CheckResult check_ledger(const Scenario& s, int rank, const Handle& handle);

}  // namespace switchyard::tool
