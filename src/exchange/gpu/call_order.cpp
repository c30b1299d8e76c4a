// SPDX-License-Identifier: Apache-2.0
#include "exchange/gpu/call_order.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "exchange/group/exchange_base.hpp"

namespace switchyard::detail {

namespace {

size_t moved_bytes(const CudaRank& gpu) { return static_cast<size_t>(gpu.max_warps()) * sizeof(MoveCounter); }

}  // namespace

CallOrder::CallOrder(CudaRank& gpu, const char* object, uint64_t number, InvalidIds invalid_ids)
    : gpu_(gpu), moved_(moved_bytes(gpu) + sizeof(InvalidIdCounts), gpu.copy_stream()), policy_(invalid_ids) {
  counted_ = {object, number, moved_.as<InvalidIdCounts>(moved_bytes(gpu))};
  if (policy_ == InvalidIds::raise) gpu_.watch_ids(&counted_);
}

CallOrder::~CallOrder() {
  gpu_.forget_ids(&counted_);
  moved_.end_after(uses());
}

MemoryUses CallOrder::uses() const { return MemoryUses(gpu_.shared_points()).until(last_).while_held(graphs_); }

CallStream CallOrder::begin(gpu::Stream stream) {
  CallStream call{stream, capture_of(stream), 0};
  if (call.capture.active) {
    gpu_.note_capture(call.capture);
    if (std::exchange(last_capture_, call.capture.id) != call.capture.id)
      keep_in_graph(std::make_shared<HoldMark>(graphs_), call.capture.graph);
    return call;
  }
  if (gpu::is_legacy(stream)) {  // there is only one legacy stream, and it never belongs to another GPU
    if (legacy_id_ == kNoStream) legacy_id_ = stream_id(stream);
    call.id = legacy_id_;
  } else if (gpu::id_of(stream, &call.id) != gpu::kOk || call.id != checked_stream_) {
    gpu::forget_error();
    gpu_.check_stream(stream);
    call.id = checked_stream_ = stream_id(stream);
  }
  if (last_) StreamPoints::order(stream, call.id, *last_);
  return call;
}

void CallOrder::end(const CallStream& call, int warps) {
  last_warps_ = warps;
  if (call.capture.active) return;
  if (last_ && last_->stream_id == call.id && last_.use_count() == 1)
    gpu_.points().move(*last_, call.stream);
  else
    last_ = gpu_.points().mark(call.stream, call.id);
}

void CallOrder::set_counters(CallContext& call) const {
  call.moved = moved_.as<MoveCounter>();
  call.invalid_ids = &counted_.counts->total;
  if (policy_ == InvalidIds::raise) call.invalid_bell = gpu_.invalid_bell();
}

int64_t CallOrder::invalid_ids() const { return static_cast<int64_t>(gpu_.read_invalid_ids(counted_)); }

void CallOrder::wait() const {
  const RelaxedCapture relaxed;  // another stream of this thread may be captured
  if (last_) check_cuda(gpu::wait_for_event(last_->event), "wait for the last call");
}

CallStatistics CallOrder::statistics() const {
  wait();
  std::vector<MoveCounter> moved(static_cast<size_t>(std::min(last_warps_, gpu_.max_warps())));
  if (moved.empty()) return {};
  check_cuda(gpu::copy_to_host(moved.data(), moved_.as<void>(), moved.size() * sizeof moved[0], gpu_.copy_stream()),
             "statistics");
  check_cuda(gpu::wait_for_stream(gpu_.copy_stream()), "statistics");
  return sum_moved(moved);
}

}  // namespace switchyard::detail
