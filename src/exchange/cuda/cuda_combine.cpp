// SPDX-License-Identifier: Apache-2.0
// Combine on a GPU: tables, launch.
#include <algorithm>

#include "exchange/cuda/cuda_normal.hpp"

namespace switchyard::detail {

SumWork CudaNormal::sum_work(const SumShape& shape, int blocks) const {
  SumWork w;
  const bool per_route = shape.layout == Layout::expert_major && shape.order == CombineOrder::per_route;
  const int push = kPushSms * (world() - 1) / world();
  if (blocks >= kApartFrom) w.sum_blocks = per_route ? std::min(blocks * 2 / 5, std::max(push, 1)) : blocks * 3 / 5;
  w.outputs_done = &state()->outputs_done;
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
  p.weights_given = weights.given;
  return p;
}

void CudaNormal::sum(Call& given, const HandleData& h, const SumShape& shape, const CombineOptions& o,
                     const SumStaging& staging, const std::exception_ptr& error) {
  const auto& call = static_cast<const CudaCall&>(given);
  const CudaCombineParams p = sum_params(call, h, shape, o, staging, error);
  if (through_rings())
    launch_ring_combine(p, ring_parts(), call.launch.blocks, gpu_.limits(), call.stream());
  else
    launch_combine(p, call.launch, call.stream());
}

}  // namespace switchyard::detail
