// SPDX-License-Identifier: Apache-2.0
// Large outputs, and the maximum number of experts, on GPUs.
#include <cstring>

#include "gpu/harness/object_rig.hpp"

namespace harness {
namespace {

/// Rows whose byte and element offsets exceed 32 bits because of untouched padding.
TEST(BigOffsets, A09_OffsetsBeyond32Bits) {
  Scenario s = gpu_scenario("A09", 1, Layout::expert_major, 12);
  s.problem.experts = 6;
  s.problem.topk = 2;
  s.routing = Routing::round_robin;
  s.hidden = 7168;
  s.problem.alignment = 65536;
  s.problem.size = SizePolicy::exact;
  s.padding = switchyard::Padding::unspecified;
  s.order = CombineOrder::per_route;
  const auto c = make_case(s);
  int64_t last_row = 0;
  for (const auto& r : c->expected.routes) last_row = std::max(last_row, r.slot);
  ASSERT_GT(last_row * s.hidden, int64_t{1} << 31);
  NormalConfig config = make_config(*c);
  config.pool_bytes = (size_t{6} << 16) * 7168 * 2 + (size_t{64} << 20);
  on_gpus(1, heap_for(config, 1), [&](Station& me) {
    NormalExchange exchange(me.group, config);
    RankData data(*c, me.rank(), 0);
    const Inputs in = me.upload(*c, data);
    const auto row = static_cast<size_t>(s.hidden) * 2;
    const Dispatched d = exchange.dispatch(in.x, in.ids, in.weights, me.dispatch_options(*c, me.stream()));
    const auto& view = c->expected.ranks[0];
    std::vector<std::pair<int64_t, std::byte*>> kept;
    for (int64_t i = 0; i < view.rows; ++i)
      if (view.origin[static_cast<size_t>(i)].source >= 0)
        kept.emplace_back(i, me.keep(static_cast<const std::byte*>(d.x.data) + static_cast<size_t>(i) * row, row, me.stream()));
    exchange.combine(d.x, d.handle, in.out, me.combine_options(*c, me.stream()));
    me.meet();
    me.f.equal(view.rows, d.x.rows, "x.rows");
    me.f.equal(size_t{24}, kept.size(), "rows with a source");
    std::vector<std::byte> got(row);
    for (const auto& [i, at] : kept) {
      me.read(got.data(), at, row);
      const auto* want =
          static_cast<const std::byte*>(data.x().data) + view.origin[static_cast<size_t>(i)].token * int64_t{7168} * 2;
      me.f.check(std::memcmp(want, got.data(), row) == 0, "row " + std::to_string(i));
    }
    me.check_combined(data, in);
  });
}

constexpr int max_experts(Layout layout) { return layout == Layout::expert_major ? 4608 : 6144; }

Scenario with_experts(int world, Layout layout, int experts) {
  Scenario s = gpu_scenario(std::to_string(experts) + " experts", world, layout, 150);
  s.problem.experts = experts;
  s.drop_percent = 5;
  return s;
}

TEST(ManyExperts, AsManyAsThereMayBe) {
  constexpr int kWorld = 2;
  isolated([] {
    for (const Layout layout : {Layout::rank_major, Layout::expert_major}) {
      for (const Routing routing : {Routing::uniform, Routing::one_expert}) {
        Scenario s = with_experts(kWorld, layout, max_experts(layout));
        s.routing = routing;
        const auto c = make_case(s);
        const NormalConfig config = make_config(*c);
        on_gpus(kWorld, heap_for(config, kWorld), [&](Station& me) {
          me.f.set_context(s.name);
          NormalExchange exchange(me.group, config);
          for (int i = 0; i < 2; ++i) me.round(exchange, *c, i);
        });
      }
    }
  });
}

TEST(ManyExperts, OneMoreIsATypedError) {
  for (const Layout layout : {Layout::rank_major, Layout::expert_major}) {
    const int max = max_experts(layout);
    const auto c = make_case(with_experts(1, layout, max + 1));
    const NormalConfig config = make_config(*c);
    on_gpus(1, heap_for(config, 1), [&](Station& me) {
      const Outcome o = outcome_of([&] { NormalExchange exchange(me.group, config); });
      me.f.equal(static_cast<int>(ErrorCode::invalid_argument), static_cast<int>(o.code), "code, " + o.text);
      me.f.check(o.text.find("num_experts = " + std::to_string(max + 1)) != std::string::npos &&
                     o.text.find("at most " + std::to_string(max)) != std::string::npos,
                 "text: " + o.text);
    });
  }
}

}  // namespace
}  // namespace harness
