// SPDX-License-Identifier: Apache-2.0
// Number formats for checking: from their definitions, in double, one rounding. Shares no code with the library.
#pragma once

#include <cstddef>
#include <cstdint>

#include "switchyard/types.hpp"

namespace switchyard::tool {

/// Element `i` of a row of `type`, widened exactly (fp8: without its scale).
float element(const void* row, DType type, int64_t i);
/// `value` rounded once, ties to even, to `type` and widened again.
float rounded(float value, DType type);
/// Stores `value`, rounded once, as element `i`.
void store_element(void* row, DType type, int64_t i, float value);

/// Quantises one row as the contract says, `size` columns a scale: q [hidden] bytes, scales [num_scales] as float32 or UE8M0
/// bytes.
void quantize_reference(const void* row, DType type, int64_t hidden, ScaleKind kind, uint8_t* q, void* scales,
                        int size = kScaleGroup);

}  // namespace switchyard::tool
