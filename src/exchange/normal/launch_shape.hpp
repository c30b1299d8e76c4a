// SPDX-License-Identifier: Apache-2.0
// Which values of a tuning are in force in a call of normal mode on a GPU. Knows no device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "exchange/tuning/blocks.hpp"
#include "switchyard/normal.hpp"
#include "switchyard/tuning.hpp"

namespace switchyard::detail {

/// Per block of dispatch: as many rows of 14 KiB as shared memory holds.
inline constexpr int kMoveWarps = kMostDispatchWarps;
/// Per block of combine: as many loads under way as registers allow.
inline constexpr int kSumWarps = kMostCombineWarps;

/// The calls of normal mode that a tuning tells apart. A quantising dispatch makes fp8 rows of others on the way, a
/// copying combine first copies rows to where their owners can read them.
enum class NormalCall : uint8_t { dispatch, quantising_dispatch, combine, copying_combine };

/// How a kernel is launched. `stages` 0: two if whole rows fit twice.
struct LaunchShape {
  int blocks = 0, warps = 0, stages = 0;
};

/// A call of normal mode under direct staging that asks for `asked` multiprocessors (0: as tuned) of `most`. Warps and stages
/// were found with the multiprocessors of their entry: they are in force in calls that run on as many as a call that asks for
/// none. So it does not matter who names the number, nor whether the entry leaves it to the default, nor whether the rank has
/// fewer. A quantising dispatch computes more than it stores, and a copying combine moves each row twice: they have defaults of
/// their own, and their warps and stages are always the library's own.
inline LaunchShape normal_launch(const TuningValues& tuned, NormalCall call, int asked, int most) {
  if (call == NormalCall::quantising_dispatch)
    return {blocks_of_call(asked, tuned.quantized_dispatch_sms, kDefaultQuantizingSms, most), kMoveWarps, 0};
  if (call == NormalCall::copying_combine)
    return {blocks_of_call(asked, std::max(tuned.combine_sms, kDefaultCopyingSms), 0, most), kSumWarps, 0};
  const bool combines = call == NormalCall::combine;
  const int sms = combines ? tuned.combine_sms : tuned.dispatch_sms;
  LaunchShape launch{blocks_of_call(asked, sms, kDefaultSms, most), combines ? kSumWarps : kMoveWarps, 0};
  if (launch.blocks != blocks_of_call(0, sms, kDefaultSms, most)) return launch;
  if (const int warps = combines ? tuned.combine_warps : tuned.dispatch_warps; warps > 0) launch.warps = warps;
  if (!combines) launch.stages = tuned.dispatch_stages;
  return launch;
}

}  // namespace switchyard::detail
