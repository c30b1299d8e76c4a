// SPDX-License-Identifier: Apache-2.0
/// \file
/// C ABI: a whole MoE layer, the twin of switchyard/layer.hpp, which says what is summed in which order and what each call
/// costs. Library switchyard_layer (CMake: switchyard::layer). What switchyard.h says of errors (sy_last_error), structs,
/// ownership, threads and GPUs holds here too. Functions marked collective are called by all ranks in the same order.
///
///     out[t] = sum over k of weights[t, k] * mlp_(ids[t, k])(x[t])          mlp: as expert.h has it
///
/// Notation: W ranks, T tokens on this rank, H hidden, I intermediate, K topk, E experts, L those of this rank.
#pragma once

#include "switchyard/c/expert.h"
#include "switchyard/c/switchyard.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sy_moe_layer sy_moe_layer;  ///< a layer of a group, which it keeps alive; sy_moe_layer_destroy

/// Which exchange moves the rows.
typedef int32_t sy_moe_exchange;
enum {
  SWITCHYARD_MOE_EXCHANGE_AUTOMATIC = 0,   ///< low latency for few tokens and no capacity, else normal; see layer.hpp
  SWITCHYARD_MOE_EXCHANGE_NORMAL = 1,      ///< prefill and training
  SWITCHYARD_MOE_EXCHANGE_LOW_LATENCY = 2  ///< decoding
};

/// How a layer is computed. The results of all forms are the same bits.
typedef int32_t sy_moe_form;
enum {
  SWITCHYARD_MOE_FORM_AUTOMATIC = 0,  ///< the library chooses
  SWITCHYARD_MOE_FORM_SEPARATE = 1,   ///< dispatch, two products and combine, one call after the other
  SWITCHYARD_MOE_FORM_FUSED = 2       ///< normal mode, order per route, bf16, GPUs also fp8: in one kernel; see layer.hpp
};

/// Fixed properties of a layer; equal on all ranks but for pointers and `storage`.
typedef struct sy_moe_layer_config {
  size_t struct_size;
  int64_t hidden;          ///< H >= 1; rows of normal mode, and of GPUs, are whole 16 bytes
  int64_t intermediate;    ///< I >= 1; GPUs: a multiple of 8, fp8: of 16, as is H
  int64_t max_tokens;      ///< largest T on any rank; low latency: in [1, 65535]
  int64_t capacity;        ///< normal mode: most rows that a rank takes in a call; 0: those of the worst routing
  int32_t num_experts;     ///< E >= 1, of all ranks; need not divide by W
  int32_t topk;            ///< K in [1, 32]
  sy_dtype type;           ///< of weights: bf16; GPUs: or f16, or fp8 e4m3. Tokens and results: the same, of fp8 bf16
  sy_combine_order order;  ///< of the sum
  sy_moe_exchange exchange;
  sy_moe_form form;
  sy_overflow overflow;         ///< of routes beyond a rank's capacity; see sy_moe_layer_dropped
  int32_t captured;             ///< 0 or 1; GPUs, normal mode: calls are captured in graphs, which have rows of their own
  sy_weight_storage storage;    ///< GPUs: view, given so
  sy_scale_kind row_scales;     ///< fp8: tokens become fp8 on the way, with these scales of 128 columns: f32 or ue8m0
  sy_scale_kind weight_scales;  ///< fp8: f32 or ue8m0, of what follows, which is as switchyard/expert.hpp has it
  sy_invalid_ids invalid_ids;   ///< may differ by rank
  const void* w13_scales;
  const void* w2_scales;
} sy_moe_layer_config;
#define SWITCHYARD_MOE_LAYER_CONFIG_INIT                                                               \
  {                                                                                                    \
    sizeof(sy_moe_layer_config), 0, 0, 0, 0, 0, 0, SWITCHYARD_DTYPE_BF16, SWITCHYARD_ORDER_PER_ROUTE,  \
        SWITCHYARD_MOE_EXCHANGE_AUTOMATIC, SWITCHYARD_MOE_FORM_AUTOMATIC, SWITCHYARD_OVERFLOW_FAIL, 1, \
        SWITCHYARD_WEIGHTS_PACKED, SWITCHYARD_SCALE_F32, SWITCHYARD_SCALE_F32, 0, NULL, NULL           \
  }

/// Memory of a layer on the rank with most experts, in bytes, beside the caller's arrays.
typedef struct sy_moe_layer_memory {
  size_t struct_size;
  size_t heap_bytes;     ///< of the group's symmetric heap, its header aside
  size_t private_bytes;  ///< low latency: rows that come, rows that go back, and a call's sums; at most this
  size_t weight_bytes;   ///< CPU, packed weights
  size_t scratch_bytes;  ///< of the experts; GPUs: rows between the two products; fused: see layer.hpp
  size_t total_bytes;
} sy_moe_layer_memory;
#define SWITCHYARD_MOE_LAYER_MEMORY_INIT \
  { sizeof(sy_moe_layer_memory), 0, 0, 0, 0, 0 }

/// Local, need no group. Errors: invalid_argument naming the member; unsupported for what the backend does not have.
switchyard_code_t sy_moe_layer_memory_required(const sy_moe_layer_config* config, int32_t world, sy_backend backend,
                                               sy_moe_layer_memory* memory);
/// Heap size for a group whose only object is this layer: header and alignment slack included.
switchyard_code_t sy_moe_layer_heap_bytes(const sy_moe_layer_config* config, int32_t world, sy_backend backend, size_t* bytes);

/// Collective. `w13` [L, 2 * I, H] and `w2` [L, H, I] are those of this rank's experts, as sy_expert_mlp_create takes them;
/// they may be NULL on a rank without experts. Errors, on all ranks alike: invalid_argument naming the member; unsupported;
/// heap_exhausted; system; mismatch if configurations differ. The group can be used afterwards. (A struct that is none, or
/// `layer` NULL, ends the call of the others with peer_failed.)
switchyard_code_t sy_moe_layer_create(sy_group* group, const sy_moe_layer_config* config, const void* w13, const void* w2,
                                      sy_moe_layer** layer);
/// The same where w13_scales and w2_scales are read in the order of `stream` (cudaStream_t); the other one: of the legacy
/// default stream.
switchyard_code_t sy_moe_layer_create_on(sy_group* group, const sy_moe_layer_config* config, const void* w13, const void* w2,
                                         void* stream, sy_moe_layer** layer);
/// Local. Another layer of the model, which differs from `layer` in its weights alone and shares all memory with it but theirs;
/// either may be destroyed first. Calls of layers that share, graphs included, come one after the other, on all ranks of the
/// same layers in the same order, and all ranks make the same layers in the same order. The scales are those of fp8, else NULL.
/// Errors: invalid_argument naming the argument; system.
switchyard_code_t sy_moe_layer_with_weights(const sy_moe_layer* layer, const void* w13, const void* w2, const void* w13_scales,
                                            const void* w2_scales, sy_moe_layer** other);
/// The same, as sy_moe_layer_create_on.
switchyard_code_t sy_moe_layer_with_weights_on(const sy_moe_layer* layer, const void* w13, const void* w2,
                                               const void* w13_scales, const void* w2_scales, void* stream,
                                               sy_moe_layer** other);
/// Local, at any time, and waits for nothing. CUDA: the layer's memory is freed after enqueued calls and graphs that use it.
switchyard_code_t sy_moe_layer_destroy(sy_moe_layer* layer);

/// Settings of one call; `add` and that there are device_tokens are equal on all ranks.
typedef struct sy_moe_layer_call {
  size_t struct_size;
  void* stream;  ///< CUDA: cudaStream_t; NULL: the legacy default stream
  /// Memory of the rank (CUDA: of its GPU), or NULL: T when the call runs, so that it can vary in a graph; clamped to [0,
  /// tokens of the ids]. Rows of `out` from T on are not written.
  const int32_t* device_tokens;
  int32_t num_sms;  ///< CUDA: most multiprocessors of each kernel, in [1, those of the GPU / ranks on it]; 0: chosen
  int32_t add;      ///< 0 or 1: the layer is added to the rows that `out` holds; switchyard/layer.hpp says how it rounds
} sy_moe_layer_call;
#define SWITCHYARD_MOE_LAYER_CALL_INIT \
  { sizeof(sy_moe_layer_call), NULL, NULL, 0, 0 }

/// Collective. `x` is [T, H], T being ids->tokens; `ids` [T, K]; `weights` float32 [T, K], or NULL: all 1. An id outside [0, E)
/// is no expert; a token without one gets +0 (add: keeps its row). `out` is [T, H] and must not overlap anything else. `call`
/// NULL: defaults. CUDA: enqueues, asks the host for nothing, can be captured. Errors: as sy_exchange_dispatch and
/// sy_exchange_combine; CUDA: capacity_exceeded comes from sy_group_check.
switchyard_code_t sy_moe_layer_forward(sy_moe_layer* layer, const void* x, const sy_expert_ids* ids, const float* weights,
                                       void* out, const sy_moe_layer_call* call);

/// SWITCHYARD_OVERFLOW_DROP_AND_REPORT: `*dropped` is [T, K] of the last forward, `*count` its elements: 1 where this rank's
/// route was dropped at capacity. In memory of the rank (CUDA: of its GPU, written when the call runs), until the next forward.
/// Else NULL and 0.
switchyard_code_t sy_moe_layer_dropped(const sy_moe_layer* layer, const uint8_t** dropped, int64_t* count);
/// Ids of this rank's calls so far that are neither -1 nor an expert. CUDA: of the calls that have run, replays of graphs
/// included; waits for a copy of the number and for no kernel.
switchyard_code_t sy_moe_layer_invalid_ids(const sy_moe_layer* layer, int64_t* count);
/// For example "separate, normal, bf16 wgmma:sm_90a". The text belongs to the object.
switchyard_code_t sy_moe_layer_implementation(const sy_moe_layer* layer, const char** text);

#ifdef __cplusplus
}
#endif
