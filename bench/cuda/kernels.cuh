// SPDX-License-Identifier: Apache-2.0
// Kernels of the CUDA bench and of the GPU tests: protocol bodies as kernels, device barrier, link floors, closed-form data.
// Included by cluster.cu only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "arch/cuda/cuda_arch.cuh"
#include "bench/cuda/params.cuh"

namespace switchyard::cuda_bench {

using detail::Cuda;
using detail::CudaWarp;
using detail::Scope;
using detail::Site;
namespace ptx = detail::ptx;

extern __shared__ __align__(128) std::byte dynamic_shared[];

/// All calls after the first fault of a rank end at once: N queued calls cost one deadline. Uniform over a warp.
__device__ inline bool already_failed(const detail::FaultRecord* fault) {
  return Cuda::load_acquire<Scope::device>(&fault->claimed, Site::none) != 0;
}

__global__ void __launch_bounds__(kMaxWarps * 32, 1)
    dispatch_direct_kernel(const __grid_constant__ DispatchParams p, const __grid_constant__ CudaShape shape) {
  if (already_failed(p.call.fault)) return;
  CudaWarp w(dynamic_shared, shape);
  detail::dispatch_direct<Cuda>(w, p);
  Cuda::settle(w);  // after a fault copies may be pending
}

/// One warp: offers this rank's block to all sources.
__global__ void publish_placement_kernel(const __grid_constant__ DispatchParams p,
                                         const __grid_constant__ detail::Placement place,
                                         const __grid_constant__ CudaShape shape) {
  if (already_failed(p.call.fault)) return;
  CudaWarp w(dynamic_shared, shape);
  detail::publish_placement<Cuda>(w, p.call, p.control, place, Site::placement);
  Cuda::settle(w);
}

/// All ranks' streams meet. One warp. A missing rank is a fault after the deadline.
__global__ void barrier_kernel(const __grid_constant__ BarrierParams p, uint64_t value) {
  if (already_failed(p.fault)) return;
  const int lane = static_cast<int>(threadIdx.x);
  const uint64_t deadline = ptx::global_timer() + p.timeout_ns;
  for (int r = lane; r < p.world; r += 32) ptx::store_release<Scope::system>(p.theirs[r], value);
  for (int r = lane; r < p.world; r += 32) {
    uint64_t seen = 0;
    while ((seen = ptx::load_acquire<Scope::system>(p.mine[r])) < value) {
      if (ptx::global_timer() < deadline) continue;
      if (ptx::add_acq_rel<Scope::device>(&p.fault->claimed, 1) == 0) {
        p.fault->awaited_rank = r;
        p.fault->expected = value;
        p.fault->seen = seen;
        p.fault->waited_ns = p.timeout_ns;
        p.fault->site = Site::barrier;
      }
      return;
    }
  }
}

// Link floors: rows from `src` to places known beforehand. Nothing but a bulk load and bulk stores; no flags, no records.

template <bool kAll>
__global__ void __launch_bounds__(kMaxWarps * 32, 1) push_floor_kernel(const __grid_constant__ FloorParams p) {
  __shared__ uint64_t barriers[kMaxWarps][2];
  const int warp = static_cast<int>(threadIdx.x) / 32, warps = static_cast<int>(blockDim.x) / 32;
  if (threadIdx.x % 32 != 0) return;  // one lane issues everything
  const uint32_t bar = ptx::shared_address(&barriers[warp][0]);
  const uint32_t stage = ptx::shared_address(dynamic_shared) + static_cast<uint32_t>(warp * p.stages) * p.row_bytes;
  for (int s = 0; s < p.stages; ++s) ptx::mbarrier_init(bar + static_cast<uint32_t>(s) * 8, 1);
  ptx::fence_mbarrier_init();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * warps + warp, step = static_cast<int64_t>(gridDim.x) * warps;
  auto load = [&](int64_t i) {
    const auto s = static_cast<uint32_t>(i % p.stages);
    ptx::mbarrier_expect(bar + s * 8, p.row_bytes);
    ptx::bulk_load(stage + s * p.row_bytes, p.src + (first + i * step) * p.row_bytes, p.row_bytes, bar + s * 8);
  };
  const int64_t count = first < p.tokens ? (p.tokens - first + step - 1) / step : 0;
  if (count > 0) load(0);
  for (int64_t i = 0; i < count; ++i) {
    const auto s = static_cast<uint32_t>(i % p.stages);
    const int64_t t = first + i * step;
    if (p.stages == 2 && i + 1 < count) {
      ptx::bulk_wait_read();
      load(i + 1);
    }
    const int64_t begin = kAll ? 0 : p.begin[t], end = kAll ? p.world : p.begin[t + 1];
    while (!ptx::mbarrier_try_wait(bar + s * 8, static_cast<uint32_t>(i / p.stages) & 1u)) {
    }
    for (int64_t d = begin; d < end; ++d) {
      std::byte* const dst =
          kAll ? p.base[(p.rank + 1 + static_cast<int>(d)) % p.world] + (p.first_row + t) * p.row_bytes : p.to[d];
      ptx::bulk_store(dst, stage + s * p.row_bytes, p.row_bytes);
    }
    ptx::bulk_commit();
    if (p.stages == 1 && i + 1 < count) {
      ptx::bulk_wait_read();
      load(i + 1);
    }
  }
  ptx::bulk_wait();
}

// Closed-form data: every 4-byte word of a row is a hash of (rank, token, word).

SWITCHYARD_FN inline uint32_t pattern_word(uint32_t rank, uint64_t token, uint32_t word) {
  uint64_t h = (static_cast<uint64_t>(rank) << 56) ^ (token << 24) ^ word;
  h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9ull;
  h = (h ^ (h >> 27)) * 0x94d049bb133111ebull;
  return static_cast<uint32_t>(h >> 32) | 1u;  // never the poison, never zero
}

__global__ void fill_pattern_kernel(uint32_t* x, int64_t tokens, int64_t words, int rank) {
  for (int64_t t = blockIdx.x; t < tokens; t += gridDim.x) {
    for (int64_t c = threadIdx.x; c < words; c += blockDim.x)
      x[t * words + c] = pattern_word(static_cast<uint32_t>(rank), static_cast<uint64_t>(t), static_cast<uint32_t>(c));
  }
}

/// Compares `rows` rows with expectation source << 32 | token, or kZeroRow.
__global__ void verify_rows_kernel(const uint32_t* x, const int64_t* expected, int64_t rows, int64_t words, Mismatches* out) {
  for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
    const int64_t want = expected[r];
    for (int64_t c = threadIdx.x; c < words; c += blockDim.x) {
      const uint32_t word = want == kZeroRow ? 0u
                                             : pattern_word(static_cast<uint32_t>(want >> 32),
                                                            static_cast<uint64_t>(want & 0xffffffff), static_cast<uint32_t>(c));
      if (x[r * words + c] == word) continue;
      if (atomicAdd(&out->words, 1ull) == 0) out->first_row = static_cast<unsigned long long>(r);
    }
  }
}

}  // namespace switchyard::cuda_bench
