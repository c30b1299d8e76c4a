// SPDX-License-Identifier: Apache-2.0
// The data of the demo's report: figures only, no layout.
#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <cmath>
#include <map>

#include "cli/build_info.hpp"
#include "cli/style.hpp"
#include "demo/demo.hpp"
#include "layer/moe_reference.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

size_t at(int64_t i) { return static_cast<size_t>(i); }

/// What travelled from rank to rank over all steps, and to which experts.
struct Traffic {
  std::vector<std::vector<int64_t>> rows;    ///< [source][dest] one per (token, rank)
  std::vector<std::vector<int64_t>> routes;  ///< [source][dest] one per (token, expert)
  std::vector<int64_t> experts;              ///< routes to each expert
  int64_t pairs = 0, remote_pairs = 0, routes_total = 0;
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
      for (int64_t token = 0; token < r.tokens; ++token) {
        std::vector<uint8_t> touched(at(s.world));
        for (int k = 0; k < r.topk; ++k) {
          const int32_t id = r.ids[at(token * r.topk + k)];
          if (!s.valid(id)) continue;
          const auto dest = at(s.owner(id));
          ++t.experts[at(id)];
          ++t.routes[source][dest];
          ++t.routes_total;
          if (touched[dest] != 0) continue;
          touched[dest] = 1;
          ++t.rows[source][dest];
          ++t.pairs;
          t.remote_pairs += dest != source ? 1 : 0;
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

/// The rank that sends most (dispatch) or whose rows are asked for most (combine), in one direction of its link. One GPU: all
/// rows of all ranks, read and written.
json gpu_throughput(const DemoPlan& plan, const DemoOutcome& outcome, const Traffic& traffic, const DemoLimit& limit) {
  const DemoOptions& o = plan.options;
  const bool links = plan.probe.gpus.size() > 1;
  int64_t sent = 0, received = 0;
  for (size_t a = 0; a < traffic.rows.size(); ++a) {
    int64_t out = 0, in = 0;
    for (size_t b = 0; b < traffic.rows.size(); ++b) {
      out += a == b ? 0 : traffic.rows[a][b];
      in += a == b ? 0 : traffic.rows[b][a];
    }
    sent = std::max(sent, out);
    received = std::max(received, in);
  }
  const double step_rows = static_cast<double>(links ? sent : 2 * traffic.pairs) / static_cast<double>(o.steps);
  const double back_rows = static_cast<double>(links ? received : 2 * traffic.pairs) / static_cast<double>(o.steps);
  const double row = static_cast<double>(o.hidden) * 2;
  return {
      {"limit", {{"gbs", limit.gbs}, {"note", limit.note}}},
      {"items",
       {{{"name", "dispatch"}, {"gbs", step_rows * row / times_of(outcome, &StepTimes::dispatch).p50 / 1e9}},
        {{"name", "combine"}, {"gbs", back_rows * row / times_of(outcome, &StepTimes::combine).p50 / 1e9}}}},
      {"note", fmt::format("{} Times are the host's, from call to end of the work on the GPU, with the exchange of counts: at "
                           "this size they are latency. Use switchyard bench --backend cuda for figures that compare.",
                           links ? "Bytes that leave the busiest rank, against a copy from GPU to GPU."
                                 : "Bytes read and written by all ranks on the one GPU, against a copy within it.")}};
}

json throughput(const DemoPlan& plan, const DemoOutcome& outcome, const Traffic& traffic, const DemoLimit& limit) {
  if (plan.on_gpus()) return gpu_throughput(plan, outcome, traffic, limit);
  const DemoOptions& o = plan.options;
  const double row = static_cast<double>(o.hidden) * 2;
  const measure::ExchangeBytes bytes =
      measure::exchange_bytes(o.ranks * o.tokens, traffic.pairs / o.steps, traffic.remote_pairs / o.steps,
                              traffic.routes_total / o.steps, row, row, row);
  return {{"limit", {{"gbs", limit.gbs}, {"note", limit.note}}},
          {"items",
           {{{"name", "dispatch"}, {"gbs", bytes.dispatch_limit / times_of(outcome, &StepTimes::dispatch).p50 / 1e9}},
            {{"name", "combine"}, {"gbs", bytes.combine_limit / times_of(outcome, &StepTimes::combine).p50 / 1e9}}}},
          {"note", fmt::format("Bytes read and written: dispatch reads each source row once and writes one row per (token, "
                               "rank), combine the reverse: {} and "
                               "{} a step. Local copies to several experts of a rank are not counted. Small demo shapes are "
                               "bound by latency: use switchyard "
                               "bench for figures that compare.",
                               decimal_size(bytes.dispatch_limit), decimal_size(bytes.combine_limit))}};
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
      out.push_back(
          {{"name", p.name}, {"category", p.category}, {"count", 0}, {"ms", std::vector<double>(at(plan.options.ranks))}});
    json& row = out[known->second];
    row["count"] = row["count"].get<uint64_t>() + p.count;
    row["ms"][at(p.rank)] = p.slowest_ms / static_cast<double>(plan.options.steps);
  }
  return out;
}

}  // namespace

json demo_report(const DemoPlan& plan, const DemoOutcome& outcome, const std::vector<double>& errors, const DemoLimit& limit,
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
       fmt::format("normal mode, {} staging, expert-major rows aligned to {}, {} combine, {} of symmetric memory a rank",
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
          {"limit_name", limit.name},
          {"world", o.ranks},
          {"steps", o.steps},
          {"traffic", {{"rows", traffic.rows}, {"routes", traffic.routes}, {"row_bytes", o.hidden * 2}}},
          {"experts", {{"counts", traffic.experts}, {"first", first}}},
          {"timeline", timeline(outcome.trace)},
          {"phases", phases(plan, outcome.trace)},
          {"throughput", throughput(plan, outcome, traffic, limit)},
          {"fused", layer_times_json(outcome.layers)},
          {"checks", checks}};
}

}  // namespace switchyard::tool
