// SPDX-License-Identifier: Apache-2.0
/// \file
/// C ABI of Switchyard: dispatch and combine of Mixture-of-Experts tokens. C11 and C++. Uses the terms of switchyard/group.hpp
/// and switchyard/normal.hpp; docs/concepts/c_api.md is a short introduction. Low latency and the flat exchange are in
/// c/low_latency.h, combine by ledger in c/ledger.h, and memory shared by CUDA graphs in c/graph_memory.h. Expert compute, a
/// separate library, is in c/gemm.h, c/gemm_gradients.h and c/expert.h.
///
/// Notation: W ranks, T tokens on this rank, H hidden, K topk, E experts, M received rows. Ranks hold consecutive experts; the
/// first `E mod W` ranks hold one more than the others. Arrays are dense and row-major. "Collective" means that all ranks make
/// the same calls in the same order with the same options; all other functions are local.
///
/// Errors. Every function returns a sy_code except the three that return a string. The library never throws exceptions. After a
/// failure, sy_last_error() returns the message, objects returned through `T** out` are NULL, and other outputs are unchanged.
///   - If a collective call returns SY_INVALID_ARGUMENT, SY_UNSUPPORTED or SY_SYSTEM, the peers' calls and the group fail with
///     SY_PEER_FAILED. If the object itself is NULL, the peers instead wait until their deadline.
///   - Creating an object waits up to rendezvous_timeout_ms for the peers. All ranks report the same failure
///     (SY_HEAP_EXHAUSTED, or a config that is out of range on any rank or differs between ranks); the group stays usable and a
///     smaller object may be created. An unreadable struct is treated as misuse, as above.
///   - SY_CAPACITY_EXCEEDED and SY_POOL_EXHAUSTED are reported by all ranks; all objects stay usable.
///   - SY_PEER_TIMEOUT, SY_PEER_FAILED and SY_MISMATCH are sticky: destroy the objects and form a new group.
///   - SY_SYSTEM also covers exhausted memory and unexpected errors.
///
/// Structs. The first member is `struct_size`; the SY_..._INIT macro sets it and the defaults. Initialize every struct with it,
/// including those that a call fills. A shorter struct (from a program compiled against an older header) is accepted: missing
/// members take their defaults or are not filled. A longer struct (newer header) is accepted if all bytes unknown to this
/// library are zero.
///
/// Ownership. Objects are reference counted and may be destroyed in any order: a group lives until it and everything created
/// from it have been destroyed, and an exchange until its outputs and row buffers have been destroyed. Destruction is local,
/// never fails, and accepts NULL. GPUs: objects and memory may be destroyed at any time, even while calls and graphs use them;
/// memory is reused only after all work that uses it is done. Destruction does not wait, except for the last reference to a
/// group and for objects of a multi-host group. A stream passed to calls must outlive the objects, handles, outputs and rows
/// used on it, even if it is idle. Graphs may outlive it.
///
/// Thread safety. A group and the objects created from it must be used by one thread at a time; groups of different ranks are
/// independent. sy_handle is immutable and may be used and released by any thread; sy_dispatched, sy_rows and sy_storage may be
/// destroyed on any thread. Error messages and reports are stored per thread.
///
/// GPUs. In a group with SY_BACKEND_CUDA, all pointers to rows, scales, ids, weights, biases and results, passed or returned,
/// are device pointers of the rank's GPU (cudaMalloc, managed memory or a stream-ordered allocation). Rows are aligned to 16
/// bytes. All structs, including options and filled structs, are in host memory. Calls enqueue their work on `stream` (a
/// cudaStream_t) and return; memory used by a call must stay valid until its work on the stream is done. Apart from functions
/// whose comments say so, only SY_SIZE_EXACT, the sy_handle_ functions (except retain and release) and sy_exchange_last_call
/// wait for the GPU. See docs/concepts/cuda.md.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "switchyard/c/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/// Opaque objects. See "Ownership" above.
typedef struct sy_group sy_group;            ///< one rank's membership; sy_group_destroy
typedef struct sy_exchange sy_exchange;      ///< dispatch and combine over a group; sy_exchange_destroy
typedef struct sy_dispatched sy_dispatched;  ///< result of a dispatch; sy_dispatched_destroy
typedef struct sy_handle sy_handle;          ///< routing of a dispatch, reference counted: sy_handle_retain, sy_handle_release
typedef struct sy_slot_selector sy_slot_selector;  ///< slots of replicated experts (c/expert_map.h); sy_slot_selector_destroy
typedef struct sy_rows sy_rows;                    ///< rows in symmetric memory; sy_rows_destroy
typedef struct sy_registered sy_registered;        ///< caller's memory accessible to all ranks; sy_registered_destroy
typedef struct sy_storage sy_storage;              ///< owns the arrays of a filled struct; sy_storage_release

// ---- Version, error text ----

/// Version of the library loaded at run time. Any pointer may be NULL.
sy_code sy_version(int32_t* major, int32_t* minor, int32_t* patch);
/// Version of the library as a string, "major.minor.patch". Static storage.
const char* sy_version_string(void);
/// Stable, lowercase name of a code, for example "peer_timeout"; "unknown" for other values. Static storage.
const char* sy_code_name(sy_code code);

/// Error message of this thread's last failed call, or "" if none failed; at most 2047 bytes. Valid until this thread's next
/// failure.
const char* sy_last_error(void);

/// Details of a wait that timed out.
typedef struct sy_wait_report {
  size_t struct_size;
  const char* operation;  ///< "dispatch", "combine", ...; static storage
  const char* site;       ///< name of the flag; static storage
  uint64_t call;          ///< number of the call on its object, from 1
  int32_t waiting_rank;
  int32_t awaited_rank;
  uint64_t expected;  ///< smallest flag word that would have ended the wait
  uint64_t seen;      ///< last flag word read
  double waited_ms;
  double silent_ms;  ///< time since the last heartbeat of awaited_rank if it is a process on another host; else negative
} sy_wait_report;

/// Details of this thread's last failure. Each of these functions returns SY_INVALID_ARGUMENT, and leaves sy_last_error()
/// unchanged, if that failure was of another kind or a pointer is NULL.
/// After SY_PEER_TIMEOUT: the report of the wait.
sy_code sy_last_wait_report(sy_wait_report* report);
/// After SY_PEER_FAILED: the failed rank and its reason (SY_SYSTEM: its process ended, or it left).
sy_code sy_last_peer_failure(int32_t* rank, sy_code* reason);
/// After SY_RENDEZVOUS: bit r is set if rank r never arrived; 0 if there was another cause.
sy_code sy_last_missing_ranks(uint64_t* ranks);

// ---- Group ----

/// Settings of a group. Identical on all ranks except where noted.
typedef struct sy_group_options {
  size_t struct_size;
  size_t heap_bytes SY_DEFAULT(268435456);  ///< symmetric memory per rank, in bytes; see sy_exchange_heap_bytes
  int64_t timeout_ms SY_DEFAULT(30000);  ///< deadline of every wait inside a call, >= 1 (INT64_MAX: never); may differ by rank
  int64_t rendezvous_timeout_ms
      SY_DEFAULT(60000);             ///< deadline of construction (group, objects, registered memory), sleep and wake, >= 1
  int32_t num_blocks SY_DEFAULT(1);  ///< CPU workers per rank = num_blocks * num_warps, each in [1, 1024]; may differ by rank
  int32_t num_warps SY_DEFAULT(1);
  int32_t reserved;  ///< must be 0
  int32_t num_sms;   ///< CUDA: max multiprocessors of any call; 0: SWITCHYARD_NUM_SMS, or those of the GPU / ranks on it
  sy_backend backend;
  int32_t device SY_DEFAULT(-1);  ///< CUDA: GPU of this rank; -1: rank modulo the number of visible GPUs; may differ by rank
  /// Host name of this rank: ranks with the same name share a host and map its memory. A comma-separated list holds one name
  /// per rank, repeated cyclically ("a,a,b": rank 3 is on a again). NULL or "": the environment variable SWITCHYARD_HOST; if
  /// that is not set, ranks that can share memory share a host. May differ by rank. The string is read only during the call.
  const char* host;
  /// Several hosts, ranks as processes: a rank on another host that is silent for longer than this is considered dead, even if
  /// no call waits for it. Must be >= 0; 0 means timeout_ms plus one second. May differ by rank.
  int64_t silence_ms;
  sy_host_network network;  ///< several hosts: transport of rows between them
  int32_t reserved2;        ///< must be 0
} sy_group_options;

/// Creates all `world` ranks (1 to 64) as threads of this process. `groups` has `world` elements; element r belongs to rank r
/// and must be used by one thread. `options` NULL: defaults.
sy_code sy_group_in_process(int32_t world, const sy_group_options* options, sy_group** groups);
/// Joins this process as rank `rank` of `world` at `store`: "unix:/path", "unix:@name" or "tcp://host:port". Rank 0 hosts the
/// store. `token` (any string, identical on all ranks) excludes processes from other jobs. Blocks until all ranks have joined.
sy_code sy_group_connect(int32_t rank, int32_t world, const char* store, const char* token, const sy_group_options* options,
                         sy_group** group);
/// Joins this process as one rank, as described by SWITCHYARD_RANK / _WORLD_SIZE / _STORE / _JOB_TOKEN or by the environment
/// variables of torchrun, Open MPI or Slurm. Blocks until all ranks have joined.
sy_code sy_group_from_environment(const sy_group_options* options, sy_group** group);
/// The rank leaves the group: peers' calls that still depend on it fail with SY_PEER_FAILED within about a second. Does nothing
/// in a forked child of the process that joined.
sy_code sy_group_destroy(sy_group* group);
sy_code sy_group_rank(const sy_group* group, int32_t* rank);
sy_code sy_group_size(const sy_group* group, int32_t* size);
/// Number of hosts and index of this rank's host; hosts are numbered in order of their lowest ranks. Either pointer may be
/// NULL.
sy_code sy_group_hosts(const sy_group* group, int32_t* hosts, int32_t* host);
/// Host of `rank`, which must be in [0, W).
sy_code sy_group_host_of(const sy_group* group, int32_t rank, int32_t* host);
/// Sets the deadline of every wait in later calls, >= 1 (INT64_MAX: never). Captured graphs keep the deadline set when they
/// were captured.
sy_code sy_group_set_timeout(sy_group* group, int64_t timeout_ms);
/// Collective. Waits until all ranks have called it.
sy_code sy_group_barrier(sy_group* group);
/// Collective. Gathers `bytes` bytes from every rank, in rank order, into `all` (W * bytes). Pointers may be NULL only if
/// `bytes` is 0.
sy_code sy_group_all_gather(sy_group* group, const void* mine, size_t bytes, void* all);
/// Collective. Performs one construction step within rendezvous_timeout_ms. `code` reports whether this rank's part succeeded
/// (SY_OK) or failed; `text` may be NULL. If any rank reports a failure, all ranks, including peers that are creating an
/// object, fail with the error of the lowest failed rank; the group stays usable. Otherwise gathers like sy_group_all_gather.
sy_code sy_group_agree(sy_group* group, const char* subject, sy_code code, const char* text, const void* mine, size_t bytes,
                       void* all);
/// Returns the pending fault of this rank, or SY_OK.
sy_code sy_group_check(const sy_group* group);
/// Ends all waits on all ranks with SY_PEER_FAILED (this rank, `reason`). `reason` is a sy_code other than
/// SY_OK, or a caller-defined number up to 255. Idempotent: only the first failure counts.
sy_code sy_group_abort(sy_group* group, int32_t reason);
/// The rank leaves the group now, but its objects stay alive; later calls return SY_INVALID_ARGUMENT. CUDA: waits for the GPU.
sy_code sy_group_leave(sy_group* group);

/// Used and total bytes of the symmetric heap on this rank. Either pointer may be NULL.
sy_code sy_group_heap(const sy_group* group, size_t* used, size_t* size);

/// Collective. Makes `bytes` bytes at `memory` accessible to all ranks, so that combine can read rows there in place. Sizes may
/// differ; a rank without a buffer passes NULL and 0. At most 64 registrations at a time. CPU: only for ranks that are threads.
/// CUDA: memory from cudaMalloc, or from cuMemCreate with POSIX file descriptors, on the rank's GPU. Errors are identical on
/// all ranks and leave the group usable.
sy_code sy_group_register_memory(sy_group* group, void* memory, size_t bytes, sy_registered** registered);
/// Ends the registration for this rank. All ranks must call it at the same point in their sequence of calls, and no rank may
/// free its memory before all ranks have called it (use sy_group_barrier in between). CUDA: waits for the GPU.
sy_code sy_registered_destroy(sy_registered* registered);

/// Collective; call it after all calls on all ranks have returned (CUDA: waits for the GPU). Releases the symmetric heap's
/// memory to the system until sy_group_wake is called. Exchanges and handles stay valid at the same addresses; the contents of
/// rows in the heap are lost. Until sy_group_wake, calls that require the heap return SY_INVALID_ARGUMENT and change nothing.
/// Returns SY_UNSUPPORTED if the memory cannot be released.
sy_code sy_group_sleep(sy_group* group);
/// Collective. Returns SY_SYSTEM on all ranks if memory is insufficient; the group then remains asleep, and the call may be
/// retried.
sy_code sy_group_wake(sy_group* group);

// ---- Sizes ----

/// Bytes of one scale row of `hidden` >= 0 columns: the scales, padded to a multiple of 16; 0 for SY_SCALE_NONE.
sy_code sy_scale_row_bytes(int64_t hidden, sy_scale_kind kind, size_t* bytes);
/// First expert of `rank`, in [0, W]; rank r holds experts [first(r), first(r + 1)).
sy_code sy_first_expert(int32_t num_experts, int32_t world, int32_t rank, int32_t* expert);

// ---- Exchange (normal mode) ----

/// Fixed properties of an exchange; identical on all ranks.
typedef struct sy_normal_config {
  size_t struct_size;
  int64_t hidden;       ///< H; rows must be a multiple of 16 bytes for every row type used
  int64_t max_tokens;   ///< maximum T on any rank, >= 0
  int32_t num_experts;  ///< E >= 1; need not divide by W
  int32_t topk;         ///< K in [1, 32]
  sy_layout layout;
  int32_t expert_alignment
      SY_DEFAULT(1);  ///< expert-major: rows per expert are padded to a multiple; rank-major: counts are rounded up only
  sy_dtype dtype;     ///< widest row type that is dispatched or combined; determines the memory size
  sy_staging staging;
  int32_t ring_num_channels;              ///< ring staging: token ranges that travel independently, in [1, 256]; 0: default
  int32_t ring_send_chunk SY_DEFAULT(6);  ///< ring staging: rows appended per announcement, in [1, ring_slots]
  int32_t ring_slots;                     ///< ring staging: rows per ring, >= K; 0: default
  sy_invalid_ids invalid_ids;             ///< may differ by rank
  size_t pool_bytes;  ///< memory for outputs and row buffers (direct staging); 0: as sy_exchange_memory_required computes
  /// Ring staging: maximum ring memory per rank, in bytes; 0: unlimited. Values left at 0 are chosen to fit. If that is not
  /// enough, ring_slots is reduced, but not below K. switchyard/normal.hpp gives the rules.
  size_t ring_max_bytes;
} sy_normal_config;

/// Symmetric memory of one exchange, in bytes per rank.
typedef struct sy_memory_requirement {
  size_t struct_size;
  size_t control_bytes;  ///< flags, counts, placements
  size_t pool_bytes;     ///< outputs, row buffers, staging (direct)
  size_t ring_bytes;     ///< rings (ring staging)
  size_t total_bytes;    ///< the sum
  size_t private_bytes;  ///< CUDA, ring staging: outputs, row buffers and handles, outside the heap and the sum
} sy_memory_requirement;

/// Memory that an exchange with this config allocates from each rank's heap in a group with this backend. Requires no group or
/// GPU.
sy_code sy_exchange_memory_required(const sy_normal_config* config, int32_t world, sy_backend backend,
                                    sy_memory_requirement* requirement);
/// Heap size (sy_group_options::heap_bytes) for a group whose only exchange has this config.
sy_code sy_exchange_heap_bytes(const sy_normal_config* config, int32_t world, sy_backend backend, size_t* bytes);
/// Number of rows that a dispatch allocates with SY_SIZE_WORST_CASE; identical on all ranks of a group of size `world`.
/// Requires no group.
sy_code sy_exchange_max_rows(const sy_normal_config* config, int32_t world, int64_t* rows);

/// Collective. Outputs and row buffers of a destroyed exchange keep its memory allocated, and the heap layout must be identical
/// on all ranks: before another exchange is created in the same group, these objects must be destroyed on all ranks or on none.
/// Errors: invalid_argument, heap_exhausted, mismatch.
sy_code sy_exchange_create(sy_group* group, const sy_normal_config* config, sy_exchange** exchange);
sy_code sy_exchange_destroy(sy_exchange* exchange);
/// Local. Sets the call site of later calls: a caller-chosen number from 1 to 32767, for example the layer of a model; 0, the
/// default: none. If the sites of the ranks' calls differ, the calls fail with a mismatch error whose message contains both.
/// Errors: invalid_argument.
sy_code sy_exchange_set_site(sy_exchange* exchange, uint32_t site);

/// Options of one dispatch; identical on all ranks except `capacity` and `out`.
typedef struct sy_dispatch_options {
  size_t struct_size;
  sy_scale_kind quantize;  ///< not none: bf16, f16 or f32 rows are sent as fp8 e4m3 with these scales
  sy_size_policy size SY_DEFAULT(SY_SIZE_AUTOMATIC);
  sy_overflow overflow;
  sy_padding padding;
  int64_t capacity;  ///< SY_SIZE_CAPACITY: maximum rows that this rank accepts, padding included
  /// CUDA: cudaStream_t on which all work is enqueued; NULL: the legacy default stream. The CPU ignores this member and the
  /// next two.
  void* stream;
  /// CUDA: pointer to T in device memory, or NULL. T is read when the kernel runs, so it may vary between graph launches, and
  /// is clamped to [0, topk_ids->num_tokens].
  const int32_t* device_tokens;
  int32_t num_sms;  ///< CUDA: multiprocessors that move rows, in [1, those of the GPU / ranks on it]; 0: the library's default
  /// 0 or 1. CUDA: with 1, the caller guarantees that all memory passed to the call belongs to this rank's GPU, as a framework
  /// can for its tensors. This skips the driver query, which takes more host time than all other checks. Everything else is
  /// checked.
  sy_bool known_memory;
  /// Both backends: destination for the rows in place of the exchange's pool, or NULL. It must have the delivered type and
  /// scales, and room for the allocated rows; too little room is an invalid_argument error (worst case, capacity, cached) or a
  /// pool_exhausted error on all ranks (exact). Costs one local copy of the delivered rows, or none for rows without scales in
  /// a sy_rows with direct staging. The pool memory is free again afterwards. The struct is read only during the call.
  const sy_row_view* out;
} sy_dispatch_options;

/// Collective. Sends row t of `x` [T, H] to every rank that owns one of token t's experts, once per rank. `topk_weights` is
/// float32 [T, K] or NULL. `options` NULL: defaults.
sy_code sy_exchange_dispatch(sy_exchange* exchange, const sy_const_row_view* x, const sy_expert_ids* topk_ids,
                             const float* topk_weights, const sy_dispatch_options* options, sy_dispatched** dispatched);
/// Collective. Repeats the routing of `handle` with different rows, without exchanging counts. Only the options `quantize`,
/// `padding`, `out`, `stream` and `num_sms` are used. With `out`, `dispatched` may be NULL, in which case only the rows are
/// returned.
sy_code sy_exchange_dispatch_cached(sy_exchange* exchange, const sy_const_row_view* x, const sy_handle* handle,
                                    const sy_dispatch_options* options, sy_dispatched** dispatched);

/// Result of a dispatch. Pointers are valid until sy_dispatched_destroy; routing pointers (all except `x` and `x_scales`) stay
/// valid while `handle` is retained. A pointer is NULL if the array does not apply to the layout or has no elements. CUDA: all
/// are device pointers; the weights are NULL only if this rank has tokens and passed no weights.
typedef struct sy_dispatched_view {
  size_t struct_size;
  void* x;         ///< [x_rows, x_cols]; direct staging: in symmetric memory, so that combine reads it in place
  int64_t x_rows;  ///< allocated rows, >= M
  int64_t x_cols;  ///< H
  sy_dtype x_dtype;
  sy_scale_kind x_scale_kind;
  void* x_scales;  ///< [x_rows, sy_scale_row_bytes] for fp8 rows
  int64_t rows;    ///< M: rows delivered; beyond them payload is unspecified, ids and sources are -1. CUDA: -1 unless the size
                   ///< is exact (the count is on the GPU; sy_handle_counts waits for it)
  int64_t num_tokens;  ///< T; with device_tokens its maximum
  int32_t world;       ///< W
  int32_t topk;        ///< K
  int32_t num_local_experts;
  int32_t reserved;
  sy_handle* handle;  ///< borrowed; sy_handle_retain to keep it

  const int32_t* topk_ids;      ///< rank-major: [x_rows, K] local expert ids, -1 if the route goes elsewhere or was dropped
  const float* topk_weights;    ///< rank-major: [x_rows, K] 0 where the id is -1; NULL if dispatch had no weights
  const int32_t* source_token;  ///< rank-major: [x_rows] token index at its source

  const int64_t* row_source;        ///< expert-major: [x_rows] source rank << 48 | k << 32 | token; -1 for padding
  const float* row_weights;         ///< expert-major: [x_rows]; NULL if dispatch had no weights
  const int64_t* expert_first_row;  ///< expert-major: [num_local_experts]

  const int64_t* tokens_per_expert;   ///< [num_local_experts] kept routes of all sources to each local expert
  const int64_t* aligned_per_expert;  ///< [num_local_experts] the same, rounded up to expert_alignment

  // With drop_and_report (including a cached dispatch with such a handle), zeros if nothing was dropped. With fail, NULL.
  const uint8_t* dropped;             ///< [T, K] 1 if this rank's route was dropped at capacity
  const int64_t* dropped_per_source;  ///< [W, num_local_experts] routes dropped here
  const int64_t* invalid_ids;         ///< one number: sy_handle_invalid_ids, readable without a host wait
} sy_dispatched_view;
sy_code sy_dispatched_get(const sy_dispatched* dispatched, sy_dispatched_view* view);
/// CUDA: declares that `stream` (cudaStream_t), other than the delivery stream, uses the rows. The rows' memory is not reused
/// until the work enqueued on `stream` before their destruction is done. If `stream` is being captured, the rows also belong to
/// its graph.
sy_code sy_dispatched_used_by(sy_dispatched* dispatched, void* stream);
sy_code sy_dispatched_destroy(sy_dispatched* dispatched);

/// Stream argument of sy_exchange_allocate_rows for rows that may be used on any stream.
#define SY_ANY_STREAM ((void*)~(uintptr_t)0)
/// Allocates uninitialized rows for expert outputs in symmetric memory, [rows of `handle`, H]; combine reads them in place.
/// CUDA: `stream` (cudaStream_t) waits for earlier users of the memory; if the stream is being captured, the graph owns the
/// rows. With SY_ANY_STREAM, the rows are allocated from idle memory; the calling thread waits for it if necessary. The CPU
/// ignores `stream`. Errors: pool_exhausted.
sy_code sy_exchange_allocate_rows(sy_exchange* exchange, const sy_handle* handle, sy_dtype dtype, void* stream, sy_rows** rows);
sy_code sy_rows_get(const sy_rows* rows, sy_row_view* view);
sy_code sy_rows_used_by(sy_rows* rows, void* stream);  ///< as sy_dispatched_used_by
sy_code sy_rows_destroy(sy_rows* rows);

/// Options of one combine; identical on all ranks except for pointers.
typedef struct sy_combine_options {
  size_t struct_size;
  sy_combine_order order;
  sy_bool apply_weights
      SY_DEFAULT(1);  ///< 0 or 1; expert-major: multiply rows by their weights (if passed to dispatch or in `topk_weights`)
  /// Rank-major: float32 [M, K], summed over ranks into `out_weights` (the rows themselves are not multiplied). Expert-major:
  /// float32 [T, K] that replaces the weights passed to dispatch; SY_ORDER_PER_ROUTE only.
  const float* topk_weights;
  /// Rows [T, H] of the combined type, added before the sum; bias[1] requires bias[0]. `out` itself may be one of them.
  const void* bias[2];
  void* stream;          ///< CUDA: as in sy_dispatch_options
  int32_t num_sms;       ///< CUDA: as in sy_dispatch_options
  sy_bool known_memory;  ///< CUDA: as in sy_dispatch_options
} sy_combine_options;

/// Collective. Sums the expert outputs of each token into `out` [T, H] of `y`'s type (bf16, f16 or f32). `y` has the rows of
/// the dispatch that created `handle`. Rows in a sy_rows or in sy_dispatched_view::x are read in place. With direct staging,
/// rows elsewhere are first copied, except that expert-major rows with SY_ORDER_PER_ROUTE are pushed to their owners from any
/// memory. The result of a token without a route is the bias sum, or +0. `out_weights` is float32 [T, K] (rank-major with
/// options->topk_weights) or NULL. `options` NULL: defaults.
sy_code sy_exchange_combine(sy_exchange* exchange, const sy_const_row_view* y, const sy_handle* handle, void* out,
                            const sy_combine_options* options, float* out_weights);

/// Traffic and time of this rank's last call. The members are listed in switchyard/statistics.def (remote_bytes, local_bytes,
/// copied_bytes, payload_rows, metadata_bytes: uint64_t; plan_us, total_us: double; network_bytes: uint64_t).
typedef struct sy_call_statistics {
  size_t struct_size;
#define SY_STATISTIC_MOVED(name) uint64_t name;
#define SY_STATISTIC_TIME(name) double name;
#include "switchyard/statistics.def"
} sy_call_statistics;
sy_code sy_exchange_last_call(const sy_exchange* exchange, sy_call_statistics* statistics);
/// Number of invalid ids in this rank's calls so far (sy_invalid_ids). CUDA: counts calls that have run, including graph
/// replays; does not wait for kernels.
sy_code sy_exchange_invalid_ids(const sy_exchange* exchange, int64_t* count);

// ---- Handle ----

/// The routing of one dispatch, for both senders and receivers. It is immutable and may be used any number of times with any
/// exchange of the same group size, rank and shape. CPU: it holds no symmetric memory and may be used after the exchange that
/// created it is destroyed. CUDA: its tables are in that exchange's memory and must not be used after the exchange is
/// destroyed. The queries below (tokens, rows, counts, matrices, ledger, bytes) wait for the dispatch and return SY_UNSUPPORTED
/// while its stream is being captured.
/// Each sy_handle_retain call and each sy_handle_deserialize result adds one owner; each owner must release the handle once.
sy_code sy_handle_retain(sy_handle* handle);
sy_code sy_handle_release(sy_handle* handle);
sy_code sy_handle_num_tokens(const sy_handle* handle, int64_t* num_tokens);  ///< T
sy_code sy_handle_rows(const sy_handle* handle, int64_t* rows);              ///< M, padding included
sy_code sy_handle_invalid_ids(const sy_handle* handle, int64_t* count);      ///< of this rank; 0 if deserialized

/// Library-owned arrays: the calls below fill a struct whose `storage` owns its arrays. Release it once when done (NULL is
/// accepted); reusing the struct for another call does not release the earlier storage.
sy_code sy_storage_release(sy_storage* storage);

/// Host-side counts of the rows that a dispatch delivered.
typedef struct sy_counts {
  size_t struct_size;
  sy_storage* storage;
  int64_t rows;                       ///< M, padding included
  int64_t num_local_experts;          ///< length of the arrays
  const int64_t* tokens_per_expert;   ///< kept routes of all sources to each local expert
  const int64_t* aligned_per_expert;  ///< the same, rounded up to expert_alignment
  const int64_t* expert_first_row;    ///< expert-major; else NULL
} sy_counts;
sy_code sy_handle_counts(const sy_handle* handle, sy_counts* counts);

/// Portable serialized data (little endian, versioned).
typedef struct sy_bytes {
  size_t struct_size;
  sy_storage* storage;
  const void* data;
  size_t size;
} sy_bytes;
sy_code sy_handle_serialize(const sy_handle* handle, sy_bytes* bytes);
/// Inverse of sy_handle_serialize; `data` is not retained. Errors: invalid_argument if the bytes are corrupt.
sy_code sy_handle_deserialize(const void* data, size_t size, sy_handle** handle);

/// DeepEP / TileScale description of a dispatch. C = num_channels. Prefixes are inclusive unless noted.
typedef struct sy_matrices {
  size_t struct_size;
  sy_storage* storage;
  int32_t world;
  int32_t num_channels;
  int64_t num_tokens;                         ///< T
  int64_t num_recv;                           ///< elements of recv_src_idx
  const int32_t* rank_prefix_matrix;          ///< [W, W] tokens of sources 0..i to rank j
  const int32_t* channel_prefix_matrix;       ///< [W, C] this rank's tokens to rank d in channels 0..c
  const int32_t* recv_channel_prefix_matrix;  ///< [W, C] exclusive: first row of channel c among source s's rows here
  const int32_t* recv_src_idx;                ///< [num_recv] token index at the source
  const uint8_t* is_token_in_rank;            ///< [T, W]
  const int32_t* send_head;                   ///< [T, W] index of token t in the stream (channel of t, rank), -1 if not sent
} sy_matrices;
/// `num_channels` >= 1. Errors: unsupported for an expert-major dispatch that dropped routes at capacity.
sy_code sy_handle_matrices(const sy_handle* handle, int32_t num_channels, sy_matrices* matrices);

/// The explicit route ledger (PTO moe_combine's fields, order and padding).
typedef struct sy_ledger {
  size_t struct_size;
  sy_storage* storage;
  int32_t world;
  int32_t num_experts;         ///< E
  int32_t num_experts_padded;  ///< Ep: E rounded up to 16
  int32_t num_local_experts;
  int64_t num_routes;                    ///< T * K
  const int32_t* peer_token_per_expert;  ///< [W, Ep] rows of source s for global expert e
  const int32_t* expanded_row_idx;       ///< [T * K] row of route f in this rank's return buffer, -1 invalid
  const int32_t* cumsum_per_expert;      ///< [W, Ep] inclusive prefix over experts
  const int32_t* dispatch_offset;        ///< [num_local_experts] first row of each local expert
  const int32_t* prev_sum_before_rank;   ///< [W, num_local_experts] rows of sources before s inside local expert
} sy_ledger;
/// Errors: unsupported for a dispatch that dropped routes at capacity.
sy_code sy_handle_ledger(const sy_handle* handle, sy_ledger* ledger);

/// Result of DeepEP's get_dispatch_layout.
typedef struct sy_routing_layout {
  size_t struct_size;
  sy_storage* storage;
  int32_t world;
  int32_t num_experts;
  int64_t num_tokens;
  const int32_t* num_tokens_per_rank;    ///< [W] distinct tokens
  const int32_t* num_tokens_per_expert;  ///< [E] routes
  const uint8_t* is_token_in_rank;       ///< [T, W]
} sy_routing_layout;
/// Requires no group.
sy_code sy_routing_layout_of(const sy_expert_ids* topk_ids, int32_t num_experts, int32_t world, sy_routing_layout* layout);
/// As sy_routing_layout_of, for ids on a GPU and with results in the caller's memory on that GPU: num_tokens_per_rank [W],
/// num_tokens_per_expert [E] for at most 32768 experts, and is_token_in_rank [T, W] aligned to 4 bytes. Enqueues one kernel on
/// `stream` (a cudaStream_t), does not wait and can be captured. Errors: unsupported if the library was built without CUDA
/// code.
sy_code sy_routing_layout_enqueue(const sy_expert_ids* topk_ids, int32_t num_experts, int32_t world,
                                  int32_t* num_tokens_per_rank, int32_t* num_tokens_per_expert, uint8_t* is_token_in_rank,
                                  void* stream);

#ifdef __cplusplus
}
#endif
