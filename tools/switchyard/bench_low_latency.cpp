// SPDX-License-Identifier: Apache-2.0
#include "bench_low_latency.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "bench_points.hpp"
#include "cli.hpp"
#include "low_latency_check.hpp"
#include "progress.hpp"
#include "ranks.hpp"
#include "style.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

/// What is timed, in this order.
struct Section {
  const char* key;
  bool dispatch, combine;
  CombineOrder order;
};
constexpr Section kSections[] = {
    {"dispatch", true, false, CombineOrder::per_route},        {"combine_per_route", false, true, CombineOrder::per_route},
    {"combine_per_rank", false, true, CombineOrder::per_rank}, {"both_per_route", true, true, CombineOrder::per_route},
    {"both_per_rank", true, true, CombineOrder::per_rank},
};

/// The sections that are also timed in two halves, with arithmetic between them.
constexpr size_t kAround = 3;

struct Point {
  BenchOptions options;
  Scenario scenario;
  LowLatencyConfig config;
  DType type = DType::bf16;
  size_t sent_bytes = 0, returned_bytes = 0;
};

Point make_point(const BenchOptions& o) {
  Point p;
  p.options = o;
  const RoutingSource source("--routing", o.routing,
                             {o.experts, o.topk, static_cast<int>(o.ranks), static_cast<uint64_t>(o.seed)});
  Scenario& s = p.scenario;
  s.world = static_cast<int>(o.ranks);
  s.experts = source.experts();
  s.topk = source.topk();
  s.hidden = o.hidden;
  s.layout = Layout::expert_major;
  s.seed = static_cast<uint64_t>(o.seed);
  s.routing = source.all_ranks(o.tokens);
  p.options.experts = s.experts;
  p.options.topk = s.topk;
  p.type = o.dtype == "f16" ? DType::f16 : o.dtype == "f32" ? DType::f32 : o.dtype == "fp8" ? DType::fp8_e4m3 : DType::bf16;
  const ScaleKind scales = o.quantize == "ue8m0"                     ? ScaleKind::ue8m0
                           : o.quantize == "f32" || o.dtype == "fp8" ? ScaleKind::f32
                                                                     : ScaleKind::none;
  p.config = low_latency_config(s, p.type, scales);
  if (o.scale_order == "column_major") {
    if (scales == ScaleKind::none)
      throw UsageError(
          "--scale-order: 'column_major' given for rows without scales; allowed with --quantize f32 or ue8m0, or "
          "--dtype fp8");
    p.config.scale_order = ScaleOrder::column_major;
  }
  p.config.sending = o.sending == "per_route" ? Sending::per_route : Sending::per_rank;
  p.config.pieces = static_cast<int>(o.pieces);
  const auto hidden = static_cast<size_t>(o.hidden);
  p.returned_bytes = hidden * dtype_bytes(p.config.row_type);
  p.sent_bytes = scales == ScaleKind::none ? p.returned_bytes : hidden + scale_row_bytes(o.hidden, scales);
  return p;
}

RankJob job_of(const Point& p) { return latency_job(p.scenario, p.config, p.options, p.returned_bytes); }

/// The arithmetic alone, and in the middle of each kind of call.
void time_around(const BenchOptions& o, LatencyClock& clock, LowLatencyRank& rank, json& out) {
  const auto compute = [&] { clock.compute(static_cast<double>(o.compute)); };
  compute();  // the first time it finds out how much work that is
  out["compute"] = clock.time(compute, o.warmup, o.iterations);
  for (size_t i = 0; i < kAround; ++i) {
    const Section& section = kSections[i];
    out["around"].push_back(
        clock.time([&] { section.dispatch ? rank.dispatch_around(compute) : rank.combine_around(section.order, compute); },
                   o.warmup, o.iterations));
  }
}

json run_rank(const Point& p, Group& group) {
  const BenchOptions& o = p.options;
  const std::unique_ptr<LatencyClock> clock =
      o.backend == "cuda" ? make_cuda_clock(group, p.scenario, o, p.returned_bytes) : make_host_clock(group);
  LowLatencyRank rank(p.scenario, p.config, p.type, group, clock->device(),
                      {static_cast<int>(o.sms), static_cast<int>(o.combine_sms)});
  rank.prepare(0);
  json out = {{"checks", json::array()}};
  const auto check = [&](const CheckResult& r) { out["checks"].push_back({r.name, r.passed, r.detail, r.compared}); };
  rank.dispatch();
  out["remote_bytes"] = rank.exchange().last_call().remote_bytes;
  if (o.verify) {
    check(rank.check_dispatched("dispatch"));
    group.barrier();
    for (const CombineOrder order : {CombineOrder::per_route, CombineOrder::per_rank}) {
      rank.combine(order);
      check(rank.check_combined(order == CombineOrder::per_route ? "combine per_route" : "combine per_rank", order));
      group.barrier();
    }
  }
  for (const Section& section : kSections)
    out[section.key] = time_entered_late(
        *clock, group.rank(), o.late_us,
        [&] {
          if (section.dispatch) rank.dispatch();
          if (section.combine) rank.combine(section.order);
        },
        o.warmup, o.iterations);
  if (o.compute > 0) time_around(o, *clock, rank, out);
  out["limits"] = o.limits ? clock->limits(p.sent_bytes, p.returned_bytes, o.warmup, o.iterations) : json::object();
  if (o.verify) check(rank.check_combined("combine after the timed calls", CombineOrder::per_rank));
  group.barrier();
  return out;
}

/// What a call between whose halves there is arithmetic adds to it, in seconds; and the share of the call alone that has gone.
struct Overlap {
  double added, hidden;
};

struct Run {
  Point point;
  bench::Times times[std::size(kSections)];
  bench::Times compute, around[kAround];  ///< if BenchOptions::compute
  bool has_limits = false;
  bench::Times push, pull;
  double remote_bytes = 0;
  std::vector<CheckResult> checks;
  Overlap overlap(size_t section) const {
    const double added = around[section].p50 - compute.p50;
    return {added, 1 - added / times[section].p50};
  }
  bool passed() const {
    return std::all_of(checks.begin(), checks.end(), [](const CheckResult& c) { return c.passed; });
  }
};

bench::Times best_limit(const std::vector<json>& ranks, const std::string& name) {
  bench::Times best;
  const size_t shapes = ranks[0].at("limits").at(name).size();
  for (size_t i = 0; i < shapes; ++i) {
    const bench::Times t = times_of(ranks, json::json_pointer(fmt::format("/limits/{}/{}", name, i)));
    if (i == 0 || t.p50 < best.p50) best = t;
  }
  return best;
}

Run measure(const BenchOptions& options) {
  Run run;
  run.point = make_point(options);
  const Point& p = run.point;
  const std::vector<json> ranks = run_ranks(job_of(p), [&](Group& group, RankLink&) { return run_rank(p, group); });
  for (size_t i = 0; i < std::size(kSections); ++i)
    run.times[i] = times_of(ranks, json::json_pointer(std::string("/") + kSections[i].key));
  if (options.compute > 0) {
    run.compute = times_of(ranks, json::json_pointer("/compute"));
    for (size_t i = 0; i < kAround; ++i) run.around[i] = times_of(ranks, json::json_pointer(fmt::format("/around/{}", i)));
  }
  run.has_limits = ranks[0].at("limits").contains("push");
  if (run.has_limits) {
    run.push = best_limit(ranks, "push");
    run.pull = best_limit(ranks, "pull");
  }
  run.remote_bytes = most_remote_bytes(ranks);
  run.checks = checks_of(ranks);
  return run;
}

json describe(const Run& r) {
  const BenchOptions& o = r.point.options;
  json out = {{"config",
               {{"backend", o.backend},
                {"mode", "low_latency"},
                {"ranks", o.ranks},
                {"ranks_are", o.processes ? "processes" : "threads"},
                {"blocks", o.blocks},
                {"warps", o.warps},
                {"sms", o.sms},
                {"combine_sms", o.combine_sms},
                {"tokens_per_rank", o.tokens},
                {"hidden", o.hidden},
                {"experts", o.experts},
                {"topk", o.topk},
                {"dtype", o.dtype},
                {"quantize", o.quantize},
                {"scale_order", o.scale_order},
                {"sending", o.sending},
                {"pieces", o.pieces},
                {"late_us", o.late_us},
                {"compute_us", o.compute},
                {"routing", o.routing},
                {"seed", o.seed},
                {"iterations", o.iterations},
                {"warmup", o.warmup},
                {"graph_replay", o.backend == "cuda"},
                {"cold_l2", o.backend == "cuda"},
                {"statistic", "slowest rank"}}},
              {"largest_remote_bytes", r.remote_bytes},
              {"symmetric_bytes_per_rank", LowLatencyExchange::memory_required(r.point.config, r.point.scenario.world).total()},
              {"checks", checks_json(r.checks)},
              {"verified", o.verify ? json(r.passed()) : json(nullptr)}};
  for (size_t i = 0; i < std::size(kSections); ++i) out[kSections[i].key] = to_json(r.times[i]);
  if (o.compute > 0) {
    json& overlap = out["overlap"] = {{"compute", to_json(r.compute)}};
    for (size_t i = 0; i < kAround; ++i) {
      overlap[kSections[i].key] = to_json(r.around[i]);
      overlap[kSections[i].key]["added_us"] = r.overlap(i).added * 1e6;
      overlap[kSections[i].key]["hidden"] = r.overlap(i).hidden;
    }
  }
  if (r.has_limits) {
    out["push_limit"] = to_json(r.push);
    out["pull_limit"] = to_json(r.pull);
  }
  return out;
}

/// With --compute: calls in two halves around arithmetic.
void print_overlap(const std::vector<Run>& runs) {
  if (runs.front().point.options.compute == 0) return;
  PointTable table(
      runs.front().point.options, {"ranks", "tokens"},
      {"ranks", "tokens", "compute", "around it: dispatch", "hidden", "per_route", "hidden", "per_rank", "hidden"});
  for (const Run& r : runs) {
    std::vector<std::string> cells{std::to_string(r.point.options.ranks), std::to_string(r.point.options.tokens),
                                   fmt::format("{:.1f}", r.compute.p50 * 1e6)};
    for (size_t i = 0; i < kAround; ++i) {
      cells.push_back(fmt::format("{:.1f}", r.around[i].p50 * 1e6));
      cells.push_back(fmt::format("{:.0f} %", 100 * r.overlap(i).hidden));
    }
    table.row(r.point.options, cells);
  }
  fmt::print("\n{}", table.text());
  fmt::print(
      "\n  Microseconds. compute: arithmetic alone; around it: a call whose halves lie before and behind it; hidden: the share "
      "of the call's\n  own time, above, that it does not add to the arithmetic's.\n");
}

void print_runs(const std::vector<Run>& runs) {
  const BenchOptions& any = runs.front().point.options;
  const std::string tail = bench::tail_name(any.iterations);
  PointTable table(any, {"ranks", "tokens"},
                   {"ranks", "tokens", "rows", "dispatch", tail, "push", "per_route", tail, "per_rank", tail, "pull",
                    "both per_route", "both per_rank", "checked"});
  const auto us = [](double seconds) { return fmt::format("{:.1f}", seconds * 1e6); };
  for (const Run& r : runs) {
    const BenchOptions& o = r.point.options;
    table.row(
        o, {std::to_string(o.ranks), std::to_string(o.tokens), o.quantize == "none" ? o.dtype : o.dtype + ">fp8",
            us(r.times[0].p50), us(r.times[0].p99), r.has_limits ? us(r.push.p50) : "-", us(r.times[1].p50), us(r.times[1].p99),
            us(r.times[2].p50), us(r.times[2].p99), r.has_limits ? us(r.pull.p50) : "-", us(r.times[3].p50), us(r.times[4].p50),
            !o.verify    ? yellow("no")
            : r.passed() ? green("PASS")
                         : red("FAIL")});
  }
  fmt::print("\n{}", table.text());
  fmt::print(
      "\n  Microseconds, slowest rank. per_route and per_rank: combine in that order; both: dispatch and combine back to "
      "back.\n");
  if (runs.front().has_limits)
    fmt::print(
        "  Replayed CUDA graphs, cold L2. push and pull: the same rows moved by bare kernels, with a barrier at the end.\n");
  print_tail(any);
  print_late(any);
  print_overlap(runs);
  for (const Run& r : runs)
    for (const CheckResult& c : r.checks)
      if (!c.passed) fmt::print("  {} {} at {}: {}\n", red("FAIL"), c.name, point_title(r.point.options), c.detail);
}

}  // namespace

void check_low_latency(const BenchOptions& options, const bench::Machine& machine) {
  const Point p = make_point(options);
  check_latency_room(options, job_of(p), LowLatencyRank::device_bytes(p.scenario, p.config), machine);
}

json measured_low_latency(const BenchOptions& options) { return describe(measure(options)); }

int run_bench_low_latency(const BenchOptions& options, std::vector<BenchOptions> points) {
  const json gpus = fit_points(options, points);
  const bench::Machine machine = bench::this_machine();
  for (const BenchOptions& point : points) check_low_latency(point, machine);
  const BenchOptions& any = points.front();
  fmt::print("{}\n  {} backend{}, dtype {}, quantize {}, scale order {}, sending {}, commit {}, {}\n\n",
             bold("switchyard bench --mode low_latency"), options.backend, common_hidden(any), common(any, "dtype"),
             common(any, "quantize"), common(any, "scale-order"), common(any, "sending"), any.commit, bench::utc_now());
  Progress progress;
  std::vector<Run> runs;
  const Stopped stopped = in_turn(progress, points.size(), [&](size_t i) {
    progress.stage(point_title(points[i]), 1);
    runs.push_back(measure(points[i]));
    progress.finish(fmt::format("dispatch {:.1f} us, combine {:.1f} and {:.1f} us{}", runs.back().times[0].p50 * 1e6,
                                runs.back().times[1].p50 * 1e6, runs.back().times[2].p50 * 1e6,
                                runs.back().passed() ? "" : ", RESULTS DIFFER"));
  });
  json document = bench_document("switchyard bench --mode low_latency --backend " + options.backend, points.front(), stopped);
  if (!gpus.is_null()) document["gpus"] = gpus;
  for (const Run& run : runs) document["runs"].push_back(describe(run));
  const std::exception_ptr problem = write_results(options, document);
  print_runs(runs);
  print_written(options, problem);
  return stopped.status(std::all_of(runs.begin(), runs.end(), [](const Run& r) { return r.passed(); }));
}

}  // namespace switchyard::tool
