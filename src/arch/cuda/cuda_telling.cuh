// SPDX-License-Identifier: Apache-2.0
// Telling rows by the lanes of one warp (arch/ops.hpp): written without a flag behind them, read as they come. All lanes call
// every function together with equal arguments (`mine` apart).
#pragma once

#include "arch/cuda/cuda_rows.cuh"

namespace switchyard::detail {

/// Word i of a row of any alignment; behind its end zeros.
__device__ inline uint32_t word_of_row(const std::byte* row, int64_t bytes, int64_t i) {
  const int64_t at = i * 4;
  if (at + 4 <= bytes && (reinterpret_cast<uintptr_t>(row) & 3u) == 0) return *reinterpret_cast<const uint32_t*>(row + at);
  uint32_t word = 0;
  for (int64_t b = at; b < at + 4 && b < bytes; ++b) word |= static_cast<uint32_t>(row[b]) << (8 * (b - at));
  return word;
}

/// Copies a row of any size and alignment to the telling rows in `mine` of the given lanes.
__device__ __noinline__ inline void multicast_telling_lanes(int lane, void* mine, unsigned lanes, const std::byte* src,
                                                            int64_t bytes) {
  const int64_t whole = (reinterpret_cast<uintptr_t>(src) & 15u) == 0 ? bytes / 16 : 0, words = (bytes + 3) / 4;
  for (unsigned left = lanes; left != 0; left &= left - 1) {
    auto* const dst = reinterpret_cast<std::byte*>(
        __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(mine), __ffs(static_cast<int>(left)) - 1));
    for (int64_t v = lane; v < whole; v += 32)
      ptx::store_words(reinterpret_cast<uint4*>(dst) + v, telling(reinterpret_cast<const uint4*>(src)[v]));
    for (int64_t i = whole * 4 + lane; i < words; i += 32)
      ptx::store_word(reinterpret_cast<uint32_t*>(dst) + i, telling(word_of_row(src, bytes, i)));
  }
}

__device__ __forceinline__ bool any_blank(const uint4& v) { return v.x == 0 || v.y == 0 || v.z == 0 || v.w == 0; }

/// True if all words of a telling row have come.
__device__ inline bool row_has_come(int lane, const void* row, int64_t words) {
  bool blank = false;
  const int64_t vectors = words / 4;
  for (int64_t v = lane; v < vectors; v += 32) blank |= any_blank(ptx::load_words(static_cast<const uint4*>(row) + v));
  for (int64_t i = vectors * 4 + lane; i < words; i += 32) blank |= ptx::load_word(static_cast<const uint32_t*>(row) + i) == 0;
  return !__any_sync(kAllLanes, blank);
}
/// Looks at the row's last word until it has come, at most so often.
__device__ inline void look_again(const void* row, int64_t words, int looks) {
  const uint32_t* const last = static_cast<const uint32_t*>(row) + words - 1;
  for (; looks > 0 && __any_sync(kAllLanes, ptx::load_word(last) == 0); --looks) {
  }
}

/// Waits a while for the rows of the given lanes. \returns a lane whose row has not come, or -1: all words of all rows are
/// acquired.
__device__ __noinline__ inline int missing_lane(int lane, const void* mine, unsigned lanes, int64_t words, int looks) {
  for (unsigned left = lanes; left != 0; left &= left - 1) {
    const int holder = __ffs(static_cast<int>(left)) - 1;
    const auto* row = reinterpret_cast<const void*>(__shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(mine), holder));
    if (row_has_come(lane, row, words)) continue;
    look_again(row, words, looks);
    __syncwarp();
    if (!row_has_come(lane, row, words)) return holder;
  }
  ptx::fence_acq_rel<Scope::system>();
  __syncwarp();
  return -1;
}

/// Makes the rows of the given lanes zero again, after all lanes have read them.
__device__ __noinline__ inline void clear_lanes(int lane, const void* mine, unsigned lanes, int64_t words) {
  __syncwarp();
  for (unsigned left = lanes; left != 0; left &= left - 1) {
    auto* row = reinterpret_cast<uint32_t*>(
        __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(mine), __ffs(static_cast<int>(left)) - 1));
    const int64_t vectors = words / 4;
    for (int64_t v = lane; v < vectors; v += 32) reinterpret_cast<uint4*>(row)[v] = uint4{0, 0, 0, 0};
    for (int64_t i = vectors * 4 + lane; i < words; i += 32) row[i] = 0;
  }
}

/// For kernels in which everything runs once: as reduce_whole of telling rows, four of them at a time, each of which it asks
/// for once, and again when its last word has come. \returns a lane whose row has not come after so many looks, or -1.
template <DType T>
__device__ __forceinline__ int reduce_told_whole(int lane, uint4* out, const void* mine, float weight, unsigned lanes,
                                                 int count, int looks) {
  using E = RowElements<T>;
  constexpr int kRows = 4, kAhead = 2;
  const auto row_of = [&](int holder) {
    return reinterpret_cast<const uint4*>(__shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(mine), holder));
  };
#pragma unroll 1
  for (int v = lane; v - lane < count; v += 32 * kAhead) {
    const int end = v - lane + 32 * kAhead < count ? v - lane + 32 * kAhead : count;
    float sum[kAhead][E::kPerVector] = {};
#pragma unroll 1
    for (unsigned left = lanes; left != 0;) {
      const uint4* from[kRows];
      float weights[kRows];
      unsigned todo = 0;
      const unsigned batch = left;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int holder = left != 0 ? __ffs(static_cast<int>(left)) - 1 : 0;
        from[i] = row_of(holder);
        weights[i] = __shfl_sync(kAllLanes, weight, holder);
        if (left != 0) todo |= 1u << i;
        left &= left - 1;
      }
      const unsigned here = todo;
      uint4 x[kRows][kAhead];
      while (true) {
#pragma unroll
        for (int i = 0; i < kRows; ++i)
#pragma unroll
          for (int a = 0; a < kAhead; ++a)
            if ((todo >> i & 1) != 0) x[i][a] = ptx::load_words(from[i] + (v + a * 32 < end ? v + a * 32 : end - 1));
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const bool blank = (todo >> i & 1) != 0 && (any_blank(x[i][0]) || any_blank(x[i][1]));
          if (!__any_sync(kAllLanes, blank)) todo &= ~(1u << i);
        }
        if (todo == 0) break;
        const int late = __ffs(static_cast<int>(todo)) - 1;
        const uint4* last = from[0];
#pragma unroll
        for (int i = 1; i < kRows; ++i) last = late == i ? from[i] : last;
#pragma unroll 1
        while (looks > 0 && __any_sync(kAllLanes, ptx::load_word(reinterpret_cast<const uint32_t*>(last + end) - 1) == 0))
          --looks;
        if (looks-- <= 0) {
          unsigned places = batch;
#pragma unroll 1
          for (int i = 0; i < late; ++i) places &= places - 1;
          return __ffs(static_cast<int>(places)) - 1;
        }
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if ((here >> i & 1) == 0) break;
#pragma unroll
        for (int a = 0; a < kAhead; ++a) add_row<T>(x[i][a], true, weights[i], sum[a]);
      }
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a)
      if (v + a * 32 < count) out[v + a * 32] = E::narrow(sum[a]);
  }
  __syncwarp();
#pragma unroll 1
  for (unsigned left = lanes; left != 0; left &= left - 1) {
    auto* row = const_cast<uint4*>(row_of(__ffs(static_cast<int>(left)) - 1));
#pragma unroll 1
    for (int v = lane; v < count; v += 32) row[v] = uint4{0, 0, 0, 0};
  }
  return -1;
}

}  // namespace switchyard::detail
