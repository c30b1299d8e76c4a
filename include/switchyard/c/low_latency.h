// SPDX-License-Identifier: Apache-2.0
/// \file
/// C ABI: low-latency mode and the flat exchange, the counterpart of switchyard/low_latency.hpp. The rules of switchyard.h for
/// errors, structs, ownership, threads and GPUs apply; docs/concepts/low_latency.md explains the mode.
///
/// Notation as in switchyard.h. Each local expert has R = W * max_tokens rows for any routing, so rows are placed without
/// counts, no buffer can overflow, and every call can be captured in a CUDA graph.
///
/// A layer:
///   sy_low_latency_create(group, &config, &exchange);            // once, on all ranks
///   sy_low_latency_make_output(exchange, &output);               // once
///   sy_low_latency_make_rows(exchange, SY_DTYPE_BF16, &made);
///   sy_low_latency_dispatch(exchange, &x, &topk_ids, output, &options);
///   my_experts(view.x, view.rows_of_expert, rows.data);          // row i of `rows` from row i of `x`: a masked grouped GEMM
///   sy_low_latency_combine(exchange, &y, output, out, NULL);     // y: `rows` as a sy_const_row_view
///
/// Calls on one object are totally ordered. CPU: calls run synchronously on the calling thread; a send half does not wait for
/// peers. CUDA: two objects whose calls run concurrently must fit on the GPU together (set num_sms for each); otherwise a
/// stream or events must order the calls, in the same order on all ranks.
#pragma once

#include "switchyard/c/switchyard.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sy_low_latency sy_low_latency;                ///< low latency over a group; sy_low_latency_destroy
typedef struct sy_low_latency_output sy_low_latency_output;  ///< results of dispatch; sy_low_latency_output_destroy
typedef struct sy_low_latency_rows sy_low_latency_rows;      ///< expert outputs; sy_low_latency_rows_destroy

/// Order of the scales in memory.
typedef int32_t sy_scale_order;
enum {
  SY_SCALES_ROW_MAJOR = 0,  ///< one scale row of sy_low_latency_scale_row_bytes per row
  /// For each expert: float32 [G, Rs], or int32 [ceil(G / 4), Rs] with the UE8M0 scales of four groups per int32; missing
  /// groups are 0. Rs is R rounded up to a multiple of 4, which aligns every column to 16 bytes.
  SY_SCALES_COLUMN_MAJOR = 1
};

/// Number of times each row is sent over the link.
typedef int32_t sy_sending;
enum {
  SY_SENDING_PER_RANK = 0,  ///< once per (token, rank), placed for each of its experts on arrival
  SY_SENDING_PER_ROUTE = 1  ///< once per (token, expert)
};

/// Fixed properties of an object; identical on all ranks.
typedef struct sy_low_latency_config {
  size_t struct_size;
  int64_t hidden;       ///< H; any if rows are sent unquantized, else a multiple of 16
  int64_t max_tokens;   ///< maximum T on any rank, in [1, 65535]
  int32_t num_experts;  ///< E >= 1; need not divide by W
  int32_t topk;         ///< K in [1, 32]
  sy_dtype dtype;       ///< of `x` unless already quantized, and the widest type combined: bf16, f16, f32
  sy_scale_kind scales SY_DEFAULT(SY_SCALE_F32);  ///< rows are sent as fp8 e4m3 with these scales; SY_SCALE_NONE: unquantized
  int32_t scale_group SY_DEFAULT(128);            ///< columns that share one scale: 32, 64 or 128
  sy_scale_order scale_order;
  sy_sending sending;
  int32_t pieces;              ///< parts of a row that are sent separately, in [1, 16]; 0: as tuned, or chosen by the shape
  sy_invalid_ids invalid_ids;  ///< may differ by rank
  int32_t reserved;            ///< must be 0
} sy_low_latency_config;

/// Symmetric memory that an object with this config allocates from each rank's heap, excluding outputs, on either backend.
/// Requires no group. docs/concepts/low_latency.md gives the formula.
sy_code sy_low_latency_memory_required(const sy_low_latency_config* config, int32_t world, sy_memory_requirement* requirement);
/// Heap size (sy_group_options::heap_bytes) for a group whose only object has this config.
sy_code sy_low_latency_heap_bytes(const sy_low_latency_config* config, int32_t world, size_t* bytes);
/// Bytes of one row-major scale row, padded to a multiple of 16; 0 without scales. Uses only `hidden`, `scales` and
/// `scale_group` of the config.
sy_code sy_low_latency_scale_row_bytes(const sy_low_latency_config* config, size_t* bytes);

/// Collective. Errors: invalid_argument naming the field, heap_exhausted, mismatch.
sy_code sy_low_latency_create(sy_group* group, const sy_low_latency_config* config, sy_low_latency** exchange);
/// Local. May be called at any time; does not wait. Outputs and rows remain valid and can be used with another object that has
/// the same config.
sy_code sy_low_latency_destroy(sy_low_latency* exchange);

/// Local. Creates an output of fixed shape, private to the rank, which each dispatch to it overwrites. Allocates memory; do not
/// call on the hot path.
sy_code sy_low_latency_make_output(sy_low_latency* exchange, sy_low_latency_output** output);
/// As sy_low_latency_make_output, with rows and scales in the caller's memory, which must outlive the output;
/// switchyard/low_latency.hpp gives the shapes. Errors: invalid_argument naming the member of `memory`.
sy_code sy_low_latency_make_output_in(sy_low_latency* exchange, const sy_row_view* memory, sy_low_latency_output** output);
/// May be called on any thread at any time: memory is freed once the enqueued calls and captured graphs that use it are done.
/// sy_group_used_by declares other streams that use it.
sy_code sy_low_latency_output_destroy(sy_low_latency_output* output);

/// Results of dispatch. The pointers never change. CUDA: all are device pointers, including the counts.
typedef struct sy_low_latency_view {
  size_t struct_size;
  void* x;         ///< [x_rows, x_cols]: local expert e's rows are [e * R, e * R + rows_of_expert[e])
  int64_t x_rows;  ///< num_local_experts * R
  int64_t x_cols;  ///< H
  sy_dtype x_dtype;
  sy_scale_kind x_scale_kind;
  void* x_scales;           ///< NULL without scales; see sy_scale_order
  int64_t rows_per_expert;  ///< R
  int64_t scale_rows;       ///< Rs: distance in words between columns of scales; row-major: R
  int32_t world;            ///< W
  int32_t num_local_experts;
  const int32_t* rows_of_expert;  ///< [num_local_experts]
  const int64_t* source_range;    ///< [num_local_experts, W] rows of a source: first << 32 | count; sources ascending
  /// [num_local_experts, R] source rank << 48 | k << 32 | token, where k is the first of the token's choices equal to this
  /// expert. Unspecified beyond rows_of_expert, like the rows themselves.
  const int64_t* row_source;
  sy_scale_order scale_order;  ///< as configured; so is scale_group
  int32_t scale_group;
} sy_low_latency_view;
sy_code sy_low_latency_output_get(const sy_low_latency_output* output, sy_low_latency_view* view);

/// Local. Memory for the expert outputs, [num_local_experts * R, H] of `dtype` (bf16, f16 or f32, no wider than the config's
/// dtype). Row i holds the result for row i of an output. Combine reads it in place. Allocates.
sy_code sy_low_latency_make_rows(sy_low_latency* exchange, sy_dtype dtype, sy_low_latency_rows** rows);
sy_code sy_low_latency_rows_get(const sy_low_latency_rows* rows, sy_row_view* view);
/// As sy_low_latency_output_destroy.
sy_code sy_low_latency_rows_destroy(sy_low_latency_rows* rows);

/// Options of one dispatch. May differ by rank, except that `selector` must be NULL on all ranks or on none.
typedef struct sy_low_latency_dispatch_options {
  size_t struct_size;
  const float* topk_weights;  ///< float32 [T, K] or NULL: sent with the rows, for the weighted sums of combine
  void* stream;               ///< CUDA: cudaStream_t; NULL: the legacy default stream. The CPU ignores it and num_sms.
  /// Pointer to T in the rank's memory (CUDA: in GPU memory), or NULL. T is read when the call runs, so it may vary between
  /// graph launches, and is clamped to [0, topk_ids->num_tokens]. All ids must be readable.
  const int32_t* device_tokens;
  int32_t num_sms;       ///< CUDA: in [1, those of the GPU / ranks on it]; 0: as tuned, or all
  sy_bool known_memory;  ///< CUDA: as in sy_dispatch_options
  /// If not NULL, `topk_ids` are expert ids, which the call replaces with slots as sy_slot_selector_select does; it counts as a
  /// call of that function. The map has num_experts slots. CUDA: in common configurations on one host, the sending kernel
  /// selects the slots; otherwise, a separate kernel does so first. All ranks must pass the same selector with the same version
  /// of its map, or NULL. They compare (version + 3 * number of the selector) modulo 8, where selectors and route counters of a
  /// group are numbered in order of creation. All ranks get SY_MISMATCH if the results differ or only some ranks pass NULL.
  sy_slot_selector* selector;
} sy_low_latency_dispatch_options;

/// Collective. Sends row t of `x` to every expert of token t. `x` is [T, H] of dtype, or fp8 with row-major scales of the
/// config's kind and group. If a token chooses an expert twice, the expert receives one row, which combine reads twice.
/// `options` NULL: defaults.
sy_code sy_low_latency_dispatch(sy_low_latency* exchange, const sy_const_row_view* x, const sy_expert_ids* topk_ids,
                                sy_low_latency_output* output, const sy_low_latency_dispatch_options* options);

/// Options of one combine; `order` must be identical on all ranks.
typedef struct sy_low_latency_combine_options {
  size_t struct_size;
  /// SY_ORDER_PER_ROUTE: one row is returned per (token, expert), and the token's owner weights and sums them.
  /// SY_ORDER_PER_RANK: the experts' rank sums the rows and returns one per (token, rank), with fewer bytes and one more
  /// rounding.
  sy_combine_order order SY_DEFAULT(SY_ORDER_PER_ROUTE);
  int32_t num_sms;            ///< CUDA: as in sy_low_latency_dispatch_options
  const float* topk_weights;  ///< float32 [T, K], per_route only; NULL: those passed to dispatch, or none (unweighted)
  const float* expert_scale;  ///< float32 [num_local_experts], per_route only, or NULL: each row returns as round(y * scale)
  void* stream;               ///< CUDA: as in sy_low_latency_dispatch_options
  sy_bool known_memory;       ///< CUDA: as in sy_dispatch_options
  int32_t reserved;           ///< must be 0
} sy_low_latency_combine_options;

/// Collective. Sums the expert outputs for the tokens of the last dispatch to `output` and writes the sums to `out`, [T, H] of
/// `y`'s type (bf16, f16 or f32). `y` has the shape of the output's `x` and is read in place; `out` must not overlap `y` or
/// anything in `options`. All ranks must combine the rows of the same dispatch. The result of a token without a route is +0.
/// `options` NULL: defaults.
sy_code sy_low_latency_combine(sy_low_latency* exchange, const sy_const_row_view* y, const sy_low_latency_output* output,
                               void* out, const sy_low_latency_combine_options* options);

/// Dispatch and combine, each split into two halves. _send returns without holding resources; sy_low_latency_receive, which is
/// local and called once per _send, enqueues the rest (CPU: waits for the peers). Between the halves, the caller may compute
/// but must make no other call on the object. Until the receive, the call uses the output, `out` and the combine weights; all
/// other arguments may be reused as soon as _send returns.
sy_code sy_low_latency_dispatch_send(sy_low_latency* exchange, const sy_const_row_view* x, const sy_expert_ids* topk_ids,
                                     sy_low_latency_output* output, const sy_low_latency_dispatch_options* options);
sy_code sy_low_latency_combine_send(sy_low_latency* exchange, const sy_const_row_view* y, const sy_low_latency_output* output,
                                    void* out, const sy_low_latency_combine_options* options);
/// Errors: invalid_argument if nothing was sent since the last receive.
sy_code sy_low_latency_receive(sy_low_latency* exchange);

/// A row and the expert that processes it.
typedef struct sy_row_origin {
  int32_t expert;  ///< in [0, E)
  int32_t rank;    ///< rank that holds the token
  int32_t token;   ///< its index on that rank
  int32_t k;       ///< first of the token's choices equal to this expert
} sy_row_origin;

/// CPU groups: for i in [0, n), replaces x[i], element `column + i` of the row as float32, with the expert's result. It is
/// called by several threads concurrently and must return.
typedef void (*sy_row_function)(float* x, int64_t n, const sy_row_origin* row, int64_t column, void* user);

/// Options of sy_low_latency_all_to_all. May differ by rank.
typedef struct sy_all_to_all_options {
  size_t struct_size;
  const float* topk_weights;  ///< float32 [T, K]; NULL: 1
  const float* expert_scale;  ///< float32 [num_local_experts]: expert e returns round(x * scale); NULL: the row unchanged
  /// Alternative to expert_scale in CPU groups: expert e returns round(f(x)). For GPUs, the function is device code and
  /// requires C++ (switchyard/cuda/row_function.cuh).
  sy_row_function row_function;
  void* row_function_user;       ///< argument of row_function
  void* stream;                  ///< CUDA: as in sy_low_latency_dispatch_options
  const int32_t* device_tokens;  ///< as in sy_low_latency_dispatch_options
  int32_t num_sms;               ///< CUDA: as in sy_low_latency_dispatch_options
  int32_t reserved;              ///< must be 0
  sy_slot_selector* selector;    ///< as in sy_low_latency_dispatch_options; CUDA: a separate kernel selects the slots first
} sy_all_to_all_options;

/// Collective. Dispatch, experts and combine (per_route) in one launch, for experts that transform each element of a row
/// independently. `x` and `out` are [T, H] of dtype. `out` must not overlap `x`, the ids or anything in `options`. Requires
/// sy_low_latency_config::scales = SY_SCALE_NONE. The result of a token without a route is +0. `options` NULL: defaults.
sy_code sy_low_latency_all_to_all(sy_low_latency* exchange, const sy_const_row_view* x, const sy_expert_ids* topk_ids,
                                  void* out, const sy_all_to_all_options* options);

/// Traffic and time of this rank's last call. CUDA: waits for it.
sy_code sy_low_latency_last_call(const sy_low_latency* exchange, sy_call_statistics* statistics);
/// Number of ids in this rank's calls so far that are neither -1 nor a valid expert id. CUDA: counts calls that have run,
/// including graph replays; waits only for a copy of the count, not for kernels.
sy_code sy_low_latency_invalid_ids(const sy_low_latency* exchange, int64_t* count);

#ifdef __cplusplus
}
#endif
