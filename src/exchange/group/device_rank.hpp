// SPDX-License-Identifier: Apache-2.0
// The interface that a group needs from a GPU. Implemented in exchange/gpu or, for builds without a GPU toolkit, in
// no_device.cpp. exchange/gpu/rank.hpp contains the part that only modes need.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bootstrap/bootstrap.hpp"
#include "heap/heap.hpp"
#include "heap/heap_block.hpp"
#include "protocol/call.hpp"
#include "switchyard/group.hpp"

namespace switchyard::detail {

/// One rank's GPU. Local; may be called from any thread of the rank.
class DeviceRank {
 public:
  virtual ~DeviceRank() = default;
  /// Name of the GPU as reported by the driver.
  virtual const std::string& name() const noexcept = 0;
  /// Advice for error messages on another possible cause of this rank's timeouts; "" if there is none.
  virtual const char* advice() const noexcept = 0;
  /// Waits for the data that this rank's kernels have yet to deliver. Call before this rank announces its departure to its
  /// peers.
  virtual void drain() noexcept = 0;
  /// Waits for all work enqueued on the GPU, as drain() does for replays, because objects that are still alive have not waited.
  virtual void finish() noexcept = 0;
  /// Ends the rounds between hosts, which access the group's memory. Call after drain() and before that memory is freed.
  virtual void end_rounds() noexcept {}
  /// The first fault recorded by a kernel of this rank, or null. Does not wait for the GPU.
  virtual const FaultRecord* fault() const noexcept = 0;
  /// If a fault has ended one call on all ranks but left the group usable, clears and throws it.
  virtual void raise_soft_fault(const char* context) = 0;
  /// Throws Error(invalid_argument), once per incident, if calls had ids that were neither -1 nor an expert and their objects
  /// are configured to throw. Does not wait for kernels.
  virtual void raise_invalid_ids(const char* context) = 0;
  /// Returns copies of the counters, one per (warp, peer). Waits for the copy, not for kernels.
  virtual std::vector<WaitCounter> wait_counters() const = 0;
  /// Collective. Returns the address of every rank's buffer on this rank's GPU, valid while `mapping` lives.
  virtual std::vector<std::byte*> reach(Bootstrap& bootstrap, int slot, void* memory, size_t bytes, Milliseconds deadline,
                                        std::shared_ptr<void>& mapping) = 0;
  /// Copies `distances`, one entry per rank, to kernel-accessible memory; the copy is valid until the slot gets another one.
  /// From now on, kernels access the slot until its mapping ends.
  virtual const uint64_t* upload_distances(int slot, const std::vector<uint64_t>& distances) = 0;
  /// GPU memory that is private to this rank, for work on `stream`. It is freed once the last reference is gone and all work
  /// enqueued on the stream by then is done. Throws Error(system) if none is available.
  virtual std::shared_ptr<void> ordinary_memory(size_t bytes, void* stream) = 0;
  /// Returns a function that reports, without waiting, whether all work enqueued on `stream` so far is done.
  virtual std::function<bool()> end_of_use(void* stream) = 0;
  /// Takes over the block of a destroyed object; it is not given to later objects until over() returns true.
  virtual void end_block(HeapBlock block, std::function<bool()> over) noexcept = 0;
  /// Call before a new object takes heap memory; waits for work that uses blocks of destroyed objects. Throws
  /// Error(peer_timeout).
  virtual void await_ended(Milliseconds deadline) = 0;
  /// Marks the library memory at `memory` as used by the work enqueued on `stream` until the memory is released. Throws
  /// invalid_argument, with `name` as the argument, if `memory` does not belong to the library.
  virtual void used_by(const char* name, const void* memory, void* stream) = 0;
  /// Kernels launched from now on record up to `capacity` spans on each of blocks * warps tracks.
  virtual void start_trace(int blocks, int warps, size_t capacity) = 0;
  /// Waits for the GPU and moves the recorded spans to `tracer`. Does nothing if tracing was off.
  virtual void stop_trace(Tracer& tracer) = 0;
  /// While recording, enqueues a kernel on `stream` that records the time. A begin mark and the next end mark with the same
  /// event and launch (pack_launch) form one span on the call track. Its argument is the low 32 bits of `launch`.
  virtual void mark_trace(Event event, int64_t launch, bool begins, void* stream) const = 0;
};

/// A rank's memory and device. `control` is host memory that all hosts and this rank's kernels can write: a header with the
/// abort word, followed by this rank's FaultRecord.
struct DeviceParts {
  std::unique_ptr<SymmetricHeap> heap, control;
  std::unique_ptr<DeviceRank> rank;
};

/// Releases the memory and device of a rank whose calls have ended. While other groups of the process are alive, it makes no
/// call that waits for the GPU, so that a departing rank cannot prevent another one from launching. The last group frees the
/// memory left by the others. This waits for all work on the GPU, including kernels of other libraries that may never end, so
/// after one second it continues in a separate thread.
void end_device(DeviceParts parts) noexcept;
/// Collective; for one process per rank.
DeviceParts join_device(Bootstrap& bootstrap, const GroupOptions& options);
/// Creates all ranks of this process at once, from one thread.
std::vector<DeviceParts> devices_in_process(const HostMap& hosts, const GroupOptions& options);

}  // namespace switchyard::detail
