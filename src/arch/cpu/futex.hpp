// SPDX-License-Identifier: Apache-2.0
// Sleep and wake-up on an atomic word, for threads of one process. Only the operations on the word order memory, and
// ThreadSanitizer sees these. Unlike with std::condition_variable, woken threads do not contend for a mutex, and no libstdc++
// symbol newer than GCC 11 is needed.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace switchyard::detail {

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t) && std::atomic<uint32_t>::is_always_lock_free);

/// If `word` holds `value`, sleeps until futex_wake_all(). May return early, so callers check the word again.
inline void futex_wait(std::atomic<uint32_t>& word, uint32_t value) noexcept {
  ::syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

/// Wakes all threads that sleep on `word`. Call after changing the word.
inline void futex_wake_all(std::atomic<uint32_t>& word) noexcept {
  ::syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace switchyard::detail
