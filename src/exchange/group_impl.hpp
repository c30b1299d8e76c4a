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
