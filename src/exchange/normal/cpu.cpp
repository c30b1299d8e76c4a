// SPDX-License-Identifier: Apache-2.0
// Normal mode on the CPU: the object and the frame of every collective call.
#include "exchange/normal/cpu.hpp"

#include <algorithm>
#include <string>

#include "exchange/hosts/connect.hpp"
#include "protocol/counts.hpp"

namespace switchyard::detail {

template <class A>
CpuNormal<A>::CpuNormal(Group& group, const NormalConfig& c) : NormalImpl(group, c, CountsAt::host) {
  if (c.staging == Staging::ring) group_.require_one_host("NormalConfig::staging = ring", "use Staging::direct");
  construct([&] { build(); });
  if (spans_hosts()) connect_hosts();
}

template <class A>
void CpuNormal<A>::build() {
  const MemoryRequirement need = NormalExchange::memory_required(config, world());
  rings_ = ring_layout(config, world());
  const size_t flags = need.control_bytes + static_cast<size_t>(rings_.num_channels > 0 ? rings_.flags_bytes() : 0);
  heap_offset_ = take_heap(need.total(), flags);
  control_ = ControlLayout{heap_offset_, world(), config.num_experts};
  rings_.base = heap_offset_ + need.control_bytes;
  ring_streams_.resize(static_cast<size_t>(rings_.num_streams()));
  const size_t pool_at = heap_offset_ + need.control_bytes + need.ring_bytes;
  pool_ = std::make_shared<OffsetAllocator>(pool_at, pool_at + need.pool_bytes);
  counts_row_.resize(static_cast<size_t>(control_.counts_row_bytes()));
  const int64_t staged =
      round_up(config.hidden, 128) + round_up(static_cast<int64_t>(scale_row_bytes(config.hidden, ScaleKind::f32)), 128);
  const int64_t summed = round_up(config.hidden * 4, 128) + round_up(int64_t{4} * config.topk, 128);  // one host's sum
  group_.pool.reserve_scratch(static_cast<size_t>(spans_hosts() ? std::max(staged, summed) : staged));
  std::byte* mine = group_.heap->view().base[rank()];
  set_flags(mine + heap_offset_, control_.flags_bytes(), sizeof(uint64_t), flag_word(epochs_.last()));
  if (rings_.num_channels > 0)
    set_flags(mine + rings_.base, rings_.flags_bytes(), RingLayout::kLine, flag_word(epochs_.last()));
}

template <class A>
void CpuNormal<A>::connect_hosts() {
  group_.collectively("NormalExchange", [&] {
    hosts_ = std::make_unique<HostLinks>(group_.host_map(), rank(), detail::connect_hosts(group_), group_.round_bytes);
  });
}

template <class A>
CpuNormal<A>::CpuCall::CpuCall(const CallContext& given, const Frame& frame)
    : name(frame.operation == Operation::combine ? "combine" : "dispatch"),
      start_ns(Cpu::now_ns()),
      span(given.tracer, kHostTrack, frame.operation == Operation::combine ? Event::combine : Event::dispatch, frame.tokens) {
  context = given;
}

template <class A>
std::unique_ptr<NormalImpl::Call> CpuNormal<A>::begin(const Frame& frame) {
  group_.enter(frame.operation, caller());
  CallContext context = group_.begin_call(frame.operation);
  context.epoch = epochs_.next();
  stats_.plan_us = 0;
  return std::make_unique<CpuCall>(context, frame);
}

template <class A>
void CpuNormal<A>::end(Call& call) {
  const double plan_us = stats_.plan_us;
  stats_ = sum_moved(group_.moved);
  stats_.plan_us = plan_us;
  stats_.total_us = static_cast<double>(Cpu::now_ns() - static_cast<const CpuCall&>(call).start_ns) * 1e-3;
}

template <class A>
void CpuNormal<A>::raise(const char* operation) {
  if (hosts_ && group_.fault.ready != 0) {
    name_proxy(group_.fault);
    hosts_->carrier().abort();
  }
  group_.raise_fault(operation, epochs_.calls());
}

template <class A>
void CpuNormal<A>::throw_mismatch(const char* operation, int rank, const CallDifference& difference) {
  group_.throw_mismatch(std::string(operation) + " (call " + std::to_string(epochs_.calls()) + ")", rank, difference);
}

template <class A>
void CpuNormal<A>::name_proxy(FaultRecord& fault) const {
  if (fault.mismatch || fault.awaited_rank < 0) return;
  if (fault.site < Site::counts || control_row(fault.site) >= kNumControlSites) return;
  const int proxy = hosts_->other_proxy(fault.awaited_rank);
  if (proxy < 0) return;
  const uint64_t seen = A::peek(group_.heap->view().local(control_.flag(fault.site, proxy)));
  if (flag_reached(seen, flag_word(fault.epoch))) return;
  fault.awaited_rank = proxy;
  fault.seen = seen;
}

template <class A>
void CpuNormal<A>::exchange_placements(const CpuCall& call, const SumStaging& staging, const std::exception_ptr& own) {
  bool ok = false;
  on_one_warp([&](CpuWarp& w) {
    const Placement& place = staging.place;
    publish_placement<A>(w, call.context, control_, place, staging.distances,
                         staging.own_in_place ? &staging.own_rows : nullptr);
    if (hosts_) {
      const auto none = [](const RailPeer&) { return int64_t{0}; };
      const auto deliver = [&](int source, int64_t, const std::byte* theirs) {
        publish_placement_of<A>(w, call.context, control_, source, theirs);
      };
      if (!pass_on(call.context, &place, sizeof place, none, deliver)) return;
    }
    ok = wait_placements<A>(w, call.context, control_, Site::placement);
  });
  if (!ok) raise(call.name);
  check_placements(call, own);
}

template <class A>
void CpuNormal<A>::check_placements(const CpuCall& call, const std::exception_ptr& own) {
  const CallContext& context = call.context;
  if (all_agree(context, control_, call.signature)) return;
  if (own) rethrow_agreed(own);
  for (int r = 0; r < world(); ++r) {
    const Placement& place = *context.heap.local(control_.placement(context.epoch, r));
    if (place.signature != call.signature || !reachable(context, place))
      throw_mismatch(call.name, r, {Site::placement, call.signature, place.signature});
    if (place.status != 0)
      throw AgreedError(static_cast<ErrorCode>(place.status),
                        std::string(call.name) + " (call " + std::to_string(epochs_.calls()) + "): rank " + std::to_string(r) +
                            " has no room for its rows (" + to_string(static_cast<ErrorCode>(place.status)) +
                            "); nothing was moved and the group can be used");
  }
}

template <class A>
std::shared_ptr<CpuBlock> CpuNormal<A>::allocate(size_t bytes) {
  auto block = std::make_shared<CpuBlock>();
  if (bytes == 0) return block;  // no memory needed, even if the pool is empty or full
  if (config.staging == Staging::ring) {
    try {
      block->owned = buffers_->take(bytes);
    } catch (const std::bad_alloc&) {
      throw Error(ErrorCode::pool_exhausted, "rank " + std::to_string(rank()) + ": the system has no " + std::to_string(bytes) +
                                                 " bytes of memory left for rows, which ring staging keeps in private memory; "
                                                 "free outputs or dispatch fewer tokens at a time");
    }
    block->recycler = buffers_;
    block->data = block->owned.data.get();
    return block;
  }
  const auto offset = pool_->allocate(bytes, 128);
  if (!offset) {
    const OffsetAllocator::Usage u = pool_->usage();
    throw_pool_exhausted(bytes, std::to_string(u.used) + " of " + std::to_string(u.capacity) +
                                    " are in use, the largest free block has " + std::to_string(u.largest_free));
  }
  block->pool = pool_;
  block->offset = *offset;
  block->data = group_.heap->view().base[rank()] + *offset;
  return block;
}

template <class A>
void CpuNormal<A>::take_output(Call&, Dispatch& d) {
  d.rows = allocate(static_cast<size_t>(d.output_bytes() + d.records().bytes()));
  d.place.rows = d.rows->offset;
  d.place.dispatch.records = d.rows->offset + static_cast<uint64_t>(d.output_bytes());
}

template <class A>
void CpuNormal<A>::copy_out(Call&, const Dispatch& d) {
  const OutputLayout layout = d.output();
  const auto rows = static_cast<size_t>(d.handle->rows);
  const size_t row_bytes = rows * static_cast<size_t>(layout.row_bytes),
               scales = rows * static_cast<size_t>(layout.scale_bytes);
  if (row_bytes > 0) std::memcpy(d.out(), d.rows->data, row_bytes);
  if (scales > 0) std::memcpy(d.options.out->scales, d.rows->data + layout.scales_at(), scales);
  group_.moved[0].copied_bytes += row_bytes + scales;
}

template <class A>
std::shared_ptr<const HandleData> CpuNormal<A>::use_handle(Call&, const Handle& handle) {
  return {std::shared_ptr<void>(), &handle.data()};  // valid during the call; finish() delivers the caller's handle
}

template <class A>
NormalImpl::HandleArrays CpuNormal<A>::arrays_of(const HandleData& h) const {
  HandleArrays a;
  a.record_route = h.record_route.data();
  a.record_token = h.record_token.data();
  a.record_weight = h.record_weight.empty() ? nullptr : h.record_weight.data();
  a.row_weight = h.row_weight.empty() ? nullptr : h.row_weight.data();
  a.row_source = h.row_source.data();
  a.first_row = h.first_row.data();
  a.kept = h.kept_per_expert.data();
  a.aligned = h.aligned_per_expert.data();
  a.dropped = h.dropped.data();
  a.local_dropped = h.local_dropped.data();
  a.invalid_ids = &h.invalid_ids;
  return a;
}

template class CpuNormal<SWITCHYARD_CPU_ARCH>;  // instantiates the definitions of this file

template <class A>
std::unique_ptr<NormalImpl> NormalImpl::make_on_cpu(Group& group, const NormalConfig& config) {
  return std::make_unique<CpuNormal<A>>(group, config);
}
template std::unique_ptr<NormalImpl> NormalImpl::make_on_cpu<SWITCHYARD_CPU_ARCH>(Group&, const NormalConfig&);

}  // namespace switchyard::detail
