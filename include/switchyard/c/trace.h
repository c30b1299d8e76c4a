// SPDX-License-Identifier: Apache-2.0
/// \file
/// C ABI: traces, the counterpart of switchyard/trace.hpp. A trace is a timeline of the activity of every worker on every rank,
/// for Perfetto and chrome://tracing. The rules of switchyard.h for errors, structs and ownership apply; docs/concepts/trace.md
/// describes the recorded events. All functions are local.
///
/// Threads: different ranks may record into one trace at the same time. Functions that read or clear (all except
/// sy_group_set_trace and spans) must not run while a traced call is in flight.
#pragma once

#include "switchyard/c/switchyard.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sy_trace sy_trace;            ///< events of several ranks; sy_trace_destroy
typedef struct sy_trace_span sy_trace_span;  ///< a user-defined phase in progress; sy_trace_span_end

/// Recording options.
typedef struct sy_trace_options {
  size_t struct_size;
  int32_t num_blocks
      SY_DEFAULT(1);  ///< workers per rank, as in sy_group_options; CUDA: of the kernels whose warps are recorded
  int32_t num_warps SY_DEFAULT(1);
  size_t events_per_track SY_DEFAULT(16384);  ///< rounded up to 2^n, 32 bytes each: the newest are kept
} sy_trace_options;

/// Creates a trace for the ranks of a group of size `world`. `options` NULL: defaults. Errors: invalid_argument naming the
/// argument.
sy_code sy_trace_create(int32_t world, const sy_trace_options* options, sy_trace** trace);
/// Its memory is freed once no group records into the trace and no span is open.
sy_code sy_trace_destroy(sy_trace* trace);

/// Records this rank's calls from now on; `trace` NULL stops recording. CPU: the trace must be created for the group's number
/// of workers. CUDA: stopping waits for the GPU. Errors: invalid_argument if the trace was created for a different shape.
sy_code sy_group_set_trace(sy_group* group, sy_trace* trace);

/// Id of a user-defined phase, or of the built-in phase with that name; call before recording starts. `unit` is the unit of its
/// spans' argument, or NULL.
sy_code sy_trace_event(sy_trace* trace, const char* name, const char* unit, int32_t* event);
/// Starts a span on the track of rank `rank`'s calls; sy_trace_span_end must end it on the same thread.
sy_code sy_trace_span_begin(sy_trace* trace, int32_t rank, int32_t event, int64_t arg, sy_trace_span** span);
sy_code sy_trace_span_end(sy_trace_span* span);

sy_code sy_trace_clear(sy_trace* trace);  ///< discards all events
/// Number of records overwritten because their track was full.
sy_code sy_trace_lost(const sy_trace* trace, uint64_t* records);
/// Maximum difference between any rank's timestamps and this host's steady clock; 0 unless GPUs recorded events.
sy_code sy_trace_clock_error(const sy_trace* trace, uint64_t* ns);

/// Writes Chrome's JSON trace format. `flows` (0 or 1) adds arrows into waits. Errors: io naming the path.
sy_code sy_trace_write_json(const sy_trace* trace, const char* path, sy_bool flows);
/// Returns the text that sy_trace_write_json writes; release bytes->storage.
sy_code sy_trace_json(const sy_trace* trace, sy_bool flows, sy_bytes* bytes);

/// Serializes one rank's records, for ranks in separate processes; release bytes->storage. sy_trace_merge adds them to another
/// trace with the same host, world and options. Errors: invalid_argument if the bytes are corrupt or the options differ.
sy_code sy_trace_serialize(const sy_trace* trace, int32_t rank, sy_bytes* bytes);
sy_code sy_trace_merge(sy_trace* trace, const void* data, size_t size);

/// Time spent by one rank in one phase.
typedef struct sy_trace_phase {
  const char* name;      ///< "send_rows", "wait_rows", ...
  const char* category;  ///< "call", "plan", "move", "wait", "compute" or "user"
  const char* unit;      ///< unit of `arg_sum`
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
  size_t phase_bytes;  ///< stride in bytes between phases, possibly larger than this header's sy_trace_phase
} sy_trace_summary;
sy_code sy_trace_summary_of(const sy_trace* trace, sy_trace_summary* summary);

/// Time that this rank has spent waiting for flags of one peer since the group was formed.
typedef struct sy_wait_statistics {
  size_t struct_size;
  double total_ms;  ///< total of the worker that waited longest, not the sum over workers
  double max_ms;    ///< the longest single wait
  uint64_t waits;   ///< number of waits that did not succeed immediately
} sy_wait_statistics;
/// `peer` in [0, W). The counters always run.
sy_code sy_group_wait_statistics(const sy_group* group, int32_t peer, sy_wait_statistics* statistics);

#ifdef __cplusplus
}
#endif
