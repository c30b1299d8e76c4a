// SPDX-License-Identifier: Apache-2.0
// How the host knows where replays of a graph are that has rounds: no event of a capture can be asked for.
#pragma once

#include <cstdint>

namespace switchyard::detail {

/// Words of host memory that kernels before and behind a round write, as the GPU sees them; null: nobody asks. The round is
/// under way while they differ.
struct RoundWatch {
  uint64_t* begun = nullptr;
  uint64_t* ended = nullptr;
};
/// What is written: {epoch: 40, operation: 8}.
inline constexpr int kRoundOperationBits = 8;

}  // namespace switchyard::detail
