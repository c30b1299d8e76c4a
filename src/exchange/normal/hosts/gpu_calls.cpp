// SPDX-License-Identifier: Apache-2.0
// Calls on the GPUs of several hosts: enqueued work, host waits, and errors thrown by all ranks.
#include <string>

#include "exchange/normal/gpu.hpp"
#include "switchyard/status.hpp"

namespace switchyard::detail {

const GpuHostTables& CudaNormal::use_hosts(CudaCall& call, const HandleData& h) const {
  call.hosts = tables_of(h).hosts;
  if (!call.hosts)
    throw Error(
        ErrorCode::unsupported,
        "handle was made from bytes, or by a group on CPUs: it does not say what crossed between hosts; dispatch again");
  return *call.hosts;
}

void CudaNormal::plan_over_hosts(CudaCall& call, const Routing& routing, HandleData& h) {
  auto& handle = static_cast<CudaHandle&>(*h.device);
  use_hosts(call, h);
  call.plan = plan_params(call, routing, handle.tables, nullptr);
  hosts_->exchange_counts(call.plan, *call.hosts, call.stream());
  launch_plan(call.plan, plan_blocks(routing.ids.num_tokens, gpu_.max_blocks()), call.stream(), true);
  check_cuda(gpu::wait_for_stream(call.stream()), "wait for the counts");
  group_.check_alive("dispatch");
  check_cuda(gpu::copy_to_host(&call.counts, handle.tables.header, sizeof call.counts, gpu_.copy_stream()),
             "copy of the counts");
  check_cuda(gpu::wait_for_stream(gpu_.copy_stream()), "copy of the counts");
  hosts_->read_counts(*call.hosts, call.counts);
  if (call.counts.status == 0) return;
  hosts_->end_call(call.context, state(), call.stream());
  end(call);
  std::exception_ptr error;
  try {
    gpu_.raise_soft_fault("dispatch");
    throw Error(static_cast<ErrorCode>(call.counts.status), "dispatch: a rank would have received more rows than its capacity");
  } catch (const Error&) {
    error = std::current_exception();
  }
  rethrow_agreed(error);
}

void CudaNormal::settle_placements(CudaCall& call, const OfferParams& offer, GpuHostLinks::Summing* combine,
                                   const std::exception_ptr& own) {
  const PlacementVerdict verdict = hosts_->exchange_placements(offer, combine, call.stream());
  if (verdict.failed_rank < 0) return;
  hosts_->end_call(call.context, state(), call.stream());
  end(call);
  if (own) rethrow_agreed(own);
  const auto code = static_cast<ErrorCode>(verdict.status);
  throw AgreedError(code, std::string(operation_name(call.context.operation)) + ": rank " +
                              std::to_string(verdict.failed_rank) + " has no room for its rows (" + to_string(code) +
                              "); nothing was moved and the group can be used");
}

void CudaNormal::move_over_hosts(CudaCall& call, const Dispatch& d, const CudaDispatchParams& params) {
  const GpuHostTables& tables = use_hosts(call, *d.handle);
  OfferParams offer;
  offer.call = call.context;
  offer.state = state();
  offer.place = d.place;
  offer.handle = d.fresh ? nullptr : params.header;
  offer.header = params.header;
  offer.topk = config.topk;
  offer.own_rows_differ = call.own_placed;
  offer.own_rows = call.own_rows;
  settle_placements(call, offer, nullptr, d.error);
  network_bytes_ = hosts_->move(params, tables, call.counts.any_weights != 0, tables_of(*d.handle).tables.counts, call.launch,
                                call.stream());
}

void CudaNormal::sum_over_hosts(CudaCall& call, const HandleData& h, const CudaCombineParams& params, bool weighted,
                                const std::exception_ptr& error) {
  const GpuHostTables& tables = use_hosts(call, h);
  OfferParams offer;
  offer.call = call.context;
  offer.state = state();
  offer.place = params.c.staging.place;
  offer.handle = offer.header = params.header;
  offer.topk = config.topk;
  offer.own_rows_differ = params.c.staging.own_in_place;
  offer.own_rows = params.c.staging.own_rows;
  GpuHostLinks::Summing over = hosts_->prepare(params, tables, weighted);
  settle_placements(call, offer, &over, error);
  network_bytes_ = hosts_->sum(params, over, call.launch, call.stream());
}

}  // namespace switchyard::detail
