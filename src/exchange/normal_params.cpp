// SPDX-License-Identifier: Apache-2.0
// What ranks compare of a call, and what kernels are told of what the caller gave.
#include "exchange/normal_impl.hpp"

namespace switchyard::detail {

uint64_t NormalImpl::signature(Operation op, std::initializer_list<int64_t> values, const HandleData* h) const {
  uint64_t hash = mix_hash(config_hash(config), static_cast<uint64_t>(op));
  for (const int64_t v : values) hash = mix_hash(hash, static_cast<uint64_t>(v));
  return h && counts_at_ == CountsAt::host ? mix_hash(hash, h->identity) : hash;
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
  s.order = o.order;
  s.type = y.dtype;
  s.topk = h.topk;
  s.map = h.map;
  s.hidden = config.hidden;
  s.row_bytes = config.hidden * static_cast<int64_t>(dtype_bytes(y.dtype));
  s.y = static_cast<const std::byte*>(y.data);
  s.weights_in = h.layout == Layout::rank_major ? o.weights : nullptr;
  s.bias[0] = static_cast<const std::byte*>(o.bias[0]);
  s.bias[1] = static_cast<const std::byte*>(o.bias[1]);
  s.out = static_cast<std::byte*>(out);
  s.out_weights = out_weights;
  return s;
}

NormalImpl::SumWeights NormalImpl::weights_of(const HandleData& h, const CombineOptions& o, const float* of_records,
                                              const float* of_routes) {
  const bool apply = h.layout == Layout::expert_major && o.apply_weights, per_route = o.order == CombineOrder::per_route;
  return {apply && !per_route ? of_records : nullptr, apply && per_route && !o.weights ? of_routes : nullptr,
          apply && per_route ? o.weights : nullptr};
}

}  // namespace switchyard::detail
