// SPDX-License-Identifier: Apache-2.0
// SlotWeights on GPUs of one host: each rank copies from the mapped arrays of the other ranks.
//
// Order. The agreement in move() follows each rank's host wait for its earlier copies and for its calls that used the slots to
// be written. Until the next agreement, no owner writes a slot that a copy reads, and no enqueued call reads a slot that a copy
// writes. The copies need no multiprocessor and wait for no peer, so they complete even if kernels of all ranks wait for each
// other, and all work that waits for the copies can proceed.
#include <memory>
#include <string>
#include <vector>

#include "exchange/gpu/rank.hpp"
#include "exchange/slots/move.hpp"
#include "exchange/slots/weights.hpp"
#include "heap/gpu/device_guard.hpp"
#include "heap/gpu/peer_range.hpp"

namespace switchyard::detail {

namespace {

class MappedWeights final : public SlotWeightsImpl {
 public:
  MappedWeights(Group& group, int slots_per_rank, std::span<const SlotArray> arrays, const MoveOptions& options)
      : SlotWeightsImpl(group, slots_per_rank, arrays, options),
        gpu_(rank_of(group)),
        stream_(static_cast<gpu::Stream>(options.stream)) {
    construct_with([&] {
      const DeviceGuard guard(gpu_.device());
      check_stream("MoveOptions::stream", stream_);
      for (const SlotArray& array : arrays_) gpu_.check_pointer("arrays[].data", array.data, 1);
    });
    group_.collectively("SlotWeights", [&] {
      const RelaxedCapture relaxed;  // this thread may be capturing a stream
      for (const SlotArray& array : arrays_)
        mapped_.push_back(PeerRange::create(*group_.bootstrap, gpu_.device(), array.data,
                                            array.slot_bytes * static_cast<size_t>(slots_per_rank_),
                                            group_.deadline_of(Operation::register_memory)));
    });
  }
  ~MappedWeights() override {
    try {
      const DeviceGuard guard(gpu_.device());
      const RelaxedCapture relaxed;
      if (copied_) StreamPoints::wait(*copied_);
    } catch (const Error&) {
      // Without a context, no copy is running.
    }
  }

  void wait(void* stream) const override {
    if (!copied_) return;
    const DeviceGuard guard(gpu_.device());
    const auto later = static_cast<gpu::Stream>(stream);
    if (capture_of(later).active)
      throw Error(ErrorCode::invalid_argument,
                  "SlotWeights::wait: the stream is being captured; a graph cannot wait for weights that move");
    StreamPoints::order(later, stream_id(later), *copied_);
  }
  bool ready() const override { return !copied_ || StreamPoints::reached(*copied_); }
  void* ready_event() const override { return copied_ ? copied_->event : nullptr; }

 private:
  void check_stream(const char* name, gpu::Stream stream) const {
    if (capture_of(stream).active) invalid(name, ": the stream is being captured; weights cannot be moved in a graph");
    if (!gpu::is_legacy(stream)) gpu_.check_stream(stream);
  }
  void finish_earlier(Group&, void* after) override {
    const DeviceGuard guard(gpu_.device());
    const auto earlier = static_cast<gpu::Stream>(after);
    check_stream("after", earlier);
    check_stream("MoveOptions::stream", stream_);
    const RelaxedCapture relaxed;
    if (copied_) StreamPoints::wait(*copied_);
    check_cuda(gpu::wait_for_stream(earlier), "calls that use the weights");
  }
  int64_t copy(Group&, const ExpertMap&, const ExpertMap&, const WeightMoves& moves) override {
    const DeviceGuard guard(gpu_.device());
    const RelaxedCapture relaxed;
    int64_t from_others = 0;
    try {
      from_others = enqueue(moves);
    } catch (const Error&) {
      (void)gpu::wait_for_stream(stream_);  // the copies before the failed one
      throw;
    }
    copied_ = gpu_.points().mark(stream_, stream_id(stream_));
    return from_others;
  }
  /// Enqueues this rank's copies. Returns the bytes from other ranks.
  int64_t enqueue(const WeightMoves& moves) {
    int64_t from_others = 0;
    for (const WeightMove& move : moves.of_rank[static_cast<size_t>(rank())]) {
      for (size_t a = 0; a < arrays_.size(); ++a) {
        const size_t bytes = arrays_[a].slot_bytes;
        if (bytes == 0) continue;
        check_cuda(gpu::copy_on_device(slot_at(mapped_[a]->at(rank()), move.slot, bytes),
                                       slot_at(mapped_[a]->at(move.source_rank), move.source_slot, bytes), bytes, stream_),
                   "copy of weights");
        if (move.source_rank != rank()) from_others += static_cast<int64_t>(bytes);
      }
    }
    return from_others;
  }
  std::byte* slot_at(std::byte* array, int slot, size_t bytes) const {
    return array + static_cast<size_t>(slot % slots_per_rank_) * bytes;
  }

  CudaRank& gpu_;
  const gpu::Stream stream_;
  std::vector<std::shared_ptr<PeerRange>> mapped_;  ///< of each array
  Point copied_;                                    ///< end of the last move; null: no move yet
};

}  // namespace

std::unique_ptr<SlotWeightsImpl> SlotWeightsImpl::make_mapped(Group& group, int slots_per_rank,
                                                              std::span<const SlotArray> arrays, const MoveOptions& options) {
  return std::make_unique<MappedWeights>(group, slots_per_rank, arrays, options);
}

}  // namespace switchyard::detail
