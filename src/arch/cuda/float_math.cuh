// SPDX-License-Identifier: Apache-2.0
// Single float32 instructions without a C++ equivalent. The approximate instructions treat subnormal operands and results as 0.
#pragma once

namespace switchyard::detail::ptx {

/// 2^v with a relative error of at most 2^-22; +inf from 128 on, 0 below -126.
__device__ __forceinline__ float exp2(float v) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
/// 1 / v with an error of at most 1 unit in the last place; 0 for infinity and for a subnormal reciprocal.
__device__ __forceinline__ float reciprocal(float v) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
/// Returns NaN if any operand is NaN.
__device__ __forceinline__ float min_or_nan(float a, float b) {
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

}  // namespace switchyard::detail::ptx
