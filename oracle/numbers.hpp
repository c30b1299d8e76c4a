// SPDX-License-Identifier: Apache-2.0
// The oracle's number formats, by definition: exact values in double, rounded once. Shares no code with src/.
#pragma once

#include <cstddef>
#include <cstdint>

#include "switchyard/types.hpp"

namespace oracle {

/// An IEEE-like format. With `finite_only`, there is no infinity: larger values saturate, and the all-ones code is the only NaN
/// (e4m3).
struct Format {
  int exponent_bits;
  int mantissa_bits;
  bool finite_only;
};
inline constexpr Format kBf16{8, 7, false};
inline constexpr Format kF16{5, 10, false};
inline constexpr Format kE4m3{4, 3, true};

/// 2^e, -1022 <= e <= 1023.
inline double power_of_two(int e) { return __builtin_bit_cast(double, static_cast<uint64_t>(e + 1023) << 52); }

/// Nearest code; ties go to even. NaN is encoded as the canonical quiet NaN (0x7F for e4m3).
uint32_t encode(const Format& format, double value);
/// Exact.
double decode(const Format& format, uint32_t code);

/// load_row reads all elements of a row of `type` exactly; store_row writes a row of `values`, each rounded once. Equivalent to
/// decode and encode.
void load_row(switchyard::DType type, const void* row, int64_t elements, float* values);
void store_row(switchyard::DType type, const float* values, int64_t elements, void* row);
/// Exact value of element `i` of a row of `type`.
float load(switchyard::DType type, const void* row, int64_t i);
/// Stores `value`, rounded once, as element `i`.
void store(switchyard::DType type, void* row, int64_t i, float value);
/// `value` rounded once to `type`.
float rounded(switchyard::DType type, float value);
/// True if the two elements have identical bits or are both NaN.
bool same_element(switchyard::DType type, const void* a, const void* b, int64_t i);
/// Index of the first element that differs between two rows, or `elements` if none does.
int64_t first_difference(switchyard::DType type, const void* a, const void* b, int64_t elements);

}  // namespace oracle
