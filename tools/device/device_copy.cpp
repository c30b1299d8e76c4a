// SPDX-License-Identifier: Apache-2.0
#include "device/device_copy.hpp"

namespace switchyard::tool {
namespace {

template <class T>
void fetch(std::span<const T>& span, std::vector<T>& to, const RankDevice& device) {
  to.resize(span.size());
  if (!span.empty()) device.read(to.data(), span.data(), span.size_bytes());
  span = to;
}

}  // namespace

HostDispatched copy_to_host(const Dispatched& d, bool weighted, const RankDevice& device) {
  HostDispatched h;
  h.view = d;
  if (device.on_host()) return h;
  Dispatched& v = h.view;
  v.rows = d.handle.rows();
  h.rows.resize(static_cast<size_t>(v.rows) * dtype_bytes(d.x.dtype, d.x.cols) + 1);
  h.scales.resize(static_cast<size_t>(v.rows) * scale_row_bytes(d.x.cols, d.x.scale_kind) + 1);
  if (v.rows > 0) device.read(h.rows.data(), d.x.data, h.rows.size() - 1);
  if (v.rows > 0 && d.x.scales) device.read(h.scales.data(), d.x.scales, h.scales.size() - 1);
  v.x.data = h.rows.data();
  v.x.scales = d.x.scales ? h.scales.data() : nullptr;
  fetch(v.topk_ids, h.topk_ids, device);
  fetch(v.topk_weights, h.topk_weights, device);
  fetch(v.source_token, h.source_token, device);
  fetch(v.row_source, h.row_source, device);
  fetch(v.row_weights, h.row_weights, device);
  fetch(v.expert_first_row, h.expert_first_row, device);
  fetch(v.tokens_per_expert, h.tokens_per_expert, device);
  fetch(v.aligned_per_expert, h.aligned_per_expert, device);
  fetch(v.dropped, h.dropped, device);
  fetch(v.dropped_per_source, h.dropped_per_source, device);
  if (!weighted) v.topk_weights = v.row_weights = {};
  return h;
}

}  // namespace switchyard::tool
