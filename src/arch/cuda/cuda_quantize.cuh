// SPDX-License-Identifier: Apache-2.0
// Quantisation of a row to fp8 (e4m3) by the lanes of one warp. All lanes call every function together with equal arguments. The
// bytes are those of IEEE division, x / scale, rounded to nearest even, on every path; compile without fast-math flags.
#pragma once

#include <type_traits>

#include "arch/cuda/cuda_rows.cuh"

namespace switchyard::detail {

/// Two channels: `low` in the low byte.
__device__ inline uint32_t e4m3_pair(float low, float high) {
#if __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return static_cast<uint32_t>(e4m3_from_f32(low)) | static_cast<uint32_t>(e4m3_from_f32(high)) << 8;
#endif
}

/// x / scale as IEEE rounds it, where `inverse` is 1 / scale rounded: a quotient and two corrections by its exact remainder,
/// which lose the sign of a zero. For finite x and scale >= kSmallestFastScale: no step underflows where a bit of the e4m3
/// result depends on it.
inline constexpr float kSmallestFastScale = 0x1p-60f;
__device__ inline float divide_by(float x, float scale, float inverse) {
  const float first = __fmul_rn(x, inverse);
  const float second = __fmaf_rn(__fmaf_rn(-first, scale, x), inverse, first);
  const float third = __fmaf_rn(__fmaf_rn(-second, scale, x), inverse, second);
  return __uint_as_float((__float_as_uint(third) & 0x7fffffffu) | (__float_as_uint(x) & 0x80000000u));
}

/// One channel, whatever x is. Scale 0: all finite channels of the group are (nearly) 0.
__device__ inline uint32_t e4m3_exactly(float x, float scale) {
  return isnan(x) ? kE4m3Nan : scale == 0.0f ? 0u : e4m3_pair(__fdiv_rn(x, scale), 0.0f);
}
__device__ __noinline__ inline uint32_t four_exactly(float a, float b, float c, float d, float scale) {
  return e4m3_exactly(a, scale) | e4m3_exactly(b, scale) << 8 | e4m3_exactly(c, scale) << 16 | e4m3_exactly(d, scale) << 24;
}

/// Eight channels as fp8, and the scale of their group: float32, or UE8M0 in the low byte.
struct QuantizedEight {
  uint2 bytes;
  uint32_t scale;
};

/// Eight channels of this lane; `sharing` lanes (4, 8 or 16) have the channels of one group. All lanes together.
__device__ inline QuantizedEight quantize_eight(const float* x, int sharing, ScaleKind kind) {
  constexpr uint32_t kLargestFinite = 0x7f7fffffu;
  const auto magnitude = [](float f) { return __float_as_uint(f) & 0x7fffffffu; };
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = max(largest, magnitude(x[i]));
  const bool odd = __any_sync(kAllLanes, largest > kLargestFinite);
  if (odd) {  // infinities and NaNs do not count
    largest = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = max(largest, magnitude(x[i]) <= kLargestFinite ? magnitude(x[i]) : 0u);
  }
#pragma unroll
  for (int step = 1; step < 16; step *= 2) {
    const uint32_t other = __shfl_xor_sync(kAllLanes, largest, step);
    if (step < sharing) largest = max(largest, other);
  }
  const float amax = __uint_as_float(largest);
  const bool fast = __all_sync(kAllLanes, !odd && (amax == 0.0f || amax >= 448.0f * kSmallestFastScale));
  float scale = fast ? divide_by(amax, kE4m3Max, 1.0f / kE4m3Max) : __fdiv_rn(amax, kE4m3Max);
  const bool zero = scale == 0.0f;
  uint32_t scale_bits = __float_as_uint(scale);
  if (kind == ScaleKind::ue8m0) {
    scale_bits = ue8m0_from_scale(scale);
    scale = f32_from_ue8m0(static_cast<uint8_t>(scale_bits));
  }
  if (zero && !fast) scale = 0.0f;
  if (!fast)
    return {{four_exactly(x[0], x[1], x[2], x[3], scale), four_exactly(x[4], x[5], x[6], x[7], scale)}, scale_bits};
  const float inverse = __frcp_rn(scale);
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = e4m3_pair(divide_by(x[2 * i], scale, inverse), divide_by(x[2 * i + 1], scale, inverse));
  if (amax == 0.0f) return {{0, 0}, scale_bits};
  return {{pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16}, scale_bits};
}

/// Eight elements of a row as they lie in memory: 16-bit ones in `low`, 32-bit ones in both.
struct RawEight {
  uint4 low, high;
};

/// Elements [c, c + 8) of the `hidden` elements of kBytes at `src`; 0 behind the end. `whole`: 16 bytes at a time.
template <int kBytes>
__device__ RawEight load_eight(const void* src, int64_t c, int64_t hidden, bool whole) {
  using Element = std::conditional_t<kBytes == 2, uint16_t, uint32_t>;
  RawEight raw{};
  if (c >= hidden) return raw;
  const auto* at = static_cast<const Element*>(src) + c;
  if (whole) {
    raw.low = reinterpret_cast<const uint4*>(at)[0];
    if (kBytes == 4) raw.high = reinterpret_cast<const uint4*>(at)[1];
    return raw;
  }
  uint32_t words[8] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t bits = c + i < hidden ? at[i] : 0;
    if (kBytes == 4)
      words[i] = bits;
    else
      words[i / 2] |= bits << (i % 2 * 16);
  }
  return {{words[0], words[1], words[2], words[3]}, {words[4], words[5], words[6], words[7]}};
}

__device__ inline void widen_eight(DType type, const RawEight& raw, float* x) {
  if (type == DType::bf16) {
    RowElements<DType::bf16>::widen(raw.low, x);
  } else if (type == DType::f16) {
    RowElements<DType::f16>::widen(raw.low, x);
  } else {
    RowElements<DType::f32>::widen(raw.low, x);
    RowElements<DType::f32>::widen(raw.high, x + 4);
  }
}

/// Destinations of a quantised row: the given lanes hold one each. All lanes hold or'ed `low_bits` of all rows.
struct LaneTargets {
  uint8_t* q;
  void* scales;
  unsigned lanes;
  unsigned low_bits;
};

/// To the destinations, channels [c, c + 8) of this lane and their group's scale.
__device__ inline void store_eight(int lane, const LaneTargets& to, const QuantizedEight& eight, int64_t c, int64_t hidden,
                                   bool whole, ScaleKind kind, int group) {
  const bool writes_scale = lane % (group / 8) == 0;
  const int64_t at = c >> (31 - __clz(group));
#pragma unroll 1
  for (unsigned left = to.lanes; left != 0; left &= left - 1) {
    const int holder = __ffs(static_cast<int>(left)) - 1;
    auto* q = reinterpret_cast<uint8_t*>(__shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(to.q), holder));
    auto* scales = reinterpret_cast<void*>(__shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(to.scales), holder));
    if (c >= hidden) continue;
    if (writes_scale && kind == ScaleKind::f32) static_cast<uint32_t*>(scales)[at] = eight.scale;
    if (writes_scale && kind != ScaleKind::f32) static_cast<uint8_t*>(scales)[at] = static_cast<uint8_t>(eight.scale);
    if (whole) {
      *reinterpret_cast<uint2*>(q + c) = eight.bytes;
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (c + i < hidden) q[c + i] = static_cast<uint8_t>((i < 4 ? eight.bytes.x : eight.bytes.y) >> (i % 4 * 8));
    }
  }
}

/// 256 channels at a time, 8 in a lane, and kAhead times that at once; the next ones are on their way meanwhile. kAhead 1: a
/// small loop, for short rows of kernels that run for microseconds, which code from memory delays more than the loop. One loop
/// for all types, for the same reason. fp8 rows are already quantised; callers check.
template <int kAhead>
__device__ __noinline__ void quantize_row_lanes(int lane, const LaneTargets& to, const void* src, DType type, int64_t hidden,
                                                ScaleKind kind, int group) {
  const bool whole =
      ((static_cast<unsigned>(reinterpret_cast<uintptr_t>(src)) & 15u) | (to.low_bits & 7u) | (hidden & 7)) == 0;
  const auto load = [&](int64_t c) {
    return type == DType::f32 ? load_eight<4>(src, c, hidden, whole) : load_eight<2>(src, c, hidden, whole);
  };
  RawEight next[kAhead];
#pragma unroll
  for (int a = 0; a < kAhead; ++a) next[a] = load(a * 256 + lane * 8);
#pragma unroll 1
  for (int64_t base = 0; base < hidden; base += kAhead * 256) {
    RawEight now[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      now[a] = next[a];
      next[a] = load(base + (kAhead + a) * 256 + lane * 8);
    }
    QuantizedEight eight[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      float x[8];
      widen_eight(type, now[a], x);
      eight[a] = quantize_eight(x, group / 8, kind);
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) store_eight(lane, to, eight[a], base + a * 256 + lane * 8, hidden, whole, kind, group);
  }
}

/// Zeros behind the scales of a row.
__device__ inline void zero_scale_padding(int lane, void* scales, int64_t hidden, ScaleKind kind, int group) {
  const int64_t used = num_scales(hidden, group) * (kind == ScaleKind::f32 ? 4 : 1);
  const auto total = static_cast<int64_t>(scale_row_bytes(hidden, kind, group));
#pragma unroll 1
  for (int64_t i = used + lane; i < total; i += 32) static_cast<uint8_t*>(scales)[i] = 0;
}

}  // namespace switchyard::detail
