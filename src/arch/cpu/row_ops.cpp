// SPDX-License-Identifier: Apache-2.0
// CMake sets -ffp-contract=off: sums are "multiply, then add", and GCC contracts even vector intrinsics by default. It sets no
// -ffast-math and no -march flags; the instruction set is selected at run time.
#include "arch/cpu/row_ops.hpp"

#include "arch/cpu/sentinel.hpp"

// Highway 1.0.3 (Debian 12) fails to compile if this target is the compiler's baseline (-march=native on Ice Lake and later):
// it excludes the target from compilation but then requires it. AVX3 replaces it.
#define HWY_DISABLED_TARGETS HWY_AVX3_DL
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "arch/cpu/kernels-inl.hpp"
#include "hwy/foreach_target.h"  // all targets but the last; the next line is the last
#include "arch/cpu/kernels-inl.hpp"

#include <atomic>

#include "hwy/cache_control.h"

#if defined(__SANITIZE_THREAD__)
#define SWITCHYARD_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define SWITCHYARD_TSAN 1
#endif
#endif
#if !defined(SWITCHYARD_TSAN)
#define SWITCHYARD_TSAN 0
#endif

#if SWITCHYARD_TSAN
extern "C" {
void __tsan_read1(void* at);
void __tsan_read2(void* at);
void __tsan_read4(void* at);
void __tsan_read_range(void* begin, unsigned long bytes);
void __tsan_write1(void* at);
void __tsan_write2(void* at);
void __tsan_write4(void* at);
void __tsan_write_range(void* begin, unsigned long bytes);
void __tsan_ignore_thread_begin();
void __tsan_ignore_thread_end();
}
#endif

namespace switchyard::detail {
namespace {

HWY_EXPORT(target_id);
HWY_EXPORT(stream_copy);
HWY_EXPORT(stream_zero);
HWY_EXPORT(reduce_any);
HWY_EXPORT(quantize_any);
HWY_EXPORT(write_sentinel_lines);
HWY_EXPORT(lines_have_arrived);

// Smaller rows are written through the caches, because they are usually read soon and the partial lines at both ends cost more
// than streaming saves.
constexpr size_t kStreamBytes = 4096;
// Source pieces of this size are read from memory once, and then from the first-level cache for the other destinations.
constexpr size_t kMulticastPiece = 16384;

std::atomic<bool> streaming{true};

bool streams(size_t bytes) { return !SWITCHYARD_TSAN && bytes >= kStreamBytes && streaming.load(std::memory_order_relaxed); }

// ThreadSanitizer does not observe accesses through intrinsics. Every op therefore announces its ranges, and accesses that the
// compiler instruments anyway are ignored. ThreadSanitizer remembers four accesses per 8 bytes, so it would forget ranges
// announced in unnecessarily many pieces.

#if SWITCHYARD_TSAN
struct Reads {
  static void one(void* at) { __tsan_read1(at); }
  static void two(void* at) { __tsan_read2(at); }
  static void four(void* at) { __tsan_read4(at); }
  static void range(void* begin, size_t bytes) { __tsan_read_range(begin, bytes); }
};
struct Writes {
  static void one(void* at) { __tsan_write1(at); }
  static void two(void* at) { __tsan_write2(at); }
  static void four(void* at) { __tsan_write4(at); }
  static void range(void* begin, size_t bytes) { __tsan_write_range(begin, bytes); }
};

template <class Access>
void announce(const void* begin, size_t bytes) {
  auto at = reinterpret_cast<uintptr_t>(begin);
  const uintptr_t end = at + bytes;
  while (at != end) {
    auto* p = reinterpret_cast<void*>(at);
    const size_t left = end - at;
    if (at % 8 == 0 && left >= 8) {
      Access::range(p, left / 8 * 8);
      at += left / 8 * 8;
    } else if (at % 4 == 0 && left >= 4) {
      Access::four(p);
      at += 4;
    } else if (at % 2 == 0 && left >= 2) {
      Access::two(p);
      at += 2;
    } else {
      Access::one(p);
      at += 1;
    }
  }
}
void announce_read(const void* begin, size_t bytes) { announce<Reads>(begin, bytes); }
void announce_write(void* begin, size_t bytes) { announce<Writes>(begin, bytes); }

/// During its lifetime, accesses by this thread are not recorded.
struct Announced {
  Announced() { __tsan_ignore_thread_begin(); }
  ~Announced() { __tsan_ignore_thread_end(); }
  Announced(const Announced&) = delete;
  Announced& operator=(const Announced&) = delete;
};
#else
void announce_read(const void*, size_t) {}
void announce_write(void*, size_t) {}
struct Announced {
  Announced() {}
};
#endif

/// Sets round to nearest even without flush to zero; the destructor restores the caller's settings.
class StandardFloatMode {
 public:
#if defined(__x86_64__)
  StandardFloatMode() : saved_(__builtin_ia32_stmxcsr()) {
    if ((saved_ & kDeviations) != 0) __builtin_ia32_ldmxcsr(saved_ & ~kDeviations);
  }
  ~StandardFloatMode() {
    if ((saved_ & kDeviations) != 0) __builtin_ia32_ldmxcsr(saved_);
  }

 private:
  static constexpr unsigned kDeviations = 0xE040;  // flush to zero, rounding control, denormals are zero
  unsigned saved_;
#else
  StandardFloatMode() {}
#endif
 public:
  StandardFloatMode(const StandardFloatMode&) = delete;
  StandardFloatMode& operator=(const StandardFloatMode&) = delete;
};

void plain_copy(void* dst, const void* src, size_t bytes) {
  if (bytes != 0) std::memcpy(dst, src, bytes);
}

}  // namespace

bool copy_row(void* dst, const void* src, size_t bytes) { return multicast_row(&dst, 1, src, bytes); }

bool multicast_row(void* const* dsts, int n, const void* src, size_t bytes) {
  announce_read(src, bytes);
  for (int i = 0; i < n; ++i) announce_write(dsts[i], bytes);
  const Announced announced;
  const bool stream = streams(bytes);
  const auto* source = static_cast<const uint8_t*>(src);
  for (size_t at = 0; at < bytes; at += kMulticastPiece) {
    const size_t piece = std::min(kMulticastPiece, bytes - at);
    for (int i = 0; i < n; ++i) {
      auto* dst = static_cast<uint8_t*>(dsts[i]) + at;
      if (stream) {
        HWY_DYNAMIC_DISPATCH(stream_copy)(dst, source + at, piece);
      } else {
        plain_copy(dst, source + at, piece);
      }
    }
  }
  return stream;
}

bool zero_row(void* dst, size_t bytes) {
  announce_write(dst, bytes);
  const Announced announced;
  if (!streams(bytes)) {
    if (bytes != 0) std::memset(dst, 0, bytes);
    return false;
  }
  HWY_DYNAMIC_DISPATCH(stream_zero)(static_cast<uint8_t*>(dst), bytes);
  return true;
}

bool reduce_rows(const ReduceSpec& spec, bool may_stream) {
  const size_t bytes = dtype_bytes(spec.type, spec.hidden);
  for (const void* bias : spec.bias) {
    if (bias != nullptr) announce_read(bias, bytes);
  }
  for (int i = 0; i < spec.n; ++i) announce_read(spec.rows[i], bytes);
  announce_write(spec.out, bytes);
  const bool element_aligned = reinterpret_cast<uintptr_t>(spec.out) % dtype_bytes(spec.type, 1) == 0;
  const bool stream = may_stream && element_aligned && streams(bytes);
  const Announced announced;
  const StandardFloatMode mode;
  HWY_DYNAMIC_DISPATCH(reduce_any)(spec, stream);
  return stream;
}

void quantize_row(uint8_t* q, void* scales, const void* src, DType type, int64_t hidden, ScaleKind kind, int group) {
  const size_t scale_bytes = scale_row_bytes(hidden, kind, group);
  announce_read(src, dtype_bytes(type, hidden));
  announce_write(q, static_cast<size_t>(hidden));
  announce_write(scales, scale_bytes);
  const Announced announced;
  auto* scale_row = static_cast<uint8_t*>(scales);
  const size_t used = static_cast<size_t>(num_scales(hidden, group)) * (kind == ScaleKind::f32 ? 4 : 1);
  if (used < scale_bytes) std::memset(scale_row + used, 0, scale_bytes - used);
  const StandardFloatMode mode;
  HWY_DYNAMIC_DISPATCH(quantize_any)
  (q, scale_row, static_cast<const uint8_t*>(src), type, static_cast<size_t>(hidden), kind, static_cast<size_t>(group));
}

// Uses vectors of words instead of atomic words, because the hardware accesses at least 8 bytes at a time. The fences
// correspond to a release and an acquire of all words.

void write_sentinel_row(void* row, const void* src, size_t bytes, const Sentinel& as) {
  size_t written = 0;
#if !SWITCHYARD_TSAN
  std::atomic_thread_fence(std::memory_order_release);
  written = HWY_DYNAMIC_DISPATCH(write_sentinel_lines)(static_cast<uint8_t*>(row), static_cast<const uint8_t*>(src), bytes / 8,
                                                       blank_word(as), substitute_word(as));
#endif
  write_sentinel_words(row, src, written, bytes, as);
}

bool row_has_arrived(const void* row, size_t bytes, const Sentinel& as) {
  const size_t words = (bytes + 7) / 8;
  if (words > 0 && !words_have_arrived(row, words - 1, words, as)) return false;  // usually the last word to arrive
  size_t seen = 0;
#if !SWITCHYARD_TSAN
  const size_t whole = words / 8 * 8;
  if (!HWY_DYNAMIC_DISPATCH(lines_have_arrived)(static_cast<const uint8_t*>(row), whole, blank_word(as))) return false;
  std::atomic_thread_fence(std::memory_order_acquire);
  seen = whole;
#endif
  return words_have_arrived(row, seen, words, as);
}

void flush_streams() { hwy::FlushStream(); }

bool set_streaming(bool enabled) { return streaming.exchange(enabled, std::memory_order_relaxed); }

std::vector<SimdTarget> simd_targets() {
  std::vector<SimdTarget> targets;
  for (const int64_t id : hwy::SupportedAndGeneratedTargets()) targets.push_back({id, hwy::TargetName(id)});
  return targets;
}

SimdTarget current_simd_target() {
  const int64_t id = HWY_DYNAMIC_DISPATCH(target_id)();
  return {id, hwy::TargetName(id)};
}

void force_simd_target(int64_t id) {
  hwy::SetSupportedTargetsForTest(id);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

}  // namespace switchyard::detail
