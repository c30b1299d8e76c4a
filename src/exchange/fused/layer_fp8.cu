// SPDX-License-Identifier: Apache-2.0
// A whole MoE layer in fp8 in one persistent launch. For flags, progress and buffers, see layer.cu. Differences: two blocks
// form a cluster that claims tickets together, and each tile has two flags. Tokens are quantized to fp8 when they are
// staged and are transferred with their scales appended. The outputs of an up tile and their scales are written with ordinary
// stores and read by box copies after a proxy fence. A cluster waits only for the flags listed in layer.cu, because its blocks
// run concurrently and process the same tiles.
#include "arch/cuda/cuda_arch.cuh"
#include "exchange/fused/layer_fp8_tiles.cuh"
#include "exchange/fused/layer_launch.cuh"
#include "exchange/fused/layer_rank_returns.cuh"
#include "exchange/gpu/frame.cuh"

namespace switchyard::detail {

namespace fused {

/// True if the group has already failed. The value read by the cluster's first block decides, because the blocks of a cluster
/// must all continue or all return. Call from all threads of a cluster. `word`: four bytes of shared memory that no thread of
/// the block has accessed since its last block barrier.
__device__ __forceinline__ bool cluster_failed(const FusedParams& p, uint32_t word) {
  if (threadIdx.x == 0) {
    const uint64_t abort = ptx::load_relaxed<Scope::system>(p.call.abort_word);
    ptx::store_shared(word, abort != 0 ? 1 : 0);
    if (abort != 0 && ptx::cluster_rank() == 0) report_abort_inline(p.call, abort, epoch_after(p.state->epoch));
  }
  ptx::cluster_barrier();
  const bool failed = ptx::load_of_block(ptx::shared_of_block(word, 0)) != 0;
  ptx::cluster_barrier();
  return failed;
}

/// Order in shared memory: barriers, staging, stages and scales, pieces, list of row tiles.
inline constexpr uint32_t kFp8PiecesAt = gemm::WideStorage<Fp8Up>::kStagesAt +
                                         gemm::WideStorage<Fp8Up>::kStages * (gemm::kWideStageBytes + gemm::kScaleBytes<Fp8Up>);
static_assert(kFp8PiecesAt % 128 == 0 &&
              kFp8PiecesAt + kPieceStorageBytes + (kMaxFusedFp8Experts + 2) * 4 + kTrackBytes <= 227 * 1024);
__device__ __forceinline__ LayerStorage make_fp8_storage(uint32_t base) {
  return {{base, gemm::WideStorage<Fp8Up>::kStages}, base + kFp8PiecesAt};
}
/// Call before a cluster barrier.
__device__ __forceinline__ void make_fp8_barriers(const LayerStorage& r) {
  // The loader and the signaling warp also read tiles.
  gemm::make_barriers(r.storage, 1, gemm::kMathThreads + 2 * kLanes, 2 * gemm::kMathWarps);
  if (threadIdx.x != 0) return;
  for (int i = 0; i < 2; ++i) {
    ptx::mbarrier_init(r.storage.sent(static_cast<uint32_t>(i)), 1);
    ptx::mbarrier_init(r.stored(i), gemm::kMathWarps);
  }
  for (uint32_t slot = 0; slot < kMaxSlots; ++slot) ptx::mbarrier_init(r.row_arrived(slot), 1);
  ptx::store_shared(r.failed(), 0);
  ptx::fence_mbarrier_init();
}

template <class A, bool kPerRank>
__global__ void __launch_bounds__(gemm::kThreads, 1) __cluster_dims__(2, 1, 1)
    fp8_layer_kernel(const __grid_constant__ FusedParams p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  // Without the shuffle, the compiler recomputes the address at each use, with a slow read of a special register.
  const uint32_t base = __shfl_sync(~0u, ptx::shared_address(shared), 0), part = base + kPartAt;
  const int64_t staged = stage_tokens<Fp8Layer>(p, part);  // stages data that the plan does not access, while it runs
  ptx::wait_for_previous();
  if (is_left_out(p)) return;
  if (cluster_failed(p, base + kClusterFailedAt)) return;
  int* const first_tiles = reinterpret_cast<int*>(shared + p.up.shared_bytes) - (p.up.num_experts + 1);
  const LayerStorage r = make_fp8_storage(base);
  make_fp8_barriers(r);
  const bool proceeds = p.header->status == 0;
  if (threadIdx.x == 0) {
    begin_counting(p);
    LayerCall::write(r, flag_word(epoch_after(p.state->epoch)), proceeds ? p.header->tokens : 0, proceeds ? p.header->rows : 0);
  }
  ptx::cluster_barrier();
  CudaWarp w{CudaWarp::Bare{}};
  const KernelTrace<A> trace(w, p.call.device_trace, Event::layer,
                             pack_launch(LayerCall(p, r).word >> kFlagValueBits, p.state, LayerCall(p, r).tokens));
  if (proceeds) {
    if (p.parts.up) publish_routes<kPerRank>(LayerCall(p, r), staged, part);
    count_row_tiles_of<Fp8Layer>(p, first_tiles);
    const int warp = static_cast<int>(threadIdx.x >> 5);
    if (warp >= gemm::kMathWarps) {
      ptx::dealloc_registers<56>();
      if (warp == kFp8LoaderWarp) load_fp8_tiles(LayerCall(p, r));
      if (warp == kFp8ClaimerWarp) claim_fp8_tiles<A>(LayerCall(p, r), first_tiles);
      if (warp == kFp8AnnouncerWarp) announce_fp8_tiles<A>(LayerCall(p, r));
      if (warp == kFp8MoverWarp) {
        const LayerCall call(p, r);
        Pieces rows(r, p.pulled);
        MoveCounter moved;
        const bool pulled = !p.parts.up || pull_rows<A, Fp8Layer>(call, rows, moved);
        if (pulled && p.parts.down) return_by_copies<A, Fp8Layer, kPerRank>(call, first_tiles, rows, moved);
        if (lane() == 0) count_moved(p, moved);
      }
    } else {
      ptx::alloc_registers<224>();
      multiply_fp8_tiles<A>(p, r);
      if (p.parts.down) {
        return_and_sum_by_threads<A, Fp8Layer, kPerRank>(LayerCall(p, r), first_tiles);
      }
    }
    __syncwarp();
  }
  if (lane() == 0) leave<Fp8Layer>(p, LayerCall(p, r).word >> kFlagValueBits);
  __syncwarp();
  ptx::cluster_barrier();  // the other block no longer accesses this one's shared memory
}

__global__ void spread_kernel(const __grid_constant__ WeightScales s) {
  const int64_t all = int64_t{s.experts} * s.column_tiles * s.blocks;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < all; i += int64_t{gridDim.x} * blockDim.x) {
    const auto block = static_cast<int>(i % s.blocks);
    const int64_t part = i / s.blocks, tile = part % s.column_tiles, expert = part / s.column_tiles;
    const auto scale = [&](int64_t row) {
      const int64_t at = (expert * s.rows + (row < s.rows ? row : s.rows - 1)) * s.blocks + block;
      return s.ue8m0 ? f32_from_ue8m0(static_cast<const uint8_t*>(s.given)[at]) : static_cast<const float*>(s.given)[at];
    };
    s.spread[i] = {scale(s.gated ? tile : 2 * tile), scale(s.gated ? tile + s.rows / 2 : 2 * tile + 1), 0.F, 0.F};
  }
}

}  // namespace fused

namespace {

const LayerKernels per_route{
    {"layer kernel", fused::fp8_layer_kernel<Cuda, false>, gemm::kThreads, max_layer_shared},
    {"layer kernel", fused::fp8_layer_kernel<CudaTraced, false>, gemm::kThreads, max_traced_layer_shared}};
const LayerKernels per_rank{
    {"layer kernel", fused::fp8_layer_kernel<Cuda, true>, gemm::kThreads, max_layer_shared},
    {"layer kernel", fused::fp8_layer_kernel<CudaTraced, true>, gemm::kThreads, max_traced_layer_shared}};
int no_shared(const DeviceLimits&) { return 0; }
const Kernel<const WeightScales> spread("weight scales kernel", fused::spread_kernel, 256, no_shared);

}  // namespace

void launch_fused_fp8(const FusedParams& params, int blocks, const DeviceLimits& limits, gpu::Stream stream) {
  launch_layer(params.layout.per_rank ? per_rank : per_route, gemm::kThreads, params, blocks, limits, stream);
}

void spread_scales(const WeightScales& scales, gpu::Stream stream) { spread.launch({256, 256, 0}, stream, scales); }

}  // namespace switchyard::detail
