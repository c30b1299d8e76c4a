// SPDX-License-Identifier: Apache-2.0
// Quantization of whole rows: one scale per row, over all its columns.
#pragma once

#include <cstddef>
#include <cstdint>

#include "arch/gpu_runtime.hpp"

namespace switchyard::detail::gemm {

struct RowRanges;

/// Rows to quantize, in GPU memory. `from` and `to` are dense and begin at multiples of 16 bytes.
struct RowQuantising {
  const void* from = nullptr;     ///< bf16 [rows, columns]
  int64_t rows = 0, columns = 0;  ///< columns: a multiple of 16
  void* to = nullptr;             ///< e4m3 [rows, columns]
  float* scales = nullptr;  ///< the scale of row r is written to scales[r * scale_words] and the `copies` - 1 words after it
  int64_t scale_words = 1;
  int copies = 1;
};

/// Quantizes the rows of all experts; other rows are not accessed. The scale of a row is amax / 448 of its finite elements; see
/// cuda_quantize.cuh for the remaining rules. `blocks`, at least 1, is the number of blocks of the kernel.
gpu::Status quantise_rows(const RowQuantising& of, const RowRanges& ranges, int num_experts, int blocks, gpu::Stream stream);
/// Quantizes all rows or, if `device_rows` is not null, the first *device_rows, which is read when the kernel runs.
gpu::Status quantise_rows(const RowQuantising& of, const int32_t* device_rows, int blocks, gpu::Stream stream);
/// Loads the kernels on the current device.
gpu::Status load_quantise_rows();

}  // namespace switchyard::detail::gemm
