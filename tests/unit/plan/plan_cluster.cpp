// SPDX-License-Identifier: Apache-2.0
#include "unit/plan/plan_cluster.hpp"

#include <algorithm>
#include <limits>

#include "base/index.hpp"

namespace plan_test {

using harness::Routing;
using switchyard::ExpertIds;
using switchyard::Layout;
using switchyard::detail::HandleData;
using switchyard::detail::LocalPlan;
using switchyard::detail::SendEntry;

namespace {

using switchyard::detail::idx;

/// Copies the data about token t that dispatch would send to the receiver of `send`.
void carry_record(const HandleData& from, int64_t t, const SendEntry& send, HandleData& to) {
  to.record_token[idx(send.record)] = static_cast<int32_t>(t);
  for (int k = 0; k < from.topk; ++k) {
    const int64_t f = t * from.topk + k, at = int64_t{send.record} * from.topk + k;
    const int32_t id = from.ids[idx(f)];
    if (id < 0 || from.map.owner(id) != send.rank) continue;
    to.record_route[idx(at)] = from.layout == Layout::rank_major ? id - from.map.first(send.rank) : from.route_row[idx(f)];
    if (!from.weights.empty()) to.record_weight[idx(at)] = from.weights[idx(f)];
  }
}

}  // namespace

std::string to_string(const Case& c) {
  return harness::to_string(c.routing) + "_W" + std::to_string(c.world) + "_E" + std::to_string(c.experts) + "_K" +
         std::to_string(c.topk) + "_A" + std::to_string(c.alignment) + "_drop" + std::to_string(c.drop_percent) +
         (c.weights ? "_w" : "") + (c.layout == Layout::expert_major ? "_expert" : "_rank") +
         (c.capacity_percent ? "_cap" + std::to_string(c.capacity_percent) : "") + (c.wide ? "_i64" : "_i32");
}

std::vector<Case> all_cases() {
  constexpr int kShapes[][3] = {{1, 1, 1},    {1, 7, 8},   {2, 4, 2},   {2, 3, 3},     {3, 8, 4},
                                {4, 64, 8},   {5, 3, 2},   {5, 17, 6},  {8, 256, 8},   {8, 32, 32},
                                {16, 100, 4}, {33, 64, 8}, {64, 64, 1}, {64, 130, 16}, {64, 7, 3}};
  std::vector<Case> cases;
  int n = 0;
  for (const auto& shape : kShapes) {
    for (const Routing routing : harness::kAllRoutings) {
      for (const Layout layout : {Layout::rank_major, Layout::expert_major}) {
        constexpr int kAlignments[] = {1, 1, 16, 32, 128, 3};
        constexpr int kDrops[] = {0, 10, 0, 30, 0, 100, 10};
        constexpr int kCapacities[] = {0, 0, 60, 100, 0, 5, 0, 95, 130, 0, 0};
        Case c{routing, shape[0], shape[1], shape[2]};
        c.alignment = kAlignments[n % 6];
        c.drop_percent = kDrops[n % 7];
        c.capacity_percent = kCapacities[n % 11];
        c.weights = n % 3 != 0;
        c.wide = n % 2 == 1;
        c.layout = layout;
        cases.push_back(c);
        ++n;
      }
      ++n;
    }
  }
  return cases;
}

oracle::Problem make_problem(const Case& c, uint64_t seed) {
  oracle::Problem p;
  p.world = c.world;
  p.experts = c.experts;
  p.topk = c.topk;
  p.layout = c.layout;
  p.alignment = c.alignment;
  p.max_tokens = c.world > 8 ? 9 : 37;
  for (int r = 0; r < c.world; ++r) {
    const int64_t tokens = r % 4 == 2 ? 0 : p.max_tokens - r % 5;
    p.ids.push_back(harness::make_ids(c.routing, {c.world, c.experts, c.topk}, seed, r, tokens, c.drop_percent, c.wide));
    if (c.weights) p.weights.push_back(harness::make_weights(seed, r, tokens, c.topk));
  }
  if (c.capacity_percent) {
    const oracle::Expected free = oracle::expect(p);
    p.size = switchyard::SizePolicy::capacity;
    p.overflow = switchyard::Overflow::drop_and_report;
    for (const auto& view : free.ranks) p.capacity.push_back(view.rows_needed * c.capacity_percent / 100);
  }
  return p;
}

std::vector<std::shared_ptr<HandleData>> make_handles(const oracle::Problem& p, bool wide, int64_t slack) {
  std::vector<LocalPlan> plans(idx(p.world));
  switchyard::detail::GatheredCounts counts;
  counts.world = p.world;
  counts.experts = p.experts;
  for (int r = 0; r < p.world; ++r) {
    const auto& ids = p.ids[idx(r)];
    const std::vector<int32_t> narrow(ids.begin(), ids.end());
    plans[idx(r)].build(
        wide ? ExpertIds::of(ids.data(), p.tokens(r), p.topk) : ExpertIds::of(narrow.data(), p.tokens(r), p.topk), p.experts,
        p.world);
    const auto& plan = plans[idx(r)];
    counts.routes.insert(counts.routes.end(), plan.routes_per_expert.begin(), plan.routes_per_expert.end());
    counts.touching.insert(counts.touching.end(), plan.tokens_per_rank.begin(), plan.tokens_per_rank.end());
    counts.tokens.push_back(p.tokens(r));
    counts.capacity.push_back(p.size == switchyard::SizePolicy::capacity ? p.capacity[idx(r)]
                                                                         : std::numeric_limits<int64_t>::max());
  }
  std::vector<std::shared_ptr<HandleData>> handles;
  for (int r = 0; r < p.world; ++r) {
    auto h = std::make_shared<HandleData>();
    h->layout = p.layout;
    h->alignment = p.alignment;
    h->rank = r;
    h->max_tokens = p.max_tokens;
    h->hidden = 64;
    h->reports_drops = p.overflow == switchyard::Overflow::drop_and_report;
    h->counts = counts;
    if (!p.weights.empty()) h->weights = p.weights[idx(r)];
    build_owner_side(plans[idx(r)], *h);
    h->rows_allocated = h->rows + slack;
    h->records_allocated = h->num_records + slack;
    h->record_token.assign(idx(h->records_allocated), -1);
    h->record_route.assign(idx(h->records_allocated * p.topk), -1);
    if (!p.weights.empty()) h->record_weight.assign(idx(h->records_allocated * p.topk), 0.0f);
    handles.push_back(h);
  }
  for (const auto& h : handles) {
    for (int64_t t = 0; t < h->tokens; ++t) {
      for (int64_t i = h->send_begin[idx(t)]; i < h->send_begin[idx(t + 1)]; ++i) {
        carry_record(*h, t, h->sends[idx(i)], *handles[idx(h->sends[idx(i)].rank)]);
      }
    }
  }
  for (const auto& h : handles) build_receiver_side(*h);
  return handles;
}

}  // namespace plan_test
