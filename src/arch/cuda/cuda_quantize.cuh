// SPDX-License-Identifier: Apache-2.0
// Quantization of a row to fp8 (e4m3) by the lanes of one warp. All lanes must call each function together with identical
// arguments. All paths produce the bytes of IEEE division, x / scale, rounded to nearest even; compile without fast-math flags.
#pragma once

#include <type_traits>

#include "arch/cuda/cuda_rows.cuh"
#include "arch/cuda/divide_by.hpp"

namespace switchyard::detail {

/// Two columns; `low` is in the low byte.
__device__ inline uint32_t e4m3_pair(float low, float high) {
#if __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return static_cast<uint32_t>(e4m3_from_f32(low)) | static_cast<uint32_t>(e4m3_from_f32(high)) << 8;
#endif
}

/// Eight elements of a row in their memory format: 16-bit elements use only `low`, 32-bit elements use both members.
struct RawEight {
  uint4 low, high;
};

/// Elements [c, c + 8) of the `hidden` elements at `src`; 0 beyond the end. kWhole: loads 16 bytes at a time.
template <DType T, bool kWhole>
__device__ RawEight load_eight(const void* src, int c, int hidden) {
  using Element = std::conditional_t<T == DType::f32, uint32_t, uint16_t>;
  RawEight raw{};
  if (c >= hidden) return raw;
  const auto* at = static_cast<const Element*>(src) + c;
  if constexpr (kWhole) {
    raw.low = reinterpret_cast<const uint4*>(at)[0];
    if (T == DType::f32) raw.high = reinterpret_cast<const uint4*>(at)[1];
    return raw;
  }
  uint32_t words[8] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t bits = c + i < hidden ? at[i] : 0;
    if (T == DType::f32)
      words[i] = bits;
    else
      words[i / 2] |= bits << (i % 2 * 16);
  }
  return {{words[0], words[1], words[2], words[3]}, {words[4], words[5], words[6], words[7]}};
}

template <DType T>
__device__ void widen_eight(const RawEight& raw, float* x) {
  RowElements<T>::widen(raw.low, x);
  if (T == DType::f32) RowElements<T>::widen(raw.high, x + 4);
}

/// The largest magnitude among eight elements, as bits of their type; infinities and NaNs compare as the largest.
template <DType T>
__device__ uint32_t largest_bits(const RawEight& raw) {
  if constexpr (T == DType::f32) {
    const auto of = [](const uint4& v) {
      return max(max(v.x & 0x7fffffffu, v.y & 0x7fffffffu), max(v.z & 0x7fffffffu, v.w & 0x7fffffffu));
    };
    return max(of(raw.low), of(raw.high));
  } else {
    const auto of = [](uint32_t v) { return v & 0x7fff7fffu; };
    const uint32_t pair = __vmaxu2(__vmaxu2(of(raw.low.x), of(raw.low.y)), __vmaxu2(of(raw.low.z), of(raw.low.w)));
    return max(pair & 0xffffu, pair >> 16);
  }
}
template <DType T>
__device__ float value_of_bits(uint32_t bits) {
  if constexpr (T == DType::f32) return __uint_as_float(bits);
  if constexpr (T == DType::bf16) return __uint_as_float(bits << 16);
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

/// The sign bits of elements [4 i, 4 i + 4), each in the most significant bit of a byte.
template <DType T>
__device__ uint32_t four_signs(const RawEight& raw, int i) {
  if constexpr (T == DType::f32) {
    const uint4& v = i == 0 ? raw.low : raw.high;
    return __byte_perm(__byte_perm(v.x, v.y, 0x0073), __byte_perm(v.z, v.w, 0x0073), 0x5410) & 0x80808080u;
  } else {
    return __byte_perm(i == 0 ? raw.low.x : raw.low.z, i == 0 ? raw.low.y : raw.low.w, 0x7531) & 0x80808080u;
  }
}

struct PowerOfTwoScale {
  uint32_t exponent;
  float scale;
};
__device__ __forceinline__ PowerOfTwoScale power_of_two_in_line(float scale) {
  const uint8_t exponent = ue8m0_from_scale(scale);
  return {exponent, f32_from_ue8m0(exponent)};
}
__device__ __noinline__ inline PowerOfTwoScale power_of_two_called(float scale) { return power_of_two_in_line(scale); }
/// Rare work is not inlined, to keep the code small. kInLine inlines it in kernels whose warps change their register count: a
/// function called both before and after the change is limited to the registers available before it, and so are its callers.
template <bool kInLine>
__device__ __forceinline__ PowerOfTwoScale power_of_two_from(float scale) {
  if constexpr (kInLine)
    return power_of_two_in_line(scale);
  else
    return power_of_two_called(scale);
}

/// A lane's columns of a row: 8 or 16 consecutive columns.
template <int kEights>
struct RawColumns {
  RawEight eight[kEights];
};
/// A lane's columns as fp8, and their group's scale: float32, or UE8M0 in the low byte.
template <int kEights>
struct QuantizedColumns {
  uint2 bytes[kEights];
  uint32_t scale;
};

/// Handles all values. Infinities and NaNs do not affect the scale, except that the scale is 1 if a group's only nonzero values
/// include an infinity. Groups of tiny values use IEEE division.
template <DType T, int kEights, bool kInLine>
__device__ __forceinline__ QuantizedColumns<kEights> quantize_any_in_line(const RawColumns<kEights>& raw, int sharing,
                                                                          ScaleKind kind) {
  constexpr int kColumns = kEights * 8;
  float x[kColumns];
#pragma unroll
  for (int e = 0; e < kEights; ++e) widen_eight<T>(raw.eight[e], x + e * 8);
  float amax = 0.0f;
  int infinite = 0;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if (isfinite(x[i])) amax = fmaxf(amax, fabsf(x[i]));
    infinite |= isinf(x[i]) ? 1 : 0;
  }
#pragma unroll
  for (int step = 1; step < 16 / kEights; step *= 2) {
    const float other = __shfl_xor_sync(kAllLanes, amax, step);
    const int others = __shfl_xor_sync(kAllLanes, infinite, step);
    if (step < sharing) {
      amax = fmaxf(amax, other);
      infinite |= others;
    }
  }
  float scale = __fdiv_rn(amax, kE4m3Max);
  if (scale == 0.0f && infinite != 0) scale = 1.0f;
  const bool zero = scale == 0.0f;
  QuantizedColumns<kEights> to{{}, __float_as_uint(scale)};
  if (kind == ScaleKind::ue8m0) {
    const PowerOfTwoScale power = power_of_two_from<kInLine>(scale);
    to.scale = power.exponent;
    scale = power.scale;
  }
  uint32_t words[kEights * 2] = {};
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const uint32_t byte = isnan(x[i]) ? kE4m3Nan : zero ? 0u : e4m3_pair(__fdiv_rn(x[i], scale), 0.0f);
    words[i / 4] |= byte << (i % 4 * 8);
  }
#pragma unroll
  for (int e = 0; e < kEights; ++e) to.bytes[e] = {words[2 * e], words[2 * e + 1]};
  return to;
}

template <DType T, int kEights>
__device__ __noinline__ QuantizedColumns<kEights> quantize_any_called(RawColumns<kEights> raw, int sharing, ScaleKind kind) {
  return quantize_any_in_line<T, kEights, false>(raw, sharing, kind);
}
template <DType T, int kEights, bool kInLine>
__device__ __forceinline__ QuantizedColumns<kEights> quantize_any(const RawColumns<kEights>& raw, int sharing, ScaleKind kind) {
  if constexpr (kInLine)
    return quantize_any_in_line<T, kEights, true>(raw, sharing, kind);
  else
    return quantize_any_called<T, kEights>(raw, sharing, kind);
}

/// Quantizes this lane's columns; the columns of one group are held by `sharing` lanes, at most 16 / kEights. Call from all
/// lanes.
template <DType T, int kEights, bool kInLine = false>
__device__ QuantizedColumns<kEights> quantize_columns(const RawColumns<kEights>& raw, int sharing, ScaleKind kind) {
  uint32_t largest = largest_bits<T>(raw.eight[0]);
#pragma unroll
  for (int e = 1; e < kEights; ++e) largest = max(largest, largest_bits<T>(raw.eight[e]));
#pragma unroll
  for (int step = 1; step < 16 / kEights; step *= 2) {
    const uint32_t other = __shfl_xor_sync(kAllLanes, largest, step);
    if (step < sharing) largest = max(largest, other);
  }
  const float amax = value_of_bits<T>(largest);
  const bool fast = amax <= 3.402823466e+38f && (largest == 0 || amax >= 448.0f * kSmallestFastScale);
  if (!__all_sync(kAllLanes, fast)) return quantize_any<T, kEights, kInLine>(raw, sharing, kind);
  float scale = divide_by(amax, kE4m3Max, 1.0f / kE4m3Max);
  QuantizedColumns<kEights> to{{}, __float_as_uint(scale)};
  if (kind == ScaleKind::ue8m0) {
    const PowerOfTwoScale power = power_of_two_from<kInLine>(scale);
    to.scale = power.exponent;
    scale = power.scale;
  }
  const float inverse = __frcp_rn(scale);
#pragma unroll
  for (int e = 0; e < kEights; ++e) {
    float x[8];
    widen_eight<T>(raw.eight[e], x);
    const auto four = [&](int i) {
      const auto pair = [&](int j) { return e4m3_pair(divide_by(x[j], scale, inverse), divide_by(x[j + 1], scale, inverse)); };
      const uint32_t bytes = pair(4 * i) | pair(4 * i + 2) << 16;
      return largest == 0 ? 0 : (bytes & 0x7f7f7f7fu) | four_signs<T>(raw.eight[e], i);
    };
    to.bytes[e] = {four(0), four(1)};
  }
  return to;
}

/// Quantizes this lane's columns with a given scale: e4m3(x * inverse), rounded to nearest even, saturated at 448; NaN remains
/// NaN. `inverse` is 1 / scale.
template <DType T, int kEights>
__device__ __forceinline__ QuantizedColumns<kEights> quantize_fixed(const RawColumns<kEights>& raw, float scale,
                                                                    float inverse) {
  QuantizedColumns<kEights> to{{}, __float_as_uint(scale)};
#pragma unroll
  for (int e = 0; e < kEights; ++e) {
    float x[8];
    widen_eight<T>(raw.eight[e], x);
    const auto four = [&](int i) {
      return e4m3_pair(x[i] * inverse, x[i + 1] * inverse) | e4m3_pair(x[i + 2] * inverse, x[i + 3] * inverse) << 16;
    };
    to.bytes[e] = {four(0), four(4)};
  }
  return to;
}

/// Destinations of a quantized row, one per given lane. `low_bits`, in all lanes, is the bitwise OR of the low bits of all
/// rows.
struct LaneTargets {
  uint8_t* q;
  void* scales;
  unsigned lanes;
  unsigned low_bits;
};

/// Stores this lane's columns, starting at column c, and their group's scale to the destinations.
template <bool kWhole, int kEights>
__device__ void store_columns(int lane, const LaneTargets& to, const QuantizedColumns<kEights>& given, int c, int hidden,
                              ScaleKind kind, int group) {
  const bool writes_scale = c < hidden && lane % (group / (kEights * 8)) == 0;
  const int at = c >> (31 - __clz(group));
#pragma unroll 1
  for (unsigned left = to.lanes; left != 0; left &= left - 1) {
    const int holder = __ffs(static_cast<int>(left)) - 1;
    auto* q = reinterpret_cast<uint8_t*>(__shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(to.q), holder));
    auto* scales = reinterpret_cast<void*>(__shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(to.scales), holder));
    if (kWhole && kEights == 2 && c + 8 < hidden) {
      const uint2 low = given.bytes[0], high = given.bytes[kEights - 1];
      *reinterpret_cast<uint4*>(q + c) = uint4{low.x, low.y, high.x, high.y};
    } else if (kWhole && c < hidden) {
      *reinterpret_cast<uint2*>(q + c) = given.bytes[0];
    }
    if (!kWhole) {
#pragma unroll
      for (int i = 0; i < kEights * 8; ++i) {
        const uint2 bytes = given.bytes[i / 8];
        if (c + i < hidden) q[c + i] = static_cast<uint8_t>((i % 8 < 4 ? bytes.x : bytes.y) >> (i % 4 * 8));
      }
    }
    if (!writes_scale) continue;
    if (kind == ScaleKind::f32)
      static_cast<uint32_t*>(scales)[at] = given.scale;
    else
      static_cast<uint8_t*>(scales)[at] = static_cast<uint8_t>(given.scale);
  }
}

/// Each lane processes kEights * 8 columns at a time, with kAhead such sets in flight while the next sets are prefetched.
template <DType T, int kEights, int kAhead, bool kWhole>
__device__ __noinline__ void quantize_typed(int lane, const LaneTargets& to, const void* src, int hidden, ScaleKind kind,
                                            int group) {
  constexpr int kColumns = kEights * 8, kRound = 32 * kColumns;
  const auto load = [&](int c) {
    RawColumns<kEights> raw;
#pragma unroll
    for (int e = 0; e < kEights; ++e) raw.eight[e] = load_eight<T, kWhole>(src, c + e * 8, hidden);
    return raw;
  };
  RawColumns<kEights> next[kAhead];
#pragma unroll
  for (int a = 0; a < kAhead; ++a) next[a] = load(a * kRound + lane * kColumns);
#pragma unroll 1
  for (int base = 0; base < hidden; base += kAhead * kRound) {
    QuantizedColumns<kEights> done[kAhead];
    RawColumns<kEights> now[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      now[a] = next[a];
      next[a] = load(base + (kAhead + a) * kRound + lane * kColumns);
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) done[a] = quantize_columns<T, kEights>(now[a], group / kColumns, kind);
#pragma unroll
    for (int a = 0; a < kAhead; ++a)
      store_columns<kWhole, kEights>(lane, to, done[a], base + a * kRound + lane * kColumns, hidden, kind, group);
  }
}

/// Callers check that the rows are not fp8, i.e. not yet quantized. kEights = 2 is for short rows: 512 columns, loaded in one
/// round.
template <int kEights, int kAhead>
__device__ void quantize_row_lanes(int lane, const LaneTargets& to, const void* src, DType type, int64_t hidden, ScaleKind kind,
                                   int group) {
  const auto n = static_cast<int>(hidden);
  const bool whole =
      ((static_cast<unsigned>(reinterpret_cast<uintptr_t>(src)) & 15u) | (to.low_bits & (kEights * 8u - 1u)) | (n & 7)) == 0;
  const auto typed = [&]<DType T>() {
    if (whole)
      quantize_typed<T, kEights, kAhead, true>(lane, to, src, n, kind, group);
    else
      quantize_typed<T, 1, 1, false>(lane, to, src, n, kind, group);
  };
  with_quantised_type(type, typed);
}

/// Inlined quantization of bf16 rows in units of 512 columns; the row size must be a multiple of 16 bytes.
__device__ __forceinline__ void quantize_inline(int lane, const LaneTargets& to, const void* src, int hidden, ScaleKind kind,
                                                int group) {
#pragma unroll 1
  for (int c = lane * 16; c - lane * 16 < hidden; c += 512) {
    RawColumns<2> raw;
    raw.eight[0] = load_eight<DType::bf16, true>(src, c, hidden);
    raw.eight[1] = load_eight<DType::bf16, true>(src, c + 8, hidden);
    store_columns<true, 2>(lane, to, quantize_columns<DType::bf16, 2>(raw, group / 16, kind), c, hidden, kind, group);
  }
}

/// Writes the zero padding after the scales of a row.
__device__ inline void zero_scale_padding(int lane, void* scales, int64_t hidden, ScaleKind kind, int group) {
  const int64_t used = num_scales(hidden, group) * (kind == ScaleKind::f32 ? 4 : 1);
  const auto total = static_cast<int64_t>(scale_row_bytes(hidden, kind, group));
#pragma unroll 1
  for (int64_t i = used + lane; i < total; i += 32) static_cast<uint8_t*>(scales)[i] = 0;
}

}  // namespace switchyard::detail
