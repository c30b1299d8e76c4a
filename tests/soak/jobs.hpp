// SPDX-License-Identifier: Apache-2.0
// Jobs that the soak runs on GPUs and CPUs between the library's calls: experts that multiply rows by a factor, and judges that
// derive every result from the call number alone (modes/low_latency/closed_form.hpp). For token t, a layer in any mode must
// return exactly x[t] times the sum of the factors of its experts.
#pragma once

#include "modes/low_latency/closed_form.hpp"

namespace soak {

using harness::CallArrays;
using harness::CallNumber;
using harness::Checked;
using harness::exact_bits;
using harness::Form;
using harness::kNaN;
using harness::kUntouched;
using harness::Verdict;
using switchyard::DType;

inline constexpr DType kType = DType::bf16;

SWITCHYARD_FN inline float value_of(const void* rows, int64_t i) {
  const uint32_t bits = harness::element(kType, rows, i) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
SWITCHYARD_FN inline void set_value(void* rows, int64_t i, float value) {
  harness::set_element(kType, rows, i, exact_bits(kType, value));
}

/// Creates the rows of call `number` for the tokens of call `routed`, whose ids are reused. The outputs are filled with
/// kUntouched.
struct MakeRows {
  Form f;
  CallNumber number, routed;
  int rank;
  void *x, *out;

  SWITCHYARD_FN int64_t size() const { return int64_t{f.max_tokens} * f.hidden; }
  SWITCHYARD_FN void operator()(int64_t i) const {
    const int t = static_cast<int>(i / f.hidden), c = static_cast<int>(i % f.hidden);
    const bool given = t < f.tokens(routed(), rank);
    harness::set_element(kType, x, i, given ? exact_bits(kType, f.x(number(), rank, t, c)) : kNaN);
    harness::set_element(kType, out, i, kUntouched);
  }
};

/// Rank-major layout: multiplies each row by the sum of the factors of its local experts; rows without a local expert become 0.
struct RankMajorExperts {
  Form f;
  int rank;
  const void* x;
  const int32_t* ids;  ///< [rows, K] local
  void* y;
  int64_t rows;

  SWITCHYARD_FN int64_t size() const { return rows * f.hidden; }
  SWITCHYARD_FN void operator()(int64_t i) const {
    const int64_t row = i / f.hidden;
    float factors = 0;
    for (int k = 0; k < f.topk; ++k) {
      const int id = ids[row * f.topk + k];
      if (id >= 0) factors += f.factor(f.first_expert(rank) + id);
    }
    set_value(y, i, factors == 0 ? 0.0f : value_of(x, i) * factors);
  }
};

/// Judges a row that source `from >> 48` sent to a local expert in call `number`, routed as in call `routed`, and then
/// multiplies it by the expert's factor.
struct ExpertRow {
  Form f;
  CallNumber number, routed;
  int rank;
  const void* x;
  void* y;
  Verdict* verdict;

  SWITCHYARD_FN void operator()(int local, int64_t row, int c, int64_t from) const {
    const int expert = f.first_expert(rank) + local;
    const int source = static_cast<int>(from >> 48), k = static_cast<int>(from >> 32 & 0xFFFF), t = static_cast<int>(from);
    const int64_t at = row * f.hidden + c;
    const bool valid = source >= 0 && source < f.world && k < f.topk && t >= 0;
    if (c == 0) {
      const int chosen = valid ? f.id(routed(), source, t, k) : -2;
      verdict->judge(Checked::row_source, number(), row, static_cast<uint32_t>(expert), static_cast<uint32_t>(chosen));
      verdict->count_row();
    }
    if (valid)
      verdict->judge(Checked::row, number(), at, exact_bits(kType, f.x(number(), source, t, c)),
                     harness::element(kType, x, at));
    set_value(y, at, value_of(x, at) * f.factor(expert));
  }
};

/// Expert-major rows. Padding becomes NaN, because it must not be read.
struct ExpertMajorExperts {
  ExpertRow expert_row;
  const int64_t* row_source;
  const int64_t* first_row;  ///< [local experts]
  int64_t rows;

  SWITCHYARD_FN int64_t size() const { return rows * expert_row.f.hidden; }
  SWITCHYARD_FN void operator()(int64_t i) const {
    const Form& f = expert_row.f;
    const int64_t row = i / f.hidden, from = row_source[row];
    if (from < 0) return harness::set_element(kType, expert_row.y, i, kNaN);
    int local = 0;
    while (local + 1 < f.experts_of(expert_row.rank) && first_row[local + 1] <= row) ++local;
    expert_row(local, row, static_cast<int>(i % f.hidden), from);
  }
};

/// Processes the masked rows of low-latency mode. Rows beyond rows_of_expert become NaN.
struct MaskedExperts {
  ExpertRow expert_row;
  const int32_t* rows_of_expert;
  const int64_t* row_source;
  int64_t rows_per_expert;

  SWITCHYARD_FN int64_t size() const {
    return expert_row.f.experts_of(expert_row.rank) * rows_per_expert * expert_row.f.hidden;
  }
  SWITCHYARD_FN void operator()(int64_t i) const {
    const int64_t row = i / expert_row.f.hidden;
    const int local = static_cast<int>(row / rows_per_expert);
    if (row % rows_per_expert >= rows_of_expert[local]) return harness::set_element(kType, expert_row.y, i, kNaN);
    expert_row(local, row, static_cast<int>(i % expert_row.f.hidden), row_source[row]);
  }
};

/// Judges the sums of a layer, and checks that nothing was written beyond them.
struct JudgeLayer {
  Form f;
  CallNumber number, routed;
  int rank;
  const uint8_t* dropped;  ///< [T, K], or null
  bool nothing;            ///< the layer must not have written any output
  const void* out;
  Verdict* verdict;

  SWITCHYARD_FN int64_t size() const { return int64_t{f.max_tokens} * f.hidden; }
  SWITCHYARD_FN void operator()(int64_t i) const {
    if (i == 0) verdict->count_call();
    const int t = static_cast<int>(i / f.hidden), c = static_cast<int>(i % f.hidden);
    const uint32_t got = harness::element(kType, out, i);
    if (nothing || t >= f.tokens(routed(), rank)) {
      verdict->judge(Checked::beyond_tokens, number(), i, kUntouched & 0xFFFF, got);
      return;
    }
    float factors = 0;
    for (int k = 0; k < f.topk; ++k) {
      const int id = f.id(routed(), rank, t, k);
      if (f.is_expert(id) && (dropped == nullptr || dropped[t * f.topk + k] == 0)) factors += f.factor(id);
    }
    const float sum = factors == 0 ? 0.0f : f.x(number(), rank, t, c) * factors;
    // A sum of zeros may have either sign.
    const bool zero = sum == 0 && (got & 0x7FFF) == 0;
    verdict->judge(Checked::sum, number(), i, zero ? got : exact_bits(kType, sum), got);
  }
};

/// Sets a word from which the jobs in a graph read their call number.
struct SetNumber {
  uint64_t* word;
  uint64_t value;
  SWITCHYARD_FN int64_t size() const { return 1; }
  SWITCHYARD_FN void operator()(int64_t) const { *word = value; }
};

/// Resets a verdict.
struct ClearVerdict {
  Verdict* verdict;
  SWITCHYARD_FN int64_t size() const { return 1; }
  SWITCHYARD_FN void operator()(int64_t) const { *verdict = Verdict{}; }
};

/// Fills the values that another library sums concurrently with the exchange.
struct FillNumbers {
  float* numbers;
  int64_t count;
  float value;
  SWITCHYARD_FN int64_t size() const { return count; }
  SWITCHYARD_FN void operator()(int64_t i) const { numbers[i] = value; }
};
struct JudgeNumbers {
  const float* numbers;
  int64_t count;
  float value;
  uint64_t number;
  Verdict* verdict;
  SWITCHYARD_FN int64_t size() const { return count; }
  SWITCHYARD_FN void operator()(int64_t i) const {
    verdict->judge(Checked::sum, number, i, exact_bits(DType::f32, value), exact_bits(DType::f32, numbers[i]));
  }
};

}  // namespace soak
