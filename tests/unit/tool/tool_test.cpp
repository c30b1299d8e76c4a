// SPDX-License-Identifier: Apache-2.0
// Components of the command line tool: its checks must accept correct results and reject wrong ones.
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "switchyard/status.hpp"
#include "tools/bench/case.hpp"
#include "tools/bench/points.hpp"
#include "tools/check/exchange_check.hpp"
#include "tools/cli/verb.hpp"
#include "tools/layer/moe_reference.hpp"
#include "tools/measure/figures.hpp"
#include "tools/measure/stream_copy.hpp"
#include "tools/report/demo_page.hpp"
#include "tools/run/ranks.hpp"
#include "tools/run/rows.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

TEST(Rows, AreReproducibleFiniteAndDifferent) {
  for (const DType type : {DType::bf16, DType::f16, DType::f32, DType::fp8_e4m3}) {
    std::vector<std::byte> a(99 * 4), b(99 * 4), c(99 * 4);
    fill_row(a.data(), type, 99, 5);
    fill_row(b.data(), type, 99, 5);
    fill_row(c.data(), type, 99, 6);
    EXPECT_EQ(a, b);
    EXPECT_NE(a, c);
    bool positive = false, negative = false;
    for (int64_t i = 0; i < 99; ++i) {
      const float value = oracle::load(type, a.data(), i);
      EXPECT_TRUE(std::isfinite(value));
      positive = positive || value > 0;
      negative = negative || value < 0;
    }
    EXPECT_TRUE(positive && negative);
  }
}

// --------------------------------------------------------------------------------------------------------- the exchange checks

Scenario small_scenario(Layout layout) {
  Scenario s;
  s.world = 2;
  s.experts = 5;  // ranks have 3 and 2 experts
  s.topk = 2;
  s.hidden = 24;
  s.layout = layout;
  s.alignment = 4;
  s.routing.resize(2);
  s.routing[0] = {5, 2, 2, {0, 4, -1, 3}, {0.25f, 0.75f, 0.5f, 0.5f}};
  s.routing[1] = {5, 2, 1, {2, 2}, {0.125f, 0.875f}};
  return s;
}

TEST(Scenarios, CombineByHand) {
  Scenario s = small_scenario(Layout::expert_major);
  CombineCase c;
  c.identity = true;
  std::vector<std::byte> x(48), out(48);
  fill_row(x.data(), DType::bf16, 24, row_key(s.seed, 0, RowKind::token, 1, 0));
  ExpectedSums(s, c, 1).make(0, out.data());
  for (int64_t i = 0; i < 24; ++i) {  // both routes are on rank 0: one partial sum is rounded, then the result is rounded again
    const float value = oracle::load(DType::bf16, x.data(), i);
    EXPECT_EQ(oracle::load(DType::bf16, out.data(), i), oracle::rounded(DType::bf16, 0.125f * value + 0.875f * value));
  }
  c.num_bias = 1;
  s.routing[0].topk_ids = {-1, 9, -1, -1};  // a token without experts yields its bias, including -0
  ExpectedSums(s, c, 0).make(0, out.data());
  fill_row(x.data(), DType::bf16, 24, row_key(s.seed, 0, RowKind::bias, 0, 0, 0));
  EXPECT_EQ(row_difference(out.data(), x.data(), DType::bf16, 24), "");
}

// With capacity 5, rank 0 drops the second of the two rows of its expert 2.
TEST(Scenarios, CombineAfterDropsByHand) {
  const Scenario s = small_scenario(Layout::expert_major);
  CombineCase c;
  c.identity = true;
  c.capacity = 5;
  std::vector<std::byte> x(48), out(48);
  fill_row(x.data(), DType::bf16, 24, row_key(s.seed, 0, RowKind::token, 1, 0));
  ExpectedSums(s, c, 1).make(0, out.data());
  for (int64_t i = 0; i < 24; ++i)
    EXPECT_EQ(oracle::load(DType::bf16, out.data(), i),
              oracle::rounded(DType::bf16, 0.125f * oracle::load(DType::bf16, x.data(), i)));
}

TEST(Scenarios, AnExpertNamedAgainIsOneRow) {
  Scenario s = small_scenario(Layout::expert_major);
  s.alignment = 1;
  CombineCase c;
  c.order = CombineOrder::per_route;
  c.repeats_alias = true;
  std::vector<std::byte> y(48), out(48);
  fill_row(y.data(), DType::bf16, 24, output_key(s, 0, 0, {1, 0, 0}));
  ExpectedSums(s, c, 1).make(0, out.data());
  for (int64_t i = 0; i < 24; ++i) {
    const float value = oracle::load(DType::bf16, y.data(), i);
    EXPECT_EQ(oracle::load(DType::bf16, out.data(), i), oracle::rounded(DType::bf16, 0.125f * value + 0.875f * value));
  }
}

/// Runs an exchange on two ranks, lets `spoil` modify one rank's result, and returns whether all checks passed.
bool passes(Layout layout, const std::function<void(Dispatched&)>& spoil, const std::function<void(void*)>& spoil_out = {}) {
  const Scenario s = small_scenario(layout);
  RankJob job;
  job.world = 2;
  NormalConfig config;
  config.hidden = s.hidden;
  config.num_experts = s.experts;
  config.topk = s.topk;
  config.max_tokens = 2;
  config.layout = layout;
  config.expert_alignment = s.alignment;
  job.group.heap_bytes = NormalExchange::heap_bytes(config, 2);
  const std::vector<json> results = run_ranks(job, [&](Group& group, RankLink&) -> json {
    NormalExchange exchange(group, config);
    const int rank = group.rank();
    const Routing& mine = s.routing[static_cast<size_t>(rank)];
    const RowArray x = token_rows(s.seed, 0, rank, mine.num_tokens, s.hidden, DType::bf16, ScaleKind::none);
    Dispatched d = exchange.dispatch(x.view(), mine.expert_ids(), mine.topk_weights.data());
    RowArray out(mine.num_tokens, s.hidden, DType::bf16);
    exchange.combine(d.x, d.handle, out.row(0));
    if (rank == 0 && spoil) spoil(d);
    if (rank == 0 && spoil_out) spoil_out(out.row(0));
    CombineCase c;
    c.identity = true;
    const CheckResult rows = check_dispatched("dispatch", s, rank, d, {}, true);
    const CheckResult sums = check_combined("combine", s, rank, out.row(0), c);
    EXPECT_EQ(rows.passed, rows.detail.empty());
    EXPECT_EQ(sums.passed, sums.detail.empty());
    return rows.passed && sums.passed;
  });
  return results[0].get<bool>() && results[1].get<bool>();
}

TEST(ExchangeCheck, AcceptsTheRightResult) {
  EXPECT_TRUE(passes(Layout::rank_major, {}));
  EXPECT_TRUE(passes(Layout::expert_major, {}));
}

TEST(ExchangeCheck, RefusesEveryKindOfDamage) {
  const auto flip = [](void* p, size_t at) { static_cast<uint8_t*>(p)[at] ^= 1; };
  for (const Layout layout : {Layout::rank_major, Layout::expert_major}) {
    EXPECT_FALSE(passes(layout, [&](Dispatched& d) { flip(d.x.data, 0); }));
    EXPECT_FALSE(
        passes(layout, [&](Dispatched& d) { flip(d.x.data, 2 * 48 - 1); }));  // last byte of row 1: padding if expert-major
    EXPECT_FALSE(passes(layout, [](Dispatched& d) { ++d.rows; }));
    EXPECT_FALSE(passes(layout, [](Dispatched& d) { const_cast<int64_t&>(d.tokens_per_expert[1]) += 1; }));
    EXPECT_FALSE(passes(layout, [](Dispatched& d) { const_cast<int64_t&>(d.aligned_per_expert[1]) += 4; }));
    EXPECT_FALSE(passes(layout, {}, [&](void* out) { flip(out, 17); }));
  }
  EXPECT_FALSE(passes(Layout::rank_major, [](Dispatched& d) { const_cast<int32_t&>(d.topk_ids[1]) = 0; }));
  EXPECT_FALSE(passes(Layout::rank_major, [](Dispatched& d) { const_cast<float&>(d.topk_weights[0]) = 0; }));
  EXPECT_FALSE(passes(Layout::rank_major, [](Dispatched& d) { const_cast<int32_t&>(d.source_token[1]) = 1; }));
  EXPECT_FALSE(passes(Layout::expert_major, [](Dispatched& d) { const_cast<int64_t&>(d.row_source[5]) -= int64_t{1} << 32; }));
  EXPECT_FALSE(passes(Layout::expert_major, [](Dispatched& d) { const_cast<float&>(d.row_weights[4]) = 2; }));
  EXPECT_FALSE(passes(Layout::expert_major, [](Dispatched& d) { const_cast<int64_t&>(d.expert_first_row[2]) = 1; }));
}

TEST(CheckResults, AreSkippedUntilARankFails) {
  const std::vector<CheckResult> there = {{"a", true, "", 3}}, absent = {skipped("a", "no such form")},
                                 wrong = {{"a", false, "differs", 3}};
  for (const auto merge : {merged_by_name, merged_by_place}) {
    const CheckResult both = merge({encode_checks(absent), encode_checks(absent)})[0];
    EXPECT_TRUE(both.passed && both.skipped);
    EXPECT_EQ(both.detail, "no such form");
    EXPECT_TRUE(merge({encode_checks(there), encode_checks(absent)})[0].skipped);
    EXPECT_FALSE(merge({encode_checks(there), encode_checks(there)})[0].skipped);
    for (const auto& ranks :
         {std::vector{encode_checks(absent), encode_checks(wrong)}, std::vector{encode_checks(wrong), encode_checks(absent)}}) {
      const CheckResult failed = merge(ranks)[0];
      EXPECT_FALSE(failed.passed || failed.skipped);
      EXPECT_NE(failed.detail.find("differs"), std::string::npos);
    }
  }
  EXPECT_TRUE(checks_json(absent)[0].at("skipped").get<bool>());
}

TEST(MoeReference, SeesAWrongExpertAndAMissingRoute) {
  const int64_t hidden = 64, intermediate = 32;
  const ExpertWeights weights(1, hidden, intermediate);
  const RowArray x = token_rows(1, 0, 0, 4, hidden, DType::bf16, ScaleKind::none);
  ReferenceInput input;
  input.rows = {reinterpret_cast<const uint16_t*>(x.row(0))};
  input.routing = {{8, 2, 4, {0, 1, 2, 3, 4, 5, 6, 7}, std::vector<float>(8, 0.5f)}};
  const auto right = moe_reference(input, weights, hidden, intermediate, 2, {});
  std::vector<uint16_t> out(static_cast<size_t>(4 * hidden));
  for (size_t i = 0; i < out.size(); ++i) oracle::store(DType::bf16, out.data(), static_cast<int64_t>(i), right[0][i]);
  for (int64_t t = 0; t < 4; ++t)
    EXPECT_LT(row_error(&out[static_cast<size_t>(t * hidden)], &right[0][static_cast<size_t>(t * hidden)], hidden), 0.004);

  ExpertMlp mlp({hidden, intermediate, 8}, weights.source(0));  // the library's experts agree with the plain loops
  std::vector<uint16_t> y(static_cast<size_t>(4 * hidden));
  mlp.forward_rank_major(input.rows[0], input.routing[0].expert_ids(), input.routing[0].topk_weights.data(), y.data());
  for (int64_t t = 0; t < 4; ++t)
    EXPECT_LT(row_error(&y[static_cast<size_t>(t * hidden)], &right[0][static_cast<size_t>(t * hidden)], hidden), 1.0 / 64);

  input.routing[0].topk_ids[2] = 3;
  input.routing[0].topk_ids[4] = -1;
  const auto wrong = moe_reference(input, weights, hidden, intermediate, 1, {});
  EXPECT_LT(row_error(out.data(), wrong[0].data(), hidden), 0.004);
  EXPECT_GT(row_error(&out[static_cast<size_t>(hidden)], &wrong[0][static_cast<size_t>(hidden)], hidden), 0.2);
  EXPECT_GT(row_error(&out[static_cast<size_t>(2 * hidden)], &wrong[0][static_cast<size_t>(2 * hidden)], hidden), 0.2);
}

// -------------------------------------------------------------------------------------------------------- report and measuring

TEST(Report, IsOneFileThatFetchesNothingAndCannotBeBrokenByItsData) {
  const json data = {{"meta", {{"Routing", "</script><script>alert(1)</script><!-- \"quoted\""}}}};
  const std::string page = report_html(data);
  EXPECT_EQ(page.find("alert(1)</script>"), std::string::npos);
  for (const char* outside : {"http:", "https:", "src=", "href=", "@import", "url(h", "url('", "url(\""}) {
    // The SVG namespace is a name, not an address to fetch.
    std::string text = page;
    const size_t name = text.find("'http://www.w3.org/2000/svg'");
    ASSERT_NE(name, std::string::npos);
    text.erase(name, 28);
    EXPECT_EQ(text.find(outside), std::string::npos) << outside;
  }
  const size_t begin = page.find("id=\"data\">") + 10;
  EXPECT_EQ(json::parse(page.substr(begin, page.find("</script>", begin) - begin)), data);
}

TEST(Report, NothingRoutedIsNoDivisionByZero) {
  const std::string page = report_html(json::object());
  EXPECT_NE(page.find("mean ? n / mean : 0"), std::string::npos);
  EXPECT_EQ(page.find("/ mean)"), std::string::npos);
}

TEST(Report, UnwritablePathIsNamed) {
  try {
    write_report("/nonexistent-folder/report.html", {});
    FAIL() << "no error";
  } catch (const std::runtime_error& e) {
    EXPECT_NE(std::string(e.what()).find("cannot write /nonexistent-folder/report.html"), std::string::npos) << e.what();
  }
}

TEST(Measure, PercentilesByNearestRank) {
  std::vector<double> v;
  for (int i = 100; i >= 1; --i) v.push_back(i);
  const measure::Times t = measure::summarize(v);
  EXPECT_EQ(t.p50, 50);
  EXPECT_EQ(t.p99, 99);
  EXPECT_EQ(t.min, 1);
  EXPECT_EQ(t.max, 100);
  EXPECT_EQ(measure::summarize({7.0}).p99, 7);
  EXPECT_STREQ(measure::tail_name(100), "p99");
  v.pop_back();  // p99 of 99 values is the maximum
  EXPECT_EQ(measure::summarize(v).p99, 100);
  EXPECT_STREQ(measure::tail_name(99), "max");
  EXPECT_EQ(measure::slowest({{1, 5, 2}, {3, 4, 2}}), (std::vector<double>{3, 5, 2}));
}

TEST(Measure, ALimitThatIsHardToBelieveIsNoted) {
  EXPECT_EQ(limit_note(0.9), "");
  EXPECT_EQ(limit_note(1.0), "");
  EXPECT_NE(limit_note(1.038).find("103.8 %"), std::string::npos) << limit_note(1.038);
}

TEST(Measure, UniformRoutingHasItsMeanNumberOfRanks) {
  using switchyard::tool::check_mean_ranks;
  using switchyard::tool::expected_mean_ranks;
  EXPECT_DOUBLE_EQ(expected_mean_ranks(2, 2, 2), 2);
  EXPECT_NEAR(expected_mean_ranks(2, 4, 2), 2.0 - 1.0 / 3, 1e-12);  // both choices on one rank: 2 of 6 pairs
  const double mean = expected_mean_ranks(4, 256, 8);
  EXPECT_NEAR(mean, 3.614, 0.001);
  EXPECT_NO_THROW(check_mean_ranks(mean * 1.0099, 4, 256, 8, 1));
  EXPECT_NO_THROW(check_mean_ranks(mean * 0.9901, 4, 256, 8, 1));
  for (const double off : {1.0101, 0.9899}) {
    try {
      check_mean_ranks(mean * off, 4, 256, 8, 7);
      ADD_FAILURE() << off;
    } catch (const switchyard::tool::UsageError& e) {
      EXPECT_NE(std::string(e.what()).find("--seed: 7 gives"), std::string::npos) << e.what();
    }
  }
  EXPECT_NO_THROW(check_mean_ranks(1, 3, 256, 8, 1));  // uneven shares: there is no expected value
}

TEST(Measure, BytesByHand) {
  const measure::ExchangeBytes b = measure::exchange_bytes(10, 30, 20, 80, 2, 3, 5);
  EXPECT_EQ(b.logical, 240);
  EXPECT_EQ(b.payload, 90);
  EXPECT_EQ(b.remote, 60);
  EXPECT_EQ(b.dispatch_limit, 110);
  EXPECT_EQ(b.combine_limit, 200);
  EXPECT_EQ(measure::rotation_sets(10, 100, 1e9), 32);
  EXPECT_EQ(measure::rotation_sets(100, 100, 1e9), 4);
  EXPECT_EQ(measure::rotation_sets(1e9, 100, 1e9), 2);
  EXPECT_EQ(measure::rotation_sets(100, 1000, 700), 7);
}

TEST(Measure, StreamCopyCopiesEveryByteAndNoMore) {
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{63}, size_t{64}, size_t{65}, size_t{4096}, size_t{100001}}) {
    std::vector<std::byte> from(bytes + 8), storage(bytes + 256, std::byte{0xAB});
    for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 7 + 1);
    const size_t offset = 64 - reinterpret_cast<uintptr_t>(storage.data()) % 64;
    measure::stream_copy(storage.data() + offset, from.data() + 3, bytes);
    EXPECT_EQ(std::memcmp(storage.data() + offset, from.data() + 3, bytes), 0) << bytes;
    for (size_t i = 0; i < 64; ++i) ASSERT_EQ(storage[offset + bytes + i], std::byte{0xAB}) << bytes;
  }
}

}  // namespace
}  // namespace switchyard::tool
