// SPDX-License-Identifier: Apache-2.0
/// \file
/// C ABI: the backward pass of an expert MLP on GPUs, the counterpart of switchyard/gemm_gradients.hpp, which documents the
/// formulas, the summation order and the rounding. Library switchyard_layer (CMake: switchyard::layer). The rules of
/// switchyard.h for errors (sy_last_error), structs and destruction apply; no call is collective or requires a group. The row
/// gradient is computed by a sy_grouped_gemm with the same weights and the other sy_weight_order.
///
/// Calls enqueue their work on the stream given in their options and do not wait. They read the sy_expert_rows arrays when they
/// run, allocate nothing and can be captured; rows past the end of an argument are skipped.
///
/// Threads: one thread at a time per object; objects are independent. GPUs: an object belongs to the GPU that is current at
/// creation; rows, gradients and counts must be in that GPU's memory.
#pragma once

#include <math.h>

#include "switchyard/c/gemm.h"
#include "switchyard/c/switchyard.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sy_weight_gradient sy_weight_gradient;    ///< gradients of experts' weights; sy_weight_gradient_destroy
typedef struct sy_swiglu_gradient sy_swiglu_gradient;    ///< gradients of the inputs of SwiGLU; sy_swiglu_gradient_destroy
typedef struct sy_routing_gradient sy_routing_gradient;  ///< gradients of routing weights; sy_routing_gradient_destroy

/// Fixed properties of a weight gradient.
typedef struct sy_weight_gradient_config {
  size_t struct_size;
  int64_t n;                                    ///< N, columns of dy: a multiple of 8
  int64_t k;                                    ///< K, columns of x: a multiple of 8
  int32_t num_experts;                          ///< number of local experts, in [1, 2048]
  sy_dtype dtype;                               ///< of dy and x: bf16 or f16
  sy_dtype out_dtype SY_DEFAULT(SY_DTYPE_F32);  ///< of the gradients: f32, or equal to `dtype`
  sy_bool add;                                  ///< 1: adds to the existing gradients, in their type; 0: overwrites them
} sy_weight_gradient_config;

/// Allocates. Errors: invalid_argument naming the member; unsupported if the library was built without CUDA, or if the GPU does
/// not have compute capability 9.0.
sy_code sy_weight_gradient_create(const sy_weight_gradient_config* config, sy_weight_gradient** gradient);
/// May be called at any time; memory is freed once the enqueued calls and captured graphs that use it are done. Does not wait.
sy_code sy_weight_gradient_destroy(sy_weight_gradient* gradient);

/// dw[e, n, k] (+)= sum over rows r of expert e: dy[r, n] * x[r, k]
///
/// Enqueues this sum. `dy` is [rows, N], `x` is [rows, K], both dense and aligned to 16 bytes; row i of each belongs to the
/// same token. `dw` is [E, N, K], aligned to 16 bytes, and must not overlap `dy` or `x`. The gradient of an expert without rows
/// is set to zero or, with `add`, left unchanged. Calls on one object, including graph launches, must be ordered one after
/// another. `options` NULL: defaults. Errors: invalid_argument naming the argument; system.
sy_code sy_weight_gradient_run(sy_weight_gradient* gradient, const sy_const_row_view* dy, const sy_const_row_view* x,
                               const sy_expert_rows* rows, void* dw, const sy_grouped_gemm_options* options);

/// Fixed properties of a SwiGLU gradient.
typedef struct sy_swiglu_gradient_config {
  size_t struct_size;
  int64_t columns;                          ///< I, columns of a: a multiple of 8
  int32_t num_experts;                      ///< number of local experts, in [1, 2048]
  sy_dtype dtype;                           ///< of all rows: bf16 or f16
  float swiglu_limit SY_DEFAULT(INFINITY);  ///< > 0; this and the next two as in the sy_grouped_gemm_config of the forward pass
  float swiglu_alpha SY_DEFAULT(1.0f);
  float swiglu_up_shift;
  int32_t reserved;  ///< must be 0
} sy_swiglu_gradient_config;

/// Allocates. Errors: as for sy_weight_gradient_create.
sy_code sy_swiglu_gradient_create(const sy_swiglu_gradient_config* config, sy_swiglu_gradient** gradient);
/// May be called at any time; memory is freed once the enqueued calls and captured graphs that use it are done. Does not wait.
sy_code sy_swiglu_gradient_destroy(sy_swiglu_gradient* gradient);

/// Enqueues the computation of `dh`, the gradient of the pre-epilogue sums `h` (SY_EPILOGUE_NONE with the same weights), from
/// `da`, the gradient of the outputs. Optionally recomputes the outputs `a`. `h` and `dh` are [rows, 2 I], gate columns first;
/// `da` and `a` are [rows, I]. All are dense and aligned to 16 bytes. `a` is not written if it is NULL or has no memory. Rows
/// that belong to no expert are not accessed. `dh` may occupy the memory of `h`, and `a` that of `da`; the arrays must not
/// overlap otherwise. `options` NULL: defaults. Errors: invalid_argument naming the argument; system.
sy_code sy_swiglu_gradient_run(sy_swiglu_gradient* gradient, const sy_const_row_view* h, const sy_const_row_view* da,
                               const sy_expert_rows* rows, const sy_row_view* dh, const sy_row_view* a,
                               const sy_grouped_gemm_options* options);

/// Fixed properties of a routing weight gradient.
typedef struct sy_routing_gradient_config {
  size_t struct_size;
  int64_t columns;      ///< columns of a row: a multiple of 8
  int32_t num_experts;  ///< number of local experts, in [1, 2048]
  sy_dtype dtype;       ///< of the rows: bf16 or f16
} sy_routing_gradient_config;

/// Allocates. Errors: as for sy_weight_gradient_create.
sy_code sy_routing_gradient_create(const sy_routing_gradient_config* config, sy_routing_gradient** gradient);
/// May be called at any time; memory is freed once the enqueued calls and captured graphs that use it are done. Does not wait.
sy_code sy_routing_gradient_destroy(sy_routing_gradient* gradient);

/// dweight[r] = sum over columns c: dy[r, c] * y[r, c]
///
/// Enqueues this sum. `dy` is the gradient of the weighted rows, `y` the unweighted rows, both [rows, columns], dense and
/// aligned to 16 bytes; `dweight` is [rows], aligned to 4 bytes. Rows that belong to no expert are not accessed. `options`
/// NULL: defaults. Errors: invalid_argument naming the argument; system.
sy_code sy_routing_gradient_run(sy_routing_gradient* gradient, const sy_const_row_view* dy, const sy_const_row_view* y,
                                const sy_expert_rows* rows, float* dweight, const sy_grouped_gemm_options* options);

#ifdef __cplusplus
}
#endif
