// SPDX-License-Identifier: Apache-2.0
// Compares free memory and its order with a table that records the uses of every granule.
#include "heap/ordered_ranges.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

namespace switchyard::detail {
namespace {

using Ranges = OrderedRanges<int>;  // a use is a number
constexpr size_t kGranule = Ranges::kGranule;

constexpr auto kFree = [](int) { return 0; };

TEST(OrderedRanges, BringTheUsesOfWhatIsTaken) {
  Ranges ranges(0, 8 * kGranule);
  const auto a = ranges.take(2 * kGranule, 0, kFree), b = ranges.take(2 * kGranule, 0, kFree);
  ASSERT_TRUE(a && b);
  ranges.give(a->offset, {1, 2});
  ranges.give(b->offset, {3});
  const auto first = ranges.take(kGranule, 0, kFree);
  EXPECT_EQ(first->offset, 0u);
  EXPECT_EQ(first->after, (std::vector<int>{1, 2}));
  const auto across = ranges.take(3 * kGranule, 0, kFree);  // the rest of a, followed by b
  EXPECT_EQ(across->offset, kGranule);
  EXPECT_EQ(across->after, (std::vector<int>{1, 2, 3}));
}

TEST(OrderedRanges, PreferWhatCostsLeast) {
  Ranges ranges(0, 6 * kGranule);
  const auto a = ranges.take(2 * kGranule, 0, kFree), b = ranges.take(2 * kGranule, 0, kFree);
  const auto c = ranges.take(2 * kGranule, 0, kFree);
  ranges.give(a->offset, {1});
  ranges.give(b->offset, {2});
  ranges.give(c->offset, {3});
  const auto cost = [](int use) { return use == 1 ? Ranges::kNever : use == 2 ? 1 : 0; };
  EXPECT_EQ(ranges.take(kGranule, 0, cost)->offset, 4 * kGranule);
  EXPECT_EQ(ranges.take(2 * kGranule, 0, cost)->offset, 2 * kGranule);
  EXPECT_FALSE(ranges.take(2 * kGranule, 0, cost)) << "what can't be waited for";
  EXPECT_TRUE(ranges.take(kGranule, 0, cost)) << "the rest of the last";
}

TEST(OrderedRanges, JoinWhatIsAlikeAndForgets) {
  Ranges ranges(0, 4 * kGranule);
  std::vector<size_t> at;
  for (int i = 0; i < 4; ++i) at.push_back(ranges.take(kGranule, 0, kFree)->offset);
  for (int i = 0; i < 4; ++i) ranges.give(at[static_cast<size_t>(i)], {i / 2});
  EXPECT_EQ(ranges.pieces(), 2u);
  EXPECT_EQ(ranges.usage().largest_free, 4 * kGranule);
  ranges.forget([](int use) { return use == 0; });
  EXPECT_EQ(ranges.pieces(), 2u);
  ranges.forget([](int) { return true; });
  EXPECT_EQ(ranges.pieces(), 1u);
  EXPECT_TRUE(ranges.take(4 * kGranule, 0, kFree)->after.empty());
  EXPECT_FALSE(ranges.take(1, 0, kFree));
}

TEST(OrderedRanges, NoteWhatIsKept) {
  Ranges ranges(kGranule, 5 * kGranule);
  const auto a = ranges.take(100, 100, kFree), b = ranges.take(kGranule, 0, kFree);
  EXPECT_EQ(ranges.kept(), (std::vector<HeapRange>{{kGranule, 100}}));
  ranges.give(a->offset, {});
  EXPECT_TRUE(ranges.kept().empty());
  EXPECT_EQ(ranges.usage().used, kGranule);
  ranges.give(b->offset, {});
  EXPECT_EQ(ranges.usage().free, 4 * kGranule);
}

/// The free ranges of 40 granules, and the uses and owner of each granule.
class Table {
 public:
  static constexpr size_t kGranules = 40;
  Ranges ranges{0, kGranules* kGranule};

  void forget_below(int use) {
    ranges.forget([&](int u) { return u < use; });
    for (auto& of : uses_) std::erase_if(of, [&](int u) { return u < use; });
  }
  void give(size_t offset, size_t granules, std::vector<int> after) {
    for (size_t g = offset / kGranule; g < offset / kGranule + granules; ++g) {
      taken_[g] = false;
      uses_[g] = {after.begin(), after.end()};
    }
    ranges.give(offset, std::move(after));
  }
  /// Cost of `granules` granules, starting at g.
  template <class Cost>
  int price(size_t g, size_t granules, Cost&& cost) const {
    int sum = 0;
    for (size_t k = g; k < g + granules; ++k) {
      if (k >= kGranules || taken_[k]) return Ranges::kNever;
      for (const int use : uses_[k])
        if (k == g || uses_[k - 1] != uses_[k]) sum = std::min(sum + cost(use), Ranges::kNever);
    }
    return sum;
  }
  template <class Cost>
  int min_price(size_t granules, Cost&& cost) const {
    int least = Ranges::kNever;
    for (size_t g = 0; g < kGranules; ++g)  // where a free range begins
      if (g == 0 || taken_[g - 1] || uses_[g - 1] != uses_[g]) least = std::min(least, price(g, granules, cost));
    return least;
  }
  /// Marks a block returned by take() as taken; \returns all uses of its granules.
  std::set<int> take(size_t offset, size_t granules) {
    std::set<int> wanted;
    for (size_t g = offset / kGranule; g < offset / kGranule + granules; ++g) {
      EXPECT_FALSE(taken_[g]);
      wanted.insert(uses_[g].begin(), uses_[g].end());
      taken_[g] = true;
      uses_[g].clear();
    }
    return wanted;
  }

 private:
  std::vector<std::set<int>> uses_{kGranules};
  std::vector<bool> taken_ = std::vector<bool>(kGranules, false);
};

/// Makes 20 000 random calls: no other place that a block fits into costs less, and the uses of a block are those of its
/// granules.
TEST(OrderedRanges, EqualTheTable) {
  std::mt19937_64 random(7);
  Table table;
  std::vector<std::pair<size_t, size_t>> blocks;  // offset, granules
  int next = 1;
  for (int i = 0; i < 20000; ++i) {
    if (random() % 64 == 0) table.forget_below(next - static_cast<int>(random() % 5));
    if (!blocks.empty() && random() % 2 == 0) {
      std::swap(blocks[random() % blocks.size()], blocks.back());
      std::vector<int> after;
      for (uint64_t n = random() % 3; n > 0; --n) after.push_back(next++);
      table.give(blocks.back().first, blocks.back().second, after);
      blocks.pop_back();
      continue;
    }
    const size_t granules = 1 + random() % 9;
    const int salt = static_cast<int>(random() % 7);
    const auto cost = [&](int use) { return (use + salt) % 11 == 0 ? Ranges::kNever : (use + salt) % 3; };
    const int least = table.min_price(granules, cost);
    const auto got = table.ranges.take(granules * kGranule - random() % kGranule, 0, cost);
    ASSERT_EQ(got.has_value(), least < Ranges::kNever) << "call " << i;
    if (!got) continue;
    ASSERT_EQ(table.price(got->offset / kGranule, granules, cost), least) << "call " << i;
    const std::set<int> wanted = table.take(got->offset, granules);
    ASSERT_EQ(std::set<int>(got->after.begin(), got->after.end()), wanted) << "call " << i;
    ASSERT_EQ(got->after.size(), wanted.size()) << "call " << i;
    blocks.emplace_back(got->offset, granules);
  }
  EXPECT_GT(next, 5000);
}

}  // namespace
}  // namespace switchyard::detail
