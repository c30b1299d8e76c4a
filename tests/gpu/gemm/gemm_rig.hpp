// SPDX-License-Identifier: Apache-2.0
// A grouped GEMM and its memory, created from a list of row counts.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "gpu/gemm/gemm_reference.hpp"
#include "switchyard/gemm.hpp"

namespace gemm_test {

constexpr uint16_t kUntouched = 0x7fcd;  // a NaN in both types

inline void ok(cudaError_t status) { ASSERT_EQ(status, cudaSuccess) << cudaGetErrorString(status); }

/// GPU memory.
class DeviceBytes {
 public:
  explicit DeviceBytes(int64_t bytes) { ok(cudaMalloc(&p_, static_cast<size_t>(std::max<int64_t>(bytes, 16)))); }
  ~DeviceBytes() { cudaFree(p_); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  template <class T = void>
  T* as() const {
    return static_cast<T*>(p_);
  }
  template <class T>
  void set(const std::vector<T>& values) const {
    ok(cudaMemcpy(p_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  }

 private:
  void* p_ = nullptr;
};

inline switchyard::GroupedGemmConfig config_of(const Problem& p) {
  switchyard::GroupedGemmConfig c;
  c.num_experts = p.num_experts;
  c.n = p.n;
  c.k = p.k;
  c.dtype = p.f16 ? switchyard::DType::f16 : switchyard::DType::bf16;
  c.order = p.outputs_outside ? switchyard::WeightOrder::nk : switchyard::WeightOrder::kn;
  c.epilogue = static_cast<switchyard::Epilogue>(p.epilogue);
  if (p.limit > 0) c.swiglu.limit = p.limit;
  c.swiglu.alpha = p.alpha;
  c.swiglu.up_shift = p.shift;
  return c;
}

/// The rows of all experts in order, with `gap` rows between experts and after the last one.
class GemmRig {
 public:
  GemmRig(const Problem& problem, const std::vector<int64_t>& rows, Fill kind, int64_t gap = 0)
      : problem_(with_limit(problem)),
        counts_(rows),
        total_(std::accumulate(rows.begin(), rows.end(), int64_t{0}) + gap * static_cast<int64_t>(rows.size() + 1)),
        x_(total_ * problem.k * 2),
        w_(problem.num_experts * problem.n * problem.k * 2),
        out_(total_ * problem.columns() * 2),
        num_rows_(problem.num_experts * 8),
        first_row_(problem.num_experts * 8),
        gemm_(config_of(problem), w_.as()) {
    for (int64_t at = gap; const int64_t r : rows) {
      first_.push_back(at);
      at += r + gap;
    }
    num_rows_.set(rows);
    first_row_.set(first_);
    fill(x_.as(), total_ * problem.k, problem.f16, kind, 1, 1.F);
    fill(w_.as(), problem.num_experts * problem.n * problem.k, problem.f16, kind, 2, 0.05F);
    forget();
  }

  void forget() {
    const std::vector<uint16_t> row(static_cast<size_t>(problem_.columns()), kUntouched);
    if (total_ == 0) return;
    ok(cudaMemcpy(out_.as(), row.data(), row.size() * 2, cudaMemcpyHostToDevice));
    for (int64_t done = 1; done < total_; done *= 2) {
      const size_t bytes = static_cast<size_t>(std::min(done, total_ - done) * problem_.columns() * 2);
      ok(cudaMemcpy(out_.as<uint16_t>() + done * problem_.columns(), out_.as(), bytes, cudaMemcpyDeviceToDevice));
    }
  }
  switchyard::ExpertRows ranges() const {
    switchyard::ExpertRows r;
    r.num_rows = num_rows_.as<int64_t>();
    r.first_row = first_row_.as<int64_t>();
    return r;
  }
  switchyard::ConstRows x() const {
    return {x_.as(), total_, problem_.k, gemm_.config().dtype, nullptr, switchyard::ScaleKind::none};
  }
  switchyard::Rows out() const {
    return {out_.as(), total_, problem_.columns(), gemm_.config().dtype, nullptr, switchyard::ScaleKind::none};
  }
  void run(const switchyard::GroupedGemmOptions& options = {}) { gemm_.run(x(), ranges(), out(), options); }

  /// Compares all rows of each expert or, with `every` > 1, only the first, the last and every `every`-th row.
  Difference difference(int64_t every = 1) const {
    Difference sum;
    const auto add = [&](int e, int64_t first, int64_t rows) {
      const Difference d = compare(problem_, x_.as(), w_.as(), out_.as(), e, first, rows);
      sum.elements += d.elements;
      sum.unequal += d.unequal;
      sum.norm = std::max(sum.norm, d.norm);
    };
    for (int e = 0; e < problem_.num_experts; ++e) {
      const int64_t rows = counts_[static_cast<size_t>(e)], first = first_[static_cast<size_t>(e)];
      if (rows == 0) continue;
      if (every == 1) {
        add(e, first, rows);
        continue;
      }
      for (int64_t r = 0; r < rows; r += every) add(e, first + r, 1);
      add(e, first + rows - 1, 1);
    }
    return sum;
  }
  /// Returns the number of written elements in rows that belong to no expert.
  int64_t touched_outside() const {
    int64_t at = 0, found = 0;
    const auto look = [&](int64_t end) {
      const uint16_t* row = out_.as<uint16_t>() + at * problem_.columns();
      if (end > at) found += count_other(row, (end - at) * problem_.columns(), kUntouched);
    };
    for (size_t e = 0; e < counts_.size(); ++e) {
      look(first_[e]);
      at = first_[e] + counts_[e];
    }
    look(total_);
    return found;
  }

  switchyard::GroupedGemm& gemm() { return gemm_; }
  const void* weights() const { return w_.as(); }
  const DeviceBytes& num_rows() const { return num_rows_; }
  const DeviceBytes& memory_of_out() const { return out_; }
  const std::vector<int64_t>& first() const { return first_; }
  int64_t total() const { return total_; }
  /// Sets the counts used by difference(), touched_outside() and the kernel.
  void set_counts(const std::vector<int64_t>& counts) {
    counts_ = counts;
    num_rows_.set(counts);
  }

 private:
  static Problem with_limit(Problem p) {
    if (p.limit <= 0) p.limit = std::numeric_limits<float>::infinity();
    return p;
  }

  Problem problem_;
  std::vector<int64_t> counts_, first_;
  int64_t total_;
  DeviceBytes x_, w_, out_, num_rows_, first_row_;
  switchyard::GroupedGemm gemm_;
};

}  // namespace gemm_test
