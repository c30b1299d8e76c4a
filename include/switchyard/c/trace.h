// SPDX-License-Identifier: Apache-2.0
/// \file
/// C ABI: traces, the twin of switchyard/trace.hpp: a timeline of what every worker of every rank did, for Perfetto and
/// chrome://tracing. What switchyard.h says of errors, structs and ownership holds here too; docs/concepts/trace.md describes
/// what is recorded. All functions are local.
///
/// Threads: different ranks may record into one trace at the same time. What reads or clears (all functions but
/// sy_group_set_trace and spans) must not run while a traced call is in flight.
#pragma once

#include "switchyard/c/switchyard.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sy_trace sy_trace;            ///< events of several ranks; sy_trace_destroy
typedef struct sy_trace_span sy_trace_span;  ///< a phase of yours under way; sy_trace_span_end

/// What to record.
typedef struct sy_trace_options {
  size_t struct_size;
  int32_t num_blocks;  ///< workers per rank, as in sy_group_options; CUDA: of the kernels whose warps are recorded
  int32_t num_warps;
  size_t events_per_track;  ///< rounded up to 2^n, 32 bytes each: the newest are kept
} sy_trace_options;
#define SWITCHYARD_TRACE_OPTIONS_INIT \
  { sizeof(sy_trace_options), 1, 1, 16384 }

/// For the ranks of a group of `world`. `options` NULL: defaults. Errors: invalid_argument naming the argument.
switchyard_code_t sy_trace_create(int32_t world, const sy_trace_options* options, sy_trace** trace);
/// What records it, and spans of it, keep the memory until they end.
switchyard_code_t sy_trace_destroy(sy_trace* trace);

/// Records this rank's calls from now on; `trace` NULL: no more. CPU: made for the group's workers. CUDA: when recording stops,
/// this waits for the GPU. Errors: invalid_argument if it was made for another shape.
switchyard_code_t sy_group_set_trace(sy_group* group, sy_trace* trace);

/// A number for a phase of yours, or of a built-in one of that name, before recording starts. `unit`: what the argument of its
/// spans counts; NULL: nothing.
switchyard_code_t sy_trace_event(sy_trace* trace, const char* name, const char* unit, int32_t* event);
/// From here to sy_trace_span_end, on the track of rank `rank`'s calls, by one thread.
switchyard_code_t sy_trace_span_begin(sy_trace* trace, int32_t rank, int32_t event, int64_t arg, sy_trace_span** span);
switchyard_code_t sy_trace_span_end(sy_trace_span* span);

switchyard_code_t sy_trace_clear(sy_trace* trace);  ///< forgets all events
/// Records that were forgotten because their track was full.
switchyard_code_t sy_trace_lost(const sy_trace* trace, uint64_t* records);
/// Most that any rank's times may be off this host's steady clock: 0 unless GPUs recorded.
switchyard_code_t sy_trace_clock_error(const sy_trace* trace, uint64_t* ns);

/// Chrome's JSON trace format. `flows` 0 or 1: with arrows into waits. Errors: io naming the path.
switchyard_code_t sy_trace_write_json(const sy_trace* trace, const char* path, int32_t flows);
/// The same text; release bytes->storage.
switchyard_code_t sy_trace_json(const sy_trace* trace, int32_t flows, sy_bytes* bytes);

/// One rank's records, for ranks that are processes; release bytes->storage. The inverse adds them to another trace of the same
/// host, world and options. Errors: invalid_argument on damaged bytes or other options.
switchyard_code_t sy_trace_serialize(const sy_trace* trace, int32_t rank, sy_bytes* bytes);
switchyard_code_t sy_trace_merge(sy_trace* trace, const void* data, size_t size);

/// Time that one rank spent in one phase.
typedef struct sy_trace_phase {
  const char* name;      ///< "send_rows", "wait_rows", ...
  const char* category;  ///< "call", "plan", "move", "wait", "compute" or "user"
  const char* unit;      ///< what `arg_sum` counts
  int32_t rank;
  int32_t reserved;
  uint64_t count;     ///< spans
  double total_ms;    ///< sum over all tracks
  double max_ms;      ///< the longest span
  double slowest_ms;  ///< the largest sum of one track
  int64_t arg_sum;
  uint64_t bytes;  ///< of rows from or for other ranks
} sy_trace_phase;
/// One entry per rank and phase that occurred.
typedef struct sy_trace_summary {
  size_t struct_size;
  sy_storage* storage;
  const sy_trace_phase* phases;
  int64_t count;
  size_t phase_bytes;  ///< from one phase to the next, which may be more than this header knows
} sy_trace_summary;
#define SWITCHYARD_TRACE_SUMMARY_INIT \
  { sizeof(sy_trace_summary), NULL, NULL, 0, 0 }
switchyard_code_t sy_trace_summary_of(const sy_trace* trace, sy_trace_summary* summary);

/// Time this rank spent waiting for flags of one peer since the group was formed.
typedef struct sy_wait_statistics {
  size_t struct_size;
  double total_ms;  ///< the longest-waiting worker's total, not the sum over workers
  double max_ms;    ///< the longest single wait
  uint64_t waits;   ///< number of waits that did not succeed at once
} sy_wait_statistics;
#define SWITCHYARD_WAIT_STATISTICS_INIT \
  { sizeof(sy_wait_statistics), 0.0, 0.0, 0 }
/// `peer` in [0, W). Counters never stop.
switchyard_code_t sy_group_wait_statistics(const sy_group* group, int32_t peer, sy_wait_statistics* statistics);

#ifdef __cplusplus
}
#endif
