// SPDX-License-Identifier: Apache-2.0
#include "exchange/low_latency/hosts/gpu_links.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "base/carver.hpp"
#include "exchange/gpu/check.hpp"
#include "heap/collective_step.hpp"

namespace switchyard::detail {

namespace {

size_t idx(int64_t i) { return static_cast<size_t>(i); }

/// The ranks of other hosts that `rank` stands for, ascending.
std::vector<int> stood_for(const HostMap& map, int rank) {
  std::vector<int> ranks;
  for (int r = 0; r < map.world(); ++r)
    if (!map.together(r, rank) && map.proxy(r, map.host_of(rank)) == rank) ranks.push_back(r);
  return ranks;
}

}  // namespace

GpuLowLatencyLinks::GpuLowLatencyLinks(Group::Impl& group, CudaRank& gpu, const LowLatencyLayout& layout)
    : group_(group), gpu_(gpu), map_(group.host_map()), rank_(group.bootstrap->rank()), layout_(layout) {
  for (int r = 0; r < map_.world(); ++r) host_of_.push_back(map_.host_of(r));
  find_rails();
  run_step(*group_.bootstrap, Deadline(group_.options.rendezvous_timeout), "LowLatencyExchange", [&] { take_memory(); });
  take_far_rows();
  rounds_ = std::make_unique<GpuRounds>(group, gpu);
}

GpuLowLatencyLinks::~GpuLowLatencyLinks() {
  if (split_) gpu::wait_for_event(split_->event);
  rounds_.reset();
  gpu_.let_go(std::move(memory_));
}

void GpuLowLatencyLinks::find_rails() {
  const std::vector<int> sources = stood_for(map_, rank_);
  sources_ = static_cast<int>(sources.size());
  for (const int r : map_.rail_peers(rank_)) {
    FarRail& rail = rails_.emplace_back();
    rail.rank = r;
    rail.host = map_.host_of(r);
    rail.stands_for_me = map_.proxy(rank_, rail.host) == r ? 1 : 0;
    rail.host_ranks = static_cast<int>(map_.ranks_of(rail.host).size());
    const auto at = std::find(sources.begin(), sources.end(), r);
    rail.i_stand = at != sources.end() ? 1 : 0;
    if (rail.i_stand != 0) rail.source = static_cast<int>(at - sources.begin());
  }
}

void GpuLowLatencyLinks::take_memory() {
  const int world = map_.world(), own = map_.host_of(rank_);
  std::vector<int> rail_of_host(idx(map_.hosts()), -1), proxy(idx(world), -1), number(idx(world), -1);
  for (size_t i = 0; i < rails_.size(); ++i)
    if (rails_[i].stands_for_me != 0) rail_of_host[idx(rails_[i].host)] = static_cast<int>(i);
  size_t most = 0;
  for (int r = 0; r < world; ++r) {
    const std::vector<int> others = stood_for(map_, r);
    most = std::max(most, others.size());
    for (size_t n = 0; map_.together(r, rank_) && n < others.size(); ++n) {
      proxy[idx(others[n])] = r;
      number[idx(others[n])] = static_cast<int>(n);
    }
  }
  far_.num_rails = static_cast<int>(rails_.size());
  far_.own_host = own;
  far_.own_ranks = static_cast<int>(map_.ranks_of(own).size());
  const CombineRound rows(CombineOrder::per_route, layout_.topk, layout_.return_bytes, 1);
  far_.stride = round_up(std::max(DispatchRound(layout_).bytes, rows.bytes(layout_.max_tokens)), 256);
  FarRail* rails = nullptr;
  int *to_host_of = nullptr, *to_rail_of_host = nullptr, *to_proxy = nullptr, *to_number = nullptr;
  const auto lay_out = [&](std::byte* base) {
    Carver carver(base, 256);
    carver.take(rails, far_.num_rails);
    carver.take(to_host_of, world);
    carver.take(to_rail_of_host, map_.hosts());
    carver.take(to_proxy, world);
    carver.take(to_number, world);
    carver.take(far_.sent, far_.num_rails * far_.stride);
    carver.take(far_.received, far_.num_rails * far_.stride);
    return carver.bytes();
  };
  memory_ = DeviceMemory(idx(lay_out(nullptr)), gpu_.copy_stream());
  lay_out(memory_.as<std::byte>());
  const auto upload = [&](auto* to, const auto& from) {
    check_cuda(gpu::copy_to_device(to, from.data(), from.size() * sizeof from[0], gpu_.copy_stream()), "tables of the hosts");
  };
  upload(rails, rails_);
  upload(to_host_of, host_of_);
  upload(to_rail_of_host, rail_of_host);
  upload(to_proxy, proxy);
  upload(to_number, number);
  check_cuda(gpu::wait_for_stream(gpu_.copy_stream()), "tables of the hosts");
  far_.rails = rails;
  far_.host_of = to_host_of;
  far_.rail_of_host = to_rail_of_host;
  returns_ = FarReturns(layout_, static_cast<int>(most));
  returns_.proxy = to_proxy;
  returns_.number = to_number;
}

void GpuLowLatencyLinks::take_far_rows() {
  try {
    far_rows_ = CudaHeap::create(*group_.bootstrap, idx(returns_.bytes()), gpu_.device(), group_.options.rendezvous_timeout);
  } catch (const AgreedError& error) {
    throw AgreedError(error.code(), std::string("LowLatencyExchange: rows that come back to other hosts have memory besides the "
                                                "heap, which LowLatencyConfig::max_tokens sizes: ") +
                                        error.what());
  }
  returns_.heap = far_rows_->view();
}

int64_t GpuLowLatencyLinks::crossed_bytes() const {
  return int64_t{sources_} * layout_.max_tokens * layout_.topk * static_cast<int64_t>(sizeof(int32_t));
}

// ---- rounds ----

std::vector<Leg> GpuLowLatencyLinks::dispatch_legs() const {
  const size_t bytes = idx(DispatchRound(layout_).bytes);
  std::vector<Leg> legs;
  for (size_t i = 0; i < rails_.size(); ++i) {
    const FarRail& rail = rails_[i];
    legs.push_back({rail.rank,
                    {far_.sent, rail.stands_for_me != 0 ? bytes : 0},
                    {far_.in(static_cast<int>(i)), rail.i_stand != 0 ? bytes : 0}});
  }
  return legs;
}

std::vector<Leg> GpuLowLatencyLinks::combine_legs(const LowLatencyCombineParams& p) const {
  const auto end = [&](bool rows, int ranks) {
    return rows ? CombineRound(p.order, layout_.topk, p.row_bytes, ranks).bytes(layout_.max_tokens) : kRailHeadBytes;
  };
  std::vector<Leg> legs;
  for (size_t i = 0; i < rails_.size(); ++i) {
    const FarRail& rail = rails_[i];
    const bool stands = rail.stands_for_me != 0, i_stand = rail.i_stand != 0;
    const int64_t out = stands ? 0 : kRailHeadBytes, in = i_stand ? 0 : kRailHeadBytes;  // where they begin
    const auto at = static_cast<int>(i);
    legs.push_back({rail.rank,
                    {far_.out(at) + out, idx(end(i_stand, far_.own_ranks) - out)},
                    {far_.in(at) + in, idx(end(stands, rail.host_ranks) - in)}});
  }
  return legs;
}

void GpuLowLatencyLinks::post(std::span<const Leg> legs, const CallContext& call, gpu::Stream stream) {
  rounds_->post(legs, stream, call.operation, std::chrono::nanoseconds(call.timeout_ns));
}

template <class Between>
void GpuLowLatencyLinks::fork(gpu::Stream stream, const Between& between) {
  const gpu::Stream own = rounds_->stream();
  check_cuda(gpu::order_after(own, gpu_.points().mark(stream, 0)->event), "cudaStreamWaitEvent");
  between(own);
  split_ = gpu_.points().mark(own, 0);
}

void GpuLowLatencyLinks::join(gpu::Stream stream) {
  check_cuda(gpu::order_after(stream, split_->event), "cudaStreamWaitEvent");
  split_ = nullptr;
}

// ---- calls ----

void GpuLowLatencyLinks::dispatch(CudaHostsDispatch& call, CrossedIds crossed, LaunchedHalves halves, int blocks,
                                  const DeviceLimits& limits, gpu::Stream stream) {
  call.far = far_;
  call.crossed = crossed;
  if (!halves.send) {
    join(stream);
    return launch_deliver(call, {false, true}, blocks, stream);
  }
  launch_send(call, blocks, limits, stream);
  if (halves.receive) {
    post(dispatch_legs(), call.d.call, stream);
    return launch_deliver(call, {true, true}, blocks, stream);
  }
  fork(stream, [&](gpu::Stream own) {
    post(dispatch_legs(), call.d.call, own);
    launch_deliver(call, {true, false}, blocks, own);
  });
}

void GpuLowLatencyLinks::combine(const LowLatencyCombineParams& params, LowLatencyState* state, int warps, CrossedIds crossed,
                                 LaunchedHalves halves, int blocks, gpu::Stream stream) {
  CudaHostsCombine call;
  static_cast<LowLatencyCombineParams&>(call.c) = params;
  call.c.far = returns_;
  call.c.rails = far_;
  call.c.crossed = crossed;
  call.state = state;
  call.warps = warps;
  if (!halves.send) {
    join(stream);
    return launch_sum(call, {false, true}, blocks, stream);
  }
  if (halves.receive) {
    launch_give(call, {true, true}, blocks, stream);
    post(combine_legs(params), params.call, stream);
    return launch_sum(call, {true, true}, blocks, stream);
  }
  launch_give(call, {true, false}, blocks, stream);
  fork(stream, [&](gpu::Stream own) {
    launch_give(call, {false, true}, blocks, own);
    post(combine_legs(params), params.call, own);
    launch_sum(call, {true, false}, blocks, own);
  });
}

}  // namespace switchyard::detail
