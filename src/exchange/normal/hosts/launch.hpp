// SPDX-License-Identifier: Apache-2.0
// Host interface of the normal-mode kernels for several hosts: the phases of a call, between which NCCL's kernels run. The
// functions follow the conventions of exchange/normal/launch.hpp. A kernel waits only for ranks of its own host and does
// nothing once the group has failed, because the data of a round must then not be read. The kernels add to CallContext::moved,
// which is 0 before the first of them.
#pragma once

#include "exchange/normal/launch.hpp"
#include "plan/hosts.hpp"
#include "protocol/hosts/combine.hpp"
#include "protocol/hosts/dispatch.hpp"

namespace switchyard::detail {

/// Source: lists the tokens with routes to a host and writes the message with the source's counts for the receiving rank there.
/// One block.
struct AnnounceParams {
  PlanParams plan;  ///< of the call; call_in() finds its call
  CallContext call;
  ObjectState* state = nullptr;
  uint64_t host_ranks = 0;     ///< of the host, as bits
  int32_t* leaving = nullptr;  ///< tokens, ascending
  int64_t* count = nullptr;    ///< their number
  std::byte* message = nullptr;
};
void launch_announce(const AnnounceParams& params, gpu::Stream stream);

/// Proxy: writes a message received from a rank of another host to the ranks of this host. One warp.
struct DeliverParams {
  CallContext call;
  ObjectState* state = nullptr;
  ControlLayout control;
  Site site = Site::counts;  ///< or placement
  int source = -1;
  const std::byte* message = nullptr;
  int64_t* number = nullptr;  ///< receives the number of the message
};
void launch_deliver(const DeliverParams& params, gpu::Stream stream);

/// The result common to all ranks of a host once their placements have arrived.
struct PlacementVerdict {
  int32_t failed_rank;  ///< the first rank that cannot take part, or -1
  int32_t status;       ///< ErrorCode
};
/// Writes this rank's placement to the ranks of its host, and the messages for ranks of other hosts. One warp.
struct OfferParams {
  CallContext call;
  ObjectState* state = nullptr;
  ControlLayout control;
  Placement place{};
  const TablesHeader* handle = nullptr;  ///< its identity is mixed into the signature; null: none
  const TablesHeader* header = nullptr;  ///< of the call: contains its tokens, for the trace
  int topk = 0;                          ///< of the object, for the trace
  bool own_rows_differ = false;
  uint64_t own_rows = 0;
  std::byte* messages = nullptr;
  int64_t message_stride = 0;
  int num_messages = 0;
  PlacementVerdict* verdict = nullptr;
};
void launch_offer(const OfferParams& params, gpu::Stream stream);
/// Waits for all placements and writes the verdict. A rank that made a different call is treated as a fault. One warp.
void launch_judge(const OfferParams& params, gpu::Stream stream);
/// Ends and counts a call that moves nothing. One warp.
void launch_end(const OfferParams& params, gpu::Stream stream);

/// Both ends of a rail: cuts the rounds of a combine and finds whether the peer takes weights. One block.
struct CutParams {
  CallContext call;
  ObjectState* state = nullptr;
  ControlLayout control;
  CombineRail rail;
  int64_t* takes_weights = nullptr;
};
void launch_cut(const CutParams& params, gpu::Stream stream);

/// Sends this rank's rows to the ranks of its host.
void launch_send(const CudaDispatchParams& params, const LaunchShape& launch, const DeviceLimits& limits, gpu::Stream stream);
void launch_pack(const CudaDispatchParams& params, const DispatchRail& rail, int64_t round, const LaunchShape& launch,
                 const DeviceLimits& limits, gpu::Stream stream);
void launch_forward(const CudaDispatchParams& params, const DispatchRail& rail, int64_t round, const LaunchShape& launch,
                    const DeviceLimits& limits, gpu::Stream stream);
void launch_count(const CudaDispatchParams& params, const DispatchRail& rail, const LaunchShape& launch,
                  const DeviceLimits& limits, gpu::Stream stream);
/// Waits for all rows, completes the received records and ends the call.
void launch_finish(const CudaDispatchParams& params, const LaunchShape& launch, const DeviceLimits& limits, gpu::Stream stream);

/// Copies or sums rows that others cannot read in place.
void launch_make(const CudaCombineParams& params, const LaunchShape& launch, gpu::Stream stream);
void launch_give(const CudaCombineParams& params, const CombineRail& rail, int64_t round, const LaunchShape& launch,
                 gpu::Stream stream);
/// The last round ends the call. `hosts`: with its tables in GPU memory.
void launch_add(const CudaCombineParams& params, const ReturningHosts& hosts, const ReturnedTokens& own, int64_t round,
                const LaunchShape& launch, gpu::Stream stream);

}  // namespace switchyard::detail
