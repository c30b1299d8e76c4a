// SPDX-License-Identifier: Apache-2.0
#include "exchange/normal/hosts/gpu_links.hpp"

#include <algorithm>
#include <mutex>
#include <utility>

#include "base/carver.hpp"
#include "exchange/gpu/check.hpp"

namespace switchyard::detail {

namespace {

size_t idx(int64_t i) { return static_cast<size_t>(i); }

/// Numbers [begin, end) of round k.
struct Part {
  int64_t begin, end;
};
Part part_of(int64_t count, int64_t per_round, int64_t k) {
  return {std::min(count, k * per_round), std::min(count, (k + 1) * per_round)};
}
int64_t rounds_of(int64_t count, int64_t per_round) { return (count + per_round - 1) / per_round; }

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
    peer.stands_for_me = map_.proxy(rank_, peer.host) == r;
    peer.i_stand = map_.proxy(r, own_host_) == rank_;
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
  rounds_ = std::make_unique<GpuRounds>(group, gpu);
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
      if (peers_[i].stands_for_me) carver.take(of.leaving, max_tokens_);
      if (!peers_[i].i_stand) continue;
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
  return {tables.release(), [idle = std::weak_ptr<Idle>(idle_), graves = gpu_.shared_graves()](GpuHostTables* ended) {
            std::unique_ptr<GpuHostTables> held(ended);
            if (const auto to = idle.lock()) {
              const std::lock_guard lock(to->mutex);
              to->tables.push_back(std::move(held));
            } else {
              graves->bury(std::move(held->memory));  // kernels of another object may read it
            }
          }};
}

// ---- counts and placements ----

std::vector<Leg> GpuHostLinks::message_legs(int64_t bytes) const {
  std::vector<Leg> legs;
  for (size_t i = 0; i < peers_.size(); ++i) {
    const Peer& peer = peers_[i];
    legs.push_back({peer.rank,
                    {message(i, true), peer.stands_for_me ? idx(bytes) : 0},
                    {message(i, false), peer.i_stand ? idx(bytes) : 0}});
  }
  return legs;
}

void GpuHostLinks::post(std::span<const Leg> legs, gpu::Stream stream, const CallContext& call) {
  rounds_->post(legs, stream, call.operation, std::chrono::nanoseconds(call.timeout_ns));
}

void GpuHostLinks::exchange_counts(const PlanParams& plan, const GpuHostTables& tables, gpu::Stream stream) {
  auto* const counts = memory_.as<int64_t>(counts_at_);
  for (size_t i = 0; i < peers_.size(); ++i) {
    if (!peers_[i].stands_for_me) continue;
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
  post(message_legs(static_cast<int64_t>(sizeof(RelayHead)) + control_.counts_row_bytes()), stream, plan.call);
  for (size_t i = 0; i < peers_.size(); ++i) {
    if (!peers_[i].i_stand) continue;
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
    tables.peers[i].leaving_count = peers_[i].stands_for_me ? counts[2 * i] : 0;
    tables.peers[i].crossed_count = peers_[i].i_stand ? counts[2 * i + 1] : 0;
  }
}

PlacementVerdict GpuHostLinks::exchange_placements(OfferParams offer, gpu::Stream stream) {
  offer.control = control_;
  offer.verdict = memory_.as<PlacementVerdict>(verdict_at_);
  offer.messages = message(0, true);
  offer.message_stride = 2 * message_bytes_;
  offer.num_messages = static_cast<int>(peers_.size());
  launch_offer(offer, stream);
  post(message_legs(static_cast<int64_t>(sizeof(RelayHead) + sizeof(Placement))), stream, offer.call);
  for (size_t i = 0; i < peers_.size(); ++i) {
    if (!peers_[i].i_stand) continue;
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
  // Earlier calls have ended: the host has waited for the placements of this one, behind them.
  if (idx(bytes) > has) {
    memory = DeviceMemory();
    memory = DeviceMemory(idx(bytes), copies);  // zero: what is between rows goes over the network, too
    has = idx(bytes);
  }
  return memory.as<std::byte>();
}

CrossingLayout GpuHostLinks::crossing(const CudaDispatchParams& p, int host, bool weights) const {
  const MoveShape& s = p.d.shape;
  return {topk_, places_on(host), s.with_records, expert_major_, weights && s.with_records, s.row_bytes, s.scale_bytes};
}

void GpuHostLinks::move(const CudaDispatchParams& params, const GpuHostTables& tables, bool weights, const std::byte* counts,
                        const LaunchShape& launch, gpu::Stream stream) {
  const DeviceLimits& limits = gpu_.limits();
  launch_send(params, launch, limits, stream);
  std::vector<RailRound> out(peers_.size()), in(peers_.size());
  std::vector<int64_t> per_out(peers_.size(), 1), per_in(peers_.size(), 1);
  int64_t rounds = 1;  // sources none of whose tokens cross are told of as well
  for (size_t i = 0; i < peers_.size(); ++i) {
    Peer& peer = peers_[i];
    const GpuHostTables::OfPeer& of = tables.peers[i];
    const auto prepare = [&](RailRound& r, int64_t count, int host, DeviceMemory& slot, size_t& has, int64_t& per) {
      r.layout = crossing(params, host, weights);
      r.count = count;
      per = std::max<int64_t>(1, group_.round_bytes / r.layout.bytes());
      r.slot = grow(slot, has, std::min(count, per) * r.layout.bytes(), gpu_.copy_stream());
      rounds = std::max(rounds, rounds_of(count, per));
    };
    if (peer.stands_for_me) {
      out[i].host_ranks = peer.host_ranks;
      out[i].leaving = of.leaving;
      prepare(out[i], of.leaving_count, peer.host, peer.slot_out, peer.out_bytes, per_out[i]);
    }
    if (peer.i_stand) {
      in[i].source = peer.rank;
      in[i].crossed = of.crossed;
      in[i].counts = counts + peer.rank * control_.counts_row_bytes();
      prepare(in[i], of.crossed_count, own_host_, peer.slot_in, peer.in_bytes, per_in[i]);
    }
  }
  for (int64_t k = 0; k < rounds; ++k) {
    std::vector<Leg> legs;
    for (size_t i = 0; i < peers_.size(); ++i) {
      const Part sent = part_of(out[i].count, per_out[i], k), come = part_of(in[i].count, per_in[i], k);
      out[i].first = sent.begin, out[i].end = sent.end, in[i].first = come.begin, in[i].end = come.end;
      if (sent.end > sent.begin) launch_pack(params, out[i], launch, limits, stream);
      legs.push_back({peers_[i].rank,
                      {out[i].slot, idx((sent.end - sent.begin) * (peers_[i].stands_for_me ? out[i].layout.bytes() : 0))},
                      {in[i].slot, idx((come.end - come.begin) * (peers_[i].i_stand ? in[i].layout.bytes() : 0))}});
    }
    post(legs, stream, params.d.call);
    for (size_t i = 0; i < peers_.size(); ++i) {
      in[i].last = peers_[i].i_stand && k + 1 == std::max<int64_t>(1, rounds_of(in[i].count, per_in[i]));
      if (in[i].end > in[i].first || in[i].last) launch_forward(params, in[i], launch, limits, stream);
    }
  }
  launch_finish(params, launch, limits, stream);
}

// ---- sums ----

RowsBack GpuHostLinks::rows_back_of(const SumShape& shape) const {
  if (shape.order == CombineOrder::per_host) return RowsBack::per_host;
  return shape.order == CombineOrder::per_route ? RowsBack::per_route : RowsBack::per_rank;
}

int GpuHostLinks::most_back(RowsBack rows, int host) const {
  return rows == RowsBack::per_host ? 1 : rows == RowsBack::per_route ? topk_ : places_on(host);
}

GpuHostLinks::BackRail GpuHostLinks::prepare_back(size_t i, const GpuHostTables::OfPeer& of, const RailRound& shape) {
  Peer& peer = peers_[i];
  BackRail rail;
  const auto per_round = [&](int64_t token_bytes) { return std::max<int64_t>(1, group_.round_bytes / token_bytes); };
  if (peer.i_stand) {
    RailRound& r = rail.out = shape;
    r.token_bytes = most_back(r.rows_back, own_host_) * r.row_stride;
    r.source = peer.rank;
    r.count = of.crossed_count;
    r.crossed = of.crossed;
    rail.per_out = per_round(r.token_bytes);
    r.slot = grow(peer.slot_out, peer.out_bytes, std::min(r.count, rail.per_out) * r.token_bytes, gpu_.copy_stream());
  }
  if (peer.stands_for_me) {
    rail.come = of.leaving_count;
    rail.token_in = most_back(shape.rows_back, peer.host) * shape.row_stride;
    rail.per_in = per_round(rail.token_in);
    rail.returned = grow(peer.slot_in, peer.in_bytes, rail.come * rail.token_in, gpu_.copy_stream());
  }
  rail.rounds = std::max(rounds_of(rail.out.count, rail.per_out), rounds_of(rail.come, rail.per_in));
  return rail;
}

void GpuHostLinks::sum(const CudaCombineParams& params, const GpuHostTables& tables, bool weighted, const LaunchShape& launch,
                       gpu::Stream stream) {
  const SumShape& shape = params.c.shape;
  RailRound back;
  back.rows_back = rows_back_of(shape);
  back.weighted = weighted;
  // All ranks give weights, or none does (the signature says it).
  back.weights = shape.layout == Layout::rank_major && params.c.staging.place.pull.gives_weights != 0;
  back.row_stride = shape.row_bytes + (back.weights ? round_up(int64_t{4} * topk_, 16) : 0);
  launch_make(params, launch, stream);
  std::vector<BackRail> rails;
  std::vector<ReturnedHost> hosts(idx(map_.hosts()));
  int64_t rounds = 1;  // owners none of whose tokens cross are told, too, that nothing is read any more
  for (size_t i = 0; i < peers_.size(); ++i) {
    const BackRail& rail = rails.emplace_back(prepare_back(i, tables.peers[i], back));
    rounds = std::max(rounds, rail.rounds);
    if (peers_[i].stands_for_me)
      hosts[idx(peers_[i].host)] = {tables.peers[i].leaving, rail.come, rail.returned, rail.token_in};
  }
  for (int64_t k = 0; k < rounds; ++k) {
    std::vector<Leg> legs;
    for (size_t i = 0; i < peers_.size(); ++i) {
      BackRail& rail = rails[i];
      const Part given = part_of(rail.out.count, rail.per_out, k), come = part_of(rail.come, rail.per_in, k);
      rail.out.first = given.begin;
      rail.out.end = given.end;
      rail.out.last = peers_[i].i_stand && k + 1 == std::max<int64_t>(1, rounds_of(rail.out.count, rail.per_out));
      if (given.end > given.begin || rail.out.last) launch_give_back(params, rail.out, launch, stream);
      legs.push_back({peers_[i].rank,
                      {rail.out.slot, idx((given.end - given.begin) * rail.out.token_bytes)},
                      {rail.returned + come.begin * rail.token_in, idx((come.end - come.begin) * rail.token_in)}});
    }
    post(legs, stream, params.c.call);
  }
  sum_returned(params, hosts, back, launch, stream);
}

void GpuHostLinks::sum_returned(const CudaCombineParams& params, const std::vector<ReturnedHost>& hosts, const RailRound& back,
                                const LaunchShape& launch, gpu::Stream stream) {
  ReturnedRowsOfHosts in;
  in.hosts = memory_.as<ReturnedHost>(returned_at_);
  in.host_of = memory_.as<int>(host_of_at_);
  in.num_hosts = map_.hosts();
  in.own_host = own_host_;
  in.row_stride = back.row_stride;
  in.rows_back = back.rows_back;
  if (back.rows_back == RowsBack::per_host)
    in.scratch = grow(scratch_, scratch_bytes_, int64_t{launch.blocks} * launch.warps * back.row_stride, gpu_.copy_stream());
  check_cuda(gpu::copy_to_device(memory_.as<ReturnedHost>(returned_at_), hosts.data(), hosts.size() * sizeof(ReturnedHost),
                                 gpu_.copy_stream()),
             "where rows come back");
  check_cuda(gpu::wait_for_stream(gpu_.copy_stream()), "where rows come back");
  launch_sum(params, in, launch, stream);
}

}  // namespace switchyard::detail
