// SPDX-License-Identifier: Apache-2.0
// A weight gradient and its memory, created from a list of row counts.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "gpu/gemm/gemm_reference.hpp"
#include "gpu/gemm/gemm_rig.hpp"
#include "switchyard/gemm_gradients.hpp"

namespace gemm_test {

inline void expect_error(switchyard::ErrorCode code, const std::string& part, const std::function<void()>& f) {
  try {
    f();
    ADD_FAILURE() << "no error that says " << part;
  } catch (const switchyard::Error& e) {
    EXPECT_EQ(e.code(), code) << e.what();
    EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
  }
}

/// Every class of row counts: none, one, and counts around 16 (the rows per instruction), one stage and two stages.
inline std::vector<int64_t> gradient_counts() { return {1, 15, 16, 17, 0, 31, 32, 33, 63, 64, 65, 255, 256, 257, 0, 1600}; }

struct GradientCase {
  int64_t n = 0, k = 0;
  bool f16 = false, wide = true, add = false;

  GradientProblem problem() const { return {n, k, f16, wide}; }
  int64_t element() const { return wide ? 4 : 2; }
  switchyard::DType type() const { return f16 ? switchyard::DType::f16 : switchyard::DType::bf16; }
};

/// The rows of all experts in order, with `gap` rows of NaN between experts and after the last one. Gradients are NaN before a
/// call that overwrites, and finite before a call that adds.
class GradientRig {
 public:
  GradientRig(const GradientCase& given, const std::vector<int64_t>& rows, Fill kind, int64_t gap = 0)
      : case_(given),
        kind_(kind),
        counts_(rows),
        total_(std::accumulate(rows.begin(), rows.end(), int64_t{0}) + gap * static_cast<int64_t>(rows.size() + 1)),
        dy_(total_ * given.n * 2),
        x_(total_ * given.k * 2),
        dw_(bytes() + kGuard),
        before_(given.add ? bytes() : 0),
        num_rows_(static_cast<int64_t>(rows.size()) * 8),
        first_row_(static_cast<int64_t>(rows.size()) * 8),
        gradient_(config()) {
    fill(dy_.as(), total_ * given.n, given.f16, kind, 1, 1.F);
    fill(x_.as(), total_ * given.k, given.f16, kind, 2, 1.F);
    int64_t at = 0;
    for (const int64_t r : rows) {
      spoil(at, gap);
      first_.push_back(at += gap);
      at += r;
    }
    spoil(at, gap);
    num_rows_.set(rows);
    first_row_.set(first_);
    if (given.add) fill_before();
    forget();
  }

  switchyard::WeightGradientConfig config() const {
    switchyard::WeightGradientConfig c;
    c.num_experts = static_cast<int>(counts_.size());
    c.n = case_.n;
    c.k = case_.k;
    c.dtype = case_.type();
    c.out_dtype = case_.wide ? switchyard::DType::f32 : case_.type();
    c.add = case_.add;
    return c;
  }
  /// Sets rows [first, first + rows) of both operands to NaN.
  void spoil(int64_t first, int64_t rows) const {
    ok(cudaMemset(dy_.as<uint16_t>() + first * case_.n, 0xff, static_cast<size_t>(rows * case_.n * 2)));
    ok(cudaMemset(x_.as<uint16_t>() + first * case_.k, 0xff, static_cast<size_t>(rows * case_.k * 2)));
  }
  /// Restores the gradients to their content before the first call.
  void forget() const {
    if (case_.add)
      ok(cudaMemcpy(dw_.as(), before_.as(), static_cast<size_t>(bytes()), cudaMemcpyDeviceToDevice));
    else
      ok(cudaMemset(dw_.as(), 0xff, static_cast<size_t>(bytes())));
    ok(cudaMemset(dw_.as<char>() + bytes(), 0x5a, kGuard));
  }

  switchyard::ConstRows dy() const { return {dy_.as(), total_, case_.n, case_.type()}; }
  switchyard::ConstRows x() const { return {x_.as(), total_, case_.k, case_.type()}; }
  void* dw() const { return dw_.as(); }
  /// Whether the first gradient of an expert is NaN.
  bool begins_with_nan(int expert) const {
    float wide = 0;
    uint16_t narrow = 0;
    if (case_.wide)
      ok(cudaMemcpy(&wide, dw_of(expert), sizeof wide, cudaMemcpyDeviceToHost));
    else
      ok(cudaMemcpy(&narrow, dw_of(expert), sizeof narrow, cudaMemcpyDeviceToHost));
    return std::isnan(wide) || (narrow & 0x7fff) > (case_.f16 ? 0x7c00 : 0x7f80);
  }
  const void* dw_of(int expert) const { return dw_.as<char>() + expert * expert_bytes(); }
  int64_t expert_bytes() const { return case_.n * case_.k * case_.element(); }
  int64_t bytes() const { return static_cast<int64_t>(counts_.size()) * expert_bytes(); }
  switchyard::ExpertRows ranges() const {
    switchyard::ExpertRows r;
    r.num_rows = num_rows_.as<int64_t>();
    r.first_row = first_row_.as<int64_t>();
    return r;
  }
  void run(const switchyard::GroupedGemmOptions& options = {}) { gradient_.run(dy(), x(), ranges(), dw(), options); }

  /// Compares one expert's gradients.
  Difference difference(int expert) const {
    const size_t e = static_cast<size_t>(expert);
    return compare_gradient(case_.problem(), dy_.as(), x_.as(), dw_of(expert),
                            case_.add ? before_.as<char>() + expert * expert_bytes() : nullptr, first_[e], counts_[e]);
  }
  /// Compares all gradients; returns the total number of unequal elements and the largest norm. Written elements after the
  /// gradients count as unequal.
  Difference difference() const {
    Difference sum;
    for (int e = 0; e < static_cast<int>(counts_.size()); ++e) {
      const Difference d = difference(e);
      sum.elements += d.elements;
      sum.unequal += d.unequal;
      if (!std::isnan(sum.norm) && !(d.norm <= sum.norm)) sum.norm = d.norm;  // a NaN is kept
    }
    sum.unequal += count_other(dw_.as<char>() + bytes(), kGuard / 2, 0x5a5a);
    return sum;
  }

  switchyard::WeightGradient& gradient() { return gradient_; }
  const std::vector<int64_t>& first() const { return first_; }
  const DeviceBytes& num_rows() const { return num_rows_; }
  /// Sets the counts used by difference() and the kernel.
  void set_counts(const std::vector<int64_t>& counts) {
    counts_ = counts;
    num_rows_.set(counts);
  }
  /// Sets the first rows used by difference(). They may intentionally differ from those of the kernel.
  void set_first(const std::vector<int64_t>& first) { first_ = first; }

 private:
  static constexpr int64_t kGuard = 4096;

  void fill_before() const {
    const int64_t count = bytes() / case_.element();
    if (!case_.wide) {
      fill(before_.as(), count, case_.f16, kind_, 3, 1.F);
      return;
    }
    std::vector<float> values(static_cast<size_t>(count));
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i * 2654435761u % 17) - 8.F;
    before_.set(values);
  }

  GradientCase case_;
  Fill kind_;
  std::vector<int64_t> counts_, first_;
  int64_t total_;
  DeviceBytes dy_, x_, dw_, before_, num_rows_, first_row_;
  switchyard::WeightGradient gradient_;
};

}  // namespace gemm_test
