// SPDX-License-Identifier: Apache-2.0
// ThreadSanitizer does not observe memory accesses made by library kernels. In vector code, it observes only those that the
// compiler instruments (GCC 12: whole vectors, not masked ones). Callers of such code declare its accesses with these
// functions, which do nothing without -fsanitize=thread.
#pragma once

#include <cstddef>

#if defined(__SANITIZE_THREAD__)
#define SWITCHYARD_GEMM_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define SWITCHYARD_GEMM_TSAN 1
#endif
#endif

#if defined(SWITCHYARD_GEMM_TSAN)
extern "C" void __tsan_read_range(void* begin, unsigned long bytes);
extern "C" void __tsan_write_range(void* begin, unsigned long bytes);
#endif

namespace switchyard::detail {

/// Declares that the calling thread reads `bytes` bytes starting at `begin`.
inline void announce_read([[maybe_unused]] const void* begin, [[maybe_unused]] size_t bytes) {
#if defined(SWITCHYARD_GEMM_TSAN)
  __tsan_read_range(const_cast<void*>(begin), bytes);
#endif
}

/// Declares that the calling thread writes `bytes` bytes starting at `begin`.
inline void announce_write([[maybe_unused]] void* begin, [[maybe_unused]] size_t bytes) {
#if defined(SWITCHYARD_GEMM_TSAN)
  __tsan_write_range(begin, bytes);
#endif
}

}  // namespace switchyard::detail
