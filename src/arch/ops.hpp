// SPDX-License-Identifier: Apache-2.0
// The op list: all operations that protocol code may perform on a warp. docs/arch.md explains each op; tests/conformance checks
// each arch.
//
// An arch is a type `A` with a nested `A::Warp` and static functions. On CUDA, a warp is 32 lanes; on the CPU, it is one
// thread. All lanes of a warp must call each op together with identical ("uniform") arguments, and each op takes effect once
// per warp.
//
//   moving rows   A::copy, A::multicast_to, A::fetch, A::fetch_words, A::multicast_fetched,
//                 A::fill_zero, A::prefetch, A::drain_sources, A::settle
//   arithmetic    A::reduce_rows, A::reduce_rows_from, A::map_row, A::quantize_row, A::quantize_to
//   flags         A::load_acquire, A::store_release, A::publish_to, A::publish_entry, A::poll_from, A::fetch_add,
//                 A::take, A::post, A::peek, A::block_sync
//   lanes         A::for_lanes, A::lanes_where, A::lanes_union, A::count_where, A::locate, A::locate_many, A::count,
//                 A::count_max, A::out_of_line, A::out_of_line_if_cheap, A::now_ns, A::pause
//
// Moved bytes are *pending*: they may be written late, in any order, and their source may be read late. They are complete, and
// covered by a later release by the same warp, only after A::settle. Memory orders are part of the flag ops; there are no
// stand-alone fences.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>

#include "base/macros.hpp"
#include "switchyard/types.hpp"

namespace switchyard::detail {

/// Identifies the protocol flag that an op accesses. The protocols define the values (layout/sites.def); an arch uses them only
/// to look up memory orders in builds for the mutation suite (arch/cpu/order_table.hpp).
enum class Site : uint8_t;
inline constexpr int kMaxSites = 64;
/// The site used for the words of sentinel rows. Ops on such rows take no site.
inline constexpr Site kSentinelSite{11};

/// The threads to which a release is visible, or whose release an acquire observes.
enum class Scope : uint8_t { block, device, system };

/// Arrival marking of a *sentinel row*, whose data serves as its flag (as in NCCL's "LL" protocols). Every word of the row
/// (whose size is rounded up to whole words) is blank until the writer, on any rank, writes it. The writer never writes a blank
/// word; it writes a substitute instead. A reader that finds no blank word has the complete row. No flag follows the row, and
/// its arrival does not order other data. A word is 4 bytes on a GPU and 8 bytes on the CPU. A row is aligned to 16 bytes, and
/// its memory has room for whole words.
struct Sentinel {
  uint32_t blank;       ///< every 4 bytes of a blank word
  uint32_t substitute;  ///< the last 4 bytes of the word written in place of a blank word
  bool reusable;        ///< a reader that has the complete row makes it blank again
};
/// Blank words are zero. Zero words are written as a negative zero, which does not change sums that start with +0.
SWITCHYARD_FN constexpr Sentinel sentinel_sums() { return {0, 0x80000000u, true}; }
/// A blank word is a pair of NaNs (or one float32 NaN). Data with these bits is written as a pair of other NaNs, so numbers do
/// not change.
SWITCHYARD_FN constexpr Sentinel sentinel_copies() { return {0xffffffffu, 0xffff7fffu, false}; }

/// One weighted sum of rows: out = round(b0 + b1 + sum_i w_i * row_i), in float32, i ascending, multiply then add, from +0 or
/// from the bias sum. With n = 0 and no bias, the result is +0. Without weights, rows are added unweighted.
struct ReduceSpec {
  void* out;                ///< `hidden` elements of `type`
  const void* const* rows;  ///< n pointers to `hidden` elements of `type`
  const float* weights;     ///< n weights, or null
  int n;
  const void* bias[2];  ///< rows of `type`, or null; bias[1] only with bias[0]
  DType type;           ///< bf16, f16 or f32
  int64_t hidden;
  bool sentinel = false;  ///< `out` is a sentinel row (sentinel_sums())
};

/// Placeholders for function objects in the concept below, where not every CUDA compiler accepts lambdas.
struct AnyLaneFn {
  SWITCHYARD_FN void operator()(int) const {}
};
struct AnyLanePredicate {
  SWITCHYARD_FN bool operator()(int64_t) const { return false; }
};
struct AnyLength {
  SWITCHYARD_FN int64_t operator()(int) const { return 0; }
};
struct AnyOutOfLine {
  template <class W>
  SWITCHYARD_FN bool operator()(W&, int) const {
    return false;
  }
};
struct AnyWeight {
  SWITCHYARD_FN float operator()(int) const { return 0.0f; }
};
struct AnyRowMap {
  template <class N>
  SWITCHYARD_FN void operator()(float*, int64_t, N) const {}
};
struct AnyBits {
  SWITCHYARD_FN uint64_t operator()(int) const { return 0; }
};
/// A store performed by publish_to: `value` to `flag`, or nothing if `flag` is null.
struct FlagStore {
  uint64_t* flag;
  uint64_t value;
};
struct AnyFlagStore {
  SWITCHYARD_FN FlagStore operator()(int) const { return {nullptr, 0}; }
};
struct AnyFlag {
  SWITCHYARD_FN uint64_t* operator()(int) const { return nullptr; }
};
struct AnyDestination {
  SWITCHYARD_FN void* operator()(int) const { return nullptr; }
};

/// Destination of a row and its scales in quantize_to; null if there is none.
struct QuantizedRow {
  uint8_t* q;
  void* scales;
};
struct AnyQuantizedRow {
  SWITCHYARD_FN QuantizedRow operator()(int) const { return {nullptr, nullptr}; }
};

/// Position of a flat index within consecutive segments.
struct Located {
  int segment;     ///< n if the index is beyond the end
  int64_t offset;  ///< within the segment
};

/// Requirements of protocol templates. `bool` results are uniform over the warp.
template <class A>
concept Arch = requires(typename A::Warp& w, void* dst, const void* src, size_t bytes, uint64_t* flag, uint64_t value, int n,
                        const ReduceSpec& reduce, uint8_t* q, int64_t hidden) {
  // Position. block() is in [0, num_blocks()), warp() in [0, warps_per_block()), index() in [0, total()) over the whole rank.
  { w.block() } -> std::convertible_to<int>;
  { w.warp() } -> std::convertible_to<int>;
  { w.num_blocks() } -> std::convertible_to<int>;
  { w.warps_per_block() } -> std::convertible_to<int>;
  { w.index() } -> std::convertible_to<int>;
  { w.total() } -> std::convertible_to<int>;
  // Private memory of this warp for one staged row. Pending copies may read from it until drain_sources.
  { w.scratch() } -> std::convertible_to<std::byte*>;

  A::copy(w, dst, src, bytes);  // any size and alignment; fast if all are multiples of 16
  // Reads src once and writes it to f(i), i in [0, n), n <= 64; null: no destination.
  A::multicast_to(w, n, AnyDestination{}, src, bytes);
  // multicast_to in two steps, for a row loaded before its destinations are known. The source may be read at any time from
  // fetch on, even after multicast_fetched.
  A::multicast_fetched(w, n, AnyDestination{}, A::fetch(w, src, bytes));
  A::multicast_fetched(w, n, AnyDestination{}, A::fetch_words(w, src, bytes));  // for a few words of 4 bytes
  A::fill_zero(w, dst, bytes);
  A::prefetch(w, src, bytes);  // a hint that the bytes will be read soon
  A::drain_sources(w);         // sources of all pending copies of this warp have been read
  A::settle(w);                // all pending copies, fills and reductions of this warp are complete

  A::reduce_rows(w, reduce);  // at most 64 rows; pending, like a copy
  // Like reduce_rows, for the non-null rows f(i) in ascending order of i in [0, n), n <= 64, each multiplied by g(i) if the
  // flag is set. Does not use the members rows, weights and n of `reduce`. On a GPU, the lanes look up the rows in parallel.
  A::reduce_rows_from(w, reduce, n, false, AnyDestination{}, AnyWeight{});
  // reduce_rows_from with a bound on n; on a GPU, this omits the code for more rows than lanes, which would cost registers
  // everywhere.
  A::template reduce_rows_from<kMaxTopk>(w, reduce, n, false, AnyDestination{}, AnyWeight{});
  // Applies f to the `hidden` elements of src in float32 and rounds the results to dst; pending. f(x, column, n) transforms x[0
  // .. n), the elements starting at `column`, in place; n is a constant on a GPU (for unrolling) and arbitrary on the CPU. May
  // use the warp's scratch, which must have room for a row.
  A::map_row(w, dst, src, DType::bf16, hidden, AnyRowMap{});
  A::map_row(w, dst, src, DType::bf16, hidden, AnyRowMap{}, true);  // dst is a sentinel row
  // Copies one row to the sentinel rows f(i), i in [0, n), n <= 64; null: no destination.
  A::multicast_sentinel(w, n, AnyDestination{}, src, bytes, sentinel_sums());
  A::blank_row(w, dst, bytes, sentinel_sums());                              // pending
  { A::has_arrived(w, src, bytes, sentinel_sums()) } -> std::same_as<bool>;  // true for a complete sentinel row
  // reduce_rows_from over sentinel rows. Returns -1 if all have arrived (a row may occur twice). Otherwise, returns the index i
  // of a row that has not arrived, and `out` is unspecified. n is the number of retries per row.
  { A::reduce_if_arrived(w, reduce, n, false, AnyDestination{}, AnyWeight{}, n, sentinel_sums()) } -> std::same_as<int>;
  // Converts a row to fp8; on return the result is complete for this warp. The last argument is the number of columns per
  // scale: 32, 64 or 128 (default).
  A::quantize_row(w, q, dst, src, DType::bf16, hidden, ScaleKind::f32, 128);
  // Like quantize_row, to the destinations f(i), i in [0, n), n <= 64; pending. Scales have no padding. May use the warp's
  // scratch, which must have room for a row and its scales.
  A::quantize_to(w, n, AnyQuantizedRow{}, src, DType::bf16, hidden, ScaleKind::f32, 128);

  { A::template load_acquire<Scope::system>(flag, Site{}) } -> std::same_as<uint64_t>;
  A::template store_release<Scope::system>(w, flag, value, Site{});
  // Releases f(i).value to f(i).flag, i in [0, n), for any n; on a GPU, the lanes look up the flags in parallel.
  A::template publish_to<Scope::system>(w, n, AnyFlagStore{}, Site{});
  A::publish_entry(w, n, AnyFlagStore{}, Site{});  // publish_to<system> for data that was complete before this kernel began
  // Index of the first flag f(i), i in [0, n), that has not reached `value` (flag_reached), or -1 if all have reached it and
  // have been acquired.
  { A::template poll_from<Scope::system>(w, n, AnyFlag{}, value, Site{}) } -> std::convertible_to<int>;
  { A::template fetch_add<Scope::device>(w, flag, value, Site{}) } -> std::same_as<uint64_t>;  // acquire-release
  requires A::kTakenAtOnce >= 1;                          // preferred number of rows per take: 1 where take is cheap
  { A::take(w, flag, value) } -> std::same_as<uint64_t>;  // *flag += value, within a device, unordered; the old value
  A::post(w, flag, value);                                // a self-contained word for any rank; orders nothing
  { A::peek(flag) } -> std::same_as<uint64_t>;            // reads a posted word; also by single lanes
  A::block_sync(w);

  { A::lanes_where(w, n, AnyLanePredicate{}) } -> std::same_as<uint64_t>;         // bit i: f(i), for i in [0, n), n <= 64
  { A::lanes_union(w, n, AnyBits{}) } -> std::same_as<uint64_t>;                  // f(0) | f(1) | ... | f(n - 1)
  { A::count_where(w, int64_t{}, AnyLanePredicate{}) } -> std::same_as<int64_t>;  // number of true f(i), i in [0, n)
  // Position of index i in n segments of lengths f(0), f(1), ...; divides uneven work evenly.
  { A::locate(w, int64_t{}, n, AnyLength{}) } -> std::same_as<Located>;
  // locate for dozens of segments whose total is less than 2^32.
  { A::locate_many(w, int64_t{}, n, AnyLength{}) } -> std::same_as<Located>;
  A::for_lanes(w, n, AnyLaneFn{});  // f(i) for i in [0, n), each once, distributed over the lanes; stores inside are pending
  // Calls F{}(warp, arguments...) out of line; for rarely executed code. F has no state, and its arguments are numbers and
  // pointers: an argument forced into memory by this call would also be in memory on the hot path.
  { A::out_of_line(w, AnyOutOfLine{}, n) } -> std::same_as<bool>;
  // Like out_of_line, for code that always runs exactly once; inlined where a jump costs more than the code.
  { A::out_of_line_if_cheap(w, AnyOutOfLine{}, n) } -> std::same_as<bool>;
  A::count(w, flag, value);      // *flag += value, for a statistic that only this warp writes; unordered
  A::count_max(w, flag, value);  // *flag = max(*flag, value); otherwise like count
  { A::now_ns() } -> std::same_as<uint64_t>;
  A::pause(w, n);  // between polls; n is the number of polls so far
};

/// A flag word: {epoch: 40, value: 24}. Epochs start at 1 and count the calls on one object, modulo 2^40. A wait ends when the
/// word has *reached* the expected one; a word of a later epoch also satisfies it. The comparison is modular, to handle
/// wraparound.
inline constexpr int kFlagValueBits = 24;
/// When a mode validates a configuration, it must limit every count stored in a value to this.
inline constexpr uint64_t kMaxFlagValue = (uint64_t{1} << kFlagValueBits) - 1;
SWITCHYARD_FN constexpr uint64_t flag_word(uint64_t epoch, uint64_t value = 0) { return (epoch << kFlagValueBits) | value; }
SWITCHYARD_FN constexpr uint64_t flag_epoch(uint64_t word) { return word >> kFlagValueBits; }
SWITCHYARD_FN constexpr uint64_t flag_value(uint64_t word) { return word & kMaxFlagValue; }

/// Arithmetic of epochs, with wraparound.
inline constexpr uint64_t kEpochMask = ~uint64_t{0} >> kFlagValueBits;
SWITCHYARD_FN constexpr uint64_t epoch_after(uint64_t epoch) { return (epoch + 1) & kEpochMask; }
SWITCHYARD_FN constexpr uint64_t epoch_before(uint64_t epoch) { return (epoch - 1) & kEpochMask; }
/// Number of calls from epoch `first` up to, but not including, `epoch`.
SWITCHYARD_FN constexpr uint64_t epochs_since(uint64_t first, uint64_t epoch) { return (epoch - first) & kEpochMask; }

SWITCHYARD_FN constexpr bool flag_reached(uint64_t word, uint64_t expected) {
  return static_cast<int64_t>(word - expected) >= 0;
}

}  // namespace switchyard::detail
