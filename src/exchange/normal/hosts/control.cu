// SPDX-License-Identifier: Apache-2.0
// Counts and placements over several hosts on GPUs: performs the steps of exchange/hosts/relay.hpp in kernels before and after
// a round, and cuts the rounds of a combine.
#include "arch/cuda/cuda_traced.cuh"
#include "base/call_signature.hpp"
#include "exchange/normal/frame.cuh"
#include "exchange/normal/hosts/frame.cuh"
#include "plan/decisions.hpp"

namespace switchyard::detail {

namespace {

constexpr int kAnnounceThreads = 512, kCutThreads = 128;

/// Call from all lanes of one warp.
__device__ void copy_words(void* to, const void* from, int64_t bytes) {
  for (int64_t i = threadIdx.x % kLanes; i < bytes / 4; i += kLanes)
    static_cast<int32_t*>(to)[i] = static_cast<const int32_t*>(from)[i];
}

/// Counts token t's routes and ranks, and returns the ranks as bits.
__device__ uint64_t count_token(const PlanParams& p, int64_t t, int32_t* columns) {
  uint64_t ranks = 0;
#pragma unroll 1
  for (int64_t f = t * p.topk; f < (t + 1) * p.topk; ++f) {
    const int64_t id = p.ids64 ? static_cast<const int64_t*>(p.ids)[f] : static_cast<const int32_t*>(p.ids)[f];
    if (id < 0 || id >= p.map.experts) continue;
    atomicAdd(&columns[p.map.world + id], 1);
    ranks |= uint64_t{1} << p.map.owner(static_cast<int32_t>(id));
  }
  for (uint64_t left = ranks; left != 0; left &= left - 1) atomicAdd(&columns[__ffsll(static_cast<long long>(left)) - 1], 1);
  return ranks;
}

}  // namespace

namespace normal {

template <class A>
__global__ void __launch_bounds__(kAnnounceThreads) announce_hosts_kernel(const __grid_constant__ AnnounceParams p) {
  extern __shared__ int32_t columns[];
  __shared__ CallContext call;
  __shared__ int crossing_of_warp[kAnnounceThreads / kLanes];
  copy_to_shared(p.call, call);
  __syncthreads();
  if (!begin_hosts_block(p.call, p.state, call)) return;
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes, num_columns = p.plan.map.world + p.plan.map.experts;
  int64_t tokens = p.plan.tokens;
  if (p.plan.device_tokens != nullptr) tokens = least(*p.plan.device_tokens > 0 ? *p.plan.device_tokens : 0, tokens);
  for (int c = threadIdx.x; c < num_columns; c += blockDim.x) columns[c] = 0;
  __syncthreads();
  int64_t listed = 0;
#pragma unroll 1
  for (int64_t first = 0; first < tokens; first += blockDim.x) {
    const int64_t t = first + threadIdx.x;
    const bool crosses = t < tokens && (count_token(p.plan, t, columns) & p.host_ranks) != 0;
    const unsigned lanes = __ballot_sync(kAllLanes, crosses);
    if (lane == 0) crossing_of_warp[warp] = __popc(lanes);
    __syncthreads();
    int before = 0, all = 0;
    for (int w = 0; w < kAnnounceThreads / kLanes; ++w) {
      if (w < warp) before += crossing_of_warp[w];
      all += crossing_of_warp[w];
    }
    if (crosses) p.leaving[listed + before + __popc(lanes & ((1u << lane) - 1u))] = static_cast<int32_t>(t);
    listed += all;
    __syncthreads();
  }
  auto* const head = reinterpret_cast<RelayHead*>(p.message);
  auto* const counts = reinterpret_cast<CountsHead*>(head + 1);
  auto* const body = reinterpret_cast<int32_t*>(counts + 1);
  for (int c = threadIdx.x; c < num_columns; c += blockDim.x) body[c] = columns[c];
  if (threadIdx.x != 0) return;
  *p.count = listed;
  *head = relay_head(call, listed, static_cast<uint64_t>(p.plan.control.counts_row_bytes()));
  *counts = {sent_signature(p.plan), tokens, p.plan.capacity, static_cast<uint64_t>(p.plan.weights != nullptr)};
}

template <class A>
__global__ void __launch_bounds__(kLanes) deliver_hosts_kernel(const __grid_constant__ DeliverParams p) {
  __shared__ CallContext call;
  copy_to_shared(p.call, call);
  __syncthreads();
  if (!begin_hosts_block(p.call, p.state, call)) return;
  CudaWarp w(CudaWarp::Bare{});
  const bool is_counts = p.site == Site::counts;
  const int64_t bytes = is_counts ? p.control.counts_row_bytes() : static_cast<int64_t>(sizeof(Placement));
  const RelayHead head = *reinterpret_cast<const RelayHead*>(p.message);
  if (!is_of_call(head, call, static_cast<uint64_t>(bytes))) {
    record_mismatch<A>(w, call, Site::network, p.source);
    return;
  }
  for (int r = 0; r < call.world(); ++r) {
    if (!is_mapped<A>(call.heap, r)) continue;
    void* const to = is_counts ? static_cast<void*>(call.heap.at(r, p.control.counts_head(call.epoch, p.source)))
                               : call.heap.at(r, p.control.placement(call.epoch, p.source));
    copy_words(to, p.message + sizeof(RelayHead), bytes);
  }
  if (p.number != nullptr && threadIdx.x == 0) *p.number = head.number;
  publish_for<A>(w, call, p.control, p.site, p.source);
}

template <class A>
__global__ void __launch_bounds__(kLanes) offer_hosts_kernel(const __grid_constant__ OfferParams p) {
  __shared__ CallContext call;
  __shared__ Placement place;
  copy_to_shared(p.call, call);
  __syncthreads();
  if (!begin_hosts_block(p.call, p.state, call)) return;
  CudaWarp w(CudaWarp::Bare{});
  if (threadIdx.x == 0) {
    place = p.place;
    if (p.handle != nullptr) place.signature = mix_signature(place.signature, p.handle->identity);
  }
  __syncthreads();
  publish_placement<A>(w, call, p.control, place, nullptr, p.own_rows_differ ? &p.own_rows : nullptr);
  for (int i = 0; i < p.num_messages; ++i) {
    std::byte* const to = p.messages + i * p.message_stride;
    if (threadIdx.x == 0) *reinterpret_cast<RelayHead*>(to) = relay_head(call, 0, sizeof(Placement));
    copy_words(to + sizeof(RelayHead), &place, sizeof(Placement));
  }
}

template <class A>
__global__ void __launch_bounds__(kLanes) judge_hosts_kernel(const __grid_constant__ OfferParams p) {
  __shared__ CallContext call;
  copy_to_shared(p.call, call);
  __syncthreads();
  if (!begin_hosts_block(p.call, p.state, call)) return;
  CudaWarp w(CudaWarp::Bare{});
  // A trace attributes this kernel to the plan because the kernels that move rows between hosts do not record.
  const KernelTrace<A> trace(w, call.device_trace, Event::plan, pack_launch(call.epoch, p.state, p.header->tokens * p.topk));
  if (!wait_placements<A>(w, call, p.control, Site::placement)) return;
  const uint64_t signature = p.handle != nullptr ? mix_signature(p.place.signature, p.handle->identity) : p.place.signature;
  int failed = -1;
  for (int r = call.world() - 1; r >= 0; --r) {
    const Placement& theirs = *call.heap.local(p.control.placement(call.epoch, r));
    if (theirs.signature != signature) {
      record_mismatch<A>(w, call, Site::placement, r, signature, theirs.signature);
      return;
    }
    if (theirs.status != 0) failed = r;
  }
  if (threadIdx.x != 0) return;
  const auto status = failed < 0 ? 0 : call.heap.local(p.control.placement(call.epoch, failed))->status;
  *p.verdict = {failed, static_cast<int32_t>(status)};
}

template <class A>
__global__ void __launch_bounds__(kCutThreads) cut_hosts_kernel(const __grid_constant__ CutParams p) {
  __shared__ CallContext call;
  copy_to_shared(p.call, call);
  __syncthreads();
  if (!begin_hosts_block(p.call, p.state, call)) return;
  CudaWarp w(CudaWarp::Bare{});
  const CombineRail& rail = p.rail;
  if (rail.peer_is_my_proxy) cut_rounds<A>(w, rail.in, nullptr, 0);
  if (!rail.is_proxy_of_peer) return;
  cut_rounds<A>(w, rail.out, &rail.crossed, rail.count);
  if (threadIdx.x == 0)
    *p.takes_weights = static_cast<int64_t>(call.heap.local(p.control.placement(call.epoch, rail.peer))->pull.takes_weights);
}

template <class A>
__global__ void __launch_bounds__(kLanes) end_hosts_kernel(const __grid_constant__ OfferParams p) {
  __shared__ CallContext call;
  copy_to_shared(p.call, call);
  __syncthreads();
  if (begin_hosts_block(p.call, p.state, call)) end_hosts_call(p.state, call.epoch);
}

}  // namespace normal

namespace {

const Kernel<const AnnounceParams> announce("announce kernel", normal::announce_hosts_kernel<CudaHosts>, kAnnounceThreads,
                                            [](const DeviceLimits&) {
                                              return 4 * (kMaxRanks + max_cuda_experts(Layout::rank_major));
                                            });
constexpr auto kNoShared = [](const DeviceLimits&) { return 0; };
const Kernel<const DeliverParams> deliver("deliver kernel", normal::deliver_hosts_kernel<CudaHosts>, kLanes, kNoShared);
const Kernel<const OfferParams> offer("offer kernel", normal::offer_hosts_kernel<CudaHosts>, kLanes, kNoShared);
template <class A>
const Kernel<const OfferParams> judge("judge kernel", normal::judge_hosts_kernel<A>, kLanes, kNoShared);
const Kernel<const CutParams> cut("cut kernel", normal::cut_hosts_kernel<CudaHosts>, kCutThreads, kNoShared);
const Kernel<const OfferParams> end("end kernel", normal::end_hosts_kernel<CudaHosts>, kLanes, kNoShared);

}  // namespace

void launch_announce(const AnnounceParams& p, gpu::Stream stream) {
  announce.launch({1, kAnnounceThreads, static_cast<uint32_t>(4 * (p.plan.map.world + p.plan.map.experts))}, stream, p);
}
void launch_deliver(const DeliverParams& p, gpu::Stream stream) { deliver.launch({1, kLanes, 0}, stream, p); }
void launch_offer(const OfferParams& p, gpu::Stream stream) { offer.launch({1, kLanes, 0}, stream, p); }
void launch_judge(const OfferParams& p, gpu::Stream stream) {
  // Selects the recording kernel if the call is traced.
  const auto& kernel = p.call.device_trace.records != nullptr ? judge<TracedArch<CudaHosts>> : judge<CudaHosts>;
  kernel.launch({1, kLanes, 0}, stream, p);
}
void launch_cut(const CutParams& p, gpu::Stream stream) { cut.launch({1, kCutThreads, 0}, stream, p); }
void launch_end(const OfferParams& p, gpu::Stream stream) { end.launch({1, kLanes, 0}, stream, p); }

}  // namespace switchyard::detail
