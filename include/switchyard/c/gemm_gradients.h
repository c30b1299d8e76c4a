// SPDX-License-Identifier: Apache-2.0
/// \file
/// C ABI: the backward pass of an expert MLP on GPUs, the twin of switchyard/gemm_gradients.hpp, which has the formulas, the
/// order of sums, and what is rounded where. Library switchyard_layer (CMake: switchyard::layer). What switchyard.h says of
/// errors (sy_last_error), structs and destruction holds here too; no call is collective, and none needs a group. The gradient
/// of rows is a sy_grouped_gemm of the same weights, with the other sy_weight_order.
///
/// Calls enqueue on the stream of their options and wait for nothing. They read the rows of experts (sy_expert_rows) when they
/// run, allocate nothing, and can be captured; rows that would lie behind those of an argument are left out.
///
/// Threads: one at a time per object; objects are independent. GPUs: an object belongs to the GPU that is current when it is
/// made; rows, gradients and counts are in its memory.
#pragma once

#include <math.h>

#include "switchyard/c/gemm.h"
#include "switchyard/c/switchyard.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sy_weight_gradient sy_weight_gradient;    ///< gradients of experts' weights; sy_weight_gradient_destroy
typedef struct sy_swiglu_gradient sy_swiglu_gradient;    ///< of what goes into SwiGLU; sy_swiglu_gradient_destroy
typedef struct sy_routing_gradient sy_routing_gradient;  ///< of routing weights; sy_routing_gradient_destroy

/// Fixed properties of a weight gradient.
typedef struct sy_weight_gradient_config {
  size_t struct_size;
  int64_t n;            ///< N, columns of dy: a multiple of 8
  int64_t k;            ///< K, columns of x: a multiple of 8
  int32_t num_experts;  ///< in [1, 2048]: of this rank
  sy_dtype type;        ///< of dy and x: bf16 or f16
  sy_dtype output;      ///< of the gradients: f32, or as `type`
  int32_t add;          ///< 0 or 1: to what is there, in the type of the gradients; 0: it is overwritten
} sy_weight_gradient_config;
#define SWITCHYARD_WEIGHT_GRADIENT_CONFIG_INIT \
  { sizeof(sy_weight_gradient_config), 0, 0, 0, SWITCHYARD_DTYPE_BF16, SWITCHYARD_DTYPE_F32, 0 }

/// Allocates. Errors: invalid_argument naming the member; unsupported where the library was built without CUDA, or for a GPU of
/// another kind than compute capability 9.0.
switchyard_code_t sy_weight_gradient_create(const sy_weight_gradient_config* config, sy_weight_gradient** gradient);
/// At any time: memory that enqueued calls and captured graphs use is freed after them. Waits for nothing.
switchyard_code_t sy_weight_gradient_destroy(sy_weight_gradient* gradient);

/// dw[e, n, k] (+)= sum over rows r of expert e: dy[r, n] * x[r, k]
///
/// Enqueues it. `dy` is [rows, N], `x` [rows, K], both dense and at multiples of 16 bytes; row i of both is of one token. `dw`
/// is [E, N, K], at a multiple of 16 bytes, and must not overlap them. An expert without rows gets zeros, or is left as it is
/// if `add`. Calls of one object, graphs included, must be ordered one after the other. `options` NULL: defaults. Errors:
/// invalid_argument naming the argument; system.
switchyard_code_t sy_weight_gradient_run(sy_weight_gradient* gradient, const sy_const_row_view* dy, const sy_const_row_view* x,
                                         const sy_expert_rows* rows, void* dw, const sy_grouped_gemm_options* options);

/// Fixed properties of a gradient of SwiGLU.
typedef struct sy_swiglu_gradient_config {
  size_t struct_size;
  int64_t columns;      ///< I, of a: a multiple of 8
  int32_t num_experts;  ///< in [1, 2048]: of this rank
  sy_dtype type;        ///< of all rows: bf16 or f16
  float swiglu_limit;   ///< > 0; as the sy_grouped_gemm_config of the forward pass had it, like the next two
  float swiglu_alpha;
  float swiglu_up_shift;
  int32_t reserved;  ///< must be 0
} sy_swiglu_gradient_config;
#define SWITCHYARD_SWIGLU_GRADIENT_CONFIG_INIT \
  { sizeof(sy_swiglu_gradient_config), 0, 0, SWITCHYARD_DTYPE_BF16, INFINITY, 1.0f, 0.0f, 0 }

/// Allocates. Errors: as sy_weight_gradient_create.
switchyard_code_t sy_swiglu_gradient_create(const sy_swiglu_gradient_config* config, sy_swiglu_gradient** gradient);
/// At any time: memory that enqueued calls and captured graphs use is freed after them. Waits for nothing.
switchyard_code_t sy_swiglu_gradient_destroy(sy_swiglu_gradient* gradient);

/// Enqueues the gradient `dh` of the sums `h`, as they were before the epilogue (SWITCHYARD_EPILOGUE_NONE of the same weights),
/// from the gradient `da` of the outputs, and on request the outputs `a` again. `h` and `dh` are [rows, 2 I], gate columns
/// first, `da` and `a` [rows, I], all dense and at multiples of 16 bytes. `a` NULL, or without memory: not written. Rows of no
/// expert are not touched. `dh` may be the memory of `h`, and `a` that of `da`; otherwise they must not overlap. `options`
/// NULL: defaults. Errors: invalid_argument naming the argument; system.
switchyard_code_t sy_swiglu_gradient_run(sy_swiglu_gradient* gradient, const sy_const_row_view* h, const sy_const_row_view* da,
                                         const sy_expert_rows* rows, const sy_row_view* dh, const sy_row_view* a,
                                         const sy_grouped_gemm_options* options);

/// Fixed properties of a gradient of routing weights.
typedef struct sy_routing_gradient_config {
  size_t struct_size;
  int64_t columns;      ///< of a row: a multiple of 8
  int32_t num_experts;  ///< in [1, 2048]: of this rank
  sy_dtype type;        ///< of the rows: bf16 or f16
} sy_routing_gradient_config;
#define SWITCHYARD_ROUTING_GRADIENT_CONFIG_INIT \
  { sizeof(sy_routing_gradient_config), 0, 0, SWITCHYARD_DTYPE_BF16 }

/// Allocates. Errors: as sy_weight_gradient_create.
switchyard_code_t sy_routing_gradient_create(const sy_routing_gradient_config* config, sy_routing_gradient** gradient);
/// At any time: memory that enqueued calls and captured graphs use is freed after them. Waits for nothing.
switchyard_code_t sy_routing_gradient_destroy(sy_routing_gradient* gradient);

/// dweight[r] = sum over columns c: dy[r, c] * y[r, c]
///
/// Enqueues it. `dy` is the gradient of the weighted rows, `y` the rows before their weights, both [rows, columns], dense and
/// at multiples of 16 bytes; `dweight` is [rows], at a multiple of 4. Rows of no expert are not touched. `options` NULL:
/// defaults. Errors: invalid_argument naming the argument; system.
switchyard_code_t sy_routing_gradient_run(sy_routing_gradient* gradient, const sy_const_row_view* dy,
                                          const sy_const_row_view* y, const sy_expert_rows* rows, float* dweight,
                                          const sy_grouped_gemm_options* options);

#ifdef __cplusplus
}
#endif
