// SPDX-License-Identifier: Apache-2.0
// One rank's low-latency exchange with other hosts on a GPU: NCCL rounds, the ranks for which it is the proxy, and the phases
// of its calls. The host never waits, because all sizes follow from the configuration.
//
// A whole call consists of two kernels on the caller's stream with a round between them. For a split call, all work between
// this rank's sending and receiving halves runs on a separate stream, because other ranks wait for some of it while this rank
// may be making any other calls.
#pragma once

#include <memory>
#include <vector>

#include "exchange/hosts/rounds.hpp"
#include "exchange/gpu/rank.hpp"
#include "arch/gpu_order.hpp"
#include "exchange/low_latency/hosts/remote_plan.hpp"
#include "exchange/low_latency/hosts/launch.hpp"

namespace switchyard::detail {

class GpuLowLatencyLinks {
 public:
  /// Collective, inside Group::Impl::collectively() with the GPU current.
  GpuLowLatencyLinks(Group::Impl& group, CudaRank& gpu, const LowLatencyLayout& layout);
  /// Waits for the enqueued work of split calls that have not been received.
  ~GpuLowLatencyLinks();
  GpuLowLatencyLinks(const GpuLowLatencyLinks&) = delete;
  GpuLowLatencyLinks& operator=(const GpuLowLatencyLinks&) = delete;
  /// Call before destruction; sets the uses that must be over before this object's memory is freed.
  void set_uses(MemoryUses uses) { uses_ = std::move(uses); }

  const std::vector<int>& host_of() const { return plan_.host_of; }
  /// Bytes occupied by CrossedIds in an output's memory.
  int64_t crossed_bytes() const;

  /// How a call or one of its halves is enqueued.
  struct Launch {
    gpu::Stream stream = nullptr;
    bool captured = false;
    LaunchedHalves halves;
    int blocks = 1, warps = 1;  ///< of each kernel
  };
  /// `crossed`: the output's crossed tokens. \throws Error(unsupported) for a capture where rounds cannot be captured.
  void dispatch(const LowLatencyDispatchParams& params, LowLatencyState* state, const int32_t* device_tokens,
                const uint32_t* map_version, CrossedIds crossed, const Launch& launch);
  void combine(const LowLatencyCombineParams& params, LowLatencyState* state, CrossedIds crossed, const Launch& launch);

 private:
  void take_memory();
  void take_remote_rows();
  RoundWatch watch(const Launch& launch);
  void post(std::span<const PeerTransfer> transfers, const CallContext& call, const Launch& launch, gpu::Stream stream);
  /// Calls between(stream) with this object's own stream, ordered after `stream`; work enqueued after join() follows it.
  template <class Between>
  void fork(gpu::Stream stream, const Between& between);
  void join(gpu::Stream stream);

  Group::Impl& group_;
  CudaRank& gpu_;
  const LowLatencyLayout layout_;
  const RemotePlan plan_;
  RemoteRails remote_;
  RemoteReturns returns_;
  DeviceMemory memory_;  ///< tables, then the send and receive memory of rounds
  MemoryUses uses_;
  std::unique_ptr<CudaHeap> remote_rows_;
  std::shared_ptr<GpuRounds> rounds_;
  std::shared_ptr<GpuRounds::Replays> replays_;  ///< null until a call is captured
  /// Stream for the work between the halves of split calls. It is a separate stream because a capture may include it.
  gpu::Stream side_stream_ = nullptr;
  Point split_;  ///< the end of a split call's work there
};

}  // namespace switchyard::detail
