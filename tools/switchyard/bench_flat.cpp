// SPDX-License-Identifier: Apache-2.0
#include <fmt/core.h>

#include <algorithm>
#include <cmath>

#include "bench_low_latency.hpp"
#include "bench_points.hpp"
#include "cli.hpp"
#include "low_latency_check.hpp"
#include "progress.hpp"
#include "ranks.hpp"
#include "style.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

/// The bar on H200s over NVLink: 2 (t + 12 us), t being the time of the bytes that a rank writes to others, both ways, at this
/// rate.
constexpr double kLinkBytesPerSecond = 353e9, kOverheadSeconds = 12e-6;
/// Geometric mean of the five shapes on the contest's own machine, 8 MI300X.
constexpr double kPublishedSeconds = 292e-6;

struct Point {
  BenchOptions options;
  Scenario scenario;
  LowLatencyConfig config;
};

/// The contest draws T of each rank from [1, max - 1].
int64_t tokens_of(const BenchOptions& o, int rank) {
  if (!o.contest || o.tokens < 2) return o.tokens;
  const uint64_t bits = row_key(static_cast<uint64_t>(o.seed), 0, RowKind::token, static_cast<uint64_t>(rank), 0);
  return 1 + static_cast<int64_t>((bits >> 16) % static_cast<uint64_t>(o.tokens - 1));
}

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
  for (int r = 0; r < s.world; ++r) s.routing.push_back(std::move(source.batches(r, tokens_of(o, r), 1).front()));
  p.options.experts = s.experts;
  p.options.topk = s.topk;
  const DType type = o.dtype == "f16" ? DType::f16 : o.dtype == "f32" ? DType::f32 : DType::bf16;
  p.config = low_latency_config(s, type, ScaleKind::none);
  p.config.max_tokens = o.tokens;
  p.config.sending = o.sending == "per_route" ? Sending::per_route : Sending::per_rank;
  p.config.pieces = static_cast<int>(o.pieces);
  return p;
}

size_t row_bytes_of(const Point& p) { return static_cast<size_t>(p.options.hidden) * dtype_bytes(p.config.row_type); }

RankJob job_of(const Point& p) { return latency_job(p.scenario, p.config, p.options, row_bytes_of(p)); }

json run_rank(const Point& p, Group& group) {
  const BenchOptions& o = p.options;
  const std::unique_ptr<LatencyClock> clock =
      o.backend == "cuda" ? make_cuda_clock(group, p.scenario, o, row_bytes_of(p)) : make_host_clock(group);
  LowLatencyRank rank(p.scenario, p.config, p.config.row_type, group, clock->device(),
                      {static_cast<int>(o.sms), static_cast<int>(o.combine_sms)});
  rank.prepare(0, LowLatencyRank::Experts::scale);
  json out = {{"checks", json::array()}};
  const auto check = [&](const char* name) {
    if (!o.verify) return;
    const CheckResult r = rank.check_scaled(name);
    out["checks"].push_back({r.name, r.passed, r.detail, r.compared});
    group.barrier();
  };
  rank.all_to_all();
  out["remote_bytes"] = rank.exchange().last_call().remote_bytes;
  check("moe_all_to_all");
  out["all_to_all"] = time_entered_late(
      *clock, group.rank(), o.late_us, [&] { rank.all_to_all(); }, o.warmup, o.iterations);
  check("moe_all_to_all after the timed calls");
  out["two_calls"] = time_entered_late(
      *clock, group.rank(), o.late_us,
      [&] {
        rank.dispatch();
        rank.combine_scaled();
      },
      o.warmup, o.iterations);
  check("dispatch and combine");
  return out;
}

struct Run {
  Point point;
  bench::Times whole, two_calls;
  double remote_bytes = 0;  ///< written by the rank that writes most, both ways
  std::vector<CheckResult> checks;
  double link_seconds() const { return remote_bytes / kLinkBytesPerSecond; }
  double bar_seconds() const { return 2 * (link_seconds() + kOverheadSeconds); }
  bool passed() const {
    return std::all_of(checks.begin(), checks.end(), [](const CheckResult& c) { return c.passed; });
  }
};

Run measure(const BenchOptions& options) {
  Run run;
  run.point = make_point(options);
  const Point& p = run.point;
  const std::vector<json> ranks = run_ranks(job_of(p), [&](Group& group, RankLink&) { return run_rank(p, group); });
  run.whole = times_of(ranks, json::json_pointer("/all_to_all"));
  run.two_calls = times_of(ranks, json::json_pointer("/two_calls"));
  run.remote_bytes = most_remote_bytes(ranks);
  run.checks = checks_of(ranks);
  return run;
}

json describe(const Run& r) {
  const BenchOptions& o = r.point.options;
  json tokens = json::array();
  for (int rank = 0; rank < r.point.scenario.world; ++rank) tokens.push_back(r.point.scenario.tokens(rank));
  return {{"config",
           {{"backend", o.backend},
            {"mode", "flat"},
            {"contest", o.contest},
            {"ranks", o.ranks},
            {"ranks_are", o.processes ? "processes" : "threads"},
            {"blocks", o.blocks},
            {"warps", o.warps},
            {"sms", o.sms},
            {"tokens_per_rank", o.tokens},
            {"hidden", o.hidden},
            {"experts", o.experts},
            {"topk", o.topk},
            {"dtype", o.dtype},
            {"sending", o.sending},
            {"pieces", o.pieces},
            {"late_us", o.late_us},
            {"routing", o.routing},
            {"seed", o.seed},
            {"iterations", o.iterations},
            {"warmup", o.warmup},
            {"graph_replay", o.backend == "cuda"},
            {"cold_l2", o.backend == "cuda"},
            {"statistic", "slowest rank"}}},
          {"tokens", tokens},
          {"all_to_all", to_json(r.whole)},
          {"two_calls", to_json(r.two_calls)},
          {"largest_remote_bytes", r.remote_bytes},
          {"link_us_at_353_gbs", o.backend == "cuda" ? json(r.link_seconds() * 1e6) : json(nullptr)},
          {"bar_us", o.backend == "cuda" ? json(r.bar_seconds() * 1e6) : json(nullptr)},
          {"symmetric_bytes_per_rank", LowLatencyExchange::memory_required(r.point.config, r.point.scenario.world).total()},
          {"checks", checks_json(r.checks)},
          {"verified", o.verify ? json(r.passed()) : json(nullptr)}};
}

/// All of the contest's shapes were measured.
bool has_mean(const std::vector<Run>& runs) {
  const BenchOptions& any = runs.front().point.options;
  return any.contest && runs.size() == contest_points(any).size();
}

double geometric_mean(const std::vector<Run>& runs) {
  double sum = 0;
  for (const Run& r : runs) sum += std::log(r.whole.p50);
  return std::exp(sum / static_cast<double>(runs.size()));
}

void print_runs(const std::vector<Run>& runs) {
  const BenchOptions& any = runs.front().point.options;
  const bool cuda = any.backend == "cuda";
  const std::string tail = bench::tail_name(any.iterations);
  std::vector<std::string> header{"ranks", "experts", "top",       "hidden", "max tokens", "rows",
                                  "whole", tail,      "two calls", tail,     "bytes"};
  if (cuda) header.insert(header.end(), {"t", "2(t+12)"});
  header.emplace_back("checked");
  PointTable table(any, {"ranks", "topk", "hidden", "tokens"}, header);
  const auto us = [](double seconds) { return fmt::format("{:.1f}", seconds * 1e6); };
  for (const Run& r : runs) {
    const BenchOptions& o = r.point.options;
    std::vector<std::string> cells{std::to_string(o.ranks),
                                   std::to_string(o.experts),
                                   std::to_string(o.topk),
                                   std::to_string(o.hidden),
                                   std::to_string(o.tokens),
                                   o.dtype,
                                   us(r.whole.p50),
                                   us(r.whole.p99),
                                   us(r.two_calls.p50),
                                   us(r.two_calls.p99),
                                   decimal_size(r.remote_bytes)};
    if (cuda) {
      const std::string bar = us(r.bar_seconds());
      cells.push_back(us(r.link_seconds()));
      cells.push_back(r.whole.p50 <= r.bar_seconds() ? green(bar) : red(bar));
    }
    cells.push_back(!o.verify ? yellow("no") : r.passed() ? green("PASS") : red("FAIL"));
    table.row(o, cells);
  }
  fmt::print("\n{}", table.text());
  fmt::print(
      "\n  Microseconds, slowest rank{}. whole: moe_all_to_all; two calls: dispatch, and combine with expert_scale. bytes: "
      "written to other ranks\n  by the rank that writes most, both ways{}.\n",
      cuda ? ", replayed CUDA graphs with a cold L2" : "", cuda ? "; t: their time at 353 GB/s" : "");
  print_tail(any);
  print_late(any);
  if (has_mean(runs)) {
    fmt::print(
        "  Geometric mean of the five shapes: {} us.{}\n", bold(us(geometric_mean(runs))),
        cuda ? fmt::format(" Published for the contest's own machine, 8 MI300X: {:.0f} us.", kPublishedSeconds * 1e6) : "");
  }
  for (const Run& r : runs)
    for (const CheckResult& c : r.checks)
      if (!c.passed) fmt::print("  {} {} at {}: {}\n", red("FAIL"), c.name, point_title(r.point.options), c.detail);
}

}  // namespace

std::vector<BenchOptions> contest_points(const BenchOptions& options) {
  struct Shape {
    int64_t experts, topk, hidden, tokens, seed;
  };
  constexpr Shape kShapes[] = {{8, 2, 6144, 16, 6635},
                               {64, 6, 2048, 32, 1234},
                               {128, 4, 2880, 128, 51},
                               {128, 8, 4096, 256, 175},
                               {256, 8, 7168, 256, 4}};
  std::vector<BenchOptions> points;
  for (const Shape& shape : kShapes) {
    BenchOptions& o = points.emplace_back(options);
    o.dtype = "f16";
    o.routing = "uniform";
    o.experts = shape.experts;
    o.topk = shape.topk;
    o.hidden = shape.hidden;
    o.tokens = shape.tokens;
    o.seed = shape.seed;
    o.swept = {"hidden"};  // differs in all of them
  }
  return points;
}

void check_flat(const BenchOptions& options, const bench::Machine& machine) {
  const Point p = make_point(options);
  check_latency_room(options, job_of(p), 2 * static_cast<size_t>(options.tokens) * row_bytes_of(p), machine);
}

json measured_flat(const BenchOptions& options) { return describe(measure(options)); }

int run_bench_flat(const BenchOptions& options, std::vector<BenchOptions> points) {
  for (const BenchOptions& o : points)
    if (o.dtype == "fp8" || o.quantize != "none")
      throw UsageError("--mode flat: rows travel as they are; allowed: --dtype bf16, f16 or f32, --quantize none");
  const json gpus = fit_points(options, points);
  const bench::Machine machine = bench::this_machine();
  for (const BenchOptions& point : points) check_flat(point, machine);
  fmt::print("{}\n  {} backend, commit {}, {}\n\n", bold("switchyard bench --mode flat"), options.backend,
             points.front().commit, bench::utc_now());
  Progress progress;
  std::vector<Run> runs;
  const Stopped stopped = in_turn(progress, points.size(), [&](size_t i) {
    progress.stage(point_title(points[i]), 1);
    runs.push_back(measure(points[i]));
    progress.finish(fmt::format("{:.1f} us, in two calls {:.1f} us{}", runs.back().whole.p50 * 1e6,
                                runs.back().two_calls.p50 * 1e6, runs.back().passed() ? "" : ", RESULTS DIFFER"));
  });
  json document = bench_document("switchyard bench --mode flat --backend " + options.backend, points.front(), stopped);
  if (!gpus.is_null()) document["gpus"] = gpus;
  if (has_mean(runs)) document["geometric_mean_us"] = geometric_mean(runs) * 1e6;
  for (const Run& run : runs) document["runs"].push_back(describe(run));
  const std::exception_ptr problem = write_results(options, document);
  print_runs(runs);
  print_written(options, problem);
  return stopped.status(std::all_of(runs.begin(), runs.end(), [](const Run& r) { return r.passed(); }));
}

}  // namespace switchyard::tool
