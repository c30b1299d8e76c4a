// SPDX-License-Identifier: Apache-2.0
// One rank's GPU, shared by all its exchange objects.
#pragma once

#include <algorithm>
#include <atomic>
#include <bitset>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "arch/gpu_runtime.hpp"
#include "exchange/gpu/kernel.hpp"
#include "exchange/gpu/memory.hpp"
#include "exchange/gpu/memory_holders.hpp"
#include "exchange/gpu/state.hpp"
#include "arch/gpu_order.hpp"
#include "exchange/gpu/tracing.hpp"
#include "exchange/group/impl.hpp"
#include "exchange/tuning/blocks.hpp"
#include "heap/gpu/cuda_heap.hpp"
#include "heap/heap_block.hpp"

namespace switchyard::detail {

class GpuRounds;

/// Host memory words written by one object's kernels, initially 0; null if there are none.
struct HostWords {
  static constexpr int kMax = 256;  ///< per rank
  static constexpr size_t kBytes = 64;
  uint64_t* host = nullptr;
  uint64_t* device = nullptr;  ///< the same words, as addressed by the GPU
};

/// An object whose invalid ids are reported to the host.
struct CountedIds {
  const char* object = "";
  uint64_t number = 0;
  InvalidIdCounts* counts = nullptr;  ///< in the GPU's memory
  uint64_t reported = 0;              ///< count at the last error thrown by raise_invalid_ids
};

class CudaRank final : public DeviceRank {
 public:
  /// `ranks_on_gpu`: number of the group's ranks on this GPU; `threads`: whether they are threads of this process; `num_sms`:
  /// maximum multiprocessors per call, or 0.
  CudaRank(CudaHeap& heap, SymmetricHeap& control, int ranks_on_gpu, bool threads, int num_sms);
  ~CudaRank() override;

  const std::string& name() const noexcept override { return name_; }
  const char* advice() const noexcept override;
  const FaultRecord* fault() const noexcept override;
  /// Records a fault detected by the host that kernels cannot detect, i.e. in rounds between hosts. Only the first fault is
  /// recorded. May be called on any thread.
  void record(const FaultRecord& fault);
  void raise_soft_fault(const char* context) override;
  void raise_invalid_ids(const char* context) override;
  /// Adds the object to those checked by raise_invalid_ids. The object must not move until forget_ids().
  void watch_ids(CountedIds* object);
  void forget_ids(CountedIds* object) noexcept;
  /// Waits for the copy stream.
  uint64_t read_invalid_ids(const CountedIds& object) const;
  /// Address for kernels.
  uint64_t* invalid_bell() const { return host_abort_device_ + kInvalidBellAt / sizeof(uint64_t); }
  /// Number of the last fault thrown by raise_soft_fault, for RankWords::heard.
  uint64_t heard() const { return heard_; }
  std::vector<WaitCounter> wait_counters() const override;
  std::shared_ptr<void> ordinary_memory(size_t bytes, void* stream) override;
  std::vector<std::byte*> reach(Bootstrap& bootstrap, int slot, void* memory, size_t bytes, Milliseconds deadline,
                                std::shared_ptr<void>& mapping) override;
  const uint64_t* upload_distances(int slot, const std::vector<uint64_t>& distances) override;
  /// Sets whether kernels that run later, including replays, access the memory registered in `slot`. Waits for the copy stream.
  void set_registered(int slot, bool registered);

  /// The context of a call, without its epoch and move counters.
  CallContext context(uint64_t timeout_ns, Operation operation) const;
  RankWords words(bool captured) const;
  int device() const { return heap_.device(); }
  int ranks_on_gpu() const { return ranks_on_gpu_; }
  CudaHeap& heap() const { return heap_; }
  const DeviceLimits& limits() const { return limits_; }
  /// Maximum number of blocks in a kernel whose blocks wait for each other: the group's budget.
  int max_blocks() const { return max_blocks_; }
  /// Launch limits for a call with `num_sms` (0 if not given). A launch may begin while the previous one on the stream is still
  /// waiting, but only if the call may use the whole GPU, because two overlapping calls occupy twice as many multiprocessors.
  DeviceLimits limits_of_call(int num_sms) const;
  /// Number of blocks for a call: as requested by the caller, else tuned, else `default_value` (each 0 if not given), limited
  /// to the number available.
  int blocks(int asked, int tuned, int default_value) const {
    return blocks_of_call(asked, tuned, default_value, max_blocks());
  }
  /// Throw invalid_argument unless, respectively, `p` is null or memory that this GPU's kernels can use, with that alignment in
  /// bytes, and `num_sms` is 0 or a grid whose blocks can all run at once. `known`: whether the caller guarantees the kind of
  /// memory.
  void check_pointer(const char* name, const void* p, size_t alignment, bool known = false) const;
  void check_sms(const char* name, int num_sms) const;
  /// Throws invalid_argument unless `stream`, which must not be capturing, belongs to this GPU.
  void check_stream(gpu::Stream stream) const;
  void start_trace(int blocks, int warps, size_t capacity) override;
  void stop_trace(Tracer& tracer) override;
  void mark_trace(Event event, int64_t launch, bool begins, void* stream) const override {
    if (tracing_.trace().records != nullptr) tracing_.mark(event, launch, begins, static_cast<gpu::Stream>(stream));
  }
  SoftFault* device_soft_fault() const { return soft_device_; }
  /// Maximum number of warps of any kernel.
  int max_warps() const { return max_warps_; }
  /// Expires with this object.
  std::weak_ptr<CudaRank*> token() const { return self_; }
  /// Records that a call is being captured; replays may run as long as its graph exists.
  void note_capture(const CaptureState& capture);
  /// Waits at most thirty seconds for the calls of destroyed objects, at most one second for other users of their memory, and
  /// then for replays that may still run. For replays, it first waits briefly for already destroyed graphs to disappear and
  /// then for the whole GPU, because replays are not counted. Waiting for the GPU invalidates other threads' captures and is
  /// therefore the last step. The wait for the GPU ends after one second because kernels of other groups may wait for ranks
  /// that wait for this one to leave. ~CudaRank waits for the rest.
  void drain() noexcept override;
  void finish() noexcept override;
  /// Rounds between hosts, shared by all objects of this rank; see GpuRounds::of.
  std::shared_ptr<GpuRounds>& rounds() { return rounds_; }
  void end_rounds() noexcept override { rounds_.reset(); }
  /// Takes back an object's heap block, which is not given to later objects until `uses` are over. If a graph still contains
  /// calls of the object, the block stays taken as long as the graph exists.
  void end_block(HeapBlock block, MemoryUses uses) noexcept;
  void end_block(HeapBlock block, std::function<bool()> over) noexcept override;
  void await_ended(Milliseconds deadline) override;
  std::function<bool()> end_of_use(void* stream) override;
  void used_by(const char* name, const void* memory, void* stream) override;
  /// Uses that end with this rank, for memory whose remaining users are unknown.
  MemoryUses until_end() const { return MemoryUses(points_).while_held(running_); }
  /// copy_stream() of this rank's device.
  gpu::Stream copy_stream() const { return copies_; }
  /// Takes over the registration through which kernels access the control memory. No kernel of this rank may still be running.
  std::unique_ptr<SharedHostMemory> take_control() { return std::move(control_shared_); }
  StreamPoints& points() const { return *points_; }
  std::shared_ptr<StreamPoints> shared_points() const { return points_; }
  /// Returns null words if all are taken. Returned words may be reused, so do not return them while a kernel may write them.
  /// May be called on any thread.
  HostWords take_host_words();
  void release_host_words(const HostWords& words);
  MemoryHolders& holders() { return holders_; }

 private:
  static constexpr size_t kInvalidBellAt = kHeapHeaderBytes + 768;  ///< in the control memory
  /// Writes a word in `counters_`. Waits for the copy stream.
  void write_word(size_t at, uint64_t value) const;
  template <class T>
  std::vector<T> download(const T* from, size_t count) const;

  CudaHeap& heap_;
  std::byte* control_;  ///< this rank's segment of host memory
  std::unique_ptr<SharedHostMemory> control_shared_;
  uint64_t* host_abort_device_ = nullptr;  ///< parts of the control memory, as addressed by the GPU
  FaultRecord* fault_device_ = nullptr;
  SoftFault* soft_device_ = nullptr;
  int ranks_on_gpu_, max_blocks_, max_warps_;
  bool threads_;
  std::string name_;
  DeviceLimits limits_;
  DeviceMemory counters_;          ///< fault claims, a word that is never 0, registrations, distances, wait counters
  uint64_t* distances_ = nullptr;  ///< [registration slots, world]
  WaitCounter* waits_ = nullptr;
  gpu::Stream copies_ = nullptr;
  DeviceTracing tracing_;
  ClockMailbox mailbox_;
  std::shared_ptr<CudaRank*> self_ = std::make_shared<CudaRank*>(this);
  const std::shared_ptr<std::atomic<int>> graphs_ = std::make_shared<std::atomic<int>>(0);  ///< graphs with calls of this rank
  std::atomic<unsigned long long> last_capture_ = 0;
  struct Ended {
    HeapBlock block;
    MemoryUses uses;
  };
  enum class Users : uint8_t { none, graphs, others, calls };
  /// Releases the blocks of destroyed objects that are no longer used. \returns the users of the remaining ones
  Users sweep_ended() noexcept;
  /// Waits until blocks are no longer used: at most the given times for calls and other users, and only briefly for graphs.
  /// Returns false if calls or other users remain.
  bool wait_for_ended(std::chrono::milliseconds of_calls, std::chrono::milliseconds of_others) noexcept;
  std::mutex ended_mutex_;
  std::vector<Ended> ended_;
  const HoldCounter running_ = std::make_shared<std::atomic<int>>(1);
  std::future<void> drained_;  ///< of the last drain()
  std::atomic<uint64_t> heard_ = 0;
  FaultRecord host_fault_;  ///< `ready` is atomic
  const std::shared_ptr<StreamPoints> points_ = std::make_shared<StreamPoints>();
  MemoryHolders holders_;
  std::shared_ptr<GpuRounds> rounds_;
  std::mutex words_mutex_;
  std::bitset<HostWords::kMax> words_taken_;  // guarded by words_mutex_
  std::mutex watching_;
  std::vector<CountedIds*> watched_;  // guarded by watching_
  std::mutex registering_;
  uint64_t registered_ = 0;  ///< as in CallContext
};

/// The rank of a group whose memory is on a GPU.
inline CudaRank& rank_of(Group& group) { return static_cast<CudaRank&>(*group.impl().device); }

}  // namespace switchyard::detail
