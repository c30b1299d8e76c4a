// SPDX-License-Identifier: Apache-2.0
// Sleep and wake-up on an atomic word, for threads of one process. All ordering is that of the word's own operations, which
// ThreadSanitizer sees. Unlike std::condition_variable, a wake-up takes no lock that the woken threads would queue for, and a
// wait needs no symbol of a libstdc++ newer than that of GCC 11.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace switchyard::detail {

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t) && std::atomic<uint32_t>::is_always_lock_free);

/// Sleeps while `word` holds `value`. May return early, so callers check the word again.
inline void futex_wait(std::atomic<uint32_t>& word, uint32_t value) noexcept {
  ::syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

/// Wakes all threads that sleep on `word`. Call after changing the word.
inline void futex_wake_all(std::atomic<uint32_t>& word) noexcept {
  ::syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace switchyard::detail
