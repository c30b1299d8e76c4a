// SPDX-License-Identifier: Apache-2.0
// bf16 or f16 rows as host values, and the backward pass of SwiGLU in float64. Shares no code with the library.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "gpu/gemm/gemm_rig.hpp"

namespace gemm_test {

using Numbers = std::vector<double>;

inline double number_of(uint16_t bits, bool f16) {
  return static_cast<double>(f16 ? __half2float(__half(__half_raw{bits}))
                                 : __bfloat162float(__nv_bfloat16(__nv_bfloat16_raw{bits})));
}
inline uint16_t bits_of(double v, bool f16) {
  if (f16) return static_cast<__half_raw>(__double2half(v)).x;
  return static_cast<__nv_bfloat16_raw>(__double2bfloat16(v)).x;
}

inline std::vector<uint16_t> read_bits(const void* device, int64_t count) {
  std::vector<uint16_t> bits(static_cast<size_t>(count));
  ok(cudaMemcpy(bits.data(), device, bits.size() * 2, cudaMemcpyDeviceToHost));
  return bits;
}
inline Numbers read_numbers(const void* device, int64_t count, bool f16) {
  Numbers numbers;
  for (const uint16_t bits : read_bits(device, count)) numbers.push_back(number_of(bits, f16));
  return numbers;
}
inline Numbers read_floats(const void* device, int64_t count) {
  std::vector<float> floats(static_cast<size_t>(count));
  ok(cudaMemcpy(floats.data(), device, floats.size() * 4, cudaMemcpyDeviceToHost));
  return {floats.begin(), floats.end()};
}
/// |a - b| / |b|
inline double relative(const Numbers& a, const Numbers& b) {
  double difference = 0, square = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    square += b[i] * b[i];
  }
  return std::sqrt(difference / square);
}

struct SwigluNumbers {
  double limit = INFINITY, alpha = 1, shift = 0;

  double out(double gate, double up) const {
    const double g = std::min(gate, limit), u = std::clamp(up, -limit, limit);
    return g / (1 + std::exp(-alpha * g)) * (u + shift);
  }
  /// Gradients of the gate and up halves.
  std::pair<double, double> gradient(double gate, double up, double da) const {
    const double g = std::min(gate, limit), u = std::clamp(up, -limit, limit), e = std::exp(-alpha * g);
    const double slope = (1 + e + alpha * g * e) / ((1 + e) * (1 + e));
    return {gate > limit ? 0 : da * (u + shift) * slope, up > limit || up < -limit ? 0 : da * g / (1 + e)};
  }
};

}  // namespace gemm_test
