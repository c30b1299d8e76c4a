// SPDX-License-Identifier: Apache-2.0
// Conformance tests for sentinel rows. Included by arch_conformance.hpp only.
#pragma once

#include "conformance/places_conformance.hpp"

namespace switchyard::conformance {

/// Size of the sentinel row for `bytes` bytes, which consists of whole 8-byte words.
inline size_t sentinel_bytes(size_t bytes) { return (bytes + 7) / 8 * 8; }

/// Whether `row` is a sentinel form of `want`: equal except for the signs of zeros, and without a zero word.
inline ::testing::AssertionResult is_sentinel_form_of(const std::byte* row, const std::byte* want, DType type, int64_t hidden) {
  const size_t bytes = dtype_bytes(type, hidden), word = 8;
  for (size_t at = 0; at < bytes; at += word) {
    uint64_t here = 0;
    std::memcpy(&here, row + at, word);
    if (here == 0) return ::testing::AssertionFailure() << "zeros at byte " << at;
  }
  for (int64_t c = 0; c < hidden; ++c) {
    const float x = reference_load(row, type, c), y = reference_load(want, type, c);
    if (!same_element(row, want, type, c) && !(x == 0 && y == 0))
      return ::testing::AssertionFailure() << "column " << c << ": " << x << ", expected " << y;
  }
  return ::testing::AssertionSuccess();
}

/// Rows with many zeros, like those from experts that clip.
template <class Random>
void fill_with_zeros(std::byte* row, DType type, int64_t hidden, Random& random) {
  fill_row(row, type, hidden, static_cast<Content>(0), random);
  for (int64_t c = 0; c < hidden; ++c)
    if (random() % 3 != 0) reference_store(row, type, c, random() % 8 == 0 ? -0.0f : 0.0f);
}

TYPED_TEST_P(ArchConformance, SentinelRowsHoldNoZeros) {
  this->for_each_variant([&] {
    for (const DType type : kRowTypes) {
      for (const int64_t columns : {1, 2, 3, 7, 8, 129, 256, 1000, 1024}) {
        for (const size_t misalignment : {0, 16, 4, 62}) {
          const int64_t hidden = whole_elements<TypeParam>(columns, type);
          const size_t bytes = dtype_bytes(type, hidden);
          Guarded<TypeParam> src(bytes, element_offset<TypeParam>(whole<TypeParam>(misalignment), dtype_bytes(type, 1)));
          Guarded<TypeParam> one(sentinel_bytes(bytes)), two(sentinel_bytes(bytes)), summed(sentinel_bytes(bytes)),
              mapped(sentinel_bytes(bytes));
          for (auto* row : {&one, &two, &summed, &mapped}) std::memset(row->data(), 0, row->size());
          fill_with_zeros(src.data(), type, hidden, this->random_);
          void* const dsts[] = {one.data(), nullptr, two.data()};
          this->warp_.multicast_sentinel(dsts, 3, src.data(), bytes);
          const void* const rows[] = {src.data()};
          this->warp_.reduce_rows_from(
              detail::ReduceSpec{summed.data(), rows, nullptr, 1, {nullptr, nullptr}, type, hidden, true}, {0});
          std::vector<std::byte> want(bytes);
          for (int64_t c = 0; c < hidden; ++c) {
            const volatile float product = reference_load(src.data(), type, c) * 3;
            reference_store(want.data(), type, c, product + static_cast<float>(c % 64));
          }
          this->warp_.map_sentinel(mapped.data(), src.data(), type, hidden);
          this->warp_.settle();
          for (auto* row : {&one, &two, &summed})
            ASSERT_TRUE(is_sentinel_form_of(row->data(), src.data(), type, hidden)) << "hidden " << hidden;
          ASSERT_TRUE(is_sentinel_form_of(mapped.data(), want.data(), type, hidden)) << "hidden " << hidden;
          for (auto* row : {&one, &two, &summed, &mapped}) ASSERT_TRUE(row->guards_intact());
        }
      }
    }
  });
}

/// n rows with many zeros, memory for their sentinel forms, and weights. With three or more rows, one row is given twice; with
/// five or more, one place is empty.
template <class A>
struct SentinelRowsCase {
  std::vector<std::unique_ptr<Guarded<A>>> given, sentinels;
  std::vector<const void*> plain, rows;  ///< by place
  std::vector<const void*> there;        ///< the non-null rows of `plain`
  std::vector<float> weights, their_weights;
  int late;  ///< place of the row that arrives last

  template <class Random>
  SentinelRowsCase(int n, DType type, int64_t hidden, Random& random) : late(n == 3 ? 1 : n - 1) {
    const size_t bytes = dtype_bytes(type, hidden);
    for (int i = 0; i < n; ++i) {
      given.push_back(std::make_unique<Guarded<A>>(bytes));
      sentinels.push_back(std::make_unique<Guarded<A>>(sentinel_bytes(bytes)));
      fill_with_zeros(given.back()->data(), type, hidden, random);
      std::memset(sentinels.back()->data(), 0, sentinels.back()->size());
      plain.push_back(given.back()->data());
      rows.push_back(sentinels.back()->data());
      weights.push_back(static_cast<float>(i % 5) - 2.0f);
    }
    if (n > 2) plain[2] = plain[0], rows[2] = rows[0];
    if (n > 4) plain[3] = rows[3] = nullptr;
    for (size_t i = 0; i < plain.size(); ++i) {
      if (plain[i] == nullptr) continue;
      there.push_back(plain[i]);
      their_weights.push_back(weights[i]);
    }
  }
  std::byte* sentinel_at(int i) { return sentinels[static_cast<size_t>(i)]->data(); }
  /// True if row i is announced separately.
  bool arrives(int i) const { return rows[static_cast<size_t>(i)] != nullptr && !(i == 2 && rows.size() > 2); }
};

// Once all rows have arrived, their sum has the same bits as the sum of the original rows, and the sentinel rows are zeroed.
// While a row or one of its words is missing, its place is reported and the rows are left unchanged.
TYPED_TEST_P(ArchConformance, RowsThatHaveComeAreSummed) {
  this->for_each_variant([&] {
    for (const DType type : kRowTypes) {
      for (const int n : {1, 2, 3, 4, 5, 8, 9, 32, kMaxRanks}) {
        if (n > kPlaces<TypeParam>) break;
        for (const int64_t columns : {8, 130, 520, 1024}) {
          const int64_t hidden = whole_elements<TypeParam>(columns, type);
          const size_t bytes = dtype_bytes(type, hidden);
          SentinelRowsCase<TypeParam> c(n, type, hidden, this->random_);
          Guarded<TypeParam> want(bytes), out(bytes);
          this->warp_.reduce_rows(detail::ReduceSpec{want.data(),
                                                     c.there.data(),
                                                     c.their_weights.data(),
                                                     static_cast<int>(c.there.size()),
                                                     {nullptr, nullptr},
                                                     type,
                                                     hidden});
          const detail::ReduceSpec spec{out.data(), c.rows.data(), c.weights.data(), n, {nullptr, nullptr}, type, hidden};
          const auto announce = [&](int i) {
            void* const to[] = {c.sentinel_at(i)};
            this->warp_.multicast_sentinel(to, 1, c.plain[static_cast<size_t>(i)], bytes);
            this->warp_.settle();
          };
          for (int i = 0; i < n; ++i)
            if (i != c.late && c.arrives(i)) announce(i);
          ASSERT_EQ(this->warp_.reduce_if_arrived(spec, 3), c.late);
          announce(c.late);
          uint64_t word = 0;
          std::byte* const at = c.sentinel_at(c.late) + this->random_() % (sentinel_bytes(bytes) / 8) * 8;
          std::swap(word, *reinterpret_cast<uint64_t*>(at));
          ASSERT_EQ(this->warp_.reduce_if_arrived(spec, 0), c.late);
          std::swap(word, *reinterpret_cast<uint64_t*>(at));
          ASSERT_EQ(this->warp_.reduce_if_arrived(spec, 0), -1);
          this->warp_.settle();
          ASSERT_TRUE(out.guards_intact());
          for (int64_t e = 0; e < hidden; ++e)
            ASSERT_TRUE(same_element(out.data(), want.data(), type, e)) << "n " << n << " column " << e;
          for (const auto& r : c.sentinels) {
            ASSERT_TRUE(r->guards_intact());
            for (size_t b = 0; b < r->size(); ++b) ASSERT_EQ(r->data()[b], std::byte{0}) << "byte " << b;
          }
        }
      }
    }
  });
}

/// Whether `row` is the sentinel form that sentinel_copies() produces from the `bytes` bytes at `want`: no 8-byte word is all
/// ones, and only 4-byte words that were all ones have changed.
inline ::testing::AssertionResult detects_copy(const std::byte* row, const std::byte* want, size_t bytes) {
  constexpr uint32_t kOnes = 0xffffffff, kInstead = 0xffff7fff;
  for (size_t at = 0; at < bytes; at += 4) {
    uint32_t here = 0, there = 0;
    std::memcpy(&here, row + at, std::min<size_t>(4, bytes - at));
    std::memcpy(&there, want + at, std::min<size_t>(4, bytes - at));
    if (here != there && (there != kOnes || here != kInstead))
      return ::testing::AssertionFailure() << "byte " << at << ": " << std::hex << here << ", expected " << there;
  }
  for (size_t at = 0; at + 8 <= bytes; at += 8) {
    uint64_t here = 0;
    std::memcpy(&here, row + at, 8);
    if (here == ~uint64_t{0}) return ::testing::AssertionFailure() << "blank at byte " << at;
  }
  return ::testing::AssertionSuccess();
}

// A blanked row, or a row with a blank word, counts as not arrived; an announced row counts as arrived, whatever its content.
TYPED_TEST_P(ArchConformance, BlankRowsHaveNotCome) {
  this->for_each_variant([&] {
    for (const size_t size : {1, 4, 8, 15, 16, 130, 512, 4104}) {
      const size_t bytes = whole<TypeParam>(size);
      if (bytes == 0) continue;
      typename TestFixture::Memory src(sentinel_bytes(bytes)), row(sentinel_bytes(bytes));
      for (const int ones : {0, 2, 100}) {  // percentage of words that are all ones
        src.randomize(this->random_);
        row.randomize(this->random_);
        for (size_t at = 0; at + 4 <= bytes; at += 4)
          if (static_cast<int>(this->random_() % 100) < ones) std::memset(src.data() + at, 0xff, 4);
        this->warp_.blank_row(row.data(), bytes);
        this->warp_.settle();
        for (size_t b = 0; b < (bytes + 3) / 4 * 4; ++b)
          ASSERT_EQ(row.data()[b], std::byte{0xff}) << "byte " << b << " of " << bytes;
        ASSERT_FALSE(this->warp_.has_arrived(row.data(), bytes)) << bytes;
        void* const to[] = {row.data()};
        this->warp_.multicast_sentinel(to, 1, src.data(), bytes, true);
        this->warp_.settle();
        ASSERT_TRUE(this->warp_.has_arrived(row.data(), bytes)) << bytes;
        ASSERT_TRUE(detects_copy(row.data(), src.data(), bytes)) << bytes;
        std::memset(row.data() + this->random_() % (sentinel_bytes(bytes) / 8) * 8, 0xff, 8);
        ASSERT_FALSE(this->warp_.has_arrived(row.data(), bytes)) << bytes;
        ASSERT_TRUE(row.guards_intact());
      }
    }
  });
}

}  // namespace switchyard::conformance
