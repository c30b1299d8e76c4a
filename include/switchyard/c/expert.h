// SPDX-License-Identifier: Apache-2.0
/// \file
/// C ABI: the SwiGLU MLPs of one rank's experts, the counterpart of switchyard/expert.hpp, which documents the rounding.
/// Library switchyard_layer (CMake: switchyard::layer). The rules of switchyard.h for errors (sy_last_error), structs and
/// destruction apply; no call is collective or requires a group.
///
///     y = (silu(x W1^T) * (x W3^T)) W2^T
///
/// Notation: H hidden, I intermediate, L local experts. Rows and weights are bf16 (on GPUs also f16), dense and row-major.
///
/// Threads: one thread at a time per object; objects are independent. CPU calls run only on the calling thread.
#pragma once

#include "switchyard/c/gemm.h"
#include "switchyard/c/switchyard.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sy_expert_mlp sy_expert_mlp;  ///< one rank's experts; sy_expert_mlp_destroy

/// Storage of the weights.
typedef int32_t sy_weight_storage;
enum {
  SY_WEIGHTS_PACKED = 0,  ///< separate copy in this CPU's fastest layout; the caller's weights may be freed after creation
  SY_WEIGHTS_VIEW = 1     ///< the caller's weights, read in place by every call; CUDA: required
};

/// Size of one rank's experts; all experts have the same size.
typedef struct sy_expert_shape {
  size_t struct_size;
  int64_t hidden;             ///< H >= 1
  int64_t intermediate;       ///< I >= 1
  int32_t num_local_experts;  ///< L >= 0
  int32_t reserved;           ///< must be 0
} sy_expert_shape;

/// Settings of an object.
typedef struct sy_expert_options {
  size_t struct_size;
  sy_backend backend;  ///< CUDA: weights, rows and counts are in memory of the GPU that is current at creation
  sy_dtype dtype;      ///< of rows and weights: bf16; CUDA: also f16 or fp8_e4m3, with bf16 outputs
  sy_weight_storage storage;
  int32_t reserved;  ///< must be 0
  size_t route_scratch_bytes
      SY_DEFAULT(67108864);  ///< CPU, sy_expert_mlp_forward_rank_major: memory for float32 outputs of single routes
  int64_t max_rows;          ///< CUDA: maximum rows of a call's `x`, each with an intermediate row in the object; 0: none
  const void* w13_scales;    ///< fp8: scales of the weights, as in switchyard/expert.hpp; owned by the caller
  const void* w2_scales;
  sy_scale_kind weight_scales SY_DEFAULT(SY_SCALE_F32);  ///< fp8: f32 or ue8m0
  sy_accumulate accumulate;                              ///< of both products; fast: only fp8 with scaling block
  sy_scale_granularity scaling;            ///< of rows and weights; not block: only fp8, float32 scales [L, 2 * I], [L, H]
  sy_output_scaling intermediate_scaling;  ///< of the rows between the products
  const float* intermediate_scale;         ///< SY_OUTPUT_FIXED: the scale, in GPU memory; read by every call; else NULL
} sy_expert_options;

/// Memory used by one object, in bytes, excluding the caller's arrays.
typedef struct sy_expert_memory {
  size_t struct_size;
  size_t weight_bytes;   ///< packed: own weights; view: 0
  size_t scratch_bytes;  ///< fixed at creation; CUDA: intermediate rows, in GPU memory
  size_t total_bytes;
} sy_expert_memory;

/// Memory required by an object of this shape on this machine. Leaves no memory allocated. `options` NULL: defaults.
sy_code sy_expert_mlp_memory_required(const sy_expert_shape* shape, const sy_expert_options* options, sy_expert_memory* memory);

/// `w13` is [L, 2 * I, H]: for each expert, the I gate rows (W1) followed by the I up rows (W3). `w2` is [L, H, I]. Packed:
/// they are read only during this call. View: they must stay valid and unchanged while calls run. CUDA: both must be aligned to
/// 16 bytes. `options` NULL: defaults. Errors: invalid_argument naming the argument; system if memory is insufficient;
/// unsupported for f16 on the CPU, and on GPUs as for sy_grouped_gemm_create.
sy_code sy_expert_mlp_create(const sy_expert_shape* shape, const void* w13, const void* w2, const sy_expert_options* options,
                             sy_expert_mlp** mlp);
/// CUDA: may be called at any time; memory is freed once the enqueued calls and captured graphs that use it are done.
sy_code sy_expert_mlp_destroy(sy_expert_mlp* mlp);

/// Settings of one call.
typedef struct sy_expert_call {
  size_t struct_size;
  void* stream;      ///< CUDA: cudaStream_t; NULL: the legacy default stream. The CPU ignores it and num_sms.
  int32_t num_sms;   ///< CUDA: maximum number of multiprocessors, in [1, those of the GPU]; 0: all
  int32_t reserved;  ///< must be 0
} sy_expert_call;

/// Applies each expert to its rows of `x` and writes the results to the same rows of `y`. Both are [rows, H] of the object's
/// type. `x` is typically the output of an expert-major or low-latency dispatch, and `y` the input of combine. Rows that belong
/// to no expert, and rows past the end of `x` or `y`, are not accessed. `x` and `y` must not overlap. CUDA: the call enqueues
/// its work, allocates nothing and can be captured; `x` and `y` are aligned to 16 bytes. `call` NULL: defaults. Errors:
/// invalid_argument naming the argument, before anything is written; system.
sy_code sy_expert_mlp_forward(sy_expert_mlp* mlp, const sy_const_row_view* x, const sy_expert_rows* rows, const sy_row_view* y,
                              const sy_expert_call* call);

/// CPU only. Rank-major rows: y[r] = sum over k of topk_weights[r, k] * mlp_(topk_ids[r, k])(x[r]). `x` and `y` are
/// [topk_ids.num_tokens, H]. The sum is float32 from +0, k ascending, rounded once. `topk_ids` are local
/// (sy_dispatched_view::topk_ids); an id outside [0, L) is skipped. `topk_weights` is float32 [topk_ids.num_tokens,
/// topk_ids.topk], or NULL (all 1). `x` and `y` must not overlap. Errors: invalid_argument before anything is written;
/// unsupported on a GPU.
sy_code sy_expert_mlp_forward_rank_major(sy_expert_mlp* mlp, const void* x, const sy_expert_ids* topk_ids,
                                         const float* topk_weights, void* y);

sy_code sy_expert_mlp_memory(const sy_expert_mlp* mlp, sy_expert_memory* memory);
/// Data type and kernel of the matrix products, for example "bf16 wgmma:sm_90a". The object owns the string.
sy_code sy_expert_mlp_implementation(const sy_expert_mlp* mlp, const char** text);

#ifdef __cplusplus
}
#endif
