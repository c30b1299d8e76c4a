// SPDX-License-Identifier: Apache-2.0
// What one rank's low-latency exchange on a GPU has of other hosts: rounds by NCCL, whom it stands for, and the phases of its
// calls. No host waits for anything: all sizes are those of the configuration.
//
// A whole call is two kernels of the caller's stream with a round between them. Of a call in halves, what lies between what
// this rank sends and what it receives runs on a stream of its own: other ranks wait for some of it, and this rank may call
// what it likes meanwhile.
#pragma once

#include <memory>
#include <vector>

#include "exchange/gpu/hosts/rounds.hpp"
#include "exchange/gpu/rank.hpp"
#include "arch/gpu_order.hpp"
#include "exchange/low_latency/hosts/far_plan.hpp"
#include "exchange/low_latency/hosts/launch.hpp"

namespace switchyard::detail {

class GpuLowLatencyLinks {
 public:
  /// Collective, in Group::Impl::collectively(), with the GPU current.
  GpuLowLatencyLinks(Group::Impl& group, CudaRank& gpu, const LowLatencyLayout& layout);
  /// Waits for what a split call has enqueued that was not received.
  ~GpuLowLatencyLinks();
  GpuLowLatencyLinks(const GpuLowLatencyLinks&) = delete;
  GpuLowLatencyLinks& operator=(const GpuLowLatencyLinks&) = delete;
  /// Before the end: what its memory ends after.
  void set_uses(MemoryUses uses) { uses_ = std::move(uses); }

  const std::vector<int>& host_of() const { return plan_.host_of; }
  /// Bytes of CrossedIds in an output's memory.
  int64_t crossed_bytes() const;

  /// Where and how a call, or a half of it, is enqueued.
  struct Launch {
    gpu::Stream stream = nullptr;
    bool captured = false;
    LaunchedHalves halves;
    int blocks = 1, warps = 1;  ///< of each kernel
  };
  /// `crossed`: the output's. \throws Error(unsupported) for a capture where rounds cannot be captured.
  void dispatch(const LowLatencyDispatchParams& params, LowLatencyState* state, const int32_t* device_tokens,
                CrossedIds crossed, const Launch& launch);
  void combine(const LowLatencyCombineParams& params, LowLatencyState* state, CrossedIds crossed, const Launch& launch);

 private:
  void take_memory();
  void take_far_rows();
  RoundWatch watch(const Launch& launch);
  void post(std::span<const Leg> legs, const CallContext& call, const Launch& launch, gpu::Stream stream);
  /// Calls between(stream) on this object's own stream behind what `stream` has; what joins it comes behind that.
  template <class Between>
  void fork(gpu::Stream stream, const Between& between);
  void join(gpu::Stream stream);

  Group::Impl& group_;
  CudaRank& gpu_;
  const LowLatencyLayout layout_;
  const FarPlan plan_;
  FarRails far_;
  FarReturns returns_;
  DeviceMemory memory_;  ///< tables, then what rounds send and bring
  MemoryUses uses_;
  std::unique_ptr<CudaHeap> far_rows_;
  std::shared_ptr<GpuRounds> rounds_;
  std::shared_ptr<GpuRounds::Replays> replays_;  ///< once a call is captured
  /// Of split calls: what their halves do between each other. Its own, because a capture may take it in.
  gpu::Stream beside_ = nullptr;
  Point split_;  ///< the end of what a split call enqueued there
};

}  // namespace switchyard::detail
