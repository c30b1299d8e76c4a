// SPDX-License-Identifier: Apache-2.0
// A whole MoE layer in one persistent launch: rows are pulled from their sources, both products run tile by tile as rows and
// intermediate rows arrive, and outputs return to their owners, which sum them. Order per_rank: the sum of a token's outputs on
// a rank returns instead, and the owner adds the ranks' sums.
//
// | flag           | written by          | read by              | order           | scope  | reuse              |
// | layer_told     | source's last block | mover                | release/acquire | system | epoch, never reset |
// | layer_rows     | mover, a row        | claimer, tiles up    | release/acquire | device | epoch, never reset |
// | layer_tiles    | storer, a tile      | claimer, returns     | release/acquire | device | epoch, never reset |
// | layer_returned | returning warp, row | owner's summing warp | release/acquire | system | epoch, never reset |
//
// Progress: announcing routes never waits. A block's mover first pulls rows, waiting only for `layer_told`. An up tile waits
// for pulls, a down tile waits for tiles with lower tickets, and each block processes its tickets in order. A mover returns
// rows after all its pulls, and the multiplying warps return rows once no tickets are left; both wait only for tiles (per_rank:
// those of the row tile and of all earlier ones). Summing is the last step of a block and waits for returns. All work,
// including announcing and the first tickets, is claimed by running blocks, so one resident block per rank suffices.
//
// Buffers: in each call, another rank writes to this rank only after receiving this rank's counts for that call, which are sent
// after this rank's previous call has ended. This rank writes layout.x() after the end of its previous call. By then, it has
// received the outputs of all its rows, so other ranks have finished reading those rows. A call that runs only the first half
// is followed by one that runs the second half.
#include "arch/cuda/cuda_arch.cuh"
#include "exchange/fused/layer_launch.cuh"
#include "exchange/fused/layer_rank_returns.cuh"
#include "exchange/fused/layer_tiles.cuh"
#include "exchange/gpu/frame.cuh"

namespace switchyard::detail {

namespace fused {

using Up = gemm::Kind<__nv_bfloat16, ptx::OperandOrder::inner, gemm::Finish::gated>;
using Down = gemm::Kind<__nv_bfloat16, ptx::OperandOrder::inner, gemm::Finish::plain>;

template <class A, bool kPerRank>
__global__ void __launch_bounds__(gemm::kThreads, 1) layer_kernel(const __grid_constant__ FusedParams p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = ptx::shared_address(shared), part = base + kPartAt;
  const int64_t staged = stage_tokens<Bf16Layer>(p, part);  // stages data that the plan does not access, while it runs
  ptx::wait_for_previous();
  if (is_left_out(p)) return;
  uint64_t abort = 0, epoch = 0;
  if (threadIdx.x == 0) {
    abort = ptx::load_relaxed<Scope::system>(p.call.abort_word);
    epoch = epoch_after(p.state->epoch);
    if (abort != 0) report_abort_inline(p.call, abort, epoch);
  }
  if (__syncthreads_or(abort != 0)) return;
  int* const first_tiles = reinterpret_cast<int*>(shared + p.up.shared_bytes) - (p.up.num_experts + 1);
  const uint32_t list = (static_cast<uint32_t>(p.up.num_experts) + 2) * 4;
  const uint32_t pieces = (p.up.shared_bytes - list - kPieceStorageBytes) & ~127u;
  const LayerStorage r{gemm::make_storage(base, pieces + list, p.up.num_experts, kFusedRows), base + pieces};
  gemm::make_barriers(r.storage, 1, gemm::kMathThreads + 2 * kLanes);  // loader and storer also read tiles
  const bool proceeds = p.header->status == 0;
  if (threadIdx.x == 0) {
    for (int g = 0; g < 2; ++g) {
      ptx::mbarrier_init(r.staged(g), 128);
      ptx::mbarrier_init(r.stored(g), 1);
    }
    for (uint32_t slot = 0; slot < kMaxSlots; ++slot) ptx::mbarrier_init(r.row_arrived(slot), 1);
    ptx::store_shared(r.failed(), 0);
    begin_counting(p);
    LayerCall::write(r, flag_word(epoch), proceeds ? p.header->tokens : 0, proceeds ? p.header->rows : 0);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  CudaWarp w{CudaWarp::Bare{}};
  const KernelTrace<A> trace(w, p.call.device_trace, Event::layer,
                             pack_launch(LayerCall(p, r).word >> kFlagValueBits, p.state, LayerCall(p, r).tokens));
  if (proceeds) {
    if (p.parts.up) publish_routes<kPerRank>(LayerCall(p, r), staged, part);
    count_row_tiles_of<Bf16Layer>(p, first_tiles);
    const int warp = static_cast<int>(threadIdx.x >> 5);
    if (warp >= gemm::kMathWarps) {
      ptx::dealloc_registers<56>();
      if (warp == kLoaderWarp) load_layer_tiles<Up, Down>(LayerCall(p, r));
      if (warp == kClaimerWarp) claim_layer_tiles<A>(LayerCall(p, r), first_tiles);
      if (warp == kStorerWarp) store_layer_tiles<Up, Down>(LayerCall(p, r));
      if (warp == kMoverWarp) {
        const LayerCall call(p, r);
        Pieces rows(r, p.pulled);
        MoveCounter moved;
        const bool pulled = !p.parts.up || pull_rows<A, Bf16Layer>(call, rows, moved);
        if (pulled && p.parts.down) return_by_copies<A, Bf16Layer, kPerRank>(call, first_tiles, rows, moved);
        if (lane() == 0) count_moved(p, moved);
      }
    } else {
      ptx::alloc_registers<224>();
      uint32_t handed = 0;
      gemm::multiply_tiles<kFusedRows>(r.storage, [&]<int kWidth>(gemm::Position& at, uint32_t entry) {
        const bool down = read_layer_tile(entry).down;
        const RoleSpan<A> span(down ? Event::expert_down : Event::expert_up);
        if (down)
          multiply_layer_tile<Down, kWidth>(p.down, r, at, handed);
        else
          multiply_layer_tile<Up, kWidth>(p.up, r, at, handed);
        span.end(kWidth);
      });
      if (p.parts.down) {
        return_and_sum_by_threads<A, Bf16Layer, kPerRank>(LayerCall(p, r), first_tiles);
      }
    }
    __syncwarp();
  }
  if (lane() == 0) leave<Bf16Layer>(p, LayerCall(p, r).word >> kFlagValueBits);
}

}  // namespace fused

namespace {

const LayerKernels per_route{{"layer kernel", fused::layer_kernel<Cuda, false>, gemm::kThreads, max_layer_shared},
                             {"layer kernel", fused::layer_kernel<CudaTraced, false>, gemm::kThreads, max_traced_layer_shared}};
const LayerKernels per_rank{{"layer kernel", fused::layer_kernel<Cuda, true>, gemm::kThreads, max_layer_shared},
                            {"layer kernel", fused::layer_kernel<CudaTraced, true>, gemm::kThreads, max_traced_layer_shared}};

}  // namespace

void launch_fused(const FusedParams& params, int blocks, const DeviceLimits& limits, gpu::Stream stream) {
  launch_layer(params.layout.per_rank ? per_rank : per_route, gemm::kThreads, params, blocks, limits, stream);
}

}  // namespace switchyard::detail
