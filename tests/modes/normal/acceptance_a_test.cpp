// SPDX-License-Identifier: Apache-2.0
// Acceptance cases A1, A3, A5 to A9, A12 and A13 of normal mode at sizes for every change; the full sizes are in full_test.cpp.
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

/// One payload per (token, rank), however many routes. The harness checks the byte counters of every dispatch against that;
/// here the figures themselves: exactly T payloads to one rank, and the expected share R / K for uniform routing.
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
        (void)exchange.dispatch(data.x(), data.ids());
        const auto stats = exchange.last_call();
        f.equal(uint64_t{50}, stats.payload_rows, "payload rows to one rank");
        f.equal(uint64_t{50} * 16, stats.remote_bytes + stats.local_bytes, "payload bytes to one rank");
        f.equal(one_rank->expected.ranks[static_cast<size_t>(group.rank())].rows,
                group.rank() + 1 == world() ? 8 * 50 * world() : 0, "rows");
      }
      NormalExchange exchange(group, make_config(*uniform));
      RankData data(*uniform, group.rank(), 0);
      (void)exchange.dispatch(data.x(), data.ids());
      mine[0] = exchange.last_call().payload_rows;
      mine[1] = static_cast<uint64_t>(uniform->problem.tokens(group.rank()));
      std::vector<uint64_t> all(2 * static_cast<size_t>(world()));
      group.all_gather(mine, sizeof mine, all.data());
      double rows = 0, tokens = 0;
      for (size_t r = 0; r < all.size(); r += 2) {
        rows += static_cast<double>(all[r]);
        tokens += static_cast<double>(all[r + 1]);
      }
      // Distinct ranks of 8 distinct experts out of 8 W: W * (1 - C(8 W - 8, 8) / C(8 W, 8)).
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
    if (c->problem.capacity[static_cast<size_t>(overflowing)] == 0) continue;  // no expert there
    expect_clean(heap_bytes({c}), [&](switchyard::Group& group, Failures& f) {
      NormalExchange exchange(group, make_config(*c));
      RankData data(*c, group.rank(), 0);
      for (int attempt = 0; attempt < 3; ++attempt) {
        auto options = make_dispatch_options(*c, group.rank());
        if (group.rank() == overflowing) --options.capacity;
        try {
          (void)exchange.dispatch(data.x(), data.ids(), data.weights(), options);
          f.add("no error");
        } catch (const Error& e) {
          f.equal(static_cast<int>(ErrorCode::capacity_exceeded), static_cast<int>(e.code()), std::string("code: ") + e.what());
          const std::string text = e.what();
          const std::string needed = std::to_string(c->problem.capacity[static_cast<size_t>(overflowing)]);
          f.check(
              text.find("rank " + std::to_string(overflowing)) != std::string::npos && text.find(needed) != std::string::npos,
              text);
        }
        group.check();
        const Dispatched d = exchange.dispatch(data.x(), data.ids(), data.weights(), make_dispatch_options(*c, group.rank()));
        data.check_dispatched(d, f);
      }
    });
  }
}

/// Many calls on one object: random T, two handles alive, dispatch - dispatch - combine - combine, oldest first.
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
        Dispatched d;
      };
      std::deque<Open> open;
      auto finish_oldest = [&] {
        Open& o = open.front();
        const switchyard::RowBuffer y = exchange.allocate_rows(o.d.handle, DType::bf16);
        o.data->fill_outputs(y.rows());
        exchange.combine(y.rows(), o.d.handle, o.data->out(), o.data->combine_options());
        o.data->check_combined(f);
        open.pop_front();
      };
      for (size_t i = 0; i < cases.size(); ++i) {
        f.set_context(cases[i]->scenario.name);
        auto data = std::make_unique<RankData>(*cases[i], group.rank(), 0);
        Dispatched d = exchange.dispatch(data->x(), data->ids(), data->weights());
        data->check_dispatched(d, f);
        open.push_back({std::move(data), std::move(d)});
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

/// A stale handle is well defined: it describes the routing that made it, whatever was dispatched since. One of another shape
/// is refused.
TEST_P(A, A13_StaleHandles) {
  Scenario s = base("A13 stale", 8, 2, 12);
  const auto old_case = make_case(s);
  s.seed = 77;
  const auto new_case = make_case(s);
  s.problem.experts = 9;
  const auto other_shape = make_case(s);
  expect_clean(3 * heap_bytes({old_case, other_shape}), [&](switchyard::Group& group, Failures& f) {
    NormalExchange exchange(group, make_config(*old_case));
    RankData a(*old_case, group.rank(), 0), b(*new_case, group.rank(), 0);
    const switchyard::Handle stale = exchange.dispatch(a.x(), a.ids(), a.weights()).handle;
    b.check_dispatched(exchange.dispatch(b.x(), b.ids(), b.weights()), f);
    const Dispatched again = exchange.dispatch(a.x(), stale);
    a.check_dispatched(again, f);
    NormalExchange other(group, make_config(*other_shape));
    group.barrier();
    try {  // all ranks alike, so nobody waits for anybody
      (void)other.dispatch(a.x(), stale);
      f.add("a handle of another shape was accepted");
    } catch (const switchyard::PeerFailed& e) {
      f.equal(static_cast<int>(ErrorCode::invalid_argument), static_cast<int>(e.reason()), "reason of the peer");
    } catch (const Error& e) {
      f.equal(static_cast<int>(ErrorCode::invalid_argument), static_cast<int>(e.code()), std::string("code: ") + e.what());
    }
  });
}

/// Rows whose byte and element offsets do not fit 32 bits. Padding that nobody touches makes the buffer long: it costs address
/// space.
class BigOffsets : public Acceptance {
  void SetUp() override {
    if (ranks_of_suite() == Ranks::processes) GTEST_SKIP() << "6 GB per rank, which processes commit: full_test has more ranks";
  }
};

TEST_P(BigOffsets, A09_OffsetsBeyond32Bits) {
  Scenario s = base("A09", 6, 2, 3, Layout::expert_major);
  s.routing = Routing::round_robin;
  s.hidden = 7168;
  s.problem.alignment = 65536;
  s.padding = switchyard::Padding::unspecified;
  s.tokens = {12};
  s.identity = true;
  s.output_memory = OutputMemory::in_place;
  s.order = CombineOrder::per_route;
  const auto c = make_case(s);
  int64_t last_row = 0;
  for (const auto& r : c->expected.routes) last_row = std::max(last_row, r.slot);
  ASSERT_GT(last_row * s.hidden, int64_t{1} << 31);
  auto config = make_config(*c);
  config.pool_bytes = (size_t{6} << 16) * 7168 * 2 + (size_t{64} << 20);
  expect_clean(NormalExchange::heap_bytes_for(config, world()), [&](switchyard::Group& group, Failures& f) {
    NormalExchange exchange(group, config);
    RankData data(*c, group.rank(), 0);
    const Dispatched d = exchange.dispatch(data.x(), data.ids(), data.weights(), make_dispatch_options(*c, group.rank()));
    data.check_dispatched(d, f);
    exchange.combine(d.x, d.handle, data.out(), data.combine_options());
    data.check_combined(f);
  });
}

std::vector<Where> one_rank() {
  std::vector<Where> all = everywhere(true);
  std::erase_if(all, [](const Where& w) { return w.world != 1; });
  return all;
}
INSTANTIATE_TEST_SUITE_P(Normal, BigOffsets, testing::ValuesIn(one_rank()), where_name);

INSTANTIATE_TEST_SUITE_P(Normal, A, testing::ValuesIn(everywhere(true)), where_name);

}  // namespace
}  // namespace harness
