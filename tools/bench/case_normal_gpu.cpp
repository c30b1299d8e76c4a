// SPDX-License-Identifier: Apache-2.0
// Normal mode on GPUs.
//
// Rules: before each measured call, every GPU's L2 cache is filled with unrelated lines and all GPUs meet in a kernel. Times
// are measured with CUDA events around the whole call (plan included), on the slowest rank. The limits are measured in the same
// way in the same run, with the same routing, bytes and number of multiprocessors. They include the meeting that confirms the
// arrival of all rows. With several hosts, the ranks' threads meet instead, traffic between hosts is counted, and there are no
// limits, because bare kernels cannot reach other hosts.
#include <fmt/core.h>

#include <algorithm>
#include <optional>

#include "bench/case.hpp"
#include "bench/hosts.hpp"
#include "check/exchange_check.hpp"
#include "check/row_moves.hpp"
#include "cli/outputs.hpp"
#include "cli/style.hpp"
#include "device/device_copy.hpp"
#include "device/gpu_probe.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

constexpr int64_t kMinPlans = 50;  ///< minimum number of timed launches of the plan

/// State shared by all ranks.
struct Setup {
  BenchOptions options;
  Scenario scenario;
  PlannedMoves planned;
  PlannedRoutes routes;  ///< per_route() only: the returned rows
  SourceRows rows;
  ScaleKind quantize = ScaleKind::none;
  NormalConfig config;

  /// Also true for per_host, which equals per_rank on one host.
  bool per_route() const {
    return layout_named(options.layout) == Layout::expert_major && order_named(options.order) != CombineOrder::per_rank;
  }
  bool separate_outputs() const { return sent_scales(options) != ScaleKind::none; }
  size_t limit_bytes() const {
    const auto received = static_cast<size_t>(scenario.world) * static_cast<size_t>(options.tokens);
    const size_t returned = returned_row_bytes(options);
    return std::max(received * std::max(sent_row_bytes(options), returned), static_cast<size_t>(routes.max_rows) * returned);
  }
  /// Sum over all ranks, as on the CPU.
  measure::ExchangeBytes bytes() const {
    const RowCounts n = count_rows(scenario);
    const double source_row = static_cast<double>(dtype_bytes(rows.type, options.hidden)) +
                              static_cast<double>(scale_row_bytes(options.hidden, rows.scales));
    return measure::exchange_bytes(scenario.world * options.tokens, n.pairs, n.remote_pairs, n.routes, source_row,
                                   static_cast<double>(sent_row_bytes(options)),
                                   static_cast<double>(returned_row_bytes(options)));
  }
};

Setup make_setup(const BenchOptions& o) {
  Setup s;
  s.options = o;
  const RoutingSource source = routing_source(o);
  Scenario& c = s.scenario;
  c = shape_of(o, source);
  c.routing = source.all_ranks(o.tokens);
  s.planned = plan_moves(c);
  if (s.per_route()) s.routes = plan_routes(c);
  s.rows = rows_named(o.dtype);
  s.quantize = scales_named(o.quantize);
  if (source.spec() == "uniform" && o.tokens >= 1024)
    check_mean_ranks(s.planned.mean_ranks, c.world, c.experts, c.topk, o.seed);
  s.config = normal_config(o, c);
  const MemoryRequirement need = NormalExchange::memory_required(s.config, c.world, Backend::cuda);
  s.config.pool_bytes = 2 * (need.pool_bytes + need.private_bytes);  // two dispatches and their outputs
  return s;
}

LimitRows limit_rows(const Setup& s, int rank) {
  const auto at = static_cast<size_t>(rank);
  return {&s.planned.moves[at], s.per_route() ? &s.routes.moves[at] : nullptr, s.options.tokens, s.limit_bytes()};
}

class RankBench {
 public:
  RankBench(const Setup& setup, Group& group)
      : s_(setup),
        group_(group),
        rank_(group.rank()),
        clock_(make_gpu_clock(group, Timing::enqueued, limit_rows(setup, rank_))),
        device_(clock_->device()),
        exchange_(group, setup.config) {
    const Routing& mine = s_.scenario.routing[static_cast<size_t>(rank_)];
    const RowArray x =
        token_rows(s_.scenario.seed, 0, rank_, s_.options.tokens, s_.options.hidden, s_.rows.type, s_.rows.scales);
    x_ = x.view();
    x_.data = device_.upload(x_.data, static_cast<size_t>(x.rows()) * x.row_bytes());
    x_.scales = device_.upload(x_.scales, static_cast<size_t>(x.rows()) * x.scale_bytes());
    ids_ = mine.expert_ids();
    ids_.data = device_.upload(mine.topk_ids.data(), mine.topk_ids.size() * 4);
    if (!mine.topk_weights.empty()) weights_ = device_.upload(mine.topk_weights.data(), mine.topk_weights.size() * 4);
    out_ = device_.allocate(out_bytes());
  }

  json run() {
    const BenchOptions& o = s_.options;
    Dispatched d = dispatch();
    RowBuffer y = outputs_of(d);
    std::vector<CheckResult> checks;
    if (o.verify) verify(d, y, checks);
    group_.barrier();
    json out;
    out["dispatch"] = timed([&] { (void)dispatch(); });
    json crossed = {exchange_.last_call().network_bytes};
    out["combine"] = timed([&] { combine(d, y); });
    crossed.push_back(exchange_.last_call().network_bytes);
    out["network_bytes"] = crossed;
    out["host_of"] = hosts_of_ranks();
    out["cached"] = timed([&] { (void)exchange_.dispatch(x_, d.handle, options()); });
    out["plan_us"] = plan_times();
    const bool limits = o.limits && group_.hosts() == 1;
    if (limits) {
      out["push"] = clock_->push_limits(sent_row_bytes(o), sms(), o.warmup, o.iterations);
      if (s_.rows.result_type() == DType::bf16)
        out["pull"] = clock_->pull_limits(returned_row_bytes(o), combine_sms(), o.warmup, o.iterations);
    }
    (void)dispatch();
    out["remote_bytes"] = exchange_.last_call().remote_bytes;
    out["checks"] = encode_checks(checks);
    // The plan as a separate launch in a replayed graph of a dispatch; the dispatch starts when the plan has finished.
    if (limits)
      out["plan_launch"] =
          clock_->time_first_kernel([&] { (void)dispatch(); }, o.warmup, std::max<int64_t>(o.iterations, kMinPlans));
    group_.barrier();
    return out;
  }

 private:
  int sms() const { return static_cast<int>(s_.options.sms); }
  int combine_sms() const { return static_cast<int>(s_.options.combine_sms); }
  size_t out_bytes() const { return static_cast<size_t>(s_.options.tokens) * returned_row_bytes(s_.options); }
  DispatchOptions options() const {
    DispatchOptions o;
    o.stream = device_.stream();
    o.num_sms = sms();
    o.quantize = s_.quantize;
    return o;
  }
  Dispatched dispatch() { return exchange_.dispatch(x_, ids_, weights_, options()); }
  void combine(const Dispatched& d, const RowBuffer& y) {
    CombineOptions o;
    o.stream = device_.stream();
    o.num_sms = combine_sms();
    o.order = order_named(s_.options.order);
    exchange_.combine(s_.separate_outputs() ? ConstRows(y.rows()) : ConstRows(d.x), d.handle, out_, o);
  }
  std::vector<int> hosts_of_ranks() const {
    std::vector<int> hosts;
    for (int r = 0; r < group_.size(); ++r) hosts.push_back(group_.host_of(r));
    return hosts;
  }
  RowBuffer outputs_of(const Dispatched& d) {
    if (!s_.separate_outputs()) return {};
    RowBuffer y = exchange_.allocate_rows(d.handle, s_.rows.result_type());
    const int64_t rows = d.handle.rows();
    Mirror host(device_, y.rows().data, static_cast<size_t>(rows) * returned_row_bytes(s_.options));
    fill_outputs(s_.scenario, rank_, 0, rows, s_.rows.result_type(), host.data());
    host.write();
    return y;
  }
  std::vector<double> timed(const std::function<void()>& call) {
    return time_entered_late(*clock_, rank_, s_.options.late_us, call, s_.options.warmup, s_.options.iterations);
  }
  std::vector<double> plan_times() {
    std::vector<double> us;
    for (int i = 0; i < 10; ++i) {
      clock_->meet();
      (void)dispatch();
      us.push_back(exchange_.last_call().plan_us);
      group_.barrier();
    }
    return us;
  }

  void verify(const Dispatched& d, const RowBuffer& y, std::vector<CheckResult>& checks) {
    const HostDispatched host = copy_to_host(d, weights_ != nullptr, device_);
    const SentRows sent{s_.rows.type, s_.rows.scales, s_.quantize, 0};
    checks.push_back(check_dispatched("dispatch", s_.scenario, rank_, host.view, sent, true));
    combine(d, y);
    Mirror out(device_, out_, out_bytes());
    out.read();
    CombineCase c;
    c.order = order_named(s_.options.order);
    c.type = s_.rows.result_type();
    c.identity = !s_.separate_outputs();
    c.host_of = hosts_of_ranks();
    checks.push_back(check_combined("combine", s_.scenario, rank_, out.data(), c));
  }

  const Setup& s_;
  Group& group_;
  int rank_;
  std::unique_ptr<Clock> clock_;
  RankDevice& device_;
  NormalExchange exchange_;
  ConstRows x_;
  ExpertIds ids_;
  const float* weights_ = nullptr;
  void* out_ = nullptr;
};

struct CudaRun : MeasuredPoint {
  double mean_ranks = 0, remote_bytes = 0;
  measure::ExchangeBytes bytes;
  HostTraffic network;
  size_t heap_bytes = 0;
  std::optional<RingSettings> ring;  ///< ring staging only
  measure::Times dispatch, cached, combine, plan;
  std::optional<measure::Times> plan_launch, push, pull;
  /// Time added to a dispatch by the plan and the exchange of counts.
  double over_cached() const { return dispatch.p50 - cached.p50; }
};

RankJob job_of(const Setup& setup) {
  RankJob job;
  job.world = setup.scenario.world;
  job.processes = setup.options.processes;
  job.group.backend = Backend::cuda;
  job.group.timeout = std::chrono::seconds(10);
  job.group.heap_bytes =
      NormalExchange::heap_bytes(setup.config, job.world, Backend::cuda) + gpu_clock_bytes(setup.limit_bytes());
  return job;
}

class NormalOnGpus final : public BenchCaseOf<CudaRun> {
 public:
  void fit(std::vector<BenchOptions>& points) override {
    gpus_ = gpus_to_use();  // queries the driver in a child process: ranks may be forked
    for (BenchOptions& o : points) {
      if (o.ranks == 0) o.ranks = gpus_.count();
      choose_sms(o, gpus_.name(), gpus_.sms_of_rank(o.ranks));
      check_words(o);
    }
  }
  void check(const BenchOptions& point) const override { (void)job_of(make_setup(point)); }
  std::string what() const override { return "switchyard bench --backend cuda"; }
  void print_head(const std::vector<BenchOptions>& points) const override {
    const int driver = gpus_.probe.cuda_version, runtime = cuda_runtime_version();
    fmt::print("{}\n  {}, {} SMs each, driver {} (CUDA {}.{}), built with CUDA {}.{}\n  commit {}, {}\n\n", bold(what()),
               gpus_.probe.names(), gpus_.sms(), gpus_.probe.driver_version, driver / 1000, driver % 1000 / 10, runtime / 1000,
               runtime % 1000 / 10, points.front().commit, measure::utc_now());
  }
  void complete(json& document) const override {
    document["gpus"] = gpus_.described();
    add_runs(document);
  }
  void print() const override {
    PointTable table(any(), {"tokens", "sms"},
                     {"tokens", "SMs", "layout", "rows", "plan", "dispatch", tail(), "limit", "cached", "over cached", "push",
                      "combine", tail(), "limit", "pull", "remote", "logical", "checked"});
    for (const CudaRun& r : runs_) {
      const BenchOptions& o = r.options;
      table.row(o,
                {std::to_string(o.tokens), sms_text(o), r.ring ? o.layout + ", ring" : o.layout, rows_text(o),
                 r.plan_launch ? us(r.plan_launch->p50) : fmt::format("{:.1f}", r.plan.p50), us(r.dispatch.p50),
                 us(r.dispatch.p99), share(r.push, r.dispatch), us(r.cached.p50), us(r.over_cached()),
                 r.push ? us(r.push->p50) : "-", us(r.combine.p50), us(r.combine.p99), share(r.pull, r.combine),
                 r.pull ? us(r.pull->p50) : "-", decimal_size(r.bytes.remote), decimal_size(r.bytes.logical), checked_cell(r)});
    }
    fmt::print("\n{}", table.text());
    fmt::print(
        "\n  Microseconds, slowest rank, cold L2, plan included in dispatch. {}. push and pull: the same rows moved by a bare "
        "kernel "
        "on "
        "as many SMs;\n  limit: their share of the time of the call. over cached: dispatch less cached dispatch, the cost of "
        "the plan.\n"
        "  remote: rows for other ranks, one per (token, rank), of all ranks; logical: one row per route.\n",
        runs_.front().plan_launch ? "plan: its launch, from event to event" : "plan: its kernel, by the GPU's own clock");
    for (const CudaRun& r : runs_)
      if (r.network.hosts > 1)
        fmt::print("  {} ranks, {} tokens: {}\n", r.options.ranks, r.options.tokens,
                   hosts_line(r.network, static_cast<double>(sent_row_bytes(r.options))));
    print_tail_of_table();
    print_late(any());
    print_failures();
  }

 protected:
  CudaRun run(const BenchOptions& options, Progress*) override {
    const Setup setup = make_setup(options);
    const RankJob job = job_of(setup);
    const std::vector<json> ranks = run_ranks(job, [&](Group& group, RankLink&) { return RankBench(setup, group).run(); });
    CudaRun run;
    run.options = options;
    run.options.experts = setup.scenario.experts;
    run.options.topk = setup.scenario.topk;
    run.mean_ranks = setup.planned.mean_ranks;
    run.bytes = setup.bytes();
    run.heap_bytes = job.group.heap_bytes;
    if (setup.config.staging == Staging::ring) run.ring = default_ring(setup.config, job.world);
    run.remote_bytes = static_cast<double>(setup.planned.remote_pairs) * static_cast<double>(sent_row_bytes(options));
    run.dispatch = measure::times_of(ranks, "/dispatch");
    run.cached = measure::times_of(ranks, "/cached");
    run.combine = measure::times_of(ranks, "/combine");
    run.plan = measure::times_of(ranks, "/plan_us");
    run.network = crossings({setup.scenario}, ranks[0].at("host_of"));
    for (const json& r : ranks) {
      run.network.dispatch += r.at("network_bytes")[0].get<double>();
      run.network.combine += r.at("network_bytes")[1].get<double>();
    }
    if (ranks[0].contains("plan_launch")) run.plan_launch = measure::times_of(ranks, "/plan_launch");
    if (ranks[0].contains("push")) run.push = measure::fastest_of(ranks, "/push");
    if (ranks[0].contains("pull")) run.pull = measure::fastest_of(ranks, "/pull");
    run.checks = unmerged_by_rank(part_of(ranks, "checks"));
    return run;
  }
  static std::string share(const std::optional<measure::Times>& limit, const measure::Times& of) {
    return limit ? fmt::format("{:.0f} %", 100 * limit->p50 / of.p50) : "-";
  }
  std::string words_of(const CudaRun& run) const override {
    return fmt::format("dispatch {:.1f} us, combine {:.1f} us", run.dispatch.p50 * 1e6, run.combine.p50 * 1e6);
  }
  json describe(const CudaRun& r) const override {
    const BenchOptions& o = r.options;
    json out = {{"config",
                 {{"backend", o.backend},
                  {"mode", o.mode},
                  {"ranks", o.ranks},
                  {"ranks_are", o.processes ? "processes" : "threads"},
                  {"sms", o.sms},
                  {"combine_sms", o.combine_sms},
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
                  {"routing", o.routing},
                  {"seed", o.seed},
                  {"late_us", o.late_us},
                  {"iterations", o.iterations},
                  {"cold_l2", true},
                  {"statistic", "slowest rank"}}},
                {"mean_ranks_per_token", r.mean_ranks},
                {"largest_remote_bytes", r.remote_bytes},
                {"remote_bytes", r.bytes.remote},
                {"logical_bytes", r.bytes.logical},
                {"network", to_json(r.network)},
                {"symmetric_bytes_per_rank", r.heap_bytes},
                {"dispatch", to_json(r.dispatch)},
                {"cached_dispatch", to_json(r.cached)},
                {"combine", to_json(r.combine)},
                {"plan_us", r.plan.p50},
                {"dispatch_over_cached_us", r.over_cached() * 1e6},
                {"checks", checks_json(r.checks)},
                {"verified", verified_json(r)}};
    if (r.plan_launch) out["plan_launch_us"] = r.plan_launch->p50 * 1e6;
    if (r.ring)
      out["config"]["ring"] = {
          {"channels", r.ring->num_channels}, {"send_chunk", r.ring->send_chunk}, {"slots", r.ring->slots}};
    if (r.push) {
      out["push_limit"] = to_json(*r.push);
      out["share_of_limit"] = {{"dispatch", r.push->p50 / r.dispatch.p50}, {"cached_dispatch", r.push->p50 / r.cached.p50}};
    }
    if (r.pull) {
      out["pull_limit"] = to_json(*r.pull);
      out["pull_limit_rows"] = o.order;
      out["share_of_limit"]["combine"] = r.pull->p50 / r.combine.p50;
    }
    return out;
  }

 private:
  UsedGpus gpus_;
};

}  // namespace

std::unique_ptr<BenchCase> make_normal_on_gpus() { return std::make_unique<NormalOnGpus>(); }

}  // namespace switchyard::tool
