// SPDX-License-Identifier: Apache-2.0
// Memory that whoever reads it first has to wait for: a rank stops in the middle of its call, at a place that a test chooses.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

namespace harness {

/// One page, readable after release(). A read before that is held in the handler of its SIGSEGV. One at a time in a process.
class StalledPage {
 public:
  StalledPage() : bytes_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
    page_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page_ == MAP_FAILED) std::abort();
    the_one() = this;
    struct sigaction hold = {};
    hold.sa_sigaction = [](int, siginfo_t* info, void*) { the_one()->held(info->si_addr); };
    hold.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &hold, &before_);
  }
  ~StalledPage() {
    release();
    sigaction(SIGSEGV, &before_, nullptr);
    munmap(page_, bytes_);
  }
  StalledPage(const StalledPage&) = delete;
  StalledPage& operator=(const StalledPage&) = delete;

  void* data() const { return page_; }
  size_t size() const { return bytes_; }
  /// From here on reads are held. What was written stays.
  void stall() {
    released_ = false;
    mprotect(page_, bytes_, PROT_NONE);
  }
  void release() {
    mprotect(page_, bytes_, PROT_READ | PROT_WRITE);
    released_ = true;
  }
  /// Someone has tried to read.
  bool was_held() const { return held_; }

 private:
  static StalledPage*& the_one() {
    static StalledPage* page = nullptr;
    return page;
  }
  void held(void* address) {
    const auto at = reinterpret_cast<uintptr_t>(address), first = reinterpret_cast<uintptr_t>(page_);
    if (at < first || at >= first + bytes_) {  // a fault of something else: happens again, and is not held then
      sigaction(SIGSEGV, &before_, nullptr);
      return;
    }
    held_ = true;
    while (!released_) usleep(1000);
  }

  size_t bytes_;
  void* page_ = nullptr;
  struct sigaction before_ = {};
  std::atomic<bool> released_{true}, held_{false};
};

}  // namespace harness
