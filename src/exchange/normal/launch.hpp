// SPDX-License-Identifier: Apache-2.0
// Host interface of the normal-mode kernels that move rows (for the plan kernel, see plan/launch.hpp). Every function enqueues
// on `stream` of the current device and returns without waiting. Launch failures throw Error(system).
#pragma once

#include <cstdint>

#include "arch/gpu_runtime.hpp"
#include "exchange/normal/launch_shape.hpp"
#include "exchange/normal/plan/launch.hpp"
#include "exchange/normal/plan/tables.hpp"
#include "protocol/normal/combine_pull.hpp"
#include "protocol/normal/dispatch_direct.hpp"
#include "protocol/normal/ring.hpp"

namespace switchyard::detail {

/// Multiprocessors whose stores fill the link; see docs/design/0018-assigned-work.md.
inline constexpr int kLinkSms = 20;
/// With more sending multiprocessors, the link becomes slower; see docs/design/0018-assigned-work.md.
inline constexpr int kMaxSendSms = 32;
/// Multiprocessors that push rows in combine per_route while the others sum. The launcher multiplies this by (W - 1) / W, the
/// share of the other ranks.
inline constexpr int kPushSms = 28;
/// Minimum number of multiprocessors at which pushing is faster for rows that owners could read in place; see
/// docs/design/0004-combine-pulls.md.
inline constexpr int kPushFrom = 40;
/// Minimum number of multiprocessors at which some only send and the others only do local work (in expert-major calls).
inline constexpr int kMinSmsToSplitRoles = 16;

/// Parts of the output that a dispatch fills in addition to the arriving data.
struct FillRest {
  Received received;  ///< records null: cached dispatch, or nothing to receive
  int64_t rows_allocated = 0;
  const int64_t* padding = nullptr;  ///< expert-major: [num_ranges, 2] rows without a source
  int num_ranges = 0;
};

/// Set by CudaNormal::move_params. The kernel adds the epoch and the table header, which a plan has written, to MoveStart. For
/// a cached dispatch, it also adds the identity of the dispatch that made the tables to place.signature.
struct CudaDispatchParams {
  DispatchParams d;
  RankWords words;
  ObjectState* state = nullptr;
  TablesHeader* header = nullptr;
  bool offers_place = false;  ///< this kernel publishes `place`
  Placement place{};
  uint64_t own_rows = 0;  ///< place.rows for this rank itself
  SoftFault* soft = nullptr;
  FillRest rest;
};

/// Set by CudaNormal::sum_params. The kernel adds the epoch and the table header to SumStart, and the identity of the dispatch
/// that made the tables to place.signature.
struct CudaCombineParams {
  CombineParams c;
  RankWords words;
  ObjectState* state = nullptr;
  const TablesHeader* header = nullptr;
  SoftFault* soft = nullptr;
  // For the weights, see NormalImpl::SumWeights. The weights in the tables are unused if no rank passed weights to the
  // dispatch.
  const float* weights_of_records = nullptr;
  const float* weights_of_routes = nullptr;
  const float* caller_weights = nullptr;
};

/// Additional parameters of dispatch and combine kernels with ring staging. Set by CudaNormal::ring_parts.
struct RingParts {
  RingLayout rings;
  RingStream* streams = nullptr;  ///< [rings.num_streams()]
  Destination mine{};             ///< dispatch: this rank's output
  int send_chunk = 1;
};

/// `after_plan`: the previous kernel on the stream is the plan of the same call, and this launch overlaps it.
void launch_dispatch(const CudaDispatchParams& params, bool after_plan, const LaunchShape& launch, const DeviceLimits& limits,
                     gpu::Stream stream);
void launch_combine(const CudaCombineParams& params, const LaunchShape& launch, gpu::Stream stream);
/// With ring staging, every warp may wait for any other warp of its rank or of the peers, so all blocks must be able to run
/// concurrently. `blocks` is at most the number of multiprocessors that the rank has to itself (CudaRank::max_blocks); each
/// block occupies one of them.
void launch_ring_dispatch(const CudaDispatchParams& params, const RingParts& ring, bool after_plan, int blocks,
                          const DeviceLimits& limits, gpu::Stream stream);
void launch_ring_combine(const CudaCombineParams& params, const RingParts& ring, int blocks, const DeviceLimits& limits,
                         gpu::Stream stream);
/// Result of a dispatch and the caller's destination for it.
struct CopyOut {
  const TablesHeader* header = nullptr;  ///< header of the dispatch, with the number of rows that arrived; null: nothing to do
  MoveCounter* moved = nullptr;
  const std::byte *rows = nullptr, *scales = nullptr;
  std::byte *to_rows = nullptr, *to_scales = nullptr;
  int64_t row_bytes = 0, scale_bytes = 0;  ///< multiples of 16 bytes
};
/// Enqueues the copy on the dispatch's stream, after the dispatch.
void launch_copy_out(const CopyOut& copy, int blocks, gpu::Stream stream);
/// Rank-major layout with drops: counts the kept routes per (source, expert) from the received records.
void launch_count_kept(const PlanParams& params, const Received& received, gpu::Stream stream);

}  // namespace switchyard::detail
