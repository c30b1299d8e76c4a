// SPDX-License-Identifier: Apache-2.0
// Replaces expert ids with slots, unless `slots` is null, and counts the routes to each expert. Each thread processes one route
// at a time. The counts are sums of integers and therefore independent of timing.
#include <algorithm>

#include "exchange/slots/launch.hpp"

namespace switchyard::detail {

namespace slots {

constexpr int kSelectThreads = 256;

__device__ int64_t tokens_of(const SelectParams& p) {
  if (p.device_tokens == nullptr) return p.tokens;
  const int64_t tokens = *p.device_tokens;
  return tokens < 0 ? 0 : tokens < p.tokens ? tokens : p.tokens;
}

template <class Id>
__device__ void select_routes(const SelectParams& p) {
  const auto* const ids = static_cast<const Id*>(p.ids);
  auto* const slots = static_cast<Id*>(p.slots);
  const SlotTable& table = p.selection.table;
  const int64_t threads = int64_t{gridDim.x} * kSelectThreads, routes = tokens_of(p) * p.topk;
  for (int64_t i = int64_t{blockIdx.x} * kSelectThreads + threadIdx.x; i < routes; i += threads) {
    const int64_t id = ids[i];
    if (id >= 0 && id < table.num_experts) atomicAdd(p.selection.counts + id, 1ull);
    if (slots != nullptr) slots[i] = static_cast<Id>(table(id, i / p.topk));
  }
}

__global__ void __launch_bounds__(kSelectThreads) select_slots_kernel(const __grid_constant__ SelectParams p) {
  const bool sets_version = p.version != nullptr && blockIdx.x == 0 && threadIdx.x == 0;
  const uint32_t version = sets_version ? p.selection.table.version() : 0;  // stored last, so that no id waits for this load
  if (p.tokens > 0) p.ids64 ? select_routes<int64_t>(p) : select_routes<int32_t>(p);  // 0: also IdleCall
  if (sets_version) *p.version = version;
}

}  // namespace slots

namespace {

const Kernel<const SelectParams> select_slots("slot selection", slots::select_slots_kernel, slots::kSelectThreads,
                                              [](const DeviceLimits&) { return 0; });

}  // namespace

void launch_select(const SelectParams& p, int max_blocks, gpu::Stream stream) {
  const int64_t blocks = (p.tokens * p.topk + slots::kSelectThreads - 1) / slots::kSelectThreads;
  select_slots.launch({static_cast<int>(std::clamp<int64_t>(blocks, 1, max_blocks)), slots::kSelectThreads, 0}, stream, p);
}

}  // namespace switchyard::detail
