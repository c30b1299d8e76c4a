// SPDX-License-Identifier: Apache-2.0
// Flat mode: the whole exchange with experts that scale their rows, in one launch and in two.
#include <fmt/core.h>

#include <cmath>

#include "bench/latency.hpp"
#include "cli/style.hpp"
#include "run/rows.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

/// The target on H200s over NVLink is 2 (t + 12 us), where t is the time to transfer, in both directions and at this rate, the
/// bytes that a rank writes to other ranks.
constexpr double kLinkBytesPerSecond = 353e9, kOverheadSeconds = 12e-6;
/// Geometric mean over the five shapes on the contest's machine, 8 MI300X.
constexpr double kPublishedSeconds = 292e-6;

/// The contest draws each rank's T from [1, max - 1].
int64_t tokens_of(const BenchOptions& o, int rank) {
  if (!o.contest || o.tokens < 2) return o.tokens;
  const uint64_t bits = row_key(static_cast<uint64_t>(o.seed), 0, RowKind::token, static_cast<uint64_t>(rank), 0);
  return 1 + static_cast<int64_t>((bits >> 16) % static_cast<uint64_t>(o.tokens - 1));
}

LatencyPoint make_point(const BenchOptions& o) {
  std::vector<int64_t> tokens;
  for (int r = 0; r < static_cast<int>(o.ranks); ++r) tokens.push_back(tokens_of(o, r));
  LatencyPoint p = latency_point(o, tokens);
  p.config.max_tokens = o.tokens;
  return p;
}

json run_rank(const LatencyPoint& p, Group& group) {
  const BenchOptions& o = p.options;
  const std::unique_ptr<Clock> clock = latency_clock(p, group);
  LowLatencyRank rank(p.scenario, p.config, p.config.dtype, group, clock->device(),
                      {static_cast<int>(o.sms), static_cast<int>(o.combine_sms)});
  rank.prepare(0, LowLatencyRank::Experts::scale);
  json out;
  std::vector<CheckResult> checks;
  const auto check = [&](const char* name) {
    if (!o.verify) return;
    checks.push_back(rank.check_scaled(name));
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
  out["checks"] = encode_checks(checks);
  return out;
}

struct Run : LatencyRun {
  measure::Times whole, two_calls;
  double link_seconds() const { return remote_bytes / kLinkBytesPerSecond; }
  double bar_seconds() const { return 2 * (link_seconds() + kOverheadSeconds); }
};

class FlatBench final : public LatencyCase<Run> {
 public:
  void check(const BenchOptions& o) const override {
    check_latency_memory(make_point(o), 2 * static_cast<size_t>(o.tokens) * returned_row_bytes(o), machine_);
  }
  void print_head(const std::vector<BenchOptions>& points) const override {
    fmt::print("{}\n  {} backend, commit {}, {}\n\n", bold(title()), points.front().backend, points.front().commit,
               measure::utc_now());
  }
  void complete(json& document) const override {
    if (has_mean()) document["geometric_mean_us"] = geometric_mean() * 1e6;
    LatencyCase::complete(document);
  }
  void print() const override {
    const bool cuda = on_gpus(any());
    std::vector<std::string> header{"ranks", "experts", "top",       "hidden", "max tokens", "rows",
                                    "whole", tail(),    "two calls", tail(),   "bytes"};
    if (cuda) header.insert(header.end(), {"t", "2(t+12)"});
    header.emplace_back("checked");
    PointTable table(any(), {"ranks", "topk", "hidden", "tokens"}, header);
    for (const Run& r : runs_) {
      const BenchOptions& o = r.options;
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
      cells.push_back(checked_cell(r));
      table.row(o, cells);
    }
    fmt::print("\n{}", table.text());
    fmt::print(
        "\n  Microseconds, slowest rank{}. whole: moe_all_to_all; two calls: dispatch, and combine with expert_scale. bytes: "
        "written to other ranks\n  by the rank that writes most, in both directions{}.\n",
        cuda ? ", replayed CUDA graphs with a cold L2" : "", cuda ? "; t: their time at 353 GB/s" : "");
    print_tail_of_table();
    print_late(any());
    if (has_mean()) {
      fmt::print(
          "  Geometric mean of the five shapes: {} us.{}\n", bold(us(geometric_mean())),
          cuda ? fmt::format(" Published for the contest's own machine, 8 MI300X: {:.0f} us.", kPublishedSeconds * 1e6) : "");
    }
    print_failures();
  }

 protected:
  std::string title() const override { return "switchyard bench --mode flat"; }
  Run run(const BenchOptions& options, Progress*) override {
    Run run;
    run.point = make_point(options);
    run.options = run.point.options;
    const LatencyPoint& p = run.point;
    const std::vector<json> ranks = run_ranks(job_of(p), [&](Group& group, RankLink&) { return run_rank(p, group); });
    run.whole = measure::times_of(ranks, "/all_to_all");
    run.two_calls = measure::times_of(ranks, "/two_calls");
    run.remote_bytes = max_remote_bytes(ranks);
    run.checks = unmerged_by_rank(part_of(ranks, "checks"));
    return run;
  }
  std::string words_of(const Run& run) const override {
    return fmt::format("{:.1f} us, in two calls {:.1f} us", run.whole.p50 * 1e6, run.two_calls.p50 * 1e6);
  }
  json describe(const Run& r) const override {
    const BenchOptions& o = r.options;
    json tokens = json::array();
    for (int rank = 0; rank < r.point.scenario.world; ++rank) tokens.push_back(r.point.scenario.tokens(rank));
    return {{"config",
             {{"backend", o.backend},
              {"mode", o.mode},
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
              {"graph_replay", on_gpus(o)},
              {"cold_l2", on_gpus(o)},
              {"statistic", "slowest rank"}}},
            {"tokens", tokens},
            {"all_to_all", to_json(r.whole)},
            {"two_calls", to_json(r.two_calls)},
            {"largest_remote_bytes", r.remote_bytes},
            {"link_us_at_353_gbs", on_gpus(o) ? json(r.link_seconds() * 1e6) : json(nullptr)},
            {"bar_us", on_gpus(o) ? json(r.bar_seconds() * 1e6) : json(nullptr)},
            {"symmetric_bytes_per_rank", symmetric_bytes(r.point)},
            {"checks", checks_json(r.checks)},
            {"verified", verified_json(r)}};
  }

 private:
  /// True if all shapes from the contest were measured.
  bool has_mean() const { return any().contest && runs_.size() == contest_points(any()).size(); }

  double geometric_mean() const {
    double sum = 0;
    for (const Run& r : runs_) sum += std::log(r.whole.p50);
    return std::exp(sum / static_cast<double>(runs_.size()));
  }
};

}  // namespace

std::unique_ptr<BenchCase> make_flat() { return std::make_unique<FlatBench>(); }

}  // namespace switchyard::tool
