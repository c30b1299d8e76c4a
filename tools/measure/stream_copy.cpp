// SPDX-License-Identifier: Apache-2.0
// Copies whose writes bypass the caches: the destination is written without being read first.
#include "measure/stream_copy.hpp"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace switchyard::measure {
namespace {

#if defined(__x86_64__)

constexpr size_t kAhead = 1024;  // distance in bytes between load and prefetch: hides part of the memory's latency

// NOLINTBEGIN(bugprone-macro-parentheses): a type cannot be in parentheses
// One body per vector width. Each one is compiled for its own instruction set and selected at run time.
#define SWITCHYARD_STREAM_COPY(name, isa, vector, load, store)                                           \
  __attribute__((target(isa))) void name(std::byte* to, const std::byte* from, size_t bytes) {           \
    constexpr size_t kLine = 64;                                                                         \
    constexpr size_t kVectors = kLine / sizeof(vector);                                                  \
    for (size_t at = 0; at + kLine <= bytes; at += kLine) {                                              \
      _mm_prefetch(reinterpret_cast<const char*>(from + at + kAhead), _MM_HINT_T0);                      \
      vector v[kVectors];                                                                                \
      for (size_t i = 0; i < kVectors; ++i) v[i] = load(reinterpret_cast<const vector*>(from + at) + i); \
      for (size_t i = 0; i < kVectors; ++i) store(reinterpret_cast<vector*>(to + at) + i, v[i]);         \
    }                                                                                                    \
    _mm_sfence();                                                                                        \
  }
SWITCHYARD_STREAM_COPY(copy_sse2, "sse2", __m128i, _mm_loadu_si128, _mm_stream_si128)
SWITCHYARD_STREAM_COPY(copy_avx2, "avx2", __m256i, _mm256_loadu_si256, _mm256_stream_si256)
SWITCHYARD_STREAM_COPY(copy_avx512, "avx512f", __m512i, _mm512_loadu_si512, _mm512_stream_si512)
#undef SWITCHYARD_STREAM_COPY
// NOLINTEND(bugprone-macro-parentheses)

#endif

}  // namespace

void stream_copy(std::byte* to, const std::byte* from, size_t bytes) {
  const size_t whole = bytes / 64 * 64;
#if defined(__x86_64__)
  static const auto copy = __builtin_cpu_supports("avx512f") ? copy_avx512
                           : __builtin_cpu_supports("avx2")  ? copy_avx2
                                                             : copy_sse2;
  copy(to, from, whole);
#else
  std::memcpy(to, from, whole);
#endif
  std::memcpy(to + whole, from + whole, bytes - whole);
}

}  // namespace switchyard::measure
