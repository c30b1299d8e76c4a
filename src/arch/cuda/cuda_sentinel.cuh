// SPDX-License-Identifier: Apache-2.0
// Sentinel rows (arch/ops.hpp), processed by the lanes of one warp: no flag follows them, and they are read as they arrive. All
// lanes must call each function together with identical arguments (except `mine`).
#pragma once

#include "arch/cuda/cuda_whole.cuh"

namespace switchyard::detail {

/// Word i of a row with any alignment; bytes beyond the end are zero.
__device__ inline uint32_t word_of_row(const std::byte* row, int64_t bytes, int64_t i) {
  const int64_t at = i * 4;
  if (at + 4 <= bytes && (reinterpret_cast<uintptr_t>(row) & 3u) == 0) return *reinterpret_cast<const uint32_t*>(row + at);
  uint32_t word = 0;
  for (int64_t b = at; b < at + 4 && b < bytes; ++b) word |= static_cast<uint32_t>(row[b]) << (8 * (b - at));
  return word;
}

/// Copies a row of any size and alignment to the sentinel rows that the given lanes hold in `mine`.
__device__ __noinline__ inline void multicast_sentinel_lanes(int lane, void* mine, unsigned lanes, const std::byte* src,
                                                             int64_t bytes, Sentinel as) {
  const int64_t whole = (reinterpret_cast<uintptr_t>(src) & 15u) == 0 ? bytes / 16 : 0, words = (bytes + 3) / 4;
  for (unsigned left = lanes; left != 0; left &= left - 1) {
    auto* const dst = reinterpret_cast<std::byte*>(
        __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(mine), __ffs(static_cast<int>(left)) - 1));
    for (int64_t v = lane; v < whole; v += 32)
      ptx::store_words(reinterpret_cast<uint4*>(dst) + v, substituted(reinterpret_cast<const uint4*>(src)[v], as));
    for (int64_t i = whole * 4 + lane; i < words; i += 32)
      ptx::store_word(reinterpret_cast<uint32_t*>(dst) + i, substituted(word_of_row(src, bytes, i), as));
  }
}

__device__ __forceinline__ bool any_blank(const uint4& v, uint32_t blank) {
  return v.x == blank || v.y == blank || v.z == blank || v.w == blank;
}
/// Makes a row blank.
__device__ __forceinline__ void blank_lanes(int lane, void* row, int64_t words, uint32_t blank) {
  const int64_t vectors = words / 4;
#pragma unroll 1
  for (int64_t v = lane; v < vectors; v += 32) static_cast<uint4*>(row)[v] = uint4{blank, blank, blank, blank};
#pragma unroll 1
  for (int64_t i = vectors * 4 + lane; i < words; i += 32) static_cast<uint32_t*>(row)[i] = blank;
}

/// Returns true if all words of a sentinel row have arrived.
__device__ inline bool row_has_arrived(int lane, const void* row, int64_t words, uint32_t blank) {
  bool late = false;
  const int64_t vectors = words / 4;
  for (int64_t v = lane; v < vectors; v += 32) late |= any_blank(ptx::load_words(static_cast<const uint4*>(row) + v), blank);
  for (int64_t i = vectors * 4 + lane; i < words; i += 32)
    late |= ptx::load_word(static_cast<const uint32_t*>(row) + i) == blank;
  return !__any_sync(kAllLanes, late);
}
/// Polls the row's last word, at most `looks` times, until it has arrived.
__device__ inline void look_again(const void* row, int64_t words, int looks, uint32_t blank) {
  const uint32_t* const last = static_cast<const uint32_t*>(row) + words - 1;
  for (; looks > 0 && __any_sync(kAllLanes, ptx::load_word(last) == blank); --looks) {
  }
}

/// Polls for the rows held by the given lanes. \returns a lane whose row has not arrived, or -1 if all words of all rows have
/// been acquired.
__device__ __noinline__ inline int missing_lane(int lane, const void* mine, unsigned lanes, int64_t words, int looks,
                                                uint32_t blank) {
  for (unsigned left = lanes; left != 0; left &= left - 1) {
    const int holder = __ffs(static_cast<int>(left)) - 1;
    const auto* row = reinterpret_cast<const void*>(__shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(mine), holder));
    if (row_has_arrived(lane, row, words, blank)) continue;
    look_again(row, words, looks, blank);
    __syncwarp();
    if (!row_has_arrived(lane, row, words, blank)) return holder;
  }
  ptx::fence_acq_rel<Scope::system>();
  __syncwarp();
  return -1;
}

/// Makes the rows held by the given lanes blank again, after all lanes have read them.
__device__ __forceinline__ void blank_rows_of(int lane, const void* mine, unsigned lanes, int64_t words, uint32_t blank) {
  __syncwarp();
#pragma unroll 1
  for (unsigned left = lanes; left != 0; left &= left - 1) {
    auto* row = reinterpret_cast<void*>(
        __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(mine), __ffs(static_cast<int>(left)) - 1));
    blank_lanes(lane, row, words, blank);
  }
}

/// See Arch::multicast_sentinel.
template <class F>
__device__ void multicast_sentinel_places(int lane, int n, F&& f, const std::byte* src, int64_t bytes, const Sentinel& as) {
  SWITCHYARD_ROLLED
  for (int base = 0; base < n; base += 32) {
    void* const mine = base + lane < n ? static_cast<void*>(f(base + lane)) : nullptr;
    multicast_sentinel_lanes(lane, mine, __ballot_sync(kAllLanes, mine != nullptr), src, bytes, as);
  }
}

/// See Arch::reduce_if_arrived; reduce() sums the rows row_of(i), each `bytes` bytes long.
template <class Row, class Reduce>
__device__ int reduce_if_arrived_places(int lane, int places, int64_t bytes, Row&& row_of, int looks, const Sentinel& as,
                                        Reduce&& reduce) {
  const int64_t words = (bytes + 3) / 4;
  SWITCHYARD_ROLLED
  for (int step = 0; step < 2; ++step) {
    SWITCHYARD_ROLLED
    for (int base = 0; base < places; base += 32) {
      const void* const row = base + lane < places ? static_cast<const void*>(row_of(base + lane)) : nullptr;
      const unsigned lanes = __ballot_sync(kAllLanes, row != nullptr);
      const int missing = step == 0 ? missing_lane(lane, row, lanes, words, looks, as.blank) : -1;
      if (missing >= 0) return base + missing;
      if (step == 1) blank_rows_of(lane, row, lanes, words, as.blank);
    }
    if (step == 0) reduce();
    if (!as.reusable) break;
  }
  return -1;
}

/// Four sentinel rows that are loaded together.
struct SentinelRowSet {
  static constexpr int kRows = 4, kAhead = 2;
  const uint4* from[kRows];
  float weights[kRows];
  uint4 x[kRows][kAhead];  ///< vectors v and v + 32 of each

  /// Loads the rows in `todo` (bits). \returns those of them that have not arrived
  __device__ __forceinline__ unsigned load(unsigned todo, int v, int end, uint32_t blank) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int a = 0; a < kAhead; ++a)
        if ((todo >> i & 1) != 0) x[i][a] = ptx::load_words(from[i] + (v + a * 32 < end ? v + a * 32 : end - 1));
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const bool late = (todo >> i & 1) != 0 && (any_blank(x[i][0], blank) || any_blank(x[i][1], blank));
      if (!__any_sync(kAllLanes, late)) todo &= ~(1u << i);
    }
    return todo;
  }
  /// Polls the last word before vector `end` of row i until it has arrived. \returns the number of polls left
  __device__ __forceinline__ int look_again(int i, int end, int looks, uint32_t blank) const {
    const uint4* last = from[0];
#pragma unroll
    for (int r = 1; r < kRows; ++r) last = i == r ? from[r] : last;
    const auto* const word = reinterpret_cast<const uint32_t*>(last + end) - 1;
#pragma unroll 1
    while (looks > 0 && __any_sync(kAllLanes, ptx::load_word(word) == blank)) --looks;
    return looks;
  }
};

/// reduce_whole for sentinel rows, for kernels in which all code runs once. Loads each row once, and again when the row's last
/// word has arrived. \returns a lane whose row has not arrived after `looks` polls, or -1
template <DType T>
__device__ __forceinline__ int reduce_if_arrived_whole(int lane, uint4* out, const void* mine, float weight, unsigned lanes,
                                                       int count, int looks, const Sentinel& as) {
  using E = RowElements<T>;
  constexpr int kAhead = SentinelRowSet::kAhead, kRound = 32 * kAhead;
#pragma unroll 1
  for (int v = lane; v - lane < count; v += kRound) {
    const int end = v - lane + kRound < count ? v - lane + kRound : count;
    float sum[kAhead][E::kPerVector] = {};
#pragma unroll 1
    for (unsigned left = lanes; left != 0;) {
      SentinelRowSet rows;
      const unsigned batch = left;
      unsigned here = 0;
#pragma unroll
      for (int i = 0; i < SentinelRowSet::kRows; ++i) {
        const int holder = left != 0 ? __ffs(static_cast<int>(left)) - 1 : 0;
        rows.from[i] =
            reinterpret_cast<const uint4*>(__shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(mine), holder));
        rows.weights[i] = __shfl_sync(kAllLanes, weight, holder);
        if (left != 0) here |= 1u << i;
        left &= left - 1;
      }
      for (unsigned todo = here; (todo = rows.load(todo, v, end, as.blank)) != 0;) {
        const int late = __ffs(static_cast<int>(todo)) - 1;
        looks = rows.look_again(late, end, looks, as.blank);
        if (looks-- <= 0) return nth_lane(batch, late);
      }
#pragma unroll
      for (int i = 0; i < SentinelRowSet::kRows; ++i)
#pragma unroll
        for (int a = 0; a < kAhead; ++a)
          if ((here >> i & 1) != 0) add_row<T>(rows.x[i][a], true, rows.weights[i], sum[a]);
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a)
      if (v + a * 32 < count) out[v + a * 32] = E::narrow(sum[a]);
  }
  if (as.reusable) blank_rows_of(lane, mine, lanes, int64_t{count} * 4, as.blank);
  return -1;
}

/// Inlined Arch::reduce_if_arrived; each lane holds a row or null, and its weight.
__device__ __forceinline__ int reduce_if_arrived_inline(int lane, const ReduceSpec& spec, const void* mine, float weight,
                                                        int looks, const Sentinel& as) {
  const unsigned lanes = __ballot_sync(kAllLanes, mine != nullptr);
  return with_row_type(spec.type, [&]<DType T>() {
    const int count = static_cast<int>(spec.hidden) / RowElements<T>::kPerVector;
    return reduce_if_arrived_whole<T>(lane, static_cast<uint4*>(spec.out), mine, weight, lanes, count, looks, as);
  });
}

}  // namespace switchyard::detail
