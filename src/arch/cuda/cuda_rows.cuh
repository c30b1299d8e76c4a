// SPDX-License-Identifier: Apache-2.0
// Row operations by the lanes of one warp: copies with any alignment, zero fills and weighted sums. All lanes must call each
// function together with identical arguments (except `mine`). Sources may be in global or shared memory and are never read
// through the read-only path. Arithmetic follows IEEE, without contraction or flush to zero; compile without fast-math flags.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "arch/cuda/ptx.cuh"
#include "arch/ops.hpp"
#include "base/number_formats.hpp"

namespace switchyard::detail {

inline constexpr unsigned kAllLanes = 0xffffffffu;

template <class V>
__device__ void multicast_vectors(int lane, void* mine, unsigned lanes, const std::byte* src, int64_t count) {
  constexpr int kUnroll = 4;
  for (int64_t base = 0; base < count; base += 32 * kUnroll) {
    V v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = base + u * 32 + lane;
      if (i < count) v[u] = reinterpret_cast<const V*>(src)[i];
    }
    for (unsigned left = lanes; left != 0; left &= left - 1) {
      auto* dst = reinterpret_cast<V*>(
          __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(mine), __ffs(static_cast<int>(left)) - 1));
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t i = base + u * 32 + lane;
        if (i < count) dst[i] = v[u];
      }
    }
  }
}

/// Copies to the destinations that the given lanes hold in `mine`. `low_bits`: bitwise OR of the low bits of all addresses
/// (source and destinations).
__device__ __noinline__ inline void multicast_lanes(int lane, void* mine, unsigned lanes, const std::byte* src, size_t bytes,
                                                    unsigned low_bits) {
  size_t body = 0;
  if ((low_bits & 15u) == 0) {
    body = bytes / 16 * 16;
    multicast_vectors<uint4>(lane, mine, lanes, src, static_cast<int64_t>(body / 16));
  } else if ((low_bits & 7u) == 0) {
    body = bytes / 8 * 8;
    multicast_vectors<uint2>(lane, mine, lanes, src, static_cast<int64_t>(body / 8));
  } else if ((low_bits & 3u) == 0) {
    body = bytes / 4 * 4;
    multicast_vectors<uint32_t>(lane, mine, lanes, src, static_cast<int64_t>(body / 4));
  }
  if (body == bytes) return;
  void* const rest = mine == nullptr ? nullptr : static_cast<std::byte*>(mine) + body;
  multicast_vectors<uint8_t>(lane, rest, lanes, src + body, static_cast<int64_t>(bytes - body));
}

__device__ inline void fill_zero_lanes(int lane, std::byte* dst, size_t bytes) {
  const size_t unaligned_bytes = (16 - (reinterpret_cast<uintptr_t>(dst) & 15u)) & 15u;
  const size_t head = unaligned_bytes < bytes ? unaligned_bytes : bytes;
  const size_t vectors = (bytes - head) / 16;
  for (size_t i = static_cast<size_t>(lane); i < head; i += 32) dst[i] = std::byte{0};
  auto* body = reinterpret_cast<uint4*>(dst + head);
  for (size_t i = static_cast<size_t>(lane); i < vectors; i += 32) body[i] = uint4{0, 0, 0, 0};
  for (size_t i = head + vectors * 16 + static_cast<size_t>(lane); i < bytes; i += 32) dst[i] = std::byte{0};
}

/// Elements of one row type: conversion of 16 bytes to float32 and back, and of single elements.
template <DType T>
struct RowElements;

template <>
struct RowElements<DType::bf16> {
  using Element = __nv_bfloat16;
  static constexpr int kPerVector = 8;
  __device__ static void widen(const uint4& v, float* f) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      f[2 * i] = __uint_as_float(words[i] << 16);
      f[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }
  __device__ static uint4 narrow(const float* f) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(f[2 * i], f[2 * i + 1]);
      words[i] = static_cast<uint32_t>(__bfloat16_as_ushort(pair.x)) | static_cast<uint32_t>(__bfloat16_as_ushort(pair.y))
                                                                           << 16;
    }
    return uint4{words[0], words[1], words[2], words[3]};
  }
  __device__ static float widen_one(Element e) { return __uint_as_float(static_cast<uint32_t>(__bfloat16_as_ushort(e)) << 16); }
  __device__ static Element narrow_one(float f) { return __float2bfloat16_rn(f); }
};

template <>
struct RowElements<DType::f16> {
  using Element = __half;
  static constexpr int kPerVector = 8;
  __device__ static void widen(const uint4& v, float* f) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      f[2 * i] = __half2float(__ushort_as_half(static_cast<unsigned short>(words[i] & 0xffffu)));
      f[2 * i + 1] = __half2float(__ushort_as_half(static_cast<unsigned short>(words[i] >> 16)));
    }
  }
  __device__ static uint4 narrow(const float* f) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = static_cast<uint32_t>(__half_as_ushort(__float2half_rn(f[2 * i]))) |
                 static_cast<uint32_t>(__half_as_ushort(__float2half_rn(f[2 * i + 1]))) << 16;
    }
    return uint4{words[0], words[1], words[2], words[3]};
  }
  __device__ static float widen_one(Element e) { return __half2float(e); }
  __device__ static Element narrow_one(float f) { return __float2half_rn(f); }
};

template <>
struct RowElements<DType::f32> {
  using Element = float;
  static constexpr int kPerVector = 4;
  __device__ static void widen(const uint4& v, float* f) {
    f[0] = __uint_as_float(v.x), f[1] = __uint_as_float(v.y), f[2] = __uint_as_float(v.z), f[3] = __uint_as_float(v.w);
  }
  __device__ static uint4 narrow(const float* f) {
    return uint4{__float_as_uint(f[0]), __float_as_uint(f[1]), __float_as_uint(f[2]), __float_as_uint(f[3])};
  }
  __device__ static float widen_one(Element e) { return e; }
  __device__ static Element narrow_one(float f) { return f; }
};

/// The word that represents `word` in a sentinel row.
__device__ __forceinline__ uint32_t substituted(uint32_t word, const Sentinel& t) {
  return word == t.blank ? t.substitute : word;
}
__device__ __forceinline__ uint4 substituted(const uint4& v, const Sentinel& t) {
  return {substituted(v.x, t), substituted(v.y, t), substituted(v.z, t), substituted(v.w, t)};
}

/// Writes to an ordinary row or a sentinel row.
__device__ __forceinline__ void put(uint4* to, const uint4& v, bool sentinel) {
  if (sentinel)
    ptx::store_words(to, substituted(v, sentinel_sums()));
  else
    *to = v;
}
/// Stores `count` elements, starting at element `at`: the elements of one word for a sentinel row, else a single element.
template <class Element>
__device__ __forceinline__ void put_elements(Element* to, int64_t at, const Element* e, int count, bool sentinel) {
  if (!sentinel) {
    to[at] = e[0];
    return;
  }
  uint32_t word = 0;
  for (int i = 0; i < count; ++i) {
    if constexpr (sizeof(Element) == 4)
      word = __float_as_uint(static_cast<float>(e[i]));
    else
      word |= static_cast<uint32_t>(reinterpret_cast<const uint16_t&>(e[i])) << (16 * i);
  }
  ptx::store_word(reinterpret_cast<uint32_t*>(to + at), substituted(word, sentinel_sums()));
}

/// Calls f.operator()<T>() for the row type of a sum.
template <class F>
__device__ __forceinline__ auto with_row_type(DType type, F&& f) {
  if (type == DType::f16) return f.template operator()<DType::f16>();
  if (type == DType::f32) return f.template operator()<DType::f32>();
  return f.template operator()<DType::bf16>();  // fp8 is excluded by ReduceSpec::type; callers check
}

/// The rows of one sum, distributed over a warp: each lane in `lanes` holds a row and its weight, and rows are added in lane
/// order.
struct LaneRows {
  const void* row;
  float weight;
  unsigned lanes;
  bool weighted;

  /// The lane that holds row i.
  __device__ int lane_of(int i) const {
    unsigned left = lanes;
    for (; i > 0; --i) left &= left - 1;
    return __ffs(static_cast<int>(left)) - 1;
  }
  __device__ const void* row_of_lane(int lane) const {
    return reinterpret_cast<const void*>(__shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(row), lane));
  }
  __device__ float weight_of_lane(int lane) const { return __shfl_sync(kAllLanes, weight, lane); }
};

/// Initializes a lane's sums for one vector to zero before any row is added.
template <DType T>
__device__ __forceinline__ void zero_sum(float* sum) {
#pragma unroll
  for (int e = 0; e < RowElements<T>::kPerVector; ++e) sum[e] = 0.0f;
}

/// Initializes a lane's sums to zero or the bias.
template <DType T>
__device__ void start_sum(const ReduceSpec& spec, int64_t v, float* sum) {
  using E = RowElements<T>;
  zero_sum<T>(sum);
  if (spec.bias[0] != nullptr) E::widen(static_cast<const uint4*>(spec.bias[0])[v], sum);
  if (spec.bias[1] == nullptr) return;
  float x[E::kPerVector];
  E::widen(static_cast<const uint4*>(spec.bias[1])[v], x);
#pragma unroll
  for (int e = 0; e < E::kPerVector; ++e) sum[e] = __fadd_rn(sum[e], x[e]);
}

template <DType T>
__device__ void add_row(const uint4& v, bool weighted, float weight, float* sum) {
  using E = RowElements<T>;
  float x[E::kPerVector];
  E::widen(v, x);
#pragma unroll
  for (int e = 0; e < E::kPerVector; ++e) sum[e] = __fadd_rn(sum[e], weighted ? __fmul_rn(weight, x[e]) : x[e]);
}

/// Sums kRows rows. Each lane processes 16 bytes of each row at a time and has kRows * kAhead such loads in flight, because a
/// load over NVLink takes microseconds. `spec` and `rows` are in local memory, which streamed rows may evict from the cache, so
/// the loop reads them only for a bias.
template <DType T, bool kSentinel, int kRows, int kAhead>
__device__ void reduce_vectors_of(int lane, const ReduceSpec& spec, const LaneRows& rows, int vectors) {
  using E = RowElements<T>;
  auto* const out = static_cast<uint4*>(spec.out);
  const bool biased = spec.bias[0] != nullptr;
  const float mine = rows.weighted ? rows.weight : 1.0f;  // weight of this lane's row
  const uint4* from[kRows];
  float weights[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int holder = rows.lane_of(i);
    from[i] = static_cast<const uint4*>(rows.row_of_lane(holder));
    weights[i] = __shfl_sync(kAllLanes, mine, holder);
  }
  for (int v = lane; v < vectors; v += 32 * kAhead) {
    uint4 x[kAhead][kRows];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int at = v + a * 32 < vectors ? v + a * 32 : v;
#pragma unroll
      for (int i = 0; i < kRows; ++i) x[a][i] = __ldcs(from[i] + at);
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int at = v + a * 32;
      if (at >= vectors) break;
      float sum[E::kPerVector];
      zero_sum<T>(sum);
      if (biased) start_sum<T>(spec, at, sum);
#pragma unroll
      for (int i = 0; i < kRows; ++i) add_row<T>(x[a][i], true, weights[i], sum);
      put(out + at, E::narrow(sum), kSentinel);
    }
  }
}

/// Sums any number of rows, one after another.
template <DType T, bool kSentinel>
__device__ void reduce_vectors_of_many(int lane, const ReduceSpec& spec, const LaneRows& rows, int64_t vectors) {
  using E = RowElements<T>;
  for (int64_t base = 0; base < vectors; base += 32) {
    const int64_t v = base + lane < vectors ? base + lane : base;
    float sum[E::kPerVector];
    start_sum<T>(spec, v, sum);
    for (unsigned left = rows.lanes; left != 0; left &= left - 1) {
      const int holder = __ffs(static_cast<int>(left)) - 1;
      add_row<T>(static_cast<const uint4*>(rows.row_of_lane(holder))[v], rows.weighted, rows.weight_of_lane(holder), sum);
    }
    if (base + lane < vectors) put(static_cast<uint4*>(spec.out) + v, E::narrow(sum), kSentinel);
  }
}

/// Sums element by element from element `begin` on, or word by word if the output is a sentinel row.
template <DType T, bool kSentinel>
__device__ void reduce_elements(int lane, const ReduceSpec& spec, const LaneRows& rows, int64_t begin) {
  using E = RowElements<T>;
  using Element = typename E::Element;
  constexpr int each = kSentinel ? 4 / static_cast<int>(sizeof(Element)) : 1;
  for (int64_t base = begin; base < spec.hidden; base += 32 * each) {
    const int64_t mine = base + lane * each;
    Element made[2];
    for (int i = 0; i < each; ++i) {
      const int64_t c = mine + i < spec.hidden ? mine + i : begin;
      float sum = 0.0f;
      if (spec.bias[0] != nullptr) sum = E::widen_one(static_cast<const Element*>(spec.bias[0])[c]);
      if (spec.bias[1] != nullptr) sum = __fadd_rn(sum, E::widen_one(static_cast<const Element*>(spec.bias[1])[c]));
      for (unsigned left = rows.lanes; left != 0; left &= left - 1) {
        const int holder = __ffs(static_cast<int>(left)) - 1;
        float x = E::widen_one(static_cast<const Element*>(rows.row_of_lane(holder))[c]);
        const float weight = rows.weight_of_lane(holder);
        if (rows.weighted) x = __fmul_rn(weight, x);
        sum = __fadd_rn(sum, x);
      }
      made[i] = E::narrow_one(sum);
    }
    const int64_t left = spec.hidden - mine;
    if (left > 0) put_elements(static_cast<Element*>(spec.out), mine, made, left < each ? 1 : each, kSentinel);
  }
}

template <DType T, bool kSentinel>
__device__ void reduce_typed(int lane, const ReduceSpec& spec, const LaneRows& rows) {
  unsigned low_bits = static_cast<unsigned>(reinterpret_cast<uintptr_t>(spec.out) | reinterpret_cast<uintptr_t>(spec.bias[0]) |
                                            reinterpret_cast<uintptr_t>(spec.bias[1]));
  low_bits |= __reduce_or_sync(kAllLanes, static_cast<unsigned>(reinterpret_cast<uintptr_t>(rows.row)));
  const int vectors = (low_bits & 15u) == 0 ? static_cast<int>(spec.hidden / RowElements<T>::kPerVector) : 0;
  switch (__popc(rows.lanes)) {
    case 1: reduce_vectors_of<T, kSentinel, 1, 4>(lane, spec, rows, vectors); break;
    case 2: reduce_vectors_of<T, kSentinel, 2, 4>(lane, spec, rows, vectors); break;
    case 3: reduce_vectors_of<T, kSentinel, 3, 2>(lane, spec, rows, vectors); break;
    case 4: reduce_vectors_of<T, kSentinel, 4, 2>(lane, spec, rows, vectors); break;
    case 5: reduce_vectors_of<T, kSentinel, 5, 1>(lane, spec, rows, vectors); break;
    case 6: reduce_vectors_of<T, kSentinel, 6, 1>(lane, spec, rows, vectors); break;
    case 7: reduce_vectors_of<T, kSentinel, 7, 1>(lane, spec, rows, vectors); break;
    case 8: reduce_vectors_of<T, kSentinel, 8, 1>(lane, spec, rows, vectors); break;
    default: reduce_vectors_of_many<T, kSentinel>(lane, spec, rows, vectors); break;
  }
  reduce_elements<T, kSentinel>(lane, spec, rows, int64_t{vectors} * RowElements<T>::kPerVector);
}

/// Sums a lane's rows. Uses only the output, bias, type and length of `spec`. Sentinel rows have a separate instantiation,
/// which keeps their cost out of the sums of other rows.
template <bool kSentinel>
__device__ __noinline__ void reduce_lane_rows_as(int lane, const ReduceSpec& spec, const LaneRows& rows) {
  with_row_type(spec.type, [&]<DType T>() { reduce_typed<T, kSentinel>(lane, spec, rows); });
}
__device__ __forceinline__ void reduce_lane_rows(int lane, const ReduceSpec& spec, const LaneRows& rows) {
  return spec.sentinel ? reduce_lane_rows_as<true>(lane, spec, rows) : reduce_lane_rows_as<false>(lane, spec, rows);
}

/// The lane of the n-th set bit, counting from 0; -1 if there is none.
__device__ __forceinline__ int nth_lane(unsigned lanes, int n) {
#pragma unroll 1
  for (; n > 0; --n) lanes &= lanes - 1;
  return __ffs(static_cast<int>(lanes)) - 1;
}

/// Merges two sets of up to 32 rows in total into one set.
__device__ inline LaneRows in_one_set(int lane, const LaneRows& first, const LaneRows& second) {
  const int firsts = __popc(first.lanes), place = lane < firsts ? lane : lane - firsts;
  const int holder = nth_lane(lane < firsts ? first.lanes : second.lanes, place) & 31;  // lanes without a row: any lane
  const void *const a = first.row_of_lane(holder), *const b = second.row_of_lane(holder);
  const float x = first.weight_of_lane(holder), y = second.weight_of_lane(holder);
  const int n = firsts + __popc(second.lanes);
  const unsigned lanes = n >= 32 ? kAllLanes : (1u << n) - 1u;
  return {lane >= n ? nullptr : lane < firsts ? a : b, lane < firsts ? x : y, lanes, first.weighted};
}

/// For more rows than lanes, one element (or one word of a sentinel row) at a time; not optimized.
template <DType T, bool kSentinel>
__device__ void reduce_two_sets_typed(int lane, const ReduceSpec& spec, const LaneRows& first, const LaneRows& second) {
  using E = RowElements<T>;
  using Element = typename E::Element;
  constexpr int each = kSentinel ? 4 / static_cast<int>(sizeof(Element)) : 1;
  SWITCHYARD_ROLLED
  for (int64_t base = 0; base < spec.hidden; base += 32 * each) {
    const int64_t mine = base + lane * each, left = spec.hidden - mine;
    Element made[2];
    SWITCHYARD_ROLLED
    for (int i = 0; i < each; ++i) {
      const int64_t c = i < left ? mine + i : 0;
      float sum = 0.0f;
      if (spec.bias[0] != nullptr) sum = E::widen_one(static_cast<const Element*>(spec.bias[0])[c]);
      if (spec.bias[1] != nullptr) sum = __fadd_rn(sum, E::widen_one(static_cast<const Element*>(spec.bias[1])[c]));
      SWITCHYARD_ROLLED
      for (uint64_t rows = uint64_t{second.lanes} << 32 | first.lanes; rows != 0; rows &= rows - 1) {
        const int place = __ffsll(static_cast<long long>(rows)) - 1, holder = place & 31;
        const LaneRows& set = place < 32 ? first : second;
        const float x = E::widen_one(static_cast<const Element*>(set.row_of_lane(holder))[c]);
        const float weight = set.weight_of_lane(holder);
        sum = __fadd_rn(sum, set.weighted ? __fmul_rn(weight, x) : x);
      }
      made[i] = E::narrow_one(sum);
    }
    if (left > 0) put_elements(static_cast<Element*>(spec.out), mine, made, left < each ? 1 : each, kSentinel);
  }
}

/// Sums the rows of two sets, first the first set; this is reduce_lane_rows for more places than a warp has lanes.
template <bool kSentinel>
__device__ __noinline__ void reduce_two_sets_as(int lane, const ReduceSpec& spec, const LaneRows& first,
                                                const LaneRows& second) {
  if (__popc(first.lanes) + __popc(second.lanes) <= 32)
    return reduce_lane_rows_as<kSentinel>(lane, spec, in_one_set(lane, first, second));
  with_row_type(spec.type, [&]<DType T>() { reduce_two_sets_typed<T, kSentinel>(lane, spec, first, second); });
}
__device__ __forceinline__ void reduce_two_sets(int lane, const ReduceSpec& spec, const LaneRows& first,
                                                const LaneRows& second) {
  return spec.sentinel ? reduce_two_sets_as<true>(lane, spec, first, second)
                       : reduce_two_sets_as<false>(lane, spec, first, second);
}

/// Prefetches `bytes` bytes starting at `src`, using all lanes.
__device__ inline void prefetch_lanes(int lane, const void* src, int bytes) {
#pragma unroll 1
  for (int b = lane * 128; b < bytes; b += 32 * 128) ptx::prefetch(static_cast<const std::byte*>(src) + b);
}

}  // namespace switchyard::detail
