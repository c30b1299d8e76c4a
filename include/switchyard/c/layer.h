// SPDX-License-Identifier: Apache-2.0
/// \file
/// C ABI: a complete MoE layer, the counterpart of switchyard/layer.hpp, which documents the sums, their order and the cost of
/// each call. Library switchyard_layer (CMake: switchyard::layer). The rules of switchyard.h for errors (sy_last_error),
/// structs, ownership, threads and GPUs apply. Functions marked collective are called by all ranks in the same order.
///
///     out[t] = sum over k of topk_weights[t, k] * mlp_(topk_ids[t, k])(x[t])          mlp: see expert.h
///
/// Notation: W ranks, T tokens on this rank, H hidden, I intermediate, K topk, E experts, L local experts.
#pragma once

#include "switchyard/c/expert.h"
#include "switchyard/c/switchyard.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sy_moe_layer sy_moe_layer;  ///< a layer of a group, which it keeps alive; sy_moe_layer_destroy

/// Exchange that transfers the rows.
typedef int32_t sy_moe_exchange;
enum {
  SY_MOE_EXCHANGE_AUTOMATIC = 0,   ///< low latency for few tokens if the other settings allow it, else normal; see layer.hpp
  SY_MOE_EXCHANGE_NORMAL = 1,      ///< prefill and training
  SY_MOE_EXCHANGE_LOW_LATENCY = 2  ///< decoding
};

/// Implementation of a layer. All forms give bit-identical results.
typedef int32_t sy_moe_form;
enum {
  SY_MOE_FORM_AUTOMATIC = 0,  ///< the library chooses
  SY_MOE_FORM_SEPARATE = 1,   ///< dispatch, two matrix products and combine, as separate calls
  SY_MOE_FORM_FUSED = 2       ///< normal mode, order per route or per rank, bf16, GPUs also fp8: one kernel
};

/// Fixed properties of a layer; identical on all ranks except for pointers and `storage`.
typedef struct sy_moe_layer_config {
  size_t struct_size;
  int64_t hidden;        ///< H >= 1; in normal mode, and on GPUs, the row size must be a multiple of 16 bytes
  int64_t intermediate;  ///< I >= 1; GPUs: a multiple of 8; fp8: I and H are multiples of 16
  int64_t max_tokens;    ///< maximum T on any rank; low latency: in [1, 65535]
  int64_t capacity;      ///< normal mode: maximum rows that a rank accepts in a call; 0: the default of layer.hpp
  int32_t num_experts;   ///< E >= 1, total of all ranks; need not divide by W
  int32_t topk;          ///< K in [1, 32]
  sy_dtype dtype;        ///< of weights: bf16; GPUs: also f16 or fp8 e4m3. Tokens and results: the same type; for fp8 bf16
  sy_combine_order order SY_DEFAULT(SY_ORDER_PER_ROUTE);  ///< of the sum
  sy_moe_exchange exchange;
  sy_moe_form form;
  sy_overflow overflow;            ///< for routes beyond a rank's capacity; see sy_moe_layer_dropped
  sy_bool captured SY_DEFAULT(1);  ///< 0 or 1; GPUs, normal mode: calls are captured in graphs, which have their own rows
  sy_weight_storage storage;       ///< GPUs: must be view
  sy_scale_kind row_scales
      SY_DEFAULT(SY_SCALE_F32);  ///< fp8: tokens are quantized in transit, one scale per 128 columns: f32 or ue8m0
  sy_scale_kind weight_scales
      SY_DEFAULT(SY_SCALE_F32);  ///< fp8: f32 or ue8m0, kind of the scales below, whose shapes are in switchyard/expert.hpp
  sy_invalid_ids invalid_ids;    ///< may differ by rank
  const void* w13_scales;
  const void* w2_scales;
  sy_accumulate accumulate;                ///< of both products; fast: only fp8, scaling block, separate form
  sy_scale_granularity scaling;            ///< of tokens and weights; not block: only fp8 in the separate form; see layer.hpp
  sy_output_scaling intermediate_scaling;  ///< of the rows between the products
  int32_t reserved;                        ///< must be 0
  const float* intermediate_scale;         ///< SY_OUTPUT_FIXED: the scale, in GPU memory; read by every call; else NULL
} sy_moe_layer_config;

/// Memory used by a layer on the rank with the most experts, in bytes, excluding the caller's arrays.
typedef struct sy_moe_layer_memory {
  size_t struct_size;
  size_t heap_bytes;     ///< in the group's symmetric heap, excluding its header
  size_t private_bytes;  ///< low latency: upper bound for received rows, returned rows and a call's sums
  size_t weight_bytes;   ///< CPU, packed weights
  size_t scratch_bytes;  ///< GPUs: rows between the two products; per channel: and tokens; fused: see layer.hpp
  size_t total_bytes;
} sy_moe_layer_memory;

/// Local; requires no group. Errors: invalid_argument naming the member; unsupported for settings that the backend does not
/// support.
sy_code sy_moe_layer_memory_required(const sy_moe_layer_config* config, int32_t world, sy_backend backend,
                                     sy_moe_layer_memory* memory);
/// Heap size for a group whose only object is this layer, including the header and alignment slack.
sy_code sy_moe_layer_heap_bytes(const sy_moe_layer_config* config, int32_t world, sy_backend backend, size_t* bytes);

/// Collective. `w13` [L, 2 * I, H] and `w2` [L, H, I] are the weights of this rank's experts, as in sy_expert_mlp_create; they
/// may be NULL on a rank without experts. Errors, the same on all ranks: invalid_argument naming the member; unsupported;
/// heap_exhausted; system; mismatch if configurations differ. The group stays usable. (An unreadable struct, or `layer` NULL,
/// ends the peers' call with peer_failed.) CUDA: reads w13_scales and w2_scales in stream order on `stream` (cudaStream_t;
/// NULL: the legacy default stream).
sy_code sy_moe_layer_create(sy_group* group, const sy_moe_layer_config* config, const void* w13, const void* w2, void* stream,
                            sy_moe_layer** layer);
/// Local. Creates another layer of the model, which differs from `layer` only in its weights and shares all other memory with
/// it. Either may be destroyed first. Calls on layers that share memory, including graph launches, must be ordered one after
/// another, in the same order of layers on all ranks. All ranks must create the same layers in the same order. The scales are
/// for fp8 weights and are NULL otherwise. CUDA: reads the scales in stream order on `stream`. Errors: invalid_argument naming
/// the argument; system.
sy_code sy_moe_layer_with_weights(const sy_moe_layer* layer, const void* w13, const void* w2, const void* w13_scales,
                                  const void* w2_scales, void* stream, sy_moe_layer** other);
/// sy_moe_layer_with_weights for layers with SY_OUTPUT_FIXED: `intermediate_scale` is that of the other layer; NULL for
/// layers without SY_OUTPUT_FIXED.
sy_code sy_moe_layer_with_scaled_weights(const sy_moe_layer* layer, const void* w13, const void* w2, const void* w13_scales,
                                         const void* w2_scales, const float* intermediate_scale, void* stream,
                                         sy_moe_layer** other);
/// Local. May be called at any time; does not wait. CUDA: the layer's memory is freed once the enqueued calls and graphs that
/// use it are done.
sy_code sy_moe_layer_destroy(sy_moe_layer* layer);

/// Settings of one call. All ranks must pass the same `add`, and agree on whether selector and device_tokens are NULL.
typedef struct sy_moe_layer_call {
  size_t struct_size;
  void* stream;  ///< CUDA: cudaStream_t; NULL: the legacy default stream
  /// Pointer to T in the rank's memory (CUDA: in GPU memory), or NULL. T is read when the call runs, so it may vary between
  /// graph launches, and is clamped to [0, topk_ids->num_tokens]. Rows T and above of `out` are not written.
  const int32_t* device_tokens;
  /// CUDA: maximum multiprocessors of each kernel, in [1, those of the GPU / ranks on it], for the fused form with fp8 weights
  /// at least 2; 0: chosen
  int32_t num_sms;
  sy_bool add;           ///< 0 or 1: the layer is added to the rows in `out`; switchyard/layer.hpp documents the rounding
  sy_bool known_memory;  ///< CUDA: as in sy_dispatch_options
  int32_t reserved;      ///< must be 0
  /// If not NULL, `topk_ids` are expert ids, which the call replaces with slots (sy_low_latency_dispatch_options::selector);
  /// num_experts of the layer is the number of slots. GPUs, normal mode and fused form: a separate kernel replaces them first.
  sy_slot_selector* selector;
  /// CUDA: cudaEvent_t after which the weights are complete, for example that of sy_slot_weights_ready, or NULL. The separate
  /// form waits for it between dispatch and the experts, the fused form before its kernel. Not during stream capture. The fused
  /// form copies the scales of fp8 weights when the layer is created, in sy_moe_layer_with_weights, and in each call with
  /// `weights_ready`; they must be valid until that call ends. The first call after a change of scales must pass it.
  void* weights_ready;
} sy_moe_layer_call;

/// Collective. `x` is [T, H], where T is topk_ids->num_tokens; `topk_ids` is [T, K]; `topk_weights` is float32 [T, K], or NULL
/// (all 1). An id outside [0, E) means no expert; the result of a token without an expert is +0 (with `add`, its row is
/// unchanged). `out` is [T, H] and must not overlap anything else. `call` NULL: defaults. CUDA: the call enqueues its work,
/// requires no counts on the host and can be captured. Errors: as for sy_exchange_dispatch and sy_exchange_combine. CUDA:
/// sy_group_check reports capacity_exceeded.
sy_code sy_moe_layer_forward(sy_moe_layer* layer, const void* x, const sy_expert_ids* topk_ids, const float* topk_weights,
                             void* out, const sy_moe_layer_call* call);

/// With SY_OVERFLOW_DROP_AND_REPORT, `*dropped` is a [T, K] array of `*count` elements for the last forward: 1 if this rank's
/// route was dropped at capacity. The array is in the rank's memory (CUDA: in GPU memory, written when the call runs) and is
/// valid until the next forward. Otherwise, `*dropped` is NULL and `*count` is 0.
sy_code sy_moe_layer_dropped(const sy_moe_layer* layer, const uint8_t** dropped, int64_t* count);
/// Number of ids in this rank's calls so far that are neither -1 nor a valid expert id. CUDA: counts calls that have run,
/// including graph replays; waits only for a copy of the count, not for kernels.
sy_code sy_moe_layer_invalid_ids(const sy_moe_layer* layer, int64_t* count);
/// Returns a description such as "separate, normal, bf16 wgmma:sm_90a". The object owns the string.
sy_code sy_moe_layer_implementation(const sy_moe_layer* layer, const char** text);

#ifdef __cplusplus
}
#endif
