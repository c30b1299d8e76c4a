// SPDX-License-Identifier: Apache-2.0
// Shared by the exchange objects of all modes and backends: argument checks, collective call frame, agreement at construction.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <new>
#include <span>
#include <string>
#include <utility>

#include "base/agreed_fields.hpp"
#include "base/forked.hpp"
#include "base/invalid_routes.hpp"
#include "base/mix_hash.hpp"
#include "exchange/group/impl.hpp"
#include "heap/collective_step.hpp"
#include "heap/heap_block.hpp"

namespace switchyard::detail {

/// Throw Error(invalid_argument). The text states the argument, its value and the allowed values. If the text begins with the
/// field name, the field is passed as a separate argument.
[[noreturn]] void invalid(const std::string& text);
[[noreturn]] void invalid(const std::string& field, const std::string& rest);
/// "NAME = VALUE: must be ALLOWED"; `name` may begin with a function name: "allocate_rows: type".
[[noreturn]] void invalid_value(const char* name, const std::string& value, const std::string& allowed);
/// `name` may contain more than the field name: "function: field (what it bounds)".
void check_range(const char* name, int64_t value, int64_t low, int64_t high);
void check_duration(const char* name, Milliseconds duration);
void check_num_tokens(int64_t num_tokens, int64_t max_tokens);
/// Bytes of a row of `hidden` elements, the value of the field `name`. Throws unless it is a multiple of 16. `row`: the row in
/// errors.
int64_t checked_row_bytes(const char* name, int64_t hidden, DType type, const char* row = "a row");

/// Rethrows this rank's error as one thrown by all ranks; the other ranks received it in the same call.
[[noreturn]] void rethrow_agreed(const std::exception_ptr& error);

/// Epochs of one object's calls, for objects whose calls are counted by the host.
class CallEpochs {
 public:
  explicit CallEpochs(uint64_t first) : first_(first), last_(epoch_before(first)) {}
  /// The epoch of the last call; before the first call, the initial epoch of the flags.
  uint64_t last() const { return last_; }
  /// Begins a call and returns its epoch.
  uint64_t next() { return last_ = epoch_after(last_); }
  /// Number of calls so far; in errors, the number of the last call.
  uint64_t calls() const { return epochs_since(first_, epoch_after(last_)); }

 private:
  uint64_t first_, last_;
};

class ExchangeBase {
 public:
  const HomeProcess home;

  ExchangeBase(const ExchangeBase&) = delete;
  ExchangeBase& operator=(const ExchangeBase&) = delete;

  /// Group::Impl::collective_call.
  template <class F>
  decltype(auto) collective_call(const char* operation, F&& call) {
    return group_.collective_call(operation, std::forward<F>(call));
  }

 protected:
  explicit ExchangeBase(Group& group) : group_(group.impl()), object_(group_.objects + 1), first_epoch_(group_.first_epoch) {}
  ~ExchangeBase() = default;
  int rank() const { return group_.bootstrap->rank(); }
  int world() const { return group_.bootstrap->world(); }

  /// Collective; performs the whole construction within the rendezvous deadline. `build` performs this rank's part, including
  /// take_heap(), initializes this rank's flags (no rank may write a flag before all ranks have initialized theirs) and returns
  /// the fields that all ranks must agree on. If it throws on some ranks, all ranks throw the error of the lowest such rank. If
  /// fields differ, all ranks throw Error(mismatch), whose message gives the field and both values. `object` is the object's
  /// name in errors, and `sized_by` is the call that computes its heap bytes. The group remains usable after an error; once
  /// the object's memory has been released, the heap is as before.
  void construct(const char* object, const char* sized_by, const std::function<AgreedFields()>& build);
  /// Collective, within construct(). Takes this object's block of the symmetric heap, held until the object is destroyed. It is
  /// at the lowest offset that is free on all ranks: an object already destroyed on one rank may still exist on another, for
  /// example until a garbage collection. Call once.
  size_t take_heap(size_t bytes, size_t kept = std::numeric_limits<size_t>::max());

  /// Checks ids in host memory before any row moves; counts the invalid ids or throws Error(invalid_argument) for the first
  /// one.
  void take_invalid(const InvalidRoutes& found, InvalidIds policy, int topk, int num_experts);
  int64_t total_invalid_ids() const { return invalid_ids_; }
  /// Transfers the block to an owner that releases it after this object.
  HeapBlock give_up_heap() noexcept { return std::move(heap_block_); }

  /// Runs `body` on all workers. If one worker throws, the waits of the others end, both here and on the peers.
  template <class F>
  void on_workers(F&& body) {
    group_.pool.run([&](CpuWarp& w) {
      try {
        body(w);
      } catch (...) {
        group_.post_abort(static_cast<int>(ErrorCode::system), 255);
        throw;
      }
    });
  }

  Group::Impl& group_;
  const uint64_t object_;  ///< number among the group's exchanges, from 1; identical on all ranks once construct() returns
  const uint64_t first_epoch_;

 private:
  /// The highest offset proposed by any rank for heap_block_, and whether all proposals are equal.
  std::pair<uint64_t, bool> agree_on_offset();

  HeapBlock heap_block_;
  std::exception_ptr placing_failed_;       ///< the error that ended take_heap() on all ranks
  const char *made_ = "", *sized_by_ = "";  ///< the arguments of construct()
  int64_t invalid_ids_ = 0;
};

/// Sums the counters over the warps of a call.
CallStatistics sum_moved(std::span<const MoveCounter> moved);
/// Sets one word every `stride` bytes in [base, base + bytes) to `word`, the initial value of flags.
void set_flags(std::byte* base, int64_t bytes, int64_t stride, uint64_t word);

}  // namespace switchyard::detail
