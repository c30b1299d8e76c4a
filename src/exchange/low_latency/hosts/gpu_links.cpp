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
  take_remote_rows();
  rounds_ = GpuRounds::of(group, gpu);
  check_cuda(gpu::make_stream(&side_stream_), "cudaStreamCreate");
}

GpuLowLatencyLinks::~GpuLowLatencyLinks() {
  if (split_) gpu::wait_for_event(split_->event);
  if (side_stream_ != nullptr) gpu::destroy_stream(side_stream_);
  if (group_.abort_word() != 0) uses_ = gpu_.until_end();  // a kernel may still run, or a round may be in flight
  memory_.end_after(std::move(uses_));
}

void GpuLowLatencyLinks::take_memory() {
  remote_.num_rails = static_cast<int>(plan_.rails.size());
  remote_.own_host = plan_.own_host;
  remote_.own_ranks = plan_.own_ranks;
  remote_.stride = rail_bytes(layout_);
  RemoteRail* rails = nullptr;
  int *host_of = nullptr, *rail_of_host = nullptr, *proxy = nullptr, *number = nullptr;
  const auto lay_out = [&](std::byte* base) {
    Carver carver(base, 256);
    carver.take(rails, remote_.num_rails);
    carver.take(host_of, static_cast<int64_t>(plan_.host_of.size()));
    carver.take(rail_of_host, static_cast<int64_t>(plan_.rail_of_host.size()));
    carver.take(proxy, static_cast<int64_t>(plan_.proxy.size()));
    carver.take(number, static_cast<int64_t>(plan_.number.size()));
    carver.take(remote_.sent, remote_.num_rails * remote_.stride);
    carver.take(remote_.received, remote_.num_rails * remote_.stride);
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
  remote_.rails = rails;
  remote_.host_of = host_of;
  remote_.rail_of_host = rail_of_host;
  returns_ = RemoteReturns(layout_, plan_.max_sources);
  returns_.proxy = proxy;
  returns_.number = number;
}

void GpuLowLatencyLinks::take_remote_rows() {
  try {
    remote_rows_ =
        CudaHeap::create(*group_.bootstrap, idx(returns_.bytes()), gpu_.device(), group_.deadline_of(Operation::construction));
  } catch (const AgreedError& error) {
    throw AgreedError(error.code(),
                      std::string("LowLatencyExchange: rows that come back to other hosts have memory besides the "
                                  "heap, which LowLatencyConfig::max_tokens sizes: ") +
                          error.what());
  }
  returns_.heap = remote_rows_->view();
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

void GpuLowLatencyLinks::post(std::span<const PeerTransfer> transfers, const CallContext& call, const Launch& launch,
                              gpu::Stream stream) {
  const std::chrono::nanoseconds timeout(call.timeout_ns);
  if (launch.captured)
    rounds_->post_captured(*replays_, transfers, stream, call.operation, timeout);
  else
    rounds_->post(transfers, stream, call.operation, timeout);
}

template <class Between>
void GpuLowLatencyLinks::fork(gpu::Stream stream, const Between& between) {
  check_cuda(gpu::order_after(side_stream_, gpu_.points().mark(stream, 0)->event), "cudaStreamWaitEvent");
  between(side_stream_);
  split_ = gpu_.points().mark(side_stream_, 0);
}

void GpuLowLatencyLinks::join(gpu::Stream stream) {
  check_cuda(gpu::order_after(stream, split_->event), "cudaStreamWaitEvent");
  split_ = nullptr;
}

// ---- calls ----

void GpuLowLatencyLinks::dispatch(const LowLatencyDispatchParams& params, LowLatencyState* state, const int32_t* device_tokens,
                                  const uint32_t* map_version, CrossedIds crossed, const Launch& launch) {
  const CudaHostsDispatch call{params, remote_, crossed, watch(launch), state, device_tokens, map_version, launch.warps};
  if (!launch.halves.send) {
    join(launch.stream);
    return launch_deliver(call, {false, true}, launch.blocks, launch.stream);
  }
  launch_send(call, launch.blocks, gpu_.limits(), launch.stream);
  const std::vector<PeerTransfer> transfers = dispatch_transfers(plan_, remote_, layout_);
  if (launch.halves.receive) {
    post(transfers, params.call, launch, launch.stream);
    return launch_deliver(call, {true, true}, launch.blocks, launch.stream);
  }
  fork(launch.stream, [&](gpu::Stream own) {
    post(transfers, params.call, launch, own);
    launch_deliver(call, {true, false}, launch.blocks, own);
  });
}

void GpuLowLatencyLinks::combine(const LowLatencyCombineParams& params, LowLatencyState* state, CrossedIds crossed,
                                 const Launch& launch) {
  CudaHostsCombine call{{}, watch(launch), state, launch.warps};
  static_cast<LowLatencyCombineParams&>(call.c) = params;
  call.c.remote = returns_;
  call.c.rails = remote_;
  call.c.crossed = crossed;
  if (!launch.halves.send) {
    join(launch.stream);
    return launch_sum(call, {false, true}, launch.blocks, launch.stream);
  }
  const std::vector<PeerTransfer> transfers = combine_transfers(plan_, call.c, 0);
  if (launch.halves.receive) {
    launch_give(call, {true, true}, launch.blocks, launch.stream);
    post(transfers, params.call, launch, launch.stream);
    return launch_sum(call, {true, true}, launch.blocks, launch.stream);
  }
  launch_give(call, {true, false}, launch.blocks, launch.stream);
  fork(launch.stream, [&](gpu::Stream own) {
    launch_give(call, {false, true}, launch.blocks, own);
    post(transfers, params.call, launch, own);
    launch_sum(call, {true, false}, launch.blocks, own);
  });
}

}  // namespace switchyard::detail
