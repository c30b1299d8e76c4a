// SPDX-License-Identifier: Apache-2.0
// The warps of one rank on the CPU: threads that sleep between exchanges.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "arch/cpu/warp.hpp"

namespace switchyard::detail {

/// num_blocks x num_warps warps. Warp 0 of block 0 is the thread that calls run(). The others are pool threads, which block all
/// signals except faults and do not survive fork(), so pools must be created after forking.
class WorkerPool {
 public:
  /// Throws Error(invalid_argument) unless both are >= 1 and num_warps <= 1024; throws Error(system) if a thread cannot be
  /// created.
  WorkerPool(int num_blocks, int num_warps);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  /// Runs `body` once on every warp and returns when all have returned. If any warps threw, rethrows the exception of the one
  /// with the lowest index; an exception that only reports a broken block_sync has the lowest priority. Earlier writes by the
  /// caller are visible to all warps, and on return their writes are visible to the caller. Row ops still pending when `body`
  /// returns are dropped. Concurrent calls from several threads are serialized.
  void run(const std::function<void(CpuWarp&)>& body);

  /// Grows the scratch memory of every warp; see CpuWarp::reserve_scratch. Must not be called from within run().
  void reserve_scratch(size_t bytes);

  int num_blocks() const noexcept { return num_blocks_; }
  int num_warps() const noexcept { return num_warps_; }
  int total() const noexcept { return num_blocks_ * num_warps_; }

 private:
  void work(size_t index);
  void run_warp(size_t index) noexcept;
  void stop() noexcept;

  int num_blocks_;
  int num_warps_;
  int spins_ = 0;  // maximum polls before a thread sleeps
  std::unique_ptr<BlockBarrier[]> barriers_;
  std::vector<std::unique_ptr<CpuWarp>> warps_;
  std::vector<std::exception_ptr> failures_;  // by warp; written by its thread, read after all have ended
  std::vector<std::thread> threads_;

  std::mutex run_mutex_;           // held during run()
  std::atomic<uint32_t> call_{0};  // incremented to start a run() and to stop; pool threads sleep on it
  std::atomic<uint32_t> busy_{0};  // pool threads that have not finished the current call; run() sleeps on it
  std::atomic<bool> stopping_{false};
  const std::function<void(CpuWarp&)>* body_ = nullptr;
};

}  // namespace switchyard::detail
