// SPDX-License-Identifier: Apache-2.0
// Routes that were kept, counted after a dispatch. It waits for nobody.
#include "arch/cuda/cuda_arch.cuh"
#include "exchange/cuda/launch.hpp"

namespace switchyard::detail {

namespace {

/// One block. Rank-major with drops. Of a group that has failed neither the header nor the records need have been written.
__global__ void count_kept_kernel(const __grid_constant__ PlanParams p, const __grid_constant__ Received received) {
  const TablesHeader& h = *p.tables.header;
  if (ptx::load_relaxed<Scope::system>(p.call.abort_word) != 0 || h.moved == 0) return;
  const int here = p.map.count(p.call.heap.rank), first = p.map.first(p.call.heap.rank), world = p.map.world;
  auto* counts = reinterpret_cast<unsigned long long*>(p.tables.dropped_here);
  for (int i = threadIdx.x; i < world * here; i += blockDim.x) counts[i] = 0;
  __syncthreads();
  const auto* route = reinterpret_cast<const int32_t*>(received.records + received.layout.route_at());
  for (int s = 0; s < world; ++s)
    for (int64_t i = h.record_begin[s] * p.topk + threadIdx.x; i < h.record_begin[s + 1] * p.topk; i += blockDim.x)
      if (route[i] >= 0) atomicAdd(&counts[static_cast<int64_t>(s) * here + route[i]], 1ull);
  __syncthreads();
  const int64_t row_bytes = p.control.counts_row_bytes();
  for (int el = threadIdx.x; el < here; el += blockDim.x) {
    int64_t kept = 0;
    for (int s = 0; s < world; ++s) {
      const auto* routes = reinterpret_cast<const int32_t*>(p.tables.counts + s * row_bytes + sizeof(CountsHead)) + world;
      int64_t& dropped = p.tables.dropped_here[static_cast<int64_t>(s) * here + el];
      kept += dropped;
      dropped = routes[first + el] - dropped;
    }
    p.tables.kept[el] = kept;
    p.tables.aligned[el] = round_up(kept, p.alignment);
  }
}

constexpr int kCountThreads = 512;
const Kernel<const PlanParams, const Received> count_kept("count kernel", count_kept_kernel, kCountThreads,
                                                          [](const DeviceLimits&) { return 0; });

}  // namespace

void launch_count_kept(const PlanParams& p, const Received& received, gpu::Stream stream) {
  count_kept.launch({1, kCountThreads, 0}, stream, p, received);
}

}  // namespace switchyard::detail
