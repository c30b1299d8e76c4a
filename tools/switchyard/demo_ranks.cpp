// SPDX-License-Identifier: Apache-2.0
// What every rank of the demo does: gate, dispatch, experts, combine, and the exact checks of the exchange.
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <mutex>
#include <optional>
#include <span>

#include "demo.hpp"
#include "device_copy.hpp"
#include "rank_device.hpp"
#include "ranks.hpp"
#include "style.hpp"
#include "switchyard/expert.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

double seconds_between(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

size_t at(int64_t i) { return static_cast<size_t>(i); }

/// On GPUs one warp of each of a few blocks: the others do the same, and a page can show no more.
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
  c.staging = o.staging == "ring" ? Staging::ring : Staging::direct;
  if (c.staging == Staging::ring) return c;
  if (plan.on_gpus()) return c;  // sizes are the worst case there, as those of the default pool
  // Received rows, expert outputs and the combine's partial sums, with the metadata of each.
  const auto row = static_cast<size_t>(o.hidden) * 2;
  const size_t records = at(o.ranks * o.tokens);
  c.pool_bytes = 2 * at(plan.most_rows) * row + records * (row + 16 * at(plan.shape.topk)) + (size_t{1} << 20);
  return c;
}

/// Gate weights: closed form, scaled so that logits have about unit variance.
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

/// A rank's rows, ids, weights and results in device memory, with room to spare.
size_t device_bytes(const DemoPlan& plan) {
  const DemoOptions& o = plan.options;
  return at(o.tokens) * (at(o.hidden) * 4 + at(plan.shape.topk) * 8) + (size_t{1} << 20);
}

class DemoRank {
 public:
  DemoRank(const DemoPlan& plan, Group& group, RankLink& link, RankDevice* device)
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
    NormalExchange exchange(group_, config_of(plan_));
    ExpertMlp mlp({plan_.options.hidden, plan_.options.intermediate, count_}, weights_.source(first_));
    if (plan_.gated()) gate_weights_ = gate_weights(plan_);
    link_.progress(1, "");
    json steps = json::array();
    json checks = json::array();
    for (int64_t step = 0; step < plan_.options.steps; ++step) {
      steps.push_back(run_step(step, exchange, mlp, checks));
      link_.progress(step + 2, "");
    }
    const std::vector<std::byte> trace = trace_.serialize(rank_);
    const auto* bytes = reinterpret_cast<const uint8_t*>(trace.data());
    return {{"steps", steps},
            {"checks", checks},
            {"mlp", mlp.implementation()},
            {"trace", json::binary({bytes, bytes + trace.size()})}};
  }

 private:
  json run_step(int64_t step, NormalExchange& exchange, ExpertMlp& mlp, json& checks) {
    const DemoOptions& o = plan_.options;
    const RowArray x =
        token_rows(plan_.shape.seed, static_cast<uint64_t>(step), rank_, o.tokens, o.hidden, DType::bf16, ScaleKind::none);
    RowArray out(o.tokens, o.hidden, DType::bf16);
    group_.barrier();
    group_.set_trace(&trace_);
    std::optional<Trace::Span> whole;
    whole.emplace(&trace_, rank_, trace_.event("step"), step);

    const Clock::time_point begin = Clock::now();
    const Routing routing = plan_.gated() ? gate(x) : plan_.routing[at(step)][at(rank_)];
    if (device_) return run_step_on_gpu(step, exchange, mlp, checks, x, routing, seconds_between(begin, Clock::now()), whole);
    const Clock::time_point gated = Clock::now();
    const Dispatched d =
        exchange.dispatch(x.view(), routing.expert_ids(), routing.weights.empty() ? nullptr : routing.weights.data());
    const uint64_t remote_bytes = exchange.last_call().remote_bytes;
    const Clock::time_point dispatched = Clock::now();
    const RowBuffer y = exchange.allocate_rows(d.handle, DType::bf16);
    {
      const Trace::Span span(&trace_, rank_, trace_.event("expert_mlp"), d.rows);
      mlp.forward(static_cast<const uint16_t*>(d.x.data), d.expert_first_row, d.tokens_per_expert,
                  static_cast<uint16_t*>(y.rows().data));
    }
    const Clock::time_point computed = Clock::now();
    exchange.combine(y.rows(), d.handle, out.row(0));
    const Clock::time_point combined = Clock::now();
    whole.reset();
    group_.set_trace(nullptr);

    check_exchange(step, exchange, d, routing, checks);
    const auto* bytes = reinterpret_cast<const uint8_t*>(out.row(0));
    const json times = {plan_.gated() ? seconds_between(begin, gated) : 0.0, seconds_between(gated, dispatched),
                        seconds_between(dispatched, computed), seconds_between(computed, combined), 0.0};
    return {{"times", times},
            {"rows", d.rows},
            {"remote", remote_bytes},
            {"ids", routing.ids},
            {"weights", routing.weights},
            {"out", json::binary({bytes, bytes + out.row_bytes() * at(o.tokens)})}};
  }

  /// Seconds of a part of a step on a GPU, to the end of what it enqueued.
  template <class F>
  double to_the_end(F&& part) {
    const Clock::time_point begin = Clock::now();
    part();
    device_->wait();
    return seconds_between(begin, Clock::now());
  }
  /// The same of a part that leaves no trace by itself.
  template <class F>
  double timed(const char* name, const char* unit, int64_t count, F&& part) {
    const Trace::Span span(&trace_, rank_, trace_.event(name, unit), count);
    return to_the_end(part);
  }
  /// Ranks of one process may share a GPU: none may copy while another's kernel waits for its call.
  void meet() {
    device_->wait();
    group_.barrier();
  }

  json run_step_on_gpu(int64_t step, NormalExchange& exchange, ExpertMlp& mlp, json& checks, const RowArray& x,
                       const Routing& routing, double gate_seconds, std::optional<Trace::Span>& whole) {
    const size_t bytes = at(plan_.options.tokens) * x.row_bytes();
    StepTimes t;
    t.gate = gate_seconds;
    ConstRows rows = x.view();
    ExpertIds ids = routing.expert_ids();
    const float* weights = nullptr;
    void* out = nullptr;
    t.copies += timed("copy_in", "bytes", static_cast<int64_t>(bytes), [&] {
      device_->release();
      rows.data = device_->upload(rows.data, bytes);
      ids.data = device_->upload(routing.ids.data(), routing.ids.size() * 4);
      weights = device_->upload(routing.weights.data(), routing.weights.size() * 4);
      out = device_->allocate(bytes);
    });
    DispatchOptions options;
    options.stream = device_->stream();
    CombineOptions sum;
    sum.stream = device_->stream();
    meet();
    std::optional<Dispatched> d;
    t.dispatch = to_the_end([&] { d.emplace(exchange.dispatch(rows, ids, weights, options)); });
    const uint64_t remote_bytes = exchange.last_call().remote_bytes;
    HostDispatched host;
    t.copies += timed("fetch_rows", "", 0, [&] {
      host = copy_to_host(*d, weights != nullptr, [&](void* to, const void* from, size_t n) { device_->read(to, from, n); });
    });
    const RowBuffer y = exchange.allocate_rows(d->handle, DType::bf16);
    RowArray made(host.view.rows, plan_.options.hidden, DType::bf16);
    t.expert = timed("expert_mlp", "rows", host.view.rows, [&] {
      mlp.forward(static_cast<const uint16_t*>(host.view.x.data), host.view.expert_first_row, host.view.tokens_per_expert,
                  reinterpret_cast<uint16_t*>(made.row(0)));
    });
    const size_t made_bytes = at(made.rows()) * made.row_bytes();
    t.copies += timed("copy_to_gpu", "bytes", static_cast<int64_t>(made_bytes),
                      [&] { device_->write(y.rows().data, made.row(0), made_bytes); });
    meet();
    t.combine = to_the_end([&] { exchange.combine(y.rows(), d->handle, out, sum); });
    std::vector<uint8_t> result(bytes);
    t.copies += timed("copy_to_host", "bytes", static_cast<int64_t>(bytes), [&] { device_->read(result.data(), out, bytes); });
    whole.reset();
    group_.set_trace(nullptr);

    const RowArray identity = combine_as_is(exchange, *d, out, sum);
    add_checks(step, host.view, identity, routing, checks);
    return {{"times", {t.gate, t.dispatch, t.expert, t.combine, t.copies}},
            {"rows", host.view.rows},
            {"remote", remote_bytes},
            {"ids", routing.ids},
            {"weights", routing.weights},
            {"out", json::binary(std::move(result))}};
  }

  Routing gate(const RowArray& x) {
    const Trace::Span span(&trace_, rank_, trace_.event("gate"), x.rows());
    const std::vector<float> logits = gate_logits(x.view(), gate_weights_.view());
    return plan_.source->gate(logits.data(), x.rows());
  }

  /// The combine of the rows that arrived, on a GPU.
  RowArray combine_as_is(NormalExchange& exchange, const Dispatched& d, void* out, const CombineOptions& options) {
    RowArray rows(plan_.options.tokens, plan_.options.hidden, DType::bf16);
    meet();
    exchange.combine(d.x, d.handle, out, options);
    device_->read(rows.row(0), out, at(rows.rows()) * rows.row_bytes());
    return rows;
  }

  /// Not timed, not traced: the rows that arrived, bit by bit, and what identity experts must give, bit by bit.
  void check_exchange(int64_t step, NormalExchange& exchange, const Dispatched& d, const Routing& routing, json& checks) {
    RowArray out(plan_.options.tokens, plan_.options.hidden, DType::bf16);
    exchange.combine(d.x, d.handle, out.row(0));
    add_checks(step, d, out, routing, checks);
  }

  /// `d` and `out`, the combine of its own rows, in host memory.
  void add_checks(int64_t step, const Dispatched& d, const RowArray& out, const Routing& routing, json& checks) {
    Scenario s = plan_.shape;
    s.routing = plan_.gated() ? gathered(routing) : plan_.routing[at(step)];
    SentRows sent;
    sent.set = static_cast<uint64_t>(step);
    CombineCase expected;
    expected.set = sent.set;
    expected.identity = true;
    for (const CheckResult& r : {check_dispatched("dispatched rows, bit by bit", s, rank_, d, sent, true),
                                 check_combined("combine of identity experts, bit by bit", s, rank_, out.row(0), expected)}) {
      checks.push_back({r.name, r.passed, r.detail, r.compared});
    }
  }

  /// The gate's choices on all ranks: each rank knows only its own.
  std::vector<Routing> gathered(const Routing& mine) {
    const size_t n = mine.ids.size();
    const auto world = at(group_.size());
    std::vector<int32_t> ids(n * world);
    std::vector<float> weights(n * world);
    group_.all_gather(mine.ids.data(), n * 4, ids.data());
    group_.all_gather(mine.weights.data(), n * 4, weights.data());
    std::vector<Routing> all(world, mine);
    for (size_t r = 0; r < world; ++r) {
      const auto begin = static_cast<std::ptrdiff_t>(r * n);
      const auto end = static_cast<std::ptrdiff_t>((r + 1) * n);
      all[r].ids.assign(ids.begin() + begin, ids.begin() + end);
      all[r].weights.assign(weights.begin() + begin, weights.begin() + end);
    }
    return all;
  }

  const DemoPlan& plan_;
  Group& group_;
  RankLink& link_;
  RankDevice* device_;  ///< null on the CPU
  int rank_;
  Trace trace_;
  int first_, count_;
  ExpertWeights weights_;
  RowArray gate_weights_;
};

StepResult step_from(const json& j, const DemoPlan& plan) {
  StepResult s;
  s.times = {j.at("times")[0].get<double>(), j.at("times")[1].get<double>(), j.at("times")[2].get<double>(),
             j.at("times")[3].get<double>(), j.at("times")[4].get<double>()};
  s.routing.num_experts = plan.shape.experts;
  s.routing.topk = plan.shape.topk;
  s.routing.tokens = plan.options.tokens;
  s.routing.ids = j.at("ids").get<std::vector<int32_t>>();
  s.routing.weights = j.at("weights").get<std::vector<float>>();
  s.rows = j.at("rows").get<int64_t>();
  s.remote_bytes = j.at("remote").get<uint64_t>();
  const auto& bytes = j.at("out").get_binary();
  s.out.resize(bytes.size() / 2);
  std::copy(bytes.begin(), bytes.end(), reinterpret_cast<uint8_t*>(s.out.data()));
  return s;
}

void add_check(std::vector<CheckResult>& all, const json& one, size_t rank) {
  const auto name = one[0].get<std::string>();
  auto known = std::find_if(all.begin(), all.end(), [&](const CheckResult& c) { return c.name == name; });
  if (known == all.end()) known = all.insert(known, CheckResult{name, true, "", 0});
  known->compared += one[3].get<int64_t>();
  if (one[1].get<bool>()) return;
  if (known->passed) known->detail = fmt::format("rank {}: {}", rank, one[2].get<std::string>());
  known->passed = false;
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
  // A gate's choices are known only when it runs: then the pool is sized for the worst case.
  const int64_t experts_here = (s.experts + s.world - 1) / s.world;
  plan.most_rows = options.ranks * options.tokens * s.topk + experts_here * (options.alignment - 1);
  if (plan.gated()) return plan;
  plan.routing.resize(at(options.steps));
  for (int r = 0; r < s.world; ++r) {
    std::vector<Routing> batches = plan.source->batches(r, options.tokens, options.steps);
    for (size_t step = 0; step < batches.size(); ++step) plan.routing[step].push_back(std::move(batches[step]));
  }
  plan.most_rows = 0;
  for (const std::vector<Routing>& step : plan.routing) {
    Scenario scenario = s;
    scenario.routing = step;
    for (int r = 0; r < s.world; ++r)
      plan.most_rows = std::max(plan.most_rows, static_cast<int64_t>(expected_rows(scenario, r).size()));
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
  job.group.heap_bytes = NormalExchange::heap_bytes_for(config_of(plan), plan.shape.world, job.group.backend);
  const auto gpus = static_cast<int>(plan.probe.gpus.size());
  const int64_t total = o.steps + 1;
  progress.stage("making weights, then the layer", total * o.ranks);
  std::vector<int64_t> done(at(o.ranks));
  std::mutex mutex;
  const Clock::time_point begin = Clock::now();
  const std::vector<json> ranks = run_ranks(
      job,
      [&](Group& group, RankLink& link) {
        RankDevice* device = plan.on_gpus() ? &rank_device(group.rank(), gpus, device_bytes(plan)) : nullptr;
        group.barrier();  // every rank has its stream and its memory before any waits for another
        return DemoRank(plan, group, link, device).run();
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

  DemoOutcome outcome{{}, {}, Trace(plan.shape.world, trace_options(plan)), "", job.group.heap_bytes, 0};
  outcome.seconds = seconds_between(begin, Clock::now());
  outcome.steps.resize(at(o.steps));
  for (size_t r = 0; r < ranks.size(); ++r) {
    for (size_t step = 0; step < outcome.steps.size(); ++step)
      outcome.steps[step].push_back(step_from(ranks[r].at("steps")[step], plan));
    for (const json& one : ranks[r].at("checks")) add_check(outcome.exchange_checks, one, r);
    const auto& bytes = ranks[r].at("trace").get_binary();
    outcome.trace.merge(std::as_bytes(std::span(bytes.data(), bytes.size())));
    outcome.expert_implementation = ranks[r].at("mlp").get<std::string>();
  }
  progress.finish(fmt::format("{}, {}", counted(o.ranks, "rank"), counted(o.steps, "step")));
  return outcome;
}

}  // namespace switchyard::tool
