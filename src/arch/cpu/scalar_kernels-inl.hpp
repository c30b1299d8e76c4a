// SPDX-License-Identifier: Apache-2.0
// Row ops without vector code, for compilers whose vector support Highway does not trust and CPUs without vectors: element-wise
// reference code. See kernels-inl.hpp.
#include <algorithm>
#include <cstring>

#include "arch/ops.hpp"
#include "base/number_formats.hpp"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::detail {
namespace HWY_NAMESPACE {

void stream_copy(uint8_t* HWY_RESTRICT dst, const uint8_t* HWY_RESTRICT src, size_t bytes) { std::memcpy(dst, src, bytes); }

void stream_zero(uint8_t* dst, size_t bytes) { std::memset(dst, 0, bytes); }

size_t write_sentinel_lines(uint8_t*, const uint8_t*, size_t, uint64_t, uint64_t) { return 0; }  // word by word: sentinel.hpp

bool lines_have_arrived(const uint8_t* row, size_t words, uint64_t blank) {
  for (size_t i = 0; i < words; ++i) {
    uint64_t word;
    std::memcpy(&word, row + i * 8, 8);
    if (word == blank) return false;
  }
  return true;
}

void reduce_any(const ReduceSpec& spec, bool) {
  for (int64_t c = 0; c < spec.hidden; ++c) {
    float sum = 0;
    if (spec.bias[0] != nullptr) {
      sum = load_element(spec.bias[0], spec.type, c);
      if (spec.bias[1] != nullptr) sum = sum + load_element(spec.bias[1], spec.type, c);
    }
    for (int i = 0; i < spec.n; ++i) {
      float term = load_element(spec.rows[i], spec.type, c);
      if (spec.weights != nullptr) term = spec.weights[i] * term;
      sum = sum + term;
    }
    store_element(spec.out, spec.type, c, sum);
  }
}

void quantize_any(uint8_t* q, uint8_t* scales, const uint8_t* src, DType type, size_t hidden, ScaleKind kind, size_t size) {
  for (size_t first = 0, group = 0; first < hidden; first += size, ++group) {
    const size_t end = std::min(hidden, first + size);
    uint32_t amax = 0;  // bits of a finite magnitude, ordered like the numbers
    bool infinite = false;
    for (size_t c = first; c < end; ++c) {
      const uint32_t magnitude = bits_of(load_element(src, type, static_cast<int64_t>(c))) & 0x7FFFFFFFu;
      if (magnitude < kF32Infinity) amax = std::max(amax, magnitude);
      infinite = infinite || magnitude == kF32Infinity;
    }
    float scale = f32_of_bits(amax) / kE4m3Max;
    if (scale == 0 && infinite) scale = 1;
    const bool zero = scale == 0;
    if (kind == ScaleKind::ue8m0) {
      scales[group] = ue8m0_from_scale(scale);
      scale = f32_from_ue8m0(scales[group]);
    } else {
      std::memcpy(scales + group * sizeof scale, &scale, sizeof scale);
    }
    for (size_t c = first; c < end; ++c) {
      const float value = load_element(src, type, static_cast<int64_t>(c));
      const bool is_nan = (bits_of(value) & 0x7FFFFFFFu) > kF32Infinity;
      q[c] = is_nan ? kE4m3Nan : zero ? uint8_t{0} : e4m3_from_f32(value / scale);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace switchyard::detail
HWY_AFTER_NAMESPACE();
