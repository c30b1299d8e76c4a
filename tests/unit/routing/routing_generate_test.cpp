// SPDX-License-Identifier: Apache-2.0
// Generated routing: reproducible values, and the statistical properties of each pattern.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "routing/random.hpp"
#include "switchyard/routing.hpp"
#include "unit/routing/refusals.hpp"

namespace switchyard {
namespace {

using Ids = std::vector<int32_t>;

Ids token_ids(const Routing& routing, int64_t token) {
  return Ids(routing.topk_ids.begin() + token * routing.topk, routing.topk_ids.begin() + (token + 1) * routing.topk);
}

std::vector<int64_t> load(const Routing& routing) {
  std::vector<int64_t> counts(static_cast<size_t>(routing.num_experts));
  for (const int32_t id : routing.topk_ids) {
    if (id >= 0) ++counts[static_cast<size_t>(id)];
  }
  return counts;
}

GeneratorSpec spec_of(Pattern pattern, int experts = 256, int topk = 8, int world = 4) {
  GeneratorSpec spec;
  spec.pattern = pattern;
  spec.num_experts = experts;
  spec.topk = topk;
  spec.world = world;
  return spec;
}

// The expected values were computed in Python by an independent implementation of the same description (docs/routing.md).
TEST(Generate, KnownValues) {
  const Routing uniform = generate(spec_of(Pattern::uniform), 0, 2);
  EXPECT_EQ(token_ids(uniform, 0), (Ids{52, 232, 233, 71, 140, 216, 185, 230}));
  EXPECT_EQ(token_ids(uniform, 1), (Ids{56, 31, 167, 107, 26, 58, 132, 41}));
  const double weights[] = {0.00651061942986841, 0.19148625749152828, 0.026711173118268025, 0.18583533835655744,
                            0.21526151435680083, 0.18484908493865587, 0.10310275272453331,  0.08624325958378785};
  for (size_t k = 0; k < 8; ++k) EXPECT_NEAR(uniform.topk_weights[k], weights[k], 1e-7);

  GeneratorSpec other = spec_of(Pattern::uniform);
  other.seed = 7;
  EXPECT_EQ(token_ids(generate(other, 3, 1001), 1000), (Ids{93, 157, 254, 168, 86, 113, 167, 236}));

  GeneratorSpec repeated = spec_of(Pattern::uniform, 4);
  repeated.duplicates = true;
  EXPECT_EQ(token_ids(generate(repeated, 0, 1), 0), (Ids{0, 3, 3, 1, 2, 3, 2, 3}));

  const Routing zipf = generate(spec_of(Pattern::zipf), 0, 2);
  EXPECT_EQ(token_ids(zipf, 0), (Ids{206, 123, 146, 218, 92, 215, 162, 35}));
  EXPECT_EQ(token_ids(zipf, 1), (Ids{206, 160, 181, 55, 26, 33, 64, 157}));
  GeneratorSpec steep = spec_of(Pattern::zipf, 8);
  steep.zipf_exponent = 3;
  EXPECT_EQ(token_ids(generate(steep, 2, 6), 5), (Ids{0, 1, 3, 5, 6, 2, 4, 7}));

  GeneratorSpec groups = spec_of(Pattern::group_limited);
  groups.drop_fraction = 0.3;
  EXPECT_EQ(token_ids(generate(groups, 0, 2), 0), (Ids{198, 76, 220, 84, 35, 224, 231, -1}));
}

TEST(TokenRandom, BelowHasNoBias) {
  // Scaling 32 bits to 3 * 2^30 values without rejection would produce every third value twice as often as the others.
  detail::TokenRandom random(1, 2, 3, detail::Purpose::experts);
  constexpr uint64_t kValues = uint64_t{3} << 30;
  int counts[3] = {};
  for (int i = 0; i < 30000; ++i) {
    const uint64_t value = random.below(kValues);
    ASSERT_LT(value, kValues);
    ++counts[value % 3];
  }
  for (const int count : counts) EXPECT_NEAR(count, 10000, 410);  // 5 standard deviations
  for (int i = 0; i < 100; ++i) EXPECT_EQ(random.below(1), 0u);
}

TEST(Generate, TokensDependOnSeedRankAndNumberOnly) {
  for (const Pattern pattern : {Pattern::uniform, Pattern::zipf, Pattern::group_limited, Pattern::all_to_one}) {
    GeneratorSpec spec = spec_of(pattern);
    spec.drop_fraction = 0.1;
    const Routing many = generate(spec, 1, 100), few = generate(spec, 1, 10);
    EXPECT_TRUE(std::equal(few.topk_ids.begin(), few.topk_ids.end(), many.topk_ids.begin())) << to_string(pattern);
    EXPECT_TRUE(std::equal(few.topk_weights.begin(), few.topk_weights.end(), many.topk_weights.begin())) << to_string(pattern);
    EXPECT_EQ(generate(spec, 1, 100).topk_ids, many.topk_ids);
    EXPECT_NE(generate(spec, 2, 100).topk_ids, many.topk_ids);
    spec.seed = 2;
    EXPECT_NE(generate(spec, 1, 100).topk_ids, many.topk_ids);
  }
}

TEST(Generate, DropsDoNotChangeTheOtherRoutes) {
  for (const Pattern pattern : {Pattern::uniform, Pattern::zipf, Pattern::round_robin, Pattern::group_limited}) {
    GeneratorSpec spec = spec_of(pattern);
    const Routing all = generate(spec, 0, 2000);
    spec.drop_fraction = 0.3;
    const Routing some = generate(spec, 0, 2000);
    int64_t dropped = 0;
    for (size_t i = 0; i < all.topk_ids.size(); ++i) {
      if (some.topk_ids[i] == -1) {
        ++dropped;
      } else {
        ASSERT_EQ(some.topk_ids[i], all.topk_ids[i]);
      }
    }
    EXPECT_NEAR(static_cast<double>(dropped) / 16000, 0.3, 0.02) << to_string(pattern);  // 5 standard deviations
    spec.drop_fraction = 1;
    for (const int32_t id : generate(spec, 0, 50).topk_ids) ASSERT_EQ(id, -1);
  }
}

TEST(Generate, WeightsOfKeptRoutesSumToOne) {
  for (const double drop : {0.0, 0.3, 0.9}) {
    GeneratorSpec spec = spec_of(Pattern::uniform);
    spec.drop_fraction = drop;
    const Routing routing = generate(spec, 0, 500);
    for (int64_t t = 0; t < 500; ++t) {
      double sum = 0;
      bool any = false;
      for (size_t i = static_cast<size_t>(t) * 8; i < static_cast<size_t>(t) * 8 + 8; ++i) {
        const bool kept = routing.topk_ids[i] >= 0;
        any |= kept;
        ASSERT_TRUE(kept ? routing.topk_weights[i] > 0 : routing.topk_weights[i] == 0);
        sum += routing.topk_weights[i];
      }
      ASSERT_NEAR(sum, any ? 1.0 : 0.0, 1e-6);
    }
  }
}

TEST(Generate, IdsOfATokenAreDistinctUnlessDuplicatesAreAsked) {
  for (const Pattern pattern :
       {Pattern::uniform, Pattern::zipf, Pattern::round_robin, Pattern::group_limited, Pattern::all_to_one}) {
    for (const int experts : {16, 32, 256}) {  // with topk 4: all experts of the target rank if there are 16
      GeneratorSpec spec = spec_of(pattern, experts, 4);
      spec.num_groups = 8;
      spec.topk_groups = 2;
      const Routing routing = generate(spec, 3, 400);
      for (int64_t t = 0; t < 400; ++t) {
        const Ids ids = token_ids(routing, t);
        ASSERT_EQ(std::set<int32_t>(ids.begin(), ids.end()).size(), 4u)
            << to_string(pattern) << " " << experts << " token " << t;
        for (const int32_t id : ids) ASSERT_TRUE(id >= 0 && id < experts);
      }
    }
  }
  GeneratorSpec spec = spec_of(Pattern::uniform, 3, 8);
  spec.duplicates = true;
  const std::vector<int64_t> counts = load(generate(spec, 0, 3000));
  for (const int64_t count : counts) EXPECT_NEAR(static_cast<double>(count), 8000, 370);  // 5 standard deviations
}

TEST(Generate, UniformReachesTheExpectedNumberOfRanks) {
  // W * (1 - C(E - E/W, K) / C(E, K))
  struct Case {
    int experts, topk, world;
    double ranks;
  };
  for (const Case& c : {Case{256, 8, 4, 3.614}, Case{256, 8, 8, 5.295}, Case{64, 8, 8, 5.433}, Case{256, 8, 2, 1.993},
                        Case{128, 4, 8, 3.342}, Case{256, 8, 1, 1.0}}) {
    double sum = 0;
    for (int rank = 0; rank < c.world; ++rank) {
      sum += mean_ranks_per_token(generate(spec_of(Pattern::uniform, c.experts, c.topk, c.world), rank, 8192), c.world);
    }
    EXPECT_NEAR(sum / c.world, c.ranks, 0.01 * c.ranks) << c.experts << " " << c.topk << " " << c.world;
  }
}

TEST(Generate, UniformChoosesAllExpertsEquallyInEveryPlace) {
  const Routing routing = generate(spec_of(Pattern::uniform, 16, 4), 0, 32000);
  for (int k = 0; k < 4; ++k) {
    std::vector<int64_t> counts(16);
    for (int64_t t = 0; t < routing.num_tokens; ++t)
      ++counts[static_cast<size_t>(routing.topk_ids[static_cast<size_t>(t * 4 + k)])];
    for (const int64_t count : counts) EXPECT_NEAR(static_cast<double>(count), 2000, 220);  // 5 standard deviations
  }
}

TEST(Generate, ZipfFollowsItsLawInTheFirstChoice) {
  for (const double exponent : {0.0, 0.7, 1.2, 2.0}) {
    GeneratorSpec spec = spec_of(Pattern::zipf, 64, 2);
    spec.zipf_exponent = exponent;
    constexpr int64_t kTokens = 60000;
    const Routing routing = generate(spec, 0, kTokens);
    std::vector<double> first(64), expected(64);
    for (int64_t t = 0; t < kTokens; ++t)
      first[static_cast<size_t>(routing.topk_ids[static_cast<size_t>(2 * t)])] += 1.0 / kTokens;
    std::sort(first.rbegin(), first.rend());
    for (size_t i = 0; i < 64; ++i) expected[i] = std::pow(static_cast<double>(i + 1), -exponent);
    const double total = std::accumulate(expected.begin(), expected.end(), 0.0);
    for (size_t i = 0; i < 64; ++i) EXPECT_NEAR(first[i], expected[i] / total, 0.01) << exponent << " " << i;
  }
}

TEST(Generate, ZipfDrawsTheSecondChoiceAmongTheOthers) {
  // P(second = j | first = i) = p_j / (1 - p_i), with 4 experts of exponent 1: p = 12/25, 6/25, 4/25, 3/25 by popularity.
  GeneratorSpec spec = spec_of(Pattern::zipf, 4, 2);
  spec.zipf_exponent = 1;
  constexpr int64_t kTokens = 60000;
  const Routing routing = generate(spec, 0, kTokens);
  std::vector<std::pair<int64_t, int32_t>> popularity;
  std::vector<int64_t> first(4);
  for (int64_t t = 0; t < kTokens; ++t) ++first[static_cast<size_t>(routing.topk_ids[static_cast<size_t>(2 * t)])];
  for (int32_t e = 0; e < 4; ++e) popularity.push_back({first[static_cast<size_t>(e)], e});
  std::sort(popularity.rbegin(), popularity.rend());
  const double p[] = {12.0 / 25, 6.0 / 25, 4.0 / 25, 3.0 / 25};
  for (size_t i = 0; i < 4; ++i) {
    for (size_t j = 0; j < 4; ++j) {
      int64_t pairs = 0;
      for (int64_t t = 0; t < kTokens; ++t) {
        pairs += routing.topk_ids[static_cast<size_t>(2 * t)] == popularity[i].second &&
                 routing.topk_ids[static_cast<size_t>(2 * t + 1)] == popularity[j].second;
      }
      const double expected = i == j ? 0 : p[i] * p[j] / (1 - p[i]);
      EXPECT_NEAR(static_cast<double>(pairs) / kTokens, expected, 0.01) << i << " " << j;
    }
  }
}

TEST(Generate, ZipfPopularityIsSharedByTheRanksAndShuffledByTheSeed) {
  const auto busiest = [](const GeneratorSpec& spec, int rank) {
    const std::vector<int64_t> counts = load(generate(spec, rank, 4000));
    return std::max_element(counts.begin(), counts.end()) - counts.begin();
  };
  GeneratorSpec spec = spec_of(Pattern::zipf);
  for (int rank = 1; rank < 4; ++rank) EXPECT_EQ(busiest(spec, rank), busiest(spec, 0));
  std::set<std::ptrdiff_t> experts;
  for (spec.seed = 1; spec.seed <= 8; ++spec.seed) experts.insert(busiest(spec, 0));
  EXPECT_GT(experts.size(), 5u);
}

TEST(Generate, ZipfWithTheSteepestExponentStillFindsDistinctExperts) {
  GeneratorSpec spec = spec_of(Pattern::zipf, 64, 32);
  spec.zipf_exponent = 16;
  const Routing routing = generate(spec, 0, 50);
  for (int64_t t = 0; t < 50; ++t) {
    const Ids ids = token_ids(routing, t);
    EXPECT_EQ(std::set<int32_t>(ids.begin(), ids.end()).size(), 32u);
  }
}

TEST(Generate, AllToOneRank) {
  GeneratorSpec spec = spec_of(Pattern::all_to_one, 30, 7);  // ranks hold 8, 8, 7 and 7 experts
  for (spec.target = 0; spec.target < 4; ++spec.target) {
    for (int rank = 0; rank < 4; ++rank) {
      const Routing routing = generate(spec, rank, 300);
      const int first = spec.target < 2 ? 8 * spec.target : 16 + 7 * (spec.target - 2), held = spec.target < 2 ? 8 : 7;
      for (const int32_t id : routing.topk_ids) ASSERT_TRUE(id >= first && id < first + held) << id << " " << spec.target;
      EXPECT_EQ(mean_ranks_per_token(routing, 4), 1.0);
      const std::vector<int64_t> counts = load(routing);
      for (int e = first; e < first + held; ++e) EXPECT_GT(counts[static_cast<size_t>(e)], 150);
    }
  }
}

TEST(Generate, AllToOneExpert) {
  GeneratorSpec spec = spec_of(Pattern::all_to_one);
  spec.target_is_expert = true;
  spec.target = 200;
  const Routing once = generate(spec, 2, 10);
  for (int64_t t = 0; t < 10; ++t) {
    EXPECT_EQ(token_ids(once, t), (Ids{200, -1, -1, -1, -1, -1, -1, -1}));
    EXPECT_EQ(once.topk_weights[static_cast<size_t>(t) * 8], 1.0f);
  }
  spec.duplicates = true;
  EXPECT_EQ(load(generate(spec, 2, 10))[200], 80);
}

TEST(Generate, RoundRobinIsBalanced) {
  const Routing routing = generate(spec_of(Pattern::round_robin, 6, 4), 1, 9);
  for (size_t i = 0; i < routing.topk_ids.size(); ++i) EXPECT_EQ(routing.topk_ids[i], static_cast<int32_t>(i % 6));
  for (const int64_t count : load(routing)) EXPECT_EQ(count, 6);
}

TEST(Generate, GroupLimitedUsesSoManyGroups) {
  const Routing routing = generate(spec_of(Pattern::group_limited), 0, 4000);
  double groups_used = 0;
  for (int64_t t = 0; t < routing.num_tokens; ++t) {
    std::set<int32_t> groups;
    for (const int32_t id : token_ids(routing, t)) groups.insert(id / 32);
    ASSERT_LE(groups.size(), 4u);
    groups_used += static_cast<double>(groups.size()) / 4000;
  }
  // 8 of 128 experts in 4 groups of 32: 4 * (1 - C(96, 8) / C(128, 8)) = 3.63
  EXPECT_NEAR(groups_used, 3.63, 0.03);
  for (const int64_t count : load(routing)) EXPECT_NEAR(static_cast<double>(count), 125, 60);
}

TEST(Generate, ManyShapes) {
  for (const int experts : {1, 2, 7, 33, 100}) {
    for (const int topk : {1, 2, 7, 32}) {
      for (const Pattern pattern : {Pattern::uniform, Pattern::zipf, Pattern::round_robin}) {
        GeneratorSpec spec = spec_of(pattern, experts, topk, 5);
        spec.duplicates = topk > experts;
        const Routing routing = generate(spec, 4, 17);
        check_routing(routing);
        EXPECT_EQ(routing.topk_ids.size(), static_cast<size_t>(17 * topk));
        for (const int32_t id : routing.topk_ids) ASSERT_TRUE(id >= 0 && id < experts);
      }
    }
  }
  EXPECT_TRUE(generate(spec_of(Pattern::zipf), 0, 0).topk_ids.empty());
}

/// The busiest rank has exactly the given ratio, up to one route, in every prefix; all other experts are equally likely.
TEST(Generate, RankSkewHasItsRatio) {
  for (const double ratio : {0.0, 0.7, 1.0, 1.8, 2.35, 4.0}) {
    GeneratorSpec spec = spec_of(Pattern::rank_skew);
    spec.rank_skew = ratio;
    spec.target = 2;
    const Routing routing = generate(spec, 1, 4000);
    check_routing(routing);
    std::vector<int64_t> of_expert(256);
    int64_t here = 0;
    for (int64_t t = 0; t < routing.num_tokens; ++t) {
      for (int k = 0; k < 8; ++k) {
        const int32_t id = routing.topk_ids[static_cast<size_t>(8 * t + k)];
        ++of_expert[static_cast<size_t>(id)];
        here += id / 64 == 2 ? 1 : 0;
      }
      ASSERT_LE(std::abs(static_cast<double>(here) - static_cast<double>(t + 1) * 8 * ratio / 4), 1) << ratio << " token " << t;
    }
    for (int e = 0; e < 256; ++e) {
      const double expected = e / 64 == 2 ? 32000 * ratio / 256 : 32000 * (4 - ratio) / 3 / 256;
      EXPECT_NEAR(static_cast<double>(of_expert[static_cast<size_t>(e)]), expected, 5 * std::sqrt(expected) + 1)
          << ratio << " expert " << e;
    }
  }
}

TEST(Generate, RefusesWhatItCannotDo) {
  const auto with = [](auto change, int rank = 0, int64_t tokens = 1) {
    GeneratorSpec spec = spec_of(Pattern::uniform);
    change(spec);
    return [=] { generate(spec, rank, tokens); };
  };
  const auto keep = [](GeneratorSpec&) {};
  expect_refused(with(keep, 4), "generate: rank is 4; allowed: 0 to 3");
  expect_refused(with(keep, 0, -2), "generate: tokens is -2; allowed: 0 to 17592186044416");
  expect_refused(with([](auto& s) { s.num_experts = 0; }), "generate: num_experts is 0; allowed: 1 to 16777216");
  expect_refused(with([](auto& s) { s.world = 65; }), "generate: world is 65; allowed: 1 to 64");
  expect_refused(with([](auto& s) { s.topk = 0; }), "generate: topk is 0; allowed: 1 to 32");
  expect_refused(with([](auto& s) { s.num_experts = 5; }),
                 "generate: topk is 8; allowed: 1 to 5, the experts that a token can choose, without duplicates");
  expect_refused(with([](auto& s) { s.drop_fraction = 1.5; }), "generate: drop_fraction is 1.500000; allowed: 0 to 1");
  expect_refused(with([](auto& s) { s.drop_fraction = std::nan(""); }), "generate: drop_fraction is nan; allowed: 0 to 1");
  expect_refused(with([](auto& s) { s.pattern = Pattern::zipf, s.zipf_exponent = -1; }),
                 "generate: zipf_exponent is -1.000000; allowed: 0 to 16");
  expect_refused(with([](auto& s) { s.pattern = Pattern::all_to_one, s.target = 4; }),
                 "generate: target is 4; allowed: 0 to 3");
  expect_refused(with([](auto& s) { s.pattern = Pattern::all_to_one, s.target_is_expert = true, s.target = 256; }),
                 "generate: target is 256; allowed: 0 to 255");
  expect_refused(with([](auto& s) { s.pattern = Pattern::all_to_one, s.target = 3, s.num_experts = 3; }),
                 "generate: target is 3; allowed: ranks that hold experts (num_experts is smaller than world)");
  expect_refused(with([](auto& s) { s.pattern = Pattern::group_limited, s.num_groups = 7; }),
                 "generate: num_groups is 7; allowed: divisors of num_experts 256");
  expect_refused(with([](auto& s) { s.pattern = Pattern::group_limited, s.topk_groups = 9; }),
                 "generate: topk_groups is 9; allowed: 1 to 8");
  const auto skew = [&](double ratio, int experts = 256) {
    return with([=](auto& s) { s.pattern = Pattern::rank_skew, s.rank_skew = ratio, s.num_experts = experts; });
  };
  expect_refused(skew(4.5), "generate: rank_skew is 4.500000; allowed: 0 to 4, the number of ranks");
  expect_refused(skew(std::nan("")), "generate: rank_skew is nan; allowed: 0 to 4, the number of ranks");
  expect_refused(
      skew(3.9, 16),
      "generate: rank_skew is 3.900000; allowed: ratios for which each token finds its experts among 4 of the busiest "
      "rank and 12 others");
  expect_refused(with([](auto& s) { s.pattern = static_cast<Pattern>(9); }),
                 "generate: pattern is 9; allowed: the values of Pattern");
}

TEST(Generate, PatternNames) {
  for (const Pattern pattern : {Pattern::uniform, Pattern::zipf, Pattern::all_to_one, Pattern::round_robin,
                                Pattern::group_limited, Pattern::rank_skew}) {
    EXPECT_EQ(pattern_from_string(to_string(pattern)), pattern);
  }
  expect_refused(
      [] { pattern_from_string("uniforn"); },
      "pattern_from_string: name is 'uniforn'; allowed: uniform, zipf, all_to_one, round_robin, group_limited, rank_skew");
}

TEST(MeanRanksPerToken, CountsDistinctRanksOfAnUnevenSplit) {
  // 7 experts on 3 ranks: 0 1 2 | 3 4 | 5 6
  Routing routing{7, 3, 4, {0, 1, 2, 2, 3, 5, -1, 7, 4, -1, -1, 99}, {}};
  EXPECT_EQ(mean_ranks_per_token(routing, 3), (1 + 3 + 1 + 0) / 4.0);
  EXPECT_EQ(mean_ranks_per_token(routing, 1), (1 + 1 + 1 + 0) / 4.0);
  EXPECT_EQ(mean_ranks_per_token(routing, 64), (3 + 3 + 1 + 0) / 4.0);  // one expert per rank
  EXPECT_EQ(mean_ranks_per_token(Routing{7, 3, 0, {}, {}}, 3), 0.0);
}

TEST(MeanRanksPerToken, RefusesInconsistentRouting) {
  expect_refused(
      [] {
        mean_ranks_per_token({7, 3, 2, Ids(5), {}}, 3);
      },
      "routing: topk_ids.size() is 5; allowed: 6, tokens * topk");
  expect_refused(
      [] {
        mean_ranks_per_token({7, 3, 2, Ids(6), std::vector<float>(7)}, 3);
      },
      "routing: topk_weights.size() is 7; allowed: 0, or 6, tokens * topk");
  expect_refused(
      [] {
        mean_ranks_per_token({7, 3, 2, Ids(6), {}}, 65);
      },
      "mean_ranks_per_token: world is 65; allowed: 1 to 64");
}

}  // namespace
}  // namespace switchyard
