// SPDX-License-Identifier: Apache-2.0
// State of one rank: its link to the others, its heap, its workers and its fault state.
#pragma once

#include <exception>
#include <memory>
#include <vector>

#include "arch/cpu/cpu_arch.hpp"
#include "arch/cpu/worker_pool.hpp"
#include "bootstrap/bootstrap.hpp"
#include "exchange/device_rank.hpp"
#include "heap/heap.hpp"
#include "protocol/call.hpp"
#include "switchyard/group.hpp"

namespace switchyard {

namespace detail {

inline constexpr uint64_t kEpochMask = (uint64_t{1} << (64 - kFlagValueBits)) - 1;
/// One step of a hash over the values that ranks must agree on.
uint64_t mix_hash(uint64_t hash, uint64_t value);

}  // namespace detail

struct Group::Impl {
  Impl(std::unique_ptr<detail::Bootstrap> bootstrap, std::unique_ptr<detail::SymmetricHeap> heap, const GroupOptions& options);
  Impl(std::unique_ptr<detail::Bootstrap> bootstrap, detail::DeviceParts parts, const GroupOptions& options);
  ~Impl();

  /// Everything but the epoch of a new call. Clears the fault record and the move counters.
  detail::CallContext begin_call();
  /// Throws what the last call recorded, if anything: PeerTimeout (and tells all peers), PeerFailed, ...
  void raise_fault(const char* operation, uint64_t call);
  /// Throws if this rank has aborted or was told of an abort. Also makes the first failure sticky.
  void check_alive(const char* context);
  /// Collective, through the bootstrap. A missing rank is reported as PeerTimeout under `operation`.
  void all_gather(const void* mine, size_t bytes, void* all, const char* operation);
  /// Makes all ranks' waits end. Only the first failure counts. Never throws.
  void post_abort(int reason, int awaited) noexcept;
  uint64_t abort_word() const noexcept;
  /// Collective, at the construction of an `object`: no rank may write a flag before all have set theirs. Compares heap offsets
  /// and what identifies the configurations.
  void agree_on_construction(const char* object, uint64_t heap_offset, uint64_t config_hash);
  /// Adds what this rank's workers moved in the last call.
  void add_moved(CallStatistics& to) const;

  /// Runs `check`; if it throws, the peers' waits end before the exception goes on.
  template <class F>
  void checked(F&& check) {
    try {
      check();
    } catch (const Error& error) {
      post_abort(static_cast<int>(error.code()), 255);
      throw;
    } catch (...) {
      post_abort(static_cast<int>(ErrorCode::system), 255);
      throw;
    }
  }
  /// Runs body.operator()<Arch>(warp) on all workers.
  template <class F>
  void launch(F&& body) {
    pool.run([&](detail::CpuWarp& w) { on_arch(w, body); });
  }
  template <class F>
  void on_arch(detail::CpuWarp& w, F& body) {
    if (options.deferred_copies)
      body.template operator()<detail::CpuDeferred>(w);
    else
      body.template operator()<detail::Cpu>(w);
  }

  std::unique_ptr<detail::Bootstrap> bootstrap;
  std::unique_ptr<detail::SymmetricHeap> heap;     ///< rows and flags; device memory if the group has a device
  std::unique_ptr<detail::SymmetricHeap> control;  ///< host memory with the abort words; null: they are in `heap`
  std::unique_ptr<detail::DeviceRank> device;      ///< null: CPU
  GroupOptions options;
  detail::WorkerPool pool;
  detail::Tracer* tracer = nullptr;

  detail::FaultRecord fault;
  uint64_t fault_claims = 0;
  std::vector<detail::WaitCounter> waits;  ///< [workers, world]
  std::vector<detail::MoveCounter> moved;  ///< [workers]

  detail::HeapHeader* header(int rank) const noexcept;

 private:
  [[noreturn]] void throw_abort(uint64_t word, const char* context) const;
};

}  // namespace switchyard
