// SPDX-License-Identifier: Apache-2.0
// Lets the host track replays of a graph that contains rounds, because it cannot query the events of a capture.
#pragma once

#include <cstdint>

namespace switchyard::detail {

/// Words of host memory, as addressed by the GPU, written by the kernels before and after a round; null if not watched. The
/// round is in flight while the words differ.
struct RoundWatch {
  uint64_t* begun = nullptr;
  uint64_t* ended = nullptr;
};
/// Format of the words: {epoch: 40, operation: 8}.
inline constexpr int kRoundOperationBits = 8;

}  // namespace switchyard::detail
