// SPDX-License-Identifier: Apache-2.0
// Acceptance cases A1, A3, A5 to A9, A12 and A13 of normal mode, in sizes suitable for testing every change; full_test.cpp
// covers the full sizes.
//
// Entries: acceptance_a_threads, acceptance_a_processes.
#include <cmath>
#include <deque>

#include "modes/normal/acceptance.hpp"
#include "testing/test_access.hpp"

namespace harness {
namespace {

using switchyard::Dispatched;
using switchyard::Error;
using switchyard::ErrorCode;
using switchyard::NormalExchange;

constexpr Layout kLayouts[] = {Layout::rank_major, Layout::expert_major};

class A : public Acceptance {};

TEST_P(A, A01_PlansAfterRealExchanges) {
  std::vector<Scenario> all;
  for (const Routing routing : kAllRoutings) {
    for (const int drops : {0, 10, 30}) {
      Scenario s = base("A01 " + to_string(routing), 11, 5, 13, drops == 10 ? Layout::rank_major : Layout::expert_major);
      s.routing = routing;
      s.drop_percent = drops;
      s.hidden = 8;
      s.repeats = 1;
      s.cached = false;
      all.push_back(s);
    }
  }
  expect_exact(all);
}

TEST_P(A, A03_ExpertMajorRowsAndWeights) {
  std::vector<Scenario> all;
  for (const Routing routing : {Routing::uniform, Routing::one_rank, Routing::duplicates}) {
    Scenario s = base("A03 " + to_string(routing), 3 * world() + 1, 4, 27, Layout::expert_major);
    s.routing = routing;
    s.problem.alignment = 8;
    s.order = routing == Routing::duplicates ? CombineOrder::per_rank : CombineOrder::per_route;
    all.push_back(s);
  }
  expect_exact(all);
}

TEST_P(A, A05_DroppedRoutes) {
  std::vector<Scenario> all;
  for (const Layout layout : kLayouts) {
    for (const int percent : {10, 30, 100}) {
      Scenario s = base("A05 drop " + std::to_string(percent), 8, 3, 40, layout);
      s.drop_percent = percent;
      s.num_bias = percent == 30 ? 1 : 0;
      s.order = layout == Layout::expert_major ? CombineOrder::per_route : CombineOrder::per_rank;
      s.hidden = 24;
      all.push_back(s);
    }
  }
  expect_exact(all);
}

/// One payload per (token, rank), regardless of the number of routes. The harness already compares the byte counters of every
/// dispatch with that rule; this test checks the figures themselves: exactly T payloads to one rank, and the expected share R /
/// K for uniform routing.
TEST_P(A, A06_TokensTravelOncePerRank) {
  for (const Staging staging : {Staging::direct, Staging::ring}) {
    Scenario s = base("A06", 8 * world(), 8, 50, Layout::expert_major);
    s.staging = staging;
    s.routing = Routing::one_rank;
    s.hidden = 8;
    s.max_delay_us = 0;
    const auto one_rank = make_case(s);
    s.routing = Routing::uniform;
    s.tokens.assign(s.tokens.size(), 8192 / world());
    s.problem.max_tokens = 8192;
    s.problem.layout = Layout::rank_major;
    const auto uniform = make_case(s);
    expect_clean(heap_bytes({one_rank, uniform}), [&](switchyard::Group& group, Failures& f) {
      uint64_t mine[2];
      {
        NormalExchange exchange(group, make_config(*one_rank));
        RankData data(*one_rank, group.rank(), 0);
        ScenarioCalls calls(group, exchange, *one_rank, f);
        calls.at("to one rank");
        (void)calls.dispatch(data);
        const auto stats = exchange.last_call();
        f.equal(uint64_t{50}, stats.payload_rows, "payload rows to one rank");
        f.equal(uint64_t{50} * 16, stats.remote_bytes + stats.local_bytes, "payload bytes to one rank");
        f.equal(one_rank->expected.ranks[static_cast<size_t>(group.rank())].rows,
                group.rank() + 1 == world() ? 8 * 50 * world() : 0, "rows");
      }
      NormalExchange exchange(group, make_config(*uniform));
      RankData data(*uniform, group.rank(), 0);
      ScenarioCalls calls(group, exchange, *uniform, f);
      calls.at("uniform");
      (void)calls.dispatch(data);
      mine[0] = exchange.last_call().payload_rows;
      mine[1] = static_cast<uint64_t>(uniform->problem.tokens(group.rank()));
      std::vector<uint64_t> all(2 * static_cast<size_t>(world()));
      group.all_gather(mine, sizeof mine, all.data());
      double rows = 0, tokens = 0;
      for (size_t r = 0; r < all.size(); r += 2) {
        rows += static_cast<double>(all[r]);
        tokens += static_cast<double>(all[r + 1]);
      }
      // Expected number of distinct ranks among 8 distinct experts out of 8 W: W * (1 - C(8 W - 8, 8) / C(8 W, 8)).
      double none = 1;
      for (int i = 0; i < 8; ++i) none *= (8.0 * world() - 8 - i) / (8.0 * world() - i);
      const double expected = world() * (1 - none);
      f.check(std::fabs(rows / tokens - expected) < 0.01 * expected,
              "a token reaches " + std::to_string(rows / tokens) + " ranks, expected " + std::to_string(expected));
    });
  }
}

TEST_P(A, A07_EmptyPairs) {
  std::vector<Scenario> all;
  for (const Layout layout : kLayouts) {
    auto add = [&](const std::string& name, const std::vector<int64_t>& tokens, Routing routing = Routing::uniform) {
      Scenario s = base("A07 " + name, 256, 8, 0, layout);
      s.tokens = tokens;
      s.routing = routing;
      s.hidden = 16;
      all.push_back(s);
    };
    const auto ranks = static_cast<size_t>(world());
    add("one token each", std::vector<int64_t>(ranks, 1));
    std::vector<int64_t> tokens(ranks, 6);
    tokens.back() = 0;
    add("none on the last rank", tokens);
    tokens.assign(ranks, 0);
    tokens[ranks / 2] = 6;
    add("none but on one rank", tokens);
    add("none at all", std::vector<int64_t>(ranks, 0));
    add("to the next rank only", std::vector<int64_t>(ranks, 9), Routing::single_peer);
    add("to itself only", std::vector<int64_t>(ranks, 9), Routing::own_rank);
  }
  expect_exact(all);
}

TEST_P(A, A08_CapacityFits) {
  std::vector<Scenario> all;
  for (const Layout layout : kLayouts) {
    for (const int percent : {100, 150}) {
      Scenario s = base("A08 capacity " + std::to_string(percent), 6, 3, 22, layout);
      s.problem.alignment = 4;
      s.capacity_percent = percent;
      all.push_back(s);
    }
  }
  expect_exact(all);
}

TEST_P(A, A08_CapacityDropsAndReports) {
  std::vector<Scenario> all;
  int n = 0;
  for (const Layout layout : kLayouts) {
    for (const int percent : {0, 1, 40, 75, 99}) {
      for (const Routing routing : {Routing::uniform, Routing::duplicates}) {
        Scenario s = base("A08 capacity " + std::to_string(percent) + " " + to_string(routing), 5, 4, 18, layout);
        s.routing = routing;
        s.problem.alignment = n % 3 == 0 ? 8 : 1;
        s.problem.overflow = switchyard::Overflow::drop_and_report;
        s.capacity_percent = percent == 0 ? 1 : percent;
        s.order = layout == Layout::expert_major && n % 2 == 1 ? CombineOrder::per_route : CombineOrder::per_rank;
        s.num_bias = n % 3;
        s.drop_percent = n % 2 == 0 ? 10 : 0;
        s.replace_weights = layout == Layout::rank_major;
        s.repeats = 2;
        all.push_back(s);
        if (percent == 0) all.back().tokens.assign(all.back().tokens.size(), 3);  // capacity 0
        ++n;
      }
    }
  }
  expect_exact(all);
}

TEST_P(A, A08_OverflowFailsEverywhereAndIsNotSticky) {
  for (const Layout layout : kLayouts) {
    Scenario s = base("A08 overflow", 4, 2, 16, layout);
    s.capacity_percent = 100;
    const auto c = make_case(s);
    const int overflowing = world() / 2;
    if (c->problem.capacity[static_cast<size_t>(overflowing)] == 0) continue;  // no expert on this rank
    expect_clean(heap_bytes({c}), [&](switchyard::Group& group, Failures& f) {
      NormalExchange exchange(group, make_config(*c));
      ScenarioCalls calls(group, exchange, *c, f);
      const int64_t needed = c->problem.capacity[static_cast<size_t>(group.rank())];
      const std::string of_overflowing = std::to_string(c->problem.capacity[static_cast<size_t>(overflowing)]);
      for (int attempt = 0; attempt < 3; ++attempt) {
        const std::string number = " " + std::to_string(attempt);
        RankData refused(*c, group.rank(), 0), data(*c, group.rank(), 0);
        calls.at("too small" + number);
        const Outcome o = calls.dispatch_at_capacity(refused, group.rank() == overflowing ? needed - 1 : needed);
        f.equal(static_cast<int>(ErrorCode::capacity_exceeded), static_cast<int>(o.code), "code: " + o.text);
        f.check(o.text.find("rank " + std::to_string(overflowing)) != std::string::npos &&
                    o.text.find(of_overflowing) != std::string::npos,
                o.text);
        group.check();
        calls.at("large enough" + number);
        (void)calls.dispatch(data);
      }
    });
  }
}

/// Many calls on one object, with random T and two live handles: dispatch, dispatch, combine, combine, with the oldest handle
/// first.
TEST_P(A, A12_ManyCallsOnOneObject) {
  const int calls = kSanitizer ? 6 : 25;
  for (const Staging staging : {Staging::direct, Staging::ring}) {
    std::vector<std::shared_ptr<const Case>> cases;
    for (int i = 0; i < calls; ++i) {
      Scenario s = base("A12 call " + std::to_string(i), 8, 3, 0, Layout::rank_major);
      s.staging = staging;
      s.seed = 100 + static_cast<uint64_t>(i);
      s.problem.max_tokens = 20;
      for (size_t r = 0; r < s.tokens.size(); ++r) s.tokens[r] = static_cast<int64_t>(oracle::mix(9, s.seed, r) % 21);
      s.hidden = 32;
      s.drop_percent = i % 4 == 0 ? 20 : 0;
      cases.push_back(make_case(s));
    }
    expect_clean(2 * heap_bytes({cases[0]}), [&](switchyard::Group& group, Failures& f) {
      auto config = make_config(*cases[0]);
      config.pool_bytes *= 2;
      switchyard::detail::number_calls_from(group, (uint64_t{1} << 40) - 5);
      NormalExchange exchange(group, config);
      struct Open {
        std::unique_ptr<RankData> data;
        ScenarioCalls calls;
        Dispatched d;
      };
      std::deque<Open> open;
      auto finish_oldest = [&] {
        Open& o = open.front();
        const switchyard::Handle handle = o.d.handle;
        o.calls.at("combine");
        o.calls.combine(*o.data, std::move(o.d), handle);
        open.pop_front();
      };
      for (size_t i = 0; i < cases.size(); ++i) {
        open.push_back({std::make_unique<RankData>(*cases[i], group.rank(), 0), {group, exchange, *cases[i], f}, {}});
        open.back().calls.at("dispatch");
        open.back().d = open.back().calls.dispatch(*open.back().data);
        if (open.size() == 2 && i % 2 == 1) {
          finish_oldest();
          finish_oldest();
        }
      }
      while (!open.empty()) finish_oldest();
    });
  }
}

TEST_P(A, A13_OutOfContractIdsAreDrops) {
  std::vector<Scenario> all;
  for (const Layout layout : kLayouts) {
    for (const bool wide : {false, true}) {
      Scenario s = base(wide ? "A13 int64" : "A13 int32", 10, 6, 30, layout);
      s.drop_percent = 50;  // -1, E, -7, E + 5, INT32_MIN, INT32_MAX; int64 also 2^32 and INT64_MIN + 1
      s.int64_ids = wide;
      s.hidden = 16;
      all.push_back(s);
    }
  }
  expect_exact(all);
}

/// The meaning of a stale handle is defined: it describes the routing that created it, regardless of later dispatches. A handle
/// with a different shape is rejected.
TEST_P(A, A13_StaleHandles) {
  Scenario s = base("A13 stale", 8, 2, 12);
  const auto old_case = make_case(s);
  s.seed = 77;
  const auto new_case = make_case(s);
  s.problem.experts = 9;
  const auto other_shape = make_case(s);
  expect_clean(3 * heap_bytes({old_case, other_shape}), [&](switchyard::Group& group, Failures& f) {
    NormalExchange exchange(group, make_config(*old_case));
    RankData first(*old_case, group.rank(), 0), newer(*new_case, group.rank(), 0), again(*old_case, group.rank(), 1);
    ScenarioCalls old_calls(group, exchange, *old_case, f), new_calls(group, exchange, *new_case, f);
    old_calls.at("dispatch");
    const switchyard::Handle stale = old_calls.dispatch(first).handle;
    new_calls.at("dispatch since");
    (void)new_calls.dispatch(newer);
    old_calls.at("dispatch by the stale handle");
    (void)old_calls.dispatch(again, &stale);

    NormalExchange other(group, make_config(*other_shape));
    RankData data(*old_case, group.rank(), 0);
    ScenarioCalls other_calls(group, other, *other_shape, f);
    other_calls.at("dispatch by a handle of another shape");
    group.barrier();  // an error ends calls that other ranks have not completed
    const Outcome o =
        outcome_of([&] { (void)other_calls.dispatch(data, &stale); });  // the same on all ranks: no rank waits for another
    f.equal(static_cast<int>(ErrorCode::invalid_argument), static_cast<int>(cause_of(o)), "code: " + o.text);
  });
}

/// Rows whose byte and element offsets exceed 32 bits. Untouched padding makes the buffer long; on CPUs, it takes only address
/// space.
class BigOffsets : public Acceptance {
  void SetUp() override {
    if (kBackend == switchyard::Backend::cpu && ranks_of_suite() == Ranks::processes && !spans_hosts(world()))
      GTEST_SKIP() << "6 GB per rank, which processes commit: suites of processes on several hosts (release tier) run it";
  }
};

TEST_P(BigOffsets, A09_OffsetsBeyond32Bits) {
  Scenario s = base("A09", 6 * world(), 2, 3 * world(), Layout::expert_major);
  s.routing = Routing::round_robin;
  s.hidden = 7168;
  s.problem.alignment = 65536;
  s.padding = switchyard::Padding::unspecified;
  s.identity = true;
  s.output_memory = OutputMemory::in_place;
  s.order = CombineOrder::per_route;
  const auto c = make_case(s);
  std::vector<int64_t> last_row(static_cast<size_t>(world()));
  for (const auto& r : c->expected.routes) {
    int64_t& last = last_row[static_cast<size_t>(r.dest)];
    last = std::max(last, r.slot);
  }
  for (const int64_t last : last_row) ASSERT_GT(last * s.hidden, int64_t{1} << 31);
  auto config = make_config(*c);
  config.pool_bytes = (size_t{6} << 16) * 7168 * 2 + (size_t{64} << 20);
  expect_clean(NormalExchange::heap_bytes(config, world(), kBackend), [&](switchyard::Group& group, Failures& f) {
    NormalExchange exchange(group, config);
    RankData data(*c, group.rank(), 0);
    ScenarioCalls calls(group, exchange, *c, f);
    (void)calls.round(data);
  });
}

/// On CPUs, uses at most two ranks, or only one with a sanitizer, which multiplies memory use.
std::vector<Where> few_ranks() {
  std::vector<Where> all = everywhere(true);
  if (kBackend == switchyard::Backend::cpu) std::erase_if(all, [](const Where& w) { return w.world > (kSanitizer ? 1 : 2); });
  return all;
}
INSTANTIATE_TEST_SUITE_P(Normal, BigOffsets, testing::ValuesIn(few_ranks()), where_name);

INSTANTIATE_TEST_SUITE_P(Normal, A, testing::ValuesIn(everywhere(true)), where_name);

}  // namespace
}  // namespace harness
