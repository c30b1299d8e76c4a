// SPDX-License-Identifier: Apache-2.0
// Dispatch and combine on a GPU: memory, kernel parameters, launches, counts.
#include <algorithm>
#include <string>

#include "exchange/normal/gpu.hpp"
#include "switchyard/status.hpp"

namespace switchyard::detail {

// ---- dispatch ----

const CudaHandle& CudaNormal::tables_of(const HandleData& h) { return static_cast<const CudaHandle&>(*h.device); }

std::shared_ptr<HandleData> CudaNormal::make_handle(Call& given, int64_t tokens, std::exception_ptr& error) {
  const auto& call = static_cast<const CudaCall&>(given);
  auto h = std::make_shared<HandleData>();
  auto device = std::make_shared<CudaHandle>();
  const TablesShape shape = shape_of(tokens);
  try {
    device->tables_block = take(static_cast<size_t>(carve_tables(nullptr, shape).bytes), Content::handle, call.at);
  } catch (const Error& e) {
    if (e.code() != ErrorCode::pool_exhausted) throw;
    error = std::current_exception();
    device->tables_block = spare_tables_;
  }
  device->tables = carve_tables(device->tables_block->data, shape);
  device->gpu = gpu_.token();
  device->group = &group_;
  device->made = call.at;
  if (hosts_) {
    device->hosts = hosts_->take_tables();
    h->hosts = std::make_shared<HostTables>();  // lets calls identify the group that made it
    for (int r = 0; r < world(); ++r) h->hosts->host_of.push_back(group_.host_map().host_of(r));
  }
  h->device = std::move(device);
  return h;
}

void CudaNormal::take_output(Call& given, Dispatch& d) {
  auto& call = static_cast<CudaCall&>(given);
  // Rows that are copied out are used only by the call, so their memory is free once the call ends.
  const bool copied_out = d.options.out && !d.placed;
  d.rows = take(static_cast<size_t>(d.output_bytes()), copied_out ? Content::staging : Content::rows, call.at);
  d.place.rows = d.rows->offset;
  if (!d.fresh) return;
  const bool expert_major = config.layout == Layout::expert_major;
  const auto carve = [&](std::byte* at) { return carve_received(at, d.records(), d.fresh->rows_allocated, expert_major); };
  call.received = take(static_cast<size_t>(carve(nullptr).bytes), Content::handle, call.at);
  call.carved = carve(call.received->data);
  d.place.dispatch.records = call.received->offset;
}

void CudaNormal::copy_out(Call& given, const Dispatch& d) {
  const auto& call = static_cast<const CudaCall&>(given);
  const OutputLayout layout = d.output();
  if (layout.bytes() == 0) return;
  CopyOut copy;
  copy.header = tables_of(*d.handle).tables.header;
  copy.moved = call.context.moved;
  copy.rows = d.rows->data;
  copy.scales = d.rows->data + layout.scales_at();
  copy.to_rows = d.out();
  copy.to_scales = static_cast<std::byte*>(d.options.out->scales);
  copy.row_bytes = layout.row_bytes;
  copy.scale_bytes = layout.scale_bytes;
  const int blocks = call.sms_named ? call.launch.blocks : std::max(call.launch.blocks, kDefaultCopyingSms);
  launch_copy_out(copy, std::min(blocks, gpu_.max_blocks()), call.stream());
}

PlanParams CudaNormal::plan_params(const CudaCall& call, const Routing& routing, const Tables& tables,
                                   const Placement* offer) const {
  const ExpertIds& ids = routing.ids;
  const bool drops = routing.capacity != kNoBound && !routing.fail_on_overflow;
  PlanParams p;
  p.call = call.context;
  p.words = call.words;
  p.control = control_;
  p.state = state();
  p.totals = state_.as<int32_t>(kObjectStateBytes);
  p.block_counts = p.totals + world() + config.num_experts;
  p.ids = ids.data;
  p.ids64 = ids.is_int64;
  p.tokens = ids.num_tokens;
  p.device_tokens = routing.options.device_tokens;
  p.weights = routing.weights;
  p.topk = config.topk;
  p.map = ExpertRanges{config.num_experts, world()};
  p.layout = config.layout;
  p.alignment = config.expert_alignment;
  p.capacity = routing.capacity;
  p.fail_on_overflow = routing.fail_on_overflow;
  p.static_drops = config.layout == Layout::rank_major && !drops;
  p.signature = call.signature;
  p.map_version = routing.map_version;
  p.object = object();
  p.offers_place = offer != nullptr;
  if (offer) p.place = *offer;
  p.own_rows = call.own_placed ? call.own_rows : p.place.rows;
  p.tables = tables;
  p.soft = gpu_.device_soft_fault();
  return p;
}

void CudaNormal::plan(Call& given, const Routing& routing, HandleData& h, const Placement* offer) {
  auto& call = static_cast<CudaCall&>(given);
  if (hosts_) return plan_over_hosts(call, routing, h);
  call.plan = plan_params(call, routing, tables_of(h).tables, offer);
  launch_plan(call.plan, plan_blocks(routing.ids.num_tokens, gpu_.max_blocks()), call.stream());
}

bool CudaNormal::await_counts(Call& given, HandleData& h, std::exception_ptr& error) {
  if (hosts_) {  // the plan has waited for the counts
    const TablesHeader& counts = static_cast<const CudaCall&>(given).counts;
    h.rows = counts.rows;
    h.tokens = counts.tokens;
    h.num_records = counts.num_records;
    return true;
  }
  check_cuda(gpu::wait_for_stream(static_cast<const CudaCall&>(given).stream()), "wait for the counts");
  group_.check_alive("dispatch");
  TablesHeader header{};
  check_cuda(gpu::copy_to_host(&header, tables_of(h).tables.header, sizeof header, gpu_.copy_stream()), "copy of the counts");
  check_cuda(gpu::wait_for_stream(gpu_.copy_stream()), "copy of the counts");
  h.rows = header.rows;
  h.tokens = header.tokens;
  h.num_records = header.num_records;
  if (header.left_out == 0) return true;
  try {
    gpu_.raise_soft_fault("dispatch");
    throw Error(static_cast<ErrorCode>(header.status), "dispatch: left out, because a call before it moved nothing");
  } catch (const Error&) {
    error = std::current_exception();
  }
  return false;
}

MoveTables CudaNormal::move_tables(const CudaCall& call, const Dispatch& d) const {
  const CudaHandle& handle = tables_of(*d.handle);
  const Tables& tables = handle.tables;
  const bool expert_major = config.layout == Layout::expert_major;
  MoveTables t;
  t.sends = SendTable{tables.sends, nullptr, tables.stride};
  t.ids = tables.ids;
  t.route_row = tables.route_row;
  t.record_begin = tables.header->record_begin;
  if (!d.fresh) t.record_route = reinterpret_cast<const int32_t*>(handle.received.records + handle.received.layout.route_at());
  t.chunk_records = tables.header->chunk_records;
  if (expert_major && d.options.padding == Padding::zero) {
    t.padding = tables.padding;
    t.num_padding = d.handle->map.count(rank());
  }
  t.row_source = call.carved.row_source;
  t.row_weight = call.carved.row_weight;
  return t;
}

MoveWork CudaNormal::move_work(const MoveShape& shape, const CudaCall& call) const {
  MoveWork w;
  const int blocks = call.launch.blocks;
  if (call.send_blocks > 0)
    w.send_blocks = call.send_blocks;
  else if (shape.layout == Layout::expert_major && blocks >= kMinSmsToSplitRoles)
    w.send_blocks = shape.quantize == ScaleKind::none ? std::min(blocks / 2, kLinkSms) : blocks / 2;
  w.sends_done = state()->sends_done;
  w.sends_next = &state()->sends_next;
  w.places_next = &state()->places_next;
  return w;
}

CudaDispatchParams CudaNormal::move_params(const CudaCall& call, const Dispatch& d, const MoveShape& shape,
                                           bool offers_place) const {
  const Tables& tables = tables_of(*d.handle).tables;
  CudaDispatchParams p;
  p.d = DispatchParams{{call.context}, shape, move_tables(call, d), d.copies(call), move_work(shape, call)};
  p.words = call.words;
  p.state = state();
  p.header = tables.header;
  p.offers_place = offers_place;
  p.place = d.place;
  p.own_rows = call.own_placed ? call.own_rows : p.place.rows;
  p.soft = d.error ? nullptr : gpu_.device_soft_fault();
  p.rest.rows_allocated = d.handle->rows_allocated;
  if (!d.fresh || d.error) return p;
  p.rest.received = call.carved;
  p.rest.padding = tables.padding;
  p.rest.num_ranges = shape.layout == Layout::expert_major ? shape.map.count(rank()) : 0;
  return p;
}

void CudaNormal::move(Call& given, Dispatch& d, const MoveShape& shape) {
  auto& call = static_cast<CudaCall&>(given);
  if (!through_rings() && !d.format.quantize && shape.layout == Layout::rank_major)
    call.launch.blocks = std::min(call.launch.blocks, kMaxSendSms);
  if (d.place.dispatch.copies_out != 0 && !call.sms_named) {  // these blocks send; the others copy rows as they arrive
    const int send = call.launch.blocks;
    call.launch.blocks = std::min(std::max(kDefaultCopyingSms, send + kMinSmsToSplitRoles), gpu_.max_blocks());
    if (call.launch.blocks > send) call.send_blocks = send;
  }
  const bool offered = d.fresh && call.plan.offers_place;  // published with the plan
  const CudaDispatchParams p = move_params(call, d, shape, !offered);
  if (hosts_) {
    move_over_hosts(call, d, p);
  } else if (through_rings()) {
    RingParts ring = ring_parts();
    ring.mine = {d.rows ? d.rows->data : nullptr, d.output(), call.carved.records, call.carved.layout};
    launch_ring_dispatch(p, ring, offered, call.launch.blocks, gpu_.limits(), call.stream());
  } else {
    launch_dispatch(p, offered, call.launch, gpu_.limits(), call.stream());
  }
  if (d.fresh && !d.error && shape.layout == Layout::rank_major && !call.plan.static_drops)
    launch_count_kept(call.plan, call.carved, call.stream());
  if (d.fresh) {
    auto& handle = static_cast<CudaHandle&>(*d.fresh->device);
    handle.received_block = call.received;
    handle.received = call.carved;
    handle.with_weights = d.weights != nullptr || call.plan.tokens == 0;
    handle.shape = *d.fresh;
    handle.shape.device.reset();
    call.made = &handle;
  }
  if (d.error) return;
  const CudaHandle& handle = tables_of(*d.handle);
  static_cast<CudaBlock&>(*d.rows).companions = {handle.tables_block, handle.received_block};
}

// ---- combine ----

SumWork CudaNormal::sum_work(const SumShape& shape, int blocks) const {
  SumWork w;
  const bool per_route = shape.layout == Layout::expert_major && shape.order == CombineOrder::per_route;
  const int push = kPushSms * (world() - 1) / world();
  if (blocks >= kMinSmsToSplitRoles) {
    w.sum_blocks = per_route ? std::min(blocks * 2 / 5, std::max(push, 1)) : blocks * 3 / 5;
    if (shape.layout == Layout::rank_major) w.sum_blocks = blocks / 2;  // if they copy
  }
  w.sums_done = state()->sums_done;
  w.pulls_done = &state()->pulls_done;
  w.sums_next = &state()->sums_next;
  w.pulls_next = &state()->pulls_next;
  return w;
}

CudaCombineParams CudaNormal::sum_params(const CudaCall& call, const HandleData& h, const SumShape& shape,
                                         const CombineOptions& o, const SumStaging& staging,
                                         const std::exception_ptr& error) const {
  const CudaHandle& handle = tables_of(h);
  const Tables& tables = handle.tables;
  const RecordLayout& layout = handle.received.layout;
  const auto record = [&](int64_t at) { return handle.received.records + at; };
  SumTables t;
  t.record_begin = tables.header->record_begin;
  t.record_token = reinterpret_cast<const int32_t*>(record(layout.token_at()));
  t.tokens_of = tables.header->tokens_of;
  t.record_route = reinterpret_cast<const int32_t*>(record(layout.route_at()));
  t.sends = SendTable{tables.sends, nullptr, tables.stride};
  t.ids = tables.ids;
  t.route_row = tables.route_row;
  const SumWeights weights = weights_of(h, o, reinterpret_cast<const float*>(record(layout.weight_at())), tables.weights);
  CudaCombineParams p;
  p.c = CombineParams{{call.context}, shape, t, staging, sum_work(shape, call.launch.blocks)};
  p.words = call.words;
  p.state = state();
  p.header = tables.header;
  p.soft = error ? nullptr : gpu_.device_soft_fault();
  p.weights_of_records = weights.of_records;
  p.weights_of_routes = weights.of_routes;
  p.caller_weights = weights.given;
  return p;
}

void CudaNormal::sum(Call& given, const HandleData& h, const SumShape& shape, const CombineOptions& o,
                     const SumStaging& staging, const std::exception_ptr& error) {
  auto& call = static_cast<CudaCall&>(given);
  const CudaCombineParams p = sum_params(call, h, shape, o, staging, error);
  if (hosts_)
    sum_over_hosts(call, h, p, o.apply_weights && h.layout == Layout::expert_major, error);
  else if (through_rings())
    launch_ring_combine(p, ring_parts(), call.launch.blocks, gpu_.limits(), call.stream());
  else
    launch_combine(p, call.launch, call.stream());
}

// ---- arrays of a handle ----

NormalImpl::HandleArrays CudaNormal::arrays_of(const HandleData& h) const {
  const CudaHandle& handle = tables_of(h);
  const Tables& t = handle.tables;
  const Received& r = handle.received;
  HandleArrays a;
  a.record_route = reinterpret_cast<const int32_t*>(r.records + r.layout.route_at());
  a.record_token = reinterpret_cast<const int32_t*>(r.records + r.layout.token_at());
  if (handle.with_weights) {
    a.record_weight = reinterpret_cast<const float*>(r.records + r.layout.weight_at());
    a.row_weight = r.row_weight;
  }
  a.row_source = r.row_source;
  a.first_row = t.first_row;
  a.kept = t.kept;
  a.aligned = t.aligned;
  a.invalid_ids = &t.header->invalid_ids;
  a.dropped = t.dropped;
  a.local_dropped = t.local_dropped;
  return a;
}

}  // namespace switchyard::detail
