// SPDX-License-Identifier: Apache-2.0
#include "device_copy.hpp"

namespace switchyard::tool {
namespace {

template <class T>
void fetch(std::span<const T>& span, std::vector<T>& to, const DeviceRead& read) {
  to.resize(span.size());
  if (!span.empty()) read(to.data(), span.data(), span.size_bytes());
  span = to;
}

}  // namespace

HostDispatched copy_to_host(const Dispatched& d, bool weighted, const DeviceRead& read) {
  HostDispatched h;
  h.view = d;
  Dispatched& v = h.view;
  v.rows = d.handle.rows();
  h.rows.resize(static_cast<size_t>(v.rows) * static_cast<size_t>(d.x.cols) * dtype_bytes(d.x.dtype) + 1);
  h.scales.resize(static_cast<size_t>(v.rows) * scale_row_bytes(d.x.cols, d.x.scale_kind) + 1);
  if (v.rows > 0) read(h.rows.data(), d.x.data, h.rows.size() - 1);
  if (v.rows > 0 && d.x.scales) read(h.scales.data(), d.x.scales, h.scales.size() - 1);
  v.x.data = h.rows.data();
  v.x.scales = d.x.scales ? h.scales.data() : nullptr;
  fetch(v.topk_ids, h.topk_ids, read);
  fetch(v.topk_weights, h.topk_weights, read);
  fetch(v.source_token, h.source_token, read);
  fetch(v.row_source, h.row_source, read);
  fetch(v.row_weights, h.row_weights, read);
  fetch(v.expert_first_row, h.expert_first_row, read);
  fetch(v.tokens_per_expert, h.tokens_per_expert, read);
  fetch(v.aligned_per_expert, h.aligned_per_expert, read);
  fetch(v.dropped, h.dropped, read);
  fetch(v.dropped_per_source, h.dropped_per_source, read);
  if (!weighted) v.topk_weights = v.row_weights = {};
  return h;
}

}  // namespace switchyard::tool
