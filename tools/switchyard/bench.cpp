// SPDX-License-Identifier: Apache-2.0
#include "bench.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstdio>
#include <stdexcept>

#include "../../bench/result_file.hpp"
#include "bench_cuda.hpp"
#include "bench_html.hpp"
#include "bench_low_latency.hpp"
#include "bench_points.hpp"
#include "build_info.hpp"
#include "cli.hpp"
#include "progress.hpp"
#include "ranks.hpp"
#include "style.hpp"
#include "switchyard/tuning.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

double share(double bytes, double seconds, double limit_gbs) { return bytes / seconds / (limit_gbs * 1e9); }

json describe(const BenchRun& run, double limit_gbs) {
  const BenchOptions& o = run.options;
  json checks = json::array();
  for (const CheckResult& c : run.checks)
    checks.push_back({{"name", c.name}, {"passed", c.passed}, {"detail", c.detail}, {"compared", c.compared}});
  return {{"config",
           {{"backend", o.backend},
            {"mode", "normal"},
            {"ranks", o.ranks},
            {"ranks_are", o.processes ? "processes" : "threads"},
            {"blocks", o.blocks},
            {"warps", o.warps},
            {"tokens_per_rank", o.tokens},
            {"hidden", o.hidden},
            {"experts", run.experts},
            {"topk", run.topk},
            {"layout", o.layout},
            {"expert_alignment", o.alignment},
            {"staging", o.staging},
            {"dtype", o.dtype},
            {"quantize", o.quantize},
            {"order", o.order},
            {"routing", run.routing},
            {"cached", o.cached},
            {"seed", o.seed},
            {"pin", o.pin},
            {"warmup", o.warmup},
            {"ring", {{"channels", run.ring.num_channels}, {"send_chunk", run.ring.send_chunk}, {"slots", run.ring.slots}}}}},
          {"input_sets", run.sets},
          {"working_set_bytes", run.working_set_bytes},
          {"symmetric_bytes_per_rank", run.heap_bytes},
          {"dispatch", to_json(run.dispatch)},
          {"combine", to_json(run.combine)},
          {"both", to_json(run.both)},
          {"plan_us", run.plan_us},
          {"bytes", to_json(run.bytes)},
          {"counted_remote_bytes", run.counted_remote},
          {"share_of_limit",
           {{"dispatch", share(run.bytes.dispatch_limit, run.dispatch.p50, limit_gbs)},
            {"combine", share(run.bytes.combine_limit, run.combine.p50, limit_gbs)},
            {"both", share(run.bytes.dispatch_limit + run.bytes.combine_limit, run.both.p50, limit_gbs)}}},
          {"verified", o.verify ? json(run.passed()) : json(nullptr)},
          {"checks", checks}};
}

void print_runs(const std::vector<BenchRun>& runs, double limit_gbs) {
  const std::string tail = bench::tail_name(runs.front().options.iterations);
  PointTable table(runs.front().options, {"ranks", "tokens"},
                   {"ranks", "workers", "tokens", "dispatch p50", tail, "limit", "combine p50", tail, "limit", "both", "limit",
                    "remote", "logical", "checked"});
  const auto percent = [&](double bytes, double seconds) {
    return fmt::format("{:.1f} %", 100 * share(bytes, seconds, limit_gbs));
  };
  for (const BenchRun& r : runs) {
    table.row(r.options, {std::to_string(r.options.ranks), std::to_string(r.options.ranks * r.options.blocks * r.options.warps),
                          std::to_string(r.options.tokens), duration(r.dispatch.p50), duration(r.dispatch.p99),
                          percent(r.bytes.dispatch_limit, r.dispatch.p50), duration(r.combine.p50), duration(r.combine.p99),
                          percent(r.bytes.combine_limit, r.combine.p50), duration(r.both.p50),
                          bold(percent(r.bytes.dispatch_limit + r.bytes.combine_limit, r.both.p50)),
                          decimal_size(r.bytes.remote), decimal_size(r.bytes.logical),
                          !r.options.verify ? yellow("no")
                          : r.passed()      ? green("PASS")
                                            : red("FAIL")});
  }
  fmt::print("\n{}", table.text());
}

/// For all points together; "" if no cache could hold their rows.
std::string cache_note(const bench::Machine& machine, const std::vector<BenchRun>& runs) {
  const auto cache = static_cast<double>(machine.llc_bytes);
  int64_t small = 0;
  double least = 0;
  for (const BenchRun& r : runs) {
    if (r.working_set_bytes >= 2 * cache) continue;
    least = ++small == 1 ? r.working_set_bytes : std::min(least, r.working_set_bytes);
  }
  if (small == 0) return "";
  const std::string which = runs.size() == 1 ? "" : fmt::format(" of {} of {} points", small, runs.size());
  return fmt::format("the input sets{} are less than twice the last-level cache ({}), which holds part of them; the least: {}",
                     which, binary_size(cache), binary_size(least));
}

double largest_share(const std::vector<BenchRun>& runs, double limit_gbs) {
  double most = 0;
  for (const BenchRun& r : runs)
    most = std::max({most, share(r.bytes.dispatch_limit, r.dispatch.p50, limit_gbs),
                     share(r.bytes.combine_limit, r.combine.p50, limit_gbs)});
  return most;
}

void print_legend(const BenchOptions& any, const bench::CopyLimit& limit, const std::vector<std::string>& notes) {
  fmt::print(
      "\n  Times are from entry to exit on the slowest rank. 'limit' is the share of the copy limit: {:.1f} GB/s read + "
      "written\n"
      "  by {} threads ({}), for each source row read once and each (token, rank) row written once, and the reverse for "
      "combine.\n",
      limit.best().gbs, limit.threads, limit.best().method);
  for (const bench::CopyRate& r : limit.rates)
    fmt::print("    {:<32} {:>7.1f} GB/s  ({:.1f} to {:.1f})\n", r.method, r.gbs, r.gbs_min, r.gbs_max);
  for (const std::string& note : notes) fmt::print("  {}: {}\n", yellow("note"), note);
  fmt::print("  remote: rows for other ranks, one per (token, rank); logical: one row per route.\n");
  print_tail(any);
}

void print_failures(const std::vector<BenchRun>& runs) {
  for (const BenchRun& r : runs) {
    for (const CheckResult& c : r.checks) {
      if (!c.passed) fmt::print("  {} {} at {}: {}\n", red("FAIL"), c.name, point_title(r.options), c.detail);
    }
  }
}

}  // namespace

bench::CopyLimit limit_now(Progress& progress, const BenchOptions& options, const bench::Machine& machine, const char* title) {
  bench::CopyLimitOptions limit;
  limit.threads = machine.usable_cores();
  limit.row_bytes = static_cast<size_t>(options.hidden) * 2;
  limit.seconds = static_cast<double>(options.limit_ms) / 1000;
  progress.stage(title, 100);
  bench::CopyLimit result =
      bench::measure_copy_limit(machine, limit, [&](double done) { progress.update(static_cast<int64_t>(100 * done)); });
  progress.finish(fmt::format("{:.1f} GB/s with {} threads", result.best().gbs, result.threads));
  return result;
}

void choose_sms(BenchOptions& o, const std::string& gpu, int64_t most) {
  if (o.combine_sms == 0) o.combine_sms = o.sms;
  if (o.sms > 0) return;
  const TuningMode mode = o.mode == "flat"             ? TuningMode::flat
                          : o.mode == "low_latency"    ? TuningMode::low_latency
                          : o.mode == "ledger"         ? TuningMode::ledger
                          : o.layout == "expert_major" ? TuningMode::normal_expert_major
                                                       : TuningMode::normal;
  const TuningValues tuned = Tuning::from_environment().find({gpu, mode, static_cast<int>(o.ranks), o.hidden, o.tokens});
  const auto chosen = [&](int value) {
    return std::min<int64_t>(value > 0 ? value : o.mode == "normal" ? kDefaultSms : most, most);
  };
  const bool one_call = mode == TuningMode::flat || mode == TuningMode::ledger;
  o.sms = chosen(one_call ? tuned.sms : tuned.dispatch_sms);
  o.combine_sms = chosen(one_call ? tuned.sms : tuned.combine_sms);
}

std::vector<std::string> limit_notes(double before, double after, double largest_share) {
  std::vector<std::string> notes;
  if (std::min(before, after) < std::max(before, after) * 2 / 3)
    notes.push_back(
        fmt::format("the copy limit was {:.1f} GB/s before and {:.1f} GB/s after: something else uses this machine, and shares "
                    "of the limit "
                    "say little",
                    before, after));
  if (largest_share > 1)
    notes.push_back(fmt::format("a share of the limit is {:.1f} %: the limit was measured too low, or rows lay in a cache",
                                100 * largest_share));
  return notes;
}

std::exception_ptr write_results(const BenchOptions& options, const json& document) {
  try {
    if (!options.json_path.empty()) bench::write_json(options.json_path, document);
    if (!options.html_path.empty()) bench::write_file(options.html_path, bench_html(document));
  } catch (const std::exception&) {
    return std::current_exception();
  }
  return nullptr;
}

void print_written(const BenchOptions& options, const std::exception_ptr& problem) {
  if (problem) std::rethrow_exception(problem);
  for (const std::string& path : {options.json_path, options.html_path})
    if (!path.empty() && path != bench::kStandardOutput) fmt::print("  written to {}\n", path);
}

BenchOptions with_defaults(const BenchOptions& options, const bench::Machine& machine) {
  BenchOptions o = options;
  const int cores = machine.usable_cores();
  if (o.ranks == 0) o.ranks = cores >= 16 ? 8 : 2;
  if (o.warps == 0) o.warps = std::max<int64_t>(1, cores / (o.ranks * o.blocks));
  if (o.commit.empty()) o.commit = source_commit();
  // Workers of thread ranks are created together: only a rank's own thread can be pinned.
  const bool can_pin = o.processes || o.blocks * o.warps == 1;
  if (o.pin == "auto") o.pin = can_pin ? "cores" : "none";
  if (o.pin == "cores" && !can_pin) {
    throw UsageError(fmt::format(
        "--pin: 'cores' given with {} workers per rank; ranks that are threads can be pinned with one worker each only. "
        "Allowed: --pin none, --processes, or --blocks 1 --warps 1",
        o.blocks * o.warps));
  }
  if (o.order == "per_route" && o.layout == "rank_major") {
    throw UsageError(
        "--order: 'per_route' given with --layout rank_major, whose rows are one per (token, rank); allowed: per_rank, or "
        "--layout expert_major");
  }
  if (o.quantize != "none" && o.dtype == "fp8")
    throw UsageError("--quantize: fp8 rows are quantised already; allowed with --dtype bf16, f16 or f32");
  return o;
}

namespace {

int run_bench_cpu(const BenchOptions& options, std::vector<BenchOptions> points) {
  const bench::Machine machine = bench::this_machine();
  for (BenchOptions& point : points) {
    point = with_defaults(point, machine);
    check_exchange(point, machine);
  }
  fmt::print("{}\n  {}, {}, last-level cache {}, {}\n  commit {}, {}\n\n", bold("switchyard bench"), machine.cpu_model,
             counted(machine.usable_cores(), "core"), binary_size(static_cast<double>(machine.llc_bytes)), machine.os,
             points.front().commit, bench::utc_now());
  const BenchOptions& first = points.front();
  const auto is_pinned = [](const BenchOptions& o) { return o.pin == "cores"; };
  fmt::print("  normal mode, {} staging, {} rows {}{}, {} combine, {} routing, ranks are {}{}\n\n", first.staging,
             common(first, "layout"), common(first, "dtype"), common_hidden(first), common(first, "order"),
             common(first, "routing"), first.processes ? "processes" : "threads",
             std::all_of(points.begin(), points.end(), is_pinned) ? ", pinned" : "");
  std::fflush(stdout);

  Progress progress;
  bench::CopyLimit limit = limit_now(progress, first, machine, "copy limit, before");
  std::vector<BenchRun> runs;
  const Stopped stopped = in_turn(progress, points.size(), [&](size_t i) {
    progress.stage(point_title(points[i]), 100);
    runs.push_back(
        measure_exchange(points[i], machine, [&](double done) { progress.update(static_cast<int64_t>(100 * done)); }));
    const BenchRun& run = runs.back();
    progress.finish(fmt::format("dispatch {}, combine {}{}", duration(run.dispatch.p50), duration(run.combine.p50),
                                run.passed() ? "" : ", RESULTS DIFFER"));
  });
  const bench::CopyLimit after = limit_now(progress, first, machine, "copy limit, after");
  const bench::CopyLimit before = limit;
  if (after.best().gbs > limit.best().gbs) limit = after;  // other load may have slowed one of them

  std::vector<std::string> notes = limit_notes(before.best().gbs, after.best().gbs, largest_share(runs, limit.best().gbs));
  const std::string cached = cache_note(machine, runs);
  if (!cached.empty()) notes.push_back(cached);
  json document = bench_document("switchyard bench", first, stopped);
  document["notes"] = notes;
  document["copy_limit"] = to_json(limit);
  document["copy_limit_runs"] = {to_json(before), to_json(after)};
  document["copy_limit_ms"] = first.limit_ms;
  for (const BenchRun& run : runs) document["runs"].push_back(describe(run, limit.best().gbs));
  const std::exception_ptr problem = write_results(options, document);
  print_runs(runs, limit.best().gbs);
  print_legend(points.front(), limit, notes);
  print_failures(runs);
  print_written(options, problem);
  return stopped.status(std::all_of(runs.begin(), runs.end(), [](const BenchRun& r) { return r.passed(); }));
}

}  // namespace

/// This process is one rank of several that a launcher started. The first one speaks for all.
static void be_one_of(const Membership& me, BenchOptions& o) {
  const std::string started = fmt::format("the launcher started {} ranks", me.world);
  if (o.backend == "cpu" && o.mode == "normal")
    throw UsageError(
        "--backend cpu --mode normal: " + started +
        ", but here bench starts its ranks itself, so that the copy limit is that of the machine; run it without a launcher");
  if (o.ranks != 0 && o.ranks != me.world) throw UsageError(fmt::format("--ranks: '{}' given; {}", o.ranks, started));
  for (const std::string& sweep : o.sweep)
    if (sweep.rfind("ranks=", 0) == 0) throw UsageError(fmt::format("--sweep: '{}' given; {}", sweep, started));
  o.ranks = me.world;
  o.processes = true;
  if (me.rank == 0) return;
  o.json_path.clear();
  o.html_path.clear();
  Progress::silence();
  if (std::freopen("/dev/null", "w", stdout) == nullptr) throw std::runtime_error("/dev/null cannot be opened");
}

int run_bench(const BenchOptions& given) {
  BenchOptions options = given;
  if (const auto me = join_launched_ranks()) be_one_of(*me, options);
  std::vector<BenchOptions> points = bench_points(options);
  check_outputs({{"--json", options.json_path, kLeastJson}, {"--html", options.html_path, kLeastPage}});
  (void)Tuning::from_environment();  // groups would refuse a wrong file
  if (options.mode == "low_latency") return run_bench_low_latency(options, std::move(points));
  if (options.mode == "flat") return run_bench_flat(options, std::move(points));
  if (options.backend == "cuda") return run_bench_cuda(options, std::move(points));
  return run_bench_cpu(options, std::move(points));
}

}  // namespace switchyard::tool
