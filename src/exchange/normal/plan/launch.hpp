// SPDX-License-Identifier: Apache-2.0
// Host interface of the plan kernel for normal mode and the fused layer.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "arch/gpu_runtime.hpp"
#include "base/call_signature.hpp"
#include "exchange/gpu/kernel.hpp"
#include "exchange/gpu/state.hpp"
#include "exchange/normal/plan/tables.hpp"
#include "layout/control.hpp"
#include "plan/plan.hpp"

namespace switchyard::detail {

/// Expert limit of the plan kernel, which counts in shared memory (for expert-major rows, separately in each warp).
inline constexpr int max_cuda_experts(Layout layout) { return layout == Layout::expert_major ? 4608 : 6144; }
inline constexpr int64_t kMaxTokensPerPlanBlock = 4096;

/// Parameters of the plan, which covers everything that depends on routing: counts, their exchange, and addresses. Set by
/// CudaNormal::plan_params.
struct PlanParams {
  CallContext call;  ///< without the epoch
  RankWords words;
  ControlLayout control;
  ObjectState* state = nullptr;
  int32_t* block_counts = nullptr;  ///< scratch [blocks, W + E]
  int32_t* totals = nullptr;        ///< scratch [W + E], zero between launches

  const void* ids = nullptr;
  bool ids64 = false;
  int64_t tokens = 0;  ///< T, or its bound if device_tokens is given
  const int32_t* device_tokens = nullptr;
  const float* weights = nullptr;
  int topk = 0;
  ExpertRanges map;
  Layout layout = Layout::rank_major;
  int alignment = 1;
  int64_t capacity = 0;
  bool fail_on_overflow = false;
  /// Fused layer. Overflow::split: tokens of a pass; else 0. If a rank's rows exceed its capacity, the plan's status becomes
  /// kSplitStatus on all ranks, and ObjectState::passes the number of passes.
  int64_t split_tokens = 0;
  int pass = 0;               ///< number of this pass, from 1, of a call that may be split; the plan of the whole call has 0
  int64_t first_token = 0;    ///< of a pass; `ids`, `weights` and `tokens` begin there, device_tokens counts from 0
  bool static_drops = false;  ///< rank-major without drops: kept counts follow from the plan
  uint64_t signature = 0;
  const uint32_t* map_version = nullptr;  ///< included in the signature sent with the counts (with_map_version); null: none
  uint64_t object = 0;                    ///< identity of this object, the same on all ranks
  bool offers_place = false;              ///< `place` is already known and is sent with the counts
  Placement place{};
  uint64_t own_rows = 0;  ///< place.rows for this rank itself
  Tables tables;
  SoftFault* soft = nullptr;
};

/// The signature that a rank sends with its counts.
SWITCHYARD_FN inline uint64_t sent_signature(const PlanParams& p) {
  return p.map_version != nullptr ? with_map_version(p.signature, *p.map_version) : p.signature;
}

/// The idle state is that of the object, followed by the header of its tables.
inline void set_idle(PlanParams& p, const IdleCall& idle) {
  static_assert(kObjectStateBytes + sizeof(TablesHeader) <= IdleCall::kStateBytes);
  p.call = idle.call;
  p.state = static_cast<ObjectState*>(idle.state);
  p.tables.header = reinterpret_cast<TablesHeader*>(static_cast<std::byte*>(idle.state) + kObjectStateBytes);
}

/// Number of blocks for a plan of `tokens` tokens, at most `max`; each block sums the counts of the blocks before it.
inline int plan_blocks(int64_t tokens, int max) {
  constexpr int64_t kDefaultTokens = 64, kDefaultMaxBlocks = 64;
  const auto of = [&](int64_t each) { return (tokens + each - 1) / each; };
  const int64_t wanted = std::max(std::min(of(kDefaultTokens), kDefaultMaxBlocks), of(kMaxTokensPerPlanBlock));
  return static_cast<int>(std::clamp<int64_t>(wanted, 1, max));
}

/// Enqueues on `stream` of the current device and returns without waiting. A launch failure throws Error(system).
/// `spans_hosts`: counts are sent only to ranks of this host; ranks of other hosts receive them through their proxies.
/// `dependent`: a pass may be scheduled while the previous kernel ends.
void launch_plan(const PlanParams& params, int blocks, gpu::Stream stream, bool spans_hosts = false, bool dependent = false);

}  // namespace switchyard::detail
