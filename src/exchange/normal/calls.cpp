// SPDX-License-Identifier: Apache-2.0
// The calls of normal mode, in execution order: checks, signature, sizes, offers, movement, delivery. Backend-specific steps
// are virtual functions of NormalImpl.
#include <string>

#include "base/call_signature.hpp"
#include "exchange/group/call_difference.hpp"
#include "exchange/group/enum_checks.hpp"
#include "exchange/normal/impl.hpp"

namespace switchyard::detail {

void NormalImpl::throw_pool_exhausted(size_t bytes, const std::string& state) const {
  throw Error(ErrorCode::pool_exhausted, "rank " + std::to_string(rank()) + ": the output pool has no room for " +
                                             std::to_string(bytes) + " bytes: " + state +
                                             " (destroy outputs, or raise NormalConfig::pool_bytes)");
}

DispatchOptions NormalImpl::resolved(DispatchOptions o) const {
  if (o.size == SizePolicy::automatic)
    o.size = counts_at_ == CountsAt::host || spans_hosts() ? SizePolicy::exact : SizePolicy::worst_case;
  return o;
}

NormalImpl::Extent NormalImpl::extent_of(const HandleData& h) const {
  return counts_at_ == CountsAt::host ? Extent{h.rows, h.num_records} : Extent{h.rows_allocated, h.records_allocated};
}

// ---- dispatch ----

std::shared_ptr<HandleData> NormalImpl::new_handle(Call& call, const ExpertIds& ids, const DispatchOptions& o,
                                                   std::exception_ptr& error) {
  std::shared_ptr<HandleData> h = make_handle(call, ids.num_tokens, error);
  h->layout = config.layout;
  h->alignment = config.expert_alignment;
  h->rank = rank();
  h->topk = config.topk;
  h->tokens = ids.num_tokens;
  h->max_tokens = config.max_tokens;
  h->hidden = config.hidden;
  h->reports_drops = o.overflow == Overflow::drop_and_report;
  h->counts.world = world();
  h->counts.experts = config.num_experts;
  h->map = ExpertRanges{config.num_experts, world()};
  h->rows = -1;
  return h;
}

void NormalImpl::choose_sizes(const DispatchOptions& o, HandleData& h) const {
  if (o.size == SizePolicy::exact) {
    h.rows_allocated = h.rows;
    h.records_allocated = h.num_records;
    return;
  }
  h.rows_allocated = static_rows(o);
  h.records_allocated = config.layout == Layout::rank_major ? h.rows_allocated : world() * config.max_tokens;
}

void NormalImpl::offer(Call& call, Dispatch& d) {
  d.place.signature = call.signature;
  d.place.dispatch.rows_allocated = d.output().rows;
  d.place.dispatch.records_allocated = d.records().records;
  // A rank without tokens has no weights to pass; ranks with tokens determine whether weights are sent.
  d.place.dispatch.sends_weights = d.weights != nullptr && d.handle->tokens > 0 ? 1 : 0;
  const Rows* const out = d.options.out;
  d.placed = out && !through_rings() && d.format.scale_bytes == 0 && d.output().bytes() > 0 &&
             call.context.heap.contains(out->data) && call.context.heap.contains(d.out() + d.output().bytes() - 1);
  try {
    if (d.error) std::rethrow_exception(d.error);
    if (out && out->rows < d.output().rows)
      throw Error(ErrorCode::pool_exhausted, "rank " + std::to_string(rank()) + ": DispatchOptions::out has room for " +
                                                 std::to_string(out->rows) + " rows: " + std::to_string(d.output().rows) +
                                                 " were sent here");
    take_output(call, d);
    if (d.placed) d.place.rows = static_cast<uint64_t>(d.out() - call.context.heap.base[rank()]);
    // If the counts are on the host, the rank's own rows need no special case.
    call.own_placed = out && !d.placed && !through_rings() && !spans_hosts() && counts_at_ == CountsAt::device &&
                      d.format.scale_bytes == 0 && config.layout == Layout::rank_major;
    if (call.own_placed)
      call.own_rows = reinterpret_cast<uint64_t>(d.out()) - reinterpret_cast<uint64_t>(call.context.heap.base[rank()]);
    // With several hosts, rows pass through proxies, which announce them only once, so they are copied afterwards.
    d.copied =
        out && !d.placed && !through_rings() && !spans_hosts() && config.layout == Layout::rank_major && d.output().bytes() > 0;
    const bool nothing_arrives = call.own_placed && world() == 1;
    d.place.dispatch.copies_out = d.copied && !nothing_arrives ? 1 : 0;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::pool_exhausted) throw;
    d.error = std::current_exception();
    d.place.status = static_cast<uint64_t>(error.code());
  }
}

SelectedSlots NormalImpl::select_slots(SlotSelector& given, ExpertIds& ids, const DispatchOptions& o) {
  SlotSelectorImpl& selector = SelectorAccess::impl(given);
  const SelectedSlots selected = selected_slots();
  selector.count_call();
  selector.run(ids, selected, o.stream, o.device_tokens, o.num_sms);
  ids.data = selected.slots;
  return selected;
}

Dispatched NormalImpl::dispatch(const ConstRows& x, const ExpertIds& ids, const float* weights, const DispatchOptions& given,
                                bool known_memory, SlotSelector* selector) {
  group_.check_usable("dispatch");
  const DispatchOptions o = resolved(given);
  check_ids(ids);
  check_selector(selector);
  const RowFormat format = check_rows(x, o, ids.num_tokens);
  const bool sized_by_counts = o.size == SizePolicy::exact, bounded = o.size == SizePolicy::capacity;
  check_out(o, format, sized_by_counts ? 0 : static_rows(o));
  const std::unique_ptr<Call> call = begin({Operation::dispatch,
                                            "DispatchOptions",
                                            o.stream,
                                            o.num_sms,
                                            known_memory,
                                            format.quantize ? ExtraWork::quantises : ExtraWork::moves,
                                            ids.num_tokens,
                                            {{"x.data", x.data, 16},
                                             {"x.scales", x.scales, 16},
                                             {"topk_ids.data", ids.data, ids.is_int64 ? size_t{8} : 4},
                                             {"topk_weights", weights, 4},
                                             {"DispatchOptions::out->data", o.out ? o.out->data : nullptr, 16},
                                             {"DispatchOptions::out->scales", o.out ? o.out->scales : nullptr, 16},
                                             {"DispatchOptions::device_tokens", o.device_tokens, 4}}});
  if (sized_by_counts && call->captured)
    throw Error(ErrorCode::unsupported,
                "DispatchOptions::size = exact waits for the counts and cannot be captured; use worst_case or capacity");
  ExpertIds slots = ids;
  const SelectedSlots selected = selector ? select_slots(*selector, slots, o) : SelectedSlots();
  const bool version_on_host = selected.version != nullptr && counts_at_ == CountsAt::host;
  call->signature = signature(
      Operation::dispatch,
      {int64_t{selector != nullptr}, version_on_host ? int64_t{compared_version(*selected.version)} : 0,
       static_cast<int64_t>(format.src_type), static_cast<int64_t>(format.src_scales()), static_cast<int64_t>(o.quantize),
       static_cast<int64_t>(o.padding), static_cast<int64_t>(o.size), static_cast<int64_t>(o.overflow)});
  Dispatch d(x, format, o, weights);
  d.fresh = new_handle(*call, ids, o, d.error);
  d.handle = d.fresh;
  const Routing routing{slots, weights,         bounded ? capacity_of(o) : kNoBound, bounded && o.overflow == Overflow::fail,
                        o,     selected.version};
  if (!sized_by_counts) {
    choose_sizes(o, *d.fresh);
    offer(*call, d);
  }
  plan(*call, routing, *d.fresh, sized_by_counts ? nullptr : &d.place);
  if (sized_by_counts) {
    if (!await_counts(*call, *d.fresh, d.error)) {
      end(*call);
      rethrow_agreed(d.error);
    }
    choose_sizes(o, *d.fresh);
    offer(*call, d);
  }
  return finish(*call, d);
}

Dispatched NormalImpl::redispatch(const ConstRows& x, const Handle& handle, const DispatchOptions& given, bool known_memory) {
  group_.check_usable("cached dispatch");
  const DispatchOptions o = resolved(given);
  check_handle(handle);
  const RowFormat format = check_rows(x, o, handle.data().tokens);
  check_out(o, format, handle.data().rows_allocated);
  const std::unique_ptr<Call> call = begin({Operation::cached_dispatch,
                                            "DispatchOptions",
                                            o.stream,
                                            o.num_sms,
                                            known_memory,
                                            format.quantize ? ExtraWork::quantises : ExtraWork::moves,
                                            x.rows,
                                            {{"x.data", x.data, 16},
                                             {"x.scales", x.scales, 16},
                                             {"DispatchOptions::out->data", o.out ? o.out->data : nullptr, 16},
                                             {"DispatchOptions::out->scales", o.out ? o.out->scales : nullptr, 16}}});
  Dispatch d(x, format, o);
  d.handle = use_handle(*call, handle);
  call->signature = signature(Operation::cached_dispatch,
                              {0, 0, static_cast<int64_t>(format.src_type), static_cast<int64_t>(format.src_scales()),
                               static_cast<int64_t>(o.quantize), static_cast<int64_t>(o.padding)},
                              d.handle.get());
  offer(*call, d);
  Dispatched out = finish(*call, d);
  out.handle = handle;
  return out;
}

Dispatched NormalImpl::finish(Call& call, Dispatch& d) {
  move(call, d, move_shape(d));
  if (d.options.out && !d.placed && !d.copied && !d.error) copy_out(call, d);
  end(call);
  if (d.error) rethrow_agreed(d.error);
  return deliver(d);
}

Dispatched NormalImpl::deliver(const Dispatch& d) const {
  const HandleData& h = *d.handle;
  const HandleArrays a = arrays_of(h);
  const OutputLayout layout = d.output();
  const auto span = [](const auto* data, int64_t size) { return std::span(data, data ? static_cast<size_t>(size) : 0); };
  const int64_t rows = h.rows_allocated, local_experts = h.map.count(h.rank);
  std::byte* const block = d.rows->data;
  Dispatched out;
  out.rows = h.rows;
  out.x = Rows{block,
               layout.rows,
               config.hidden,
               d.format.type,
               d.format.scale_bytes && block ? block + layout.scales_at() : nullptr,
               d.format.scales};
  if (const Rows* const given = d.options.out) {
    out.x.data = given->data;
    out.x.scales = d.format.scale_bytes ? given->scales : nullptr;
  } else {
    out.block = d.rows;
  }
  if (h.layout == Layout::rank_major) {
    out.topk_ids = span(a.record_route, rows * h.topk);
    out.topk_weights = span(a.record_weight, rows * h.topk);
    out.source_token = span(a.record_token, rows);
  } else {
    out.row_source = span(a.row_source, rows);
    out.row_weights = span(a.row_weight, rows);
    out.expert_first_row = span(a.first_row, local_experts);
  }
  out.tokens_per_expert = span(a.kept, local_experts);
  out.aligned_per_expert = span(a.aligned, local_experts);
  out.invalid_ids = span(a.invalid_ids, 1);
  if (h.reports_drops) {
    out.dropped = span(a.dropped, h.tokens * h.topk);
    out.dropped_per_source = span(a.local_dropped, local_experts * world());
  }
  out.handle = Handle(d.handle);
  return out;
}

// ---- combine ----

void NormalImpl::combine(const ConstRows& y, const Handle& handle, void* out, const CombineOptions& o, float* out_weights,
                         bool known_memory) {
  group_.check_usable("combine");
  check_combine(y, handle, out, o, out_weights);
  const std::unique_ptr<Call> call = begin({Operation::combine,
                                            "CombineOptions",
                                            o.stream,
                                            o.num_sms,
                                            known_memory,
                                            copies_first(y, handle.data()) ? ExtraWork::copies : ExtraWork::moves,
                                            handle.data().tokens,
                                            {{"y.data", y.data, 16},
                                             {"out", out, 16},
                                             {"CombineOptions::topk_weights", o.topk_weights, 4},
                                             {"CombineOptions::bias[0]", o.bias[0], 16},
                                             {"CombineOptions::bias[1]", o.bias[1], 16},
                                             {"out_weights", out_weights, 4}}});
  const std::shared_ptr<const HandleData> h = use_handle(*call, handle);
  // Detects whether only some ranks passed weights. If the counts are on the host, the check uses them, because a rank without
  // rows need not pass weights. Otherwise, the signature records whether this rank passed weights.
  const int64_t caller_weights = counts_at_ == CountsAt::device && o.topk_weights != nullptr ? 1 : 0;
  call->signature = signature(
      Operation::combine,
      {static_cast<int64_t>(y.dtype), static_cast<int64_t>(o.order), int64_t{o.apply_weights}, caller_weights}, h.get());
  const SumShape shape = sum_shape(y, *h, out, o, out_weights);
  std::vector<std::shared_ptr<OutputBlock>> held;
  std::exception_ptr error;
  const SumStaging staging = stage(*call, *h, shape, held, error);
  sum(*call, *h, shape, o, staging, error);
  end(*call);
  if (error) rethrow_agreed(error);
}

bool NormalImpl::copies_first(const ConstRows& y, const HandleData& h) const {
  if (through_rings() || h.layout != Layout::rank_major || alone(h) || group_.heap->view().contains(y.data)) return false;
  const int64_t row_bytes = static_cast<int64_t>(dtype_bytes(y.dtype, config.hidden));
  return group_.registration_of(y.data, static_cast<size_t>(extent_of(h).rows * row_bytes)) == nullptr;
}

SumStaging NormalImpl::stage(Call& call, const HandleData& h, const SumShape& shape,
                             std::vector<std::shared_ptr<OutputBlock>>& held, std::exception_ptr& error) {
  SumStaging s;
  s.place.signature = call.signature;
  const bool expert_major = h.layout == Layout::expert_major, by_route = expert_major && shape.order != CombineOrder::per_rank,
             per_route = by_route && !spans_hosts();
  s.place.pull.takes_weights = shape.out_weights ? 1 : 0;
  if (!per_route) s.place.pull.gives_weights = shape.weights_in ? 1 : 0;
  if (through_rings()) return s;  // rows are sent through the rings from any memory
  const Extent extent = extent_of(h);
  const bool reduces = expert_major && !by_route;
  const Registration* const registered =
      reduces ? nullptr : group_.registration_of(shape.y, static_cast<size_t>(extent.rows * shape.row_bytes));
  const bool in_place = !reduces && (call.context.heap.contains(shape.y) || registered || alone(h));
  const bool pushes = per_route && (!in_place || call.always_pushes);
  const int64_t staged_rows = reduces ? extent.records : in_place || per_route ? 0 : extent.rows;
  const auto take = [&](int64_t bytes, uint64_t& offset) {
    held.push_back(allocate(call, static_cast<size_t>(bytes), Content::staging));
    offset = held.back()->offset;
    return held.back()->data;
  };
  try {
    if (staged_rows > 0) {
      s.staged = take(staged_rows * shape.row_bytes, s.place.rows);
      s.own_in_place = !reduces;
      s.own_rows = reinterpret_cast<uint64_t>(shape.y) - reinterpret_cast<uint64_t>(call.context.heap.base[rank()]);
    } else if (registered) {
      s.place.rows = static_cast<uint64_t>(shape.y - registered->data);
      s.place.memory = 1 + static_cast<uint64_t>(registered->slot);
      s.distances = registered->distances;
    } else if (in_place) {
      s.place.rows = static_cast<uint64_t>(shape.y - call.context.heap.base[rank()]);
    }
    if (per_route && world() > 1 && h.tokens > 0) s.inbox = take(h.tokens * h.topk * shape.row_bytes, s.place.route.inbox);
    if (shape.weights_in && extent.records > 0)
      s.weights_staged = reinterpret_cast<float*>(take(extent.records * h.topk * 4, s.place.pull.weights));
    s.reduce_locally = reduces;
  } catch (const Error& e) {
    if (e.code() != ErrorCode::pool_exhausted) throw;
    error = std::current_exception();
    s.place.status = static_cast<uint64_t>(e.code());
    s.staged = nullptr;
    s.weights_staged = nullptr;
  }
  // Rows of routes that their owners can read in place are not moved, which takes one read instead of two reads and a write.
  if (per_route)
    s.place.route.in_place = pushes ? 0 : 1;
  else
    s.place.pull.ready = s.staged || s.weights_staged || s.reduce_locally ? 0 : 1;
  return s;
}

RowBuffer NormalImpl::allocate_rows(const Handle& handle, DType type, const RowStream& stream) {
  group_.check_usable("allocate_rows");
  check_handle(handle);
  check_combining_type("allocate_rows: dtype", type);
  const int64_t rows = extent_of(handle.data()).rows;
  std::shared_ptr<OutputBlock> block = allocate_for(stream, static_cast<size_t>(rows) * dtype_bytes(type, config.hidden));
  const Rows view{block->data, rows, config.hidden, type, nullptr, ScaleKind::none};
  return RowBuffer(std::move(block), view);
}

CombineOrder NormalImpl::effective_order(CombineOrder order) const {
  if (order != CombineOrder::per_host || spans_hosts()) return order;
  return config.layout == Layout::expert_major ? CombineOrder::per_route : CombineOrder::per_rank;
}

// ---- signatures of calls, and kernel parameters from the caller's arguments ----

void NormalImpl::set_site(uint32_t site) {
  if (site >= kSiteOfCall)
    throw Error(ErrorCode::invalid_argument,
                "site is " + std::to_string(site) + "; allowed: 0 to " + std::to_string(kSiteOfCall - 1));
  site_ = site;
}

uint64_t NormalImpl::signature(Operation op, std::initializer_list<int64_t> options, const HandleData* h) const {
  uint64_t hash = mix_hash(mix_hash(config_hash_, static_cast<uint64_t>(op)), site_);
  for (const int64_t v : options) hash = mix_hash(hash, static_cast<uint64_t>(v));
  const uint64_t signature = make_signature(hash, pack_options(op, options));
  return h && counts_at_ == CountsAt::host ? mix_signature(signature, h->identity) : signature;
}

MoveShape NormalImpl::move_shape(const Dispatch& d) const {
  const HandleData& h = *d.handle;
  MoveShape s;
  s.control = control_;
  s.x = static_cast<const std::byte*>(d.x.data);
  s.scales = static_cast<const std::byte*>(d.x.scales);
  s.weights = d.weights;
  s.hidden = config.hidden;
  s.src_row_bytes = d.format.src_row_bytes;
  s.row_bytes = d.format.row_bytes;
  s.scale_bytes = d.format.scale_bytes;
  s.src_type = d.format.src_type;
  s.quantize = d.format.quantize ? d.format.scales : ScaleKind::none;
  s.layout = h.layout;
  s.with_records = d.fresh != nullptr;
  s.map = h.map;
  s.topk = h.topk;
  return s;
}

SumShape NormalImpl::sum_shape(const ConstRows& y, const HandleData& h, void* out, const CombineOptions& o,
                               float* out_weights) const {
  SumShape s;
  s.control = control_;
  s.layout = h.layout;
  s.order = effective_order(o.order);
  s.type = y.dtype;
  s.topk = h.topk;
  s.map = h.map;
  s.hidden = config.hidden;
  s.row_bytes = static_cast<int64_t>(dtype_bytes(y.dtype, config.hidden));
  s.y = static_cast<const std::byte*>(y.data);
  s.weights_in = h.layout == Layout::rank_major ? o.topk_weights : nullptr;
  s.bias[0] = static_cast<const std::byte*>(o.bias[0]);
  s.bias[1] = static_cast<const std::byte*>(o.bias[1]);
  s.out = static_cast<std::byte*>(out);
  s.out_weights = out_weights;
  return s;
}

NormalImpl::SumWeights NormalImpl::weights_of(const HandleData& h, const CombineOptions& o, const float* of_records,
                                              const float* of_routes) {
  const bool apply = h.layout == Layout::expert_major && o.apply_weights, by_route = o.order != CombineOrder::per_rank;
  return {apply && !by_route ? of_records : nullptr, apply && by_route && !o.topk_weights ? of_routes : nullptr,
          apply && by_route ? o.topk_weights : nullptr};
}

}  // namespace switchyard::detail
