// SPDX-License-Identifier: Apache-2.0
// Dispatch: counts, sizes, placement, movement, delivery.
#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

#include "exchange/cpu_normal.hpp"
#include "protocol/dispatch_ring.hpp"

namespace switchyard::detail {

namespace {

size_t idx(int64_t i) { return static_cast<size_t>(i); }

/// Padding rows between the experts' rows: pairs [begin, end).
std::vector<int64_t> padding_ranges(const HandleData& h) {
  std::vector<int64_t> ranges;
  for (int el = 0; el < static_cast<int>(h.first_row.size()); ++el) {
    int64_t routes = 0;
    for (int s = 0; s < h.counts.world; ++s) routes += h.counts.s(s, h.map.first(h.rank) + el);
    const int64_t first = h.first_row[idx(el)], last = std::min(first + round_up(routes, h.alignment), h.rows);
    if (first + routes < last) ranges.insert(ranges.end(), {first + routes, last});
  }
  return ranges;
}

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

}  // namespace

std::vector<int64_t> record_ranges(const HandleData& h) {
  std::vector<int64_t> begin(idx(h.counts.world + 1), 0);
  for (int s = 0; s < h.counts.world; ++s) begin[idx(s + 1)] = std::min(begin[idx(s)] + h.counts.d(s, h.rank), h.num_records);
  return begin;
}

void CpuNormal::gather_counts(const CallContext& call, uint64_t sig, int64_t capacity, GatheredCounts& counts) {
  const auto experts = idx(config.num_experts), ranks = idx(world());
  CountsHead head{sig, local_.tokens, capacity, 0};
  std::memcpy(counts_row_.data(), &head, sizeof head);
  std::memcpy(counts_row_.data() + sizeof head, local_.tokens_per_rank.data(), 4 * ranks);
  std::memcpy(counts_row_.data() + sizeof head + 4 * ranks, local_.routes_per_expert.data(), 4 * experts);
  bool ok = false;
  {
    const TraceSpan span(call.tracer, kHostTrack, Event::exchange_counts, control_.counts_row_bytes() * world());
    on_one_warp([&]<class A>(CpuWarp& w) { ok = exchange_counts<A>(w, call, control_, counts_row_.data()); });
  }
  if (!ok) raise("dispatch");
  counts.world = world();
  counts.experts = config.num_experts;
  counts.routes.resize(ranks * experts);
  counts.touching.resize(ranks * ranks);
  counts.tokens.resize(ranks);
  counts.capacity.resize(ranks);
  int other = -1;
  for (size_t r = 0; r < ranks; ++r) {
    const CountsHead* row = call.heap.local(control_.counts_head(call.epoch, static_cast<int>(r)));
    const auto* body = reinterpret_cast<const int32_t*>(row + 1);
    if (row->signature != sig) other = static_cast<int>(r);
    counts.tokens[r] = row->tokens;
    counts.capacity[r] = row->capacity;
    std::memcpy(&counts.touching[r * ranks], body, 4 * ranks);
    std::memcpy(&counts.routes[r * experts], body + ranks, 4 * experts);
  }
  if (other >= 0) throw_mismatch("dispatch", other);
}

void CpuNormal::check_capacity(const GatheredCounts& counts, const DispatchOptions& options) const {
  if (options.size != SizePolicy::capacity || options.overflow != Overflow::fail) return;
  for (int r = 0; r < world(); ++r) {
    const int64_t needed = counts.rows_needed(config.layout, config.expert_alignment, r), capacity = counts.capacity[idx(r)];
    if (needed > capacity)
      throw AgreedError(
          ErrorCode::capacity_exceeded,
          "dispatch (call " + std::to_string(call_number()) + "): rank " + std::to_string(r) + " would receive " +
              std::to_string(needed) + " rows, its capacity is " + std::to_string(capacity) +
              "; nothing was sent and the group can be used (raise DispatchOptions::capacity or choose drop_and_report)");
  }
}

void CpuNormal::choose_sizes(const DispatchOptions& options, HandleData& h) const {
  h.rows_allocated = h.rows;
  h.records_allocated = h.num_records;
  const int64_t records = world() * config.max_tokens;
  if (options.size == SizePolicy::capacity) h.rows_allocated = capacity_of(options);
  if (options.size == SizePolicy::worst_case) h.rows_allocated = worst_case_rows(config, world());
  if (options.size != SizePolicy::exact) h.records_allocated = config.layout == Layout::rank_major ? h.rows_allocated : records;
}

Dispatched CpuNormal::dispatch(const ConstRows& x, const ExpertIds& ids, const float* weights, const DispatchOptions& given) {
  group_.check_usable("dispatch");
  DispatchOptions options = given;
  if (options.size == SizePolicy::automatic) options.size = SizePolicy::exact;
  const uint64_t start = Cpu::now_ns();
  check_ids(ids);
  const RowFormat format = check_rows(x, options, ids.tokens);
  const CallContext call = begin_call(Operation::dispatch);
  const TraceSpan whole(call.tracer, kHostTrack, Event::dispatch, ids.tokens);
  // A rank without tokens has no weights to pass: whether weights travel is decided by the ranks that have some.
  const uint64_t sig =
      signature(Operation::dispatch, {static_cast<int64_t>(format.src_type), static_cast<int64_t>(format.type),
                                      static_cast<int64_t>(format.scales), static_cast<int64_t>(options.size),
                                      static_cast<int64_t>(options.overflow), static_cast<int64_t>(options.padding)});
  const std::shared_ptr<HandleData> h = handles_->take();
  {
    const TraceSpan span(call.tracer, kHostTrack, Event::plan, ids.tokens * ids.topk);
    local_.build(ids, config.num_experts, world());
  }
  const int64_t capacity = options.size == SizePolicy::capacity ? capacity_of(options) : std::numeric_limits<int64_t>::max();
  gather_counts(call, sig, capacity, h->counts);
  check_capacity(h->counts, options);
  h->layout = config.layout;
  h->alignment = config.expert_alignment;
  h->rank = rank();
  h->identity = mix_hash(object(), call.epoch);
  h->max_tokens = config.max_tokens;
  h->hidden = config.hidden;
  {
    const TraceSpan span(call.tracer, kHostTrack, Event::plan, ids.tokens * ids.topk);
    build_owner_side(local_, *h);
    choose_sizes(options, *h);
    if (weights)
      h->weights.assign(weights, weights + ids.tokens * ids.topk);
    else
      h->weights.clear();
  }
  stats_.plan_us = static_cast<double>(Cpu::now_ns() - start) * 1e-3;
  Dispatched out = move_rows(call, sig, x, format, options, h, h);
  end_call(start);
  return out;
}

Dispatched CpuNormal::redispatch(const ConstRows& x, const Handle& handle, const DispatchOptions& options) {
  group_.check_usable("cached dispatch");
  const uint64_t start = Cpu::now_ns();
  check_handle(handle);
  const RowFormat format = check_rows(x, options, handle.data().tokens);
  const CallContext call = begin_call(Operation::cached_dispatch);
  const TraceSpan whole(call.tracer, kHostTrack, Event::dispatch, x.rows);
  const uint64_t sig =
      signature(Operation::cached_dispatch,
                {static_cast<int64_t>(format.src_type), static_cast<int64_t>(format.type), static_cast<int64_t>(format.scales),
                 static_cast<int64_t>(options.padding), static_cast<int64_t>(handle.data().identity)});
  stats_.plan_us = 0;
  Dispatched out = move_rows(call, sig, x, format, options, nullptr,
                             std::shared_ptr<const HandleData>(std::shared_ptr<void>(), &handle.data()));
  out.handle = handle;
  end_call(start);
  return out;
}

Placement CpuNormal::offer_block(uint64_t sig, const OutputLayout& layout, const RecordLayout& records, bool sends_weights,
                                 std::shared_ptr<CpuBlock>& block, std::exception_ptr& error) {
  Placement place{};
  place.rows_allocated = layout.rows;
  place.records_allocated = records.records;
  place.signature = sig;
  place.weights = sends_weights ? 1 : 0;
  try {
    block = allocate(static_cast<size_t>(layout.bytes() + records.bytes()));
    place.rows = block->offset;
    place.records = block->offset + static_cast<uint64_t>(layout.bytes());
  } catch (const Error& e) {
    place.status = static_cast<uint64_t>(e.code());
    error = std::current_exception();
  }
  return place;
}

bool CpuNormal::agree_on_weights(const CallContext& call, const GatheredCounts& counts) {
  bool any = false;
  int with = -1, without = -1;  // of those with tokens
  for (int r = 0; r < world(); ++r) {
    const bool sends = call.heap.local(control_.placement(call.epoch, r))->weights != 0;
    any = any || sends;
    if (sends || counts.tokens[idx(r)] > 0) (sends ? with : without) = r;
  }
  if (any && without >= 0) throw_mismatch("dispatch (weights given on some ranks only)", rank() == without ? with : without);
  return any;
}

void CpuNormal::exchange_placements(const CallContext& call, const Placement& place, const std::exception_ptr& own) {
  bool ok = false;
  on_one_warp([&]<class A>(CpuWarp& w) {
    publish_placement<A>(w, call, control_, place);
    WarpSpan<A> span(w, call, Event::wait_placement, -1);
    ok = wait_placements<A>(w, call, control_, Site::placement, &span);
  });
  if (!ok) raise("dispatch");
  check_placements(call, place.signature, "dispatch", own);
}

DispatchParams CpuNormal::dispatch_params(const CallContext& call, const ConstRows& x, const RowFormat& format,
                                          const HandleData& h) {
  DispatchParams p;
  p.call = call;
  p.control = control_;
  fill_move(p, x, format, h);
  p.tokens = h.tokens;
  p.sends = SendTable{h.sends.data(), h.send_begin.data(), 0};
  p.ids = h.ids.data();
  p.route_row = h.route_row.data();
  p.weights = h.weights.empty() ? nullptr : h.weights.data();
  if (h.layout == Layout::expert_major) {
    chunk_records_ = records_by_chunk(h);
    p.send_blocks = group_.options.num_blocks / 2;
  }
  p.chunk_records = chunk_records_.empty() ? nullptr : chunk_records_.data();
  p.sends_done = sends_done_;
  p.sends_next = &sends_next_.value;
  p.places_next = &places_next_.value;
  return p;
}

Dispatched CpuNormal::move_rows(const CallContext& call, uint64_t sig, const ConstRows& x, const RowFormat& format,
                                const DispatchOptions& options, const std::shared_ptr<HandleData>& fresh,
                                const std::shared_ptr<const HandleData>& known) {
  const HandleData& h = *known;
  const OutputLayout layout{h.rows_allocated, format.row_bytes, format.scale_bytes};
  const RecordLayout records{fresh ? h.records_allocated : 0, config.topk};
  std::shared_ptr<CpuBlock> block;
  std::exception_ptr own;
  const Placement place = offer_block(sig, layout, records, fresh && !h.weights.empty(), block, own);
  exchange_placements(call, place, own);
  const bool any_weights = agree_on_weights(call, h.counts);

  const std::vector<int64_t> record_begin = record_ranges(h);
  const std::vector<int64_t> padding = options.padding == Padding::zero ? padding_ranges(h) : std::vector<int64_t>();
  DispatchParams p = dispatch_params(call, x, format, h);
  p.with_records = fresh != nullptr;
  p.record_begin = record_begin.data();
  p.record_route = fresh ? nullptr : h.record_route.data();
  p.padding = padding.data();
  p.num_padding = static_cast<int>(padding.size() / 2);
  if (config.staging == Staging::direct) {
    launch([&]<class A>(CpuWarp& w) { dispatch_direct<A>(w, p); });
  } else {
    const RingDispatchParams ring{p,
                                  rings_,
                                  {block->data, layout, block->data + layout.bytes(), records},
                                  ring_streams_.data(),
                                  send_chunk(config, rings_)};
    launch([&]<class A>(CpuWarp& w) { dispatch_ring<A>(w, ring); });
  }
  raise("dispatch");
  if (fresh) {
    take_records(*fresh, block->data + layout.bytes(), any_weights);
    build_receiver_side(*fresh);
  }
  return deliver(known, std::move(block), layout, format);
}

Dispatched CpuNormal::deliver(std::shared_ptr<const HandleData> h, std::shared_ptr<CpuBlock> block, const OutputLayout& layout,
                              const RowFormat& format) const {
  Dispatched out;
  out.rows = h->rows;
  std::byte* scales = format.scale_bytes ? block->data + layout.scales_at() : nullptr;
  out.x = Rows{block->data, layout.rows, config.hidden, format.type, scales, format.scales};
  if (h->layout == Layout::rank_major) {
    out.topk_ids = h->record_route;
    out.topk_weights = h->record_weight;
    out.source_token = h->record_token;
  } else {
    out.row_source = h->row_source;
    out.row_weights = h->row_weight;
    out.expert_first_row = h->first_row;
  }
  out.tokens_per_expert = h->kept_per_expert;
  out.aligned_per_expert = h->aligned_per_expert;
  out.dropped = h->dropped;
  out.dropped_per_source = h->dropped_here;
  out.block = std::move(block);
  out.handle = Handle(std::move(h));
  return out;
}

}  // namespace switchyard::detail
