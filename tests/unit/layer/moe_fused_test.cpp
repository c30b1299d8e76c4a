// SPDX-License-Identifier: Apache-2.0
// MoeForm::fused on the CPU: every element of every output has the same bits as with MoeForm::separate, regardless of the
// number of ranks and workers, the routing and the sizes. Ranks are threads. modes/fused/fused_group_test.cpp contains tests
// with processes and integer products.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "harness/draw.hpp"
#include "harness/outcome.hpp"
#include "oracle/numbers.hpp"
#include "switchyard/layer.hpp"

namespace switchyard {
namespace {

using harness::Draw;
using harness::Outcome;
using harness::outcome_of;

/// Two layers in one group, one in each form, and the inputs for their calls.
struct Comparison {
  MoeLayerConfig config;
  std::vector<int64_t> tokens = {20};  ///< of each rank
  int workers = 1;
  bool one_expert = false;  ///< the last expert has all routes; else they go to any, one in eight to none
  bool weighted = true, add = false;
  int calls = 2;

  int world() const { return static_cast<int>(tokens.size()); }
};

std::string to_string(const Comparison& c) {
  std::string text = std::to_string(c.workers) + " workers, T";
  for (const int64_t t : c.tokens) text += " " + std::to_string(t);
  const MoeLayerConfig& m = c.config;
  return text + ", H " + std::to_string(m.hidden) + ", I " + std::to_string(m.intermediate) + ", E " +
         std::to_string(m.num_experts) + ", K " + std::to_string(m.topk) + ", capacity " + std::to_string(m.capacity) +
         (m.overflow == Overflow::fail ? "" : ", drops") + (m.storage == WeightStorage::view ? ", view" : ", packed") + ", " +
         to_string(m.order) + (c.one_expert ? ", one expert" : "") + (c.weighted ? "" : ", unweighted") +
         (c.add ? ", add" : "");
}

Comparison comparison(std::vector<int64_t> tokens, int workers) {
  Comparison c;
  c.tokens = std::move(tokens);
  c.workers = workers;
  c.config.hidden = 64;
  c.config.intermediate = 40;
  c.config.num_experts = 2 * c.world() + 1;
  c.config.topk = 3;
  c.config.max_tokens = *std::max_element(c.tokens.begin(), c.tokens.end());
  c.config.exchange = MoeExchange::normal;
  return c;
}

/// Token counts, different on each rank; if there are several ranks, one has 0.
std::vector<int64_t> some_tokens(int world, int64_t max = 40) {
  std::vector<int64_t> tokens;
  for (int r = 0; r < world; ++r) tokens.push_back(world > 1 && r == 1 ? 0 : max - 7 * r % 5);
  return tokens;
}

/// `n` bf16 values in [-1, 1].
std::vector<uint16_t> some_rows(Draw& draw, int64_t n) {
  std::vector<uint16_t> rows(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    const auto value = static_cast<float>(draw.between(-1000, 1000)) / 1000;
    oracle::store(DType::bf16, reinterpret_cast<std::byte*>(rows.data()), i, value);
  }
  return rows;
}

/// Description of the first difference in a call's outputs; empty if there is no difference.
std::string difference(const std::vector<uint16_t>& expected, const std::vector<uint16_t>& got) {
  for (size_t i = 0; i < got.size(); ++i)
    if (got[i] != expected[i])
      return "element " + std::to_string(i) + " is " + std::to_string(got[i]) + ", by separate calls " +
             std::to_string(expected[i]);
  return "";
}

/// Description of a difference on this rank; empty if there is no difference.
std::string compare(Group& group, const Comparison& c) {
  const MoeLayerConfig& m = c.config;
  Draw draw(static_cast<uint64_t>(group.rank()) + 100);
  const int local_experts =
      first_expert(m.num_experts, c.world(), group.rank() + 1) - first_expert(m.num_experts, c.world(), group.rank());
  const std::vector<uint16_t> w13 = some_rows(draw, local_experts * 2 * m.intermediate * m.hidden);
  const std::vector<uint16_t> w2 = some_rows(draw, local_experts * m.intermediate * m.hidden);
  MoeLayerConfig separate = m, fused = m;
  separate.form = MoeForm::separate;
  fused.form = MoeForm::fused;
  MoeLayer by_calls(group, separate, w13.data(), w2.data()), layer(group, fused, w13.data(), w2.data());
  const int64_t tokens = c.tokens[static_cast<size_t>(group.rank())];
  std::string found;  // in the first call with a difference; later calls are still made, as on other ranks
  for (int call = 0; call < c.calls; ++call) {
    const std::vector<uint16_t> x = some_rows(draw, tokens * m.hidden);
    std::vector<int32_t> ids;
    std::vector<float> weights;
    for (int64_t f = 0; f < tokens * m.topk; ++f) {
      const auto any = draw.one_in(8) ? -1 : static_cast<int32_t>(draw.between(0, m.num_experts - 1));
      ids.push_back(c.one_expert ? m.num_experts - 1 : any);
      weights.push_back(static_cast<float>(draw.between(1, 1000)) / 500);
    }
    std::vector<uint16_t> expected = some_rows(draw, tokens * m.hidden), got = expected;
    const auto forward = [&](MoeLayer& of, std::vector<uint16_t>& out) {
      return outcome_of([&] {
        of.forward(x.data(), ExpertIds::of(ids.data(), tokens, m.topk), c.weighted ? weights.data() : nullptr, out.data(),
                   {.add = c.add});
      });
    };
    const Outcome ended = forward(by_calls, expected), end = forward(layer, got);
    std::string wrong = difference(expected, got);
    if (end.code != ended.code) wrong = harness::shown(end) + ", and by separate calls " + harness::shown(ended);
    const auto dropped = layer.dropped(), expected_drops = by_calls.dropped();
    if (!std::equal(dropped.begin(), dropped.end(), expected_drops.begin(), expected_drops.end()))
      wrong = "other routes were dropped";
    if (!wrong.empty() && found.empty())
      found = "rank " + std::to_string(group.rank()) + ", call " + std::to_string(call) + ": " + wrong;
  }
  return found;
}

void expect_equal_in_order(const Comparison& c) {
  SCOPED_TRACE(to_string(c));
  GroupOptions options;
  MoeLayerConfig fused = c.config;
  fused.form = MoeForm::fused;
  options.heap_bytes = MoeLayer::heap_bytes(c.config, c.world()) + MoeLayer::heap_bytes(fused, c.world());
  options.num_blocks = c.workers > 2 ? 2 : 1;
  options.num_warps = (c.workers + options.num_blocks - 1) / options.num_blocks;
  options.timeout = std::chrono::minutes(2);
  std::vector<Group> groups = Group::in_process(c.world(), options);
  std::vector<std::string> found(groups.size());
  launch::on_threads(groups.size(), [&](size_t r) {
    const Outcome end = outcome_of([&] { found[r] = compare(groups[r], c); });
    found[r] += end.text;
  });
  for (const std::string& text : found) EXPECT_EQ(text, "");
}

/// In both orders.
void expect_equal(Comparison c) {
  for (const CombineOrder order : {CombineOrder::per_route, CombineOrder::per_rank}) {
    c.config.order = order;
    expect_equal_in_order(c);
  }
}

/// If a rank has a single worker, the worker performs all steps in turn.
TEST(FusedForm, HasTheBitsOfSeparateCalls) {
  for (const int world : {1, 2, 3, 8})
    for (const int workers : {1, 2, 4}) expect_equal(comparison(some_tokens(world), workers));
}

TEST(FusedForm, AddsToWhatIsThere) {
  for (const int world : {1, 3}) {
    Comparison c = comparison(some_tokens(world), 2);
    c.add = true;
    expect_equal(c);
    c.weighted = false;
    expect_equal(c);
  }
}

/// Tests more rows than fit into a tile, and padded tiles.
TEST(FusedForm, CutsAnExpertsRowsAsSeparateCallsDo) {
  for (const int64_t tokens : {1, 3, 33, 257, 300, 600}) {
    for (const WeightStorage storage : {WeightStorage::packed, WeightStorage::view}) {
      Comparison c = comparison({tokens, tokens / 2}, 3);
      c.config.hidden = 520;  // enough elements that one would be rounded differently if the float32 sums differed
      c.config.intermediate = 264;
      c.config.topk = 1;
      c.config.storage = storage;
      c.one_expert = true;
      c.calls = 1;
      expect_equal(c);
    }
  }
}

TEST(FusedForm, TakesNoTokens) {
  for (const int world : {1, 3}) {
    Comparison c = comparison(std::vector<int64_t>(static_cast<size_t>(world), 0), 2);
    expect_equal(c);
    c.config.max_tokens = 5;
    expect_equal(c);
  }
}

TEST(FusedForm, HasRanksWithoutExperts) {
  Comparison c = comparison(some_tokens(8), 2);
  c.config.num_experts = 3;
  expect_equal(c);
}

TEST(FusedForm, DropsAndFailsAsSeparateCallsDo) {
  for (const Overflow overflow : {Overflow::fail, Overflow::drop_and_report}) {
    for (const int64_t capacity : {1, 30, 100000}) {
      for (const bool one_expert : {false, true}) {
        Comparison c = comparison(some_tokens(3), 2);
        c.config.capacity = capacity;
        c.config.overflow = overflow;
        c.one_expert = one_expert;
        c.calls = 3;
        expect_equal(c);
      }
    }
  }
}

/// SWITCHYARD_RANDOM_LAYERS sets the number of layers (default 40).
TEST(FusedForm, RandomShapes) {
  const uint64_t layers = harness::from_environment("SWITCHYARD_RANDOM_LAYERS", 40);
  for (uint64_t i = 0; i < layers && !HasFailure(); ++i) {
    Draw draw(i + 7000);
    std::vector<int64_t> tokens(static_cast<size_t>(draw.between(1, 5)));
    for (int64_t& t : tokens) t = draw.one_in(5) ? 0 : draw.between(1, draw.one_in(6) ? 400 : 60);
    Comparison c = comparison(std::move(tokens), static_cast<int>(draw.between(1, 4)));
    c.config.hidden = 8 * draw.between(1, 40);
    c.config.intermediate = 8 * draw.between(1, 40);
    c.config.num_experts = static_cast<int>(draw.between(1, 20));
    c.config.topk = static_cast<int>(draw.between(1, 8));
    c.config.max_tokens += draw.between(0, 3);
    if (draw.one_in(3)) {
      c.config.capacity = draw.between(1, 200);
      c.config.overflow = draw.one_in(3) ? Overflow::fail : Overflow::drop_and_report;
    }
    c.config.storage = draw.one_in(2) ? WeightStorage::view : WeightStorage::packed;
    c.one_expert = draw.one_in(6);
    c.weighted = !draw.one_in(4);
    c.add = draw.one_in(3);
    expect_equal(c);
  }
}

}  // namespace
}  // namespace switchyard
