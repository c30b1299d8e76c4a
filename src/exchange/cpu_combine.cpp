// SPDX-License-Identifier: Apache-2.0
// Combine: where the outputs lie, what is staged, launch.
#include <algorithm>
#include <cstring>
#include <string>

#include "exchange/cpu_normal.hpp"
#include "protocol/combine_ring.hpp"
#include "protocol/combine_routes.hpp"

namespace switchyard::detail {

namespace {

const void* data_or_null(const std::vector<float>& v) { return v.empty() ? nullptr : v.data(); }

}  // namespace

void CpuNormal::combine(const ConstRows& y, const Handle& handle, void* out, const CombineOptions& o, float* out_weights) {
  group_.check_usable("combine");
  check_combine(y, handle, handle ? handle.data().rows : 0, out, o, out_weights);
  const uint64_t start = Cpu::now_ns();
  const HandleData& h = handle.data();
  const CallContext call = begin_call(Operation::combine);
  const TraceSpan whole(call.tracer, kHostTrack, Event::combine, h.tokens);
  const bool expert_major = h.layout == Layout::expert_major;
  const uint64_t sig = signature(Operation::combine, {static_cast<int64_t>(y.dtype), static_cast<int64_t>(o.order),
                                                      int64_t{o.apply_weights}, static_cast<int64_t>(h.identity)});

  CombineParams p;
  p.call = call;
  p.control = control_;
  fill_sum(p, y, h, out, o, out_weights);
  p.rows = h.rows;
  p.num_records = h.num_records;
  p.record_route = h.record_route.data();
  if (expert_major && o.apply_weights && o.order == CombineOrder::per_rank)
    p.record_weight = static_cast<const float*>(data_or_null(h.record_weight));
  p.tokens = h.tokens;
  p.sends = SendTable{h.sends.data(), h.send_begin.data(), 0};
  p.ids = h.ids.data();
  p.route_row = h.route_row.data();
  if (expert_major && o.apply_weights && o.order == CombineOrder::per_route)
    p.weights = o.weights ? o.weights : static_cast<const float*>(data_or_null(h.weights));
  p.outputs_done = &outputs_done_.value;
  p.sums_done = sums_done_;
  p.pulls_done = &pulls_done_.value;
  p.sums_next = &sums_next_.value;
  p.pulls_next = &pulls_next_.value;
  const std::vector<int64_t> record_begin = record_ranges(h);
  p.record_begin = record_begin.data();
  p.record_token = h.record_token.data();
  p.tokens_of = h.counts.tokens.data();
  stats_.plan_us = 0;
  if (config.staging == Staging::direct)
    combine_direct(call, sig, p);
  else
    combine_ring(call, sig, p);
  // Rank-major weights must come from every rank that holds rows, or the sums would miss some.
  if (!expert_major && out_weights)
    for (int r = 0; r < world(); ++r)
      if (call.heap.local(control_.placement(call.epoch, r))->weights == 0 &&
          std::min(h.counts.rows_needed(h.layout, 1, r), h.counts.capacity[static_cast<size_t>(r)]) > 0)
        throw_mismatch("combine (weights given on some ranks only)", r);
  end_call(start);
}

void CpuNormal::combine_direct(const CallContext& call, uint64_t sig, CombineParams& p) {
  const bool expert_major = p.layout == Layout::expert_major;
  const bool per_route = expert_major && p.order == CombineOrder::per_route;
  p.reduce_here = expert_major && !per_route;
  const Registration* registered =
      p.reduce_here ? nullptr : group_.registration_of(p.y, static_cast<size_t>(p.rows * p.row_bytes));
  const bool in_place = !p.reduce_here && (call.heap.contains(p.y) || registered);
  const int64_t staged_rows = p.reduce_here ? p.num_records : in_place || per_route ? 0 : p.rows;
  p.place.signature = sig;
  std::shared_ptr<CpuBlock> rows, weights, inbox;
  std::exception_ptr own;
  try {
    if (staged_rows > 0) {
      rows = allocate(static_cast<size_t>(staged_rows * p.row_bytes));
      p.staged = rows->data;
      p.place.rows = rows->offset;
    } else if (registered) {
      p.place.rows = static_cast<uint64_t>(p.y - registered->data);
      p.place.memory = 1 + static_cast<uint64_t>(registered->slot);
      p.distances = registered->distances;
    } else if (in_place) {
      p.place.rows = static_cast<uint64_t>(p.y - call.heap.base[rank()]);
    }
    if (per_route && world() > 1 && p.tokens > 0) {
      inbox = allocate(static_cast<size_t>(p.tokens * p.topk * p.row_bytes));
      p.inbox = inbox->data;
      p.place.weights = inbox->offset;
    }
    if (p.weights_in) {
      weights = allocate(static_cast<size_t>(p.num_records * p.topk * 4));
      p.weights_staged = reinterpret_cast<float*>(weights->data);
      p.place.weights = weights->offset;
    }
  } catch (const Error& error) {
    own = std::current_exception();
    p.place.status = static_cast<uint64_t>(error.code());
    p.staged = nullptr;
    p.weights_staged = nullptr;
    p.reduce_here = false;
  }
  // Rows of routes that their owners can read where they are stay there: one read instead of two and a write.
  p.place.records = p.staged || p.weights_staged || p.reduce_here || (per_route && !in_place) ? 0 : 1;
  p.sum_blocks = group_.options.num_blocks / 2;
  launch([&]<class A>(CpuWarp& w) { detail::combine_direct<A>(w, p); });
  raise("combine");
  check_placements(call, sig, "combine", own);
}

void CpuNormal::combine_ring(const CallContext& call, uint64_t sig, CombineParams& p) {
  p.place.signature = sig;
  p.place.weights = p.weights_in ? 1 : 0;
  bool ok = false;
  on_one_warp([&]<class A>(CpuWarp& w) {
    publish_placement<A>(w, call, control_, p.place);
    WarpSpan<A> span(w, call, Event::wait_placement, -1);
    ok = wait_placements<A>(w, call, control_, Site::placement, &span);
  });
  if (!ok) raise("combine");
  check_placements(call, sig, "combine", nullptr);
  const RingCombineParams ring{p, rings_, ring_streams_.data(), send_chunk(config, rings_)};
  launch([&]<class A>(CpuWarp& w) { combine_ring_kernel<A>(w, ring); });
  raise("combine");
}

}  // namespace switchyard::detail
