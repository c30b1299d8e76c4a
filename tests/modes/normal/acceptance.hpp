// SPDX-License-Identifier: Apache-2.0
// Framework for the acceptance suites. Every scenario runs with direct and ring staging against the same oracle, which is case
// B13 for each of them.
#pragma once

#include "harness/everywhere.hpp"
#include "harness/suite_hosts.hpp"
#include "modes/normal/scenario_calls.hpp"

namespace harness {

class Acceptance : public testing::TestWithParam<Where> {
 protected:
  int world() const { return GetParam().world; }

  /// Scenario with `experts` experts in this world, and T = `tokens` on every rank.
  Scenario base(const std::string& name, int experts, int topk, int64_t tokens, Layout layout = Layout::rank_major) const {
    Scenario s;
    s.name = name;
    s.problem.world = world();
    s.problem.experts = experts;
    s.problem.topk = topk;
    s.problem.layout = layout;
    s.tokens.assign(static_cast<size_t>(world()), tokens);
    s.max_delay_us = 300;
    s.repeats = kSanitizer ? 1 : 3;
    return s;
  }
  /// Runs every scenario with both kinds of staging on one group. With several hosts, which do not support rings, each scenario
  /// runs with its specified combine order and with one returned row per host.
  void expect_exact(const std::vector<Scenario>& scenarios) const {
    std::vector<std::shared_ptr<const Case>> cases;
    for (Scenario s : scenarios) {
      s.num_sms = GetParam().workers.warps;
      for (const Staging staging : {Staging::direct, Staging::ring}) {
        s.staging = staging;
        if (staging == Staging::ring && spans_hosts(world())) {
          s.order = CombineOrder::per_host;
          if (s.problem.layout == Layout::expert_major) s.replace_weights = false;
        }
        cases.push_back(make_case(s));
        auto& name = const_cast<Case&>(*cases.back()).scenario.name;
        name += staging == Staging::direct ? " (direct)" : " (ring)";
      }
    }
    EXPECT_EQ(run_cases(ranks_of_suite(), GetParam().workers, cases), "");
  }
  /// Runs a body that makes calls in its own order.
  void expect_clean(size_t heap, const RankBody& body) const {
    EXPECT_EQ(joined(run_ranks(ranks_of_suite(), fleet_of(world(), GetParam().workers, heap), body)), "");
  }
};

}  // namespace harness
