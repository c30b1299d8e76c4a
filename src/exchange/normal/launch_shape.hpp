// SPDX-License-Identifier: Apache-2.0
// Selects the tuning values that apply to a call of normal mode on a GPU. Independent of the device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "exchange/tuning/blocks.hpp"
#include "switchyard/normal.hpp"
#include "switchyard/tuning.hpp"

namespace switchyard::detail {

/// Warps per block of dispatch: the number of 14 KiB rows that fit into shared memory.
inline constexpr int kMoveWarps = kMaxDispatchWarps;
/// Warps per block of combine: as many as registers allow, for the most loads in flight.
inline constexpr int kSumWarps = kMaxCombineWarps;

/// The calls of normal mode that a tuning distinguishes. A quantizing dispatch converts rows to fp8 in transit; a copying
/// combine first copies rows to memory that their owners can read.
enum class NormalCall : uint8_t { dispatch, quantising_dispatch, combine, copying_combine };

/// `stages` = 0 means two if whole rows fit twice, otherwise one.
struct LaunchShape {
  int blocks = 0, warps = 0, stages = 0;
};

/// Launch shape of a normal-mode call with direct staging that requests `asked` of `max` multiprocessors (0: as tuned). The
/// warps and stages of a tuning entry were measured with that entry's number of multiprocessors. They apply to calls that run
/// on the same number of multiprocessors as a call without a request, whether the caller sets the number, the entry leaves it
/// to the default, or the rank has fewer. A quantizing dispatch computes more than it stores, and a copying combine moves each
/// row twice. Both therefore have separate defaults and always use the library's warps and stages.
inline LaunchShape normal_launch(const TuningValues& tuned, NormalCall call, int asked, int max) {
  if (call == NormalCall::quantising_dispatch)
    return {blocks_of_call(asked, tuned.quantized_dispatch_sms, kDefaultQuantizingSms, max), kMoveWarps, 0};
  if (call == NormalCall::copying_combine)
    return {blocks_of_call(asked, std::max(tuned.combine_sms, kDefaultCopyingSms), 0, max), kSumWarps, 0};
  const bool combines = call == NormalCall::combine;
  const int sms = combines ? tuned.combine_sms : tuned.dispatch_sms;
  LaunchShape launch{blocks_of_call(asked, sms, kDefaultSms, max), combines ? kSumWarps : kMoveWarps, 0};
  if (launch.blocks != blocks_of_call(0, sms, kDefaultSms, max)) return launch;
  if (const int warps = combines ? tuned.combine_warps : tuned.dispatch_warps; warps > 0) launch.warps = warps;
  if (!combines) launch.stages = tuned.dispatch_stages;
  return launch;
}

}  // namespace switchyard::detail
