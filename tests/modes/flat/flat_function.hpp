// SPDX-License-Identifier: Apache-2.0
// Expert functions for the row function tests. One depends on the element and all its arguments: it multiplies and then adds,
// rounding after each operation, without contraction. The other contains a pointer.
#pragma once

#include "switchyard/row_function.hpp"

#if defined(__CUDACC__)
#define SWITCHYARD_TEST_FN __host__ __device__
#else
#define SWITCHYARD_TEST_FN
#endif

namespace harness {

struct FlatFunction {
  float offset;

  SWITCHYARD_TEST_FN float operator()(float x, const switchyard::RowOrigin& row, int64_t column) const {
    const auto factor = static_cast<float>(row.expert % 5 - 2) * 0.75f;
    const auto place = static_cast<float>(row.rank * 64 + row.token % 32 + row.k);
    const float added = offset + place * 0.125f + static_cast<float>(column % 13);
#if defined(__CUDA_ARCH__)
    return __fadd_rn(__fmul_rn(x, factor), added);
#else
    return x * factor + added;
#endif
  }
};

/// The equivalent of expert_scale as a function, with one factor for each expert starting at `first`.
struct FactorFunction {
  const float* factors;
  int32_t first;

  SWITCHYARD_TEST_FN float operator()(float x, const switchyard::RowOrigin& row, int64_t) const {
    return x * factors[row.expert - first];
  }
};

/// FlatFunction{offset} for the backend that the suite is linked with; on a GPU, for the current device.
switchyard::RowFunction flat_function(float offset);
/// FactorFunction for the same backend; `factors` is backend memory.
switchyard::RowFunction factor_function(const float* factors, int32_t first);

}  // namespace harness
