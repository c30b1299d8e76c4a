// SPDX-License-Identifier: Apache-2.0
// Element-wise operations before and after the products: conversions, SwiGLU, weighted sums. The vector code is selected at run
// time. Any size and any element alignment are allowed; sources and destinations must not overlap.
#pragma once

#include <cstdint>

namespace switchyard::detail {

/// bf16 to float32, exact.
void widen_bf16(const uint16_t* src, int64_t n, float* dst);
/// Converts float32 to bf16: rounds to nearest even, preserves subnormals, and keeps a NaN a NaN.
void round_to_bf16(const float* src, int64_t n, uint16_t* dst);
/// `dst[i] = bf16(silu(gate[i]) * up[i])`, computed in float32 until the single rounding. The error of silu is a few units in
/// the last place of float32.
void swiglu(const float* gate, const float* up, int64_t n, uint16_t* dst);
/// `sum[i] += weight * src[i]`: multiply, then add.
void add_scaled(const float* src, float weight, int64_t n, float* sum);

}  // namespace switchyard::detail
