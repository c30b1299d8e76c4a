// SPDX-License-Identifier: Apache-2.0
// Compares the tables created by the plan kernel with the host's plan for the same random routings, entry by entry on every
// rank. tests/unit/plan/plan_decisions_test.cpp tests only the decisions, without a GPU.
#include <algorithm>

#include "exchange/normal/gpu.hpp"
#include "gpu/harness/object_rig.hpp"
#include "harness/draw.hpp"
#include "oracle/numbers.hpp"
#include "unit/plan/plan_cluster.hpp"

namespace harness {
namespace {

using switchyard::ExpertIds;
using switchyard::detail::HandleData;
using switchyard::detail::SendEntry;

constexpr int kRoutings = 12;  ///< of each kind

std::shared_ptr<const Case> draw_case(int world, Layout layout, bool drops, uint64_t seed) {
  Draw draw(oracle::mix(seed, 0x91A7));
  const int64_t largest = draw.one_in(3) ? 700 : 40;
  Scenario s = gpu_scenario("plan of seed " + std::to_string(seed), world, layout, largest, seed);
  s.problem.experts = static_cast<int>(draw.between(1, 48));
  s.problem.topk = static_cast<int>(draw.one_in(4) ? draw.between(9, 32) : draw.between(1, 8));
  if (layout == Layout::expert_major) s.problem.alignment = draw.one_of({1, 3, 8, 16});
  s.routing = draw.one_of(kAllRoutings);
  for (int64_t& t : s.tokens) t = draw.one_in(5) ? draw.between(0, 1) : draw.between(0, largest);
  s.drop_percent = static_cast<int>(draw.one_in(3) ? draw.between(1, 40) : 0);
  if (drops) {
    s.problem.overflow = switchyard::Overflow::drop_and_report;
    s.capacity_percent = static_cast<int>(draw.between(1, 120));
  }
  return make_case(s);
}

template <class T>
std::vector<T> fetch(Station& me, const T* from, int64_t count) {
  std::vector<T> to(static_cast<size_t>(count));
  if (count > 0) me.read(to.data(), from, to.size() * sizeof(T));
  return to;
}

/// Returns the sends of `h` in the form that GPU kernels read, with `stride` places per token.
std::vector<SendEntry> places_of(const HandleData& h, int stride) {
  std::vector<SendEntry> places(static_cast<size_t>(h.tokens * stride), SendEntry{-1, -1, -1});
  for (int64_t t = 0; t < h.tokens; ++t)
    std::copy(h.sends.begin() + h.send_begin[static_cast<size_t>(t)],
              h.sends.begin() + h.send_begin[static_cast<size_t>(t) + 1], places.begin() + t * stride);
  return places;
}

void compare_header(Station& me, const switchyard::detail::TablesHeader& header, const HandleData& h) {
  me.f.equal(1, header.moved, "moved");
  me.f.equal(h.tokens, header.tokens, "tokens");
  me.f.equal(h.rows, header.rows, "rows");
  me.f.equal(h.num_records, header.num_records, "records");
  const auto world = static_cast<size_t>(h.counts.world);
  me.f.equal_range(switchyard::detail::record_ranges(h), std::span(header.record_begin, world + 1), "record_begin");
  me.f.equal_range(h.counts.tokens, std::span(header.tokens_of, world), "tokens_of");
  if (h.layout != Layout::expert_major) return;
  const std::vector<int32_t> by_chunk = switchyard::detail::records_by_chunk(h);
  me.f.equal_range(by_chunk, std::span(header.chunk_records, by_chunk.size()), "chunk_records");
}

void compare_routes(Station& me, const switchyard::detail::Tables& t, const HandleData& h) {
  const int64_t routes = h.tokens * h.topk;
  std::vector<int32_t> ids = fetch(me, t.ids, routes);
  const std::vector<uint8_t> dropped = fetch(me, t.dropped, routes);
  for (size_t f = 0; f < ids.size(); ++f) {
    me.f.equal(dropped[f] != 0, ids[f] < -1, "dropped as ids say");
    if (ids[f] < -1) ids[f] = -1;
  }
  me.f.equal_range(h.ids, ids, "topk_ids");
  me.f.equal_range(h.reports_drops ? h.dropped : std::vector<uint8_t>(ids.size(), 0), dropped, "dropped");
  if (h.layout == Layout::expert_major) me.f.equal_range(h.route_row, fetch(me, t.route_row, routes), "route_row");
  std::vector<int32_t> expected, found;
  const std::vector<SendEntry> places = fetch(me, t.sends, h.tokens * t.stride);
  const auto list = [](const SendEntry& e, std::vector<int32_t>& to) {
    to.insert(to.end(), {e.rank, e.rank < 0 ? -1 : e.row, e.rank < 0 ? -1 : e.record});
  };
  for (const SendEntry& e : places_of(h, t.stride)) list(e, expected);
  for (const SendEntry& e : places) list(e, found);
  me.f.equal_range(expected, found, "sends");
}

void compare_experts(Station& me, const switchyard::detail::Tables& t, const HandleData& h) {
  const int64_t here = h.map.count(h.rank);
  me.f.equal_range(h.kept_per_expert, fetch(me, t.kept, here), "kept");
  me.f.equal_range(h.aligned_per_expert, fetch(me, t.aligned, here), "aligned");
  const auto none = std::vector<int64_t>(static_cast<size_t>(h.counts.world * here), 0);
  me.f.equal_range(h.reports_drops ? h.local_dropped : none, fetch(me, t.local_dropped, h.counts.world * here), "dropped_here");
  if (h.layout != Layout::expert_major) return;
  me.f.equal_range(h.first_row, fetch(me, t.first_row, here), "first_row");
  me.f.equal_range(switchyard::detail::padding_ranges(h), fetch(me, t.padding, 2 * here), "padding");
}

void compare_plans(Station& me, const Case& c) {
  NormalExchange exchange(me.group, config_with_large_pool(c, 1));
  RankData data(c, me.rank(), 0);
  const Inputs in = me.upload(c, data);
  me.meet();
  const Dispatched d = exchange.dispatch(in.x, in.ids, in.weights, me.dispatch_options(c, me.stream()));
  me.meet();
  const HandleData expected = *plan_test::make_handles(c.problem, true, 0)[static_cast<size_t>(me.rank())];
  const auto& handle = static_cast<const switchyard::detail::CudaHandle&>(*d.handle.data().device);
  compare_header(me, fetch(me, handle.tables.header, 1)[0], expected);
  compare_routes(me, handle.tables, expected);
  compare_experts(me, handle.tables, expected);
  me.meet();
}

struct Kind {
  int world;
  Layout layout;
  bool drops;
};

class PlansOfRandomRoutings : public testing::TestWithParam<Kind> {};

TEST_P(PlansOfRandomRoutings, EqualTheHosts) {
  const Kind& kind = GetParam();
  std::vector<std::shared_ptr<const Case>> cases;
  size_t heap = 0;
  for (uint64_t seed = 0; seed < kRoutings; ++seed) {
    cases.push_back(draw_case(kind.world, kind.layout, kind.drops, seed));
    heap = std::max(heap, heap_for(config_with_large_pool(*cases.back(), 1), kind.world));
  }
  on_gpus(kind.world, heap, [&](Station& me) {
    for (const auto& c : cases) {
      me.f.set_context(c->scenario.name);
      compare_plans(me, *c);
    }
  });
}

std::vector<Kind> kinds() {
  std::vector<Kind> all;
  for (const int world : {1, 2, 3, 5, 8})
    for (const Layout layout : {Layout::rank_major, Layout::expert_major})
      for (const bool drops : {false, true}) all.push_back({world, layout, drops});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Gpu, PlansOfRandomRoutings, testing::ValuesIn(kinds()), [](const auto& p) {
  return "W" + std::to_string(p.param.world) + (p.param.layout == Layout::rank_major ? "_rank_major" : "_expert_major") +
         (p.param.drops ? "_drops" : "");
});

// ---- Counts of a routing, without a plan ----

/// Counts the ids of `tokens` tokens on the GPU, into memory filled with ones, and compares the result with the host's counts.
template <class Id>
void compare_layouts(Station& me, int experts, int world, int topk, int64_t tokens) {
  me.f.set_context(std::to_string(tokens) + " tokens, top " + std::to_string(topk) + " of " + std::to_string(experts) +
                   " experts, " + std::to_string(world) + " ranks, ids of " + std::to_string(sizeof(Id)) + " bytes");
  Draw draw(static_cast<uint64_t>(tokens * 64 + world));
  std::vector<Id> ids(static_cast<size_t>(tokens * topk));
  for (Id& id : ids) id = static_cast<Id>(draw.between(-1, experts));  // the minimum and the maximum are not experts
  if (sizeof(Id) == 8 && !ids.empty()) ids.back() = static_cast<Id>(int64_t{1} << 32);
  const auto expected = switchyard::routing_layout(ExpertIds::of(ids.data(), tokens, topk), experts, world);
  const auto filled = [&](auto value, int64_t count) {
    const std::vector<decltype(value)> ones(static_cast<size_t>(count) + 4, value);  // plus four entries that must not change
    return static_cast<decltype(value)*>(me.upload(ones.data(), ones.size() * sizeof(value)));
  };
  const switchyard::RoutingLayoutView out{filled(int32_t{-1}, world), filled(int32_t{-1}, experts),
                                          filled(uint8_t{255}, tokens * world)};
  const auto* const given = static_cast<const Id*>(me.upload(ids.data(), ids.size() * sizeof(Id)));
  me.synchronize();
  switchyard::enqueue_routing_layout(ExpertIds::of(given, tokens, topk), experts, world, out, me.stream());
  me.synchronize();
  const auto same = [&](auto want, auto value, const auto* from, const char* what) {
    want.insert(want.end(), 4, value);
    me.f.equal_range(want, fetch(me, from, static_cast<int64_t>(want.size())), what);
  };
  same(expected.num_tokens_per_rank, -1, out.num_tokens_per_rank, "num_tokens_per_rank");
  same(expected.num_tokens_per_expert, -1, out.num_tokens_per_expert, "num_tokens_per_expert");
  same(expected.is_token_in_rank, uint8_t{255}, out.is_token_in_rank, "is_token_in_rank");
}

TEST(RoutingLayoutOnGpu, EqualsTheHosts) {
  for (const auto& [experts, world] : {std::pair{1, 1}, {7, 3}, {2, 4}, {256, 8}, {300, 64}, {32768, 64}})
    on_gpus(1, size_t{1} << 20, [experts = experts, world = world](Station& me) {
      for (const auto& [tokens, topk] : {std::pair<int64_t, int>{0, 3}, {1, 1}, {31, 32}, {4096, 8}, {5003, 5}, {65536, 2}}) {
        compare_layouts<int32_t>(me, experts, world, topk, tokens);
        compare_layouts<int64_t>(me, experts, world, topk, tokens);
      }
    });
}

TEST(RoutingLayoutOnGpu, RefusesWhatItCannotRead) {
  on_gpus(1, size_t{1} << 20, [&](Station& me) {
    auto* const there = reinterpret_cast<int32_t*>(me.allocate(1024));
    int32_t here[4] = {};
    const auto refused = [&](const char* text, const ExpertIds& ids, const switchyard::RoutingLayoutView& out) {
      const Outcome outcome = outcome_of([&] { switchyard::enqueue_routing_layout(ids, 4, 1, out, me.stream()); });
      me.f.check(outcome.code == ErrorCode::invalid_argument, text);
      me.f.check(outcome.text.find(text) != std::string::npos, outcome.text.c_str());
    };
    auto* const where = reinterpret_cast<uint8_t*>(there + 64);
    refused("topk_ids.data is host memory", ExpertIds::of(here, 2, 2), {there, there + 16, where});
    refused("num_tokens_per_rank is host memory", ExpertIds::of(there + 32, 2, 2), {here, there + 16, where});
    refused("num_tokens_per_expert is null", ExpertIds::of(there + 32, 2, 2), {there, nullptr, where});
    refused("is_token_in_rank: address must be a multiple of 4", ExpertIds::of(there + 32, 2, 2),
            {there, there + 16, where + 1});
  });
}

}  // namespace
}  // namespace harness
