// SPDX-License-Identifier: Apache-2.0
// Exchange objects outside scenarios: bounded rings, several objects on one group, moves, handles across objects, static
// shapes, many ranks, rows at any address, and the local queries.
#include <gtest/gtest.h>

#include <cstring>

#include "modes/normal/normal_rig.hpp"
#include "modes/normal/scenario.hpp"
#include "oracle/views.hpp"

namespace harness {
namespace {

using switchyard::Dispatched;
using switchyard::ErrorCode;
using switchyard::ExpertIds;
using switchyard::Group;
using switchyard::NormalConfig;
using switchyard::NormalExchange;

Scenario base(const std::string& name, int world, Layout layout = Layout::rank_major) {
  Scenario s;
  s.name = name;
  s.problem.world = world;
  s.problem.experts = 10;
  s.problem.topk = 3;
  s.problem.layout = layout;
  s.problem.max_tokens = 16;
  for (int r = 0; r < world; ++r) s.tokens.push_back(16 - r % 3);
  s.repeats = 2;
  s.max_delay_us = 200;
  return s;
}

std::string run(int world, size_t heap, const RankBody& body) {
  Fleet fleet;
  fleet.world = world;
  fleet.options.heap_bytes = heap;
  fleet.options.num_blocks = 2;
  return joined(run_threads(fleet, body));
}

void combine_and_check(NormalExchange& exchange, RankData& data, const switchyard::Handle& handle, DType type, Failures& f) {
  const switchyard::RowBuffer y = exchange.allocate_rows(handle, type);
  data.fill_outputs(y.rows());
  exchange.combine(y.rows(), handle, data.out(), data.combine_options(), data.out_weights());
  data.check_combined(f);
}

TEST(Ring, StaysWithinTheBytesThatTheCallerNames) {
  for (const Layout layout : {Layout::rank_major, Layout::expert_major}) {
    Scenario s = base("bounded ring", 4, layout);
    s.staging = Staging::ring;
    s.order = layout == Layout::expert_major ? CombineOrder::per_route : CombineOrder::per_rank;
    s.ring = {5, 6, 64};
    NormalConfig config = make_config(*make_case(s));
    const size_t unbounded = NormalExchange::memory_required(config, 4).ring_bytes;
    config.ring.slots = config.ring.send_chunk = s.problem.topk;  // the minimum
    const size_t least = NormalExchange::memory_required(config, 4).ring_bytes;
    for (const size_t bytes : {unbounded, unbounded - 1, unbounded / 2, least + 1, least}) {
      s.ring = {5, 6, 64, bytes};
      const auto c = make_case(s);
      const auto need = NormalExchange::memory_required(make_config(*c), 4);
      EXPECT_LE(need.ring_bytes, bytes);
      EXPECT_EQ(need.pool_bytes, 0u);
      EXPECT_EQ(run_cases(Ranks::threads, {1, 2, false}, {c}), "");
    }
    config.ring = {5, 6, 64, least / 2};
    const Outcome o = outcome_of([&] { (void)NormalExchange::memory_required(config, 4); });
    EXPECT_EQ(o.code, ErrorCode::invalid_argument);
    EXPECT_NE(o.text.find("max_bytes"), std::string::npos) << o.text;
  }
}

/// The library's choices: channels depend on tokens and ranks, and slots on channels, rows and K; everything fits into
/// max_bytes.
TEST(Ring, UsualSettings) {
  struct Row {
    int world;
    int64_t tokens;
    Layout layout;
    int channels;  ///< expected
    int slots;
  };
  for (const Row& row : {Row{8, 512, Layout::rank_major, 128, 8}, Row{8, 512, Layout::expert_major, 128, 20},
                         Row{2, 4096, Layout::rank_major, 128, 20}, Row{64, 4096, Layout::rank_major, 16, 160},
                         Row{64, 4096, Layout::expert_major, 16, 160}, Row{2, 33, Layout::rank_major, 8, 8},
                         Row{1, 1, Layout::rank_major, 1, 8}, Row{4, 0, Layout::expert_major, 1, 8}}) {
    NormalConfig config;
    config.hidden = 7168;
    config.num_experts = 256;
    config.topk = 8;
    config.max_tokens = row.tokens;
    config.layout = row.layout;
    const switchyard::RingSettings defaults = default_ring(config, row.world);
    EXPECT_EQ(defaults.num_channels, row.channels) << row.world << " ranks, " << row.tokens << " tokens";
    EXPECT_EQ(defaults.slots, row.slots) << row.world << " ranks, " << row.tokens << " tokens";
    config.staging = Staging::ring;
    const size_t all = NormalExchange::memory_required(config, row.world).ring_bytes;
    config.ring = defaults;
    EXPECT_EQ(NormalExchange::memory_required(config, row.world).ring_bytes, all);
    config.ring = {};
    config.ring.max_bytes = size_t{8} * 15000 * static_cast<size_t>(row.world) + 8192;  // K slots of one or two channels
    EXPECT_LE(default_ring(config, row.world).num_channels, 2);
    EXPECT_LE(NormalExchange::memory_required(config, row.world).ring_bytes, config.ring.max_bytes);
    config.ring.max_bytes = 0;
    config.ring.slots = 256;  // together the default number of rows
    EXPECT_EQ(default_ring(config, row.world).num_channels, std::min(row.channels, 10));
    config.ring.slots = 0;
    config.ring.send_chunk = 1 << 20;
    EXPECT_EQ(default_ring(config, row.world).num_channels, 1);
    config.ring.send_chunk = 0;
    EXPECT_EQ(outcome_of([&] { (void)default_ring(config, row.world); }).code, ErrorCode::invalid_argument);
  }
}

/// With fewer tokens than half of the warps, or one or two more tokens than warps, rows are summed in parts. Covers weights
/// that are returned only once, biases, and a part shorter than the others.
TEST(Combine, FewTokensInParts) {
  for (const DType type : {DType::bf16, DType::f32}) {
    Scenario s = base("parts", 4);
    s.hidden = 2056;
    s.tokens = {3, 9, 1, 10};
    s.y_type = type;
    s.num_bias = 2;
    s.replace_weights = true;
    const auto c = make_case(s);
    for (const int warps : {4, 8, 16}) EXPECT_EQ(run_cases(Ranks::threads, {1, warps, false}, {c}), "") << warps;
  }
}

TEST(Ring, UsualSettingsMoveRows) {
  for (const Layout layout : {Layout::rank_major, Layout::expert_major}) {
    Scenario s = base("usual ring", 3, layout);
    s.staging = Staging::ring;
    s.ring = {};
    const auto defaults = make_case(s);
    s.ring.max_bytes = NormalExchange::memory_required(make_config(*defaults), 3).ring_bytes / 3;
    EXPECT_EQ(run_cases(Ranks::threads, {2, 2, false}, {defaults, make_case(s)}), "");
  }
}

/// On GPUs, outputs need memory outside the heap in addition to the rings: for the output, a row buffer and the handle tables.
TEST(Ring, MemoryOnGpusIsNamed) {
  for (const Layout layout : {Layout::rank_major, Layout::expert_major}) {
    Scenario s = base("memory", 4, layout);
    s.hidden = 1024;
    NormalConfig config = make_config(*make_case(s));
    config.pool_bytes = 0;
    const auto direct = NormalExchange::memory_required(config, 4, switchyard::Backend::cuda);
    EXPECT_EQ(direct.private_bytes, 0u);
    config.staging = Staging::ring;
    config.ring = {5, 6, 64};
    const auto cpu = NormalExchange::memory_required(config, 4),
               gpu = NormalExchange::memory_required(config, 4, switchyard::Backend::cuda);
    EXPECT_EQ(cpu.private_bytes, 0u);
    EXPECT_EQ(gpu.pool_bytes, 0u);
    EXPECT_EQ(gpu.total(), cpu.total());
    EXPECT_EQ(NormalExchange::heap_bytes(config, 4, switchyard::Backend::cuda), NormalExchange::heap_bytes(config, 4));
    const size_t rows = layout == Layout::rank_major ? 64 : 64 * 3, row = 1024 * 2;
    EXPECT_GT(gpu.private_bytes, 2 * rows * row);
    // The direct-staging pool also holds copies of ordinary rows' weights, and partial sums. Both sizes are rounded to pages.
    const size_t staging = 64 * 3 * 4 + (layout == Layout::expert_major ? 64 * row : 0);
    EXPECT_LE(gpu.private_bytes + staging, direct.pool_bytes + 4096);
    EXPECT_LE(direct.pool_bytes, gpu.private_bytes + staging + 4096);
    config.pool_bytes = 123 * 4096 - 1;
    EXPECT_EQ(NormalExchange::memory_required(config, 4, switchyard::Backend::cuda).private_bytes, 123u * 4096u);
  }
}

TEST(Objects, SeveralOnOneGroupInTurn) {
  Scenario a = base("first object", 3), b = base("second object", 3, Layout::expert_major);
  b.staging = Staging::ring;
  b.problem.experts = 7;
  b.hidden = 128;
  b.y_type = b.x_type = DType::f32;
  b.seed = 9;
  const auto ca = make_case(a), cb = make_case(b);
  EXPECT_EQ(run(3, heap_bytes({ca}) + heap_bytes({cb}),
                [&](Group& group, Failures& f) {
                  NormalExchange first(group, make_config(*ca));
                  NormalExchange second(group, make_config(*cb));
                  for (int i = 0; i < 3; ++i) {
                    RankData da(*ca, group.rank(), i), db(*cb, group.rank(), i);
                    f.set_context("turn " + std::to_string(i));
                    const Dispatched ra = first.dispatch(da.x(), da.ids(), da.weights());
                    const Dispatched rb = second.dispatch(db.x(), db.ids(), db.weights());
                    da.check_dispatched(ra, f);
                    db.check_dispatched(rb, f);
                    combine_and_check(second, db, rb.handle, DType::f32, f);
                    combine_and_check(first, da, ra.handle, DType::bf16, f);
                  }
                }),
            "");
}

TEST(Objects, MakeAndDestroyGivesTheHeapBack) {
  Scenario s = base("again", 3);
  const auto c = make_case(s);
  s.staging = Staging::ring;
  const auto ring = make_case(s);
  EXPECT_EQ(run(3, heap_bytes({c, ring}),
                [&](Group& group, Failures& f) {
                  for (int i = 0; i < 20; ++i) {
                    NormalExchange exchange(group, make_config(i % 2 == 0 ? *c : *ring));
                    RankData data(*c, group.rank(), i);
                    f.set_context("object " + std::to_string(i));
                    const Dispatched d = exchange.dispatch(data.x(), data.ids(), data.weights());
                    data.check_dispatched(d, f);
                    combine_and_check(exchange, data, d.handle, DType::bf16, f);
                  }
                  f.equal(size_t{0}, group.heap_used(), "heap in use at the end");
                }),
            "");
}

TEST(Objects, CanBeMoved) {
  const auto c = make_case(base("moved", 2));
  EXPECT_EQ(run(2, heap_bytes({c}),
                [&](Group& group, Failures& f) {
                  Group here = std::move(group);
                  {
                    NormalExchange original(here, make_config(*c));
                    RankData data(*c, here.rank(), 0);
                    Dispatched d = original.dispatch(data.x(), data.ids(), data.weights());
                    NormalExchange exchange = std::move(original);
                    const Dispatched moved = std::move(d);
                    data.check_dispatched(moved, f);
                    combine_and_check(exchange, data, moved.handle, DType::bf16, f);
                  }
                  group = std::move(here);
                }),
            "");
}

TEST(Handles, WorkOnEveryObjectOfTheirShape) {
  Scenario s = base("across objects", 3, Layout::expert_major);
  const auto direct = make_case(s);
  s.staging = Staging::ring;
  const auto ring = make_case(s);
  EXPECT_EQ(run(3, heap_bytes({direct}) + heap_bytes({ring}),
                [&](Group& group, Failures& f) {
                  NormalExchange a(group, make_config(*direct)), b(group, make_config(*ring));
                  RankData first(*direct, group.rank(), 0), second(*direct, group.rank(), 1);
                  const Dispatched d = a.dispatch(first.x(), first.ids(), first.weights());
                  const Dispatched e = b.dispatch(second.x(), d.handle);
                  second.check_dispatched(e, f);
                  combine_and_check(b, first, d.handle, DType::bf16, f);
                  combine_and_check(a, second, e.handle, DType::bf16, f);
                }),
            "");
}

TEST(Handles, OutliveTheirObjectAndGroup) {
  const auto c = make_case(base("outlives", 2));
  std::vector<switchyard::Handle> kept(2);
  EXPECT_EQ(run(2, heap_bytes({c}),
                [&](Group& group, Failures& f) {
                  NormalExchange exchange(group, make_config(*c));
                  RankData data(*c, group.rank(), 0);
                  kept[static_cast<size_t>(group.rank())] = exchange.dispatch(data.x(), data.ids(), data.weights()).handle;
                  f.check(true, "");
                }),
            "");
  for (int r = 0; r < 2; ++r) {
    const auto& handle = kept[static_cast<size_t>(r)];
    EXPECT_EQ(handle.rows(), c->expected.ranks[static_cast<size_t>(r)].rows);
    EXPECT_EQ(handle.matrices(2).recv_src_idx.size(), static_cast<size_t>(handle.rows()));
    EXPECT_FALSE(handle.serialize().empty());
  }
}

/// A cached dispatch uses the handle's routing; the rows may have a different type each time.
TEST(Cached, MayChangeTheRowType) {
  for (const Staging staging : {Staging::direct, Staging::ring}) {
    Scenario s = base("bf16 first", 3, Layout::expert_major);
    s.staging = staging;
    s.hidden = 256;
    s.y_type = DType::f32;  // the widest
    const auto first = make_case(s);
    s.x_type = DType::f32;
    const auto wider = make_case(s);
    s.quantize = ScaleKind::ue8m0;
    s.x_pattern = Pattern::quantise_cases;
    const auto quantised = make_case(s);
    s.quantize = ScaleKind::none;
    s.x_type = DType::fp8_e4m3;
    s.x_scales = ScaleKind::f32;
    const auto fp8 = make_case(s);
    EXPECT_EQ(run(3, heap_bytes({first}),
                  [&](Group& group, Failures& f) {
                    NormalExchange exchange(group, make_config(*first));
                    RankData data(*first, group.rank(), 0);
                    const switchyard::Handle handle = exchange.dispatch(data.x(), data.ids(), data.weights()).handle;
                    for (const auto& c : {wider, quantised, fp8}) {
                      RankData other(*c, group.rank(), 1);
                      other.check_dispatched(exchange.dispatch(other.x(), handle, make_dispatch_options(*c, group.rank())), f);
                    }
                  }),
              "");
  }
}

TEST(StaticSizes, NeverVaryWithTheRouting) {
  for (const Layout layout : {Layout::rank_major, Layout::expert_major}) {
    std::vector<std::shared_ptr<const Case>> cases;
    for (const Routing routing : kAllRoutings) {
      Scenario s = base(to_string(routing), 3, layout);
      s.routing = routing;
      s.problem.alignment = 8;
      s.problem.size = switchyard::SizePolicy::worst_case;
      for (auto& t : s.tokens)
        t = static_cast<int64_t>(oracle::mix(3, static_cast<uint64_t>(routing), static_cast<uint64_t>(t)) % 17);
      cases.push_back(make_case(s));
    }
    EXPECT_EQ(run(3, heap_bytes(cases),
                  [&](Group& group, Failures& f) {
                    NormalExchange exchange(group, make_config(*cases[0]));
                    int64_t rows = -1;
                    for (const auto& c : cases) {
                      RankData data(*c, group.rank(), 0);
                      const Dispatched d =
                          exchange.dispatch(data.x(), data.ids(), data.weights(), make_dispatch_options(*c, group.rank()));
                      data.check_dispatched(d, f);
                      if (rows < 0) rows = d.x.rows;
                      f.equal(rows, d.x.rows, "x.rows under " + c->scenario.name);
                      combine_and_check(exchange, data, d.handle, DType::bf16, f);
                    }
                  }),
              "");
  }
}

/// Capacity that no routing can need is not allocated: the default pool covers the worst case.
TEST(StaticSizes, CapacityBeyondTheWorstCase) {
  for (const Layout layout : {Layout::rank_major, Layout::expert_major}) {
    NormalConfig config;
    config.hidden = 8;
    config.num_experts = 2;
    config.topk = 1;
    config.max_tokens = 4;
    config.layout = layout;
    switchyard::GroupOptions options;
    options.heap_bytes = NormalExchange::heap_bytes(config, 1);
    auto groups = Group::in_process(1, options);
    NormalExchange exchange(groups[0], config);
    const std::vector<uint16_t> x(4 * 8, 0x3F80);
    const std::vector<int32_t> ids = {0, 1, 1, 0};
    for (const auto overflow : {switchyard::Overflow::fail, switchyard::Overflow::drop_and_report}) {
      for (const int64_t capacity : {int64_t{4}, int64_t{5}, int64_t{1000}, int64_t{1} << 31}) {
        switchyard::DispatchOptions o;
        o.size = switchyard::SizePolicy::capacity;
        o.capacity = capacity;
        o.overflow = overflow;
        const Dispatched d =
            exchange.dispatch({x.data(), 4, 8, DType::bf16}, switchyard::ExpertIds::of(ids.data(), 4, 1), nullptr, o);
        EXPECT_EQ(d.rows, 4);
        EXPECT_EQ(d.x.rows, 4);
        const bool reports = overflow == switchyard::Overflow::drop_and_report;  // true even if nothing was dropped
        EXPECT_EQ(std::vector<uint8_t>(d.dropped.begin(), d.dropped.end()), std::vector<uint8_t>(reports ? 4 : 0, 0));
        EXPECT_EQ(std::vector<int64_t>(d.dropped_per_source.begin(), d.dropped_per_source.end()),
                  std::vector<int64_t>(reports ? 2 : 0, 0));
      }
    }
  }
}

TEST(ManyRanks, UpTo64) {
  for (const int world : {16, 33, 64}) {
    std::vector<std::shared_ptr<const Case>> cases;
    for (const Staging staging : {Staging::direct, Staging::ring}) {
      Scenario s =
          base("W" + std::to_string(world), world, staging == Staging::direct ? Layout::expert_major : Layout::rank_major);
      s.staging = staging;
      s.problem.experts = world + 3;
      s.problem.max_tokens = 4;
      for (auto& t : s.tokens) t %= 5;
      s.hidden = 16;
      s.ring = {2, 2, 4};
      s.repeats = 1;
      cases.push_back(make_case(s));
    }
    EXPECT_EQ(run_cases(Ranks::threads, {1, 1, false}, cases), "");
  }
}

/// Rows need no alignment beyond that of their elements.
TEST(Addresses, RowsMayBeginAtAnyElement) {
  for (const Staging staging : {Staging::direct, Staging::ring}) {
    Scenario s = base("odd address", 3);
    s.staging = staging;
    s.num_bias = 1;
    const auto c = make_case(s);
    EXPECT_EQ(run(3, heap_bytes({c}),
                  [&](Group& group, Failures& f) {
                    NormalExchange exchange(group, make_config(*c));
                    RankData data(*c, group.rank(), 0);
                    const size_t bytes = static_cast<size_t>(data.x().rows * s.hidden * 2);
                    alignas(64) std::vector<std::byte> x(bytes + 66), out(bytes + 66), y;
                    std::memcpy(x.data() + 2, data.x().data, bytes);
                    switchyard::ConstRows rows = data.x();
                    rows.data = x.data() + 2;
                    const Dispatched d = exchange.dispatch(rows, data.ids(), data.weights());
                    data.check_dispatched(d, f);
                    y.resize(static_cast<size_t>(d.rows * s.hidden * 2) + 66);
                    const switchyard::Rows y_rows{y.data() + 6, d.rows, s.hidden, DType::bf16};
                    data.fill_outputs(y_rows);
                    std::memset(out.data(), 0x5A, out.size());
                    exchange.combine(y_rows, d.handle, out.data() + 10, data.combine_options());
                    std::memcpy(data.out(), out.data() + 10, bytes);
                    data.check_combined(f);
                    f.check(out[9] == std::byte{0x5A} && out[10 + bytes] == std::byte{0x5A}, "combine wrote beside its rows");
                  }),
              "");
  }
}

TEST(Queries, RoutingLayoutAgainstTheOracle) {
  for (const Routing routing : kAllRoutings) {
    for (const int world : {1, 3, 8, 64}) {
      oracle::Problem p;
      p.world = world;
      p.experts = 21;
      p.topk = 5;
      p.ids = {make_ids(routing, {world, 21, 5}, 3, 0, 40, 15, true)};
      const auto expected = oracle::routing_counts(p, 0);
      const auto got = switchyard::routing_layout(ExpertIds::of(p.ids[0].data(), 40, 5), 21, world);
      EXPECT_EQ(got.num_tokens_per_rank, expected.tokens_per_rank);
      EXPECT_EQ(got.num_tokens_per_expert, expected.tokens_per_expert);
      EXPECT_EQ(got.is_token_in_rank, expected.is_token_in_rank);
      for (int r = 0; r <= world; ++r) EXPECT_EQ(switchyard::first_expert(21, world, r), p.first_expert(r));
    }
  }
  const int32_t id = 0;
  for (const auto& [ids, experts, world] : {std::tuple{ExpertIds::of(&id, 1, 0), 4, 2},
                                            {ExpertIds::of(&id, 1, 33), 4, 2},
                                            {ExpertIds::of(&id, 1, 1), 0, 2},
                                            {ExpertIds::of(&id, 1, 1), 4, 0},
                                            {ExpertIds::of(&id, 1, 1), 4, 65},
                                            {ExpertIds::of(&id, -1, 1), 4, 2},
                                            {ExpertIds::of(static_cast<const int32_t*>(nullptr), 1, 1), 4, 2}}) {
    EXPECT_EQ(outcome_of([&, i = ids, e = experts, w = world] { (void)switchyard::routing_layout(i, e, w); }).code,
              ErrorCode::invalid_argument);
  }
}

/// The memory for flags, counts and placements is bounded for any shape; rows are accounted for separately.
TEST(Memory, ControlIsBounded) {
  for (const auto backend : {switchyard::Backend::cpu, switchyard::Backend::cuda})
    for (const auto layout : {switchyard::Layout::rank_major, switchyard::Layout::expert_major})
      for (const auto staging : {switchyard::Staging::direct, switchyard::Staging::ring})
        for (const int world : {1, 2, 4, 8, 64})
          for (const int experts : {world, 256, 6144})
            for (const int64_t tokens : {int64_t{0}, int64_t{4096}, int64_t{32768}}) {
              NormalConfig config;
              config.hidden = 7168;
              config.num_experts = experts;
              config.topk = 1;
              config.max_tokens = tokens;
              config.layout = layout;
              config.staging = staging;
              const auto need = NormalExchange::memory_required(config, world, backend);
              EXPECT_GT(need.control_bytes, 0u);
              EXPECT_LE(need.control_bytes, size_t{64} << 20) << world << " ranks, " << experts << " experts";
            }
}

}  // namespace
}  // namespace harness
