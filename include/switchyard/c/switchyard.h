// SPDX-License-Identifier: Apache-2.0
/// \file
/// C ABI of Switchyard: dispatch and combine of Mixture-of-Experts tokens. C11 and C++. The same vocabulary as
/// switchyard/group.hpp and switchyard/normal.hpp; docs/concepts/c_api.md is the short introduction. Low latency and the flat
/// exchange are in c/low_latency.h, combine by ledgers in c/ledger.h, memory that CUDA graphs share in c/graph_memory.h;
/// expert compute, in a library of its own, in c/gemm.h, c/gemm_gradients.h and c/expert.h.
///
/// Notation: W ranks, T tokens on this rank, H hidden, K topk, E experts, M received rows. Ranks hold consecutive experts, the
/// first `E mod W` ranks one more than the others. Arrays are dense and row-major. "Collective": all ranks make the same calls
/// in the same order with the same options; every other function is local.
///
/// Errors. Every function returns a switchyard_code_t, except the three that return text. No exception leaves the library.
/// After a failure sy_last_error() explains; handles returned through `T** out` are then NULL, other outputs are untouched.
///   - SWITCHYARD_INVALID_ARGUMENT, _UNSUPPORTED and _SYSTEM from a collective call end the peers' calls with
///     SWITCHYARD_PEER_FAILED, and the group with them (not if the object itself is NULL: then the peers wait until their
///     deadline).
///   - Creation of an object waits for the peers for rendezvous_timeout_ms. What it finds (SWITCHYARD_HEAP_EXHAUSTED, a config
///     that is out of range on any rank or differs) all ranks report alike; the group stays usable and a smaller object may be
///     made. A struct that cannot be read is misuse as above.
///   - SWITCHYARD_CAPACITY_EXCEEDED and SWITCHYARD_POOL_EXHAUSTED are reported by all ranks together; everything stays usable.
///   - SWITCHYARD_PEER_TIMEOUT, _PEER_FAILED and _MISMATCH are sticky: destroy the objects and form the group again.
///   - SWITCHYARD_SYSTEM also stands for exhausted memory and for anything unexpected.
///
/// Structs. The first member is `struct_size`; the SWITCHYARD_..._INIT macro sets it and the defaults, and every struct must
/// start from it, also one that is filled by a call. A shorter struct (of a program compiled against an older header) is
/// accepted: missing members have their defaults, or are not filled. A longer one (newer header) is accepted if all bytes
/// unknown to this library are zero.
///
/// Ownership. Objects are reference counted inside: a group lives until itself and everything made from it have been destroyed,
/// an exchange until its outputs and row buffers have, in any order. Destruction is local, never fails, and accepts NULL.
/// GPUs: objects and memory may be destroyed at any time, also while calls and graphs use them, and destruction waits for
/// nothing (but that of the last share of a group, and of objects of a group of several hosts): memory is handed on after all
/// work that uses it. Streams that calls are given live until that memory is destroyed, or are synchronised before they are.
///
/// Thread safety. One thread at a time per group and the objects made from it; different ranks' groups are independent.
/// sy_handle is immutable and may be used and released by any thread; sy_dispatched, sy_rows and sy_storage may be destroyed on
/// any thread. Error texts and reports belong to the calling thread.
///
/// GPUs. In a group with SWITCHYARD_BACKEND_CUDA every pointer to rows, scales, ids, weights, biases and results, given or
/// returned, is a device pointer of the rank's GPU (cudaMalloc, managed memory, or a stream-ordered allocation; rows aligned to
/// 16 bytes); structs, options and what fills them lie in host memory. Calls enqueue on `stream` (a cudaStream_t) and return;
/// memory that a call uses stays valid until its work on the stream is done. What waits for the GPU: SWITCHYARD_SIZE_EXACT, the
/// sy_handle_ functions (except retain and release), sy_exchange_last_call. docs/concepts/cuda.md.
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
typedef struct sy_dispatched sy_dispatched;  ///< what a dispatch delivered; sy_dispatched_destroy
typedef struct sy_handle sy_handle;          ///< routing of a dispatch; counted: sy_handle_retain, sy_handle_release
typedef struct sy_rows sy_rows;              ///< rows in symmetric memory; sy_rows_destroy
typedef struct sy_registered sy_registered;  ///< memory of the caller that all ranks reach; sy_registered_destroy
typedef struct sy_storage sy_storage;        ///< owns the arrays of a filled struct; sy_storage_release

// ---- Version, error text ----

/// Version of the library at run time. Any pointer may be NULL.
switchyard_code_t sy_version(int32_t* major, int32_t* minor, int32_t* patch);
/// The version of the library as text, "major.minor.patch". Static storage.
const char* sy_version_string(void);
/// Stable, lower-case name of a code, for example "peer_timeout"; "unknown" for other values. Static storage.
const char* sy_code_name(switchyard_code_t code);

/// Text of this thread's last failed call, "" if none failed; at most 2047 bytes. Valid until its next failure.
const char* sy_last_error(void);

/// The full story of a wait that did not end.
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
  double silent_ms;  ///< how long nothing has come from awaited_rank, if it is a process on another host; negative otherwise
} sy_wait_report;
#define SWITCHYARD_WAIT_REPORT_INIT \
  { sizeof(sy_wait_report), NULL, NULL, 0, 0, 0, 0, 0, 0.0, 0.0 }

/// Details of this thread's last failure. Each returns SWITCHYARD_INVALID_ARGUMENT, and leaves sy_last_error() as it is, if
/// that failure was of another kind or a pointer is NULL.
/// After SWITCHYARD_PEER_TIMEOUT: the report of the wait.
switchyard_code_t sy_last_wait_report(sy_wait_report* report);
/// After SWITCHYARD_PEER_FAILED: the rank that failed, and its reason (SWITCHYARD_SYSTEM: its process ended, or it left).
switchyard_code_t sy_last_peer_failure(int32_t* rank, switchyard_code_t* reason);
/// After SWITCHYARD_RENDEZVOUS: bit r is set if rank r never came; 0 if the cause lies elsewhere.
switchyard_code_t sy_last_missing_ranks(uint64_t* ranks);

// ---- Group ----

/// Settings of a group. Equal on all ranks, except where noted.
typedef struct sy_group_options {
  size_t struct_size;
  size_t heap_bytes;              ///< symmetric memory per rank, in bytes; see sy_exchange_heap_bytes_for
  int64_t timeout_ms;             ///< deadline of every wait inside a call, >= 1 (INT64_MAX: never); may differ by rank
  int64_t rendezvous_timeout_ms;  ///< the same of what builds (the group, objects, registered memory), sleeps or wakes, >= 1
  int32_t num_blocks;             ///< CPU workers per rank = num_blocks * num_warps, each in [1, 1024]; may differ by rank
  int32_t num_warps;
  int32_t reserved;  ///< must be 0
  int32_t num_sms;   ///< CUDA: most multiprocessors of any call; 0: SWITCHYARD_NUM_SMS, or those of the GPU / ranks on it
  sy_backend backend;
  int32_t device;  ///< CUDA: GPU of this rank; -1: rank modulo the number of visible GPUs; may differ by rank
  /// Where this rank is: ranks with equal texts share a host, whose memory they map. Several texts with commas between them are
  /// for one rank each, in turn ("a,a,b": rank 3 is on a again). NULL or "": SWITCHYARD_HOST in the environment; if that is not
  /// set either, ranks that can share memory share a host. May differ by rank. Read during the call only.
  const char* host;
  /// Several hosts, ranks as processes: ranks of another host of which nothing has come for longer count as dead, also if
  /// nobody waits for them; >= 0; 0: timeout_ms and a second more. May differ by rank.
  int64_t silence_ms;
  sy_host_network network;  ///< several hosts: what carries their rows
  int32_t reserved2;        ///< must be 0
} sy_group_options;
#define SWITCHYARD_GROUP_OPTIONS_INIT                                                                   \
  {                                                                                                     \
    sizeof(sy_group_options), 268435456, 30000, 60000, 1, 1, 0, 0, SWITCHYARD_BACKEND_CPU, -1, NULL, 0, \
        SWITCHYARD_NETWORK_SOCKETS, 0                                                                   \
  }

/// All `world` ranks, in [1, 64], as threads of this process. `groups` has `world` elements; element r belongs to rank r and is
/// to be used by one thread. `options` NULL: defaults.
switchyard_code_t sy_group_in_process(int32_t world, const sy_group_options* options, sy_group** groups);
/// This process as rank `rank` of `world`, meeting at `store`: "unix:/path", "unix:@name" or "tcp://host:port". Rank 0 serves
/// the store. `token` (any text, the same on all ranks) keeps strangers out. Blocks until all ranks have come.
switchyard_code_t sy_group_connect(int32_t rank, int32_t world, const char* store, const char* token,
                                   const sy_group_options* options, sy_group** group);
/// This process as one rank, found from SWITCHYARD_RANK / _WORLD_SIZE / _STORE / _JOB_TOKEN or from the variables of torchrun,
/// Open MPI or Slurm. Blocks until all ranks have come.
switchyard_code_t sy_group_from_environment(const sy_group_options* options, sy_group** group);
/// The rank leaves: calls of peers that still need it end with SWITCHYARD_PEER_FAILED within about a second. In a child that
/// was forked by the process that joined: nothing.
switchyard_code_t sy_group_destroy(sy_group* group);
switchyard_code_t sy_group_rank(const sy_group* group, int32_t* rank);
switchyard_code_t sy_group_size(const sy_group* group, int32_t* size);
/// Number of hosts, and which of them this rank is on; they are numbered by their lowest ranks. Either pointer may be NULL.
switchyard_code_t sy_group_hosts(const sy_group* group, int32_t* hosts, int32_t* host);
/// The host of `rank`, in [0, W).
switchyard_code_t sy_group_host_of(const sy_group* group, int32_t rank, int32_t* host);
/// Deadline of every wait inside the calls from now on, >= 1 (INT64_MAX: never). Captured graphs keep that of their capture.
switchyard_code_t sy_group_set_timeout(sy_group* group, int64_t timeout_ms);
/// Collective. Waits until all ranks called it.
switchyard_code_t sy_group_barrier(sy_group* group);
/// Collective. Gathers `bytes` bytes of every rank, in rank order, into `all` (W * bytes). NULL pointers only with bytes = 0.
switchyard_code_t sy_group_all_gather(sy_group* group, const void* mine, size_t bytes, void* all);
/// Collective: a step of a construction, within rendezvous_timeout_ms. Reports that this rank's part went well (`code`
/// SWITCHYARD_OK) or failed, with a `text` or NULL. If any failed, all ranks fail with the error of the lowest such rank, peers
/// that create an object meanwhile too; the group stays usable. Else gathers as sy_group_all_gather.
switchyard_code_t sy_group_agree(sy_group* group, const char* subject, switchyard_code_t code, const char* text,
                                 const void* mine, size_t bytes, void* all);
/// The pending fault of this rank, or SWITCHYARD_OK.
switchyard_code_t sy_group_check(const sy_group* group);
/// Makes every wait of every rank end with SWITCHYARD_PEER_FAILED (this rank, `reason`). `reason` is a switchyard_code_t other
/// than SWITCHYARD_OK, or a number of your own up to 255. Idempotent: the first failure counts.
switchyard_code_t sy_group_abort(sy_group* group, int32_t reason);
/// The rank leaves now, though its objects live on; its later calls are SWITCHYARD_INVALID_ARGUMENT. CUDA: waits for the GPU.
switchyard_code_t sy_group_leave(sy_group* group);

/// Bytes of the symmetric heap in use and in total on this rank. Either pointer may be NULL.
switchyard_code_t sy_group_heap(const sy_group* group, size_t* used, size_t* size);

/// Collective. Makes `bytes` bytes at `memory` reachable for all ranks, so that combine reads rows in it where they lie. Sizes
/// may differ; NULL with 0 bytes is a rank without a buffer. At most 64 at a time. CPU: ranks as threads only. CUDA:
/// cudaMalloc, or cuMemCreate with POSIX file descriptors, on the rank's GPU. Errors occur on all ranks alike and leave the
/// group usable.
switchyard_code_t sy_group_register_memory(sy_group* group, void* memory, size_t bytes, sy_registered** registered);
/// Ends the registration for this rank: after the same call on each, and before any rank frees its memory (sy_group_barrier in
/// between). CUDA: waits for the GPU.
switchyard_code_t sy_registered_destroy(sy_registered* registered);

/// Collective, after all calls of all ranks have returned (CUDA: waits for the GPU). Gives the memory of the symmetric heap
/// back until sy_group_wake. Exchanges and handles survive, at the same addresses; the content of rows in the heap is lost.
/// Meanwhile calls that need the heap are SWITCHYARD_INVALID_ARGUMENT and change nothing. SWITCHYARD_UNSUPPORTED where memory
/// cannot be given back.
switchyard_code_t sy_group_sleep(sy_group* group);
/// Collective. SWITCHYARD_SYSTEM on all ranks if there is no memory: the group still sleeps, and this may be called again.
switchyard_code_t sy_group_wake(sy_group* group);

// ---- Sizes ----

/// Bytes of one scale row of `hidden` >= 0 columns: the scales, padded to a multiple of 16; 0 for SWITCHYARD_SCALE_NONE.
switchyard_code_t sy_scale_row_bytes(int64_t hidden, sy_scale_kind kind, size_t* bytes);
/// First expert of rank `rank` in [0, W]; rank r holds [first(r), first(r + 1)).
switchyard_code_t sy_first_expert(int32_t num_experts, int32_t world, int32_t rank, int32_t* expert);

// ---- Exchange (normal mode) ----

/// Fixed properties of an exchange; equal on all ranks.
typedef struct sy_normal_config {
  size_t struct_size;
  int64_t hidden;       ///< H; rows must be a multiple of 16 bytes for every row type used
  int64_t max_tokens;   ///< largest T on any rank, >= 0
  int32_t num_experts;  ///< E >= 1; need not divide by W
  int32_t topk;         ///< K in [1, 32]
  sy_layout layout;
  int32_t expert_alignment;  ///< expert-major: rows per expert are padded to a multiple; rank-major: counts are rounded up only
  sy_dtype row_type;         ///< widest row type that will be dispatched or combined; sizes the memory
  sy_staging staging;
  int32_t ring_num_channels;   ///< ring staging: token ranges that travel independently, in [1, 256]; 0: the usual number
  int32_t ring_send_chunk;     ///< ring staging: rows appended per announcement, in [1, ring_slots]
  int32_t ring_slots;          ///< ring staging: rows per ring, >= K; 0: the usual number
  sy_invalid_ids invalid_ids;  ///< may differ by rank
  size_t pool_bytes;  ///< memory for outputs and row buffers (direct staging); 0: as sy_exchange_memory_required computes
  /// Ring staging: largest ring memory per rank, in bytes; 0: no bound. Numbers that are left 0 are chosen to fit. If they do
  /// not suffice, ring_slots is lowered, down to K. switchyard/normal.hpp has the rules.
  size_t ring_max_bytes;
} sy_normal_config;
#define SWITCHYARD_NORMAL_CONFIG_INIT                                                                                        \
  {                                                                                                                          \
    sizeof(sy_normal_config), 0, 0, 0, 0, SWITCHYARD_LAYOUT_RANK_MAJOR, 1, SWITCHYARD_DTYPE_BF16, SWITCHYARD_STAGING_DIRECT, \
        0, 6, 0, 0, 0, 0                                                                                                     \
  }

/// Symmetric memory of one exchange, in bytes per rank.
typedef struct sy_memory_requirement {
  size_t struct_size;
  size_t control_bytes;  ///< flags, counts, placements
  size_t pool_bytes;     ///< outputs, row buffers, staging (direct)
  size_t ring_bytes;     ///< rings (ring staging)
  size_t total_bytes;    ///< the sum
  size_t private_bytes;  ///< CUDA, ring staging: outputs, row buffers and handles, outside the heap and the sum
} sy_memory_requirement;
#define SWITCHYARD_MEMORY_REQUIREMENT_INIT \
  { sizeof(sy_memory_requirement), 0, 0, 0, 0, 0 }

/// What an exchange with this config takes from each rank's heap. Needs no group.
switchyard_code_t sy_exchange_memory_required(const sy_normal_config* config, int32_t world,
                                              sy_memory_requirement* requirement);
/// Heap size for a group whose only exchange has this config: sy_group_options::heap_bytes.
switchyard_code_t sy_exchange_heap_bytes_for(const sy_normal_config* config, int32_t world, size_t* bytes);
/// Memory of an exchange in a group with this backend; the functions without _on are for SWITCHYARD_BACKEND_CPU. No GPU needed.
switchyard_code_t sy_exchange_memory_required_on(const sy_normal_config* config, int32_t world, sy_backend backend,
                                                 sy_memory_requirement* requirement);
switchyard_code_t sy_exchange_heap_bytes_on(const sy_normal_config* config, int32_t world, sy_backend backend, size_t* bytes);
/// Rows that a dispatch allocates with SWITCHYARD_SIZE_WORST_CASE, alike on all ranks of a group of `world`. Needs no group.
switchyard_code_t sy_exchange_most_rows(const sy_normal_config* config, int32_t world, int64_t* rows);

/// Collective. Before another exchange is created in the same group, outputs and row buffers of destroyed ones must be gone on
/// all ranks or on none: they keep their exchange's memory, and all ranks' heaps must be alike. Errors: invalid_argument,
/// heap_exhausted, mismatch.
switchyard_code_t sy_exchange_create(sy_group* group, const sy_normal_config* config, sy_exchange** exchange);
switchyard_code_t sy_exchange_destroy(sy_exchange* exchange);
/// Local. Calls from now on are made at `site`, a number of the caller's from 1 to 32767, for example of the layer of a model
/// that makes them; 0, the default: at none. Calls of different sites are a mismatch, whose text has both. Errors:
/// invalid_argument.
switchyard_code_t sy_exchange_set_site(sy_exchange* exchange, uint32_t site);

/// Options of one dispatch; equal on all ranks except `capacity` and `out`.
typedef struct sy_dispatch_options {
  size_t struct_size;
  sy_scale_kind quantize;  ///< not none: bf16, f16 or f32 rows are sent as fp8 e4m3 with these scales
  sy_size_policy size;
  sy_overflow overflow;
  sy_padding padding;
  int64_t capacity;  ///< SWITCHYARD_SIZE_CAPACITY: most rows this rank takes, padding included
  /// CUDA: cudaStream_t on which all work is enqueued; NULL: the legacy default stream. The CPU ignores this and the next two.
  void* stream;
  /// CUDA: device memory, or NULL: T at the time the kernel runs, so that it can vary in a graph; clamped to [0, T of the ids].
  const int32_t* device_tokens;
  int32_t num_sms;  ///< CUDA: multiprocessors that move rows, in [1, those of the GPU / ranks on it]; 0: the library's default
  /// 0 or 1; CUDA: the caller knows that all memory it gives to the call is of this rank's GPU, as a framework does of its
  /// tensors: the driver is not asked, which takes the host longer than all other checks. Everything else is checked.
  int32_t known_memory;
  /// Both backends: where the rows go instead of to the exchange's pool, or NULL. Of the type and with the scales that are
  /// delivered; room for the rows that are allocated (worst case, capacity, cached: else invalid_argument; exact: else
  /// pool_exhausted on all ranks). Costs one local copy of the delivered rows, none if they have no scales and go to a sy_rows
  /// of direct staging; the pool has its room back behind it. Read during the call only.
  const sy_row_view* out;
} sy_dispatch_options;
#define SWITCHYARD_DISPATCH_OPTIONS_INIT                                                                     \
  {                                                                                                          \
    sizeof(sy_dispatch_options), SWITCHYARD_SCALE_NONE, SWITCHYARD_SIZE_AUTOMATIC, SWITCHYARD_OVERFLOW_FAIL, \
        SWITCHYARD_PADDING_ZERO, 0, NULL, NULL, 0, 0, NULL                                                   \
  }

/// Collective. Sends row t of `x` [T, H] to every rank that owns one of token t's experts, once per rank. `weights` is float32
/// [T, K] or NULL. `options` NULL: defaults.
switchyard_code_t sy_exchange_dispatch(sy_exchange* exchange, const sy_const_row_view* x, const sy_expert_ids* ids,
                                       const float* weights, const sy_dispatch_options* options, sy_dispatched** dispatched);
/// Collective. The same routing again with other rows: no counting, no exchange of counts. Of the options only
/// `quantize`, `padding`, `out`, `stream` and `num_sms` are used. With `out`, `dispatched` may be NULL: the rows are all that
/// comes.
switchyard_code_t sy_exchange_dispatch_cached(sy_exchange* exchange, const sy_const_row_view* x, const sy_handle* handle,
                                              const sy_dispatch_options* options, sy_dispatched** dispatched);

/// What a dispatch delivered. Pointers are valid until sy_dispatched_destroy; those to routing (all but `x` and `x_scales`)
/// also as long as `handle` is retained. A pointer is NULL if the array does not apply to the layout or has no element. CUDA:
/// device pointers; the weights are NULL only if this rank has tokens and gave none.
typedef struct sy_dispatched_view {
  size_t struct_size;
  void* x;         ///< [x_rows, x_cols]; direct staging: in symmetric memory, so that combine reads it in place
  int64_t x_rows;  ///< allocated rows, >= M
  int64_t x_cols;  ///< H
  sy_dtype x_dtype;
  sy_scale_kind x_scale_kind;
  void* x_scales;  ///< [x_rows, sy_scale_row_bytes] for fp8 rows
  int64_t rows;    ///< M: rows delivered; beyond them payload is unspecified, ids and sources are -1. CUDA: -1 unless the size
                   ///< is exact (the host does not know it; sy_handle_counts waits for it)
  int64_t tokens;  ///< T; with device_tokens the largest
  int32_t world;   ///< W
  int32_t topk;    ///< K
  int32_t experts_here;
  int32_t reserved;
  sy_handle* handle;  ///< borrowed; sy_handle_retain to keep it

  const int32_t* topk_ids;      ///< rank-major: [x_rows, K] local expert ids, -1 if the route goes elsewhere or was dropped
  const float* topk_weights;    ///< rank-major: [x_rows, K] 0 where the id is -1; NULL if dispatch got no weights
  const int32_t* source_token;  ///< rank-major: [x_rows] token index at its source

  const int64_t* row_source;        ///< expert-major: [x_rows] source rank << 48 | k << 32 | token; -1 for padding
  const float* row_weights;         ///< expert-major: [x_rows]; NULL if dispatch got no weights
  const int64_t* expert_first_row;  ///< expert-major: [experts_here]

  const int64_t* tokens_per_expert;   ///< [experts_here] kept routes of all sources to each local expert
  const int64_t* aligned_per_expert;  ///< [experts_here] the same, rounded up to expert_alignment

  // With Overflow drop_and_report (also cached dispatch by its handle): zeros where nothing was dropped. With fail: NULL.
  const uint8_t* dropped;             ///< [T, K] 1 if this rank's route was dropped at capacity
  const int64_t* dropped_per_source;  ///< [W, experts_here] routes dropped here
  const int64_t* invalid_ids;         ///< one number: as sy_handle_invalid_ids, which no host has to wait for
} sy_dispatched_view;
#define SWITCHYARD_DISPATCHED_VIEW_INIT                                                                                       \
  {                                                                                                                           \
    sizeof(sy_dispatched_view), NULL, 0, 0, SWITCHYARD_DTYPE_BF16, SWITCHYARD_SCALE_NONE, NULL, 0, 0, 0, 0, 0, 0, NULL, NULL, \
        NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL                                                            \
  }
switchyard_code_t sy_dispatched_get(const sy_dispatched* dispatched, sy_dispatched_view* view);
/// CUDA: `stream` (cudaStream_t), other than the one that the rows were delivered on, uses them: their memory is not handed out
/// again before its work so far at the time of the destruction is done. If it is captured, the rows belong to its graph, too.
switchyard_code_t sy_dispatched_used_by(sy_dispatched* dispatched, void* stream);
switchyard_code_t sy_dispatched_destroy(sy_dispatched* dispatched);

/// Rows for expert outputs in symmetric memory, [rows of `handle`, H], uninitialised: combine reads them where they lie.
/// CUDA: idle memory, for work on any stream; only if there is none the calling thread waits. Errors: pool_exhausted.
switchyard_code_t sy_exchange_allocate_rows(sy_exchange* exchange, const sy_handle* handle, sy_dtype type, sy_rows** rows);
/// Rows for work on `stream` (cudaStream_t), which waits for earlier users of the memory. Captured: the graph owns the rows.
switchyard_code_t sy_exchange_allocate_rows_on(sy_exchange* exchange, const sy_handle* handle, sy_dtype type, void* stream,
                                               sy_rows** rows);
switchyard_code_t sy_rows_get(const sy_rows* rows, sy_row_view* view);
switchyard_code_t sy_rows_used_by(sy_rows* rows, void* stream);  ///< as sy_dispatched_used_by
switchyard_code_t sy_rows_destroy(sy_rows* rows);

/// Options of one combine; equal on all ranks (pointers aside).
typedef struct sy_combine_options {
  size_t struct_size;
  sy_combine_order order;
  int32_t apply_weights;  ///< 0 or 1; expert-major: multiply rows by their weights (if dispatch or `weights` gave any)
  /// Rank-major: float32 [M, K], returned as sums over ranks in `out_weights` (rows themselves are not multiplied).
  /// Expert-major: float32 [T, K] that replaces the weights given to dispatch; SWITCHYARD_ORDER_PER_ROUTE only.
  const float* weights;
  /// Rows [T, H] of the combined type, added before the sum; bias[1] needs bias[0]. `out` itself may be one of them.
  const void* bias[2];
  void* stream;          ///< CUDA: as in sy_dispatch_options
  int32_t num_sms;       ///< CUDA: as in sy_dispatch_options
  int32_t known_memory;  ///< CUDA: as in sy_dispatch_options
} sy_combine_options;
#define SWITCHYARD_COMBINE_OPTIONS_INIT \
  { sizeof(sy_combine_options), SWITCHYARD_ORDER_PER_RANK, 1, NULL, {NULL, NULL}, NULL, 0, 0 }

/// Collective. Sums what the experts made of each token into `out` [T, H] of `y`'s type (bf16, f16, f32). `y` has the rows of
/// the dispatch that made `handle`; rows in a sy_rows or in sy_dispatched_view::x are read in place, other memory is first
/// copied (direct staging), but expert-major rows of SWITCHYARD_ORDER_PER_ROUTE are pushed to their owners from any memory. A
/// token without a route yields the bias sum, or +0. `out_weights` is float32 [T, K] (rank-major with options->weights) or
/// NULL. `options` NULL: defaults.
switchyard_code_t sy_exchange_combine(sy_exchange* exchange, const sy_const_row_view* y, const sy_handle* handle, void* out,
                                      const sy_combine_options* options, float* out_weights);

/// Traffic and time of this rank's last call. Members: switchyard/statistics.def (remote_bytes, local_bytes, copied_bytes,
/// payload_rows, metadata_bytes: uint64_t; plan_us, total_us: double; network_bytes: uint64_t).
typedef struct sy_call_statistics {
  size_t struct_size;
#define SWITCHYARD_STATISTIC_MOVED(name) uint64_t name;
#define SWITCHYARD_STATISTIC_TIME(name) double name;
#include "switchyard/statistics.def"
} sy_call_statistics;
#define SWITCHYARD_CALL_STATISTICS_INIT \
  { sizeof(sy_call_statistics), 0, 0, 0, 0, 0, 0.0, 0.0, 0 }
switchyard_code_t sy_exchange_last_call(const sy_exchange* exchange, sy_call_statistics* statistics);
/// Invalid ids of this rank's calls so far (sy_invalid_ids). CUDA: of calls that have run, replays too; waits for no kernel.
switchyard_code_t sy_exchange_invalid_ids(const sy_exchange* exchange, int64_t* count);

// ---- Handle ----

/// The routing of one dispatch as both sides know it. Immutable, usable any number of times with any exchange of the same group
/// size, rank and shape. CPU: it holds no symmetric memory and may be used after the exchange that made it is gone. CUDA: its
/// tables lie in the memory of that exchange and must not be used after it; what is asked of it below (tokens, rows, counts,
/// matrices, ledger, bytes) waits for the dispatch, and is SWITCHYARD_UNSUPPORTED while its stream is captured. A handle has as
/// many owners as there were sy_handle_retain calls and sy_handle_deserialize results; each owner releases it once.
switchyard_code_t sy_handle_retain(sy_handle* handle);
switchyard_code_t sy_handle_release(sy_handle* handle);
switchyard_code_t sy_handle_tokens(const sy_handle* handle, int64_t* tokens);      ///< T
switchyard_code_t sy_handle_rows(const sy_handle* handle, int64_t* rows);          ///< M, padding included
switchyard_code_t sy_handle_invalid_ids(const sy_handle* handle, int64_t* count);  ///< of this rank; 0 if made from bytes

/// Library-owned arrays: the calls below fill a struct whose `storage` keeps its arrays alive. Release it once when done (NULL
/// is accepted); calling again with the same struct does not release the earlier storage.
switchyard_code_t sy_storage_release(sy_storage* storage);

/// How many rows a dispatch delivered, in host memory.
typedef struct sy_counts {
  size_t struct_size;
  sy_storage* storage;
  int64_t rows;                       ///< M, padding included
  int64_t experts_here;               ///< length of the arrays
  const int64_t* tokens_per_expert;   ///< kept routes of all sources to each local expert
  const int64_t* aligned_per_expert;  ///< the same, rounded up to expert_alignment
  const int64_t* expert_first_row;    ///< expert-major; else NULL
} sy_counts;
#define SWITCHYARD_COUNTS_INIT \
  { sizeof(sy_counts), NULL, 0, 0, NULL, NULL, NULL }
switchyard_code_t sy_handle_counts(const sy_handle* handle, sy_counts* counts);

/// Portable bytes (little endian, versioned).
typedef struct sy_bytes {
  size_t struct_size;
  sy_storage* storage;
  const void* data;
  size_t size;
} sy_bytes;
#define SWITCHYARD_BYTES_INIT \
  { sizeof(sy_bytes), NULL, NULL, 0 }
switchyard_code_t sy_handle_serialize(const sy_handle* handle, sy_bytes* bytes);
/// The inverse; `data` is not kept. Errors: invalid_argument on damaged bytes.
switchyard_code_t sy_handle_deserialize(const void* data, size_t size, sy_handle** handle);

/// DeepEP / TileScale description of a dispatch. C = num_channels. Prefixes are inclusive unless noted.
typedef struct sy_matrices {
  size_t struct_size;
  sy_storage* storage;
  int32_t world;
  int32_t num_channels;
  int64_t tokens;                             ///< T
  int64_t num_recv;                           ///< elements of recv_src_idx
  const int32_t* rank_prefix_matrix;          ///< [W, W] tokens of sources 0..i to rank j
  const int32_t* channel_prefix_matrix;       ///< [W, C] this rank's tokens to rank d in channels 0..c
  const int32_t* recv_channel_prefix_matrix;  ///< [W, C] exclusive: first row of channel c among source s's rows here
  const int32_t* recv_src_idx;                ///< [num_recv] token index at the source
  const uint8_t* is_token_in_rank;            ///< [T, W]
  const int32_t* send_head;                   ///< [T, W] index of token t in the stream (channel of t, rank), -1 if not sent
} sy_matrices;
#define SWITCHYARD_MATRICES_INIT \
  { sizeof(sy_matrices), NULL, 0, 0, 0, 0, NULL, NULL, NULL, NULL, NULL, NULL }
/// `num_channels` >= 1. Errors: unsupported for an expert-major dispatch that dropped routes at capacity.
switchyard_code_t sy_handle_matrices(const sy_handle* handle, int32_t num_channels, sy_matrices* matrices);

/// The explicit route ledger (PTO moe_combine's fields, order and padding).
typedef struct sy_ledger {
  size_t struct_size;
  sy_storage* storage;
  int32_t world;
  int32_t num_experts;         ///< E
  int32_t num_experts_padded;  ///< Ep: E rounded up to 16
  int32_t experts_here;
  int64_t num_routes;                    ///< T * K
  const int32_t* peer_token_per_expert;  ///< [W, Ep] rows of source s for global expert e
  const int32_t* expanded_row_idx;       ///< [T * K] row of route f in this rank's return buffer, -1 invalid
  const int32_t* cumsum_per_expert;      ///< [W, Ep] inclusive prefix over experts
  const int32_t* dispatch_offset;        ///< [experts_here] first row of each local expert
  const int32_t* prev_sum_before_rank;   ///< [W, experts_here] rows of sources before s inside local expert
} sy_ledger;
#define SWITCHYARD_LEDGER_INIT \
  { sizeof(sy_ledger), NULL, 0, 0, 0, 0, 0, NULL, NULL, NULL, NULL, NULL }
/// Errors: unsupported for a dispatch that dropped routes at capacity.
switchyard_code_t sy_handle_ledger(const sy_handle* handle, sy_ledger* ledger);

/// What DeepEP's get_dispatch_layout returns.
typedef struct sy_routing_layout {
  size_t struct_size;
  sy_storage* storage;
  int32_t world;
  int32_t num_experts;
  int64_t tokens;
  const int32_t* num_tokens_per_rank;    ///< [W] distinct tokens
  const int32_t* num_tokens_per_expert;  ///< [E] routes
  const uint8_t* is_token_in_rank;       ///< [T, W]
} sy_routing_layout;
#define SWITCHYARD_ROUTING_LAYOUT_INIT \
  { sizeof(sy_routing_layout), NULL, 0, 0, 0, NULL, NULL, NULL }
/// Needs no group.
switchyard_code_t sy_routing_layout_of(const sy_expert_ids* ids, int32_t num_experts, int32_t world, sy_routing_layout* layout);
/// The same of ids on a GPU, into your memory there: num_tokens_per_rank [W], num_tokens_per_expert [E], of at most 32768
/// experts, and is_token_in_rank [T, W] at a multiple of 4 bytes. One kernel, enqueued on `stream` (a cudaStream_t); nothing
/// waits, and it can be captured. Errors: unsupported without CUDA code in the library.
switchyard_code_t sy_routing_layout_on(const sy_expert_ids* ids, int32_t num_experts, int32_t world,
                                       int32_t* num_tokens_per_rank, int32_t* num_tokens_per_expert, uint8_t* is_token_in_rank,
                                       void* stream);

#ifdef __cplusplus
}
#endif
