// SPDX-License-Identifier: Apache-2.0
// Stores a warp's gradients from registers to memory, in boxes of 16 rows of 128 bytes, through the warp's shared memory. The
// tensor copies are awaited only when their shared memory is needed again. Copies that accumulate do so in memory, once per
// gradient. No barrier is needed, because each box is written and sent by a single warp.
#pragma once

#include "gemm/gpu/tile_roles.cuh"
#include "gemm/gradients/gradient_params.hpp"

namespace switchyard::detail::gemm {

/// One warp's boxes, used in turn. Lane 0 sends them and is the only lane that can wait for them.
template <class K>
struct Outbox {
  static constexpr uint32_t kBytes = kBoxesOfWarp * kBoxBytes;

  uint32_t first;  ///< address of the first box
  uint32_t slot = 0;

  __device__ uint32_t box() const { return first + slot * kBoxBytes; }
  __device__ void advance() { slot = slot + 1 == kBoxesOfWarp ? 0 : slot + 1; }
};

/// Destination of a warp's gradients: its first row and the tile's first column.
struct GradientCorner {
  int expert, n, k;
};

/// Columns per box.
template <class Output>
inline constexpr int kBoxColumns = static_cast<int>(kBoxRowBytes / sizeof(Output));

/// Writes box `box` of one half of a warp's accumulators, in a 16-bit type, with the tensor map's swizzle: piece p (16 bytes)
/// of row r is at p ^ (r % 8). Processes four 8 x 8 matrices at a time: rows 0 ... 7 and 8 ... 15 of two adjacent pieces.
template <class Output, int kCount>
__device__ __forceinline__ void write_box(uint32_t at, const float (&d)[kCount], int box) {
  const uint32_t l = static_cast<uint32_t>(lane());
  const uint32_t first = at + (l & 15) * kBoxRowBytes + ((l >> 4 ^ (l & 7)) << 4);
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    const int i = box * 32 + pair * 8;
    ptx::store_matrices(first ^ static_cast<uint32_t>(pair) * 32, pack<Output>(d[i], d[i + 1]),
                        pack<Output>(d[i + 2], d[i + 3]), pack<Output>(d[i + 4], d[i + 5]), pack<Output>(d[i + 6], d[i + 7]));
  }
}
/// write_box() for float32. A store writes 8 bytes per lane. Each group of 16 lanes (four rows) must cover all banks. While
/// lanes of even rows store the first of two columns, lanes of odd rows therefore store the column 16 further on, and vice
/// versa.
template <class Output, int kCount>
requires std::is_same_v<Output, float> __device__ __forceinline__ void write_box(uint32_t at, const float (&d)[kCount],
                                                                                 int box) {
  const uint32_t l = static_cast<uint32_t>(lane()), row = l >> 2;
  const bool odd = (row & 1) != 0;
  const uint32_t first = at + row * kBoxRowBytes + (((l >> 1 & 1) ^ row ^ (odd ? 4 : 0)) << 4) + (l & 1) * 8;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int a = box * 16 + j * 4 + i * 2, b = a + 8;
      const uint32_t to = (first ^ static_cast<uint32_t>(j) * 32) + static_cast<uint32_t>(i) * (kBoxBytes / 2);
      ptx::store_shared_pair(to, odd ? d[b] : d[a], odd ? d[b + 1] : d[a + 1]);
      ptx::store_shared_pair(to ^ 64, odd ? d[a] : d[b], odd ? d[a + 1] : d[b + 1]);
    }
  }
}

/// Sends one half of a warp's accumulators. Call from all lanes.
template <class K, int kCount>
__device__ __forceinline__ void send_gradients(const WeightGradientParams& p, Outbox<K>& out, const GradientCorner& to,
                                               const float (&d)[kCount]) {
  constexpr int kColumns = kBoxColumns<typename K::Output>;
#pragma unroll
  for (int box = 0; box < 2 * kCount / kColumns; ++box) {
    if (lane() == 0) ptx::bulk_wait_read_but<kBoxesOfWarp - 1>();
    __syncwarp();
    write_box<typename K::Output>(out.box(), d, box);
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (lane() == 0) {
      const int k = to.k + box * kColumns;
      if (to.n < p.n && k < p.k) {
        if constexpr (K::kAdd)
          ptx::add_box(&p.dw, out.box(), k, to.n, to.expert);
        else
          ptx::store_box(&p.dw, out.box(), k, to.n, to.expert);
      }
      ptx::bulk_commit();  // one group per box, so that the number of later groups shows which boxes are free
    }
    out.advance();
  }
}

}  // namespace switchyard::detail::gemm
