// SPDX-License-Identifier: Apache-2.0
// Acceptance cases B1 to B13 and C2 of normal mode, in sizes suitable for testing every change; full_test.cpp covers the full
// sizes.
//
// Entries: acceptance_b_threads, acceptance_b_processes.
#include <cmath>
#include <cstring>

#include "modes/normal/acceptance.hpp"
#include "oracle/rows.hpp"

namespace harness {
namespace {

using switchyard::Dispatched;
using switchyard::NormalExchange;

constexpr Layout kLayouts[] = {Layout::rank_major, Layout::expert_major};

class B : public Acceptance {};

TEST_P(B, B01_EveryOutputAndHandleField) {
  std::vector<Scenario> all;
  for (const Layout layout : kLayouts) {
    for (const Routing routing : {Routing::uniform, Routing::zipf, Routing::duplicates, Routing::round_robin}) {
      Scenario s = base("B01 " + to_string(routing), 32, 8, 21, layout);
      s.routing = routing;
      s.int64_ids = routing != Routing::zipf;
      s.weights = routing != Routing::round_robin;
      all.push_back(s);
    }
  }
  expect_exact(all);
}

TEST_P(B, B02_CombineOfDispatchedRows) {
  std::vector<Scenario> all;
  for (const Pattern pattern : {Pattern::small_integers, Pattern::random_values}) {
    Scenario s = base("B02", 12, 4, 19);
    s.x_pattern = pattern;
    s.identity = true;
    s.output_memory = OutputMemory::in_place;
    s.replace_weights = true;
    s.drop_percent = 10;
    all.push_back(s);
    s.output_memory = OutputMemory::ordinary;
    all.push_back(s);
  }
  expect_exact(all);
}

/// Checked in addition to the oracle: with small integers, identity experts give exactly (ranks reached) * x, or (valid routes)
/// * x for per_route.
TEST_P(B, B02_ClosedForm) {
  for (const Layout layout : kLayouts) {
    Scenario s = base("B02 closed form", 9, 3, 23, layout);
    s.x_pattern = Pattern::small_integers;
    s.identity = true;
    s.output_memory = OutputMemory::in_place;
    s.order = layout == Layout::rank_major ? CombineOrder::per_rank : CombineOrder::per_route;
    s.apply_weights = false;
    s.drop_percent = 15;
    s.weights = false;
    const auto c = make_case(s);
    expect_clean(heap_bytes({c}), [&](switchyard::Group& group, Failures& f) {
      NormalExchange exchange(group, make_config(*c));
      RankData data(*c, group.rank(), 0);
      const RankData rows(*c, group.rank(), 0);
      ScenarioCalls calls(group, exchange, *c, f);
      (void)calls.round(data);
      const auto& view = c->expected.ranks[static_cast<size_t>(group.rank())];
      for (int64_t t = 0; t < c->problem.tokens(group.rank()); ++t) {
        int64_t terms = static_cast<int64_t>(view.sends[static_cast<size_t>(t)].size());
        if (layout == Layout::expert_major) {
          terms = 0;
          for (int k = 0; k < 3; ++k) terms += view.kept_ids[static_cast<size_t>(t * 3 + k)] >= 0;
        }
        for (int64_t column = 0; column < s.hidden; ++column) {
          const float x = oracle::load(DType::bf16, rows.x().data, t * s.hidden + column);
          if (!f.equal(static_cast<float>(terms) * x, oracle::load(DType::bf16, data.out(), t * s.hidden + column), "out"))
            return;
        }
      }
    });
  }
}

TEST_P(B, B03_Drops) {
  std::vector<Scenario> all;
  for (const Layout layout : kLayouts) {
    for (const int percent : {10, 60, 100}) {
      Scenario s = base("B03 drop " + std::to_string(percent), 16, 4, 25, layout);
      s.drop_percent = percent;
      s.replace_weights = layout == Layout::rank_major;
      all.push_back(s);
    }
  }
  expect_exact(all);
}

TEST_P(B, B04_Alignment) {
  std::vector<Scenario> all;
  for (const Layout layout : kLayouts) {
    for (const int alignment : {1, 32, 128}) {
      Scenario s = base("B04 alignment " + std::to_string(alignment), 6, 2, 13, layout);
      s.problem.alignment = alignment;
      s.repeats = 1;
      all.push_back(s);
    }
    Scenario s = base("B04 unspecified padding", 6, 2, 13, layout);
    s.problem.alignment = 16;
    s.padding = switchyard::Padding::unspecified;
    all.push_back(s);
  }
  expect_exact(all);
}

TEST_P(B, B05_TokenEdges) {
  constexpr int64_t kTokens[] = {0, 1, 9, 10, 11, 257};
  std::vector<Scenario> all;
  for (const Layout layout : kLayouts) {
    for (size_t shift = 0; shift < 6; ++shift) {
      Scenario s = base("B05 shift " + std::to_string(shift), 8, 2, 0, layout);
      for (size_t r = 0; r < s.tokens.size(); ++r) s.tokens[r] = kTokens[(r + shift) % 6];
      s.hidden = 16;
      s.ring = {10, 6, shift % 2 == 0 ? 256 : 8};
      s.repeats = 1;
      s.check_views = shift == 5;
      all.push_back(s);
    }
  }
  expect_exact(all);
}

TEST_P(B, B06_AllToOneRank) {
  std::vector<Scenario> all;
  for (const Layout layout : kLayouts) {
    for (const int chunk : {1, 4}) {
      Scenario s = base("B06 chunk " + std::to_string(chunk), 8, 2, 61, layout);
      s.routing = Routing::one_rank;
      s.hidden = 32;
      s.ring = {2, chunk, 4};
      s.repeats = 1;
      all.push_back(s);
    }
  }
  expect_exact(all);
}

TEST_P(B, B07_Shapes) {
  std::vector<Scenario> all;
  constexpr std::pair<int64_t, int> kShapes[] = {{8, 8}, {64, 32}, {2048, 2}, {7168, 1}, {7168, 8}};
  for (const Layout layout : kLayouts) {
    for (const auto& [hidden, topk] : kShapes) {
      Scenario s =
          base("B07 H" + std::to_string(hidden) + " K" + std::to_string(topk), 40, topk, hidden > 2000 ? 3 : 7, layout);
      s.hidden = hidden;
      s.repeats = 1;
      s.cached = hidden < 2000;
      s.ring = {2, 3, 32};
      all.push_back(s);
    }
  }
  expect_exact(all);
}

TEST_P(B, B08_WorstCaseSizes) {
  std::vector<Scenario> all;
  for (const Layout layout : kLayouts) {
    for (const Routing routing : {Routing::uniform, Routing::one_expert, Routing::one_rank}) {
      Scenario s = base("B08 " + to_string(routing), 7, 3, 11, layout);
      s.routing = routing;
      s.problem.size = switchyard::SizePolicy::worst_case;
      s.problem.alignment = 4;
      s.drop_percent = 10;
      all.push_back(s);
    }
  }
  expect_exact(all);
}

TEST_P(B, B09_Fp8RowsTravelUntouched) {
  std::vector<Scenario> all;
  for (const Layout layout : kLayouts) {
    for (const ScaleKind kind : {ScaleKind::f32, ScaleKind::ue8m0}) {
      for (const int64_t hidden : {int64_t{128}, int64_t{1040}}) {
        Scenario s = base("B09 H" + std::to_string(hidden), 10, 3, 14, layout);
        s.x_type = DType::fp8_e4m3;
        s.x_scales = kind;
        s.hidden = hidden;
        s.problem.alignment = 2;
        all.push_back(s);
      }
    }
  }
  expect_exact(all);
}

/// CPU calls are synchronous: the caller may reuse its inputs when a call returns, on every rank, however late its peers are.
/// The harness always overwrites all inputs after each call. This test adds long delays and uses every output memory, with no
/// cached calls in between.
TEST_P(B, B10_BuffersAreFreeOnReturn) {
  std::vector<Scenario> all;
  for (const Layout layout : kLayouts) {
    for (const OutputMemory memory :
         {OutputMemory::row_buffer, OutputMemory::ordinary, OutputMemory::in_place, OutputMemory::registered}) {
      if (memory == OutputMemory::registered && ranks_of_suite() == Ranks::processes && kBackend == switchyard::Backend::cpu)
        continue;
      Scenario s = base("B10", 8, 2, 17, layout);
      if (memory == OutputMemory::registered && layout == Layout::expert_major) s.order = CombineOrder::per_route;
      s.output_memory = memory;
      s.max_delay_us = 4000;
      s.repeats = 2;
      s.cached = memory == OutputMemory::ordinary;
      all.push_back(s);
    }
  }
  expect_exact(all);
}

TEST_P(B, B11_HandlesAreReusable) {
  for (const Staging staging : {Staging::direct, Staging::ring}) {
    Scenario s = base("B11", 8, 3, 15, Layout::expert_major);
    s.staging = staging;
    const auto first = make_case(s);
    s.seed = 2;
    s.drop_percent = 20;
    for (auto& tokens : s.tokens) tokens = tokens * 2 / 3;
    s.problem.max_tokens = 15;
    const auto second = make_case(s);
    expect_clean(3 * heap_bytes({first}), [&](switchyard::Group& group, Failures& f) {
      switchyard::NormalConfig config = make_config(*first);
      config.pool_bytes *= 2;
      NormalExchange exchange(group, config);
      RankData a(*first, group.rank(), 0), b(*second, group.rank(), 0), c(*first, group.rank(), 7);
      ScenarioCalls firsts(group, exchange, *first, f), seconds(group, exchange, *second, f);
      firsts.at("dispatch");
      const Dispatched da = firsts.dispatch(a);
      seconds.at("dispatch");
      const Dispatched db = seconds.dispatch(b);
      const auto bytes = da.handle.serialize();
      auto combine = [&](ScenarioCalls& calls, RankData& data, const Dispatched& d, const switchyard::Handle& handle,
                         const std::string& step) {
        calls.at(step);
        calls.combine(data, d, handle);
      };
      combine(seconds, b, db, db.handle, "second first");
      combine(firsts, a, da, da.handle, "first later");
      combine(firsts, a, da, da.handle, "first again");
      const switchyard::Handle from_bytes = switchyard::Handle::deserialize(bytes);
      if (group.hosts() > 1) {  // the bytes do not include the crossing tokens
        firsts.at("cached from bytes");
        group.barrier();  // an error ends calls that other ranks have not completed
        const Outcome o = outcome_of([&] { (void)firsts.dispatch(c, &from_bytes); });
        f.equal(static_cast<int>(switchyard::ErrorCode::unsupported), static_cast<int>(cause_of(o)), o.text);
        return;
      }
      combine(firsts, a, da, from_bytes, "first from bytes");
      firsts.at("cached from bytes");
      const Dispatched dc = firsts.dispatch(c, &from_bytes);
      combine(firsts, c, dc, dc.handle, "cached from bytes");
      combine(seconds, b, db, db.handle, "second again");
    });
  }
}

/// The criterion used by other libraries: 1 - 2<x, y> / (<x, x> + <y, y>) is below 5e-6 relative to a sum in double, or below
/// 1e-9 for weights.
TEST_P(B, B12_PeersCriterion) {
  Scenario s = base("B12", 16, 4, 33);
  s.x_pattern = Pattern::random_values;
  s.identity = true;
  s.hidden = 256;
  s.replace_weights = true;
  const auto c = make_case(s);
  expect_clean(heap_bytes({c}), [&](switchyard::Group& group, Failures& f) {
    NormalExchange exchange(group, make_config(*c));
    RankData data(*c, group.rank(), 0);
    const RankData rows(*c, group.rank(), 0);
    ScenarioCalls calls(group, exchange, *c, f);
    calls.at("dispatch");
    const Dispatched d = calls.dispatch(data);
    calls.at("combine of rows and weights as they came");
    const auto tokens = static_cast<size_t>(c->problem.tokens(group.rank()));
    RankMemory& memory = rank_memory(group);
    void* const out = memory.lend(data.out(), tokens * static_cast<size_t>(s.hidden) * 2);
    auto* const out_weights = static_cast<float*>(memory.lend(data.out_weights(), tokens * 4 * sizeof(float)));
    switchyard::CombineOptions options;
    options.topk_weights = d.topk_weights.data();
    options.stream = memory.stream();
    options.num_sms = make_dispatch_options(*c, group.rank()).num_sms;
    exchange.combine(d.x, d.handle, out, options, out_weights);
    memory.read(data.out(), out, tokens * static_cast<size_t>(s.hidden) * 2);
    memory.read(data.out_weights(), out_weights, tokens * 4 * sizeof(float));
    memory.release();
    const auto& view = c->expected.ranks[static_cast<size_t>(group.rank())];
    double xx = 0, yy = 0, xy = 0, weight_error = 0;
    for (int64_t t = 0; t < c->problem.tokens(group.rank()); ++t) {
      const auto ranks = static_cast<double>(view.sends[static_cast<size_t>(t)].size());
      for (int64_t column = 0; column < s.hidden; ++column) {
        const double x = ranks * double{oracle::load(DType::bf16, rows.x().data, t * s.hidden + column)};
        const double y = oracle::load(DType::bf16, data.out(), t * s.hidden + column);
        xx += x * x;
        yy += y * y;
        xy += x * y;
      }
      for (int64_t i = t * 4; i < t * 4 + 4; ++i) {
        weight_error = std::max(weight_error, std::fabs(double{data.weights()[i]} - double{data.out_weights()[i]}));
      }
    }
    f.check(xx == 0 || 1 - 2 * xy / (xx + yy) < 5e-6, "rows differ by " + std::to_string(1 - 2 * xy / (xx + yy)));
    f.check(weight_error < 1e-9, "weights differ by " + std::to_string(weight_error));
  });
}

TEST_P(B, B13_TypesOrdersWeightsBias) {
  std::vector<Scenario> all;
  int n = 0;
  for (const DType type : {DType::bf16, DType::f16, DType::f32}) {
    for (const Pattern pattern : {Pattern::random_values, Pattern::wild_values}) {
      for (const CombineOrder order : {CombineOrder::per_rank, CombineOrder::per_route}) {
        for (const Layout layout : kLayouts) {
          if (layout == Layout::rank_major && order == CombineOrder::per_route) continue;
          Scenario s =
              base("B13 type " + std::to_string(static_cast<int>(type)) + " order " + std::to_string(static_cast<int>(order)),
                   6, 4, 12, layout);
          s.x_type = s.y_type = type;
          s.y_pattern = pattern;
          s.order = order;
          s.routing = n % 3 == 0 ? Routing::duplicates : Routing::uniform;
          s.num_bias = n % 3;
          s.weights = n % 4 != 1;
          s.apply_weights = n % 5 != 2;
          s.replace_weights = order == CombineOrder::per_route ? n % 2 == 0 : layout == Layout::rank_major && n % 2 == 1;
          s.output_memory = static_cast<OutputMemory>(n % 3);
          s.drop_percent = n % 2 == 0 ? 10 : 0;
          s.first_epoch = n % 2 == 0 ? (uint64_t{1} << 40) - 3 : 1;  // the epoch wraps
          s.hidden = n % 2 == 0 ? 64 : 136;
          s.repeats = 2;
          all.push_back(s);
          ++n;
        }
      }
    }
  }
  expect_exact(all);
}

TEST_P(B, C02_OnlineQuantisation) {
  std::vector<Scenario> all;
  const int tokens = kSanitizer ? 6 : 24;  // the oracle quantizes element by element
  for (const DType type : {DType::bf16, DType::f16, DType::f32}) {
    for (const ScaleKind kind : {ScaleKind::f32, ScaleKind::ue8m0}) {
      for (const Layout layout : kLayouts) {
        Scenario s =
            base("C02 type " + std::to_string(static_cast<int>(type)) + " scales " + std::to_string(static_cast<int>(kind)), 6,
                 2, tokens, layout);
        s.x_type = type;
        s.quantize = kind;
        s.x_pattern = type == DType::f32 && layout == Layout::rank_major ? Pattern::wild_values : Pattern::quantise_cases;
        s.hidden = layout == Layout::rank_major ? 512 : 656;  // the last group is short
        s.problem.alignment = 4;
        s.repeats = 1;
        all.push_back(s);
      }
    }
  }
  expect_exact(all);
}

INSTANTIATE_TEST_SUITE_P(Normal, B, testing::ValuesIn(everywhere(true)), where_name);

}  // namespace
}  // namespace harness
