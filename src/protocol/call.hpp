// SPDX-License-Identifier: Apache-2.0
// Parameters of every kernel of every mode: the heap, the epoch of this call, and the records of faults and waiting times.
#pragma once

#include <cstdint>

#include "arch/ops.hpp"
#include "layout/heap_view.hpp"
#include "layout/sites.hpp"
#include "trace/device_trace.hpp"
#include "trace/tracer.hpp"

namespace switchyard::detail {

/// Collective calls.
enum class Operation : uint8_t {
#define SWITCHYARD_OPERATION(name, text) name,
#include "protocol/operations.def"
};
/// Text for errors.
inline const char* operation_name(Operation operation) {
#define SWITCHYARD_OPERATION(name, text) \
  if (operation == Operation::name) return text;
#include "protocol/operations.def"
  return "call";
}

/// The first fault of a call, written by the first warp that detects one and read by the host after the call. CUDA: the record
/// is in host memory and may be read at any time after `ready` has been acquired as 1.
struct FaultRecord {
  uint64_t ready = 0;
  Site site = Site::none;
  Operation operation = Operation::none;
  bool aborted = false;   ///< ended by an abort word (`seen_abort`), not by the deadline
  bool mismatch = false;  ///< the awaited rank made a different call
  uint64_t epoch = 0;     ///< of the call
  uint64_t seen_abort = 0;
  int32_t awaited_rank = -1;
  uint64_t expected = 0;
  uint64_t seen = 0;
  uint64_t waited_ns = 0;
};

/// The time that one warp spent waiting for one peer. Written only by that warp.
struct WaitCounter {
  uint64_t total_ns = 0;
  uint64_t max_ns = 0;
  uint64_t waits = 0;
};

/// Rows and bytes that one warp moved. Written only by that warp.
struct MoveCounter {
#define SY_STATISTIC_MOVED(name) uint64_t name = 0;
#define SY_STATISTIC_TIME(name)
#include "switchyard/statistics.def"
};

/// The i-th of n places, i in [0, n), starting at `first` in [0, n] and wrapping around.
SWITCHYARD_FN inline int around(int i, int first, int n) { return first + i < n ? first + i : first + i - n; }

/// True if waiting warp `index`, out of `total` in the launch, polls host memory at its `look`-th check. Warps take turns: a
/// GPU reads host memory word by word, at a microsecond each, so two thousand warps reading at the same time would spend
/// milliseconds on it, regardless of what they wait for (docs/design/0057). In a launch of few warps, each warp polls once in
/// 32 checks.
SWITCHYARD_FN constexpr bool asks_host(int look, int index, int total) { return look % (total > 32 ? total : 32) == index; }

/// Trivially copyable; identical for all warps of a rank. Pointers refer to this rank's memory.
struct CallContext {
  HeapView heap;
  uint64_t epoch = 0;  ///< number of the call on its object, in [0, 2^40)
  uint64_t timeout_ns = 0;
  Operation operation = Operation::none;
  const uint64_t* abort_word = nullptr;  ///< HeapHeader::abort_word of this rank, polled by every wait
  /// CUDA: the same word in host memory, polled less often (asks_host); needed because a host cannot access the word in device
  /// memory. CPU: null, because there is only one word. If set, a fault is also written to all ranks' device memory, because
  /// possibly no host is listening.
  const uint64_t* host_abort_word = nullptr;
  const uint64_t* left_ranks = nullptr;  ///< HeapHeader::left_ranks of this rank, in host memory
  /// [W] headers of the ranks on other hosts, whose segments are not mapped; null if there are none. CPU only.
  const HeapHeader* const* headers = nullptr;
  FaultRecord* fault = nullptr;
  uint64_t* fault_claims = nullptr;  ///< number of warps that detected a fault; 0 when the call begins
  WaitCounter* waits = nullptr;      ///< [total warps, world]
  MoveCounter* moved = nullptr;      ///< [total warps]
  /// CUDA: running count of ids that are neither -1 nor an expert (InvalidIdCounts of the object). Null if the host counts them
  /// or nothing does.
  uint64_t* invalid_ids = nullptr;
  uint64_t* invalid_bell = nullptr;  ///< CUDA: a host word, nonzero once there are invalid ids; null: they are only counted
  Tracer* tracer = nullptr;          ///< null when tracing is off
  DeviceTrace device_trace;          ///< counterpart of `tracer` on a GPU
  /// Bit s: this rank can access all ranks' memory in registration slot s when the call runs. Null: no slot.
  const uint64_t* registered = nullptr;

  SWITCHYARD_FN uint64_t word() const { return flag_word(epoch); }
  SWITCHYARD_FN int world() const { return heap.world; }
  SWITCHYARD_FN int rank() const { return heap.rank; }
  /// The i-th rank, i in [0, W), in an order that starts with the next rank and ends with this rank. If all ranks served rank 0
  /// first, only its link would be busy, then only that of rank 1.
  SWITCHYARD_FN int in_turn(int i) const { return around(i, heap.rank + 1, heap.world); }
};

/// True if rank `r` is on this rank's host, which maps its memory. Archs whose groups are on a single host skip the check.
template <class A>
SWITCHYARD_FN bool is_mapped(const HeapView& heap, int r) {
  if constexpr (requires { A::kSpansHosts; }) return heap.base[r] != nullptr;
  return true;
}
/// Address of `p` in rank `r`'s segment. Null if `r` is on another host: its proxy writes there instead of this rank, and
/// stores to null are skipped.
template <class A, class T>
SWITCHYARD_FN T* reach(const HeapView& heap, int r, SymPtr<T> p) {
  return is_mapped<A>(heap, r) ? heap.at(r, p) : nullptr;
}

/// The subset of `ranks` (a bit mask) that is on this rank's host.
template <class A>
SWITCHYARD_FN uint64_t mapped_of(const HeapView& heap, uint64_t ranks) {
  if constexpr (requires { A::kSpansHosts; })
    for (int r = 0; r < heap.world; ++r)
      if (heap.base[r] == nullptr) ranks &= ~(uint64_t{1} << r);
  return ranks;
}

/// Records a span on this warp's track for the lifetime of the object, on an arch that can trace.
template <class A>
class WarpSpan {
 public:
  /// Does not open a span yet.
  SWITCHYARD_FN WarpSpan(typename A::Warp& w, const CallContext& call) : w_(w), call_(call) {}
  SWITCHYARD_FN WarpSpan(typename A::Warp& w, const CallContext& call, Event event, int64_t arg = 0) : w_(w), call_(call) {
    begin(event, arg);
  }
  SWITCHYARD_FN ~WarpSpan() { close(mark()); }
  WarpSpan(const WarpSpan&) = delete;
  WarpSpan& operator=(const WarpSpan&) = delete;
  SWITCHYARD_FN void begin(Event event, int64_t arg = 0) {
    if constexpr (kTraces) {
      if constexpr (requires { A::kHostTracing; })
        if (!call_.tracer) return;
      open_ = true;
      event_ = event;
      arg_ = arg;
      begin_ = now();
    }
  }
  SWITCHYARD_FN void set_arg(int64_t arg) { arg_ = arg; }
  /// Sets the number of row bytes moved to or from other ranks in the span.
  SWITCHYARD_FN void set_bytes(uint64_t bytes) { bytes_ = bytes; }
  /// A time at which next() or close() may end the span.
  SWITCHYARD_FN uint64_t mark() const {
    if constexpr (kTraces) return open_ ? now() : 0;
    return 0;
  }
  /// Ends the span at time `mark`.
  SWITCHYARD_FN void close(uint64_t mark) {
    if constexpr (kTraces) {
      if (open_) end(mark);
      open_ = false;
    }
  }
  /// Ends the span at time `mark` and begins another at the same time.
  SWITCHYARD_FN void next(Event event, int64_t arg, uint64_t mark) {
    if constexpr (kTraces) {
      if (open_) end(mark);
      event_ = event;
      arg_ = arg;
      bytes_ = 0;
      begin_ = mark;
    }
  }
  /// Changes the event and argument of the open span.
  SWITCHYARD_FN void set_event(Event event, int64_t arg) {
    event_ = event;
    arg_ = arg;
  }
  /// Discards the open span without recording it.
  SWITCHYARD_FN void cancel() { open_ = false; }

 private:
  static constexpr bool kTraces = requires { A::kHostTracing; }
  || requires { A::kDeviceTracing; };
  SWITCHYARD_FN static uint64_t now() {
    if constexpr (requires { A::kDeviceTracing; })
      return A::ticks();
    else
      return Tracer::ticks();
  }
  SWITCHYARD_FN void end(uint64_t time) {
    if constexpr (requires { A::kHostTracing; })
      call_.tracer->tick_span(w_.index(), static_cast<uint16_t>(event_), begin_, time, arg_, record_bytes(bytes_));
    if constexpr (requires { A::kDeviceTracing; })
      A::record(static_cast<uint16_t>(event_), begin_, time, arg_, record_bytes(bytes_));
  }

  typename A::Warp& w_;
  const CallContext& call_;
  bool open_ = false;  ///< a bool instead of a nullable pointer, because on a GPU `w_` would have to be in memory
  Event event_{};
  int64_t arg_ = 0;
  uint64_t bytes_ = 0, begin_ = 0;
};

}  // namespace switchyard::detail
