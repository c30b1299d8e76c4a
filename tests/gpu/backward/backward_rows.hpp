// SPDX-License-Identifier: Apache-2.0
// Computations of a layer's backward pass that are not library calls: two passes over rows, element by element.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace harness {

/// rows[r, :] *= weights[r] for every row with source[r] >= 0, in bf16, rounded to nearest even; the others are unchanged.
void weigh_rows(void* rows, int64_t count, int64_t columns, const float* weights, const int64_t* source, cudaStream_t stream);

/// to[r, k] = values[r], where k is the choice named by source[r] (Dispatched::row_source). The other elements of the `columns`
/// columns are 0, as are rows with a negative source.
void place_in_columns(float* to, int64_t count, int columns, const float* values, const int64_t* source, cudaStream_t stream);

}  // namespace harness
