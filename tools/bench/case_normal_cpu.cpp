// SPDX-License-Identifier: Apache-2.0
// Normal mode on the CPU.
//
// Rules: all ranks meet at a barrier before each call. A call's time is measured from entry to exit on the slowest rank. Calls
// cycle through several input sets, whose rows are combined only after all other sets have been dispatched, so no call finds
// its rows in a cache. Results are checked bit by bit after the timed part.
#include <fmt/core.h>

#include <algorithm>

#include "bench/case.hpp"
#include "bench/hosts.hpp"
#include "check/exchange_check.hpp"
#include "check/row_moves.hpp"
#include "cli/style.hpp"
#include "cli/verb.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

/// One measured configuration.
struct BenchRun : MeasuredPoint {
  std::string routing;  ///< description
  RingSettings ring;    ///< ring staging: settings of the measurement
  int sets = 0;
  double working_set_bytes = 0;
  measure::Times dispatch, combine, both;
  measure::ExchangeBytes bytes;
  double plan_us = 0;         ///< bookkeeping inside dispatch: median, slowest rank
  double counted_remote = 0;  ///< remote bytes of a dispatch, counted by the library
  HostTraffic network;
  size_t heap_bytes = 0;  ///< symmetric memory per rank
};

/// State shared by all ranks.
struct Setup {
  BenchOptions options;
  int world = 1;
  int sets = 2;
  SourceRows rows;
  ScaleKind quantize = ScaleKind::none;
  std::vector<Scenario> scenarios;  ///< one per set
  NormalConfig config;
  bool separate_outputs = false;  ///< the dispatched rows are fp8: combine reads separate buffers
};

/// One rank's loop.
class RankBench {
 public:
  RankBench(const Setup& setup, Group& group, RankLink& link)
      : setup_(setup),
        group_(group),
        link_(link),
        rank_(group.rank()),
        clock_(make_host_clock(group)),
        exchange_(group, setup.config) {
    for (int set = 0; set < setup.sets; ++set) {
      const int64_t tokens = setup.options.tokens;
      const auto index = static_cast<uint64_t>(set);
      inputs_.push_back(
          token_rows(scenario(set).seed, index, rank_, tokens, setup.options.hidden, setup.rows.type, setup.rows.scales));
      outputs_.emplace_back(tokens, setup.options.hidden, setup.rows.result_type());
    }
    slots_.resize(static_cast<size_t>(setup.sets));
    y_.resize(slots_.size());
    handles_.resize(slots_.size());
  }

  json run() {
    for (int set = 0; set < setup_.sets; ++set) dispatch(set);
    const int64_t total = setup_.options.warmup + setup_.options.iterations;
    std::vector<double> dispatch_s, combine_s, plan_us;
    double remote = 0;
    json network = {0, 0};  // dispatch, combine
    for (int64_t i = 0; i < total; ++i) {
      const int set = static_cast<int>(i % setup_.sets);
      const double combine_time = clock_->once([&] { combine(set); });
      network[1] = exchange_.last_call().network_bytes;
      slots_[static_cast<size_t>(set)] = Dispatched();  // its rows return to the pool outside the timed part
      const double dispatch_time = clock_->once([&] { dispatch(set); });
      if (rank_ == 0) link_.progress(i + 1, "");
      if (i < setup_.options.warmup) continue;
      dispatch_s.push_back(dispatch_time);
      combine_s.push_back(combine_time);
      plan_us.push_back(exchange_.last_call().plan_us);
      remote = static_cast<double>(exchange_.last_call().remote_bytes);
      network[0] = exchange_.last_call().network_bytes;
    }
    std::vector<CheckResult> checks;
    for (int set = 0; setup_.options.verify && set < setup_.sets; ++set) verify(set, checks);
    group_.barrier();
    return {{"dispatch", dispatch_s},         {"combine", combine_s},     {"plan_us", plan_us},
            {"remote_bytes", remote},         {"network_bytes", network}, {"host_of", hosts_of_ranks()},
            {"checks", encode_checks(checks)}};
  }

 private:
  const Scenario& scenario(int set) const { return setup_.scenarios[static_cast<size_t>(set)]; }

  std::vector<int> hosts_of_ranks() const {
    std::vector<int> hosts;
    for (int r = 0; r < setup_.world; ++r) hosts.push_back(group_.host_of(r));
    return hosts;
  }
  void dispatch(int set) {
    const auto at = static_cast<size_t>(set);
    const Routing& mine = scenario(set).routing[static_cast<size_t>(rank_)];
    DispatchOptions options;
    options.quantize = setup_.quantize;
    if (setup_.options.cached && handles_[at]) {
      slots_[at] = exchange_.dispatch(inputs_[at].view(), handles_[at], options);
    } else {
      slots_[at] = exchange_.dispatch(inputs_[at].view(), mine.expert_ids(),
                                      mine.topk_weights.empty() ? nullptr : mine.topk_weights.data(), options);
    }
    if (setup_.options.cached && !handles_[at]) handles_[at] = slots_[at].handle;
    if (setup_.separate_outputs && y_[at].rows().data == nullptr) {
      y_[at] = exchange_.allocate_rows(slots_[at].handle, setup_.rows.result_type());
      fill_outputs(scenario(set), rank_, static_cast<uint64_t>(set), slots_[at].rows, setup_.rows.result_type(),
                   y_[at].rows().data);
    }
  }

  void combine(int set) {
    const auto at = static_cast<size_t>(set);
    CombineOptions options;
    options.order = order_named(setup_.options.order);
    const ConstRows y = setup_.separate_outputs ? ConstRows(y_[at].rows()) : ConstRows(slots_[at].x);
    exchange_.combine(y, slots_[at].handle, outputs_[at].row(0), options);
  }

  void verify(int set, std::vector<CheckResult>& checks) {
    const auto at = static_cast<size_t>(set);
    const auto index = static_cast<uint64_t>(set);
    const SentRows sent{setup_.rows.type, setup_.rows.scales, setup_.quantize, index};
    CombineCase expected;
    expected.order = order_named(setup_.options.order);
    for (int r = 0; r < group_.size(); ++r) expected.host_of.push_back(group_.host_of(r));
    expected.type = setup_.rows.result_type();
    expected.set = index;
    expected.identity = !setup_.separate_outputs;
    checks.push_back(check_dispatched("dispatch", scenario(set), rank_, slots_[at], sent, !setup_.options.cached));
    checks.push_back(check_combined("combine", scenario(set), rank_, outputs_[at].row(0), expected));
  }

  const Setup& setup_;
  Group& group_;
  RankLink& link_;
  int rank_;
  std::unique_ptr<Clock> clock_;
  NormalExchange exchange_;
  std::vector<RowArray> inputs_;
  std::vector<RowArray> outputs_;
  std::vector<Dispatched> slots_;
  std::vector<RowBuffer> y_;
  std::vector<Handle> handles_;
};

/// Maximum number of rows that one rank receives in one set.
int64_t max_rows(const std::vector<Scenario>& scenarios, int world) {
  int64_t max = 0;
  for (const Scenario& s : scenarios) {
    const oracle::Problem problem = s.problem();
    for (int r = 0; r < world; ++r) max = std::max(max, static_cast<int64_t>(oracle::rows_to(problem, r).size()));
  }
  return max;
}

/// Pool size for the outputs of all sets at once and for the rows staged by a combine.
size_t pool_bytes(const Setup& setup, int64_t rows) {
  const size_t returned = returned_row_bytes(setup.options);
  const auto count = static_cast<size_t>(rows);
  const auto records = static_cast<size_t>(setup.world) * static_cast<size_t>(setup.options.tokens);
  const size_t metadata = records * (4 + 8 * static_cast<size_t>(setup.config.topk)) + 4096;
  const size_t one = count * (sent_row_bytes(setup.options) + (setup.separate_outputs ? returned : 0)) + metadata;
  const size_t staged = std::max(count, records) * returned + metadata;
  return (static_cast<size_t>(setup.sets) + 1) * (one + 4096) + staged;
}

Setup make_setup(const BenchOptions& options, const measure::Machine& machine, const RoutingSource& source) {
  Setup setup;
  setup.options = options;
  setup.world = static_cast<int>(options.ranks);
  setup.rows = rows_named(options.dtype);
  setup.quantize = scales_named(options.quantize);
  setup.separate_outputs = sent_scales(options) != ScaleKind::none;
  const Scenario base = shape_of(options, source);

  Scenario probe = base;
  probe.routing = source.all_ranks(options.tokens);
  const double rows = static_cast<double>(count_rows(probe).pairs) * (base.layout == Layout::expert_major ? 2.0 : 1.0);
  const double per_set = rows * static_cast<double>(sent_row_bytes(options)) +
                         static_cast<double>(setup.world * options.tokens) *
                             static_cast<double>(dtype_bytes(setup.rows.type, options.hidden) +
                                                 dtype_bytes(setup.rows.result_type(), options.hidden));
  setup.sets = options.sets > 0 ? static_cast<int>(options.sets)
                                : measure::rotation_sets(per_set, static_cast<double>(machine.llc_bytes),
                                                         static_cast<double>(machine.memory_available) / 3);
  // Every set is combined at least once, because all results are checked.
  setup.options.warmup = std::max(options.warmup, setup.sets - options.iterations);
  setup.scenarios.assign(static_cast<size_t>(setup.sets), base);
  for (int r = 0; r < setup.world; ++r) {
    std::vector<Routing> batches = source.batches(r, options.tokens, setup.sets);
    for (size_t set = 0; set < setup.scenarios.size(); ++set) setup.scenarios[set].routing.push_back(std::move(batches[set]));
  }

  setup.config = normal_config(options, base);
  setup.config.pool_bytes = pool_bytes(setup, max_rows(setup.scenarios, setup.world));
  return setup;
}

RankJob job_of(const Setup& setup, const measure::Machine& machine) {
  RankJob job;
  job.world = setup.world;
  job.processes = setup.options.processes;
  job.group.num_blocks = static_cast<int>(setup.options.blocks);
  job.group.num_warps = static_cast<int>(setup.options.warps);
  job.group.heap_bytes = NormalExchange::heap_bytes(setup.config, setup.world);
  for (int r = 0; r < setup.world && setup.options.pin == "cores"; ++r)
    job.cpus.push_back(measure::share_of_cpus(machine, r, setup.world));
  return job;
}

/// Mean over the input sets.
measure::ExchangeBytes bytes_of(const Setup& setup) {
  const BenchOptions& o = setup.options;
  RowCounts all;
  for (const Scenario& s : setup.scenarios) {
    const RowCounts one = count_rows(s);
    all.pairs += one.pairs;
    all.remote_pairs += one.remote_pairs;
    all.routes += one.routes;
  }
  const double source_row = static_cast<double>(dtype_bytes(setup.rows.type, o.hidden)) +
                            static_cast<double>(scale_row_bytes(o.hidden, setup.rows.scales));
  return measure::exchange_bytes(o.ranks * o.tokens, all.pairs / setup.sets, all.remote_pairs / setup.sets,
                                 all.routes / setup.sets, source_row, static_cast<double>(sent_row_bytes(o)),
                                 static_cast<double>(returned_row_bytes(o)));
}

BenchOptions with_defaults(BenchOptions o, const measure::Machine& machine) {
  if (o.ranks == 0) o.ranks = default_ranks(machine);
  if (o.warps == 0) o.warps = default_warps(machine, o.ranks * o.blocks);
  // The workers of all thread ranks are created together, so only a rank's own thread can be pinned.
  const bool can_pin = o.processes || o.blocks * o.warps == 1;
  if (o.pin == "auto") o.pin = can_pin ? "cores" : "none";
  if (o.pin == "cores" && !can_pin) {
    throw UsageError(fmt::format(
        "--pin: 'cores' given with {} workers per rank; ranks that are threads can be pinned with one worker each only. "
        "Allowed: --pin none, --processes, or --blocks 1 --warps 1",
        o.blocks * o.warps));
  }
  check_words(o);
  return o;
}

double share(double bytes, double seconds, double limit_gbs) { return bytes / seconds / (limit_gbs * 1e9); }

class NormalOnCpu final : public BenchCaseOf<BenchRun> {
 public:
  void fit(std::vector<BenchOptions>& points) override {
    for (BenchOptions& point : points) point = with_defaults(point, machine_);
  }
  void check(const BenchOptions& o) const override {
    const auto row = static_cast<double>(dtype_bytes(rows_named(o.dtype).type, o.hidden));
    const double rows = static_cast<double>(o.ranks * o.tokens) * row;  // of one set
    check_point_memory(o, 2 * rows, machine_);                          // before make_setup creates the routing
    const Setup setup = make_setup(o, machine_, routing_source(o));
    const auto heaps = static_cast<double>(setup.world) * static_cast<double>(job_of(setup, machine_).group.heap_bytes);
    check_point_memory(o, heaps + 2 * setup.sets * rows, machine_);  // inputs and outputs
  }
  std::string what() const override { return "switchyard bench"; }
  void print_head(const std::vector<BenchOptions>& points) const override {
    const BenchOptions& first = points.front();
    fmt::print("{}\n  {}, {}, last-level cache {}, {}\n  commit {}, {}\n\n", bold("switchyard bench"), machine_.cpu_model,
               counted(machine_.usable_cores(), "core"), binary_size(static_cast<double>(machine_.llc_bytes)), machine_.os,
               first.commit, measure::utc_now());
    const auto is_pinned = [](const BenchOptions& o) { return o.pin == "cores"; };
    fmt::print("  normal mode, {} staging, {} rows {}{}, {} combine, {} routing, ranks are {}{}\n\n", first.staging,
               common(first, "layout"), common(first, "dtype"), common_hidden(first), common(first, "order"),
               common(first, "routing"), first.processes ? "processes" : "threads",
               std::all_of(points.begin(), points.end(), is_pinned) ? ", pinned" : "");
  }
  void begin(Progress& progress, const BenchOptions& first) override { limit_ = copy_limit_of(progress, first, machine_); }
  void end() override {
    if (const std::string note = limit_note(largest_share()); !note.empty()) notes_.push_back(note);
    if (limit_.bytes < 2 * machine_.llc_bytes)
      notes_.push_back(
          fmt::format("the copy limit was measured with {}, which may fit into the last-level cache ({}); increase --limit-ms",
                      binary_size(static_cast<double>(limit_.bytes)), binary_size(static_cast<double>(machine_.llc_bytes))));
    const std::string cached = cache_note();
    if (!cached.empty()) notes_.push_back(cached);
  }
  void complete(json& document) const override {
    document["notes"] = notes_;
    document["copy_limit"] = to_json(limit_);
    document["copy_limit_ms"] = any().limit_ms;
    add_runs(document);
  }
  void print() const override {
    print_table();
    print_legend();
    print_failures();
  }

 protected:
  BenchRun run(const BenchOptions& options, Progress* progress) override {
    const RoutingSource source = routing_source(options);
    const Setup setup = make_setup(options, machine_, source);
    const RankJob job = job_of(setup, machine_);
    const int64_t total = setup.options.warmup + setup.options.iterations;
    const std::vector<json> ranks = run_ranks(
        job, [&](Group& group, RankLink& link) { return RankBench(setup, group, link).run(); },
        [&](int, int64_t done, const std::string&) {
          if (progress) progress->update(100 * done / total);
        });
    BenchRun run;
    run.options = setup.options;
    run.options.experts = source.experts();
    run.options.topk = source.topk();
    run.routing = source.description();
    if (staging_named(options.staging) == Staging::ring) run.ring = default_ring(setup.config, setup.world);
    run.sets = setup.sets;
    run.heap_bytes = job.group.heap_bytes;
    run.dispatch = measure::times_of(ranks, "/dispatch");
    run.combine = measure::times_of(ranks, "/combine");
    run.both = both_of(ranks);
    run.plan_us = measure::times_of(ranks, "/plan_us").p50;
    run.network = crossings(setup.scenarios, ranks[0].at("host_of"));
    for (const json& r : ranks) {
      run.counted_remote += r.at("remote_bytes").get<double>();
      run.network.dispatch += r.at("network_bytes")[0].get<double>();
      run.network.combine += r.at("network_bytes")[1].get<double>();
    }
    run.bytes = bytes_of(setup);
    run.working_set_bytes = setup.sets * (run.bytes.dispatch_limit + static_cast<double>(options.ranks * options.tokens) *
                                                                         static_cast<double>(returned_row_bytes(options)));
    run.checks = merged_by_name(part_of(ranks, "checks"));
    return run;
  }
  std::string words_of(const BenchRun& run) const override {
    return fmt::format("dispatch {}, combine {}", duration(run.dispatch.p50), duration(run.combine.p50));
  }
  json describe(const BenchRun& run) const override {
    const BenchOptions& o = run.options;
    return {{"config",
             {{"backend", o.backend},
              {"mode", o.mode},
              {"ranks", o.ranks},
              {"ranks_are", o.processes ? "processes" : "threads"},
              {"blocks", o.blocks},
              {"warps", o.warps},
              {"tokens_per_rank", o.tokens},
              {"hidden", o.hidden},
              {"experts", o.experts},
              {"topk", o.topk},
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
            {"network", to_json(run.network)},
            {"share_of_limit",
             {{"dispatch", share(run.bytes.dispatch_limit, run.dispatch.p50, gbs())},
              {"combine", share(run.bytes.combine_limit, run.combine.p50, gbs())},
              {"both", share(run.bytes.dispatch_limit + run.bytes.combine_limit, run.both.p50, gbs())}}},
            {"verified", verified_json(run)},
            {"checks", checks_json(run.checks)}};
  }

 private:
  /// Times of dispatch plus combine: the sum of the slowest rank's times in the two.
  static measure::Times both_of(const std::vector<json>& ranks) {
    const auto slowest = [&](const char* key) {
      std::vector<std::vector<double>> all;
      for (const json& r : ranks) all.push_back(r.at(key).get<std::vector<double>>());
      return measure::slowest(all);
    };
    std::vector<double> both = slowest("dispatch");
    const std::vector<double> combine = slowest("combine");
    for (size_t i = 0; i < both.size(); ++i) both[i] += combine[i];
    return measure::summarize(both);
  }
  double gbs() const { return limit_.best().gbs; }
  double largest_share() const {
    double max = 0;
    for (const BenchRun& r : runs_)
      max = std::max(
          {max, share(r.bytes.dispatch_limit, r.dispatch.p50, gbs()), share(r.bytes.combine_limit, r.combine.p50, gbs())});
    return max;
  }
  /// Applies to all points together; "" if their rows fit into no cache.
  std::string cache_note() const {
    const auto cache = static_cast<double>(machine_.llc_bytes);
    int64_t small = 0;
    double least = 0;
    for (const BenchRun& r : runs_) {
      if (r.working_set_bytes >= 2 * cache) continue;
      least = ++small == 1 ? r.working_set_bytes : std::min(least, r.working_set_bytes);
    }
    if (small == 0) return "";
    const std::string which = runs_.size() == 1 ? "" : fmt::format(" of {} of {} points", small, runs_.size());
    return fmt::format(
        "the input sets{} are less than twice the last-level cache ({}), which holds part of them; the smallest: {}", which,
        binary_size(cache), binary_size(least));
  }
  void print_table() const {
    PointTable table(any(), {"ranks", "tokens"},
                     {"ranks", "workers", "tokens", "dispatch p50", tail(), "limit", "combine p50", tail(), "limit", "both",
                      "limit", "remote", "logical", "checked"});
    const auto percent = [&](double bytes, double seconds) {
      return fmt::format("{:.1f} %", 100 * share(bytes, seconds, gbs()));
    };
    for (const BenchRun& r : runs_) {
      table.row(r.options,
                {std::to_string(r.options.ranks), std::to_string(r.options.ranks * r.options.blocks * r.options.warps),
                 std::to_string(r.options.tokens), duration(r.dispatch.p50), duration(r.dispatch.p99),
                 percent(r.bytes.dispatch_limit, r.dispatch.p50), duration(r.combine.p50), duration(r.combine.p99),
                 percent(r.bytes.combine_limit, r.combine.p50), duration(r.both.p50),
                 bold(percent(r.bytes.dispatch_limit + r.bytes.combine_limit, r.both.p50)), decimal_size(r.bytes.remote),
                 decimal_size(r.bytes.logical), checked_cell(r)});
    }
    fmt::print("\n{}", table.text());
  }
  void print_legend() const {
    fmt::print(
        "\n  Times are from entry to exit on the slowest rank. 'limit' is the share of the copy limit: {:.1f} GB/s read + "
        "written\n"
        "  by {} threads ({}), for each source row read once and each (token, rank) row written once, and the reverse for "
        "combine.\n",
        limit_.best().gbs, limit_.threads, limit_.best().method);
    for (const measure::CopyRate& r : limit_.rates)
      fmt::print("    {:<32} {:>7.1f} GB/s  ({:.1f} to {:.1f})\n", r.method, r.gbs, r.gbs_min, r.gbs_max);
    for (const std::string& note : notes_) fmt::print("  {}: {}\n", yellow("note"), note);
    fmt::print("  remote: rows for other ranks, one per (token, rank); logical: one row per route.\n");
    for (const BenchRun& r : runs_)
      if (r.network.hosts > 1)
        fmt::print("  {} ranks, {} tokens: {}\n", r.options.ranks, r.options.tokens,
                   hosts_line(r.network, static_cast<double>(sent_row_bytes(r.options))));
    print_tail_of_table();
  }

  const measure::Machine machine_ = measure::this_machine();
  measure::CopyLimit limit_;
  std::vector<std::string> notes_;
};

}  // namespace

std::unique_ptr<BenchCase> make_normal_on_cpu() { return std::make_unique<NormalOnCpu>(); }

}  // namespace switchyard::tool
