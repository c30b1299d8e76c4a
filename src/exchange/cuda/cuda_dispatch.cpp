// SPDX-License-Identifier: Apache-2.0
// Dispatch on a GPU: plan kernel, sizes, blocks, move kernel.
#include <algorithm>
#include <limits>
#include <string>

#include "exchange/cuda/cuda_normal.hpp"
#include "switchyard/status.hpp"

namespace switchyard::detail {

namespace {

constexpr int64_t kNoBound = std::numeric_limits<int64_t>::max();
constexpr int64_t kTokensPerPlanBlock = 64;
constexpr int kMaxPlanBlocks = 64;  // each block sums the counts of those before it

DispatchOptions resolved(DispatchOptions o) {
  if (o.size == SizePolicy::automatic) o.size = SizePolicy::worst_case;
  return o;
}

}  // namespace

const CudaHandle& CudaNormal::tables_of(const HandleData& h) { return static_cast<const CudaHandle&>(*h.device); }

std::shared_ptr<HandleData> CudaNormal::new_handle(int64_t tokens, const Call& call, std::exception_ptr& error) {
  auto h = std::make_shared<HandleData>();
  h->layout = config.layout;
  h->alignment = config.expert_alignment;
  h->rank = rank();
  h->topk = config.topk;
  h->tokens = tokens;
  h->max_tokens = config.max_tokens;
  h->hidden = config.hidden;
  h->counts.world = world();
  h->counts.experts = config.num_experts;
  h->map = ExpertMap{config.num_experts, world()};
  h->rows = -1;
  auto device = std::make_shared<CudaHandle>();
  const TablesShape shape = shape_of(tokens);
  try {
    device->tables_block = allocate(static_cast<size_t>(carve_tables(nullptr, shape).bytes), Content::handle, call.at);
  } catch (const Error& e) {
    if (e.code() != ErrorCode::pool_exhausted) throw;
    error = std::current_exception();
    device->tables_block = spare_tables_;
  }
  device->tables = carve_tables(device->tables_block->data, shape);
  device->gpu = gpu_.token();
  device->group = &group_;
  device->made = call.at;
  h->device = device;
  return h;
}

PlanParams CudaNormal::plan_params(const Call& call, const CudaHandle& handle, const ExpertIds& ids, const float* weights,
                                   const DispatchOptions& o, uint64_t sig) const {
  PlanParams p;
  p.call = call.context;
  p.words = call.words;
  p.control = control_;
  p.state = state();
  p.totals = state_.as<int32_t>(kObjectStateBytes);
  p.block_counts = p.totals + world() + config.num_experts;
  p.ids = ids.data;
  p.ids64 = ids.is_int64;
  p.tokens = ids.tokens;
  p.device_tokens = o.device_tokens;
  p.weights = weights;
  p.topk = config.topk;
  p.map = ExpertMap{config.num_experts, world()};
  p.layout = config.layout;
  p.alignment = config.expert_alignment;
  const bool bounded = o.size == SizePolicy::capacity;
  p.capacity = bounded ? capacity_of(o) : kNoBound;
  p.fail_on_overflow = bounded && o.overflow == Overflow::fail;
  p.static_drops = config.layout == Layout::rank_major && !(bounded && o.overflow == Overflow::drop_and_report);
  p.signature = sig;
  p.object = object();
  p.tables = handle.tables;
  p.soft = gpu_.device_soft_fault();
  return p;
}

bool CudaNormal::read_counts(const Call& call, HandleData& h, std::exception_ptr& error) {
  check_cuda(gpu::wait_for_stream(call.stream()), "wait for the counts");
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

void CudaNormal::choose_sizes(HandleData& h, const DispatchOptions& o) const {
  if (o.size == SizePolicy::exact) {
    h.rows_allocated = h.rows;
    h.records_allocated = h.num_records;
    return;
  }
  h.rows_allocated = o.size == SizePolicy::capacity ? capacity_of(o) : worst_case_rows(config, world());
  h.records_allocated = config.layout == Layout::rank_major ? h.rows_allocated : world() * config.max_tokens;
}

CudaNormal::Outputs CudaNormal::offer_blocks(const Call& call, const RowFormat& format, const HandleData& h, bool fresh,
                                             uint64_t sig) {
  Outputs out;
  const OutputLayout layout{h.rows_allocated, format.row_bytes, format.scale_bytes};
  const RecordLayout records{fresh ? h.records_allocated : 0, config.topk};
  const bool expert_major = config.layout == Layout::expert_major;
  out.place.rows_allocated = layout.rows;
  out.place.records_allocated = records.records;
  out.place.signature = sig;
  try {
    out.rows = allocate(static_cast<size_t>(layout.bytes()), Content::rows, call.at);
    out.place.rows = out.rows->offset;
    if (fresh) {
      out.received = allocate(static_cast<size_t>(carve_received(nullptr, records, h.rows_allocated, expert_major).bytes),
                              Content::handle, call.at);
      out.carved = carve_received(out.received->data, records, h.rows_allocated, expert_major);
      out.place.records = out.received->offset;
    }
  } catch (const Error& e) {
    if (e.code() != ErrorCode::pool_exhausted) throw;
    out.place.status = static_cast<uint64_t>(e.code());
    out.error = std::current_exception();
  }
  return out;
}

CudaDispatchParams CudaNormal::move_params(const Call& call, const HandleData& h, const ConstRows& x, const RowFormat& format,
                                           const DispatchOptions& o, const Outputs& outputs, uint64_t sig, bool fresh) const {
  const CudaHandle& handle = tables_of(h);
  const Tables& t = handle.tables;
  const bool expert_major = config.layout == Layout::expert_major;
  CudaDispatchParams p;
  DispatchParams& d = p.d;
  d.call = call.context;
  d.control = control_;
  fill_move(d, x, format, h);
  d.sends = SendTable{t.sends, nullptr, t.stride};
  d.with_records = fresh;
  d.ids = t.ids;
  d.route_row = t.route_row;
  d.record_begin = t.header->record_begin;
  if (!fresh) d.record_route = reinterpret_cast<const int32_t*>(handle.received.records + handle.received.layout.route_at());
  if (expert_major && o.padding == Padding::zero) {
    d.padding = t.padding;
    d.num_padding = h.map.count(rank());
  }
  if (expert_major) {
    d.chunk_records = t.header->chunk_records;
    const int half = call.launch.blocks / 2;
    if (call.launch.blocks >= kApartFrom) d.send_blocks = d.quantize == ScaleKind::none ? std::min(half, kLinkSms) : half;
  }
  d.sends_done = state()->sends_done;
  d.sends_next = &state()->sends_next;
  d.places_next = &state()->places_next;
  p.words = call.words;
  p.state = state();
  p.header = t.header;
  p.place = outputs.place;
  p.signature = sig;
  p.soft = outputs.error ? nullptr : gpu_.device_soft_fault();
  p.rows_allocated = h.rows_allocated;
  if (fresh && !outputs.error) {
    p.received = outputs.carved;
    d.row_source = outputs.carved.row_source;
    d.row_weight = outputs.carved.row_weight;
    p.padding = t.padding;
    p.num_ranges = expert_major ? h.map.count(rank()) : 0;
  }
  return p;
}

Dispatched CudaNormal::dispatch(const ConstRows& x, const ExpertIds& ids, const float* weights, const DispatchOptions& given) {
  group_.check_usable("dispatch");
  const DispatchOptions o = resolved(given);
  const DeviceGuard guard(gpu_.device());
  check_ids(ids);
  const RowFormat format = check_rows(x, o, ids.tokens);
  gpu_.check_sms("DispatchOptions", o.num_sms);
  gpu_.check_pointer("x.data", x.data, 16);
  gpu_.check_pointer("x.scales", x.scales, 16);
  gpu_.check_pointer("ids.data", ids.data, ids.is_int64 ? 8 : 4);
  gpu_.check_pointer("weights", weights, 4);
  gpu_.check_pointer("DispatchOptions::device_tokens", o.device_tokens, 4);
  Call call(*this, o.stream, o.num_sms, Operation::dispatch);
  spare_sms(call, format.quantize);
  if (o.size == SizePolicy::exact && call.capturing())
    throw Error(ErrorCode::unsupported,
                "DispatchOptions::size = exact waits for the counts and cannot be captured; use worst_case or capacity");
  const uint64_t sig = signature(Operation::dispatch, {static_cast<int64_t>(format.src_type), static_cast<int64_t>(format.type),
                                                       static_cast<int64_t>(format.scales), static_cast<int64_t>(o.size),
                                                       static_cast<int64_t>(o.overflow), static_cast<int64_t>(o.padding)});
  use({x.data, x.scales, ids.data, weights, o.device_tokens}, call);
  std::shared_ptr<HandleData> h;
  Outputs outputs;
  enqueue_dispatch(call, x, ids, weights, o, format, sig, h, outputs);
  if (outputs.error) rethrow_agreed(outputs.error);
  auto& device = static_cast<CudaHandle&>(*h->device);
  device.with_weights = weights != nullptr || ids.tokens == 0;
  device.shape = *h;
  device.shape.device.reset();
  return deliver(h, outputs, format);
}

void CudaNormal::enqueue_dispatch(Call& call, const ConstRows& x, const ExpertIds& ids, const float* weights,
                                  const DispatchOptions& o, const RowFormat& format, uint64_t sig,
                                  std::shared_ptr<HandleData>& h, Outputs& outputs) {
  const bool exact = o.size == SizePolicy::exact;
  std::exception_ptr error;
  h = new_handle(ids.tokens, call, error);
  auto& device = static_cast<CudaHandle&>(*h->device);
  PlanParams plan = plan_params(call, device, ids, weights, o, sig);
  const auto offer = [&] {
    choose_sizes(*h, o);
    outputs = offer_blocks(call, format, *h, true, sig);
    if (error && !outputs.error) {
      outputs.error = error;
      outputs.place.status = static_cast<uint64_t>(ErrorCode::pool_exhausted);
    }
  };
  if (!exact) {
    offer();
    plan.offers_place = true;
    plan.place = outputs.place;
  }
  const auto blocks_for = [&](int64_t tokens) { return static_cast<int>((ids.tokens + tokens - 1) / tokens); };
  const int wanted = std::max(std::min(blocks_for(kTokensPerPlanBlock), kMaxPlanBlocks), blocks_for(kMaxTokensPerPlanBlock));
  launch_plan(plan, std::clamp(wanted, 1, gpu_.max_blocks()), call.stream());
  if (exact) {
    if (!read_counts(call, *h, outputs.error)) return end(call);
    offer();
  }
  device.received_block = outputs.received;
  device.received = outputs.carved;
  CudaDispatchParams p = move_params(call, *h, x, format, o, outputs, sig, true);
  p.d.weights = weights;
  p.offers_place = exact;
  launch_move(call, p, outputs, !exact);
  if (!plan.static_drops && config.layout == Layout::rank_major && !outputs.error)
    launch_count_kept(plan, outputs.carved, call.stream());
  end(call);
  if (!call.capturing()) device.until = order_->last();
}

Dispatched CudaNormal::redispatch(const ConstRows& x, const Handle& handle, const DispatchOptions& given) {
  group_.check_usable("cached dispatch");
  const DispatchOptions o = resolved(given);
  const DeviceGuard guard(gpu_.device());
  check_handle(handle);
  const RowFormat format = check_rows(x, o, handle.data().tokens);
  gpu_.check_sms("DispatchOptions", o.num_sms);
  gpu_.check_pointer("x.data", x.data, 16);
  gpu_.check_pointer("x.scales", x.scales, 16);
  Call call(*this, o.stream, o.num_sms, Operation::cached_dispatch);
  spare_sms(call, format.quantize);
  const uint64_t sig =
      signature(Operation::cached_dispatch, {static_cast<int64_t>(format.src_type), static_cast<int64_t>(format.type),
                                             static_cast<int64_t>(format.scales), static_cast<int64_t>(o.padding)});
  use({x.data, x.scales}, call);
  const std::shared_ptr<const HandleData> h = device_data(handle, call);
  const Outputs outputs = offer_blocks(call, format, *h, false, sig);
  CudaDispatchParams p = move_params(call, *h, x, format, o, outputs, sig, false);
  p.offers_place = true;
  launch_move(call, p, outputs, false);
  end(call);
  if (outputs.error) rethrow_agreed(outputs.error);
  Dispatched out = deliver(h, outputs, format);
  out.handle = handle;
  return out;
}

void CudaNormal::spare_sms(Call& call, bool quantize) const {
  if (through_rings() || quantize || config.layout != Layout::rank_major) return;
  call.launch.blocks = std::min(call.launch.blocks, kMostLinkSms);
}

void CudaNormal::launch_move(const Call& call, const CudaDispatchParams& p, const Outputs& outputs, bool after_plan) const {
  if (!through_rings()) return launch_dispatch(p, after_plan, call.launch, gpu_.limits(), call.stream());
  RingParts ring = ring_parts();
  ring.mine = {outputs.rows ? outputs.rows->data : nullptr,
               {p.rows_allocated, p.d.row_bytes, p.d.scale_bytes},
               outputs.carved.records,
               outputs.carved.layout};
  launch_ring_dispatch(p, ring, after_plan, call.launch.blocks, gpu_.limits(), call.stream());
}

Dispatched CudaNormal::deliver(const std::shared_ptr<const HandleData>& h, const Outputs& outputs,
                               const RowFormat& format) const {
  const CudaHandle& handle = tables_of(*h);
  const Received& r = handle.received;
  const auto rows = static_cast<size_t>(h->rows_allocated), topk = static_cast<size_t>(config.topk),
             here = static_cast<size_t>(h->map.count(rank()));
  Dispatched out;
  out.rows = h->rows;
  const OutputLayout layout{h->rows_allocated, format.row_bytes, format.scale_bytes};
  std::byte* scales = format.scale_bytes && outputs.rows->data ? outputs.rows->data + layout.scales_at() : nullptr;
  out.x = Rows{outputs.rows->data, layout.rows, config.hidden, format.type, scales, format.scales};
  if (h->layout == Layout::rank_major) {
    out.topk_ids = {reinterpret_cast<const int32_t*>(r.records + r.layout.route_at()), rows * topk};
    if (handle.with_weights) out.topk_weights = {reinterpret_cast<const float*>(r.records + r.layout.weight_at()), rows * topk};
    out.source_token = {reinterpret_cast<const int32_t*>(r.records + r.layout.token_at()), rows};
  } else {
    out.row_source = {r.row_source, rows};
    if (handle.with_weights) out.row_weights = {r.row_weight, rows};
    out.expert_first_row = {handle.tables.first_row, here};
  }
  out.tokens_per_expert = {handle.tables.kept, here};
  out.aligned_per_expert = {handle.tables.aligned, here};
  out.dropped = {handle.tables.dropped, static_cast<size_t>(h->tokens) * topk};
  out.dropped_per_source = {handle.tables.dropped_here, here * static_cast<size_t>(world())};
  outputs.rows->companions = {handle.tables_block, handle.received_block};
  out.block = outputs.rows;
  out.handle = Handle(h);
  return out;
}

}  // namespace switchyard::detail
