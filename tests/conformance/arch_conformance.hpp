// SPDX-License-Identifier: Apache-2.0
// The conformance suite of the warp ops, typed over the arch. A test program specializes ArchDriver for its arch, includes this
// header (which includes the arithmetic parts) and uses INSTANTIATE_TYPED_TEST_SUITE_P. Every row-op test runs once for each
// implementation variant, and fails if a variant available on this machine was not exercised.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "arch/ops.hpp"
#include "conformance/arch_driver.hpp"
#include "switchyard/types.hpp"

namespace switchyard::conformance {

/// Arch memory between two guard zones. Begins `offset` bytes after a 256-byte boundary.
template <class A>
class Guarded {
 public:
  explicit Guarded(size_t bytes, size_t offset = 0)
      : offset_(kGuard + offset), bytes_(bytes), total_(offset_ + bytes + kGuard) {
    base_ = ArchDriver<A>::allocate(total_);
    std::memset(base_, kFill, total_);
  }
  ~Guarded() { ArchDriver<A>::release(base_); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  std::byte* data() { return base_ + offset_; }
  size_t size() const { return bytes_; }
  void refill() { std::memset(base_, kFill, total_); }
  void randomize(std::mt19937& random) {
    for (size_t i = 0; i < bytes_; ++i) data()[i] = static_cast<std::byte>(random());
  }
  bool holds(const void* expected) { return bytes_ == 0 || std::memcmp(data(), expected, bytes_) == 0; }
  bool untouched() const { return all_fill(0, total_); }
  bool guards_intact() const { return all_fill(0, offset_) && all_fill(offset_ + bytes_, total_); }

 private:
  static constexpr size_t kGuard = 256;
  static constexpr int kFill = 0xA5;
  bool all_fill(size_t begin, size_t end) const {
    return std::all_of(base_ + begin, base_ + end, [](std::byte b) { return b == std::byte{kFill}; });
  }

  size_t offset_;
  size_t bytes_;
  size_t total_;
  std::byte* base_ = nullptr;
};

/// Sizes reduced to what the arch supports: for a reduced op set, bytes rounded down to a multiple of 16, and 32 places instead
/// of 64.
template <class A>
constexpr size_t whole(size_t bytes) {
  return ArchDriver<A>::kWholeRowsOnly ? bytes / 16 * 16 : bytes;
}
template <class A>
constexpr int64_t whole_elements(int64_t hidden, DType type) {
  const auto size = dtype_bytes(type, 1);
  return static_cast<int64_t>(whole<A>(static_cast<size_t>(hidden) * size) / size);
}
template <class A>
constexpr bool quantises_to_places(DType type, size_t offset, int64_t hidden) {
  return !ArchDriver<A>::kWholeRowsOnly || (type == DType::bf16 && offset % 16 == 0 && hidden % 8 == 0);
}
template <class A>
inline constexpr int kPlaces = ArchDriver<A>::kWholeRowsOnly ? 32 : kMaxRanks;

template <class A>
class ArchConformance : public ::testing::Test {
 protected:
  using Memory = Guarded<A>;
  static_assert(detail::Arch<A>);
  static_assert(Driver<ArchDriver<A>>);

  /// Runs `body` under every variant of the row ops.
  template <class F>
  void for_each_variant(F&& body) {
    ASSERT_FALSE(ArchDriver<A>::variants().empty());
    row_ops_tested_ = true;
    for (const std::string& variant : ArchDriver<A>::variants()) {
      SCOPED_TRACE("variant " + variant);
      ArchDriver<A>::use_variant(variant);
      body();
      exercised_.insert(ArchDriver<A>::variant_in_use());
      if (this->HasFatalFailure()) break;
    }
    ArchDriver<A>::use_variant("");
  }

  void TearDown() override {
    if (!row_ops_tested_) return;
    for (const std::string& variant : ArchDriver<A>::variants()) {
      EXPECT_EQ(exercised_.count(variant), 1u) << "never exercised: " << variant;
    }
  }

  ArchDriver<A> warp_;
  std::mt19937 random_{20240229};

 private:
  bool row_ops_tested_ = false;
  std::set<std::string> exercised_;
};

TYPED_TEST_SUITE_P(ArchConformance);

/// Critical row sizes: all small ones, and sizes on both sides of vector, line, piece and page boundaries.
inline std::vector<size_t> large_sizes() {
  return {511, 1024, 4095, 4096, 4097, 7168, 14336, 14352, 16383, 16384, 16400, 65536 + 48};
}

TYPED_TEST_P(ArchConformance, CopyMovesEverySmallSize) {
  this->for_each_variant([&] {
    typename TestFixture::Memory src(300, whole<TypeParam>(3));
    src.randomize(this->random_);
    for (size_t bytes = 0; bytes <= 300; ++bytes) {
      if (bytes != whole<TypeParam>(bytes)) continue;
      typename TestFixture::Memory dst(bytes, whole<TypeParam>(bytes % 17));
      this->warp_.copy(dst.data(), src.data(), bytes);
      this->warp_.settle();
      ASSERT_TRUE(dst.holds(src.data())) << bytes;
      ASSERT_TRUE(dst.guards_intact()) << bytes;
    }
  });
}

TYPED_TEST_P(ArchConformance, CopyMovesLargeRowsAtEveryAlignment) {
  this->for_each_variant([&] {
    for (const size_t size : large_sizes()) {
      const size_t bytes = whole<TypeParam>(size);
      for (size_t offset = 0; offset < 64; offset += size == 4096 ? 1 : 13) {
        typename TestFixture::Memory src(bytes, whole<TypeParam>(63 - offset));
        typename TestFixture::Memory dst(bytes, whole<TypeParam>(offset));
        src.randomize(this->random_);
        this->warp_.copy(dst.data(), src.data(), bytes);
        this->warp_.settle();
        ASSERT_TRUE(dst.holds(src.data())) << bytes << " at " << offset;
        ASSERT_TRUE(dst.guards_intact()) << bytes << " at " << offset;
      }
    }
  });
}

TYPED_TEST_P(ArchConformance, MulticastFillsEveryDestination) {
  this->for_each_variant([&] {
    for (const size_t size : {0, 1, 16, 100, 4096, 14336, 40000}) {
      const size_t bytes = whole<TypeParam>(size);
      for (int n = 0; n <= kPlaces<TypeParam>; n = n < 9 ? n + 1 : n * 2 - 8) {
        typename TestFixture::Memory src(bytes, 16);
        src.randomize(this->random_);
        std::vector<std::unique_ptr<typename TestFixture::Memory>> memory;
        std::vector<void*> dsts;
        for (int i = 0; i < n; ++i) {
          memory.push_back(std::make_unique<typename TestFixture::Memory>(bytes, static_cast<size_t>(i % 5) * 16));
          dsts.push_back(memory.back()->data());
        }
        this->warp_.multicast_to(dsts.data(), n, src.data(), bytes);
        std::fill(dsts.begin(), dsts.end(), nullptr);  // the caller may reuse the pointers
        this->warp_.settle();
        for (int i = 0; i < n; ++i) {
          ASSERT_TRUE(memory[static_cast<size_t>(i)]->holds(src.data())) << bytes << " bytes, " << i << " of " << n;
          ASSERT_TRUE(memory[static_cast<size_t>(i)]->guards_intact()) << bytes << " bytes, " << i << " of " << n;
        }
      }
    }
  });
}

TYPED_TEST_P(ArchConformance, MulticastReachesTheLargestGroup) {
  this->for_each_variant([&] {
    typename TestFixture::Memory src(4112);
    src.randomize(this->random_);
    typename TestFixture::Memory dst(4112 * static_cast<size_t>(kPlaces<TypeParam>));
    std::vector<void*> dsts;
    for (int i = 0; i < kPlaces<TypeParam>; ++i) dsts.push_back(dst.data() + 4112 * static_cast<size_t>(i));
    this->warp_.multicast_to(dsts.data(), kPlaces<TypeParam>, src.data(), 4112);
    this->warp_.settle();
    for (int i = 0; i < kPlaces<TypeParam>; ++i) ASSERT_EQ(std::memcmp(dsts[static_cast<size_t>(i)], src.data(), 4112), 0) << i;
    EXPECT_TRUE(dst.guards_intact());
  });
}

TYPED_TEST_P(ArchConformance, MulticastToSkipsNoPlace) {
  constexpr int kMax = kPlaces<TypeParam>;
  this->for_each_variant([&] {
    typename TestFixture::Memory src(4112);
    src.randomize(this->random_);
    for (const uint64_t places :
         {uint64_t{0}, uint64_t{1}, uint64_t{0b1010}, uint64_t{1} << (kMax - 1), ~uint64_t{0}, this->random_()}) {
      typename TestFixture::Memory dst(4112 * kMax);
      std::vector<std::byte> before(dst.data(), dst.data() + 4112 * kMax);
      std::vector<void*> dsts;
      for (size_t i = 0; i < kMax; ++i) dsts.push_back(places >> i & 1 ? dst.data() + 4112 * i : nullptr);
      const auto expect = [&](const std::byte* sent) {
        this->warp_.settle();
        for (size_t i = 0; i < kMax; ++i) {
          const std::byte* want = places >> i & 1 ? sent : before.data() + 4112 * i;
          ASSERT_EQ(std::memcmp(dst.data() + 4112 * i, want, 4112), 0) << i << " of " << std::hex << places;
        }
      };
      this->warp_.multicast_to(dsts.data(), kMax, src.data(), 4112);
      expect(src.data());
      src.randomize(this->random_);
      this->warp_.multicast_fetched(dsts.data(), kMax, src.data(), 4112);
      expect(src.data());
      src.randomize(this->random_);
      this->warp_.multicast_fetched_words(dsts.data(), kMax, src.data(), 4112);
      expect(src.data());
      EXPECT_TRUE(dst.guards_intact());
    }
  });
}

TYPED_TEST_P(ArchConformance, FillZeroClearsExactlyItsRange) {
  this->for_each_variant([&] {
    std::vector<size_t> sizes = large_sizes();
    for (size_t bytes = 0; bytes <= 300; bytes += 7) sizes.push_back(bytes);
    for (const size_t bytes : sizes) {
      const std::vector<std::byte> zero(bytes);
      for (const size_t offset : {0, 1, 16, 47}) {
        typename TestFixture::Memory dst(bytes, offset);
        this->warp_.fill_zero(dst.data(), bytes);
        this->warp_.settle();
        ASSERT_TRUE(dst.holds(zero.data())) << bytes;
        ASSERT_TRUE(dst.guards_intact()) << bytes;
      }
    }
  });
}

TYPED_TEST_P(ArchConformance, SourcesMayChangeOnceDrained) {
  this->for_each_variant([&] {
    for (const size_t size : {64, 5000, 14336}) {
      const size_t bytes = whole<TypeParam>(size);
      typename TestFixture::Memory src(bytes);
      typename TestFixture::Memory first(bytes);
      typename TestFixture::Memory second(bytes);
      src.randomize(this->random_);
      const std::vector<std::byte> old(src.data(), src.data() + bytes);
      this->warp_.copy(first.data(), src.data(), bytes);
      void* const dsts[] = {second.data()};
      this->warp_.multicast_to(dsts, 1, src.data(), bytes);
      this->warp_.drain_sources();
      std::memset(src.data(), 0, bytes);
      this->warp_.settle();
      EXPECT_TRUE(first.holds(old.data())) << bytes;
      EXPECT_TRUE(second.holds(old.data())) << bytes;
    }
  });
}

TYPED_TEST_P(ArchConformance, ScratchStagesRowsUntilDrained) {
  this->for_each_variant([&] {
    constexpr size_t kBytes = 14336;
    std::byte* scratch = this->warp_.scratch();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(scratch) % 64, 0u);
    typename TestFixture::Memory src(4 * kBytes);
    typename TestFixture::Memory dst(4 * kBytes);
    src.randomize(this->random_);
    for (size_t row = 0; row < 4; ++row) {
      this->warp_.copy(scratch, src.data() + row * kBytes, kBytes);
      this->warp_.settle();
      this->warp_.copy(dst.data() + row * kBytes, scratch, kBytes);
      this->warp_.drain_sources();
    }
    this->warp_.settle();
    EXPECT_TRUE(dst.holds(src.data()));
    EXPECT_TRUE(dst.guards_intact());
  });
}

TYPED_TEST_P(ArchConformance, SettleWithNothingPendingIsHarmless) {
  this->warp_.settle();
  this->warp_.drain_sources();
  this->warp_.settle();
}

// ---- Flags ------------------------------

TYPED_TEST_P(ArchConformance, FlagsStoreLoadAndAdd) {
  typename TestFixture::Memory memory(4 * 64);
  std::memset(memory.data(), 0, memory.size());
  auto* flags = reinterpret_cast<uint64_t*>(memory.data());
  EXPECT_EQ(this->warp_.load_acquire(&flags[0]), 0u);
  this->warp_.store_release(&flags[0], detail::flag_word(7, 12345));
  EXPECT_EQ(this->warp_.load_acquire(&flags[0]), detail::flag_word(7, 12345));
  EXPECT_EQ(flags[1], 0u);
  EXPECT_EQ(this->warp_.fetch_add(&flags[8], 5), 0u);
  EXPECT_EQ(this->warp_.fetch_add(&flags[8], ~uint64_t{0}), 5u);
  EXPECT_EQ(this->warp_.load_acquire(&flags[8]), 4u);
  EXPECT_EQ(this->warp_.fetch_add(&flags[8], uint64_t{1} << 40), 4u);
  EXPECT_EQ(this->warp_.load_acquire(&flags[8]), (uint64_t{1} << 40) + 4);
  EXPECT_TRUE(memory.guards_intact());
}

TYPED_TEST_P(ArchConformance, TakeGivesTheOldValue) {
  typename TestFixture::Memory memory(2 * 64);
  std::memset(memory.data(), 0, memory.size());
  auto* counter = reinterpret_cast<uint64_t*>(memory.data()) + 1;
  EXPECT_EQ(this->warp_.take(counter, 3), 0u);
  EXPECT_EQ(this->warp_.take(counter, uint64_t{1} << 33), 3u);
  EXPECT_EQ(this->warp_.take(counter, 1), (uint64_t{1} << 33) + 3);
  EXPECT_EQ(counter[-1], 0u);
  EXPECT_EQ(counter[0], (uint64_t{1} << 33) + 4);
  EXPECT_EQ(counter[1], 0u);
  EXPECT_TRUE(memory.guards_intact());
}

TYPED_TEST_P(ArchConformance, PostedWordsAreSeen) {
  typename TestFixture::Memory memory(3 * 8);
  std::memset(memory.data(), 0, memory.size());
  auto* words = reinterpret_cast<uint64_t*>(memory.data());
  for (const uint64_t value : {detail::flag_word(7, 5), ~uint64_t{0}, uint64_t{0}}) {
    this->warp_.post(words + 1, value);
    EXPECT_EQ(words[1], value);
    EXPECT_EQ(this->warp_.peek(words + 1), value);
  }
  EXPECT_EQ(words[0], 0u);
  EXPECT_EQ(words[2], 0u);
  EXPECT_TRUE(memory.guards_intact());
}

TYPED_TEST_P(ArchConformance, PublishReachesExactlyItsFlags) {
  for (const int n : {0, 1, 2, 31, 32, 33, kMaxRanks}) {
    typename TestFixture::Memory memory(static_cast<size_t>(2 * kMaxRanks) * 8);
    std::memset(memory.data(), 0, memory.size());
    auto* words = reinterpret_cast<uint64_t*>(memory.data());
    std::vector<uint64_t*> flags;
    for (int i = 0; i < n; ++i) flags.push_back(&words[2 * i]);
    this->warp_.publish_to(flags.data(), n, detail::flag_word(3, 9));
    for (int i = 0; i < kMaxRanks; ++i) {
      EXPECT_EQ(words[2 * i], i < n ? detail::flag_word(3, 9) : 0u) << i << " of " << n;
      EXPECT_EQ(words[2 * i + 1], 0u) << i << " of " << n;
    }
    for (size_t i = 0; i < flags.size(); i += 3) flags[i] = nullptr;
    for (const uint64_t again : {detail::flag_word(4, 8), detail::flag_word(5, 7)}) {
      if (detail::flag_epoch(again) == 4)
        this->warp_.publish_to(flags.data(), n, again);
      else
        this->warp_.publish_entry(flags.data(), n, again);
      for (int i = 0; i < kMaxRanks; ++i) {
        const uint64_t want = i >= n ? 0 : i % 3 == 0 ? detail::flag_word(3, 9) : again;
        EXPECT_EQ(words[2 * i], want) << i << " of " << n;
        EXPECT_EQ(words[2 * i + 1], 0u) << i << " of " << n;
      }
    }
  }
}

TYPED_TEST_P(ArchConformance, PollNamesTheFirstFlagThatLags) {
  typename TestFixture::Memory memory(static_cast<size_t>(kMaxRanks) * 8);
  auto* words = reinterpret_cast<uint64_t*>(memory.data());
  std::vector<const uint64_t*> flags;
  for (int i = 0; i < kMaxRanks; ++i) flags.push_back(&words[i]);
  const uint64_t expected = detail::flag_word(5);
  const auto poll = [&](int n) { return this->warp_.poll_from(flags.data(), n, expected); };
  for (const int n : {1, 2, 3, 31, 32, 33, kMaxRanks}) {
    for (int i = 0; i < kMaxRanks; ++i) words[i] = i < n ? detail::flag_word(5, static_cast<uint64_t>(i)) : 0;
    EXPECT_EQ(poll(n), -1) << n;
    for (int late = 0; late < n; ++late) {
      const uint64_t kept = words[late];
      words[late] = detail::flag_word(4, 99);
      EXPECT_EQ(poll(n), late) << n;
      const uint64_t last_kept = words[n - 1];
      words[n - 1] = 0;
      EXPECT_EQ(poll(n), late) << "the lowest index wins; n = " << n;
      words[n - 1] = last_kept;
      words[late] = kept;
    }
    words[n / 2] = detail::flag_word(6, 0);  // the flag has already passed this epoch
    EXPECT_EQ(poll(n), -1) << n;
  }
  EXPECT_EQ(poll(0), -1);
}

TYPED_TEST_P(ArchConformance, FlagsSurviveTheWrapOfTheEpoch) {
  typename TestFixture::Memory memory(8);
  auto* word = reinterpret_cast<uint64_t*>(memory.data());
  const uint64_t* const flags[] = {word};
  constexpr uint64_t kLastEpoch = (uint64_t{1} << 40) - 1;
  for (uint64_t step = 0; step < 12; ++step) {
    const uint64_t epoch = kLastEpoch - 5 + step;  // wraps to 0 after five steps: flag_word drops the higher bits
    const uint64_t value = (uint64_t{1} << detail::kFlagValueBits) - 1 - step;
    EXPECT_EQ(detail::flag_epoch(detail::flag_word(epoch, value)), epoch & kLastEpoch);
    EXPECT_EQ(detail::flag_value(detail::flag_word(epoch, value)), value);
    this->warp_.store_release(word, detail::flag_word(epoch - 1, value));
    EXPECT_EQ(this->warp_.poll_from(flags, 1, detail::flag_word(epoch)), 0) << step;
    this->warp_.store_release(word, detail::flag_word(epoch));
    EXPECT_EQ(this->warp_.poll_from(flags, 1, detail::flag_word(epoch)), -1) << step;
    this->warp_.store_release(word, detail::flag_word(epoch + 1));
    EXPECT_EQ(this->warp_.poll_from(flags, 1, detail::flag_word(epoch)), -1) << step;
  }
}

TYPED_TEST_P(ArchConformance, LanesCoverEachIndexOnce) {
  for (const int n : {0, 1, 2, 31, 32, 33, 1000})
    EXPECT_EQ(this->warp_.count_lanes(n), std::vector<int>(static_cast<size_t>(n), 1)) << n;
}

TYPED_TEST_P(ArchConformance, TheClockNeverRunsBackwards) {
  uint64_t last = this->warp_.now_ns();
  for (int i = 0; i < 100; ++i) {
    const uint64_t now = this->warp_.now_ns();
    EXPECT_GE(now, last);
    last = now;
  }
}

}  // namespace switchyard::conformance

#include "conformance/arithmetic_conformance.hpp"
#include "conformance/ops_conformance.hpp"
#include "conformance/sentinel_conformance.hpp"

namespace switchyard::conformance {

REGISTER_TYPED_TEST_SUITE_P(ArchConformance, CopyMovesEverySmallSize, CopyMovesLargeRowsAtEveryAlignment,
                            MulticastFillsEveryDestination, MulticastReachesTheLargestGroup, MulticastToSkipsNoPlace,
                            LanesWhereGivesABitPerPlace, LanesUnionIsTheOrOfAllWords, CountWhereCountsTrueAnswers,
                            LocateFindsEveryIndexOnce, FillZeroClearsExactlyItsRange, SourcesMayChangeOnceDrained,
                            ScratchStagesRowsUntilDrained, SettleWithNothingPendingIsHarmless, FlagsStoreLoadAndAdd,
                            TakeGivesTheOldValue, PostedWordsAreSeen, PublishReachesExactlyItsFlags,
                            PollNamesTheFirstFlagThatLags, FlagsSurviveTheWrapOfTheEpoch, LanesCoverEachIndexOnce,
                            TheClockNeverRunsBackwards, ReduceMatchesTheReference, ReduceFromPlacesIsTheSameSum,
                            MapTurnsEveryElement, SentinelRowsHoldNoZeros, RowsThatHaveComeAreSummed, BlankRowsHaveNotCome,
                            ReduceRoundsTiesToEven, ReduceAddsInOrderWithoutFusing, ReduceKeepsEveryPattern, ReduceOfMinusZero,
                            LocateManyFindsEveryIndexOnce, StatisticsAreCounted, OutOfLineCodeRuns, PrefetchChangesNothing,
                            BlocksMeet, PausesEnd, ReduceKeepsNan, ReduceOfNothing, ReduceArgumentsAreCopied,
                            QuantizeMatchesTheReference, QuantizeRoundsTiesToEven, QuantizeSpecialGroups,
                            QuantizeScaleBoundaries);

}  // namespace switchyard::conformance
