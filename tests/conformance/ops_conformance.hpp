// SPDX-License-Identifier: Apache-2.0
// Conformance tests for ops that neither move rows nor signal: lanes, statistics, out-of-line code, hints, and the warp's
// block. Included by arch_conformance.hpp only.
#pragma once

#include "conformance/arch_conformance.hpp"

namespace switchyard::conformance {

TYPED_TEST_P(ArchConformance, LanesWhereGivesABitPerPlace) {
  for (const size_t n : {0, 1, 31, 32, 33, 64}) {
    if (n > kPlaces<TypeParam>) break;
    std::vector<bool> which(n);
    uint64_t want = 0;
    for (size_t i = 0; i < n; ++i) {
      which[i] = this->random_() % 2 != 0;
      want |= static_cast<uint64_t>(which[i]) << i;
    }
    EXPECT_EQ(this->warp_.lanes_where(which), want) << n;
  }
}

TYPED_TEST_P(ArchConformance, LanesUnionIsTheOrOfAllWords) {
  for (const size_t n : {0, 1, 31, 32, 33, 64, 100}) {
    if (ArchDriver<TypeParam>::kWholeRowsOnly && n > 32) break;
    std::vector<uint64_t> of(n);
    uint64_t want = 0;
    for (uint64_t& word : of) {
      word = uint64_t{1} << this->random_() % kPlaces<TypeParam>;
      want |= word;
    }
    EXPECT_EQ(this->warp_.lanes_union(of), want) << n;
  }
}

TYPED_TEST_P(ArchConformance, CountWhereCountsTrueAnswers) {
  for (const int n : {0, 1, 31, 32, 33, 64, 65, 1000, 4097}) {
    std::vector<bool> which(static_cast<size_t>(n));
    int64_t want = 0;
    for (size_t i = 0; i < which.size(); ++i) {
      which[i] = this->random_() % 3 == 0;
      want += which[i] ? 1 : 0;
    }
    EXPECT_EQ(this->warp_.count_where(which), want) << n;
  }
}

TYPED_TEST_P(ArchConformance, LocateFindsEveryIndexOnce) {
  for (const int n : {0, 1, 2, 31, 32, 33, 64, 100}) {
    std::vector<int64_t> lengths(static_cast<size_t>(n));
    for (int64_t& length : lengths) length = this->random_() % 3 == 0 ? 0 : static_cast<int64_t>(this->random_() % 5);
    if (n > 1) lengths[static_cast<size_t>(n / 2)] = int64_t{1} << 33;  // beyond 32 bits
    int64_t index = 0;
    for (int s = 0; s < n; ++s) {
      const int64_t length = lengths[static_cast<size_t>(s)];
      for (const int64_t offset : {int64_t{0}, int64_t{1}, length - 1}) {
        if (offset < 0 || offset >= length) continue;
        const detail::Located found = this->warp_.locate(index + offset, lengths);
        EXPECT_EQ(found.segment, s) << n << ", " << index + offset;
        EXPECT_EQ(found.offset, offset) << n << ", " << index + offset;
      }
      index += length;
    }
    EXPECT_EQ(this->warp_.locate(index, lengths).segment, n);
    EXPECT_EQ(this->warp_.locate(index + 7, lengths).segment, n);
    if (!ArchDriver<TypeParam>::kWholeRowsOnly) {
      EXPECT_EQ(this->warp_.locate(index + 7, lengths).offset, 7);
    }
  }
}

// Up to 300 segments, some of them empty, with a total length below 2^32.
TYPED_TEST_P(ArchConformance, LocateManyFindsEveryIndexOnce) {
  for (const int n : {0, 1, 2, 3, 31, 32, 33, 63, 64, 65, 127, 128, 129, 300}) {
    std::vector<int64_t> lengths(static_cast<size_t>(n));
    for (int64_t& length : lengths) length = this->random_() % 3 == 0 ? 0 : static_cast<int64_t>(this->random_() % 5);
    if (n > 1) lengths[static_cast<size_t>(n / 2)] = 0xffff0000;
    int64_t index = 0;
    for (int s = 0; s < n; ++s) {
      const int64_t length = lengths[static_cast<size_t>(s)];
      for (const int64_t offset : {int64_t{0}, int64_t{1}, length - 1}) {
        if (offset < 0 || offset >= length) continue;
        const detail::Located found = this->warp_.locate_many(index + offset, lengths);
        EXPECT_EQ(found.segment, s) << n << ", " << index + offset;
        EXPECT_EQ(found.offset, offset) << n << ", " << index + offset;
      }
      index += length;
    }
    EXPECT_EQ(this->warp_.locate_many(index, lengths).segment, n);
    EXPECT_EQ(this->warp_.locate_many(index + 7, lengths).segment, n);
  }
}

TYPED_TEST_P(ArchConformance, StatisticsAreCounted) {
  typename TestFixture::Memory memory(4 * 8);
  std::memset(memory.data(), 0, memory.size());
  auto* const words = reinterpret_cast<uint64_t*>(memory.data());
  uint64_t total = 0, max = 0;
  for (const uint64_t value : {uint64_t{0}, uint64_t{3}, uint64_t{1} << 40, uint64_t{7}, ~uint64_t{0}, uint64_t{1}}) {
    this->warp_.count(words + 1, value);
    this->warp_.count_max(words + 2, value);
    this->warp_.settle();
    total += value;
    max = std::max(max, value);
    EXPECT_EQ(words[1], total) << "after " << value;
    EXPECT_EQ(words[2], max) << "after " << value;
  }
  EXPECT_EQ(words[0], 0u);
  EXPECT_EQ(words[3], 0u);
  EXPECT_TRUE(memory.guards_intact());
}

// The function is called once with its arguments, and its result is returned.
TYPED_TEST_P(ArchConformance, OutOfLineCodeRuns) {
  typename TestFixture::Memory memory(3 * 8);
  std::memset(memory.data(), 0, memory.size());
  auto* const words = reinterpret_cast<uint64_t*>(memory.data());
  for (const uint64_t value : {uint64_t{1}, uint64_t{2}, ~uint64_t{0}, uint64_t{1} << 63}) {
    EXPECT_EQ(this->warp_.out_of_line(words, value), value % 2 != 0);
    EXPECT_EQ(words[0], value);
    EXPECT_EQ(this->warp_.out_of_line_if_cheap(words + 2, value), value % 2 != 0);
    EXPECT_EQ(words[2], value);
    EXPECT_EQ(words[1], 0u);
  }
  EXPECT_TRUE(memory.guards_intact());
}

// Rows of any size at any address. The copy has the current content of the row, even if it has changed since the prefetch.
TYPED_TEST_P(ArchConformance, PrefetchChangesNothing) {
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{127}, size_t{4112}, size_t{65536}}) {
    for (const size_t offset : {0, 1, 16, 63}) {
      typename TestFixture::Memory src(bytes, offset);
      src.randomize(this->random_);
      const std::vector<std::byte> before(src.data(), src.data() + bytes);
      this->warp_.prefetch(src.data(), bytes);
      this->warp_.settle();
      ASSERT_TRUE(src.holds(before.data()) && src.guards_intact()) << bytes << " at " << offset;
      if (bytes != whole<TypeParam>(bytes) || offset != whole<TypeParam>(offset)) continue;
      typename TestFixture::Memory dst(bytes);
      src.randomize(this->random_);
      this->warp_.copy(dst.data(), src.data(), bytes);
      this->warp_.settle();
      ASSERT_TRUE(dst.holds(src.data()) && dst.guards_intact()) << bytes << " at " << offset;
    }
  }
}

// In every round, all warps of a block read after block_sync what the block's warps wrote before it.
TYPED_TEST_P(ArchConformance, BlocksMeet) {
  constexpr int kRounds = 50;
  for (const int warps : {1, 2, 3, 8}) {
    const std::vector<uint64_t> sums = this->warp_.block_sums(warps, kRounds);
    ASSERT_EQ(sums.size(), static_cast<size_t>(warps * kRounds));
    for (int round = 0; round < kRounds; ++round) {
      uint64_t want = 0;
      for (int w = 0; w < warps; ++w) want += block_word(w, round);
      for (int w = 0; w < warps; ++w)
        ASSERT_EQ(sums[static_cast<size_t>(round * warps + w)], want) << "round " << round << ", warp " << w << " of " << warps;
    }
  }
}

TYPED_TEST_P(ArchConformance, PausesEnd) {
  for (const int64_t polls : {int64_t{0}, int64_t{1}, int64_t{63}, int64_t{65}, int64_t{1025}, int64_t{1} << 40})
    this->warp_.pause(polls);
}

}  // namespace switchyard::conformance
