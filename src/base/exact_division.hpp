// SPDX-License-Identifier: Apache-2.0
// Division without a division instruction, for GPUs; also compiled for the host, where it is tested.
#pragma once

#include <cstdint>

#include "base/macros.hpp"

namespace switchyard::detail {

/// n / d for n up to a bound. Multiplies by 2^32 / d, rounded up, which is exact while n * d < 2^32; otherwise divides.
class Divisor {
 public:
  Divisor() = default;
  SWITCHYARD_FN Divisor(uint32_t d, uint64_t largest_n)
      : d_(d),
        inverse_(d == 1                                ? uint64_t{1} << 32
                 : largest_n < (uint64_t{1} << 32) / d ? (uint64_t{1} << 32) / d + 1
                                                       : 0) {}

  SWITCHYARD_FN uint32_t value() const { return d_; }
  /// True if quotient_fast is exact for all n within the bound.
  SWITCHYARD_FN bool fast() const { return inverse_ != 0; }
  SWITCHYARD_FN uint32_t quotient_fast(uint32_t n) const { return static_cast<uint32_t>(n * inverse_ >> 32); }
  SWITCHYARD_FN uint32_t quotient(uint32_t n) const { return fast() ? quotient_fast(n) : n / d_; }

 private:
  uint32_t d_ = 1;
  uint64_t inverse_ = uint64_t{1} << 32;
};

}  // namespace switchyard::detail
