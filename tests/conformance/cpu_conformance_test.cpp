// SPDX-License-Identifier: Apache-2.0
// Runs the conformance suite for both CPU archs, and tests specific to the CPU: instruction sets, streaming stores, the float
// mode of the calling thread, and the queue of the deferred arch.
#include <gtest/gtest.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "conformance/arch_conformance.hpp"
#include "conformance/cpu_driver.hpp"

namespace switchyard::conformance {

using CpuArchs = ::testing::Types<detail::Cpu, detail::CpuDeferred>;
struct CpuArchNames {
  template <class A>
  static std::string GetName(int) {  // NOLINT(readability-identifier-naming): GoogleTest calls it
    return std::is_same_v<A, detail::Cpu> ? "Cpu" : "CpuDeferred";
  }
};
INSTANTIATE_TYPED_TEST_SUITE_P(Cpu, ArchConformance, CpuArchs, CpuArchNames);

using Driver0 = ArchDriver<detail::Cpu>;
using DeferredDriver = ArchDriver<detail::CpuDeferred>;

#if defined(__x86_64__)
// A build that lacks an instruction set, because of its flags or a library that distrusts the compiler, must not pass by
// testing less.
TEST(SimdTargets, IncludeWhatTheMachineOffers) {
  const std::vector<std::string> names = Driver0::variants();
  const auto has = [&](const char* name) { return std::count(names.begin(), names.end(), name) == 1; };
  EXPECT_EQ(has("AVX2"), __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"));
  EXPECT_EQ(has("AVX3"), __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"));
  EXPECT_EQ(has("SSE4"), __builtin_cpu_supports("sse4.1") != 0);
}
#endif

TEST(SimdTargets, EachIsReallyChosen) {
  ASSERT_GE(Driver0::variants().size(), 1u);
  for (const std::string& name : Driver0::variants()) {
    Driver0::use_variant(name);
    EXPECT_EQ(Driver0::variant_in_use(), name);
  }
  Driver0::use_variant("");
  EXPECT_EQ(Driver0::variant_in_use(), Driver0::variants().front());
}

/// Compares every mover and the reducer with and without streaming stores, for all line alignments.
TEST(Streaming, ChangesNoByte) {
  constexpr size_t kBytes = 14336 + 32;
  std::mt19937 random(3);
  Driver0 warp;
  for (const std::string& variant : Driver0::variants()) {
    SCOPED_TRACE(variant);
    Driver0::use_variant(variant);
    for (size_t offset = 0; offset < 64; offset += 2) {
      Guarded<detail::Cpu> src(kBytes, 8);
      src.randomize(random);
      std::vector<std::byte> results[2];
      for (const bool streaming : {false, true}) {
        const bool before = detail::set_streaming(streaming);
        Guarded<detail::Cpu> out(3 * kBytes, offset);
        void* const dsts[] = {out.data(), out.data() + kBytes};
        warp.multicast_to(dsts, 2, src.data(), kBytes);
        const void* const rows[] = {src.data(), src.data()};
        const float weights[] = {0.3f, 0.6f};
        warp.reduce_rows({out.data() + 2 * kBytes, rows, weights, 2, {}, DType::f32, kBytes / 4});
        warp.settle();
        results[streaming ? 1 : 0].assign(out.data(), out.data() + 3 * kBytes);
        EXPECT_TRUE(out.guards_intact()) << offset;
        warp.fill_zero(out.data(), out.size());
        warp.settle();
        EXPECT_TRUE(std::all_of(out.data(), out.data() + out.size(), [](std::byte b) { return b == std::byte{0}; })) << offset;
        EXPECT_TRUE(out.guards_intact()) << offset;
        detail::set_streaming(before);
      }
      EXPECT_EQ(std::memcmp(results[0].data(), src.data(), kBytes), 0) << offset;
      // The sums may contain NaNs of any pattern, but both variants execute the same instructions on the same data.
      EXPECT_EQ(results[0], results[1]) << offset;
    }
  }
  Driver0::use_variant("");
}

TEST(Streaming, IsOffUnderThreadSanitizer) {
  Guarded<detail::Cpu> src(1 << 16);
  Guarded<detail::Cpu> dst(1 << 16);
  const bool streamed = detail::copy_row(dst.data(), src.data(), src.size());
  if (streamed) detail::flush_streams();
#if defined(__SANITIZE_THREAD__)
  EXPECT_FALSE(streamed);
#else
  EXPECT_TRUE(streamed);
  EXPECT_FALSE(detail::copy_row(dst.data(), src.data(), 1024)) << "small rows stay in the caches";
#endif
}

#if defined(__x86_64__)
TEST(FloatMode, OfTheCallerChangesNoBitAndIsKept) {
  std::mt19937 random(11);
  Driver0 warp;
  for (const std::string& variant : Driver0::variants()) {
    SCOPED_TRACE(variant);
    Driver0::use_variant(variant);
    for (const DType type : kRowTypes) {
      Reduction<detail::Cpu> work(type, 777, 3, 1, true, 0);
      work.fill(Content::tiny, random);
      const std::vector<std::byte> want = work.expected();
      const unsigned saved = _mm_getcsr();
      const unsigned hostile = (saved & 0x1F80u) | 0x8040u | 0x6000u;  // flush to zero, denormals are zero, truncate
      _mm_setcsr(hostile);
      warp.reduce_rows(work.spec());
      warp.settle();
      const unsigned after = _mm_getcsr();
      _mm_setcsr(saved);
      EXPECT_EQ(after & 0xFFC0u, hostile & 0xFFC0u);
      EXPECT_TRUE(work.matches(want));
    }
    Guarded<detail::Cpu> src(128 * 4);
    Guarded<detail::Cpu> q(128);
    Guarded<detail::Cpu> scales(16);
    for (int64_t i = 0; i < 128; ++i) reference_store(src.data(), DType::f32, i, 1e-38f / static_cast<float>(i + 1));
    std::vector<float> values(128);
    std::memcpy(values.data(), src.data(), 512);
    const ReferenceGroup want = reference_quantize(values.data(), 128, ScaleKind::f32);
    ASSERT_NE(want.scale, 0.0f);
    const unsigned saved = _mm_getcsr();
    _mm_setcsr((saved & 0x1F80u) | 0x8040u | 0x6000u);
    warp.quantize_row(reinterpret_cast<uint8_t*>(q.data()), scales.data(), src.data(), DType::f32, 128, ScaleKind::f32);
    _mm_setcsr(saved);
    EXPECT_TRUE(q.holds(want.codes.data()));
    EXPECT_EQ(reference_load(scales.data(), DType::f32, 0), want.scale);
  }
  Driver0::use_variant("");
}
#endif

// ---- The deferred arch: no early effects, no order ------------------------------

TEST(CpuDeferred, WritesNothingBeforeSettle) {
  DeferredDriver warp;
  Guarded<detail::Cpu> src(256);
  Guarded<detail::Cpu> dst(4 * 256);
  std::memset(src.data(), 1, src.size());
  warp.copy(dst.data(), src.data(), 256);
  void* const dsts[] = {dst.data() + 256};
  warp.multicast_to(dsts, 1, src.data(), 256);
  warp.fill_zero(dst.data() + 512, 256);
  const void* const rows[] = {src.data()};
  warp.reduce_rows({dst.data() + 768, rows, nullptr, 1, {}, DType::f32, 64});
  EXPECT_TRUE(dst.untouched());
  EXPECT_EQ(warp.warp.pending().size(), 4u);
  std::memset(src.data(), 2, src.size());  // not drained: the late reader must see this
  warp.settle();
  EXPECT_EQ(warp.warp.pending().size(), 0u);
  EXPECT_EQ(dst.data()[0], std::byte{2});
  EXPECT_EQ(dst.data()[256], std::byte{2});
  EXPECT_EQ(dst.data()[512], std::byte{0});
  EXPECT_EQ(dst.data()[768], std::byte{2});
}

TEST(CpuDeferred, BreaksCodeThatReliesOnAnOrder) {
  DeferredDriver warp;
  Guarded<detail::Cpu> memory(3 * 64);
  std::byte* a = memory.data();
  std::memset(a, 1, 64);
  warp.copy(a + 64, a, 64);
  warp.copy(a + 128, a + 64, 64);  // wrong: reads data that is only pending
  warp.settle();
  EXPECT_NE(a[128], std::byte{1});
}

TEST(CpuDeferred, DropsTheQueueOnDemand) {
  DeferredDriver warp;
  Guarded<detail::Cpu> memory(128);
  warp.copy(memory.data(), memory.data() + 64, 64);
  warp.warp.pending().discard();
  warp.settle();
  EXPECT_TRUE(memory.untouched());
}

}  // namespace switchyard::conformance
