// SPDX-License-Identifier: Apache-2.0
#include "exchange/normal/hosts/gpu_links.hpp"

#include <algorithm>
#include <mutex>
#include <utility>

#include "base/carver.hpp"
#include "base/index.hpp"
#include "exchange/gpu/check.hpp"

namespace switchyard::detail {

struct GpuHostLinks::Idle {
  std::mutex mutex;
  std::vector<std::unique_ptr<GpuHostTables>> tables;
};

GpuHostLinks::GpuHostLinks(Group::Impl& group, CudaRank& gpu, int topk, int64_t max_tokens, bool expert_major,
                           const ControlLayout& control)
    : group_(group),
      gpu_(gpu),
      map_(group.host_map()),
      rank_(group.bootstrap->rank()),
      own_host_(map_.host_of(rank_)),
      topk_(topk),
      max_tokens_(max_tokens),
      expert_major_(expert_major),
      control_(control),
      idle_(std::make_shared<Idle>()) {
  for (const int r : map_.rail_peers(rank_)) {
    Peer& peer = peers_.emplace_back();
    peer.rank = r;
    peer.host = map_.host_of(r);
    peer.peer_is_my_proxy = map_.proxy(rank_, peer.host) == r;
    peer.is_proxy_of_peer = map_.proxy(r, own_host_) == rank_;
  }
  message_bytes_ = round_up(
      static_cast<int64_t>(sizeof(RelayHead)) + std::max(control.counts_row_bytes(), static_cast<int64_t>(sizeof(Placement))),
      128);
  counts_at_ = 2 * peers_.size() * idx(message_bytes_);
  verdict_at_ = counts_at_ + 2 * peers_.size() * sizeof(int64_t);
  takes_at_ = verdict_at_ + 64;
  host_of_at_ = takes_at_ + sizeof(int64_t) * peers_.size();
  const auto aligned = [](size_t at) { return idx(round_up(static_cast<int64_t>(at), 64)); };
  rows_at_ = aligned(host_of_at_ + sizeof(int) * idx(map_.world()));
  cuts_at_ = aligned(rows_at_ + sizeof(ReturnedTokens) * idx(map_.hosts()));
  memory_ = DeviceMemory(cuts_at_ + 2 * peers_.size() * sizeof(RoundCut) * idx(max_tokens_ + 1), gpu_.copy_stream());
  std::vector<int> host_of;
  for (int r = 0; r < map_.world(); ++r) host_of.push_back(map_.host_of(r));
  check_cuda(
      gpu::copy_to_device(memory_.as<int>(host_of_at_), host_of.data(), host_of.size() * sizeof(int), gpu_.copy_stream()),
      "hosts of the ranks");
  check_cuda(gpu::wait_for_stream(gpu_.copy_stream()), "hosts of the ranks");
  rounds_ = GpuRounds::of(group, gpu);
}

GpuHostLinks::~GpuHostLinks() {
  if (group_.abort_word() == 0) return;  // all calls, and with them their rounds, have ended
  for (Peer& peer : peers_) {
    peer.slot_out.end_after(gpu_.until_end());
    peer.slot_in.end_after(gpu_.until_end());
  }
  memory_.end_after(gpu_.until_end());
  scratch_.end_after(gpu_.until_end());
}

int GpuHostLinks::places_on(int host) const { return std::min(topk_, static_cast<int>(map_.ranks_of(host).size())); }

std::byte* GpuHostLinks::message(size_t peer, bool out) const {
  return memory_.as<std::byte>((2 * peer + (out ? 0 : 1)) * idx(message_bytes_));
}

RoundCut* GpuHostLinks::cuts(size_t peer, bool out) const {
  return memory_.as<RoundCut>(cuts_at_) + (2 * peer + (out ? 0 : 1)) * idx(max_tokens_ + 1);
}

// ---- tables of a handle ----

void GpuHostLinks::carve(GpuHostTables& tables) const {
  const auto lay_out = [&](std::byte* base) {
    Carver carver(base);
    const auto take_counts = [&](ReturnCounts& counts) {
      carver.take(counts.of_token, max_tokens_);
      carver.take(counts.before_group, ReturnCounts::groups(max_tokens_));
    };
    for (size_t i = 0; i < peers_.size(); ++i) {
      GpuHostTables::OfPeer& of = tables.peers[i];
      if (peers_[i].peer_is_my_proxy) {
        carver.take(of.leaving, max_tokens_);
        take_counts(of.returned);
      }
      if (!peers_[i].is_proxy_of_peer) continue;
      of.crossed.stride = places_on(own_host_);
      carver.take(of.crossed.token, max_tokens_);
      carver.take(of.crossed.ids, max_tokens_ * topk_);
      carver.take(of.crossed.route_row, expert_major_ ? max_tokens_ * topk_ : 0);
      carver.take(of.crossed.sends, max_tokens_ * of.crossed.stride);
      carver.take(of.crossed.weights, max_tokens_ * topk_);
      take_counts(of.crossed.returned);
    }
    return carver.bytes();
  };
  tables.peers.resize(peers_.size());
  tables.memory = DeviceMemory(idx(std::max<int64_t>(lay_out(nullptr), 128)), gpu_.copy_stream());
  lay_out(tables.memory.as<std::byte>());
}

std::shared_ptr<GpuHostTables> GpuHostLinks::take_tables() {
  std::unique_ptr<GpuHostTables> tables;
  {
    const std::lock_guard lock(idle_->mutex);
    auto& all = idle_->tables;
    const auto free =
        std::find_if(all.begin(), all.end(), [](const auto& t) { return !t->used || StreamPoints::reached(*t->used); });
    if (free != all.end()) {
      tables = std::move(*free);
      all.erase(free);
    }
  }
  if (!tables) {
    tables = std::make_unique<GpuHostTables>();
    carve(*tables);
  }
  tables->used = nullptr;
  return {tables.release(), [idle = std::weak_ptr<Idle>(idle_), ends = gpu_.until_end()](GpuHostTables* ended) {
            std::unique_ptr<GpuHostTables> held(ended);
            if (const auto to = idle.lock()) {
              const std::lock_guard lock(to->mutex);
              to->tables.push_back(std::move(held));
            } else {
              held->memory.end_after(ends);  // kernels of another object may read it
            }
          }};
}

// ---- counts and placements ----

std::vector<PeerTransfer> GpuHostLinks::message_transfers(int64_t bytes) const {
  std::vector<PeerTransfer> transfers;
  for (size_t i = 0; i < peers_.size(); ++i) {
    const Peer& peer = peers_[i];
    transfers.push_back({peer.rank,
                         {message(i, true), peer.peer_is_my_proxy ? idx(bytes) : 0},
                         {message(i, false), peer.is_proxy_of_peer ? idx(bytes) : 0}});
  }
  return transfers;
}

void GpuHostLinks::post(std::span<const PeerTransfer> transfers, gpu::Stream stream, const CallContext& call) {
  rounds_->post(transfers, stream, call.operation, std::chrono::nanoseconds(call.timeout_ns));
}

void GpuHostLinks::exchange_counts(const PlanParams& plan, const GpuHostTables& tables, gpu::Stream stream) {
  auto* const counts = memory_.as<int64_t>(counts_at_);
  for (size_t i = 0; i < peers_.size(); ++i) {
    if (!peers_[i].peer_is_my_proxy) continue;
    AnnounceParams p;
    p.plan = plan;
    p.call = plan.call;
    p.state = plan.state;
    p.host_ranks = ranks_as_bits(map_, peers_[i].host);
    p.leaving = tables.peers[i].leaving;
    p.count = counts + 2 * i;
    p.message = message(i, true);
    launch_announce(p, stream);
  }
  post(message_transfers(static_cast<int64_t>(sizeof(RelayHead)) + control_.counts_row_bytes()), stream, plan.call);
  for (size_t i = 0; i < peers_.size(); ++i) {
    if (!peers_[i].is_proxy_of_peer) continue;
    launch_deliver({plan.call, plan.state, control_, Site::counts, peers_[i].rank, message(i, false), counts + 2 * i + 1},
                   stream);
  }
}

void GpuHostLinks::read_counts(GpuHostTables& tables, const TablesHeader& header) const {
  std::vector<int64_t> counts(2 * peers_.size());
  check_cuda(
      gpu::copy_to_host(counts.data(), memory_.as<int64_t>(counts_at_), counts.size() * sizeof(int64_t), gpu_.copy_stream()),
      "copy of the counts");
  check_cuda(gpu::wait_for_stream(gpu_.copy_stream()), "copy of the counts");
  for (size_t i = 0; i < peers_.size(); ++i) {
    tables.peers[i].leaving_count = peers_[i].peer_is_my_proxy ? counts[2 * i] : 0;
    tables.peers[i].crossed_count = peers_[i].is_proxy_of_peer ? counts[2 * i + 1] : 0;
    tables.peers[i].tokens = header.tokens_of[peers_[i].rank];
  }
  tables.tokens = header.tokens;
}

PlacementVerdict GpuHostLinks::exchange_placements(OfferParams offer, Summing* combine, gpu::Stream stream) {
  offer.control = control_;
  offer.verdict = memory_.as<PlacementVerdict>(verdict_at_);
  offer.messages = message(0, true);
  offer.message_stride = 2 * message_bytes_;
  offer.num_messages = static_cast<int>(peers_.size());
  launch_offer(offer, stream);
  post(message_transfers(static_cast<int64_t>(sizeof(RelayHead) + sizeof(Placement))), stream, offer.call);
  for (size_t i = 0; i < peers_.size(); ++i) {
    if (!peers_[i].is_proxy_of_peer) continue;
    launch_deliver({offer.call, offer.state, control_, Site::placement, peers_[i].rank, message(i, false), nullptr}, stream);
  }
  launch_judge(offer, stream);
  for (size_t i = 0; combine != nullptr && i < peers_.size(); ++i)
    launch_cut({offer.call, offer.state, control_, combine->rails[i], memory_.as<int64_t>(takes_at_) + i}, stream);
  check_cuda(gpu::wait_for_stream(stream), "wait for the placements");
  group_.check_alive(operation_name(offer.call.operation));
  PlacementVerdict verdict{};
  check_cuda(gpu::copy_to_host(&verdict, offer.verdict, sizeof verdict, gpu_.copy_stream()), "copy of the placements");
  if (combine != nullptr)
    read_cuts(*combine);
  else
    check_cuda(gpu::wait_for_stream(gpu_.copy_stream()), "copy of the placements");
  return verdict;
}

void GpuHostLinks::end_call(const CallContext& call, ObjectState* state, gpu::Stream stream) const {
  OfferParams p;
  p.call = call;
  p.state = state;
  launch_end(p, stream);
}

// ---- rows ----

std::byte* GpuHostLinks::make_slots(DeviceMemory& memory, size_t& has, int64_t rounds, int64_t bytes) const {
  // Earlier calls have ended: the host has waited for the placements of this call, which come after them.
  const size_t all = idx(std::min<int64_t>(kRoundSlots, rounds) * bytes);
  if (all > has) {
    memory = DeviceMemory();
    memory = DeviceMemory(all, gpu_.copy_stream());  // zeroed, because the network also transfers the bytes between rows
    has = all;
  }
  return memory.as<std::byte>();
}

void GpuHostLinks::clear_moved(const CallContext& call, const LaunchShape& launch, gpu::Stream stream) {
  const auto warps = idx(int64_t{launch.blocks} * launch.warps);
  check_cuda(gpu::fill(call.moved, 0, warps * sizeof(MoveCounter), stream), "clearing of counters");
}

Point GpuHostLinks::post_on_side_stream(std::span<const PeerTransfer> transfers, gpu::Stream stream, const CallContext& call) {
  const gpu::Stream side_stream = rounds_->stream();
  check_cuda(gpu::order_after(side_stream, gpu_.points().mark(stream, 0)->event), "cudaStreamWaitEvent");
  post(transfers, side_stream, call);
  return gpu_.points().mark(side_stream, 0);
}

void GpuHostLinks::await(const Point& round, gpu::Stream stream) {
  check_cuda(gpu::order_after(stream, round->event), "cudaStreamWaitEvent");
}

DispatchRail GpuHostLinks::prepare_rail(size_t i, const CudaDispatchParams& params, const GpuHostTables::OfPeer& of,
                                        bool weights, const std::byte* counts) {
  Peer& peer = peers_[i];
  DispatchRail rail;
  rail.peer = peer.rank;
  rail.host_ranks = ranks_as_bits(map_, peer.host);
  rail.own_ranks = ranks_as_bits(map_, own_host_);
  rail.arrivals = &params.state->exits;
  const auto lay_out = [&](CrossingRows& rows, int64_t count, int host, DeviceMemory& slots, size_t& has) {
    rows.layout = crossing_layout(params.d.shape, places_on(host), weights);
    rows.count = count;
    rows.per_round = std::max<int64_t>(1, group_.round_bytes / rows.layout.bytes());
    rows.slots = make_slots(slots, has, rows.rounds(), rows.slot_bytes());
  };
  if (peer.peer_is_my_proxy) {
    rail.leaving = of.leaving;
    rail.returned = of.returned;
    lay_out(rail.out, of.leaving_count, peer.host, peer.slot_out, peer.out_bytes);
  }
  if (!peer.is_proxy_of_peer) return rail;
  rail.is_proxy_of_peer = true;
  rail.crossed = of.crossed;
  rail.records = reinterpret_cast<const int32_t*>(counts + peer.rank * control_.counts_row_bytes() +
                                                  static_cast<int64_t>(sizeof(CountsHead)));
  lay_out(rail.in, of.crossed_count, own_host_, peer.slot_in, peer.in_bytes);
  return rail;
}

uint64_t GpuHostLinks::move(const CudaDispatchParams& params, const GpuHostTables& tables, bool weights,
                            const std::byte* counts, const LaunchShape& launch, gpu::Stream stream) {
  const DeviceLimits& limits = gpu_.limits();
  std::vector<DispatchRail> rails;
  int64_t rounds = 1;  // sources without crossing tokens are also announced
  for (size_t i = 0; i < peers_.size(); ++i) {
    const DispatchRail& rail = rails.emplace_back(prepare_rail(i, params, tables.peers[i], weights, counts));
    rounds = std::max({rounds, rail.out.rounds(), rail.in.rounds()});
  }
  uint64_t sent = 0;
  Point incoming[kRoundSlots];
  const auto send = [&](int64_t k) {
    std::vector<PeerTransfer> transfers;
    for (const DispatchRail& rail : rails) {
      if (rail.out.bytes(k) > 0) launch_pack(params, rail, k, launch, limits, stream);
      sent += transfers.emplace_back(transfer_of(rail, k)).send.size();
    }
    incoming[k % kRoundSlots] = post_on_side_stream(transfers, stream, params.d.call);
    return true;
  };
  const auto take = [&](int64_t k) {
    await(incoming[k % kRoundSlots], stream);
    for (const DispatchRail& rail : rails)
      if (rail.in.bytes(k) > 0 || rail.ends_with(k)) launch_forward(params, rail, k, launch, limits, stream);
    return true;
  };
  const auto send_own = [&] {
    launch_send(params, launch, limits, stream);
    return true;
  };
  clear_moved(params.d.call, launch, stream);
  run_rounds(rounds, send, send_own, take);
  for (const DispatchRail& rail : rails)
    if (params.d.shape.with_records) launch_count(params, rail, launch, limits, stream);
  launch_finish(params, launch, limits, stream);
  return sent;
}

// ---- sums ----

GpuHostLinks::Summing GpuHostLinks::prepare(const CudaCombineParams& params, const GpuHostTables& tables, bool weighted) const {
  const SumShape& shape = params.c.shape;
  Summing over;
  over.own = returned_tokens(shape, map_, group_.round_bytes, tables.tokens);
  over.own.weights = shape.layout == Layout::rank_major && shape.out_weights != nullptr;
  over.own.stride = returned_stride(shape, over.own.weights);
  over.rounds = std::max<int64_t>(1, over.own.rounds());  // owners without tokens also end their reading
  for (size_t i = 0; i < peers_.size(); ++i) {
    const Peer& peer = peers_[i];
    const GpuHostTables::OfPeer& of = tables.peers[i];
    CombineRail& rail = over.rails.emplace_back();
    rail.peer = peer.rank;
    rail.arrivals = &params.state->exits;
    if (peer.peer_is_my_proxy) {
      rail.peer_is_my_proxy = true;
      rail.in = over.own;
      rail.in.counts = of.returned;
      rail.in.cuts = cuts(i, false);
    }
    if (!peer.is_proxy_of_peer) continue;
    rail.is_proxy_of_peer = true;
    rail.count = of.crossed_count;
    rail.crossed = of.crossed;
    rail.weighted = weighted;
    rail.out = returned_tokens(shape, map_, group_.round_bytes, of.tokens);
    rail.out.counts = of.crossed.returned;
    rail.out.cuts = cuts(i, true);
    over.rounds = std::max(over.rounds, rail.out.rounds());
  }
  return over;
}

void GpuHostLinks::read_cuts(Summing& over) {
  std::vector<int64_t> takes(peers_.size());
  const auto read = [&](auto& to, const auto* from) {
    check_cuda(gpu::copy_to_host(to.data(), from, to.size() * sizeof to[0], gpu_.copy_stream()), "copy of the rounds");
  };
  over.out.resize(peers_.size());
  over.in.resize(peers_.size());
  read(takes, memory_.as<int64_t>(takes_at_));
  for (size_t i = 0; i < peers_.size(); ++i) {
    const CombineRail& rail = over.rails[i];
    over.out[i].resize(rail.is_proxy_of_peer ? idx(rail.out.rounds() + 1) : 0);
    over.in[i].resize(rail.peer_is_my_proxy ? idx(rail.in.rounds() + 1) : 0);
    if (rail.is_proxy_of_peer) read(over.out[i], rail.out.cuts);
    if (rail.peer_is_my_proxy) read(over.in[i], rail.in.cuts);
  }
  check_cuda(gpu::wait_for_stream(gpu_.copy_stream()), "copy of the rounds");
  for (size_t i = 0; i < peers_.size(); ++i) over.rails[i].out.weights = over.rails[i].is_proxy_of_peer && takes[i] != 0;
}

ReturningHosts GpuHostLinks::set_up_rounds(const CudaCombineParams& params, Summing& over, const LaunchShape& launch) {
  const SumShape& shape = params.c.shape;
  std::vector<ReturnedTokens> rows(idx(map_.hosts()));
  for (size_t i = 0; i < peers_.size(); ++i) {
    Peer& peer = peers_[i];
    CombineRail& rail = over.rails[i];
    if (rail.is_proxy_of_peer) {
      rail.out.weights = rail.out.weights && shape.layout == Layout::rank_major;
      rail.out.stride = returned_stride(shape, rail.out.weights);
      rail.out.slot_bytes = largest_round(rail.out, over.out[i].data());
      rail.out.slots = make_slots(peer.slot_out, peer.out_bytes, rail.out.rounds(), rail.out.slot_bytes);
    }
    if (!rail.peer_is_my_proxy) continue;
    rail.in.slot_bytes = largest_round(rail.in, over.in[i].data());
    rail.in.slots = make_slots(peer.slot_in, peer.in_bytes, rail.in.rounds(), rail.in.slot_bytes);
    rows[idx(peer.host)] = rail.in;
  }
  ReturningHosts hosts;
  hosts.rows = memory_.as<ReturnedTokens>(rows_at_);
  hosts.host_of = memory_.as<int>(host_of_at_);
  hosts.hosts = map_.hosts();
  hosts.own_host = own_host_;
  hosts.rounds = over.rounds;
  if (over.own.kind == ReturnKind::per_host) {
    hosts.scratch_stride = round_up(shape.row_bytes, 128) + round_up(int64_t{4} * topk_, 128);
    hosts.scratch = make_slots(scratch_, scratch_bytes_, 1, int64_t{launch.blocks} * launch.warps * hosts.scratch_stride);
  }
  check_cuda(gpu::copy_to_device(memory_.as<void>(rows_at_), rows.data(), rows.size() * sizeof rows[0], gpu_.copy_stream()),
             "rows of the hosts");
  check_cuda(gpu::wait_for_stream(gpu_.copy_stream()), "rows of the hosts");
  return hosts;
}

uint64_t GpuHostLinks::sum(const CudaCombineParams& params, Summing& over, const LaunchShape& launch, gpu::Stream stream) {
  const ReturningHosts hosts = set_up_rounds(params, over, launch);
  uint64_t received = 0;
  Point incoming[kRoundSlots];
  const auto send = [&](int64_t k) {
    std::vector<PeerTransfer> transfers;
    for (size_t i = 0; i < peers_.size(); ++i) {
      const CombineRail& rail = over.rails[i];
      const PeerTransfer& transfer = transfers.emplace_back(transfer_of(rail, k, over.out[i].data(), over.in[i].data()));
      if (!transfer.send.empty() || rail.ends_with(k)) launch_give(params, rail, k, launch, stream);
      received += transfer.receive.size();
    }
    incoming[k % kRoundSlots] = post_on_side_stream(transfers, stream, params.c.call);
    return true;
  };
  const auto take = [&](int64_t k) {
    await(incoming[k % kRoundSlots], stream);
    launch_add(params, hosts, over.own, k, launch, stream);
    return true;
  };
  clear_moved(params.c.call, launch, stream);
  launch_make(params, launch, stream);
  run_rounds(
      over.rounds, send, [] { return true; }, take);
  return received;
}

}  // namespace switchyard::detail
