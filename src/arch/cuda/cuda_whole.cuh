// SPDX-License-Identifier: Apache-2.0
// Operations of one warp's lanes on rows whose size is a multiple of 16 bytes, for kernels in which all code runs once
// (CudaArch, kInlineAll): inlined and small, without local memory. All lanes must call each function together with identical
// arguments (except `mine`).
#pragma once

#include "arch/cuda/cuda_rows.cuh"

namespace switchyard::detail {

/// A row of complete Vs whose first elements the lanes are loading.
template <class V>
struct FetchedVectors {
  static constexpr int kAhead = sizeof(V) == 16 ? 4 : 1;
  V v[kAhead];
  const V* from;
  int count;

  __device__ __forceinline__ void load(int base) {
#pragma unroll
    for (int a = 0; a < kAhead; ++a)
      if (base + a * 32 < count) v[a] = from[base + a * 32];
  }
};
template <class V>
__device__ __forceinline__ FetchedVectors<V> fetch_whole(int lane, const void* src, size_t bytes) {
  FetchedVectors<V> row;
  row.from = static_cast<const V*>(src);
  row.count = static_cast<int>(bytes / sizeof(V));
  row.load(lane);
  return row;
}

/// Writes to the destinations of the lanes whose `mine` is not null.
template <bool kSentinel, class V>
__device__ __forceinline__ void multicast_whole(int lane, void* mine, FetchedVectors<V> row,
                                                const Sentinel& sentinel_as = sentinel_sums()) {
  constexpr int kAhead = FetchedVectors<V>::kAhead;
  const unsigned lanes = __ballot_sync(kAllLanes, mine != nullptr);
#pragma unroll 1
  for (int base = lane; base - lane < row.count; base += 32 * kAhead, row.load(base)) {
    if constexpr (kSentinel) {
#pragma unroll
      for (int a = 0; a < kAhead; ++a) row.v[a] = substituted(row.v[a], sentinel_as);
    }
#pragma unroll 1
    for (unsigned left = lanes; left != 0; left &= left - 1) {
      auto* dst = reinterpret_cast<V*>(
          __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(mine), __ffs(static_cast<int>(left)) - 1));
#pragma unroll
      for (int a = 0; a < kAhead; ++a)
        if (base + a * 32 < row.count) {
          if constexpr (kSentinel)
            ptx::store_words(dst + base + a * 32, row.v[a]);
          else
            dst[base + a * 32] = row.v[a];
        }
    }
  }
}

/// Weighted sum, without bias, of the rows held by the given lanes, each with its lane's weight; a row is `count` times 16
/// bytes long.
template <DType T>
__device__ __forceinline__ void reduce_whole(int lane, uint4* out, const void* mine, float weight, unsigned lanes, int count,
                                             bool sentinel) {
  using E = RowElements<T>;
  constexpr int kAhead = 4;
  const auto row_of = [&](unsigned left) {
    return reinterpret_cast<const uint4*>(
        __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(mine), left != 0 ? __ffs(static_cast<int>(left)) - 1 : 0));
  };
#pragma unroll 1
  for (unsigned left = lanes; left != 0; left &= left - 1) prefetch_lanes(lane, row_of(left), count * 16);
#pragma unroll 1
  for (int v = lane; v - lane < count; v += 32 * kAhead) {
    float sum[kAhead][E::kPerVector] = {};
    uint4 next[kAhead] = {};
    const auto load = [&](unsigned left) {
      const uint4* from = row_of(left);
#pragma unroll
      for (int a = 0; a < kAhead; ++a)
        if (left != 0 && v + a * 32 < count) next[a] = __ldcs(from + v + a * 32);
    };
    load(lanes);
#pragma unroll 1
    for (unsigned left = lanes; left != 0;) {
      const float weight_now = __shfl_sync(kAllLanes, weight, __ffs(static_cast<int>(left)) - 1);
      uint4 now[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) now[a] = next[a];
      left &= left - 1;
      load(left);
#pragma unroll
      for (int a = 0; a < kAhead; ++a) add_row<T>(now[a], true, weight_now, sum[a]);
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a)
      if (v + a * 32 < count) put(out + v + a * 32, E::narrow(sum[a]), sentinel);
  }
}

/// See Arch::map_row. Each lane has kAhead loads in flight.
template <DType T, class F>
__device__ void map_typed(int lane, void* out, const void* src, int64_t hidden, const F& f, bool sentinel) {
  using E = RowElements<T>;
  using Element = typename E::Element;
  constexpr int kAhead = 4, kPer = E::kPerVector;
  const bool aligned = ((reinterpret_cast<uintptr_t>(out) | reinterpret_cast<uintptr_t>(src)) & 15u) == 0;
  const int64_t vectors = aligned ? hidden / kPer : 0;
  SWITCHYARD_ROLLED
  for (int64_t base = lane; base < vectors; base += 32 * kAhead) {
    uint4 given[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a)
      given[a] = __ldcs(static_cast<const uint4*>(src) + (base + a * 32 < vectors ? base + a * 32 : base));
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int64_t v = base + a * 32;
      if (v >= vectors) break;
      float x[kPer];
      E::widen(given[a], x);
      f(x, v * kPer, std::integral_constant<int, kPer>{});
      put(static_cast<uint4*>(out) + v, E::narrow(x), sentinel);
    }
  }
  const int each = sentinel ? 4 / static_cast<int>(sizeof(Element)) : 1;
  SWITCHYARD_ROLLED
  for (int64_t c = vectors * kPer + lane * each; c < hidden; c += 32 * each) {
    Element made[2];
    const int here = hidden - c < each ? 1 : each;
    for (int i = 0; i < here; ++i) {
      float x[1] = {E::widen_one(static_cast<const Element*>(src)[c + i])};
      f(x, c + i, std::integral_constant<int, 1>{});
      made[i] = E::narrow_one(x[0]);
    }
    put_elements(static_cast<Element*>(out), c, made, here, sentinel);
  }
}

template <class F>
__device__ void map_row_lanes(int lane, void* out, const void* src, DType type, int64_t hidden, const F& f, bool sentinel) {
  with_combined_type(type, [&]<DType T>() { map_typed<T>(lane, out, src, hidden, f, sentinel); });
}

}  // namespace switchyard::detail
