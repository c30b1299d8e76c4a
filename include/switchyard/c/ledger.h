// SPDX-License-Identifier: Apache-2.0
/// \file
/// C ABI: combine driven by an explicit route ledger, the counterpart of switchyard/ledger.hpp. The rules of switchyard.h for
/// errors, structs, ownership, threads and GPUs apply; docs/concepts/ledger.md describes the tables.
///
/// Notation as in switchyard.h, except that M is the number of tokens on a rank. The rank that holds an expert writes the
/// expert's rows, in ledger order, to the *return buffer* of the rank that owns their tokens. The owner sums `probs[f] *
/// return_buffer[expanded_row_idx[f]]` over each token's K routes in float32, starting from +0: multiply, then add, k
/// ascending, with one rounding to the row type. Routes with index -1 are skipped; the result of a token without a route is +0.
///
/// A ledger is a sy_ledger, either from a dispatch (sy_handle_ledger) or with the caller's own arrays (`storage` NULL).
#pragma once

#include "switchyard/c/switchyard.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sy_ledger_combine sy_ledger_combine;    ///< ledger combine over a group; sy_ledger_combine_destroy
typedef struct sy_prepared_ledger sy_prepared_ledger;  ///< a checked ledger; sy_prepared_ledger_destroy

/// Fixed properties of a ledger combine; identical on all ranks.
typedef struct sy_ledger_config {
  size_t struct_size;
  int64_t hidden;                           ///< H >= 1: rows of any length, also not a multiple of 16 bytes
  int64_t max_tokens;                       ///< maximum M on any rank, >= 0
  int64_t max_rows;                         ///< maximum number of expert output rows in a ledger; 0: the int32 maximum
  int32_t num_experts;                      ///< E >= 1; need not divide by W
  int32_t topk;                             ///< K in [1, 32]
  sy_dtype dtype SY_DEFAULT(SY_DTYPE_F16);  ///< of expert outputs, return buffers and results: f16, bf16 or f32
  int32_t max_ledgers
      SY_DEFAULT(4);  ///< CUDA: maximum number of prepared ledgers alive at once, those of graphs included, >= 1
} sy_ledger_config;

/// Returns SY_INVALID_ARGUMENT, naming the field and index, for the first value that is invalid for rank `rank` of `world`.
/// Requires no group.
sy_code sy_ledger_check(const sy_ledger* ledger, const sy_ledger_config* config, int32_t world, int32_t rank);

/// Buffer sizes, in bytes, of the published ledger format, for comparison and for callers that allocate the buffers.
typedef struct sy_ledger_format {
  size_t struct_size;
  size_t workspace_bytes;   ///< int32 [max(64, blocks * (8 + Ep))]; Ep: E rounded up to 16
  size_t route_meta_bytes;  ///< the five tables, each rounded up to 64 bytes
  size_t window_bytes;      ///< return buffer and two int32 [W], each rounded up to 64 bytes
  size_t guard_bytes;       ///< unused bytes before the window
} sy_ledger_format;
/// Sizes for max_tokens tokens. `blocks` is the number of workers that synchronize through the workspace. Requires no group.
sy_code sy_ledger_format_of(const sy_ledger_config* config, int32_t world, int32_t blocks, sy_ledger_format* format);

/// Returns the tables of rank `rank` in the published format: int32, little endian, in the order of sy_ledger's members, each
/// padded to a multiple of 64 bytes. Requires no group. Errors: as for sy_ledger_check.
sy_code sy_ledger_pack(const sy_ledger* ledger, const sy_ledger_config* config, int32_t world, int32_t rank, sy_bytes* bytes);
/// Inverse of sy_ledger_pack, from `size` bytes in host memory, for a rank with `num_tokens` tokens; `data` is not retained.
/// Release ledger->storage.
sy_code sy_ledger_unpack(const void* data, size_t size, const sy_ledger_config* config, int32_t world, int32_t rank,
                         int64_t num_tokens, sy_ledger* ledger);

/// Symmetric memory that a ledger combine with this config allocates from each rank's heap, and the heap size for a group whose
/// only object has this config. Requires no group.
sy_code sy_ledger_combine_memory_required(const sy_ledger_config* config, int32_t world, sy_backend backend,
                                          sy_memory_requirement* requirement);
sy_code sy_ledger_combine_heap_bytes(const sy_ledger_config* config, int32_t world, sy_backend backend, size_t* bytes);

/// Collective. Errors: invalid_argument naming the field, heap_exhausted, mismatch.
sy_code sy_ledger_combine_create(sy_group* group, const sy_ledger_config* config, sy_ledger_combine** combine);
/// CUDA: does not wait; memory is freed once the enqueued calls and captured graphs that use it are done. The symmetric memory
/// stays allocated until the prepared ledgers are destroyed. Before another object is created in the same group, they must be
/// destroyed on all ranks or on none.
sy_code sy_ledger_combine_destroy(sy_ledger_combine* combine);

/// Local. Checks the tables (sy_ledger_check) and prepares them for any number of `combine` calls; `ledger` is not retained.
/// CUDA: waits for all earlier calls and for a copy to the GPU; must not be called while the thread is capturing a stream.
/// Errors: pool_exhausted if sy_ledger_config::max_ledgers prepared ledgers are alive.
sy_code sy_ledger_combine_prepare(sy_ledger_combine* combine, const sy_ledger* ledger, sy_prepared_ledger** prepared);
sy_code sy_prepared_ledger_destroy(sy_prepared_ledger* prepared);
/// Returns M, the minimum number of expert output rows, and the number of rows returned to this rank. Any pointer may be NULL.
sy_code sy_prepared_ledger_sizes(const sy_prepared_ledger* prepared, int64_t* num_tokens, int64_t* rows,
                                 int64_t* returned_rows);

/// Options of one call. May differ by rank.
typedef struct sy_ledger_combine_options {
  size_t struct_size;
  void* stream;      ///< CUDA: cudaStream_t; NULL: the legacy default stream. The CPU ignores it and num_sms.
  int32_t num_sms;   ///< CUDA: in [1, those of the GPU / ranks on it]; 0: as tuned, or all
  int32_t reserved;  ///< must be 0
} sy_ledger_combine_options;

/// Collective. Returns the rows of `expert_output` to their owners and sums this rank's tokens into `out` [M, H].
/// `expert_output` is [rows, H] of dtype, with at least the ledger's rows. `probs` is float32 [M, K], or NULL to add the rows
/// unweighted. peer_token_per_expert must be identical on all ranks; otherwise SY_MISMATCH is reported. CUDA: the call
/// allocates nothing, does not wait and can be captured. `options` NULL: defaults.
sy_code sy_ledger_combine_run(sy_ledger_combine* combine, const sy_const_row_view* expert_output, const float* probs,
                              const sy_prepared_ledger* prepared, void* out, const sy_ledger_combine_options* options);

/// Collective. Equivalent to sy_ledger_combine_run with packed tables: unpacks `size` bytes at `route_meta`, in host memory on
/// both backends, for a rank with `num_tokens` tokens (see sy_ledger_unpack). The tables are not retained. `window` is the
/// object whose symmetric memory receives the returned rows (sy_ledger_combine_returned). CUDA: the call blocks and cannot be
/// captured.
sy_code sy_combine_by_ledger(const sy_const_row_view* expert_output, const float* probs, const void* route_meta, size_t size,
                             sy_ledger_combine* window, int64_t num_tokens, void* out,
                             const sy_ledger_combine_options* options);

/// Local. This rank's return buffer after the last call, valid until the next call. CUDA: the buffer is in device memory; waits
/// for the last call.
sy_code sy_ledger_combine_returned(const sy_ledger_combine* combine, sy_const_row_view* rows);
/// Traffic and time of this rank's last call. CUDA: waits for it.
sy_code sy_ledger_combine_last_call(const sy_ledger_combine* combine, sy_call_statistics* statistics);

#ifdef __cplusplus
}
#endif
