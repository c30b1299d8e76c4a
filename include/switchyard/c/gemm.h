// SPDX-License-Identifier: Apache-2.0
/// \file
/// C ABI: the grouped GEMM on GPUs, the counterpart of switchyard/gemm.hpp, which documents the formulas. Library
/// switchyard_layer (CMake: switchyard::layer). The rules of switchyard.h for errors (sy_last_error), structs and destruction
/// apply; no call is collective or requires a group.
///
///     out[r, :] = epilogue(W[e] x[r, :])     for every row r of expert e
///
/// Threads: one thread at a time per object; objects are independent. GPUs: an object belongs to the GPU that is current at
/// creation; rows, weights, scales and counts must be in that GPU's memory.
#pragma once

#include <math.h>

#include "switchyard/c/low_latency.h"
#include "switchyard/c/switchyard.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sy_grouped_gemm sy_grouped_gemm;  ///< one matrix product per expert; sy_grouped_gemm_destroy

/// Memory order of an expert's dense weights.
typedef int32_t sy_weight_order;
enum {
  SY_WEIGHTS_NK = 0,  ///< [N, K]: the order of linear layers in checkpoints, outputs outermost
  SY_WEIGHTS_KN = 1   ///< [K, N]: the transposed product of NK weights, for gradients
};

/// Function applied to the N sums of each row.
typedef int32_t sy_epilogue;
enum {
  SY_EPILOGUE_NONE = 0,   ///< N outputs
  SY_EPILOGUE_RELU = 1,   ///< N outputs: max(v, 0); NaN is kept
  SY_EPILOGUE_SILU = 2,   ///< N outputs: v / (1 + exp(-v))
  SY_EPILOGUE_SWIGLU = 3  ///< N / 2 outputs from the first N / 2 sums (gate) and the others (up)
};

/// Elements that share a scale in products of fp8 rows and weights; see switchyard/gemm.hpp.
typedef int32_t sy_scale_granularity;
enum {
  SY_GRANULARITY_BLOCK = 0,         ///< rows: 128 columns; weights: 128 x 128
  SY_GRANULARITY_PER_CHANNEL = 1,   ///< rows: a whole row; weights: an output; sums of the tensor cores
  SY_GRANULARITY_GROUP_CHANNEL = 2  ///< rows: 128 columns; weights: an output
};

/// Columns of a quantized output row that share a scale.
typedef int32_t sy_output_scaling;
enum {
  SY_OUTPUT_PER_GROUP = 0,  ///< 128 columns: amax / 448
  SY_OUTPUT_FIXED = 1,      ///< all, with a scale given by the caller; larger values saturate
  SY_OUTPUT_PER_ROW = 2     ///< all: amax / 448
};

/// Fixed properties of a grouped GEMM.
typedef struct sy_grouped_gemm_config {
  size_t struct_size;
  int64_t n;            ///< N: a multiple of 8; swiglu: gate and up together, a multiple of 16
  int64_t k;            ///< K: a multiple of 8; fp8: of 16
  int32_t num_experts;  ///< number of local experts, in [1, 2048]
  sy_dtype dtype;       ///< of rows, weights and outputs: bf16 or f16; fp8 e4m3: of rows and weights
  sy_weight_order order;
  sy_epilogue epilogue;
  /// swiglu: g / (1 + exp(-alpha * g)) * (u + up_shift), where g = min(gate, limit) and u is up clamped to [-limit, limit].
  float swiglu_limit SY_DEFAULT(INFINITY);  ///< > 0
  float swiglu_alpha SY_DEFAULT(1.0f);
  float swiglu_up_shift;
  sy_scale_kind weight_scales
      SY_DEFAULT(SY_SCALE_F32);      ///< fp8: kind of the weight scales, [E, S, ceil(K / 128)]; see switchyard/gemm.hpp
  sy_scale_kind quantize;            ///< fp8 with swiglu: outputs are fp8 e4m3 with these scales
  sy_accumulate accumulate;          ///< fast: only fp8 with scaling block
  sy_scale_granularity scaling;      ///< values other than block: only fp8, float32 weight scales [E, N]
  sy_output_scaling output_scaling;  ///< not per group: only if scaling is not block; float32 output scales [rows]
} sy_grouped_gemm_config;

/// Number of columns and data type of an output row. Either pointer may be NULL. Uses only `n`, `dtype`, `epilogue` and
/// `quantize` of the config. Requires no GPU.
sy_code sy_grouped_gemm_output(const sy_grouped_gemm_config* config, int64_t* columns, sy_dtype* dtype);

/// Location of each expert's rows. The arrays are in GPU memory and are read when the kernel runs, so the host does not need
/// the counts. (CPU experts: in host memory.) An expert has no rows if its count or its first row is negative; rows past the
/// end of `x` or the output are skipped. The rows of different experts must not overlap.
typedef struct sy_expert_rows {
  size_t struct_size;
  const int64_t* num_rows;     ///< [experts], or
  const int32_t* num_rows_32;  ///< [experts]
  const int64_t* first_row;    ///< [experts], or NULL: expert e starts at e * rows_per_expert and ends before the next
  int64_t rows_per_expert;
  int64_t scale_rows;  ///< fp8, column-major scales: words between columns of an expert's scales; 0: one scale row per row
  /// Scaling per channel, without scale_rows: words between the scales of consecutive rows: 0 or 1 (dense), or those of a
  /// dispatch's scale row. For a product of another product's quantized outputs, set scale_rows and scale_stride to 0.
  int64_t scale_stride;
} sy_expert_rows;

/// Rows of an expert-major dispatch, from sy_dispatched_get. Errors: invalid_argument if it is rank-major.
sy_code sy_expert_rows_of_dispatched(const sy_dispatched_view* dispatched, sy_expert_rows* rows);
/// Rows of a low-latency output, from sy_low_latency_output_get. Errors: invalid_argument if its scale group is not 128
/// columns.
sy_code sy_expert_rows_of_low_latency(const sy_low_latency_view* output, sy_expert_rows* rows);

/// `weights` is [E, N, K] or [E, K, N] in GPU memory, aligned to 16 bytes; the caller keeps ownership, and every call and graph
/// launch reads it. The same applies to `weight_scales` (fp8 only, else NULL; aligned to 4 bytes). Allocates. Errors:
/// invalid_argument naming the member; unsupported if the library was built without CUDA, or if the GPU does not have compute
/// capability 9.0.
sy_code sy_grouped_gemm_create(const sy_grouped_gemm_config* config, const void* weights, const void* weight_scales,
                               sy_grouped_gemm** gemm);
/// May be called at any time; memory is freed once the enqueued calls and captured graphs that use it are done. Does not wait.
sy_code sy_grouped_gemm_destroy(sy_grouped_gemm* gemm);

/// Options of one call.
typedef struct sy_grouped_gemm_options {
  size_t struct_size;
  void* stream;               ///< cudaStream_t; NULL: the legacy default stream
  int32_t num_sms;            ///< maximum number of multiprocessors, in [1, those of the GPU]; 0: all
  int32_t reserved;           ///< must be 0
  const float* output_scale;  ///< SY_OUTPUT_FIXED: the scale, in GPU memory, > 0; read when the kernel runs
  void* scratch;              ///< SY_OUTPUT_PER_ROW: memory for bf16 [out->rows, columns], aligned to 16 bytes
} sy_grouped_gemm_options;

/// Enqueues the matrix product for each expert's rows. The call does not wait, allocates nothing and can be captured. Calls on
/// one object, including graph launches, must be ordered one after another. `x` is [rows, K] and `out` is [rows, columns], both
/// aligned to 16 bytes. `x` may be rows delivered by a dispatch, and `out` rows that combine reads. Row i of `out` is computed
/// from row i of `x`; rows that belong to no expert are not accessed. `x` and `out` must not overlap. fp8: `x` must have
/// scales; a quantized `out` must have scales too, which are written. `options` NULL: defaults. Errors: invalid_argument naming
/// the argument; system.
sy_code sy_grouped_gemm_run(sy_grouped_gemm* gemm, const sy_const_row_view* x, const sy_expert_rows* rows,
                            const sy_row_view* out, const sy_grouped_gemm_options* options);

#ifdef __cplusplus
}
#endif
