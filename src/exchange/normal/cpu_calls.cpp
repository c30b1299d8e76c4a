// SPDX-License-Identifier: Apache-2.0
// Dispatch and combine on the CPU: counts and plan, tables, launches, checks that need the counts.
#include <algorithm>
#include <cstring>
#include <string>

#include "base/index.hpp"
#include "exchange/normal/cpu.hpp"
#include "exchange/normal/plan/host_counts.hpp"
#include "plan/decisions.hpp"
#include "protocol/normal/combine_ring.hpp"
#include "protocol/normal/combine_routes.hpp"
#include "protocol/normal/dispatch_ring.hpp"

namespace switchyard::detail {

namespace {

template <class T>
void take(std::vector<T>& out, const std::byte* from, int64_t used, int64_t allocated, T rest) {
  out.resize(idx(allocated));
  if (used > 0) std::memcpy(out.data(), from, idx(used) * sizeof(T));
  std::fill(out.begin() + used, out.end(), rest);
}

void take_records(HandleData& h, const std::byte* records, bool with_weights) {
  const RecordLayout layout{h.records_allocated, h.topk};
  take(h.record_token, records + layout.token_at(), h.num_records, h.records_allocated, -1);
  take(h.record_route, records + layout.route_at(), h.num_records * h.topk, h.records_allocated * h.topk, -1);
  h.record_weight.clear();
  if (with_weights)
    take(h.record_weight, records + layout.weight_at(), h.num_records * h.topk, h.records_allocated * h.topk, 0.0f);
}

const float* data_or_null(const std::vector<float>& v) { return v.empty() ? nullptr : v.data(); }

}  // namespace

// ---- dispatch ----

template <class A>
void CpuNormal<A>::gather_counts(const CpuCall& given, int64_t capacity, HandleData& h) {
  const CountsHead head{given.signature, local_.tokens, capacity, 0};
  OtherCall other;
  const auto relay = [&](CpuWarp& w) {
    if (!hosts_) return true;
    const auto leaving = [&](const RailPeer& peer) {
      return static_cast<int64_t>(h.hosts->leaving[static_cast<size_t>(peer.host)].size());
    };
    const auto deliver = [&](int source, int64_t crossing, const std::byte* row) {
      HostLinks::set_crossing(h, source, crossing);
      publish_counts<A>(w, given.context, control_, source, row);
    };
    return pass_on(given.context, counts_row_.data(), counts_row_.size(), leaving, deliver);
  };
  const bool ok = exchange_host_counts<A>(solo_, given.context, control_, head, local_, counts_row_, h.counts, &other, relay);
  if (!ok) raise("dispatch");
  if (other.rank >= 0) throw_mismatch("dispatch", other.rank, {Site::counts, given.signature, other.signature});
}

template <class A>
void CpuNormal<A>::plan(Call& given, const Routing& routing, HandleData& h, const Placement*) {
  const auto& call = static_cast<const CpuCall&>(given);
  const int64_t routes = routing.ids.num_tokens * routing.ids.topk;
  {
    const TraceSpan span(call.context.tracer, kHostTrack, Event::plan, routes);
    local_.build(routing.ids, config.num_experts, world());
    take_invalid(local_.invalid, config.invalid_ids, config.topk, config.num_experts);
    h.invalid_ids = local_.invalid.count;
    if (hosts_) hosts_->list_leaving(local_, h);
  }
  gather_counts(call, routing.capacity, h);
  if (routing.fail_on_overflow)
    check_capacity(h.counts, config.layout, config.expert_alignment, "dispatch (call " + std::to_string(epochs_.calls()) + ")",
                   "DispatchOptions::capacity");
  {
    const TraceSpan span(call.context.tracer, kHostTrack, Event::plan, routes);
    h.identity = mix_hash(object(), call.context.epoch);
    build_owner_side(local_, h);
    if (routing.weights)
      h.weights.assign(routing.weights, routing.weights + routes);
    else
      h.weights.clear();
  }
  stats_.plan_us = static_cast<double>(Cpu::now_ns() - call.start_ns) * 1e-3;
}

template <class A>
bool CpuNormal<A>::agree_on_weights(const CpuCall& given, const GatheredCounts& counts) {
  const CallContext& call = given.context;
  bool any = false;
  int with = -1, without = -1;  // ranks with tokens, with and without weights
  for (int r = 0; r < world(); ++r) {
    const bool sends = call.heap.local(control_.placement(call.epoch, r))->dispatch.sends_weights != 0;
    any = any || sends;
    if (sends || counts.tokens[idx(r)] > 0) (sends ? with : without) = r;
  }
  if (any && without >= 0) throw_weights_mismatch(given, rank() == without ? with : without);
  return any;
}

template <class A>
MoveTables CpuNormal<A>::move_tables(CpuCall& call, const Dispatch& d) const {
  const HandleData& h = *d.handle;
  const bool expert_major = h.layout == Layout::expert_major;
  call.record_begin = record_ranges(h);
  if (d.options.padding == Padding::zero) call.padding = padding_ranges(h);
  if (expert_major || any_rank_copies(call.context)) call.chunk_records = records_by_chunk(h);
  MoveTables t;
  t.sends = SendTable{h.sends.data(), h.send_begin.data(), 0};
  t.ids = h.ids.data();
  t.route_row = h.route_row.data();
  t.record_begin = call.record_begin.data();
  t.record_route = d.fresh ? nullptr : h.record_route.data();
  t.chunk_records = call.chunk_records.empty() ? nullptr : call.chunk_records.data();
  t.padding = call.padding.data();
  t.num_padding = static_cast<int>(call.padding.size() / 2);
  return t;
}

template <class A>
bool CpuNormal<A>::any_rank_copies(const CallContext& call) const {
  for (int r = 0; r < world(); ++r)
    if (call.heap.local(control_.placement(call.epoch, r))->dispatch.copies_out != 0) return true;
  return false;
}

template <class A>
MoveWork CpuNormal<A>::move_work(bool receives) {
  return {receives ? group_.options.num_blocks / 2 : 0, sends_done_, &sends_next_.value, &places_next_.value, of_blocks(0)};
}

template <class A>
void CpuNormal<A>::move(Call& given, Dispatch& d, const MoveShape& shape) {
  auto& call = static_cast<CpuCall&>(given);
  exchange_placements(call, d.place, d.error);
  const bool any_weights = agree_on_weights(call, d.handle->counts);
  const MoveWork work = move_work(shape.layout == Layout::expert_major || d.place.dispatch.copies_out != 0);
  const DispatchParams p{{call.context, d.handle->tokens}, shape, move_tables(call, d), d.copies(call), work};
  const OutputLayout layout = d.output();
  std::byte* const records = d.rows->data + d.output_bytes();
  if (through_rings()) {
    const RingDispatchParams ring{
        p, rings_, {d.rows->data, layout, records, d.records()}, ring_streams_.data(), send_chunk(config, rings_)};
    launch([&](CpuWarp& w) { dispatch_ring<A>(w, ring); });
  } else if (hosts_) {
    move_over_hosts(p, *d.handle);
  } else {
    launch([&](CpuWarp& w) { dispatch_direct<A>(w, p); });
  }
  raise(call.name);
  if (!d.fresh) return;
  take_records(*d.fresh, records, any_weights);
  build_receiver_side(*d.fresh);
}

template <class A>
void CpuNormal<A>::move_over_hosts(const DispatchParams& p, const HandleData& h) {
  const HostLinks::Moving& over = hosts_->prepare(p, h);
  const uint64_t first = hosts_->reserve_rounds(over.rounds);
  uint64_t& network_bytes = group_.moved[0].network_bytes;
  const auto counted = [&](CpuWarp& w, auto&& body) {
    MoveCounter moved;
    body(moved);
    add_moved<A>(w, p.call, moved);
  };
  const auto send = [&](int64_t k) {
    const bool packed = run_phase([&](CpuWarp& w) {
      counted(w, [&](MoveCounter& moved) {
        for (const DispatchRail& rail : over.rails) pack_rows<A>(w, p, rail, k, moved);
      });
    });
    if (packed) network_bytes += hosts_->post(over, first, k);
    return packed;
  };
  const auto take = [&](int64_t k) {
    return await_round<A>(solo_, p.call, hosts_->carrier(), first + static_cast<uint64_t>(k)) && run_phase([&](CpuWarp& w) {
             for (const DispatchRail& rail : over.rails) {
               DispatchParams forward = p;
               set_forwarding(forward, rail);
               forward_rows<A>(w, forward, rail, k);
             }
           });
  };
  const auto send_own = [&] {
    return run_phase([&](CpuWarp& w) { counted(w, [&](MoveCounter& moved) { send_own_rows<A>(w, p, moved); }); });
  };
  if (!run_rounds(over.rounds, send, send_own, take)) return;
  run_phase([&](CpuWarp& w) {
    counted(w, [&](MoveCounter& moved) {
      for (size_t i = 0; p.shape.with_records && i < over.rails.size(); ++i) count_returned<A>(w, p, over.rails[i]);
      finish_rows<A>(w, p, moved);
    });
  });
}

// ---- combine ----

template <class A>
void CpuNormal<A>::sum_over_hosts(const CombineParams& p, const HandleData& h, bool weighted) {
  const HostLinks::Summing& over = hosts_->prepare(solo_, p, h, weighted);
  const uint64_t first = hosts_->reserve_rounds(over.rounds);
  const auto send = [&](int64_t k) {
    const bool packed = run_phase([&](CpuWarp& w) {
      for (const CombineRail& rail : over.rails) {
        CombineParams give = p;
        set_giving(give, rail);
        if (!give_rows<A>(w, give, rail, k)) return;
      }
    });
    if (packed) group_.moved[0].network_bytes += hosts_->post(over, first, k);
    return packed;
  };
  const auto take = [&](int64_t k) {
    return await_round<A>(solo_, p.call, hosts_->carrier(), first + static_cast<uint64_t>(k)) &&
           run_phase([&](CpuWarp& w) { add_rows<A>(w, p, over.hosts, over.own, k); });
  };
  const bool made = run_phase([&](CpuWarp& w) {
    MoveCounter moved;
    make_rows<A>(w, p, moved);
    add_moved<A>(w, p.call, moved);
  });
  if (made)
    run_rounds(
        over.rounds, send, [] { return true; }, take);
}

template <class A>
SumTables CpuNormal<A>::sum_tables(CpuCall& call, const HandleData& h) const {
  call.record_begin = record_ranges(h);
  SumTables t;
  t.record_begin = call.record_begin.data();
  t.record_token = h.record_token.data();
  t.tokens_of = h.counts.tokens.data();
  t.record_route = h.record_route.data();
  t.sends = SendTable{h.sends.data(), h.send_begin.data(), 0};
  t.ids = h.ids.data();
  t.route_row = h.route_row.data();
  return t;
}

template <class A>
SumWork CpuNormal<A>::sum_work() {
  return {group_.options.num_blocks / 2, sums_done_, &pulls_done_.value, &sums_next_.value, &pulls_next_.value,
          of_blocks(kRowChunks)};
}

template <class A>
void CpuNormal<A>::sum(Call& given, const HandleData& h, const SumShape& shape, const CombineOptions& o,
                       const SumStaging& staging, const std::exception_ptr& error) {
  auto& call = static_cast<CpuCall&>(given);
  const SumWeights weights = weights_of(h, o, data_or_null(h.record_weight), data_or_null(h.weights));
  const SumStart start{call.context, h.tokens, h.num_records, weights.of_records,
                       weights.given ? weights.given : weights.of_routes};
  const CombineParams p{start, shape, sum_tables(call, h), staging, sum_work()};
  if (through_rings()) {
    exchange_placements(call, staging.place, error);
    const RingCombineParams ring{p, rings_, ring_streams_.data(), send_chunk(config, rings_)};
    launch([&](CpuWarp& w) { combine_ring_kernel<A>(w, ring); });
    raise(call.name);
  } else if (hosts_) {
    exchange_placements(call, staging, error);
    sum_over_hosts(p, h, o.apply_weights && h.layout == Layout::expert_major);
    raise(call.name);
  } else {
    launch([&](CpuWarp& w) { combine_direct<A>(w, p); });
    raise(call.name);
    check_placements(call, error);
  }
  if (shape.out_weights && h.layout == Layout::rank_major) check_weights_present(call, h);
}

template <class A>
void CpuNormal<A>::check_weights_present(const CpuCall& given, const HandleData& h) {
  const CallContext& call = given.context;
  for (int r = 0; r < world(); ++r) {
    const int64_t rows = least(h.counts.rows_needed(h.layout, 1, r), h.counts.capacity[static_cast<size_t>(r)]);
    if (call.heap.local(control_.placement(call.epoch, r))->pull.gives_weights == 0 && rows > 0)
      throw_weights_mismatch(given, r);  // some weights are missing in the sums
  }
}

template class CpuNormal<SWITCHYARD_CPU_ARCH>;  // instantiates the definitions of this file

}  // namespace switchyard::detail
