// SPDX-License-Identifier: Apache-2.0
// Combine on the CPU: tables, launch, what only the counts show.
#include "exchange/cpu_normal.hpp"
#include "plan/decisions.hpp"
#include "protocol/combine_ring.hpp"
#include "protocol/combine_routes.hpp"

namespace switchyard::detail {

namespace {

const float* data_or_null(const std::vector<float>& v) { return v.empty() ? nullptr : v.data(); }

}  // namespace

template <class A>
SumTables CpuNormal<A>::sum_tables(CpuCall& call, const HandleData& h) const {
  call.record_begin = record_ranges(h);
  SumTables t;
  t.record_begin = call.record_begin.data();
  t.record_token = h.record_token.data();
  t.tokens_of = h.counts.tokens.data();
  t.record_route = h.record_route.data();
  t.sends = SendTable{h.sends.data(), h.send_begin.data(), 0};
  t.ids = h.ids.data();
  t.route_row = h.route_row.data();
  return t;
}

template <class A>
SumWork CpuNormal<A>::sum_work() {
  return {group_.options.num_blocks / 2,
          &outputs_done_.value,
          sums_done_,
          &pulls_done_.value,
          &sums_next_.value,
          &pulls_next_.value};
}

template <class A>
void CpuNormal<A>::sum(Call& given, const HandleData& h, const SumShape& shape, const CombineOptions& o,
                       const SumStaging& staging, const std::exception_ptr& error) {
  auto& call = static_cast<CpuCall&>(given);
  const SumWeights weights = weights_of(h, o, data_or_null(h.record_weight), data_or_null(h.weights));
  const SumStart start{call.context,  h.tokens,           h.rows,
                       h.num_records, weights.of_records, weights.given ? weights.given : weights.of_routes};
  const CombineParams p{start, shape, sum_tables(call, h), staging, sum_work()};
  if (through_rings()) {
    exchange_placements(call, staging.place, error);
    const RingCombineParams ring{p, rings_, ring_streams_.data(), send_chunk(config, rings_)};
    launch([&](CpuWarp& w) { combine_ring_kernel<A>(w, ring); });
    raise(call.name);
  } else {
    launch([&](CpuWarp& w) { combine_direct<A>(w, p); });
    raise(call.name);
    check_placements(call, error);
  }
  if (shape.out_weights && h.layout == Layout::rank_major) check_weights_given(call.context, h);
}

template <class A>
void CpuNormal<A>::check_weights_given(const CallContext& call, const HandleData& h) {
  for (int r = 0; r < world(); ++r) {
    const int64_t rows = least(h.counts.rows_needed(h.layout, 1, r), h.counts.capacity[static_cast<size_t>(r)]);
    if (call.heap.local(control_.placement(call.epoch, r))->pull.gives_weights == 0 && rows > 0)
      throw_mismatch("combine (weights given on some ranks only)", r);  // the sums miss some
  }
}

template class CpuNormal<SWITCHYARD_CPU_ARCH>;  // of it, what this file defines

}  // namespace switchyard::detail
