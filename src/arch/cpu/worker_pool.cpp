// SPDX-License-Identifier: Apache-2.0
#include "arch/cpu/worker_pool.hpp"

#include <pthread.h>
#include <signal.h>

#include <string>
#include <system_error>

#include "arch/cpu/futex.hpp"
#include "arch/cpu/row_ops.hpp"
#include "base/cpu_relax.hpp"
#include "switchyard/status.hpp"

namespace switchyard::detail {
namespace {

constexpr int kMaxWarpsPerBlock = 1024;
constexpr int kMaxWarps = 4096;
constexpr int kSpins = 200;  // about 2 us: enough for back-to-back calls

/// Signals are left to the application's threads. Pool threads start with all signals blocked except those that report faults
/// in their own code: the system delivers these to the faulting thread and, if they were blocked, would end the process without
/// invoking the application's crash handler.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT}) sigdelset(&all, fault);
    pthread_sigmask(SIG_SETMASK, &all, &saved_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &saved_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t saved_;
};

/// Waits until ready(value of `word`) is true: polls up to `spins` times, then sleeps. \returns that value
template <class Ready>
uint32_t await(std::atomic<uint32_t>& word, int spins, Ready ready) {
  uint32_t value = word.load(std::memory_order_acquire);
  for (int spin = 0; spin < spins && !ready(value); ++spin) {
    cpu_relax();
    value = word.load(std::memory_order_acquire);
  }
  while (!ready(value)) {
    futex_wait(word, value);
    value = word.load(std::memory_order_acquire);
  }
  return value;
}

bool only_broken_block(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const BlockBroken&) {
    return true;
  } catch (...) {
    return false;
  }
}

}  // namespace

WorkerPool::WorkerPool(int num_blocks, int num_warps) : num_blocks_(num_blocks), num_warps_(num_warps) {
  if (num_blocks < 1 || num_warps < 1 || num_warps > kMaxWarpsPerBlock || num_blocks > kMaxWarps / num_warps) {
    throw Error(ErrorCode::invalid_argument,
                "num_blocks x num_warps: " + std::to_string(num_blocks) + " x " + std::to_string(num_warps) +
                    " given; allowed: num_blocks >= 1, 1 <= num_warps <= " + std::to_string(kMaxWarpsPerBlock) +
                    ", and a product of at most " + std::to_string(kMaxWarps),
                "num_blocks x num_warps");
  }
  barriers_ = std::make_unique<BlockBarrier[]>(static_cast<size_t>(num_blocks));
  for (int block = 0; block < num_blocks; ++block) {
    for (int warp = 0; warp < num_warps; ++warp) {
      warps_.push_back(std::make_unique<CpuWarp>(block, warp, num_blocks, num_warps, &barriers_[static_cast<size_t>(block)]));
    }
  }
  // If a pool has more threads than there are cores, a polling thread can delay the thread that it waits for.
  if (warps_.size() <= std::thread::hardware_concurrency()) spins_ = kSpins;
  failures_.resize(warps_.size());
  threads_.reserve(warps_.size() - 1);
  const SignalsBlocked blocked;
  try {
    for (size_t index = 1; index < warps_.size(); ++index) {
      threads_.emplace_back([this, index] { work(index); });
      const std::string name = "sy-b" + std::to_string(warps_[index]->block()) + "w" + std::to_string(warps_[index]->warp());
      pthread_setname_np(threads_.back().native_handle(), name.c_str());
    }
  } catch (const std::system_error& error) {
    const size_t started = threads_.size();
    stop();
    throw Error(ErrorCode::system, "thread " + std::to_string(started + 1) + " of " + std::to_string(warps_.size() - 1) +
                                       " worker threads could not be created: " + error.what());
  }
}

WorkerPool::~WorkerPool() { stop(); }

void WorkerPool::stop() noexcept {
  stopping_.store(true, std::memory_order_relaxed);
  call_.fetch_add(1, std::memory_order_release);
  futex_wake_all(call_);
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void WorkerPool::reserve_scratch(size_t bytes) {
  const std::lock_guard turn(run_mutex_);
  for (auto& warp : warps_) warp->reserve_scratch(bytes);
}

void WorkerPool::run(const std::function<void(CpuWarp&)>& body) {
  const std::lock_guard turn(run_mutex_);
  for (int block = 0; block < num_blocks_; ++block) barriers_[static_cast<size_t>(block)].reset(num_warps_);
  body_ = &body;
  if (!threads_.empty()) {
    busy_.store(static_cast<uint32_t>(threads_.size()), std::memory_order_relaxed);
    call_.fetch_add(1, std::memory_order_release);
    futex_wake_all(call_);
  }
  run_warp(0);
  await(busy_, spins_, [](uint32_t busy) { return busy == 0; });
  body_ = nullptr;

  std::exception_ptr first;
  std::exception_ptr first_broken;
  for (std::exception_ptr& failure : failures_) {
    if (!failure) continue;
    std::exception_ptr& slot = only_broken_block(failure) ? first_broken : first;
    if (!slot) slot = failure;
    failure = nullptr;
  }
  if (first) std::rethrow_exception(first);
  if (first_broken) std::rethrow_exception(first_broken);
}

void WorkerPool::work(size_t index) {
  uint32_t seen = 0;
  while (true) {
    seen = await(call_, spins_, [seen](uint32_t call) { return call != seen; });
    if (stopping_.load(std::memory_order_relaxed)) return;
    run_warp(index);
    if (busy_.fetch_sub(1, std::memory_order_acq_rel) == 1) futex_wake_all(busy_);
  }
}

void WorkerPool::run_warp(size_t index) noexcept {
  CpuWarp& warp = *warps_[index];
  try {
    (*body_)(warp);
    warp.barrier()->arrive_and_leave();
  } catch (...) {
    failures_[index] = std::current_exception();
    warp.barrier()->break_off();
  }
  warp.pending().discard();
  if (warp.streamed()) {
    flush_streams();
    warp.clear_streamed();
  }
}

}  // namespace switchyard::detail
