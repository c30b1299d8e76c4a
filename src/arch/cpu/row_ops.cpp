// SPDX-License-Identifier: Apache-2.0
#include "arch/cpu/row_ops.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/number_formats.hpp"

namespace switchyard::detail {

bool copy_row(void* dst, const void* src, size_t bytes) {
  std::memcpy(dst, src, bytes);
  return false;
}

bool multicast_row(void* const* dsts, int n, const void* src, size_t bytes) {
  for (int i = 0; i < n; ++i) std::memcpy(dsts[i], src, bytes);
  return false;
}

bool zero_row(void* dst, size_t bytes) {
  std::memset(dst, 0, bytes);
  return false;
}

bool reduce_rows(const ReduceSpec& spec) {
  for (int64_t c = 0; c < spec.hidden; ++c) {
    float sum = 0;
    if (spec.bias[0] != nullptr) sum = load_element(spec.bias[0], spec.type, c);
    if (spec.bias[1] != nullptr) sum = sum + load_element(spec.bias[1], spec.type, c);
    for (int i = 0; i < spec.n; ++i) {
      float term = load_element(spec.rows[i], spec.type, c);
      if (spec.weights != nullptr) term = spec.weights[i] * term;
      sum = sum + term;
    }
    store_element(spec.out, spec.type, c, sum);
  }
  return false;
}

void quantize_row(uint8_t* q, void* scales, const void* src, DType type, int64_t hidden, ScaleKind kind) {
  auto* scale_bytes = static_cast<std::byte*>(scales);
  std::memset(scale_bytes, 0, scale_row_bytes(hidden, kind));
  for (int64_t begin = 0, group = 0; begin < hidden; begin += kScaleGroup, ++group) {
    const int64_t end = std::min<int64_t>(hidden, begin + kScaleGroup);
    float amax = 0;
    for (int64_t c = begin; c < end; ++c) {
      const float magnitude = std::fabs(load_element(src, type, c));
      if (magnitude <= 3.402823466e+38f) amax = std::max(amax, magnitude);
    }
    float scale = amax / kE4m3Max;
    const bool zero = scale == 0;
    if (kind == ScaleKind::ue8m0) {
      const uint8_t exponent = ue8m0_from_scale(scale);
      scale = f32_from_ue8m0(exponent);
      scale_bytes[group] = std::byte{exponent};
    } else {
      std::memcpy(scale_bytes + group * 4, &scale, 4);
    }
    for (int64_t c = begin; c < end; ++c) {
      const float x = load_element(src, type, c);
      q[c] = std::isnan(x) ? kE4m3Nan : zero ? uint8_t{0} : e4m3_from_f32(x / scale);
    }
  }
}

void flush_streams() {}
bool set_streaming(bool) { return false; }
std::vector<SimdTarget> simd_targets() { return {{1, "scalar"}}; }
SimdTarget current_simd_target() { return {1, "scalar"}; }
void force_simd_target(int64_t) {}

}  // namespace switchyard::detail
