// SPDX-License-Identifier: Apache-2.0
// Tracer: the timeline of one rank's workers. Appending takes no lock and does not allocate: each worker owns one ring.
//
// A null Tracer* costs one predictable branch per span. An active Tracer costs two counter reads and a 32-byte store.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/macros.hpp"
#include "trace/tick_clock.hpp"

namespace switchyard::detail {

enum class Event : uint16_t {
#define SWITCHYARD_TRACE_EVENT(name, category, unit) name,
#include "trace/events.def"
#undef SWITCHYARD_TRACE_EVENT
  count_of_events,
};

struct EventInfo {
  const char* name;
  const char* category;
  const char* unit;  ///< what the argument counts
};
/// Row in the event table; `event` must be below count_of_events.
const EventInfo& event_info(Event event);

enum class RecordKind : uint8_t { span, instant };

struct TraceRecord {
  uint64_t begin_ns;  ///< steady clock, unless in_ticks
  uint64_t end_ns;    ///< spans; otherwise equal to begin_ns
  int64_t arg;        ///< unit from the event table
  uint16_t event;     ///< Event, or an id from Trace::event
  RecordKind kind;
  uint8_t in_ticks = 0;  ///< not 0: both times are Tracer::ticks(), not nanoseconds
  uint32_t bytes = 0;    ///< of rows from or for other ranks, moved in the span; 4 GiB - 1 means at least that
};

static_assert(sizeof(TraceRecord) == 32);

/// Converts a byte count to the form stored in records.
SWITCHYARD_FN inline uint32_t record_bytes(uint64_t bytes) {
  return bytes < 0xffffffffu ? static_cast<uint32_t>(bytes) : 0xffffffffu;
}

/// Pairs of Tracer::ticks() and times. Any thread.
class ClockAnchors {
 public:
  /// Adds an anchor for the current time; call at least before the first recorded tick and after the last.
  void add();
  /// Clock up to now. Requires an earlier add().
  TickClock clock() const;

 private:
  mutable std::mutex mutex_;
  TickClock anchors_;
};

/// Track for work on the rank's own thread, outside its workers. Worker tracks are 0 .. workers() - 1 (block * warps + warp).
inline constexpr int kHostTrack = -1;

/// One rank's records. Thread safety: only one thread at a time may append to a track; tracks are independent. A track may be
/// read only if the writer's work happened before the read; the return of the collective call guarantees this.
class Tracer {
 public:
  /// Allocates `capacity` records per track immediately. A full track overwrites its oldest record and counts it as lost, so
  /// that tracing never allocates while the exchange runs and memory use stays bounded.
  Tracer(int rank, int num_blocks, int num_warps, size_t capacity, ClockAnchors* anchors = nullptr);

  int rank() const noexcept { return rank_; }
  int workers() const noexcept { return num_blocks_ * num_warps_; }
  int num_warps() const noexcept { return num_warps_; }

  static uint64_t now_ns() noexcept {
    return static_cast<uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count());
  }
  /// Time used for spans: the time stamp counter if the kernel uses it for timekeeping, so that all cores share it; otherwise
  /// nanoseconds. Cheaper than a clock. A Tracer must exist.
  static uint64_t ticks() noexcept {
#if defined(__x86_64__)
    if (counts_ticks) return __builtin_ia32_rdtsc();
#endif
    return now_ns();
  }
  /// Call when recording starts and when it stops.
  void add_anchor() {
    if (anchors_ != nullptr) anchors_->add();
  }

  void append(int track, const TraceRecord& record) noexcept {
    Track& t = tracks_[static_cast<size_t>(track - kHostTrack) < tracks_.size() ? static_cast<size_t>(track - kHostTrack) : 0];
    t.records[t.next] = record;
    t.next = t.next + 1 < t.capacity ? t.next + 1 : 0;
    if (t.size < t.capacity) {
      ++t.size;
    } else {
      ++t.lost;
    }
  }
  void span(int track, Event event, uint64_t begin_ns, uint64_t end_ns, int64_t arg, uint32_t bytes = 0) noexcept {
    append(track, {begin_ns, end_ns, arg, static_cast<uint16_t>(event), RecordKind::span, 0, bytes});
  }
  /// A span whose begin and end are in ticks().
  void tick_span(int track, uint16_t event, uint64_t begin, uint64_t end, int64_t arg, uint32_t bytes = 0) noexcept {
    append(track, {begin, end, arg, event, RecordKind::span, counts_ticks, bytes});
  }
  void instant(int track, Event event, int64_t arg = 0) noexcept {
    const uint64_t now = ticks();
    append(track, {now, now, arg, static_cast<uint16_t>(event), RecordKind::instant, counts_ticks});
  }

  /// The i-th record of a track, in the order in which records were appended (spans: by end). May be in ticks.
  const TraceRecord& record(int track, size_t i) const noexcept {
    const Track& t = tracks_[static_cast<size_t>(track - kHostTrack)];
    const size_t oldest = t.size < t.capacity ? 0 : t.next;
    return t.records[oldest + i < t.capacity ? oldest + i : oldest + i - t.capacity];
  }
  size_t size(int track) const noexcept { return tracks_[static_cast<size_t>(track - kHostTrack)].size; }
  uint64_t lost(int track) const noexcept { return tracks_[static_cast<size_t>(track - kHostTrack)].lost; }
  /// Counts records that were lost before they could be appended here.
  void add_lost(int track, uint64_t n) noexcept { tracks_[static_cast<size_t>(track - kHostTrack)].lost += n; }
  /// Maximum difference between this rank's times and this host's steady clock.
  uint64_t clock_error_ns() const noexcept { return clock_error_ns_; }
  void set_clock_error_ns(uint64_t ns) noexcept { clock_error_ns_ = ns; }
  /// Discards all records; keeps the memory.
  void clear() noexcept;

 private:
  struct alignas(64) Track {
    std::unique_ptr<TraceRecord[]> records;
    size_t size = 0;
    size_t next = 0;  ///< index of the next record
    size_t capacity = 0;
    uint64_t lost = 0;
  };
  int rank_;
  int num_blocks_;
  int num_warps_;
  uint64_t clock_error_ns_ = 0;
  ClockAnchors* anchors_;
  std::vector<Track> tracks_;
  static inline bool counts_ticks = false;  ///< set before the first Tracer can be used
};

/// A span that lasts from construction to destruction. Does nothing if the tracer is null.
class [[nodiscard]] TraceSpan {
 public:
  TraceSpan(Tracer* tracer, int track, Event event, int64_t arg = 0) noexcept
      : tracer_(tracer), begin_(tracer != nullptr ? Tracer::ticks() : 0), arg_(arg), track_(track), event_(event) {}
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;
  ~TraceSpan() {
    if (tracer_ != nullptr) tracer_->tick_span(track_, static_cast<uint16_t>(event_), begin_, Tracer::ticks(), arg_);
  }
  /// Replaces the argument, for counts known only at the end.
  void set_arg(int64_t arg) noexcept { arg_ = arg; }

 private:
  Tracer* tracer_;
  uint64_t begin_;
  int64_t arg_;
  int track_;
  Event event_;
};

}  // namespace switchyard::detail
