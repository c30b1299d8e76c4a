// SPDX-License-Identifier: Apache-2.0
/// \file
/// Trace: a timeline of the activity of every worker on every rank, for Perfetto (ui.perfetto.dev) and chrome://tracing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/detail/held.hpp"

namespace switchyard {

namespace detail {
class Tracer;
}

/// Recording options; identical for all ranks of a Trace.
struct TraceOptions {
  int num_blocks = 1;  ///< workers per rank, as in GroupOptions
  int num_warps = 1;
  size_t events_per_track = size_t{1} << 14;  ///< rounded up to 2^n, 32 bytes each, allocated now: the newest are kept
};

/// Time spent in one phase by one rank.
struct TracePhase {
  std::string name;      ///< "send_rows", "wait_rows", ...
  std::string category;  ///< "call", "plan", "move", "wait", "compute" or "user"
  std::string unit;      ///< unit of `arg_sum`
  int rank = 0;
  uint64_t count = 0;     ///< number of spans
  double total_ms = 0;    ///< sum over all tracks
  double max_ms = 0;      ///< longest span
  double slowest_ms = 0;  ///< largest sum of one track: this phase's share of the rank's wall time
  int64_t arg_sum = 0;    ///< sum of the spans' arguments (meaningless for unit "rank")
  uint64_t bytes = 0;     ///< of rows from or for other ranks, moved in the spans
};

/// One span of the timeline, for custom viewers.
struct TraceSlice {
  int rank = 0;
  int track = 0;  ///< -1: the rank's own thread, else the worker (block * num_warps + warp)
  std::string name;
  std::string category;
  double begin_us = 0;  ///< since the earliest event of the whole trace
  double duration_us = 0;
  int64_t arg = 0;
  uint32_t bytes = 0;  ///< of rows from or for other ranks
};

/// Collects the events of several ranks. All times use this host's steady clock, so ranks in different processes are aligned.
///
/// Thread safety: different ranks may record at the same time; a rank's track must be used by one thread at a time. Readers
/// (write_chrome_json, summary, slices, serialize, lost) must not run while a traced call is in flight.
class Trace {
 public:
  /// \throws Error(invalid_argument) naming the argument.
  explicit Trace(int world, const TraceOptions& options = {});
  Trace(Trace&&) noexcept;
  Trace& operator=(Trace&&) noexcept;
  ~Trace();

  int world() const;
  const TraceOptions& options() const;

  /// Id of a user-defined phase, or of the built-in phase with that name. `unit` is the unit of its spans' argument. The id is
  /// local to this Trace; call before recording starts.
  uint16_t event(std::string_view name, std::string_view unit = "");

  /// Records the time from its construction to its destruction on `rank`'s own track. Records nothing if the trace is null or
  /// does not have that rank.
  class [[nodiscard]] Span {
   public:
    Span(Trace* trace, int rank, uint16_t event, int64_t arg = 0) noexcept;
    Span(const Span&) = delete;
    Span& operator=(const Span&) = delete;
    ~Span();
    void set_arg(int64_t arg) noexcept { arg_ = arg; }  ///< replaces the argument

   private:
    detail::Tracer* tracer_;
    uint64_t begin_;
    int64_t arg_;
    uint16_t event_;
  };

  /// Discards all events; keeps the memory.
  void clear();
  /// Number of records overwritten because their track was full; the oldest are overwritten first. On GPUs, the records are
  /// spans and the two anchors recorded by each block per kernel.
  uint64_t lost() const;

  /// Maximum difference between any rank's timestamps and this host's steady clock, in nanoseconds, assuming constant clock
  /// rates while recording; 0 unless GPUs recorded events.
  uint64_t clock_error_ns() const;

  /// Writes Chrome's JSON trace format: one process per rank, one thread per worker, arguments with their unit, and one counter
  /// per rank of the bytes that its workers are transferring to or from other ranks. With `flows`, each wait for a known rank
  /// has an arrow from that rank's last span that can have ended the wait, with a marker of category "flow" at its head.
  /// \throws Error(io) naming the path.
  void write_chrome_json(const std::string& path, bool flows = true) const;
  /// Returns the text that write_chrome_json writes.
  std::string chrome_json(bool flows = true) const;
  /// Returns one entry per rank and phase that occurred, in ascending order of ranks and then in the order of the event table.
  std::vector<TracePhase> summary() const;
  /// Returns all spans, ordered by rank, track and begin time.
  std::vector<TraceSlice> slices() const;

  /// Serializes one rank's records, for ranks in separate processes; `merge` adds them to another Trace with the same host,
  /// world and options. \throws Error(invalid_argument) unless rank is in [0, world).
  std::vector<std::byte> serialize(int rank) const;
  /// Adds records from `serialize`. \throws Error(invalid_argument) if the bytes are corrupt or the options differ.
  void merge(std::span<const std::byte> bytes);

  detail::Tracer* tracer(int rank) const noexcept;  ///< library internal; null if there is none

 private:
  struct Impl;
  detail::Held<std::unique_ptr<Impl>, detail::kTraceObject> impl_;
};

}  // namespace switchyard
