// SPDX-License-Identifier: Apache-2.0
// Parameters that normal-mode kernels add to those set by the host, on one host and on several.
#pragma once

#include "arch/cuda/cuda_arch.cuh"
#include "base/call_signature.hpp"
#include "exchange/normal/launch.hpp"

namespace switchyard::detail {

/// Sets records beyond the received ones to -1 with weight 0, and the sources of padding rows and of rows beyond the delivered
/// ones to -1.
__device__ inline void fill_rest(CudaWarp& w, Layout layout, const FillRest& rest, int64_t rows, int64_t num_records) {
  const Received& r = rest.received;
  if (r.records == nullptr) return;
  const int64_t thread = static_cast<int64_t>(w.index()) * kLanes + threadIdx.x % kLanes, step = int64_t{w.total()} * kLanes;
  if (layout == Layout::rank_major) {
    auto* token = reinterpret_cast<int32_t*>(r.records + r.layout.token_at());
    auto* route = reinterpret_cast<int32_t*>(r.records + r.layout.route_at());
    auto* weight = reinterpret_cast<float*>(r.records + r.layout.weight_at());
    for (int64_t i = num_records + thread; i < r.layout.records; i += step) token[i] = -1;
    for (int64_t i = num_records * r.layout.topk + thread; i < r.layout.records * r.layout.topk; i += step) {
      route[i] = -1;
      weight[i] = 0.0f;
    }
    return;
  }
  const auto clear = [&](int64_t row) {
    r.row_source[row] = -1;
    r.row_weight[row] = 0.0f;
  };
  for (int64_t row = rows + thread; row < rest.rows_allocated; row += step) clear(row);
  for (int64_t i = thread; i < rest.num_ranges; i += step)
    for (int64_t row = rest.padding[2 * i]; row < rest.padding[2 * i + 1]; ++row) clear(row);
}

/// Adds the values that the host does not know to `c`, a copy of given.c. Call from one thread.
__device__ inline void complete(CombineParams& c, const CudaCombineParams& args, const TablesHeader& header) {
  c.tokens = header.tokens;
  c.num_records = header.num_records;
  c.staging.place.signature = mix_signature(args.c.staging.place.signature, header.identity);
  c.record_weight = header.any_weights ? args.weights_of_records : nullptr;
  c.weights = header.any_weights && args.caller_weights == nullptr ? args.weights_of_routes : args.caller_weights;
}

}  // namespace switchyard::detail
