// SPDX-License-Identifier: Apache-2.0
#include "exchange/normal/hosts/gpu_links.hpp"

#include <algorithm>
#include <mutex>
#include <utility>

#include "base/carver.hpp"
#include "base/index.hpp"
#include "exchange/gpu/check.hpp"

namespace switchyard::detail {

namespace {

/// The token numbers [begin, end) of round k.
struct Part {
  int64_t begin, end;
};
Part part_of(int64_t count, int64_t per_round, int64_t k) {
  return {std::min(count, k * per_round), std::min(count, (k + 1) * per_round)};
}
int64_t rounds_of(int64_t count, int64_t per_round) { return (count + per_round - 1) / per_round; }

/// Number of slots per rail and direction: while one is being packed or read, the others are in flight.
constexpr int64_t kSlots = 3;

}  // namespace

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
    for (const int there : map_.ranks_of(peer.host)) peer.host_ranks |= uint64_t{1} << there;
  }
  message_bytes_ = round_up(
      static_cast<int64_t>(sizeof(RelayHead)) + std::max(control.counts_row_bytes(), static_cast<int64_t>(sizeof(Placement))),
      128);
  counts_at_ = 2 * peers_.size() * idx(message_bytes_);
  verdict_at_ = counts_at_ + 2 * peers_.size() * sizeof(int64_t);
  host_of_at_ = verdict_at_ + 64;
  returned_at_ = idx(round_up(static_cast<int64_t>(host_of_at_ + sizeof(int) * idx(map_.world())), 64));
  memory_ = DeviceMemory(returned_at_ + sizeof(ReturnedHost) * idx(map_.hosts()), gpu_.copy_stream());
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

int64_t GpuHostLinks::MovedRail::Direction::begin(int64_t k) {
  const Part part = part_of(round.count, per_round, k);
  round.first = part.begin;
  round.end = part.end;
  round.slot = slots + k % kSlots * slot_bytes;
  return part.end - part.begin;
}

int GpuHostLinks::places_on(int host) const { return std::min(topk_, static_cast<int>(map_.ranks_of(host).size())); }

std::byte* GpuHostLinks::message(size_t peer, bool out) const {
  return memory_.as<std::byte>((2 * peer + (out ? 0 : 1)) * idx(message_bytes_));
}

// ---- tables of a handle ----

void GpuHostLinks::carve(GpuHostTables& tables) const {
  const auto lay_out = [&](std::byte* base) {
    Carver carver(base);
    for (size_t i = 0; i < peers_.size(); ++i) {
      GpuHostTables::OfPeer& of = tables.peers[i];
      if (peers_[i].peer_is_my_proxy) carver.take(of.leaving, max_tokens_);
      if (!peers_[i].is_proxy_of_peer) continue;
      of.crossed.stride = places_on(own_host_);
      carver.take(of.crossed.token, max_tokens_);
      carver.take(of.crossed.ids, max_tokens_ * topk_);
      carver.take(of.crossed.route_row, expert_major_ ? max_tokens_ * topk_ : 0);
      carver.take(of.crossed.sends, max_tokens_ * of.crossed.stride);
      carver.take(of.crossed.weights, max_tokens_ * topk_);
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
    p.host_ranks = peers_[i].host_ranks;
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

void GpuHostLinks::read_counts(GpuHostTables& tables) const {
  std::vector<int64_t> counts(2 * peers_.size());
  check_cuda(
      gpu::copy_to_host(counts.data(), memory_.as<int64_t>(counts_at_), counts.size() * sizeof(int64_t), gpu_.copy_stream()),
      "copy of the counts");
  check_cuda(gpu::wait_for_stream(gpu_.copy_stream()), "copy of the counts");
  for (size_t i = 0; i < peers_.size(); ++i) {
    tables.peers[i].leaving_count = peers_[i].peer_is_my_proxy ? counts[2 * i] : 0;
    tables.peers[i].crossed_count = peers_[i].is_proxy_of_peer ? counts[2 * i + 1] : 0;
  }
}

PlacementVerdict GpuHostLinks::exchange_placements(OfferParams offer, gpu::Stream stream) {
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
  check_cuda(gpu::wait_for_stream(stream), "wait for the placements");
  group_.check_alive(operation_name(offer.call.operation));
  PlacementVerdict verdict{};
  check_cuda(gpu::copy_to_host(&verdict, offer.verdict, sizeof verdict, gpu_.copy_stream()), "copy of the placements");
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

std::byte* GpuHostLinks::grow(DeviceMemory& memory, size_t& has, int64_t bytes, gpu::Stream copies) {
  // Earlier calls have ended: the host has waited for the placements of this call, which come after them.
  if (idx(bytes) > has) {
    memory = DeviceMemory();
    memory = DeviceMemory(idx(bytes), copies);  // zeroed, because the network also transfers the bytes between rows
    has = idx(bytes);
  }
  return memory.as<std::byte>();
}

CrossingLayout GpuHostLinks::crossing(const CudaDispatchParams& p, int host, bool weights) const {
  const MoveShape& s = p.d.shape;
  return {topk_, places_on(host), s.with_records, expert_major_, weights && s.with_records, s.row_bytes, s.scale_bytes};
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

GpuHostLinks::MovedRail GpuHostLinks::prepare_move(size_t i, const CudaDispatchParams& params, const GpuHostTables::OfPeer& of,
                                                   bool weights, const std::byte* counts) {
  Peer& peer = peers_[i];
  MovedRail rail;
  const auto prepare = [&](MovedRail::Direction& direction, int64_t count, int host, DeviceMemory& slot, size_t& has) {
    direction.round.layout = crossing(params, host, weights);
    direction.round.count = count;
    direction.per_round = std::max<int64_t>(1, group_.round_bytes / direction.round.layout.bytes());
    direction.slot_bytes = std::min(count, direction.per_round) * direction.round.layout.bytes();
    direction.slots =
        grow(slot, has, std::min(kSlots, rounds_of(count, direction.per_round)) * direction.slot_bytes, gpu_.copy_stream());
    rail.rounds = std::max(rail.rounds, rounds_of(count, direction.per_round));
  };
  if (peer.peer_is_my_proxy) {
    rail.out.round.host_ranks = peer.host_ranks;
    rail.out.round.leaving = of.leaving;
    prepare(rail.out, of.leaving_count, peer.host, peer.slot_out, peer.out_bytes);
  }
  if (peer.is_proxy_of_peer) {
    rail.in.round.source = peer.rank;
    rail.in.round.crossed = of.crossed;
    rail.in.round.counts = counts + peer.rank * control_.counts_row_bytes();
    prepare(rail.in, of.crossed_count, own_host_, peer.slot_in, peer.in_bytes);
  }
  return rail;
}

void GpuHostLinks::move(const CudaDispatchParams& params, const GpuHostTables& tables, bool weights, const std::byte* counts,
                        const LaunchShape& launch, gpu::Stream stream) {
  const DeviceLimits& limits = gpu_.limits();
  std::vector<MovedRail> rails;
  int64_t rounds = 1;  // sources without crossing tokens are also announced
  for (size_t i = 0; i < peers_.size(); ++i) {
    const MovedRail& rail = rails.emplace_back(prepare_move(i, params, tables.peers[i], weights, counts));
    rounds = std::max(rounds, rail.rounds);
  }
  Point incoming[kSlots];
  const auto send_on = [&](int64_t k) {
    std::vector<PeerTransfer> transfers;
    for (size_t i = 0; i < peers_.size(); ++i) {
      MovedRail::Direction &out = rails[i].out, &in = rails[i].in;
      const int64_t leaving = out.begin(k), arriving = in.begin(k);
      if (leaving > 0) launch_pack(params, out.round, launch, limits, stream);
      transfers.push_back({peers_[i].rank,
                           {out.round.slot, idx(leaving * out.round.layout.bytes())},
                           {in.round.slot, idx(arriving * in.round.layout.bytes())}});
    }
    incoming[k % kSlots] = post_on_side_stream(transfers, stream, params.d.call);
  };
  clear_moved(params.d.call, launch, stream);
  for (int64_t k = 0; k < std::min(rounds, kSlots); ++k) send_on(k);
  launch_send(params, launch, limits, stream);
  for (int64_t k = 0; k < rounds; ++k) {
    await(incoming[k % kSlots], stream);
    for (size_t i = 0; i < peers_.size(); ++i) {
      MovedRail::Direction& in = rails[i].in;
      const int64_t arrived = in.begin(k);
      in.round.last = peers_[i].is_proxy_of_peer && k + 1 == std::max<int64_t>(1, rounds_of(in.round.count, in.per_round));
      if (arrived > 0 || in.round.last) launch_forward(params, in.round, launch, limits, stream);
    }
    if (k + kSlots < rounds) send_on(k + kSlots);
  }
  launch_finish(params, launch, limits, stream);
}

// ---- sums ----

ReturnKind GpuHostLinks::return_kind_of(const SumShape& shape) const {
  if (shape.order == CombineOrder::per_host) return ReturnKind::per_host;
  return shape.order == CombineOrder::per_route ? ReturnKind::per_route : ReturnKind::per_rank;
}

int GpuHostLinks::max_returned_rows(ReturnKind rows, int host) const {
  return rows == ReturnKind::per_host ? 1 : rows == ReturnKind::per_route ? topk_ : places_on(host);
}

GpuHostLinks::BackRail GpuHostLinks::prepare_back(size_t i, const GpuHostTables::OfPeer& of, const RailRound& shape) {
  Peer& peer = peers_[i];
  BackRail rail;
  const auto per_round = [&](int64_t token_bytes) { return std::max<int64_t>(1, group_.round_bytes / token_bytes); };
  if (peer.is_proxy_of_peer) {
    RailRound& r = rail.out = shape;
    r.token_bytes = max_returned_rows(r.return_kind, own_host_) * r.row_stride;
    r.source = peer.rank;
    r.count = of.crossed_count;
    r.crossed = of.crossed;
    rail.per_out = per_round(r.token_bytes);
    rail.slot_bytes = std::min(r.count, rail.per_out) * r.token_bytes;
    rail.slots = grow(peer.slot_out, peer.out_bytes, std::min(kSlots, rounds_of(r.count, rail.per_out)) * rail.slot_bytes,
                      gpu_.copy_stream());
  }
  if (peer.peer_is_my_proxy) {
    ReturnedHost& in = rail.in;
    in.leaving = of.leaving;
    in.count = of.leaving_count;
    in.token_bytes = max_returned_rows(shape.return_kind, peer.host) * shape.row_stride;
    in.per_round = per_round(in.token_bytes);
    rail.returned = grow(peer.slot_in, peer.in_bytes, in.count * in.token_bytes, gpu_.copy_stream());
    in.rows = rail.returned;
  }
  rail.rounds = std::max(rounds_of(rail.out.count, rail.per_out), rounds_of(rail.in.count, rail.in.per_round));
  return rail;
}

ReturnedRowsOfHosts GpuHostLinks::prepare_sum(const std::vector<BackRail>& rails, const RailRound& back,
                                              const LaunchShape& launch) {
  std::vector<ReturnedHost> hosts(idx(map_.hosts()));
  for (size_t i = 0; i < peers_.size(); ++i)
    if (peers_[i].peer_is_my_proxy) hosts[idx(peers_[i].host)] = rails[i].in;
  ReturnedRowsOfHosts in;
  in.hosts = memory_.as<ReturnedHost>(returned_at_);
  in.host_of = memory_.as<int>(host_of_at_);
  in.num_hosts = map_.hosts();
  in.own_host = own_host_;
  in.row_stride = back.row_stride;
  in.return_kind = back.return_kind;
  if (back.return_kind == ReturnKind::per_host)
    in.scratch = grow(scratch_, scratch_bytes_, int64_t{launch.blocks} * launch.warps * back.row_stride, gpu_.copy_stream());
  check_cuda(gpu::copy_to_device(memory_.as<ReturnedHost>(returned_at_), hosts.data(), hosts.size() * sizeof(ReturnedHost),
                                 gpu_.copy_stream()),
             "where rows come back");
  check_cuda(gpu::wait_for_stream(gpu_.copy_stream()), "where rows come back");
  return in;
}

Point GpuHostLinks::send_back(const CudaCombineParams& params, std::vector<BackRail>& rails, int64_t k,
                              const LaunchShape& launch, gpu::Stream stream) {
  std::vector<PeerTransfer> transfers;
  for (size_t i = 0; i < peers_.size(); ++i) {
    BackRail& rail = rails[i];
    const Part outgoing = part_of(rail.out.count, rail.per_out, k), incoming = part_of(rail.in.count, rail.in.per_round, k);
    rail.out.first = outgoing.begin;
    rail.out.end = outgoing.end;
    rail.out.slot = rail.slots + k % kSlots * rail.slot_bytes;
    rail.out.last = peers_[i].is_proxy_of_peer && k + 1 == std::max<int64_t>(1, rounds_of(rail.out.count, rail.per_out));
    if (outgoing.end > outgoing.begin || rail.out.last) launch_give_back(params, rail.out, launch, stream);
    transfers.push_back(
        {peers_[i].rank,
         {rail.out.slot, idx((outgoing.end - outgoing.begin) * rail.out.token_bytes)},
         {rail.returned + incoming.begin * rail.in.token_bytes, idx((incoming.end - incoming.begin) * rail.in.token_bytes)}});
  }
  return post_on_side_stream(transfers, stream, params.c.call);
}

void GpuHostLinks::sum(const CudaCombineParams& params, const GpuHostTables& tables, bool weighted, const LaunchShape& launch,
                       gpu::Stream stream) {
  const SumShape& shape = params.c.shape;
  RailRound back;
  back.return_kind = return_kind_of(shape);
  back.weighted = weighted;
  // Either all ranks pass weights or none does; the signature guarantees this.
  back.weights = shape.layout == Layout::rank_major && params.c.staging.place.pull.gives_weights != 0;
  back.row_stride = shape.row_bytes + (back.weights ? round_up(int64_t{4} * topk_, 16) : 0);
  std::vector<BackRail> rails;
  int64_t rounds = 1;  // also informs owners without crossing tokens that their memory is no longer read
  for (size_t i = 0; i < peers_.size(); ++i)
    rounds = std::max(rounds, rails.emplace_back(prepare_back(i, tables.peers[i], back)).rounds);
  ReturnedRowsOfHosts in = prepare_sum(rails, back, launch);
  Point incoming[kSlots];
  const auto sum_round = [&](int64_t k) {
    await(incoming[k % kSlots], stream);
    in.round = k;
    in.last = k + 1 == rounds;
    launch_sum(params, in, launch, stream);
  };
  clear_moved(params.c.call, launch, stream);
  launch_make(params, launch, stream);
  for (int64_t k = 0; k < rounds; ++k) {
    if (k >= kSlots) sum_round(k - kSlots);  // the slot is then free
    incoming[k % kSlots] = send_back(params, rails, k, launch, stream);
  }
  for (int64_t k = std::max<int64_t>(0, rounds - kSlots); k < rounds; ++k) sum_round(k);
}

}  // namespace switchyard::detail
