// SPDX-License-Identifier: Apache-2.0
#include "exchange/low_latency/hosts/gpu_links.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "base/carver.hpp"
#include "base/index.hpp"
#include "exchange/gpu/check.hpp"
#include "heap/collective_step.hpp"

namespace switchyard::detail {

GpuLowLatencyLinks::GpuLowLatencyLinks(Group::Impl& group, CudaRank& gpu, const LowLatencyLayout& layout)
    : group_(group), gpu_(gpu), layout_(layout), plan_(group.host_map(), group.bootstrap->rank()) {
  run_step(*group_.bootstrap, Deadline(group_.deadline_of(Operation::construction)), "LowLatencyExchange",
           [&] { take_memory(); });
  take_far_rows();
  rounds_ = GpuRounds::of(group, gpu);
  check_cuda(gpu::make_stream(&beside_), "cudaStreamCreate");
}

GpuLowLatencyLinks::~GpuLowLatencyLinks() {
  if (split_) gpu::wait_for_event(split_->event);
  if (beside_ != nullptr) gpu::destroy_stream(beside_);
  if (group_.abort_word() != 0) uses_ = gpu_.until_end();  // a kernel may still run, or a round be in flight
  memory_.end_after(std::move(uses_));
}

void GpuLowLatencyLinks::take_memory() {
  far_.num_rails = static_cast<int>(plan_.rails.size());
  far_.own_host = plan_.own_host;
  far_.own_ranks = plan_.own_ranks;
  far_.stride = rail_bytes(layout_);
  FarRail* rails = nullptr;
  int *host_of = nullptr, *rail_of_host = nullptr, *proxy = nullptr, *number = nullptr;
  const auto lay_out = [&](std::byte* base) {
    Carver carver(base, 256);
    carver.take(rails, far_.num_rails);
    carver.take(host_of, static_cast<int64_t>(plan_.host_of.size()));
    carver.take(rail_of_host, static_cast<int64_t>(plan_.rail_of_host.size()));
    carver.take(proxy, static_cast<int64_t>(plan_.proxy.size()));
    carver.take(number, static_cast<int64_t>(plan_.number.size()));
    carver.take(far_.sent, far_.num_rails * far_.stride);
    carver.take(far_.received, far_.num_rails * far_.stride);
    return carver.bytes();
  };
  memory_ = DeviceMemory(idx(lay_out(nullptr)), gpu_.copy_stream());
  lay_out(memory_.as<std::byte>());
  const auto upload = [&](auto* to, const auto& from) {
    check_cuda(gpu::copy_to_device(to, from.data(), from.size() * sizeof from[0], gpu_.copy_stream()), "tables of the hosts");
  };
  upload(rails, plan_.rails);
  upload(host_of, plan_.host_of);
  upload(rail_of_host, plan_.rail_of_host);
  upload(proxy, plan_.proxy);
  upload(number, plan_.number);
  check_cuda(gpu::wait_for_stream(gpu_.copy_stream()), "tables of the hosts");
  far_.rails = rails;
  far_.host_of = host_of;
  far_.rail_of_host = rail_of_host;
  returns_ = FarReturns(layout_, plan_.most_sources);
  returns_.proxy = proxy;
  returns_.number = number;
}

void GpuLowLatencyLinks::take_far_rows() {
  try {
    far_rows_ =
        CudaHeap::create(*group_.bootstrap, idx(returns_.bytes()), gpu_.device(), group_.deadline_of(Operation::construction));
  } catch (const AgreedError& error) {
    throw AgreedError(error.code(),
                      std::string("LowLatencyExchange: rows that come back to other hosts have memory besides the "
                                  "heap, which LowLatencyConfig::max_tokens sizes: ") +
                          error.what());
  }
  returns_.heap = far_rows_->view();
}

int64_t GpuLowLatencyLinks::crossed_bytes() const {
  return static_cast<int64_t>(plan_.sources.size() * sizeof(int32_t)) * layout_.max_tokens * layout_.topk;
}

// ---- rounds ----

RoundWatch GpuLowLatencyLinks::watch(const Launch& launch) {
  if (!launch.captured) return {};
  if (!replays_) replays_ = rounds_->watch_replays();
  return GpuRounds::words_of(*replays_);
}

void GpuLowLatencyLinks::post(std::span<const Leg> legs, const CallContext& call, const Launch& launch, gpu::Stream stream) {
  const std::chrono::nanoseconds timeout(call.timeout_ns);
  if (launch.captured)
    rounds_->post_captured(*replays_, legs, stream, call.operation, timeout);
  else
    rounds_->post(legs, stream, call.operation, timeout);
}

template <class Between>
void GpuLowLatencyLinks::fork(gpu::Stream stream, const Between& between) {
  check_cuda(gpu::order_after(beside_, gpu_.points().mark(stream, 0)->event), "cudaStreamWaitEvent");
  between(beside_);
  split_ = gpu_.points().mark(beside_, 0);
}

void GpuLowLatencyLinks::join(gpu::Stream stream) {
  check_cuda(gpu::order_after(stream, split_->event), "cudaStreamWaitEvent");
  split_ = nullptr;
}

// ---- calls ----

void GpuLowLatencyLinks::dispatch(const LowLatencyDispatchParams& params, LowLatencyState* state, const int32_t* device_tokens,
                                  CrossedIds crossed, const Launch& launch) {
  const CudaHostsDispatch call{params, far_, crossed, watch(launch), state, device_tokens, launch.warps};
  if (!launch.halves.send) {
    join(launch.stream);
    return launch_deliver(call, {false, true}, launch.blocks, launch.stream);
  }
  launch_send(call, launch.blocks, gpu_.limits(), launch.stream);
  const std::vector<Leg> legs = dispatch_legs(plan_, far_, layout_);
  if (launch.halves.receive) {
    post(legs, params.call, launch, launch.stream);
    return launch_deliver(call, {true, true}, launch.blocks, launch.stream);
  }
  fork(launch.stream, [&](gpu::Stream own) {
    post(legs, params.call, launch, own);
    launch_deliver(call, {true, false}, launch.blocks, own);
  });
}

void GpuLowLatencyLinks::combine(const LowLatencyCombineParams& params, LowLatencyState* state, CrossedIds crossed,
                                 const Launch& launch) {
  CudaHostsCombine call{{}, watch(launch), state, launch.warps};
  static_cast<LowLatencyCombineParams&>(call.c) = params;
  call.c.far = returns_;
  call.c.rails = far_;
  call.c.crossed = crossed;
  if (!launch.halves.send) {
    join(launch.stream);
    return launch_sum(call, {false, true}, launch.blocks, launch.stream);
  }
  const std::vector<Leg> legs = combine_legs(plan_, far_, params);
  if (launch.halves.receive) {
    launch_give(call, {true, true}, launch.blocks, launch.stream);
    post(legs, params.call, launch, launch.stream);
    return launch_sum(call, {true, true}, launch.blocks, launch.stream);
  }
  launch_give(call, {true, false}, launch.blocks, launch.stream);
  fork(launch.stream, [&](gpu::Stream own) {
    launch_give(call, {false, true}, launch.blocks, own);
    post(legs, params.call, launch, own);
    launch_sum(call, {true, false}, launch.blocks, own);
  });
}

}  // namespace switchyard::detail
