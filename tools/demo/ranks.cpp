// SPDX-License-Identifier: Apache-2.0
// One rank of the demo: gate, dispatch, experts and combine; on Hopper GPUs, the same layer in one call as well; and exact
// checks of both.
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>

#include "check/exchange_check.hpp"
#include "cli/style.hpp"
#include "demo/demo.hpp"
#include "device/device_copy.hpp"
#include "device/rank_device.hpp"
#include "layer/experts.hpp"
#include "run/index.hpp"
#include "run/names.hpp"
#include "run/ranks.hpp"
#include "switchyard/expert.hpp"
#include "switchyard/layer.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

double seconds_between(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

/// On GPUs, one warp in each of a few blocks is traced: all others do the same work, and a page has no room for more.
TraceOptions trace_options(const DemoPlan& plan) {
  TraceOptions t;
  t.num_blocks = plan.on_gpus() ? 8 : static_cast<int>(plan.options.blocks);
  t.num_warps = plan.on_gpus() ? 1 : static_cast<int>(plan.options.warps);
  t.events_per_track = size_t{1} << 13;
  return t;
}

NormalConfig config_of(const DemoPlan& plan) {
  const DemoOptions& o = plan.options;
  NormalConfig c;
  c.hidden = o.hidden;
  c.num_experts = plan.shape.experts;
  c.topk = plan.shape.topk;
  c.max_tokens = o.tokens;
  c.layout = Layout::expert_major;
  c.expert_alignment = static_cast<int>(o.alignment);
  c.staging = staging_named(o.staging);
  if (c.staging == Staging::ring) return c;
  if (plan.on_gpus()) return c;  // sizes are worst-case there, as in the default pool
  // Received rows, expert outputs, and the partial sums of the combine, each with its metadata.
  const auto row = static_cast<size_t>(o.hidden) * 2;
  const size_t records = at(o.ranks * o.tokens);
  c.pool_bytes = 2 * at(plan.max_rows) * row + records * (row + 16 * at(plan.shape.topk)) + (size_t{1} << 20);
  return c;
}

/// The same layer in its fused form.
MoeLayerConfig fused_config_of(const DemoPlan& plan) {
  MoeLayerConfig c;
  c.hidden = plan.options.hidden;
  c.intermediate = plan.options.intermediate;
  c.num_experts = plan.shape.experts;
  c.topk = plan.shape.topk;
  c.max_tokens = plan.options.tokens;
  c.form = MoeForm::fused;
  c.storage = WeightStorage::view;
  return c;
}

/// Closed-form gate weights, scaled so that the logits have approximately unit variance.
RowArray gate_weights(const DemoPlan& plan) {
  RowArray w(plan.shape.experts, plan.options.hidden, DType::f32);
  const float scale = 1.0f / std::sqrt(static_cast<float>(plan.options.hidden));
  for (int64_t e = 0; e < plan.shape.experts; ++e) {
    fill_row(w.row(e), DType::f32, plan.options.hidden,
             row_key(plan.shape.seed, 99, RowKind::bias, static_cast<uint64_t>(e), 0));
    auto* row = reinterpret_cast<float*>(w.row(e));
    for (int64_t c = 0; c < plan.options.hidden; ++c) row[c] *= 2 * scale;
  }
  return w;
}

/// Device memory for a rank's rows, ids, weights, results and expert weights, with a margin.
size_t device_bytes(const DemoPlan& plan) {
  const DemoOptions& o = plan.options;
  const int num_local_experts = plan.shape.first_expert(1);  // rank 0 has the most experts
  return at(o.tokens) * (at(o.hidden) * 4 + at(plan.shape.topk) * 8) +
         at(num_local_experts * 3 * o.hidden * o.intermediate) * 2 + (size_t{1} << 20);
}

class DemoRank {
 public:
  DemoRank(const DemoPlan& plan, Group& group, RankLink& link, RankDevice& device)
      : plan_(plan),
        group_(group),
        link_(link),
        device_(device),
        rank_(group.rank()),
        trace_(group.size(), trace_options(plan)),
        first_(plan.shape.first_expert(rank_)),
        count_(plan.shape.first_expert(rank_ + 1) - first_),
        weights_(plan.shape.seed, plan.options.hidden, plan.options.intermediate) {}

  json run() {
    ExpertMlp mlp = make_experts();  // before any rank waits for another rank, which may share its GPU
    NormalExchange exchange(group_, config_of(plan_));
    if (plan_.fused) fused_.emplace(group_, fused_config_of(plan_), w13_, w2_);
    if (plan_.gated()) gate_weights_ = gate_weights(plan_);
    link_.progress(1, "");
    json steps = json::array();
    std::vector<CheckResult> checks;
    for (int64_t step = 0; step < plan_.options.steps; ++step) {
      steps.push_back(run_step(step, exchange, mlp, checks));
      link_.progress(step + 2, "");
    }
    const std::vector<std::byte> trace = trace_.serialize(rank_);
    const auto* bytes = reinterpret_cast<const uint8_t*>(trace.data());
    return {{"steps", steps},
            {"checks", encode_checks(checks)},
            {"mlp", mlp.implementation()},
            {"fused", fused_ ? fused_->implementation() : ""},
            {"layers", layers_},
            {"trace", json::binary({bytes, bytes + trace.size()})}};
  }

 private:
  /// Inputs of a step. Device copies are valid until the next step begins.
  struct Inputs {
    ConstRows x;
    ExpertIds ids;
    const float* weights = nullptr;
    void* out = nullptr;
  };

  json run_step(int64_t step, NormalExchange& exchange, ExpertMlp& mlp, std::vector<CheckResult>& checks) {
    const DemoOptions& o = plan_.options;
    const RowArray x =
        token_rows(plan_.shape.seed, static_cast<uint64_t>(step), rank_, o.tokens, o.hidden, DType::bf16, ScaleKind::none);
    const size_t bytes = at(o.tokens) * x.row_bytes();
    group_.barrier();
    group_.set_trace(&trace_);
    std::optional<Trace::Span> whole;
    whole.emplace(&trace_, rank_, trace_.event("step"), step);

    StepTimes t;
    const Clock::time_point begin = Clock::now();
    const Routing routing = plan_.gated() ? gate(x) : plan_.routing[at(step)][at(rank_)];
    if (plan_.gated()) t.gate = seconds_between(begin, Clock::now());
    const Inputs in = inputs(x, routing, bytes);
    meet();
    std::optional<Dispatched> d;
    t.dispatch = time_until_done([&] { d.emplace(exchange.dispatch(in.x, in.ids, in.weights, dispatch_options())); });
    const uint64_t remote_bytes = exchange.last_call().remote_bytes;
    const int64_t rows = d->handle.rows();
    const RowBuffer y = exchange.allocate_rows(d->handle, DType::bf16, device_.stream());
    t.expert = timed("expert_mlp", "rows", rows,
                     [&] { mlp.forward(d->x, ExpertRows::of(*d), y.rows(), {.stream = device_.stream()}); });
    meet();
    t.combine = time_until_done([&] { exchange.combine(y.rows(), d->handle, in.out, combine_options()); });
    whole.reset();
    group_.set_trace(nullptr);

    std::vector<uint8_t> out(bytes);
    device_.read(out.data(), in.out, bytes);
    if (fused_) t.fused = fused_step(step, in, out, checks);
    json result_of_step = {{"times", {t.gate, t.dispatch, t.expert, t.combine, t.fused}},
                           {"rows", rows},
                           {"remote", remote_bytes},
                           {"ids", routing.topk_ids},
                           {"weights", routing.topk_weights},
                           {"out", json::binary(std::move(out))}};
    const HostDispatched host = copy_to_host(*d, in.weights != nullptr, device_);
    add_checks(step, host.view, combine_as_is(exchange, *d, in.out), routing, checks);
    return result_of_step;
  }

  /// Seconds for the layer in one call. Its output must be identical, bit by bit, to that of the separate calls. The last step
  /// is also recorded.
  double fused_step(int64_t step, const Inputs& in, const std::vector<uint8_t>& separate, std::vector<CheckResult>& checks) {
    const auto forward = [&] { fused_->forward(in.x.data, in.ids, in.weights, in.out, {.stream = device_.stream()}); };
    device_.fill(in.out, 0xFF, separate.size());
    meet();
    const double seconds = time_until_done(forward);
    std::vector<uint8_t> out(separate.size());
    device_.read(out.data(), in.out, out.size());
    const bool same = out == separate;
    checks.push_back({"fused layer against separate calls, bit by bit", same,
                      same ? "" : fmt::format("bits differ in step {}", step + 1), in.x.rows * in.x.cols});
    if (step + 1 == plan_.options.steps) {
      constexpr int kCalls = 3;
      const TraceOptions options = layer_trace_options(Backend::cuda, UsedGpus{plan_.probe}.sms_of_rank(group_.size()), 1, 1);
      layers_ = layer_times_json(record_layers(group_, device_, options, kCalls, forward));
    }
    meet();
    return seconds;
  }

  /// Creates this rank's experts; on a GPU, their weights are in device memory.
  ExpertMlp make_experts() {
    const ExpertShape shape{plan_.options.hidden, plan_.options.intermediate, count_};
    if (device_.on_host()) return {shape, weights_.source(first_)};
    const size_t size = at(shape.hidden * shape.intermediate);
    w13_ = static_cast<uint16_t*>(device_.allocate(at(count_) * 2 * size * 2));
    w2_ = static_cast<uint16_t*>(device_.allocate(at(count_) * size * 2));
    device_.keep();
    write_weights(shape, first_, plan_.shape.seed, w13_, w2_, device_);
    device_.wait();
    ExpertOptions options;
    options.backend = Backend::cuda;
    options.storage = WeightStorage::view;
    options.max_rows = max_rows(config_of(plan_), plan_.shape.world);
    return {shape, w13_, w2_, options};
  }

  Inputs inputs(const RowArray& x, const Routing& routing, size_t bytes) {
    device_.release();
    Inputs in;
    in.x = x.view();
    in.x.data = device_.lend(in.x.data, bytes);
    in.ids = routing.expert_ids();
    in.ids.data = device_.lend(routing.topk_ids.data(), routing.topk_ids.size() * 4);
    if (!routing.topk_weights.empty()) in.weights = device_.lend(routing.topk_weights.data(), routing.topk_weights.size() * 4);
    in.out = device_.allocate(bytes);
    return in;
  }
  DispatchOptions dispatch_options() const {
    DispatchOptions o;
    o.stream = device_.stream();
    return o;
  }
  CombineOptions combine_options() const {
    CombineOptions o;
    o.order = plan_.order();
    o.stream = device_.stream();
    return o;
  }

  /// Seconds for one part of a step; on a GPU, until the enqueued work has finished.
  template <class F>
  double time_until_done(F&& part) {
    const Clock::time_point begin = Clock::now();
    part();
    device_.wait();
    return seconds_between(begin, Clock::now());
  }
  /// Times a part that is not otherwise traced, and records a span for it.
  template <class F>
  double timed(const char* name, const char* unit, int64_t count, F&& part) {
    const Trace::Span span(&trace_, rank_, trace_.event(name, unit), count);
    return time_until_done(part);
  }
  /// Ranks in one process may share a GPU, so no rank may copy while another rank's kernel waits for that rank's call.
  void meet() {
    if (device_.on_host()) return;
    device_.wait();
    group_.barrier();
  }

  Routing gate(const RowArray& x) {
    const Trace::Span span(&trace_, rank_, trace_.event("gate"), x.rows());
    const std::vector<float> logits = gate_logits(x.view(), gate_weights_.view());
    return plan_.source->gate(logits.data(), x.rows());
  }

  /// Combines the received rows unchanged. Not timed, not traced.
  RowArray combine_as_is(NormalExchange& exchange, const Dispatched& d, void* out) {
    RowArray rows(plan_.options.tokens, plan_.options.hidden, DType::bf16);
    meet();
    exchange.combine(d.x, d.handle, out, combine_options());
    device_.read(rows.row(0), out, at(rows.rows()) * rows.row_bytes());
    return rows;
  }

  /// `d` and `out` (the result of combining its rows) are in host memory.
  void add_checks(int64_t step, const Dispatched& d, const RowArray& out, const Routing& routing,
                  std::vector<CheckResult>& checks) {
    Scenario s = plan_.shape;
    s.routing = plan_.gated() ? gathered(routing) : plan_.routing[at(step)];
    SentRows sent;
    sent.set = static_cast<uint64_t>(step);
    CombineCase expected;
    expected.set = sent.set;
    expected.order = plan_.order();
    expected.identity = true;
    checks.push_back(check_dispatched("dispatched rows, bit by bit", s, rank_, d, sent, true));
    checks.push_back(check_combined("combine of identity experts, bit by bit", s, rank_, out.row(0), expected));
  }

  /// The gate's choices on all ranks, gathered because each rank has only its own.
  std::vector<Routing> gathered(const Routing& mine) {
    const size_t n = mine.topk_ids.size();
    const auto world = at(group_.size());
    std::vector<int32_t> ids(n * world);
    std::vector<float> weights(n * world);
    group_.all_gather(mine.topk_ids.data(), n * 4, ids.data());
    group_.all_gather(mine.topk_weights.data(), n * 4, weights.data());
    std::vector<Routing> all(world, mine);
    for (size_t r = 0; r < world; ++r) {
      const auto begin = static_cast<std::ptrdiff_t>(r * n);
      const auto end = static_cast<std::ptrdiff_t>((r + 1) * n);
      all[r].topk_ids.assign(ids.begin() + begin, ids.begin() + end);
      all[r].topk_weights.assign(weights.begin() + begin, weights.begin() + end);
    }
    return all;
  }

  const DemoPlan& plan_;
  Group& group_;
  RankLink& link_;
  RankDevice& device_;
  int rank_;
  Trace trace_;
  int first_, count_;
  ExpertWeights weights_;
  uint16_t *w13_ = nullptr, *w2_ = nullptr;  ///< on a GPU
  std::optional<MoeLayer> fused_;
  json layers_ = json::array();  ///< of the recorded fused layer
  RowArray gate_weights_;
};

StepResult step_from(const json& j, const DemoPlan& plan) {
  StepResult s;
  s.times = {j.at("times")[0].get<double>(), j.at("times")[1].get<double>(), j.at("times")[2].get<double>(),
             j.at("times")[3].get<double>(), j.at("times")[4].get<double>()};
  s.routing.num_experts = plan.shape.experts;
  s.routing.topk = plan.shape.topk;
  s.routing.num_tokens = plan.options.tokens;
  s.routing.topk_ids = j.at("ids").get<std::vector<int32_t>>();
  s.routing.topk_weights = j.at("weights").get<std::vector<float>>();
  s.rows = j.at("rows").get<int64_t>();
  s.remote_bytes = j.at("remote").get<uint64_t>();
  const auto& bytes = j.at("out").get_binary();
  s.out.resize(bytes.size() / 2);
  std::copy(bytes.begin(), bytes.end(), reinterpret_cast<uint8_t*>(s.out.data()));
  return s;
}

/// Determines whether the library supports the fused form of this layer on the GPUs.
void choose_fused(DemoPlan& plan) {
  try {
    (void)MoeLayer::memory_required(fused_config_of(plan), plan.shape.world, Backend::cuda);
    plan.fused = true;
  } catch (const Error& e) {
    if (e.code() != ErrorCode::unsupported && e.code() != ErrorCode::invalid_argument) throw;
    plan.why_not_fused = e.what();
  }
}

}  // namespace

DemoPlan make_demo_plan(const DemoOptions& options, std::shared_ptr<const RoutingSource> source, const GpuProbe& probe) {
  DemoPlan plan;
  plan.options = options;
  plan.probe = probe;
  plan.source = std::move(source);
  Scenario& s = plan.shape;
  s.world = static_cast<int>(options.ranks);
  s.experts = plan.source->experts();
  s.topk = plan.source->topk();
  s.hidden = options.hidden;
  s.layout = Layout::expert_major;
  s.alignment = static_cast<int>(options.alignment);
  s.seed = static_cast<uint64_t>(options.seed);
  // A gate's choices are known only at run time, so the pool is sized for the worst case.
  const int64_t num_local_experts = (s.experts + s.world - 1) / s.world;
  plan.max_rows = options.ranks * options.tokens * s.topk + num_local_experts * (options.alignment - 1);
  if (plan.on_gpus()) choose_fused(plan);
  if (plan.gated()) return plan;
  plan.routing.resize(at(options.steps));
  for (int r = 0; r < s.world; ++r) {
    std::vector<Routing> batches = plan.source->batches(r, options.tokens, options.steps);
    for (size_t step = 0; step < batches.size(); ++step) plan.routing[step].push_back(std::move(batches[step]));
  }
  plan.max_rows = 0;
  for (const std::vector<Routing>& step : plan.routing) {
    Scenario scenario = s;
    scenario.routing = step;
    const oracle::Problem problem = scenario.problem();
    for (int r = 0; r < s.world; ++r)
      plan.max_rows = std::max(plan.max_rows, static_cast<int64_t>(oracle::rows_to(problem, r).size()));
  }
  return plan;
}

DemoOutcome run_demo_ranks(const DemoPlan& plan, Progress& progress) {
  const DemoOptions& o = plan.options;
  RankJob job;
  job.world = plan.shape.world;
  job.processes = o.processes;
  job.group.num_blocks = static_cast<int>(o.blocks);
  job.group.num_warps = static_cast<int>(o.warps);
  if (plan.on_gpus()) job.group.backend = Backend::cuda;
  job.group.heap_bytes = NormalExchange::heap_bytes(config_of(plan), plan.shape.world, job.group.backend);
  if (plan.fused) job.group.heap_bytes += MoeLayer::heap_bytes(fused_config_of(plan), plan.shape.world, Backend::cuda);
  const auto gpus = static_cast<int>(plan.probe.gpus.size());
  const int64_t total = o.steps + 1;
  progress.stage("making weights, then the layer", total * o.ranks);
  std::vector<int64_t> done(at(o.ranks));
  std::mutex mutex;
  const Clock::time_point begin = Clock::now();
  const std::vector<json> ranks = run_ranks(
      job,
      [&](Group& group, RankLink& link) {
        const std::shared_ptr<RankDevice> device =
            rank_device(group.rank(), plan.on_gpus() ? gpus : 0, plan.on_gpus() ? device_bytes(plan) : 0);
        group.barrier();  // every rank has its stream and memory before any rank waits for another
        return DemoRank(plan, group, link, *device).run();
      },
      [&](int rank, int64_t n, const std::string&) {
        const std::lock_guard lock(mutex);
        done[at(rank)] = n;
        int64_t sum = 0;
        for (const int64_t d : done) sum += d;
        const int64_t slowest = *std::min_element(done.begin(), done.end());
        progress.update(sum, slowest == 0 ? "making the experts' weights"
                                          : fmt::format("step {} of {}", std::min(slowest, o.steps), o.steps));
      });

  DemoOutcome outcome{{}, {}, Trace(plan.shape.world, trace_options(plan)), {}, "", "", job.group.heap_bytes, 0};
  outcome.seconds = seconds_between(begin, Clock::now());
  outcome.steps.resize(at(o.steps));
  std::vector<json> checks;
  for (size_t r = 0; r < ranks.size(); ++r) {
    for (size_t step = 0; step < outcome.steps.size(); ++step)
      outcome.steps[step].push_back(step_from(ranks[r].at("steps")[step], plan));
    checks.push_back(ranks[r].at("checks"));
    const auto& bytes = ranks[r].at("trace").get_binary();
    outcome.trace.merge(std::as_bytes(std::span(bytes.data(), bytes.size())));
    outcome.expert_implementation = ranks[r].at("mlp").get<std::string>();
    outcome.fused_implementation = ranks[r].at("fused").get<std::string>();
    for (const json& one : ranks[r].at("layers")) outcome.layers.push_back(layer_times_from(one));
  }
  outcome.checks = merged_by_name(checks);
  progress.finish(fmt::format("{}, {}", counted(o.ranks, "rank"), counted(o.steps, "step")));
  return outcome;
}

}  // namespace switchyard::tool
