// SPDX-License-Identifier: Apache-2.0
// Memory whose first reader must wait. With it, a test stops a rank at a chosen point in the middle of its call.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

namespace harness {

/// One page, readable after release(). An earlier read blocks in a SIGSEGV handler. Only one such page may exist at a time in a
/// process.
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
  /// Blocks all reads from now on. The content is preserved.
  void stall() {
    released_ = false;
    mprotect(page_, bytes_, PROT_NONE);
  }
  void release() {
    mprotect(page_, bytes_, PROT_READ | PROT_WRITE);
    released_ = true;
  }
  /// Whether a read was attempted.
  bool was_held() const { return held_; }

 private:
  static StalledPage*& the_one() {
    static StalledPage* page = nullptr;
    return page;
  }
  void held(void* address) {
    const auto at = reinterpret_cast<uintptr_t>(address), first = reinterpret_cast<uintptr_t>(page_);
    if (at < first || at >= first + bytes_) {  // an unrelated fault: it recurs and is then not held
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
