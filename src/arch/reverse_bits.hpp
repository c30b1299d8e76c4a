// SPDX-License-Identifier: Apache-2.0
// Bit reversal with the fastest instructions of each architecture. Separate from bits.hpp for tables that need only this.
#pragma once

#include <cstdint>

#include "base/macros.hpp"

namespace switchyard::detail {

SWITCHYARD_FN inline uint32_t reverse_bits(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __brev(bits);  // the compiler does not recognize the expressions below
#else
  bits = (bits >> 16) | (bits << 16);
  bits = ((bits >> 8) & 0x00ff00ffu) | ((bits & 0x00ff00ffu) << 8);
  bits = ((bits >> 4) & 0x0f0f0f0fu) | ((bits & 0x0f0f0f0fu) << 4);
  bits = ((bits >> 2) & 0x33333333u) | ((bits & 0x33333333u) << 2);
  return ((bits >> 1) & 0x55555555u) | ((bits & 0x55555555u) << 1);
#endif
}

}  // namespace switchyard::detail
