// SPDX-License-Identifier: Apache-2.0
/// \file
/// C ABI: the grouped GEMM on GPUs, the twin of switchyard/gemm.hpp, which has the formulas. Library switchyard_layer (CMake:
/// switchyard::layer). What switchyard.h says of errors (sy_last_error), structs and destruction holds here too; no call is
/// collective, and none needs a group.
///
///     out[r, :] = epilogue(W[e] x[r, :])     for every row r of expert e
///
/// Threads: one at a time per object; objects are independent. GPUs: an object belongs to the GPU that is current when it is
/// made; rows, weights, scales and counts are in its memory.
#pragma once

#include <math.h>

#include "switchyard/c/low_latency.h"
#include "switchyard/c/switchyard.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sy_grouped_gemm sy_grouped_gemm;  ///< one matrix product per expert; sy_grouped_gemm_destroy

/// How an expert's weights lie in memory, dense.
typedef int32_t sy_weight_order;
enum {
  SWITCHYARD_WEIGHTS_NK = 0,  ///< [N, K]: as checkpoints store linear layers, outputs outside
  SWITCHYARD_WEIGHTS_KN = 1   ///< [K, N]: the transposed product of NK weights, as a gradient needs it
};

/// What becomes of the N sums of a row.
typedef int32_t sy_epilogue;
enum {
  SWITCHYARD_EPILOGUE_NONE = 0,   ///< N outputs
  SWITCHYARD_EPILOGUE_RELU = 1,   ///< N outputs: max(v, 0); NaN stays
  SWITCHYARD_EPILOGUE_SILU = 2,   ///< N outputs: v / (1 + exp(-v))
  SWITCHYARD_EPILOGUE_SWIGLU = 3  ///< N / 2 outputs of the first N / 2 sums (gate) and the others (up)
};

/// Fixed properties of a grouped GEMM.
typedef struct sy_grouped_gemm_config {
  size_t struct_size;
  int64_t n;            ///< N: a multiple of 8; swiglu, gate and up counted both: of 16
  int64_t k;            ///< K: a multiple of 8; fp8: of 16
  int32_t num_experts;  ///< in [1, 2048]: of this rank
  sy_dtype type;        ///< of rows, weights and outputs: bf16 or f16; fp8 e4m3: of rows and weights
  sy_weight_order order;
  sy_epilogue epilogue;
  /// swiglu: g / (1 + exp(-alpha * g)) * (u + up_shift), where g = min(gate, limit) and u = up, brought into [-limit, limit].
  float swiglu_limit;  ///< > 0
  float swiglu_alpha;
  float swiglu_up_shift;
  sy_scale_kind weight_scales;  ///< fp8: of the scales of the weights, [E, S, ceil(K / 128)]; see switchyard/gemm.hpp
  sy_scale_kind quantize;       ///< fp8 with swiglu: outputs are fp8 e4m3 with such scales
  int32_t reserved;             ///< must be 0
} sy_grouped_gemm_config;
#define SWITCHYARD_GROUPED_GEMM_CONFIG_INIT                                                                                    \
  {                                                                                                                            \
    sizeof(sy_grouped_gemm_config), 0, 0, 0, SWITCHYARD_DTYPE_BF16, SWITCHYARD_WEIGHTS_NK, SWITCHYARD_EPILOGUE_NONE, INFINITY, \
        1.0f, 0.0f, SWITCHYARD_SCALE_F32, SWITCHYARD_SCALE_NONE, 0                                                             \
  }

/// Columns and type of an output row. Either pointer may be NULL. Of the config only `n`, `type`, `epilogue` and `quantize`
/// count. Needs no GPU.
switchyard_code_t sy_grouped_gemm_output(const sy_grouped_gemm_config* config, int64_t* columns, sy_dtype* type);

/// Where the rows of each expert lie. The arrays are in memory of the GPU and are read when the kernel runs: no host needs to
/// know a count. (Experts on the CPU: in memory of the host.) A count is taken as 0 if it or the first row is negative, and
/// rows that would lie behind those of `x` or of the output are left out. The rows of different experts must not overlap.
typedef struct sy_expert_rows {
  size_t struct_size;
  const int64_t* num_rows;     ///< [experts], or
  const int32_t* num_rows_32;  ///< [experts]
  const int64_t* first_row;    ///< [experts], or NULL: expert e begins at e * rows_per_expert and ends before the next
  int64_t rows_per_expert;
  int64_t scale_rows;  ///< fp8, scales by columns: words from a column of an expert's scales to the next; 0: a row for each row
} sy_expert_rows;
#define SWITCHYARD_EXPERT_ROWS_INIT \
  { sizeof(sy_expert_rows), NULL, NULL, NULL, 0, 0 }

/// Of an expert-major dispatch, as sy_dispatched_get gave it. Errors: invalid_argument if it is rank-major.
switchyard_code_t sy_expert_rows_of_dispatched(const sy_dispatched_view* dispatched, sy_expert_rows* rows);
/// Of a low-latency output, as sy_low_latency_output_get gave it. Errors: invalid_argument if its rows have scales of other
/// groups than 128 columns.
switchyard_code_t sy_expert_rows_of_low_latency(const sy_low_latency_view* output, sy_expert_rows* rows);

/// `weights` is [E, N, K] or [E, K, N] in memory of the GPU, at a multiple of 16 bytes; it stays the caller's, and is read by
/// every call and graph; so are `weight_scales` (fp8 only, else NULL; at a multiple of 4 bytes). Allocates. Errors:
/// invalid_argument naming the member; unsupported where the library was built without CUDA, or for a GPU of another kind than
/// compute capability 9.0.
switchyard_code_t sy_grouped_gemm_create(const sy_grouped_gemm_config* config, const void* weights, const void* weight_scales,
                                         sy_grouped_gemm** gemm);
/// At any time: memory that enqueued calls and captured graphs use is freed after them. Waits for nothing.
switchyard_code_t sy_grouped_gemm_destroy(sy_grouped_gemm* gemm);

/// Options of one call.
typedef struct sy_grouped_gemm_options {
  size_t struct_size;
  void* stream;      ///< cudaStream_t; NULL: the legacy default stream
  int32_t num_sms;   ///< most multiprocessors, in [1, those of the GPU]; 0: all
  int32_t reserved;  ///< must be 0
} sy_grouped_gemm_options;
#define SWITCHYARD_GROUPED_GEMM_OPTIONS_INIT \
  { sizeof(sy_grouped_gemm_options), NULL, 0, 0 }

/// Enqueues the products of the rows of each expert; waits for nothing, allocates nothing, can be captured. Calls of one
/// object, graphs included, must be ordered one after the other. `x` is [rows, K], `out` [rows, columns], both at multiples of
/// 16 bytes: rows as a dispatch delivers them, and rows that combine reads. Row i of `out` is of row i of `x`; rows of no
/// expert are not touched. They must not overlap. fp8: `x` has its scales; so has an `out` that is quantised, whose scales are
/// written. `options` NULL: defaults. Errors: invalid_argument naming the argument; system.
switchyard_code_t sy_grouped_gemm_run(sy_grouped_gemm* gemm, const sy_const_row_view* x, const sy_expert_rows* rows,
                                      const sy_row_view* out, const sy_grouped_gemm_options* options);

#ifdef __cplusplus
}
#endif
