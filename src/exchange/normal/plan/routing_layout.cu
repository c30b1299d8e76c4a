// SPDX-License-Identifier: Apache-2.0
// Counts the demand of a routing on a GPU into the caller's memory. One cluster of blocks counts in shared memory and sums the
// counts of its blocks. No memory needs to be zeroed first, no scratch memory is needed, and the result does not depend on
// timing. GPUs below compute capability 9.0 have no clusters and use one block.
#include <algorithm>
#include <array>
#include <atomic>
#include <string>

#include "arch/cuda/one_cluster.cuh"
#include "exchange/normal/impl.hpp"
#include "exchange/normal/launch.hpp"
#include "heap/gpu/device_guard.hpp"
#include "switchyard/status.hpp"

namespace switchyard::detail {

namespace {

/// If all fields are zero, there is nothing to do.
struct RoutingLayoutParams {
  const void* ids = nullptr;
  bool ids64 = false;
  int topk = 0;
  int64_t tokens = 0;
  ExpertRanges map;
  int32_t *per_rank = nullptr, *per_expert = nullptr;
  uint8_t* where = nullptr;
};

/// Blocks per cluster: the maximum supported by every GPU with clusters.
constexpr int kCountBlocks = 8;
constexpr int kCountThreads = 512, kCountWarps = kCountThreads / 32, kWarpLanes = 32;
/// Tokens that a warp counts at a time, one per lane.
constexpr int kTileTokens = kWarpLanes;
/// Ids that each lane keeps in flight.
constexpr int kIdsAhead = 8;
constexpr unsigned kWholeWarp = 0xffffffffu;
static_assert(kMaxRanks <= 64, "ranks of a token are the bits of a word");

/// Expert of a route, or -1 if it has none.
__device__ int32_t expert_of(const RoutingLayoutParams& p, int64_t route) {
  if (!p.ids64) {
    const int32_t id = static_cast<const int32_t*>(p.ids)[route];
    return id >= 0 && id < p.map.experts ? id : -1;
  }
  const int64_t id = static_cast<const int64_t*>(p.ids)[route];
  return id >= 0 && id < p.map.experts ? static_cast<int32_t>(id) : -1;
}

/// Counts the routes of `tokens` tokens starting at `first` and sets the bits of their ranks in `masks`, which must be 0
/// initially. Call from one warp.
__device__ void count_routes_of_tile(const RoutingLayoutParams& p, int64_t first, int tokens, uint32_t* per_expert,
                                     unsigned long long* masks) {
  const int lane = threadIdx.x % kWarpLanes, routes = tokens * p.topk;
  const int64_t at = first * p.topk;
  for (int base = lane; base < routes; base += kWarpLanes * kIdsAhead) {
    int32_t id[kIdsAhead];
#pragma unroll
    for (int i = 0; i < kIdsAhead; ++i) {
      const int route = base + i * kWarpLanes;
      id[i] = route < routes ? expert_of(p, at + route) : -1;
    }
#pragma unroll
    for (int i = 0; i < kIdsAhead; ++i) {
      if (id[i] < 0) continue;
      atomicAdd(&per_expert[id[i]], 1u);
      atomicOr(&masks[(base + i * kWarpLanes) / p.topk], 1ull << p.map.owner(id[i]));
    }
  }
}

/// Writes rows of is_token_in_rank, four bytes at a time. Call from one warp.
__device__ void write_rows_of_tile(const RoutingLayoutParams& p, int64_t first, int tokens, const unsigned long long* masks) {
  const int lane = threadIdx.x % kWarpLanes, world = p.map.world, bytes = tokens * world;
  uint8_t* const to = p.where + first * world;
  for (int b = lane * 4; b < bytes; b += kWarpLanes * 4) {
    uint32_t word = 0;
    for (int j = 0; j < 4 && b + j < bytes; ++j) {
      const int token = (b + j) / world, rank = (b + j) % world;
      word |= static_cast<uint32_t>(masks[token] >> rank & 1) << (8 * j);
    }
    if (b + 4 <= bytes) {
      *reinterpret_cast<uint32_t*>(to + b) = word;
    } else {
      for (int j = 0; b + j < bytes; ++j) to[b + j] = static_cast<uint8_t>(word >> (8 * j));
    }
  }
}

/// Counts one warp's share of the tokens. `counts`: the block's [W + E] counts.
__device__ void count_tiles(const RoutingLayoutParams& p, uint32_t* counts, unsigned long long* masks) {
  const int lane = threadIdx.x % kWarpLanes, warp = threadIdx.x / kWarpLanes, world = p.map.world;
  for (int64_t tile = int64_t{blockIdx.x} * kCountWarps + warp; tile * kTileTokens < p.tokens;
       tile += int64_t{gridDim.x} * kCountWarps) {
    const int64_t first = tile * kTileTokens;
    const int tokens = static_cast<int>(min(int64_t{kTileTokens}, p.tokens - first));
    masks[lane] = 0;
    __syncwarp();
    count_routes_of_tile(p, first, tokens, counts + world, masks);
    __syncwarp();
    const unsigned long long mask = masks[lane];
    for (int d = 0; d < world; ++d) {
      const int count = __popc(__ballot_sync(kWholeWarp, (mask >> d & 1) != 0));
      if (lane == d % kWarpLanes && count > 0) atomicAdd(&counts[d], static_cast<uint32_t>(count));
    }
    write_rows_of_tile(p, first, tokens, masks);
    __syncwarp();
  }
}

}  // namespace

namespace normal {

__global__ void __launch_bounds__(kCountThreads) SWITCHYARD_ONE_CLUSTER(kCountBlocks)
    routing_layout_kernel(const __grid_constant__ RoutingLayoutParams p) {
  extern __shared__ uint32_t counted[];
  __shared__ unsigned long long masks[kCountWarps][kTileTokens];
  if (p.per_rank == nullptr) return;
  const int columns = p.map.world + p.map.experts;
  for (int c = static_cast<int>(threadIdx.x); c < columns; c += kCountThreads) counted[c] = 0;
  __syncthreads();
  count_tiles(p, counted, masks[threadIdx.x / kWarpLanes]);
  ptx::one_cluster_barrier();
  for (int c = static_cast<int>(ptx::block_of_one_cluster() * kCountThreads + threadIdx.x); c < columns;
       c += static_cast<int>(gridDim.x) * kCountThreads) {
    uint32_t sum = 0;
    for (uint32_t block = 0; block < gridDim.x; ++block) sum += ptx::load_of_one_cluster(counted + c, block);
    (c < p.map.world ? p.per_rank[c] : p.per_expert[c - p.map.world]) = static_cast<int32_t>(sum);
  }
  ptx::one_cluster_barrier();  // no block may end while others read its counts
}

}  // namespace normal

namespace {

/// Number of blocks of the kernel on a GPU. The device properties are queried only once because the query takes longer than the
/// kernel.
int blocks_on(int device) {
  static std::array<std::atomic<int>, 64> known = {};
  std::atomic<int>* const here = device < static_cast<int>(known.size()) ? &known[static_cast<size_t>(device)] : nullptr;
  if (here != nullptr && here->load(std::memory_order_relaxed) != 0) return here->load(std::memory_order_relaxed);
  gpu::DeviceTraits traits;
  if (gpu::traits_of(&traits, device) != gpu::kOk)
    throw Error(ErrorCode::system, "enqueue_routing_layout: properties of GPU " + std::to_string(device));
  const int blocks = one_cluster_blocks(traits.generation, kCountBlocks);
  if (here != nullptr) here->store(blocks, std::memory_order_relaxed);
  return blocks;
}

constexpr int shared_bytes_of(int columns) { return columns * 4; }
/// Dynamic shared memory up to which the kernel needs no opt-in: together with its static shared memory, it stays within 48
/// KiB.
constexpr int kDefaultSharedBytes = 40 << 10;

const Kernel<const RoutingLayoutParams> routing_layout_of("routing layout", normal::routing_layout_kernel, kCountThreads,
                                                          [](const DeviceLimits&) {
                                                            return shared_bytes_of(kMaxCountedExperts + kMaxRanks);
                                                          });

/// The GPU that owns the memory at `p`. Throws Error(invalid_argument), naming the argument.
int device_of(const char* name, const void* p, size_t alignment) {
  gpu::MemoryPlace place;
  if (reinterpret_cast<uintptr_t>(p) % alignment != 0)
    throw Error(ErrorCode::invalid_argument, std::string("enqueue_routing_layout: ") + name +
                                                 ": address must be a multiple of " + std::to_string(alignment) + " bytes");
  if (p == nullptr || gpu::look_up(&place, p) != gpu::kOk) {
    gpu::forget_error();
    place.kind = gpu::MemoryKind::ordinary;
  }
  if (place.kind != gpu::MemoryKind::device && place.kind != gpu::MemoryKind::managed)
    throw Error(ErrorCode::invalid_argument, std::string("enqueue_routing_layout: ") + name +
                                                 (p ? " is host memory" : " is null") + ": must be memory of a GPU");
  return place.device;
}

}  // namespace

void count_routing(const ExpertIds& ids, const ExpertRanges& map, const RoutingLayoutView& out, void* stream) {
  const int device = device_of("num_tokens_per_rank", out.num_tokens_per_rank, 4);
  const auto check = [&](const char* name, const void* p, size_t alignment) {
    if (const int on = device_of(name, p, alignment); on != device)
      throw Error(ErrorCode::invalid_argument, std::string("enqueue_routing_layout: ") + name + " lies on GPU " +
                                                   std::to_string(on) + ", num_tokens_per_rank on GPU " +
                                                   std::to_string(device));
  };
  check("num_tokens_per_expert", out.num_tokens_per_expert, 4);
  if (ids.num_tokens > 0) check("topk_ids.data", ids.data, ids.is_int64 ? 8 : 4);
  if (ids.num_tokens > 0) check("is_token_in_rank", out.is_token_in_rank, 4);
  const DeviceGuard guard(device);
  RoutingLayoutParams p;
  p.ids = ids.data;
  p.ids64 = ids.is_int64;
  p.topk = ids.topk;
  p.tokens = ids.num_tokens;
  p.map = map;
  p.per_rank = out.num_tokens_per_rank;
  p.per_expert = out.num_tokens_per_expert;
  p.where = out.is_token_in_rank;
  const int shared = shared_bytes_of(map.world + map.experts);
  if (shared > kDefaultSharedBytes) routing_layout_of.prepare({});  // groups have already done this on their devices
  routing_layout_of.launch({blocks_on(device), kCountThreads, static_cast<uint32_t>(shared)}, static_cast<gpu::Stream>(stream),
                           p);
}

}  // namespace switchyard::detail
