// SPDX-License-Identifier: Apache-2.0
// Low-latency mode: decode-sized exchanges, where each call is timed from entry to exit on the slowest rank.
#include <fmt/core.h>

#include "bench/latency.hpp"
#include "cli/style.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

/// The timed sections, in this order.
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

/// Number of sections that are also timed as two halves with computation between them.
constexpr size_t kSplitSections = 3;

std::vector<int64_t> tokens_of(const BenchOptions& o) { return std::vector<int64_t>(static_cast<size_t>(o.ranks), o.tokens); }

/// Times the computation by itself and between the halves of each kind of call.
void time_split(const BenchOptions& o, Clock& clock, LowLatencyRank& rank, json& out) {
  const auto compute = [&] { clock.compute(static_cast<double>(o.compute)); };
  compute();  // the first call calibrates the amount of work
  out["compute"] = clock.time(compute, o.warmup, o.iterations);
  for (size_t i = 0; i < kSplitSections; ++i) {
    const Section& section = kSections[i];
    out["around"].push_back(clock.time(
        [&] { section.dispatch ? rank.dispatch_in_halves(compute) : rank.combine_in_halves(section.order, compute); }, o.warmup,
        o.iterations));
  }
}

json run_rank(const LatencyPoint& p, Group& group) {
  const BenchOptions& o = p.options;
  const std::unique_ptr<Clock> clock = latency_clock(p, group);
  LowLatencyRank rank(p.scenario, p.config, rows_named(o.dtype).type, group, clock->device(),
                      {static_cast<int>(o.sms), static_cast<int>(o.combine_sms)});
  rank.prepare(0);
  json out;
  std::vector<CheckResult> checks;
  rank.dispatch();
  out["remote_bytes"] = rank.exchange().last_call().remote_bytes;
  if (o.verify) {
    checks.push_back(rank.check_dispatched("dispatch"));
    group.barrier();
    for (const CombineOrder order : {CombineOrder::per_route, CombineOrder::per_rank}) {
      rank.combine(order);
      checks.push_back(rank.check_combined(std::string("combine ") + to_string(order), order));
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
  if (o.compute > 0) time_split(o, *clock, rank, out);
  out["push"] = out["pull"] = json::array();
  if (o.limits) {
    out["push"] = clock->push_limits(sent_row_bytes(o), static_cast<int>(o.sms), o.warmup, o.iterations);
    out["pull"] = clock->pull_limits(returned_row_bytes(o), static_cast<int>(o.sms), o.warmup, o.iterations);
  }
  if (o.verify) checks.push_back(rank.check_combined("combine after the timed calls", CombineOrder::per_rank));
  out["checks"] = encode_checks(checks);
  group.barrier();
  return out;
}

/// `added`: seconds that a call adds to the computation between its halves. `hidden`: fraction of the call's own time that is
/// hidden by the computation.
struct Overlap {
  double added, hidden;
};

struct Run : LatencyRun {
  measure::Times times[std::size(kSections)];
  measure::Times compute, around[kSplitSections];  ///< if BenchOptions::compute
  std::optional<measure::Times> push, pull;
  Overlap overlap(size_t section) const {
    const double added = around[section].p50 - compute.p50;
    return {added, 1 - added / times[section].p50};
  }
};

class LowLatencyBench final : public LatencyCase<Run> {
 public:
  void check(const BenchOptions& o) const override {
    const LatencyPoint p = latency_point(o, tokens_of(o));
    check_latency_memory(p, LowLatencyRank::device_bytes(p.scenario, p.config), machine_);
  }
  void print_head(const std::vector<BenchOptions>& points) const override {
    const BenchOptions& any = points.front();
    fmt::print("{}\n  {} backend{}, dtype {}, quantize {}, scale order {}, sending {}, commit {}, {}\n\n", bold(title()),
               any.backend, common_hidden(any), common(any, "dtype"), common(any, "quantize"), common(any, "scale-order"),
               common(any, "sending"), any.commit, measure::utc_now());
  }
  void print() const override {
    PointTable table(any(), {"ranks", "tokens"},
                     {"ranks", "tokens", "rows", "dispatch", tail(), "push", "per_route", tail(), "per_rank", tail(), "pull",
                      "both per_route", "both per_rank", "checked"});
    for (const Run& r : runs_) {
      const BenchOptions& o = r.options;
      table.row(o,
                {std::to_string(o.ranks), std::to_string(o.tokens), rows_text(o), us(r.times[0].p50), us(r.times[0].p99),
                 r.push ? us(r.push->p50) : "-", us(r.times[1].p50), us(r.times[1].p99), us(r.times[2].p50), us(r.times[2].p99),
                 r.push ? us(r.pull->p50) : "-", us(r.times[3].p50), us(r.times[4].p50), checked_cell(r)});
    }
    fmt::print("\n{}", table.text());
    fmt::print(
        "\n  Microseconds, slowest rank. per_route and per_rank: combine in that order; both: dispatch and combine back to "
        "back.\n");
    if (runs_.front().push)
      fmt::print(
          "  Replayed CUDA graphs, cold L2. push and pull: the same rows moved by bare kernels, with a barrier at the end.\n");
    print_tail_of_table();
    print_late(any());
    print_overlap();
    print_failures();
  }

 protected:
  std::string title() const override { return "switchyard bench --mode low_latency"; }
  Run run(const BenchOptions& options, Progress*) override {
    Run run;
    run.point = latency_point(options, tokens_of(options));
    run.options = run.point.options;
    const LatencyPoint& p = run.point;
    const std::vector<json> ranks = run_ranks(job_of(p), [&](Group& group, RankLink&) { return run_rank(p, group); });
    for (size_t i = 0; i < std::size(kSections); ++i)
      run.times[i] = measure::times_of(ranks, std::string("/") + kSections[i].key);
    if (options.compute > 0) {
      run.compute = measure::times_of(ranks, "/compute");
      for (size_t i = 0; i < kSplitSections; ++i) run.around[i] = measure::times_of(ranks, fmt::format("/around/{}", i));
    }
    if (!ranks[0].at("push").empty()) {
      run.push = measure::fastest_of(ranks, "/push");
      run.pull = measure::fastest_of(ranks, "/pull");
    }
    run.remote_bytes = max_remote_bytes(ranks);
    run.checks = unmerged_by_rank(part_of(ranks, "checks"));
    return run;
  }
  std::string words_of(const Run& run) const override {
    return fmt::format("dispatch {:.1f} us, combine {:.1f} and {:.1f} us", run.times[0].p50 * 1e6, run.times[1].p50 * 1e6,
                       run.times[2].p50 * 1e6);
  }
  json describe(const Run& r) const override {
    const BenchOptions& o = r.options;
    json out = {{"config",
                 {{"backend", o.backend},
                  {"mode", o.mode},
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
                  {"graph_replay", on_gpus(o)},
                  {"cold_l2", on_gpus(o)},
                  {"statistic", "slowest rank"}}},
                {"largest_remote_bytes", r.remote_bytes},
                {"symmetric_bytes_per_rank", symmetric_bytes(r.point)},
                {"checks", checks_json(r.checks)},
                {"verified", verified_json(r)}};
    for (size_t i = 0; i < std::size(kSections); ++i) out[kSections[i].key] = to_json(r.times[i]);
    if (o.compute > 0) {
      json& overlap = out["overlap"] = {{"compute", to_json(r.compute)}};
      for (size_t i = 0; i < kSplitSections; ++i) {
        overlap[kSections[i].key] = to_json(r.around[i]);
        overlap[kSections[i].key]["added_us"] = r.overlap(i).added * 1e6;
        overlap[kSections[i].key]["hidden"] = r.overlap(i).hidden;
      }
    }
    if (r.push) {
      out["push_limit"] = to_json(*r.push);
      out["pull_limit"] = to_json(*r.pull);
    }
    return out;
  }

 private:
  /// With --compute: times of calls with computation between their halves.
  void print_overlap() const {
    if (any().compute == 0) return;
    PointTable table(
        any(), {"ranks", "tokens"},
        {"ranks", "tokens", "compute", "around it: dispatch", "hidden", "per_route", "hidden", "per_rank", "hidden"});
    for (const Run& r : runs_) {
      std::vector<std::string> cells{std::to_string(r.options.ranks), std::to_string(r.options.tokens),
                                     fmt::format("{:.1f}", r.compute.p50 * 1e6)};
      for (size_t i = 0; i < kSplitSections; ++i) {
        cells.push_back(fmt::format("{:.1f}", r.around[i].p50 * 1e6));
        cells.push_back(fmt::format("{:.0f} %", 100 * r.overlap(i).hidden));
      }
      table.row(r.options, cells);
    }
    fmt::print("\n{}", table.text());
    fmt::print(
        "\n  Microseconds. compute: arithmetic alone; around it: a call with one half before and one after it; hidden: the "
        "share of the call's\n"
        "  own time, above, that is not added to that of the arithmetic.\n");
  }
};

}  // namespace

std::unique_ptr<BenchCase> make_low_latency() { return std::make_unique<LowLatencyBench>(); }

}  // namespace switchyard::tool
