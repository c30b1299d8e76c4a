// SPDX-License-Identifier: Apache-2.0
// The peer's side of the benchmark: its kernels, compiled from the headers of its wheel, the layout of its symmetric buffer,
// its tensor maps and its launch attributes. Nothing here needs Python or torch.

/// nvcc 13.0 writes the infinite template argument below (no clamp of the activation) as `inf` into its host code.
constexpr float inf = __builtin_inff();

#include "mega_moe_fp8.hpp"

#include <deep_gemm/impls/sm90_fp8_mega_moe.cuh>
#include <deep_gemm/impls/sm90_mega_moe_pre_dispatch.cuh>

#include <array>
#include <cstring>
#include <utility>

namespace mega_moe {
namespace {

namespace peer = deep_gemm;

constexpr int kSms = 132;
constexpr int kRows = 128, kColumns = 256;  // of a tile
constexpr int kDispatchThreads = 64, kLoaderThreads = 64, kMathThreads = 256;
constexpr int kCluster = 2;  // blocks that share the weights of a tile

/// Recorded from the host code in the wheel's own library (its printed configuration and the source that it passes to nvcc),
/// with the buffer's maximum number of tokens, its default. The fields are in the order of the struct.
constexpr Config kConfigs[] = {
    {2, 1024, 64, 20480, 37888, 18944, 4, 4014, 1, 231024},     {2, 1024, 128, 24576, 49152, 24576, 4, 4029, 1, 231104},
    {2, 1024, 256, 32640, 65280, 32640, 4, 4058, 1, 231600},    {2, 4096, 64, 69632, 37888, 18944, 4, 4014, 1, 232048},
    {2, 4096, 128, 73728, 68608, 34304, 4, 4029, 1, 232128},    {2, 4096, 256, 81792, 128000, 64000, 4, 4058, 1, 232296},
    {2, 8192, 64, 135168, 68608, 34304, 3, 4029, 16, 183864},   {2, 8192, 128, 139264, 68608, 34304, 3, 4029, 16, 183952},
    {2, 8192, 256, 147328, 128000, 64000, 3, 4058, 16, 184120}, {4, 4096, 128, 135168, 37888, 18944, 3, 4014, 1, 183728},
    {8, 4096, 128, 264192, 37888, 18944, 3, 4014, 1, 186416},
};
constexpr size_t kNumConfigs = std::size(kConfigs);

struct Instance {
  const void* kernel;
  size_t symmetric_bytes;  // of the argument with the addresses of all ranks
};
template <Config C>
Instance instance() {
  const auto kernel =
      &peer::sm90_fp8_mega_moe_impl<C.tokens, kHidden, kIntermediate, C.experts, kTopK, C.experts / C.ranks, kRows, kColumns,
                                    kBlock, C.pool, C.scale_pool, C.ring, C.stages, kDispatchThreads, kLoaderThreads,
                                    kMathThreads, kSms, C.ranks, inf, true, 0, true, true, false, true, kCluster, true, C.lag,
                                    4, false, false, 4, false, 1, C.publish, false>;
  return {reinterpret_cast<const void*>(kernel), sizeof(peer::layout::SymBuffer<C.ranks>)};
}
template <size_t... I>
std::array<Instance, kNumConfigs> instances(std::index_sequence<I...>) {
  return {instance<kConfigs[I]>()...};
}
const std::array<Instance, kNumConfigs>& kernels() {
  static const auto all = instances(std::make_index_sequence<kNumConfigs>());
  return all;
}

CUtensorMap encode(const Map& m) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found{};
  must(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found),
       "the driver's entry");
  if (found != cudaDriverEntryPointSuccess) fail("the driver has no cuTensorMapEncodeTiled");
  CUtensorMap map{};
  const cuuint64_t sizes[] = {m.inner, m.outer}, strides[] = {m.stride_bytes};
  const cuuint32_t box[] = {m.box_inner, m.box_outer}, steps[] = {1, 1};
  const CUresult result = reinterpret_cast<Encode>(entry)(
      &map, m.type, 2, const_cast<void*>(m.base), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, m.swizzle,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) fail(std::string("the tensor map of ") + m.name + ": CUDA error " + std::to_string(result));
  return map;
}

Map bytes_map(const char* name, const void* base, uint64_t columns, uint64_t rows, uint32_t box_rows) {
  return {name, CU_TENSOR_MAP_DATA_TYPE_UINT8, base, columns, rows, columns, kBlock, box_rows, CU_TENSOR_MAP_SWIZZLE_128B};
}
Map scales_map(const char* name, const void* base, uint64_t rows, uint64_t blocks) {
  return {name, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, base, rows, blocks, rows * 4, kRows, 1, CU_TENSOR_MAP_SWIZZLE_NONE};
}

}  // namespace

std::vector<Config> configs() { return {std::begin(kConfigs), std::end(kConfigs)}; }

Layout layout_of(const Config& c) {
  const auto experts = static_cast<uint32_t>(c.experts), tokens = static_cast<uint32_t>(c.tokens);
  const peer::layout::SM90Workspace head(nullptr, static_cast<uint32_t>(c.ranks), experts, tokens, kTopK,
                                         static_cast<uint32_t>(c.ring));
  const auto rows = [](uint64_t count, uint64_t bytes) { return count * bytes; };
  Layout l{};
  l.x = head.get_num_bytes();
  l.x_scales = l.x + rows(tokens, kHidden);
  l.topk_idx = l.x_scales + rows(tokens, kHiddenBlocks * 4);
  l.topk_weights = l.topk_idx + rows(tokens, kTopK * 8);
  l.rows = l.topk_weights + rows(tokens, kTopK * 4);
  l.row_scales = l.rows + rows(c.ring, kHidden);
  const uint64_t row_weights = l.row_scales + rows(c.scale_pool, kHiddenBlocks * 4);
  l.intermediate_rows = row_weights + rows(c.ring, 4);
  l.intermediate_scales = l.intermediate_rows + rows(c.ring, kIntermediate);
  const uint64_t returned = l.intermediate_scales + rows(c.scale_pool, kIntermediateBlocks * 4);
  l.bytes = returned + rows(tokens, kTopK * kHidden * 2ull);
  return l;
}

std::vector<Map> maps_of(const Config& c, const Rank& rank) {
  const Layout l = layout_of(c);
  const auto ring = static_cast<uint64_t>(c.ring), scale_rows = static_cast<uint64_t>(c.scale_pool);
  const auto experts = static_cast<uint64_t>(c.local_experts());
  return {bytes_map("rows", rank.shared + l.rows, kHidden, ring, kRows),
          scales_map("scales of rows", rank.shared + l.row_scales, scale_rows, kHiddenBlocks),
          bytes_map("up weights", rank.up, kHidden, experts * 2 * kIntermediate, kColumns),
          bytes_map("intermediate rows, stored", rank.shared + l.intermediate_rows, kIntermediate, ring, kRows / 2),
          bytes_map("intermediate rows, loaded", rank.shared + l.intermediate_rows, kIntermediate, ring, kRows),
          scales_map("scales of intermediate rows", rank.shared + l.intermediate_scales, scale_rows, kIntermediateBlocks),
          bytes_map("down weights", rank.down, kIntermediate, experts * kHidden, kColumns)};
}

Peer::Peer(const Config& c, const std::vector<Rank>& ranks, int idx)
    : config_(c), rank_(ranks[static_cast<size_t>(idx)]), layout_(layout_of(c)) {
  for (const Rank& each : ranks) shared_.push_back(reinterpret_cast<int64_t>(each.shared));
  while (kConfigs[kernel_].ranks != c.ranks || kConfigs[kernel_].tokens != c.tokens || kConfigs[kernel_].experts != c.experts)
    ++kernel_;
  for (const Map& map : maps_of(c, rank_)) maps_.push_back(encode(map));
  must(cudaFuncSetAttribute(kernels()[kernel_].kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, c.shared_bytes),
       "shared memory of the peer's kernel");
  cudaFuncAttributes attributes{};
  must(cudaFuncGetAttributes(&attributes, peer::sm90_mega_moe_pre_dispatch_kernel<kBlock, false>), "the peer's preparation");
}

void Peer::prepare(cudaStream_t stream) const {
  const auto tokens = static_cast<uint32_t>(config_.tokens);
  uint8_t* const at = rank_.shared;
  peer::sm90_mega_moe_pre_dispatch_kernel<kBlock, false><<<tokens, kHidden / 8, 0, stream>>>(
      rank_.x, rank_.topk_idx, rank_.topk_weights, reinterpret_cast<__nv_fp8_e4m3*>(at + layout_.x),
      reinterpret_cast<float*>(at + layout_.x_scales), reinterpret_cast<int64_t*>(at + layout_.topk_idx),
      reinterpret_cast<float*>(at + layout_.topk_weights), tokens, tokens, kHidden, kHiddenBlocks, kTopK, 1.F);
  must(cudaGetLastError(), "the peer's preparation");
}

void Peer::run(cudaStream_t stream) const {
  // Arguments for any number of ranks have the same bytes.
  peer::layout::SymBuffer<> symmetric(shared_, static_cast<uint32_t>(rank_.idx));
  const Instance& chosen = kernels()[kernel_];
  if (chosen.symmetric_bytes != sizeof symmetric) fail("the peer's argument of addresses depends on the number of ranks");
  void* y = rank_.y;
  int* counts = nullptr;
  auto tokens = static_cast<uint32_t>(config_.tokens);
  const float *up_scales = rank_.up_scales, *down_scales = rank_.down_scales;
  uint64_t* trace = nullptr;
  CUtensorMap maps[7];
  std::memcpy(maps, maps_.data(), sizeof maps);
  void* arguments[] = {&y,         &counts,  &tokens,  &symmetric, &maps[0], &maps[1],     &maps[2],
                       &up_scales, &maps[3], &maps[4], &maps[5],   &maps[6], &down_scales, &trace};
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = kCluster;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t launch{};
  launch.gridDim = kSms;
  launch.blockDim = kDispatchThreads + kLoaderThreads + kMathThreads;
  launch.dynamicSmemBytes = static_cast<size_t>(config_.shared_bytes);
  launch.stream = stream;
  launch.attrs = &cluster;
  launch.numAttrs = 1;
  must(cudaLaunchKernelExC(&launch, chosen.kernel, arguments), "the peer's kernel");
}

}  // namespace mega_moe
