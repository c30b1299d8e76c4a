// SPDX-License-Identifier: Apache-2.0
// Data for the demo's report: figures without layout.
#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <cmath>
#include <map>

#include "cli/build_info.hpp"
#include "cli/style.hpp"
#include "demo/demo.hpp"
#include "layer/moe_reference.hpp"
#include "run/index.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

/// Traffic between ranks and to the experts, over all steps.
struct Traffic {
  std::vector<std::vector<int64_t>> rows;    ///< [source][dest], one per (token, rank)
  std::vector<std::vector<int64_t>> routes;  ///< [source][dest], one per (token, expert)
  std::vector<int64_t> experts;              ///< routes to each expert
  int64_t pairs = 0, routes_total = 0;
};

Traffic count_traffic(const DemoPlan& plan, const DemoOutcome& outcome) {
  const Scenario& s = plan.shape;
  Traffic t;
  t.rows.assign(at(s.world), std::vector<int64_t>(at(s.world)));
  t.routes = t.rows;
  t.experts.assign(at(s.experts), 0);
  for (const auto& step : outcome.steps) {
    for (size_t source = 0; source < step.size(); ++source) {
      const Routing& r = step[source].routing;
      for (int64_t token = 0; token < r.num_tokens; ++token) {
        std::vector<uint8_t> touched(at(s.world));
        for (int k = 0; k < r.topk; ++k) {
          const int32_t id = r.topk_ids[at(token * r.topk + k)];
          if (!s.valid(id)) continue;
          const auto dest = at(s.owner(id));
          ++t.experts[at(id)];
          ++t.routes[source][dest];
          ++t.routes_total;
          if (touched[dest] != 0) continue;
          touched[dest] = 1;
          ++t.rows[source][dest];
          ++t.pairs;
        }
      }
    }
  }
  return t;
}

measure::Times times_of(const DemoOutcome& outcome, double StepTimes::*phase) {
  std::vector<std::vector<double>> per_rank(outcome.steps.front().size());
  for (const auto& step : outcome.steps) {
    for (size_t r = 0; r < step.size(); ++r) per_rank[r].push_back(step[r].times.*phase);
  }
  return measure::summarize(measure::slowest(per_rank));
}

json tile(const std::string& label, const std::string& value, const std::string& note) {
  return {{"label", label}, {"value", value}, {"note", note}};
}

json tiles(const DemoPlan& plan, const DemoOutcome& outcome, const Traffic& traffic, const std::vector<double>& errors) {
  const DemoOptions& o = plan.options;
  const measure::Times dispatch = times_of(outcome, &StepTimes::dispatch);
  const measure::Times expert = times_of(outcome, &StepTimes::expert);
  const measure::Times combine = times_of(outcome, &StepTimes::combine);
  const auto steps = static_cast<double>(o.steps);
  const double flops = 6.0 * static_cast<double>(o.hidden * o.intermediate) * static_cast<double>(traffic.routes_total) / steps;
  const double saved =
      1.0 - static_cast<double>(traffic.pairs) / static_cast<double>(std::max<int64_t>(1, traffic.routes_total));
  const double worst = *std::max_element(errors.begin(), errors.end());
  const double step_seconds = times_of(outcome, &StepTimes::gate).p50 + dispatch.p50 + expert.p50 + combine.p50;
  json out = {
      tile("Tokens per second", grouped(static_cast<int64_t>(static_cast<double>(o.ranks * o.tokens) / step_seconds)),
           "whole layer, all ranks"),
      tile("Dispatch", duration(dispatch.p50), "slowest rank, median step"),
      tile("Expert MLP", duration(expert.p50),
           fmt::format("{:.0f} GFLOP/s over all ranks{}", flops / expert.p50 / 1e9, plan.on_gpus() ? ", on the GPUs" : "")),
      tile("Combine", duration(combine.p50), "slowest rank, median step"),
      tile("Rows saved", fmt::format("{:.0f} %", 100 * saved), "one row per (token, rank) instead of one per route"),
      tile("Largest error", fmt::format("{:.2f} %", 100 * worst),
           fmt::format("allowed {:.2f} %, against one rank without exchange", 100 * kLayerTolerance))};
  if (plan.fused)
    out.push_back(tile("Fused layer", duration(times_of(outcome, &StepTimes::fused).p50),
                       fmt::format("all of it in one call, the same bits; dispatch, experts and combine: {}",
                                   duration(dispatch.p50 + expert.p50 + combine.p50))));
  return out;
}

/// Bars for the parts of a step. A fused layer is shown as a single bar that replaces the others.
json step_times(const DemoPlan& plan, const DemoOutcome& outcome) {
  json items = json::array();
  const auto add = [&](const char* name, double StepTimes::*phase, const char* category) {
    items.push_back({{"name", name}, {"us", 1e6 * times_of(outcome, phase).p50}, {"category", category}});
  };
  if (plan.gated()) add("gate", &StepTimes::gate, "compute");
  add("dispatch", &StepTimes::dispatch, "move");
  add("expert MLP", &StepTimes::expert, "compute");
  add("combine", &StepTimes::combine, "move");
  if (plan.fused) add("fused layer", &StepTimes::fused, "user");
  return items;
}

/// Description of a worker's phase for readers of the report, or "" for a phase that does not occur in the demo.
std::string meaning_of(const std::string& phase) {
  static const std::map<std::string, std::string> meanings = {
      {"gate", "logits of the tokens, and the experts that they choose"},
      {"dispatch", "the whole call: every token to the ranks of its experts"},
      {"combine", "the whole call: expert outputs back to their tokens, and summed"},
      {"layer", "the whole layer in one call"},
      {"barrier", "all ranks wait for each other"},
      {"expert_mlp", "the MLPs of the rank's experts"},
      {"plan", "computes the destination of each row"},
      {"exchange_counts", "each rank announces to all others how many rows it sends; includes wait_counts"},
      {"wait_counts", "waits for the counts of another rank"},
      {"wait_placement", "waits for the addresses of the rows of another rank"},
      {"send_rows", "copies rows to the ranks of their experts"},
      {"wait_rows", "waits for rows of another rank"},
      {"place_aliases", "copies a received row to the other experts that its token chose on this rank"},
      {"copy_out", "copies received rows into memory of the caller"},
      {"zero_padding", "zeroes the rows between experts"},
      {"reduce_local", "sums the outputs of a token's experts on this rank"},
      {"wait_outputs", "waits for the sums of another rank"},
      {"pull_reduce", "reads sums of other ranks, and adds them"},
      {"wait_pulled", "waits until another rank has read the sums of this one"},
      {"ring_send", "appends rows to rings of other ranks"},
      {"ring_receive", "removes rows from rings"},
      {"wait_ring", "waits for rows or for free slots in a ring"},
      {"return_rows", "copies expert outputs to the ranks of their tokens"},
      {"sum_returned", "sums the returned outputs of a token"},
      {"wait_returned", "waits for an output of another rank"},
      {"pull_rows", "reads rows of the tokens of other ranks"},
      {"expert_up", "the first product of an expert"},
      {"expert_down", "the second product of an expert"},
      {"wait_told", "waits for the row numbers of another rank"},
      {"wait_tile_rows", "waits for the rows of a tile"},
      {"wait_tiles", "waits for tiles of a product"}};
  const auto known = meanings.find(phase);
  return known == meanings.end() ? "" : known->second;
}

json timeline(const Trace& trace) {
  json slices = json::array();
  std::map<int64_t, std::pair<double, double>> steps;
  std::map<std::string, std::string> units;
  for (const TracePhase& p : trace.summary()) units[p.name] = p.unit;
  for (const TraceSlice& s : trace.slices()) {
    if (s.name == "step") {
      const double end = s.begin_us + s.duration_us;
      const auto [known, fresh] = steps.try_emplace(s.arg, s.begin_us, end);
      if (!fresh) known->second = {std::min(known->second.first, s.begin_us), std::max(known->second.second, end)};
      continue;
    }
    slices.push_back({s.rank, s.track, s.name, s.category, std::round(s.begin_us * 1000) / 1000,
                      std::round(s.duration_us * 1000) / 1000, s.arg});
  }
  json marks = json::array();
  for (const auto& [index, range] : steps) marks.push_back({index, range.first, range.second});
  return {{"slices", slices},
          {"steps", marks},
          {"units", units},
          {"workers", trace.options().num_blocks * trace.options().num_warps},
          {"lost", trace.lost()}};
}

json phases(const DemoPlan& plan, const Trace& trace) {
  json out = json::array();
  std::map<std::string, size_t> index;
  for (const TracePhase& p : trace.summary()) {
    if (p.name == "step") continue;
    const auto [known, fresh] = index.try_emplace(p.name, out.size());
    if (fresh)
      out.push_back({{"name", p.name},
                     {"category", p.category},
                     {"meaning", meaning_of(p.name)},
                     {"count", 0},
                     {"ms", std::vector<double>(at(plan.options.ranks))}});
    json& row = out[known->second];
    row["count"] = row["count"].get<uint64_t>() + p.count;
    row["ms"][at(p.rank)] = p.slowest_ms / static_cast<double>(plan.options.steps);
  }
  return out;
}

}  // namespace

json demo_report(const DemoPlan& plan, const DemoOutcome& outcome, const std::vector<double>& errors,
                 const measure::Machine& machine, bool passed) {
  const DemoOptions& o = plan.options;
  const Traffic traffic = count_traffic(plan, outcome);
  json checks = json::array();
  for (const CheckResult& c : outcome.checks) {
    checks.push_back(
        {{"name", c.name}, {"passed", c.passed}, {"detail", c.passed ? grouped(c.compared) + " values, all equal" : c.detail}});
  }
  const double worst = *std::max_element(errors.begin(), errors.end());
  checks.push_back({{"name", "whole layer against a single-rank reference without exchange"},
                    {"passed", worst <= kLayerTolerance},
                    {"detail", fmt::format("{} tokens in {}: largest relative error of a token {:.3f} %, allowed {:.3f} %",
                                           grouped(o.ranks * o.tokens * o.steps), counted(o.steps, "step"), 100 * worst,
                                           100 * kLayerTolerance)}});
  std::vector<int> first;
  for (int r = 0; r <= plan.shape.world; ++r) first.push_back(plan.shape.first_expert(r));
  const std::string gpus =
      plan.on_gpus() ? fmt::format("{}, driver {}; ", plan.probe.names(), plan.probe.driver_version) : std::string();
  json meta = {
      {"Layer", fmt::format("{} experts, top-{}, hidden {}, intermediate {}, bf16", plan.shape.experts, plan.shape.topk,
                            o.hidden, o.intermediate)},
      {"Ranks", fmt::format("{} x {}, {} tokens each, {}", counted(o.ranks, o.processes ? "process" : "thread"),
                            counted(o.blocks * o.warps, "worker"), o.tokens, counted(o.steps, "step"))},
      {"Routing", plan.source->description()},
      {"Exchange",
       fmt::format("normal mode, {} staging, expert-major rows aligned to {}, {} combine, {} of symmetric memory per rank",
                   o.staging, o.alignment, to_string(plan.order()), binary_size(static_cast<double>(outcome.heap_bytes)))},
      {"Expert compute",
       outcome.expert_implementation + (plan.on_gpus() ? ", on the GPUs: rows stay there from dispatch to combine" : "")},
      {"Machine", fmt::format("{}{}, {}, last-level cache {}, {} of memory, {}", gpus, machine.cpu_model,
                              counted(machine.usable_cores(), "core"), binary_size(static_cast<double>(machine.llc_bytes)),
                              binary_size(static_cast<double>(machine.memory_bytes)), machine.os)},
      {"Build", build_description()},
      {"Date", measure::utc_now()}};
  if (plan.fused) meta["Fused layer"] = outcome.fused_implementation;
  return {{"passed", passed},
          {"meta", meta},
          {"tiles", tiles(plan, outcome, traffic, errors)},
          {"world", o.ranks},
          {"steps", o.steps},
          {"traffic", {{"rows", traffic.rows}, {"routes", traffic.routes}, {"row_bytes", o.hidden * 2}}},
          {"experts", {{"counts", traffic.experts}, {"first", first}}},
          {"timeline", timeline(outcome.trace)},
          {"phases", phases(plan, outcome.trace)},
          {"times", step_times(plan, outcome)},
          {"fused", layer_times_json(outcome.layers)},
          {"checks", checks}};
}

}  // namespace switchyard::tool
