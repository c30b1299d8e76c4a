// SPDX-License-Identifier: Apache-2.0
/// \file
/// C ABI: the backward pass of an expert MLP on GPUs, the counterpart of switchyard/gemm_gradients.hpp, which documents the
/// formulas, the summation order and the rounding. Library switchyard_layer (CMake: switchyard::layer). The rules of
/// switchyard.h on errors (sy_last_error), structs and destruction apply; no call is collective, and none needs a group. The
/// gradient of rows is computed by a sy_grouped_gemm of the same weights with the other sy_weight_order.
///
/// Calls enqueue on the stream of their options and do not wait. They read the rows of experts (sy_expert_rows) when they run,
/// allocate nothing, and can be captured; rows beyond those of an argument are skipped.
///
/// Threads: one at a time per object; objects are independent. GPUs: an object belongs to the GPU that is current at creation;
/// rows, gradients and counts are in its memory.
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
/// Allowed at any time: memory is freed once the enqueued calls and captured graphs that use it are done. Does not wait.
sy_code sy_weight_gradient_destroy(sy_weight_gradient* gradient);

/// dw[e, n, k] (+)= sum over rows r of expert e: dy[r, n] * x[r, k]
///
/// Enqueues this sum. `dy` is [rows, N], `x` is [rows, K], both dense and aligned to 16 bytes; row i of both belongs to one
/// token. `dw` is [E, N, K], aligned to 16 bytes, and must not overlap them. An expert without rows gets zeros, or stays
/// unchanged with `add`. Calls of one object, graphs included, must be ordered one after another. `options` NULL: defaults.
/// Errors: invalid_argument naming the argument; system.
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

/// Allocates. Errors: as sy_weight_gradient_create.
sy_code sy_swiglu_gradient_create(const sy_swiglu_gradient_config* config, sy_swiglu_gradient** gradient);
/// Allowed at any time: memory is freed once the enqueued calls and captured graphs that use it are done. Does not wait.
sy_code sy_swiglu_gradient_destroy(sy_swiglu_gradient* gradient);

/// Enqueues the gradient `dh` of the sums `h` before the epilogue (SY_EPILOGUE_NONE with the same weights), from the
/// gradient `da` of the outputs, and on request recomputes the outputs `a`. `h` and `dh` are [rows, 2 I], gate columns first,
/// `da` and `a` are [rows, I], all dense and aligned to 16 bytes. `a` is not written if it is NULL or has no memory. Rows of no
/// expert are not accessed. `dh` may be the memory of `h`, and `a` that of `da`; otherwise they must not overlap. `options`
/// NULL: defaults. Errors: invalid_argument naming the argument; system.
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

/// Allocates. Errors: as sy_weight_gradient_create.
sy_code sy_routing_gradient_create(const sy_routing_gradient_config* config, sy_routing_gradient** gradient);
/// Allowed at any time: memory is freed once the enqueued calls and captured graphs that use it are done. Does not wait.
sy_code sy_routing_gradient_destroy(sy_routing_gradient* gradient);

/// dweight[r] = sum over columns c: dy[r, c] * y[r, c]
///
/// Enqueues this sum. `dy` is the gradient of the weighted rows, `y` the unweighted rows, both [rows, columns], dense and
/// aligned to 16 bytes; `dweight` is [rows], aligned to 4. Rows of no expert are not accessed. `options` NULL: defaults.
/// Errors: invalid_argument naming the argument; system.
sy_code sy_routing_gradient_run(sy_routing_gradient* gradient, const sy_const_row_view* dy, const sy_const_row_view* y,
                                const sy_expert_rows* rows, float* dweight, const sy_grouped_gemm_options* options);

#ifdef __cplusplus
}
#endif
