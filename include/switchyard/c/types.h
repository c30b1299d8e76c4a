// SPDX-License-Identifier: Apache-2.0
/// \file
/// C ABI: codes, enumerations, limits, and views of the caller's memory. Included by switchyard.h. Enumerations are int32_t,
/// which fixes their size.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "switchyard/c/init.h"

/// Default of a struct member, set by the struct's SY_..._INIT macro (switchyard/c/init.h). Members without it are 0 or NULL.
#define SY_DEFAULT(value)

/// 0 or 1.
typedef int32_t sy_bool;

/// Kind of failure reported by a call; the values are those of switchyard::ErrorCode.
typedef int32_t sy_code;
enum {
  SY_OK = 0,
  SY_INVALID_ARGUMENT = 1,   ///< an argument violates its contract; the text gives name, value and the allowed values
  SY_UNSUPPORTED = 2,        ///< valid, but not available with this backend, machine or combination
  SY_HEAP_EXHAUSTED = 3,     ///< the symmetric heap has no room left
  SY_POOL_EXHAUSTED = 4,     ///< the output pool of one exchange has no room left
  SY_CAPACITY_EXCEEDED = 5,  ///< more rows than the caller's capacity, under SY_OVERFLOW_FAIL
  SY_PEER_TIMEOUT = 6,       ///< a wait exceeded its deadline; see sy_last_wait_report
  SY_PEER_FAILED = 7,        ///< a peer reported an error or died; see sy_last_peer_failure
  SY_MISMATCH = 8,           ///< the ranks made different calls
  SY_RENDEZVOUS = 9,         ///< the group could not be formed; see sy_last_missing_ranks
  SY_IO = 10,                ///< a file could not be read, written or parsed
  SY_SYSTEM = 11             ///< the operating system refused a request, or memory is exhausted
};

/// Maximum number of ranks in a group, maximum number of experts per token, and number of columns that share one scale.
#define SY_MAX_RANKS 64
#define SY_MAX_TOPK 32
#define SY_SCALE_GROUP 128

/// Where a group's ranks compute and store their rows.
typedef int32_t sy_backend;
enum {
  SY_BACKEND_CPU = 0,  ///< threads or processes, of one host or several; pointers are host pointers
  SY_BACKEND_CUDA = 1  ///< NVIDIA GPUs with peer access; pointers are device pointers of the rank's GPU
};

/// Transport of rows between hosts; see docs/concepts/hosts.md.
typedef int32_t sy_host_network;
enum {
  SY_NETWORK_SOCKETS = 0,  ///< CPUs: TCP connections of the group, or the SWITCHYARD_NETWORK of the environment
  SY_NETWORK_MPI = 1,      ///< MPI, by a module that is loaded when needed; all processes of MPI_COMM_WORLD are ranks
  SY_NETWORK_NCCL = 2      ///< NCCL, loaded when needed: the network of GPUs, also with SOCKETS
};

/// Element type of a row: SY_DTYPE_BF16, _F16, _F32, _FP8_E4M3. switchyard/dtypes.def lists the capabilities of each
/// type.
typedef int32_t sy_dtype;
enum {
#define SY_ROW_TYPE(name, NAME, value, bits, combines, quantises, has_scales) SY_DTYPE_##NAME = value,
#include "switchyard/dtypes.def"
};

/// Scales of fp8 rows, one per SY_SCALE_GROUP columns; a scale row is padded to 16 bytes (sy_scale_row_bytes).
typedef int32_t sy_scale_kind;
enum {
  SY_SCALE_NONE = 0,
  SY_SCALE_F32 = 1,   ///< float32: amax / 448
  SY_SCALE_UE8M0 = 2  ///< one byte, a power of two: 2^(byte - 127)
};

/// Addition of fp8 products in matrix products on GPUs; see switchyard/types.hpp.
typedef int32_t sy_accumulate;
enum {
  SY_ACCUMULATE_EXACT = 0,  ///< in float32
  SY_ACCUMULATE_FAST = 1    ///< by the tensor cores, for experts with more than 64 rows
};

/// Order of the rows delivered by a dispatch.
typedef int32_t sy_layout;
enum {
  SY_LAYOUT_RANK_MAJOR = 0,   ///< one row per (token, destination rank), ordered by (source rank, token)
  SY_LAYOUT_EXPERT_MAJOR = 1  ///< one row per route, ordered by (local expert, source rank, token, k), experts padded
};

/// Transport of rows within a host.
typedef int32_t sy_staging;
enum {
  SY_STAGING_DIRECT = 0,  ///< senders write rows at their final place
  SY_STAGING_RING = 1     ///< bounded memory: rows pass through rings of fixed size
};

/// Determines the number of output rows.
typedef int32_t sy_size_policy;
enum {
  SY_SIZE_EXACT = 0,       ///< from the exchanged counts
  SY_SIZE_CAPACITY = 1,    ///< the caller's bound, see sy_overflow
  SY_SIZE_WORST_CASE = 2,  ///< maximum over all routings
  SY_SIZE_AUTOMATIC = 3    ///< CPU: exact; CUDA: worst case, because exact waits for the GPU
};

/// Action taken when a rank would receive more rows than its capacity. All ranks make the same decision.
typedef int32_t sy_overflow;
enum {
  SY_OVERFLOW_FAIL = 0,
  SY_OVERFLOW_DROP_AND_REPORT = 1,
  SY_OVERFLOW_SPLIT = 2  ///< only whole layers in the fused form: split the call into passes over ranges of tokens
};

/// Treatment of ids that are neither -1 (no expert) nor a valid expert id. RAISE: invalid ids in host memory give
/// SY_INVALID_ARGUMENT, naming the first one; invalid ids on a GPU are counted and reported by sy_group_check. COUNT: invalid
/// ids are only counted.
typedef int32_t sy_invalid_ids;
enum { SY_INVALID_IDS_RAISE = 0, SY_INVALID_IDS_COUNT = 1 };

/// Content of the padding rows of the expert-major layout.
typedef int32_t sy_padding;
enum { SY_PADDING_ZERO = 0, SY_PADDING_UNSPECIFIED = 1 };

/// Order of the float32 sum in combine; with the same order, identical inputs give bit-identical results.
typedef int32_t sy_combine_order;
enum {
  SY_ORDER_PER_RANK = 0,   ///< k ascending inside a rank, rounded to the row type, then ranks ascending, rounded once
  SY_ORDER_PER_ROUTE = 1,  ///< k ascending over all routes, one rounding at the end (expert-major only)
  /// Normal mode. Each host sums in ascending order of k (rank-major: of ranks) and rounds to the row type; the hosts' sums are
  /// then added in ascending order of lowest rank, with one final rounding. In a single-host group, equal to per_route for
  /// expert-major rows and to per_rank for rank-major rows.
  SY_ORDER_PER_HOST = 2
};

// ---- Views of the caller's memory ----

/// `rows` dense rows of `cols` elements; `scales` (fp8 only) is dense with sy_scale_row_bytes per row. The library only reads
/// the view, and only during the call.
typedef struct sy_const_row_view {
  size_t struct_size;
  const void* data;  ///< NULL only if rows = 0
  int64_t rows;
  int64_t cols;
  sy_dtype dtype;
  sy_scale_kind scale_kind;
  const void* scales;
} sy_const_row_view;

/// Writable counterpart of sy_const_row_view.
typedef struct sy_row_view {
  size_t struct_size;
  void* data;
  int64_t rows;
  int64_t cols;
  sy_dtype dtype;
  sy_scale_kind scale_kind;
  void* scales;
} sy_row_view;

/// Expert ids [num_tokens, topk], int32 or int64. An id outside [0, E) means "no expert".
typedef struct sy_expert_ids {
  size_t struct_size;
  const void* data;  ///< NULL only if num_tokens = 0
  int64_t num_tokens;
  int32_t topk;
  sy_bool is_int64;  ///< 0: int32, 1: int64
} sy_expert_ids;
