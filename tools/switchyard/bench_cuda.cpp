// SPDX-License-Identifier: Apache-2.0
// Rules: before each measured call every GPU's L2 cache is filled with other lines and all GPUs meet in a kernel; a time is
// from CUDA event to CUDA event around the whole call (plan included) on the slowest rank; the limits are measured the same way
// in the same run, on the same routing, bytes and number of multiprocessors, and include the meeting that shows that all rows
// have come.
#include "bench_cuda.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>

#include "../../bench/cuda/gpu_rank.hpp"
#include "bench_points.hpp"
#include "build_info.hpp"
#include "cli.hpp"
#include "device_copy.hpp"
#include "gpu_probe.hpp"
#include "progress.hpp"
#include "rank_device.hpp"
#include "ranks.hpp"
#include "row_moves.hpp"
#include "style.hpp"

namespace switchyard::tool {
namespace {

using bench::GpuRank;
using nlohmann::json;

constexpr int64_t kLeastPlans = 50;  ///< launches of the plan that are timed, at least

DType type_of(const std::string& name) {
  if (name == "f16") return DType::f16;
  if (name == "f32") return DType::f32;
  if (name == "fp8") return DType::fp8_e4m3;
  return DType::bf16;
}

/// Everything that is equal on all ranks.
struct Setup {
  BenchOptions options;
  Scenario scenario;
  PlannedMoves planned;
  PlannedRoutes routes;  ///< per_route only: what comes back
  DType type = DType::bf16, out_type = DType::bf16;
  ScaleKind scales = ScaleKind::none, quantize = ScaleKind::none;
  NormalConfig config;

  bool per_route() const { return options.order == "per_route"; }
  bool outputs_apart() const { return type == DType::fp8_e4m3 || quantize != ScaleKind::none; }
  size_t sent_row_bytes() const {
    const DType sent = quantize != ScaleKind::none ? DType::fp8_e4m3 : type;
    return static_cast<size_t>(options.hidden) * dtype_bytes(sent) +
           scale_row_bytes(options.hidden, quantize != ScaleKind::none ? quantize : scales);
  }
  size_t out_row_bytes() const { return static_cast<size_t>(options.hidden) * dtype_bytes(out_type); }
  size_t floor_bytes() const {
    const auto rows = static_cast<size_t>(scenario.world) * static_cast<size_t>(options.tokens);
    return std::max(rows * std::max(sent_row_bytes(), out_row_bytes()),
                    static_cast<size_t>(routes.most_rows) * out_row_bytes());
  }
  /// All ranks together, as on the CPU.
  bench::ExchangeBytes bytes() const {
    const auto row = static_cast<double>(options.hidden);
    return bench::exchange_bytes(
        scenario.world * options.tokens, planned.all_pairs, planned.all_remote_pairs, planned.all_routes,
        row * static_cast<double>(dtype_bytes(type)) + static_cast<double>(scale_row_bytes(options.hidden, scales)),
        static_cast<double>(sent_row_bytes()), static_cast<double>(out_row_bytes()));
  }
};

Setup make_setup(const BenchOptions& o) {
  Setup s;
  s.options = o;
  const RoutingGeometry geometry{o.experts, o.topk, static_cast<int>(o.ranks), static_cast<uint64_t>(o.seed)};
  const RoutingSource source("--routing", o.routing, geometry);
  Scenario& c = s.scenario;
  c.world = static_cast<int>(o.ranks);
  c.experts = source.experts();
  c.topk = source.topk();
  c.hidden = o.hidden;
  c.layout = o.layout == "expert_major" ? Layout::expert_major : Layout::rank_major;
  c.alignment = static_cast<int>(o.alignment);
  c.seed = static_cast<uint64_t>(o.seed);
  c.routing = source.all_ranks(o.tokens);
  s.planned = plan_moves(c);
  if (s.per_route()) s.routes = plan_routes(c);
  s.type = type_of(o.dtype);
  s.scales = s.type == DType::fp8_e4m3 ? ScaleKind::f32 : ScaleKind::none;
  s.quantize = o.quantize == "f32" ? ScaleKind::f32 : o.quantize == "ue8m0" ? ScaleKind::ue8m0 : ScaleKind::none;
  s.out_type = s.type == DType::fp8_e4m3 ? DType::bf16 : s.type;
  if (source.spec() == "uniform" && o.tokens >= 1024)
    check_mean_ranks(s.planned.mean_ranks, c.world, c.experts, c.topk, o.seed);
  NormalConfig& n = s.config;
  n.hidden = o.hidden;
  n.num_experts = c.experts;
  n.topk = c.topk;
  n.max_tokens = o.tokens;
  n.layout = c.layout;
  n.expert_alignment = c.alignment;
  n.row_type = s.out_type;
  n.staging = o.staging == "ring" ? Staging::ring : Staging::direct;
  if (o.channels > 0) n.ring.num_channels = static_cast<int>(o.channels);
  if (o.send_chunk > 0) n.ring.send_chunk = static_cast<int>(o.send_chunk);
  if (o.slots > 0) n.ring.slots = static_cast<int>(o.slots);
  const MemoryRequirement need = NormalExchange::memory_required(n, c.world, Backend::cuda);
  n.pool_bytes = 2 * (need.pool_bytes + need.private_bytes);  // two dispatches and their outputs
  return s;
}

class RankBench {
 public:
  RankBench(const Setup& setup, Group& group)
      : s_(setup), group_(group), rank_(group.rank()), gpu_(group, setup.floor_bytes()), exchange_(group, setup.config) {
    const Routing& mine = s_.scenario.routing[static_cast<size_t>(rank_)];
    const RowArray x = token_rows(s_.scenario.seed, 0, rank_, s_.options.tokens, s_.options.hidden, s_.type, s_.scales);
    x_ = x.view();
    x_.data = upload(x_.data, static_cast<size_t>(x.rows()) * x.row_bytes());
    if (x_.scales) x_.scales = upload(x_.scales, static_cast<size_t>(x.rows()) * x.scale_bytes());
    ids_ = mine.expert_ids();
    ids_.data = upload(mine.ids.data(), mine.ids.size() * 4);
    if (!mine.weights.empty()) weights_ = static_cast<const float*>(upload(mine.weights.data(), mine.weights.size() * 4));
    out_ = gpu_.allocate(static_cast<size_t>(s_.options.tokens) * s_.out_row_bytes());
    gpu_.set_moves(s_.planned.moves[static_cast<size_t>(rank_)]);
    if (s_.per_route()) gpu_.set_pulled(s_.routes.moves[static_cast<size_t>(rank_)]);
  }

  json run() {
    Dispatched d = dispatch();
    RowBuffer y = outputs_of(d);
    json checks = json::array();
    if (s_.options.verify) verify(d, y, checks);
    group_.barrier();
    json out;
    out["dispatch"] = timed([&] { (void)dispatch(); });
    out["combine"] = timed([&] { combine(d, y); });
    out["cached"] = timed([&] { (void)exchange_.dispatch(x_, d.handle, options()); });
    out["plan_us"] = plan_times();
    if (s_.options.limits) {
      out["push"] =
          limits(s_.sent_row_bytes(), [&](size_t bytes, int shape) { gpu_.push(s_.options.tokens, bytes, sms(), shape); });
      if (s_.out_type == DType::bf16)
        out["pull"] = limits(s_.out_row_bytes(),
                             [&](size_t bytes, int shape) { gpu_.pull(s_.options.tokens, bytes, combine_sms(), shape); });
    }
    (void)dispatch();
    out["remote_bytes"] = exchange_.last_call().remote_bytes;
    out["checks"] = checks;
    if (s_.options.limits) out["plan_launch"] = plan_launches();
    group_.barrier();
    return out;
  }

 private:
  int sms() const { return static_cast<int>(s_.options.sms); }
  int combine_sms() const { return static_cast<int>(s_.options.combine_sms); }
  CombineOrder order() const { return s_.per_route() ? CombineOrder::per_route : CombineOrder::per_rank; }
  const void* upload(const void* host, size_t bytes) {
    void* p = gpu_.allocate(bytes);
    gpu_.write(p, host, bytes);
    return p;
  }
  DispatchOptions options() const {
    DispatchOptions o;
    o.stream = gpu_.stream();
    o.num_sms = sms();
    o.quantize = s_.quantize;
    return o;
  }
  Dispatched dispatch() { return exchange_.dispatch(x_, ids_, weights_, options()); }
  void combine(const Dispatched& d, const RowBuffer& y) {
    CombineOptions o;
    o.stream = gpu_.stream();
    o.num_sms = combine_sms();
    o.order = order();
    exchange_.combine(s_.outputs_apart() ? ConstRows(y.rows()) : ConstRows(d.x), d.handle, out_, o);
  }
  RowBuffer outputs_of(const Dispatched& d) {
    if (!s_.outputs_apart()) return {};
    RowBuffer y = exchange_.allocate_rows(d.handle, s_.out_type);
    const int64_t rows = d.handle.rows();
    std::vector<std::byte> host(static_cast<size_t>(rows) * s_.out_row_bytes() + 1);
    fill_outputs(s_.scenario, rank_, 0, rows, s_.out_type, host.data());
    gpu_.write(y.rows().data, host.data(), host.size() - 1);
    return y;
  }

  template <class F>
  std::vector<double> timed(F&& call) {
    const int64_t total = s_.options.warmup + s_.options.iterations;
    std::vector<double> all;
    for (int64_t i = 0; i < total; ++i) {
      gpu_.align();
      gpu_.begin();
      call();
      gpu_.end();
      if ((i + 1) % GpuRank::kMaxSections == 0 || i + 1 == total) {
        const std::vector<double> some = gpu_.seconds();
        all.insert(all.end(), some.begin(), some.end());
        group_.check();
      }
    }
    return {all.begin() + s_.options.warmup, all.end()};
  }
  template <class F>
  json limits(size_t row_bytes, F&& launch) {
    json shapes = json::array();
    for (int shape = 0; shape < bench::kFloorShapes; ++shape)
      shapes.push_back(timed([&] {
        launch(row_bytes, shape);
        gpu_.meet();
      }));
    return shapes;
  }
  std::vector<double> plan_times() {
    std::vector<double> us;
    for (int i = 0; i < 10; ++i) {
      gpu_.align();
      (void)dispatch();
      us.push_back(exchange_.last_call().plan_us);
      group_.barrier();
    }
    return us;
  }

  /// The plan as a launch of its own in a replayed graph of a dispatch, which goes on when the plan has ended.
  std::vector<double> plan_launches() {
    group_.barrier();
    gpu_.capture_first_kernel([&] { (void)dispatch(); });
    group_.barrier();
    const std::vector<double> all =
        gpu_.replay(static_cast<int>(s_.options.warmup + std::max<int64_t>(s_.options.iterations, kLeastPlans)));
    gpu_.drop_graph();
    group_.check();
    return {all.begin() + s_.options.warmup, all.end()};
  }

  void verify(const Dispatched& d, const RowBuffer& y, json& checks) {
    const HostDispatched host =
        copy_to_host(d, weights_ != nullptr, [&](void* to, const void* from, size_t bytes) { gpu_.read(to, from, bytes); });
    const CheckResult dispatched =
        check_dispatched("dispatch", s_.scenario, rank_, host.view, SentRows{s_.type, s_.scales, s_.quantize, 0}, true);
    combine(d, y);
    std::vector<std::byte> out(static_cast<size_t>(s_.options.tokens) * s_.out_row_bytes());
    gpu_.read(out.data(), out_, out.size());
    CombineCase c;
    c.order = order();
    c.type = s_.out_type;
    c.identity = !s_.outputs_apart();
    for (const CheckResult& r : {dispatched, check_combined("combine", s_.scenario, rank_, out.data(), c)})
      checks.push_back({r.name, r.passed, r.detail, r.compared});
  }

  const Setup& s_;
  Group& group_;
  int rank_;
  GpuRank gpu_;
  NormalExchange exchange_;
  ConstRows x_;
  ExpertIds ids_;
  const float* weights_ = nullptr;
  void* out_ = nullptr;
};

struct CudaRun {
  BenchOptions options;
  double mean_ranks = 0, remote_bytes = 0;
  bench::ExchangeBytes bytes;
  size_t heap_bytes = 0;
  RingSettings ring;  ///< ring staging only
  bench::Times dispatch, cached, combine, plan, plan_launch, push, pull;
  bool has_plan_launch = false, has_push = false, has_pull = false;
  /// What the plan and the exchange of counts add to a dispatch.
  double over_cached() const { return dispatch.p50 - cached.p50; }
  std::vector<CheckResult> checks;
  bool passed() const {
    return std::all_of(checks.begin(), checks.end(), [](const CheckResult& c) { return c.passed; });
  }
};

bench::Times times_of(const std::vector<json>& ranks, const char* key) {
  std::vector<std::vector<double>> all;
  for (const json& r : ranks) all.push_back(r.at(key).get<std::vector<double>>());
  return bench::summarize(bench::slowest(all));
}

/// The fastest shape.
bench::Times limit_of(const std::vector<json>& ranks, const char* key) {
  bench::Times best;
  for (size_t shape = 0; shape < bench::kFloorShapes; ++shape) {
    std::vector<std::vector<double>> all;
    for (const json& r : ranks) all.push_back(r.at(key).at(shape).get<std::vector<double>>());
    const bench::Times t = bench::summarize(bench::slowest(all));
    if (shape == 0 || t.p50 < best.p50) best = t;
  }
  return best;
}

RankJob job_of(const Setup& setup) {
  RankJob job;
  job.world = setup.scenario.world;
  job.processes = setup.options.processes;
  job.group.backend = Backend::cuda;
  job.group.timeout = std::chrono::seconds(10);
  job.group.heap_bytes =
      NormalExchange::heap_bytes_for(setup.config, job.world, Backend::cuda) + GpuRank::heap_bytes(setup.floor_bytes());
  return job;
}

CudaRun measure(const BenchOptions& options) {
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
  if (options.staging == "ring") run.ring = usual_ring(setup.config, job.world);
  run.remote_bytes = static_cast<double>(setup.planned.remote_pairs) * static_cast<double>(setup.sent_row_bytes());
  run.dispatch = times_of(ranks, "dispatch");
  run.cached = times_of(ranks, "cached");
  run.combine = times_of(ranks, "combine");
  run.plan = times_of(ranks, "plan_us");
  run.has_plan_launch = ranks[0].contains("plan_launch");
  if (run.has_plan_launch) run.plan_launch = times_of(ranks, "plan_launch");
  run.has_push = ranks[0].contains("push");
  if (run.has_push) run.push = limit_of(ranks, "push");
  run.has_pull = ranks[0].contains("pull");
  if (run.has_pull) run.pull = limit_of(ranks, "pull");
  for (size_t r = 0; r < ranks.size(); ++r)
    for (const json& c : ranks[r].at("checks"))
      run.checks.push_back({fmt::format("{} on rank {}", c[0].get<std::string>(), r), c[1].get<bool>(), c[2].get<std::string>(),
                            c[3].get<int64_t>()});
  return run;
}

json describe(const CudaRun& r) {
  const BenchOptions& o = r.options;
  json checks = json::array();
  for (const CheckResult& c : r.checks)
    checks.push_back({{"name", c.name}, {"passed", c.passed}, {"detail", c.detail}, {"compared", c.compared}});
  json out = {{"config",
               {{"backend", "cuda"},
                {"mode", "normal"},
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
                {"iterations", o.iterations},
                {"cold_l2", true},
                {"statistic", "slowest rank"}}},
              {"mean_ranks_per_token", r.mean_ranks},
              {"largest_remote_bytes", r.remote_bytes},
              {"remote_bytes", r.bytes.remote},
              {"logical_bytes", r.bytes.logical},
              {"symmetric_bytes_per_rank", r.heap_bytes},
              {"dispatch", to_json(r.dispatch)},
              {"cached_dispatch", to_json(r.cached)},
              {"combine", to_json(r.combine)},
              {"plan_us", r.plan.p50},
              {"dispatch_over_cached_us", r.over_cached() * 1e6},
              {"checks", checks},
              {"verified", o.verify ? json(r.passed()) : json(nullptr)}};
  if (r.has_plan_launch) out["plan_launch_us"] = r.plan_launch.p50 * 1e6;
  if (r.options.staging == "ring") {
    const RingSettings& ring = r.ring;
    out["config"]["ring"] = {{"channels", ring.num_channels}, {"send_chunk", ring.send_chunk}, {"slots", ring.slots}};
  }
  if (r.has_push) {
    out["push_limit"] = to_json(r.push);
    out["share_of_limit"] = {{"dispatch", r.push.p50 / r.dispatch.p50}, {"cached_dispatch", r.push.p50 / r.cached.p50}};
  }
  if (r.has_pull) {
    out["pull_limit"] = to_json(r.pull);
    out["pull_limit_rows"] = o.order;
    out["share_of_limit"]["combine"] = r.pull.p50 / r.combine.p50;
  }
  return out;
}

void print_runs(const std::vector<CudaRun>& runs) {
  const std::string tail = bench::tail_name(runs.front().options.iterations);
  PointTable table(runs.front().options, {"tokens", "sms"},
                   {"tokens", "SMs", "layout", "rows", "plan", "dispatch", tail, "limit", "cached", "over cached", "push",
                    "combine", tail, "limit", "pull", "remote", "logical", "checked"});
  const auto us = [](double seconds) { return fmt::format("{:.1f}", seconds * 1e6); };
  for (const CudaRun& r : runs) {
    const BenchOptions& o = r.options;
    const std::string sms =
        o.sms == o.combine_sms ? std::to_string(o.sms) : fmt::format("{}, {}", o.sms, o.combine_sms);  // tuned
    table.row(o, {std::to_string(o.tokens), sms, o.staging == "ring" ? o.layout + ", ring" : o.layout,
                  o.quantize == "none" ? o.dtype : o.dtype + ">fp8",
                  r.has_plan_launch ? us(r.plan_launch.p50) : fmt::format("{:.1f}", r.plan.p50), us(r.dispatch.p50),
                  us(r.dispatch.p99), fmt::format("{:.0f} %", 100 * r.push.p50 / r.dispatch.p50), us(r.cached.p50),
                  us(r.over_cached()), us(r.push.p50), us(r.combine.p50), us(r.combine.p99),
                  r.has_pull ? fmt::format("{:.0f} %", 100 * r.pull.p50 / r.combine.p50) : "-",
                  r.has_pull ? us(r.pull.p50) : "-", decimal_size(r.bytes.remote), decimal_size(r.bytes.logical),
                  !o.verify    ? yellow("no")
                  : r.passed() ? green("PASS")
                               : red("FAIL")});
  }
  fmt::print("\n{}", table.text());
  fmt::print(
      "\n  Microseconds, slowest rank, cold L2, plan included in dispatch. {}. push and pull: the same rows moved by a bare "
      "kernel "
      "on "
      "as many SMs;\n  limit: their share of the time of the call. over cached: dispatch less cached dispatch, what the plan "
      "adds.\n"
      "  remote: rows for other ranks, one per (token, rank), of all ranks; logical: one row per route.\n",
      runs.front().has_plan_launch ? "plan: its launch, from event to event" : "plan: its kernel, by the GPU's own clock");
  print_tail(runs.front().options);
  for (const CudaRun& r : runs)
    for (const CheckResult& c : r.checks)
      if (!c.passed) fmt::print("  {} {} at {}: {}\n", red("FAIL"), c.name, point_title(r.options), c.detail);
}

}  // namespace

void check_normal_cuda(const BenchOptions& options) { (void)job_of(make_setup(options)); }

json measured_normal_cuda(const BenchOptions& options) { return describe(measure(options)); }

int run_bench_cuda(const BenchOptions& options, std::vector<BenchOptions> points) {
  const GpuProbe gpus = probe_gpus();  // not here: ranks may be forked
  if (gpus.gpus.empty()) throw UsageError("--backend: 'cuda' given, but no GPU or driver is usable; see `switchyard doctor`");
  for (BenchOptions& o : points) {
    if (o.ranks == 0) o.ranks = static_cast<int64_t>(gpus.gpus.size());
    const int64_t here = static_cast<int64_t>(gpus.gpus.size());
    choose_sms(o, gpus.gpus.front().name, gpus.gpus.front().multiprocessors / ((o.ranks + here - 1) / here));
    if (o.order == "per_route" && o.layout == "rank_major")
      throw UsageError("--order: 'per_route' given with --layout rank_major; allowed: per_rank, or --layout expert_major");
    if (o.quantize != "none" && o.dtype == "fp8") throw UsageError("--quantize: fp8 rows are quantised already");
    if (o.commit.empty()) o.commit = source_commit();
    check_normal_cuda(o);
  }
  const BenchOptions& first = points.front();
  const int driver = gpus.cuda_version, runtime = cuda_runtime_version(), sms = gpus.gpus.front().multiprocessors;
  fmt::print("{}\n  {}, {} SMs each, driver {} (CUDA {}.{}), built with CUDA {}.{}\n  commit {}, {}\n\n",
             bold("switchyard bench --backend cuda"), gpus.names(), sms, gpus.driver_version, driver / 1000, driver % 1000 / 10,
             runtime / 1000, runtime % 1000 / 10, first.commit, bench::utc_now());
  Progress progress;
  std::vector<CudaRun> runs;
  const Stopped stopped = in_turn(progress, points.size(), [&](size_t i) {
    progress.stage(point_title(points[i]), 1);
    runs.push_back(measure(points[i]));
    progress.finish(fmt::format("dispatch {:.1f} us, combine {:.1f} us{}", runs.back().dispatch.p50 * 1e6,
                                runs.back().combine.p50 * 1e6, runs.back().passed() ? "" : ", RESULTS DIFFER"));
  });
  std::vector<std::string> names;
  for (const Gpu& g : gpus.gpus) names.push_back(g.name);
  json document = bench_document("switchyard bench --backend cuda", first, stopped);
  document["gpus"] = {
      {"names", names}, {"sms", sms}, {"driver", gpus.driver_version}, {"driver_cuda", driver}, {"runtime_cuda", runtime}};
  for (const CudaRun& run : runs) document["runs"].push_back(describe(run));
  const std::exception_ptr problem = write_results(options, document);
  print_runs(runs);
  print_written(options, problem);
  return stopped.status(std::all_of(runs.begin(), runs.end(), [](const CudaRun& r) { return r.passed(); }));
}

}  // namespace switchyard::tool
