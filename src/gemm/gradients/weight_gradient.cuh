// SPDX-License-Identifier: Apache-2.0
// Gradients of expert weights on sm_90a: dw[e] (+)= dy[rows of e]^T x[rows of e]. The sum runs over rows, so both operands of
// the matrix instruction have order outer: dy is the first operand, 64 columns at a time, and x the second, with up to 192
// columns.
//
// A persistent grid, with one block per multiprocessor. One thread claims tiles, and one loads stages. One warp clears those
// rows of a tile's last stage that belong to no expert or to the next one. Two warpgroups each multiply 128 of a tile's 256
// columns of dy and send the gradients (gradient_boxes.cuh). For an expert with 512 rows, a tile has only 16 stages, so the end
// of a tile matters. The halves of the last stages are multiplied one after the other, so that the first half is sent while the
// second is multiplied. The second warpgroup stays kLead stages behind the first, so that one multiplies while the other sends.
//
// The bits of a gradient depend only on the expert's rows, which are added in ascending order, in one accumulator.
#pragma once

#include "gemm/gpu/tile_roles.cuh"
#include "gemm/gradients/gradient_boxes.cuh"
#include "gemm/gradients/gradient_params.hpp"

namespace switchyard::detail::gemm {

/// A kernel, identified by the element type of dy and x, the type of the gradients, and whether gradients are added to the
/// existing values.
template <class ElementType, class OutputType, bool kAdding>
struct GradientKind {
  using Element = ElementType;
  using Output = OutputType;
  static constexpr bool kAdd = kAdding;
};

inline constexpr int kFirstCleaner = kMathThreads + 64, kCleaners = 32;
inline constexpr uint32_t kChunkRowBytes = kChunkColumns * 2;
inline constexpr uint32_t kChunkBytes = kStageRows * kChunkRowBytes;  // 64 columns of a stage
inline constexpr int kChunksOfDy = kGradientTileN / kChunkColumns, kChunksOfX = kGradientTileK / kChunkColumns;
inline constexpr uint32_t kGradientStageBytes = (kChunksOfDy + kChunksOfX) * kChunkBytes;
static_assert(kGradientStageBytes == gradient_stage_bytes() && kFixedBytes == kFixedSharedBytes);
static_assert(kMathWarps == kSendingWarps);
/// Number of stages of a tile that the first warpgroup issues before the second one starts.
inline constexpr int kLead = 2;
static_assert(kLead >= 1);
inline constexpr int kRowsOfNoTile = -1;

/// Layout of shared memory: the barriers and entries of SharedStorage, one more barrier per entry, stages, boxes of gradients,
/// and finally the list of experts.
struct GradientSharedStorage : SharedStorage {
  __device__ uint32_t clean(uint32_t entry_slot) const { return base + kFixedBytes - 16 + 8 * entry_slot; }
  __device__ uint32_t stage(uint32_t slot) const { return base + kFixedBytes + slot * kGradientStageBytes; }
  __device__ uint32_t boxes() const { return stage(num_stages()); }
};

/// A tile, as stored in its block: 16 bytes of shared memory.
struct GradientTile {
  int expert, tile_n, tile_k;
  int row, rows;  ///< kRowsOfNoTile: no tile
};
__device__ __forceinline__ void write_tile(uint32_t entry, const GradientTile& t) {
  ptx::store_shared_16(entry, {t.expert << 16 | t.tile_n, t.tile_k, t.row, t.rows});
}
__device__ __forceinline__ GradientTile read_tile(uint32_t entry) {
  const int4 e = ptx::load_shared_16(entry);
  return {e.x >> 16, e.x & 0xffff, e.y, e.z, e.w};
}

/// Lists the experts that have tiles: their count in list[0], followed by their indices. When adding, lists only experts that
/// have rows. Call from all threads; ends with `__syncthreads()`.
template <class K>
__device__ __forceinline__ void list_experts(const WeightGradientParams& p, int* list) {
  for (int e = static_cast<int>(threadIdx.x); e < p.num_experts; e += kThreads)
    list[1 + e] = K::kAdd && rows_of(p.ranges, e) == 0 ? 0 : 1;
  __syncthreads();
  if (threadIdx.x < 32) {
    int found = 0;
    for (int first = 0; first < p.num_experts; first += 32) {
      const int e = first + lane();
      const bool has = e < p.num_experts && list[1 + e] != 0;
      const uint32_t all = __ballot_sync(~0u, has);
      __syncwarp();  // every lane has read; the writes below are at or before this position
      if (has) list[1 + found + __popc(all & ((1u << lane()) - 1))] = e;
      found += __popc(all);
      __syncwarp();
    }
    if (lane() == 0) list[0] = found;
  }
  __syncthreads();
}

__device__ __forceinline__ GradientTile gradient_tile_of(const WeightGradientParams& p, const int* list, uint32_t ticket) {
  const uint32_t each = static_cast<uint32_t>(p.tiles_n) * static_cast<uint32_t>(p.tiles_k), i = ticket / each;
  if (i >= static_cast<uint32_t>(list[0])) return {0, 0, 0, 0, kRowsOfNoTile};
  const int expert = list[1 + i];
  const GradientPlace place = gradient_place(ticket - i * each, p.tiles_n, p.tiles_k);
  return {expert, place.tile_n, place.tile_k, static_cast<int>(first_row_of(p.ranges, expert)),
          static_cast<int>(rows_of(p.ranges, expert))};
}

/// Role of the claimer thread. It claims a tile shortly before the loader finishes the previous one.
__device__ __forceinline__ void claim_gradient_tiles(const WeightGradientParams& p, const GradientSharedStorage& storage,
                                                     const int* list) {
  uint32_t ticket = blockIdx.x;
  for (int i = 0;; ++i) {
    const uint32_t slot = static_cast<uint32_t>(i & 1);
    if (i > 0) {
      ptx::mbarrier_wait(storage.due(), static_cast<uint32_t>(i - 1) & 1);
      ticket = gridDim.x + atomicAdd(p.tickets, 1u);
    }
    const GradientTile t = gradient_tile_of(p, list, ticket);
    ptx::mbarrier_wait(storage.taken(slot), static_cast<uint32_t>(i >> 1 & 1) ^ 1);
    write_tile(storage.entry(slot), t);
    ptx::mbarrier_arrive(storage.announced(slot));
    if (t.rows == kRowsOfNoTile) break;
  }
  // The last block resets the counters. All claims have then been made, because each block counts itself only after its own
  // claims.
  if (atomicAdd(p.tickets + 1, 1u) == gridDim.x - 1) p.tickets[0] = p.tickets[1] = 0;
}

/// Role of the loader thread. Columns past the end of an operand and rows past the end of the tensor are loaded as 0.
__device__ __forceinline__ void load_gradient_tiles(const WeightGradientParams& p, const GradientSharedStorage& storage) {
  Position at{0, 1};
  for (int i = 0;; ++i) {
    const uint32_t entry = static_cast<uint32_t>(i & 1);
    ptx::mbarrier_wait(storage.announced(entry), static_cast<uint32_t>(i >> 1 & 1));
    const GradientTile t = read_tile(storage.entry(entry));
    if (t.rows == kRowsOfNoTile) break;
    ptx::mbarrier_arrive(storage.taken(entry));
    const int stages = tile_stages(t.rows), empty = stages - count_stages(t.rows);
    const int chunks = gradient_tile_width(p.k, t.tile_k) / kChunkColumns;
    const int due_at = stages > kBlocksAhead ? stages - kBlocksAhead : 0;
    if (stages == 0) ptx::mbarrier_arrive(storage.due());
    for (int block = 0; block < stages; ++block) {
      if (block == due_at) ptx::mbarrier_arrive(storage.due());
      ptx::mbarrier_wait(storage.empty(at.slot), at.parity);
      const uint32_t stage = storage.stage(at.slot), bar = storage.full(at.slot);
      const int row = block < empty ? p.end : t.row + (block - empty) * kStageRows;
      ptx::mbarrier_expect(bar, static_cast<uint32_t>(kChunksOfDy + chunks) * kChunkBytes);
#pragma unroll
      for (int c = 0; c < kChunksOfDy; ++c)
        ptx::load_box(stage + c * kChunkBytes, &p.dy, bar, t.tile_n * kGradientTileN + c * kChunkColumns, row);
#pragma unroll
      for (int c = 0; c < kChunksOfX; ++c) {
        if (c < chunks)
          ptx::load_box(stage + (kChunksOfDy + c) * kChunkBytes, &p.x, bar, t.tile_k * kGradientTileK + c * kChunkColumns, row);
      }
      advance(storage, at);
    }
  }
}

/// Zeroes the rows of a stage from `rows` on, in both operands. Call from all lanes.
__device__ __forceinline__ void clear_rows(uint32_t stage, int rows, int chunks) {
  const uint32_t first = stage + static_cast<uint32_t>(rows) * kChunkRowBytes;
  const int pieces = (kStageRows - rows) * static_cast<int>(kChunkRowBytes / 16);
  for (int c = 0; c < chunks; ++c)
    for (int piece = lane(); piece < pieces; piece += kCleaners)
      ptx::store_shared_16(first + static_cast<uint32_t>(c) * kChunkBytes + static_cast<uint32_t>(piece) * 16, {0, 0, 0, 0});
  ptx::fence_proxy_async_shared();
}

/// Role of the cleaner warp. Rows past the expert's last one must be 0 in both operands, because 0 * NaN is NaN. For every
/// tile, announces that its last stages may be read. The warp passes through every stage, as the math warps do, because the
/// parity of a barrier identifies the previous phase only to threads that have observed every phase.
__device__ __forceinline__ void clean_last_stages(const WeightGradientParams& p, const GradientSharedStorage& storage) {
  Position at;
  for (int i = 0;; ++i) {
    const uint32_t entry = static_cast<uint32_t>(i & 1);
    ptx::mbarrier_wait(storage.announced(entry), static_cast<uint32_t>(i >> 1 & 1));
    const GradientTile t = read_tile(storage.entry(entry));
    if (t.rows == kRowsOfNoTile) break;
    const int stages = tile_stages(t.rows), rows = t.rows % kStageRows;
    for (int block = 0; block < stages; ++block) {
      ptx::mbarrier_wait(storage.full(at.slot), at.parity);
      if (block + 1 == stages && rows != 0)
        clear_rows(storage.stage(at.slot), rows, kChunksOfDy + gradient_tile_width(p.k, t.tile_k) / kChunkColumns);
      __syncwarp();
      release_stage(storage, at.slot);
      advance(storage, at);
    }
    if (lane() == 0) ptx::mbarrier_arrive(storage.clean(entry));
    ptx::mbarrier_arrive(storage.taken(entry));  // by each lane, because each lane has read the entry
  }
}

/// Descriptors of a stage: this warpgroup's columns of dy, and x.
struct GradientOperands {
  uint64_t dy, x;
};
__device__ __forceinline__ GradientOperands gradient_operands(const GradientSharedStorage& storage, uint32_t slot) {
  const uint32_t stage = storage.stage(slot);
  return {ptx::operand_at(stage + static_cast<uint32_t>(math_group()) * (kChunksOfDy / 2 * kChunkBytes)),
          ptx::operand_at(stage + kChunksOfDy * kChunkBytes, kChunkBytes)};
}

/// Multiplies 16 rows for half `half` of this warpgroup's columns of dy.
template <class K, int kWidth, bool kFirst>
__device__ __forceinline__ void multiply_rows(float (&d)[kWidth / 2], const GradientOperands& s, int half, int step) {
  constexpr ptx::OperandOrder kOuter = ptx::OperandOrder::outer;
  const uint64_t dy =
      s.dy + static_cast<uint64_t>(half) * ptx::operand_bytes(kChunkBytes) + ptx::kOuterStep * static_cast<uint64_t>(step);
  const uint64_t x = s.x + ptx::kOuterStep * static_cast<uint64_t>(step);
  if constexpr (kFirst)
    ptx::Wgmma<kWidth>::template first<typename K::Element, kOuter, kOuter>(d, dy, x);
  else
    ptx::Wgmma<kWidth>::template add<typename K::Element, kOuter, kOuter>(d, dy, x);
}

/// Starts the products of one stage, for both halves.
template <class K, int kWidth, bool kFirst>
__device__ __forceinline__ void issue_stage(const GradientSharedStorage& storage, const Position& at,
                                            float (&d)[2][kWidth / 2]) {
  ptx::mbarrier_wait(storage.full(at.slot), at.parity);
  const GradientOperands s = gradient_operands(storage, at.slot);
  ptx::wgmma_begin();
#pragma unroll
  for (int step = 0; step < kStageRows / kStepRows; ++step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (kFirst && step == 0)
        multiply_rows<K, kWidth, true>(d[half], s, half, step);
      else
        multiply_rows<K, kWidth, false>(d[half], s, half, step);
    }
  }
  ptx::wgmma_commit();
}

/// Multiplies all stages except the last kEndStages; `stages`, the number of stages to multiply, is at least one. On return,
/// the last of these is still being multiplied; returns its slot, which the caller must release.
template <class K, int kWidth>
__device__ __forceinline__ uint32_t multiply_beginning(const GradientSharedStorage& storage, Position& at, int stages,
                                                       int lead_barrier, float (&d)[2][kWidth / 2]) {
  issue_stage<K, kWidth, true>(storage, at, d);
  for (int block = 1; block < stages; ++block) {
    if (block == kLead && math_group() == 0) ptx::named_barrier_arrive(lead_barrier, kMathThreads);
    const uint32_t before = at.slot;
    advance(storage, at);
    issue_stage<K, kWidth, false>(storage, at, d);
    ptx::wgmma_wait<1>();
    release_stage(storage, before);
  }
  if (stages <= kLead && math_group() == 0) ptx::named_barrier_arrive(lead_barrier, kMathThreads);
  const uint32_t last = at.slot;
  advance(storage, at);
  return last;
}

/// Starts the products of the last kEndStages stages for one half; all of these stages are loaded and cleared. Contains no
/// branches, because with branches the compiler would wait for each product.
template <class K, int kWidth>
__device__ __forceinline__ void issue_end(const GradientOperands (&s)[kEndStages], int half, float (&d)[kWidth / 2]) {
#pragma unroll
  for (int block = 0; block < kEndStages; ++block) {
#pragma unroll
    for (int step = 0; step < kStageRows / kStepRows; ++step) multiply_rows<K, kWidth, false>(d, s[block], half, step);
  }
  ptx::wgmma_commit();
}

/// Destination of this warp's gradients for half `half`.
__device__ __forceinline__ GradientCorner corner_of(uint32_t entry, int half) {
  const GradientTile t = read_tile(entry);
  return {t.expert, t.tile_n * kGradientTileN + (math_group() * 2 + half) * kChunkColumns + warp_of_group() * 16,
          t.tile_k * kGradientTileK};
}

template <class K, int kWidth>
__device__ __forceinline__ void multiply_gradient_tile(const WeightGradientParams& p, const GradientSharedStorage& storage,
                                                       Position& at, Outbox<K>& out, uint32_t i) {
  float d[2][kWidth / 2];
  const uint32_t slot = i & 1;
  // All lanes hold the same value. Without the shuffle, the compiler cannot prove this and waits for each product separately.
  const int rows = __shfl_sync(~0u, ptx::load_shared_16(storage.entry(slot)).w, 0), lead_barrier = 1 + static_cast<int>(slot);
  if (math_group() == 1) ptx::named_barrier(lead_barrier, kMathThreads);
  const uint32_t before = multiply_beginning<K, kWidth>(storage, at, tile_stages(rows) - kEndStages, lead_barrier, d);
  GradientOperands s[kEndStages];
  Position from = at;
#pragma unroll
  for (int block = 0; block < kEndStages; ++block) {
    ptx::mbarrier_wait(storage.full(at.slot), at.parity);
    s[block] = gradient_operands(storage, at.slot);
    advance(storage, at);
  }
  ptx::mbarrier_wait(storage.clean(slot), i >> 1 & 1);
  ptx::wgmma_begin();
  issue_end<K, kWidth>(s, 0, d[0]);
  issue_end<K, kWidth>(s, 1, d[1]);
  ptx::wgmma_wait<2>();
  release_stage(storage, before);
  ptx::wgmma_wait<1>();
  ptx::keep(d[0]);
  send_gradients<K>(p, out, corner_of(storage.entry(slot), 0), d[0]);
  ptx::wgmma_wait<0>();
  for (int block = 0; block < kEndStages; ++block) {
    release_stage(storage, from.slot);
    advance(storage, from);
  }
  ptx::keep(d[1]);
  send_gradients<K>(p, out, corner_of(storage.entry(slot), 1), d[1]);
}

/// Overwrites the tile of an expert that has no rows.
template <class K>
__device__ __forceinline__ void send_zeros(const WeightGradientParams& p, const GradientSharedStorage& storage, Outbox<K>& out,
                                           uint32_t i) {
  const int lead_barrier = 1 + static_cast<int>(i & 1);
  if (math_group() == 0)
    ptx::named_barrier_arrive(lead_barrier, kMathThreads);
  else
    ptx::named_barrier(lead_barrier, kMathThreads);
  ptx::mbarrier_wait(storage.clean(i & 1), i >> 1 & 1);  // observes every phase
  const float d[kGradientTileK / 2] = {};
  for (int half = 0; half < 2; ++half) send_gradients<K>(p, out, corner_of(storage.entry(i & 1), half), d);
}

/// Role of each of the eight math warps.
template <class K>
__device__ __forceinline__ void multiply_gradient_tiles(const WeightGradientParams& p, const GradientSharedStorage& storage) {
  Position at;
  Outbox<K> out{storage.boxes() + threadIdx.x / 32 * Outbox<K>::kBytes};
  for (uint32_t i = 0;; ++i) {
    ptx::mbarrier_wait(storage.announced(i & 1), i >> 1 & 1);
    const GradientTile t = read_tile(storage.entry(i & 1));
    if (t.rows == kRowsOfNoTile) break;
    switch (t.rows == 0 ? 0 : gradient_tile_width(p.k, t.tile_k)) {
      case 0:
        if constexpr (!K::kAdd) send_zeros<K>(p, storage, out, i);
        break;
      case 64: multiply_gradient_tile<K, 64>(p, storage, at, out, i); break;
      case 128: multiply_gradient_tile<K, 128>(p, storage, at, out, i); break;
      case 192: multiply_gradient_tile<K, 192>(p, storage, at, out, i); break;
    }
    ptx::mbarrier_arrive(storage.taken(i & 1));
  }
  if (lane() == 0) ptx::bulk_wait();
}

template <class K>
__global__ void __launch_bounds__(kThreads, 1) weight_gradient_kernel(const __grid_constant__ WeightGradientParams p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  int* const list = reinterpret_cast<int*>(shared + p.shared_bytes) - (p.num_experts + 1);
  list_experts<K>(p, list);
  GradientSharedStorage storage;
  storage.base = ptx::shared_address(shared);
  storage.sizes = p.num_stages;
  make_barriers(storage, 1, kMathThreads + kCleaners + 1, kMathWarps + 1);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(storage.clean(0), 1);
    ptx::mbarrier_init(storage.clean(1), 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x >= kMathThreads) {
    ptx::dealloc_registers<56>();
    if (threadIdx.x == kLoaderThread) load_gradient_tiles(p, storage);
    if (threadIdx.x == kClaimerThread) claim_gradient_tiles(p, storage, list);
    if (threadIdx.x >= kFirstCleaner && threadIdx.x < kFirstCleaner + kCleaners) clean_last_stages(p, storage);
  } else {
    ptx::alloc_registers<224>();
    multiply_gradient_tiles<K>(p, storage);
  }
}

template <class Element, class Output, bool kAdd>
WeightGradientKernel weight_gradient_of() {
  using K = GradientKind<Element, Output, kAdd>;
  return {[](int shared_bytes) { return gpu::allow_shared(weight_gradient_kernel<K>, shared_bytes); },
          [](const gpu::Grid& grid, gpu::Stream stream, const WeightGradientParams& params) {
            return gpu::launch(weight_gradient_kernel<K>, grid, stream, params);
          }};
}
template <class Element>
WeightGradientKernel weight_gradient_of(bool wide, bool add) {
  if (wide) return add ? weight_gradient_of<Element, float, true>() : weight_gradient_of<Element, float, false>();
  return add ? weight_gradient_of<Element, Element, true>() : weight_gradient_of<Element, Element, false>();
}

}  // namespace switchyard::detail::gemm
