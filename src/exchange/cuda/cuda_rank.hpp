// SPDX-License-Identifier: Apache-2.0
// One rank's GPU: what all its exchange objects share.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "exchange/cuda/device_tracing.hpp"
#include "exchange/cuda/launch.hpp"
#include "exchange/device_rank.hpp"
#include "heap/cuda/cuda_heap.hpp"

namespace switchyard::detail {

class CudaRank final : public DeviceRank {
 public:
  /// `ranks_here`: ranks of the group on this GPU; `threads`: they are threads of this process.
  CudaRank(CudaHeap& heap, SymmetricHeap& control, int ranks_here, bool threads);
  ~CudaRank() override;

  const std::string& name() const noexcept override { return name_; }
  const char* advice() const noexcept override;
  const FaultRecord* fault() const noexcept override;
  void raise_soft_fault(const char* context) override;
  std::vector<WaitCounter> wait_counters() const override;
  std::vector<std::byte*> reach(Bootstrap& bootstrap, void* memory, size_t bytes, Milliseconds deadline,
                                std::shared_ptr<void>& mapping) override;
  const uint64_t* upload_distances(int slot, const std::vector<uint64_t>& distances) override;
  std::unique_ptr<NormalImpl> make_normal(Group& group, const NormalConfig& config) override;
  std::unique_ptr<LowLatencyImpl> make_low_latency(Group& group, const LowLatencyConfig& config) override;
  std::unique_ptr<LedgerImpl> make_ledger(Group& group, const LedgerConfig& config) override;

  /// Everything but the epoch of a call and where it counts what it moves.
  CallContext context(uint64_t timeout_ns, Operation operation) const;
  int device() const { return heap_.device(); }
  CudaHeap& heap() const { return heap_; }
  const DeviceLimits& limits() const { return limits_; }
  /// Most blocks of a kernel whose blocks wait for each other.
  int max_blocks() const { return limits_.multiprocessors / ranks_here_; }
  /// Blocks of a call: those its caller asks for, else the tuned ones, else `usual` (each 0 for none), as far as there are so
  /// many.
  int blocks(int asked, int tuned, int usual) const { return blocks_of_call(asked, tuned, usual, max_blocks()); }
  /// Throw invalid_argument unless `p` is null or memory that this GPU's kernels can use at that alignment, in bytes; unless
  /// `num_sms` is 0 or a grid whose blocks can all run at once.
  void check_pointer(const char* name, const void* p, size_t alignment) const;
  void check_sms(const char* name, int num_sms) const;
  void start_trace(int blocks, int warps, size_t capacity) override;
  void stop_trace(Tracer& tracer) override;
  SoftFault* device_soft_fault() const { return soft_device_; }
  /// Most warps of any kernel.
  int max_warps() const { return limits_.multiprocessors * std::max(kMoveWarps, kSumWarps); }
  /// Expires with this object.
  std::weak_ptr<CudaRank*> token() const { return self_; }
  /// A call was captured: graphs may still run when the group goes.
  void note_capture() { captured_ = true; }
  /// copy_stream() of its device.
  cudaStream_t copy_stream() const { return copies_; }

 private:
  template <class T>
  std::vector<T> download(const T* from, size_t count) const;

  CudaHeap& heap_;
  std::byte* control_;                     ///< this rank's segment of host memory, registered
  uint64_t* host_abort_device_ = nullptr;  ///< its parts as the GPU sees them
  FaultRecord* fault_device_ = nullptr;
  SoftFault* soft_device_ = nullptr;
  int ranks_here_;
  bool threads_;
  std::string name_;
  DeviceLimits limits_;
  DeviceMemory counters_;          ///< fault claims, a word that is never 0, distances, wait counters
  uint64_t* distances_ = nullptr;  ///< [slots of registrations, world]
  WaitCounter* waits_ = nullptr;
  cudaStream_t copies_ = nullptr;
  DeviceTracing tracing_;
  ClockMailbox mailbox_;
  std::shared_ptr<CudaRank*> self_ = std::make_shared<CudaRank*>(this);
  std::atomic<bool> captured_ = false;
};

}  // namespace switchyard::detail
