// SPDX-License-Identifier: Apache-2.0
// Combine on a GPU: where the outputs lie, what is staged, launch.
#include <algorithm>
#include <string>

#include "exchange/cuda/cuda_normal.hpp"
#include "switchyard/status.hpp"

namespace switchyard::detail {

void CudaNormal::combine(const ConstRows& y, const Handle& handle, void* out, const CombineOptions& o, float* out_weights) {
  group_.check_usable("combine");
  const DeviceGuard guard(gpu_.device());
  check_handle(handle);
  const HandleData& h = handle.data();
  check_combine(y, handle, h.rows >= 0 ? h.rows : h.rows_allocated, out, o, out_weights);
  gpu_.check_sms("CombineOptions", o.num_sms);
  gpu_.check_pointer("y.data", y.data, 16);
  gpu_.check_pointer("out", out, 16);
  gpu_.check_pointer("CombineOptions::weights", o.weights, 4);
  gpu_.check_pointer("CombineOptions::bias[0]", o.bias[0], 16);
  gpu_.check_pointer("CombineOptions::bias[1]", o.bias[1], 16);
  gpu_.check_pointer("out_weights", out_weights, 4);
  Call call(*this, o.stream, o.num_sms, Operation::combine);
  std::exception_ptr error;
  enqueue_combine(call, y, handle, out, o, out_weights, error);
  if (error) rethrow_agreed(error);
}

void CudaNormal::enqueue_combine(Call& call, const ConstRows& y, const Handle& handle, void* out, const CombineOptions& o,
                                 float* out_weights, std::exception_ptr& error) {
  const std::shared_ptr<const HandleData> data = device_data(handle, call);
  const HandleData& h = *data;
  const CudaHandle& device = tables_of(h);
  const Tables& t = device.tables;
  const bool expert_major = h.layout == Layout::expert_major;
  use({y.data, out, o.weights, o.bias[0], o.bias[1], out_weights}, call);

  CudaCombineParams p;
  CombineParams& c = p.c;
  c.call = call.context;
  c.control = control_;
  c.record_route = reinterpret_cast<const int32_t*>(device.received.records + device.received.layout.route_at());
  if (expert_major && o.apply_weights && o.order == CombineOrder::per_rank)
    c.record_weight = reinterpret_cast<const float*>(device.received.records + device.received.layout.weight_at());
  c.record_token = reinterpret_cast<const int32_t*>(device.received.records + device.received.layout.token_at());
  fill_sum(c, y, h, out, o, out_weights);
  c.sends = SendTable{t.sends, nullptr, t.stride};
  c.ids = t.ids;
  c.route_row = t.route_row;
  if (expert_major && o.apply_weights && o.order == CombineOrder::per_route) {
    c.weights = o.weights ? o.weights : t.weights;
    if (!o.weights) p.handle_weights = t.weights;
  }
  c.outputs_done = &state()->outputs_done;
  c.sums_done = state()->sums_done;
  c.pulls_done = &state()->pulls_done;
  c.sums_next = &state()->sums_next;
  c.pulls_next = &state()->pulls_next;
  c.place.signature = signature(Operation::combine, {static_cast<int64_t>(y.dtype), static_cast<int64_t>(o.order),
                                                     int64_t{o.apply_weights}, int64_t{o.weights != nullptr}});
  p.words = call.words;
  p.state = state();
  p.header = t.header;
  p.soft = gpu_.device_soft_fault();

  if (through_rings()) {
    launch_ring_combine(p, ring_parts(), call.launch.blocks, gpu_.limits(), call.stream());
    return end(call);
  }
  const std::vector<std::shared_ptr<CudaBlock>> staging = stage_outputs(call, h, o.order, p, error);
  const bool per_route = expert_major && o.order == CombineOrder::per_route;
  const int blocks = call.launch.blocks;
  const int push = kPushSms * (world() - 1) / world();
  if (blocks >= kApartFrom) c.sum_blocks = per_route ? std::min(blocks * 2 / 5, std::max(push, 1)) : blocks * 3 / 5;
  launch_combine(p, call.launch, call.stream());
  end(call);
}

std::vector<std::shared_ptr<CudaBlock>> CudaNormal::stage_outputs(const Call& call, const HandleData& h, CombineOrder order,
                                                                  CudaCombineParams& p, std::exception_ptr& error) {
  CombineParams& c = p.c;
  const bool expert_major = h.layout == Layout::expert_major, per_route = expert_major && order == CombineOrder::per_route;
  c.reduce_here = expert_major && !per_route;
  const Registration* registered =
      c.reduce_here ? nullptr : group_.registration_of(c.y, static_cast<size_t>(h.rows_allocated * c.row_bytes));
  const bool in_place = !c.reduce_here && (call.context.heap.contains(c.y) || registered);
  const int64_t staged_rows = c.reduce_here ? h.records_allocated : in_place || per_route ? 0 : h.rows_allocated;
  const int64_t inbox_rows = per_route && c.call.world() > 1 ? h.tokens * h.topk : 0;
  const bool pushes = per_route && (!in_place || call.launch.blocks >= kPushFrom);
  std::shared_ptr<CudaBlock> rows, weights, inbox;
  try {
    if (staged_rows > 0) {
      rows = allocate(static_cast<size_t>(staged_rows * c.row_bytes), Content::staging, call.at);
      c.staged = rows->data;
      c.place.rows = rows->offset;
    } else if (registered) {
      c.place.rows = static_cast<uint64_t>(c.y - registered->data);
      c.place.memory = 1 + static_cast<uint64_t>(registered->slot);
      c.distances = registered->distances;
    } else if (in_place) {
      c.place.rows = static_cast<uint64_t>(c.y - call.context.heap.base[rank()]);
    }
    if (inbox_rows > 0) {
      inbox = allocate(static_cast<size_t>(inbox_rows * c.row_bytes), Content::staging, call.at);
      c.inbox = inbox->data;
      c.place.weights = inbox->offset;
    }
    if (c.weights_in && h.records_allocated > 0) {
      weights = allocate(static_cast<size_t>(h.records_allocated * c.topk * 4), Content::staging, call.at);
      c.weights_staged = reinterpret_cast<float*>(weights->data);
      c.place.weights = weights->offset;
    }
  } catch (const Error& e) {
    if (e.code() != ErrorCode::pool_exhausted) throw;
    error = std::current_exception();
    c.place.status = static_cast<uint64_t>(e.code());
    c.staged = nullptr;
    c.weights_staged = nullptr;
    c.reduce_here = false;
    p.soft = nullptr;
  }
  c.place.records = c.staged || c.weights_staged || pushes ? 0 : 1;
  return {rows, weights, inbox};
}

}  // namespace switchyard::detail
