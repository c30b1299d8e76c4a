// SPDX-License-Identifier: Apache-2.0
// What a group asks of a GPU. Implemented in exchange/gpu, or by no_device.cpp in builds without a GPU toolkit. Modes ask more
// (exchange/gpu/rank.hpp), which is not here.
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

/// One rank's GPU. Local; any thread of the rank.
class DeviceRank {
 public:
  virtual ~DeviceRank() = default;
  /// Name of the GPU, as the driver gives it.
  virtual const std::string& name() const noexcept = 0;
  /// What else a deadline of this rank may come from, or "".
  virtual const char* advice() const noexcept = 0;
  /// Before the peers are told that this rank has left: waits for what its kernels still deliver.
  virtual void drain() noexcept = 0;
  /// Waits for everything that is enqueued on the GPU, as drain() does for replays: objects that live on have not waited.
  virtual void finish() noexcept = 0;
  /// Ends the rounds between hosts, which look at the group's memory. After drain(), before that memory goes.
  virtual void end_rounds() noexcept {}
  /// The first fault that a kernel of this rank recorded, or null. Does not wait for the GPU.
  virtual const FaultRecord* fault() const noexcept = 0;
  /// Throws and forgets a fault that ended one call on all ranks and left the group usable, if there is one.
  virtual void raise_soft_fault(const char* context) = 0;
  /// Throws Error(invalid_argument), once for each, if calls had ids that were neither -1 nor an expert and their objects are
  /// to raise that. Waits for no kernel.
  virtual void raise_invalid_ids(const char* context) = 0;
  /// Copies of the counters, one per (warp, peer). Waits for the copy, not for kernels.
  virtual std::vector<WaitCounter> wait_counters() const = 0;
  /// Collective. Address of every rank's buffer for this rank's GPU; valid while `mapping` lives.
  virtual std::vector<std::byte*> reach(Bootstrap& bootstrap, int slot, void* memory, size_t bytes, Milliseconds deadline,
                                        std::shared_ptr<void>& mapping) = 0;
  /// A copy for kernels, until the slot gets another; they reach the slot from now on, until its mapping ends. `distances` has
  /// an entry per rank.
  virtual const uint64_t* upload_distances(int slot, const std::vector<uint64_t>& distances) = 0;
  /// Memory of the GPU that peers do not see, for work on `stream`. It is freed when the last share is gone and what was
  /// enqueued there until then is done. Throws Error(system) where there is none.
  virtual std::shared_ptr<void> ordinary_memory(size_t bytes, void* stream) = 0;
  /// What tells, without a wait, whether all work that was enqueued on `stream` so far is done.
  virtual std::function<bool()> end_of_use(void* stream) = 0;
  /// Takes the block of an object that has ended; no later object has it before over().
  virtual void end_block(HeapBlock block, std::function<bool()> over) noexcept = 0;
  /// Before a new object takes memory of the heap: waits for work that uses blocks of ended objects. Throws
  /// Error(peer_timeout).
  virtual void await_ended(Milliseconds deadline) = 0;
  /// What is enqueued on `stream` until memory of the library ends uses it. Throws invalid_argument, naming it `name`, if none
  /// lies at `memory`.
  virtual void used_by(const char* name, const void* memory, void* stream) = 0;
  /// Kernels launched from now on record, up to `capacity` spans for each of blocks * warps tracks.
  virtual void start_trace(int blocks, int warps, size_t capacity) = 0;
  /// Waits for the GPU and brings what was recorded. Nothing if tracing was off.
  virtual void stop_trace(Tracer& tracer) = 0;
};

/// Memory and device of a rank. `control` is host memory that all hosts and this rank's kernels can write: the header with the
/// abort word, then this rank's FaultRecord.
struct DeviceParts {
  std::unique_ptr<SymmetricHeap> heap, control;
  std::unique_ptr<DeviceRank> rank;
};

/// Gives the memory and the device of a rank back, whose calls have ended. Where other groups of the process live, nothing that
/// waits for the GPU is called: a lane that ends must not keep another from launching. The last one frees what they left, and
/// that waits for all that runs on the GPU, also for kernels of other libraries which may never end; after a second a thread
/// goes on with it.
void end_device(DeviceParts parts) noexcept;
/// Collective; a process per rank.
DeviceParts join_device(Bootstrap& bootstrap, const GroupOptions& options);
/// All ranks of this process at once, from one thread.
std::vector<DeviceParts> devices_in_process(const HostMap& hosts, const GroupOptions& options);

}  // namespace switchyard::detail
