// SPDX-License-Identifier: Apache-2.0
// What the exchange objects of all modes and backends share: argument checks, the frame of collective calls, agreement at
// construction.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <new>
#include <span>
#include <string>

#include "base/agreed_fields.hpp"
#include "base/forked.hpp"
#include "base/invalid_routes.hpp"
#include "base/mix_hash.hpp"
#include "exchange/group/impl.hpp"
#include "heap/collective_step.hpp"
#include "heap/heap_block.hpp"

namespace switchyard::detail {

/// Throw Error(invalid_argument) with a text that names the argument, what was given and what is allowed. A text that begins
/// with the field that it is about is given in two parts.
[[noreturn]] void invalid(const std::string& text);
[[noreturn]] void invalid(const std::string& field, const std::string& rest);
/// "NAME = VALUE: must be ALLOWED"; `name` may begin with a function, "allocate_rows: type".
[[noreturn]] void invalid_value(const char* name, const std::string& value, const std::string& allowed);
/// `name` may say more than the field: "function: field (what it bounds)".
void check_range(const char* name, int64_t value, int64_t low, int64_t high);
void check_duration(const char* name, Milliseconds duration);
/// Bytes of a row; they must be a multiple of 16.
int64_t checked_row_bytes(const char* what, int64_t hidden, DType type);

/// Throws this rank's error as one that all ranks throw: the others have heard of it in the call itself.
[[noreturn]] void rethrow_agreed(const std::exception_ptr& error);

/// Epochs of the calls of one object whose host counts them.
class CallEpochs {
 public:
  explicit CallEpochs(uint64_t first) : first_(first), last_(epoch_before(first)) {}
  /// The epoch of the last call. Before the first call: the epoch that flags begin with.
  uint64_t last() const { return last_; }
  /// Begins a call, and returns its epoch.
  uint64_t next() { return last_ = epoch_after(last_); }
  /// Calls so far: the number of the last one in errors.
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

  /// Collective, the whole of a construction, within the rendezvous deadline. `build` does this rank's share, take_heap()
  /// included, sets its flags (no rank may write a flag before all have set theirs) and returns what the ranks must agree on.
  /// If it throws on some ranks, all throw the error of the lowest of them; if fields or heap offsets differ, all throw
  /// Error(mismatch), which names the field and both values. `object` names the object in errors, `sized_by` what computes its
  /// bytes of the heap. Then the group can be used, and once the object's remains are gone the heap is as before.
  void construct(const char* object, const char* sized_by, const std::function<AgreedFields()>& build);
  /// This object's block of the symmetric heap, until it is destroyed. Once.
  size_t take_heap(size_t bytes, size_t kept = std::numeric_limits<size_t>::max());

  /// Ids in host memory, before a row moves: counts those that are invalid, or throws Error(invalid_argument) that names the
  /// first.
  void take_invalid(const InvalidRoutes& found, InvalidIds policy, int topk, int num_experts);
  int64_t invalid_ids_so_far() const { return invalid_ids_; }
  /// The block, for what ends it later than this object.
  HeapBlock give_up_heap() noexcept { return std::move(heap_block_); }

  /// Runs `body` on all workers. If one throws, the others' waits end too, here and on the peers.
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
  const uint64_t object_;  ///< number among the group's exchanges, from 1; the same on all ranks once construct() returns
  const uint64_t first_epoch_;

 private:
  HeapBlock heap_block_;
  const char *made_ = "", *sized_by_ = "";  ///< as construct() was given them
  int64_t invalid_ids_ = 0;
};

/// Sums over the warps of a call.
CallStatistics sum_moved(std::span<const MoveCounter> moved);
/// Sets every `stride` bytes of [base, base + bytes) to `word`: the initial value of flags.
void set_flags(std::byte* base, int64_t bytes, int64_t stride, uint64_t word);

}  // namespace switchyard::detail
