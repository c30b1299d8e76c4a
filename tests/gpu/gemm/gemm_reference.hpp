// SPDX-License-Identifier: Apache-2.0
// The oracle for the grouped GEMM: computes every output in float64, one thread per output, and compares, all in GPU memory.
// Shares no code with the library.
#pragma once

#include <cstdint>

namespace gemm_test {

/// Shapes and options, as plain numbers.
struct Problem {
  int num_experts = 1;
  int64_t n = 0, k = 0;
  bool f16 = false;
  bool outputs_outside = true;  ///< weights [E, N, K]; else [E, K, N]
  int epilogue = 0;             ///< 0: none, 1: relu, 2: silu, 3: swiglu
  float limit = 0, alpha = 1, shift = 0;

  constexpr int64_t columns() const { return epilogue == 3 ? n / 2 : n; }
};

enum class Fill : int {
  integers,  ///< -2 ... 2: sums are exact in float32
  normal,    ///< normally distributed, with the given scale
};
/// Fills `p` with elements of the problem's type, each a closed-form function of (seed, index).
void fill(void* p, int64_t count, bool f16, Fill kind, uint64_t seed, float scale);

struct Difference {
  int64_t elements = 0;  ///< number of elements compared
  int64_t unequal = 0;   ///< number of elements whose bits differ from the reference rounded once to the type
  double norm = 0;       ///< |out - reference| / |reference|
};
/// Compares rows [first, first + rows) of `x` and `out`, computed with expert `expert`'s weights. The caller sums the results
/// of several calls.
Difference compare(const Problem& p, const void* x, const void* weights, const void* out, int expert, int64_t first,
                   int64_t rows);
/// A gradient of one expert's weights, [n, k]: float32 if `wide`, otherwise of the rows' type.
struct GradientProblem {
  int64_t n = 0, k = 0;
  bool f16 = false, wide = true;
};
/// Compares `dw` of one expert with the sum over rows [first, first + rows) of `dy` and `x`, rounded to the gradients' type
/// and, if `before` is not null, added to `before`.
Difference compare_gradient(const GradientProblem& p, const void* dy, const void* x, const void* dw, const void* before,
                            int64_t first, int64_t rows);
/// Number of elements in [0, count) of `p` that differ from `bits`.
int64_t count_other(const void* p, int64_t count, uint16_t bits);
/// Number of elements in which a and b differ.
int64_t count_unequal(const void* a, const void* b, int64_t count);

}  // namespace gemm_test
