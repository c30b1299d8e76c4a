// SPDX-License-Identifier: Apache-2.0
// Closed-form words, written and copied by kernels; the host computes the expected values itself.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/macros.hpp"

namespace switchyard::test {

/// Word `i` of the pattern for `seed`. Never zero.
SWITCHYARD_FN constexpr uint32_t word_of(uint32_t seed, size_t i) {
  return ((static_cast<uint32_t>(i) * 2654435761u) ^ (seed * 0x9e3779b9u + 0x85ebca6bu)) | 1u;
}

/// Both run on the current device and return when the work is complete. They throw std::runtime_error.
void fill_by_kernel(uint32_t* to, size_t words, uint32_t seed);
void copy_by_kernel(uint32_t* to, const uint32_t* from, size_t words);

}  // namespace switchyard::test
