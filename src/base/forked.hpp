// SPDX-License-Identifier: Apache-2.0
// Protection for objects that a forked child inherits from its parent.
#pragma once

#include <pthread.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <new>
#include <utility>

namespace switchyard::detail {

/// The process that created an object. A forked child's copy of the object shares sockets with the original but lacks its
/// threads and any memory that is not inherited across a fork. The child must neither use nor destroy the copy.
///
/// here() is on the path of every call and therefore performs one load instead of the system call getpid(). A pthread_atfork()
/// handler counts the forks between the first process and this one. Children created without running the handlers (vfork,
/// clone) must call exec or _exit.
class HomeProcess {
 public:
  HomeProcess() {
    static const int error = ::pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
    if (error != 0) throw std::bad_alloc();
    forks_ = forks.load(std::memory_order_relaxed);
  }

  bool here() const noexcept { return forks.load(std::memory_order_relaxed) == forks_; }

 private:
  static inline std::atomic<unsigned> forks{0};
  unsigned forks_;
};

/// Keeps `object` unchanged until the process ends; it stays reachable, so it is not reported as a leak.
template <class T>
void keep_forever(T* object) noexcept {
  struct Kept {
    T* object;
    Kept* next;
  };
  static std::mutex mutex;
  static Kept* first = nullptr;
  const std::lock_guard lock(mutex);
  if (auto* const kept = new (std::nothrow) Kept{object, first}) first = kept;
}

/// Replaces `pointer` with `next`; destroys the old object, or keeps it if it belongs to a parent of this process. T must have
/// a HomeProcess member `home`.
template <class T>
void replace_at_home(std::unique_ptr<T>& pointer, std::unique_ptr<T> next) noexcept {
  if (pointer && !pointer->home.here()) keep_forever(pointer.release());
  pointer = std::move(next);
}

}  // namespace switchyard::detail
