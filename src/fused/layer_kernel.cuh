// SPDX-License-Identifier: Apache-2.0
// A whole MoE layer in one persistent launch: rows are pulled from their sources, both products run tile by tile as rows and
// intermediate rows come, outputs return to their owners, which sum them.
//
// | flag     | written by                        | read by              | order           | scope  | reuse              |
// | told     | source's last block               | puller               | release/acquire | system | epoch, never reset |
// | arrived  | puller, a row                     | loader, tiles up     | release/acquire | device | epoch, never reset |
// | h_done   | storer, a tile up                 | loader, tiles down   | release/acquire | device | epoch, never reset |
// | y_done   | storer, a tile down               | mover                | release/acquire | device | epoch, never reset |
// | returned | mover of the expert's rank, a row | owner's summing warp | release/acquire | system | epoch, never reset |
//
// Progress: telling waits for nobody. Pulling waits for `told` alone. A tile up waits for pulls, a tile down for tiles with lower
// tickets, and a block works on its tickets in their order; a block's mover returns rows after all its pulls, and waits for tiles
// alone. Sums come last in a block and wait for movers. So one resident block per rank suffices.
//
// Buffers: what other ranks write here in a call they write after they have this rank's counts of that call, which this rank
// sends when it has ended the call before.
#pragma once

#include "fused/layer_moves.cuh"
#include "fused/layer_tiles.cuh"

namespace switchyard::detail::fused {

template <class Up, class Down>
__global__ void __launch_bounds__(gemm::kThreads, 1) layer_kernel(const __grid_constant__ LayerParams p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = ptx::shared_address(shared);
  int* const first_tiles = reinterpret_cast<int*>(shared + p.up.shared_bytes) - (p.up.num_experts + 1);
  tell_routes(p);
  count_row_tiles_of(p, first_tiles);
  const uint32_t list = (static_cast<uint32_t>(p.up.num_experts) + 2) * 4;
  const uint32_t pieces = (p.up.shared_bytes - list - kPieces * kPieceBytes) & ~127u;
  const LayerRoom r{gemm::make_room(base, pieces + list, p.up.num_experts, kWidest), base + pieces};
  gemm::make_barriers(r.room, 1, gemm::kMathThreads + 2);
  if (threadIdx.x == 0) {
    for (int g = 0; g < 2; ++g) {
      ptx::mbarrier_init(r.staged(g), 128);
      ptx::mbarrier_init(r.stored(g), 1);
      ptx::mbarrier_init(r.come(static_cast<uint32_t>(g)), 1);
    }
    ptx::store_shared(r.failed(), 0);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x >> 5);
  if (warp >= gemm::kMathWarps) {
    ptx::give_registers<56>();
    if (warp == kLoaderWarp) load_layer_tiles<Up, Down>(p, r);
    if (warp == kClaimerWarp && lane() == 0) claim_layer_tiles(p, r, first_tiles);
    if (warp == kStorerWarp) store_layer_tiles<Up, Down>(p, r);
    if (warp == kMoverWarp) {
      Pieces pieces_of_rows(r);
      if (pull_rows(p, r, pieces_of_rows)) return_rows(p, r, first_tiles, pieces_of_rows);
    }
  } else {
    ptx::take_registers<224>();
    uint32_t handed = 0;
    gemm::multiply_tiles<kWidest>(r.room, [&]<int kWidth>(gemm::Position& at, uint32_t entry) {
      if (read_layer_tile(entry).down)
        multiply_layer_tile<Down, kWidth>(p.down, r, at, handed);
      else
        multiply_layer_tile<Up, kWidth>(p.up, r, at, handed);
    });
    sum_tokens<2, 8>(p, r);
  }
  __syncwarp();
  if (lane() != 0) return;
  // The last warp leaves the counters as the first one found them: all have taken their last index.
  if (ptx::add_acq_rel<Scope::device>(&p.counters->exits, 1) + 1 != uint64_t{gridDim.x} * (gemm::kThreads / 32)) return;
  *p.counters = LayerCounters{};
}

}  // namespace switchyard::detail::fused
