// SPDX-License-Identifier: Apache-2.0
// Reference-counted memory outside the heap, shared by the users or objects of a rank.
#pragma once

#include <memory>
#include <mutex>

#include "exchange/gpu/memory.hpp"
#include "exchange/gpu/memory_holders.hpp"
#include "exchange/gpu/rank.hpp"

namespace switchyard::detail {

/// The last reference may be dropped at any time, on any thread: the memory is freed after the work on all streams that used
/// it. Graphs that use the memory hold references.
class HeldMemory final : public MemoryHolder, public std::enable_shared_from_this<HeldMemory> {
 public:
  /// Requires the rank's GPU to be current.
  static std::shared_ptr<HeldMemory> make(size_t bytes, CudaRank& gpu) {
    const std::shared_ptr<HeldMemory> made = settled_when_dropped(std::shared_ptr<HeldMemory>(new HeldMemory(bytes, gpu)));
    gpu.holders().remember(made->data(), bytes, made);
    return made;
  }
  HeldMemory(const HeldMemory&) = delete;
  HeldMemory& operator=(const HeldMemory&) = delete;
  ~HeldMemory() override { memory_.end_after(MemoryUses(points_).on(std::move(users_))); }

  void* data() const { return memory_.as<void>(); }
  void settle() noexcept try {
    const CurrentContext current(memory_.context());
    const RelaxedCapture relaxed;  // a stream of this thread may be captured
    const std::lock_guard lock(mutex_);
    users_.settle(*points_);
  } catch (const std::exception&) {
    // The destructor retries.
  }
  void used_on(gpu::Stream stream, const CaptureState& capture) override {
    if (capture.active) return keep_in_graph(shared_from_this(), capture.graph);
    const std::lock_guard lock(mutex_);
    users_.add(stream, *points_);
  }

 private:
  HeldMemory(size_t bytes, CudaRank& gpu) : points_(gpu.shared_points()), memory_(bytes, gpu.copy_stream()) {}

  const std::shared_ptr<StreamPoints> points_;
  DeviceMemory memory_;
  std::mutex mutex_;
  StreamUsers users_;
};

}  // namespace switchyard::detail
