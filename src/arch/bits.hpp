// SPDX-License-Identifier: Apache-2.0
// Bit counting with the fastest instructions of each architecture.
#pragma once

#include <bit>
#include <cstdint>

#include "base/macros.hpp"

namespace switchyard::detail {

/// Number of set bits.
SWITCHYARD_FN inline int bits(uint64_t mask) {
#if defined(__CUDA_ARCH__)
  return __popcll(mask);
#else
  return std::popcount(mask);
#endif
}
SWITCHYARD_FN inline int bits(uint32_t mask) {
#if defined(__CUDA_ARCH__)
  return __popc(mask);
#else
  return std::popcount(mask);
#endif
}

/// Position of the n-th set bit, counting from 0; the bit must exist.
SWITCHYARD_FN inline int nth_bit(uint64_t mask, int n) {
  for (; n > 0; --n) mask &= mask - 1;
  return bits((mask & (~mask + 1)) - 1);
}

}  // namespace switchyard::detail
