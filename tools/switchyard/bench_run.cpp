// SPDX-License-Identifier: Apache-2.0
// One measured configuration of `switchyard bench`.
//
// Rules: all ranks meet at a barrier before each call; a call's time is from entry to exit on the slowest rank; rows come from
// several input sets in turn and are combined only after all other sets have been dispatched, so that no call finds its rows in
// a cache; results are checked bit by bit after the timed part.
#include <fmt/core.h>

#include <algorithm>
#include <chrono>

#include "bench_points.hpp"
#include "ranks.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

DType type_of(const std::string& name) {
  if (name == "f16") return DType::f16;
  if (name == "f32") return DType::f32;
  if (name == "fp8") return DType::fp8_e4m3;
  return DType::bf16;
}

ScaleKind quantize_of(const std::string& name) {
  return name == "f32" ? ScaleKind::f32 : name == "ue8m0" ? ScaleKind::ue8m0 : ScaleKind::none;
}

/// Everything that is equal on all ranks.
struct Setup {
  BenchOptions options;
  int world = 1;
  int sets = 2;
  DType type = DType::bf16;
  ScaleKind scales = ScaleKind::none;
  ScaleKind quantize = ScaleKind::none;
  DType out_type = DType::bf16;
  std::vector<Scenario> scenarios;  ///< one per set
  NormalConfig config;
  bool outputs_apart = false;  ///< the dispatched rows are fp8: what is combined lies in buffers of its own

  size_t sent_row_bytes() const {
    const DType sent = quantize != ScaleKind::none ? DType::fp8_e4m3 : type;
    return static_cast<size_t>(options.hidden) * dtype_bytes(sent) +
           scale_row_bytes(options.hidden, quantize != ScaleKind::none ? quantize : scales);
  }
};

/// One rank's loop.
class RankBench {
 public:
  RankBench(const Setup& setup, Group& group, RankLink& link)
      : setup_(setup), group_(group), link_(link), rank_(group.rank()), exchange_(group, setup.config) {
    for (int set = 0; set < setup.sets; ++set) {
      const int64_t tokens = setup.options.tokens;
      const auto index = static_cast<uint64_t>(set);
      inputs_.push_back(token_rows(scenario(set).seed, index, rank_, tokens, setup.options.hidden, setup.type, setup.scales));
      outputs_.emplace_back(tokens, setup.options.hidden, setup.out_type);
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
    for (int64_t i = 0; i < total; ++i) {
      const int set = static_cast<int>(i % setup_.sets);
      group_.barrier();
      Clock::time_point begin = Clock::now();
      combine(set);
      const double combine_time = seconds_since(begin);
      slots_[static_cast<size_t>(set)] = Dispatched();  // its rows go back to the pool outside the timed part
      group_.barrier();
      begin = Clock::now();
      dispatch(set);
      const double dispatch_time = seconds_since(begin);
      if (rank_ == 0) link_.progress(i + 1, "");
      if (i < setup_.options.warmup) continue;
      dispatch_s.push_back(dispatch_time);
      combine_s.push_back(combine_time);
      plan_us.push_back(exchange_.last_call().plan_us);
      remote = static_cast<double>(exchange_.last_call().remote_bytes);
    }
    json checks = json::array();
    if (setup_.options.verify) {
      for (int set = 0; set < setup_.sets; ++set) verify(set, checks);
    }
    group_.barrier();
    return {
        {"dispatch", dispatch_s}, {"combine", combine_s}, {"plan_us", plan_us}, {"remote_bytes", remote}, {"checks", checks}};
  }

 private:
  const Scenario& scenario(int set) const { return setup_.scenarios[static_cast<size_t>(set)]; }

  void dispatch(int set) {
    const auto at = static_cast<size_t>(set);
    const Routing& mine = scenario(set).routing[static_cast<size_t>(rank_)];
    DispatchOptions options;
    options.quantize = setup_.quantize;
    if (setup_.options.cached && handles_[at]) {
      slots_[at] = exchange_.dispatch(inputs_[at].view(), handles_[at], options);
    } else {
      slots_[at] = exchange_.dispatch(inputs_[at].view(), mine.expert_ids(),
                                      mine.weights.empty() ? nullptr : mine.weights.data(), options);
    }
    if (setup_.options.cached && !handles_[at]) handles_[at] = slots_[at].handle;
    if (setup_.outputs_apart && y_[at].rows().data == nullptr) {
      y_[at] = exchange_.allocate_rows(slots_[at].handle, setup_.out_type);
      fill_outputs(scenario(set), rank_, static_cast<uint64_t>(set), slots_[at].rows, setup_.out_type, y_[at].rows().data);
    }
  }

  void combine(int set) {
    const auto at = static_cast<size_t>(set);
    CombineOptions options;
    options.order = setup_.options.order == "per_route" ? CombineOrder::per_route : CombineOrder::per_rank;
    const ConstRows y = setup_.outputs_apart ? ConstRows(y_[at].rows()) : ConstRows(slots_[at].x);
    exchange_.combine(y, slots_[at].handle, outputs_[at].row(0), options);
  }

  void verify(int set, json& checks) {
    const auto at = static_cast<size_t>(set);
    const auto index = static_cast<uint64_t>(set);
    const SentRows sent{setup_.type, setup_.scales, setup_.quantize, index};
    CombineCase expected;
    expected.order = setup_.options.order == "per_route" ? CombineOrder::per_route : CombineOrder::per_rank;
    expected.type = setup_.out_type;
    expected.set = index;
    expected.identity = !setup_.outputs_apart;
    for (const CheckResult& r : {check_dispatched("dispatch", scenario(set), rank_, slots_[at], sent, !setup_.options.cached),
                                 check_combined("combine", scenario(set), rank_, outputs_[at].row(0), expected)}) {
      checks.push_back({r.name, r.passed, r.detail, r.compared});
    }
  }

  const Setup& setup_;
  Group& group_;
  RankLink& link_;
  int rank_;
  NormalExchange exchange_;
  std::vector<RowArray> inputs_;
  std::vector<RowArray> outputs_;
  std::vector<Dispatched> slots_;
  std::vector<RowBuffer> y_;
  std::vector<Handle> handles_;
};

int64_t pairs_of(const Scenario& s, bool remote_only) {
  int64_t pairs = 0;
  for (int r = 0; r < s.world; ++r) {
    for (int64_t t = 0; t < s.tokens(r); ++t) {
      uint64_t touched = 0;
      for (int k = 0; k < s.topk; ++k) {
        if (s.valid(s.id(r, t, k))) touched |= uint64_t{1} << s.owner(s.id(r, t, k));
      }
      if (remote_only) touched &= ~(uint64_t{1} << r);
      pairs += __builtin_popcountll(touched);
    }
  }
  return pairs;
}

/// Largest number of rows that one rank receives in one set.
int64_t most_rows(const std::vector<Scenario>& scenarios, int world) {
  int64_t most = 0;
  for (const Scenario& s : scenarios) {
    for (int r = 0; r < world; ++r) most = std::max(most, static_cast<int64_t>(expected_rows(s, r).size()));
  }
  return most;
}

Scenario scenario_of(const BenchOptions& o, const RoutingSource& source) {
  Scenario s;
  s.world = static_cast<int>(o.ranks);
  s.experts = source.experts();
  s.topk = source.topk();
  s.hidden = o.hidden;
  s.layout = o.layout == "expert_major" ? Layout::expert_major : Layout::rank_major;
  s.alignment = static_cast<int>(o.alignment);
  s.seed = static_cast<uint64_t>(o.seed);
  return s;
}

/// Pool for all sets' outputs at once, plus what a combine stages.
size_t pool_bytes(const Setup& setup, int64_t rows) {
  const auto hidden = static_cast<size_t>(setup.options.hidden);
  const auto count = static_cast<size_t>(rows);
  const auto records = static_cast<size_t>(setup.world) * static_cast<size_t>(setup.options.tokens);
  const size_t metadata = records * (4 + 8 * static_cast<size_t>(setup.config.topk)) + 4096;
  const size_t one =
      count * (setup.sent_row_bytes() + (setup.outputs_apart ? hidden * dtype_bytes(setup.out_type) : 0)) + metadata;
  const size_t staged = std::max(count, records) * hidden * dtype_bytes(setup.out_type) + metadata;
  return (static_cast<size_t>(setup.sets) + 1) * (one + 4096) + staged;
}

Setup make_setup(const BenchOptions& options, const bench::Machine& machine, const RoutingSource& source) {
  Setup setup;
  setup.options = options;
  setup.world = static_cast<int>(options.ranks);
  setup.type = type_of(options.dtype);
  setup.scales = setup.type == DType::fp8_e4m3 ? ScaleKind::f32 : ScaleKind::none;
  setup.quantize = quantize_of(options.quantize);
  setup.out_type = setup.type == DType::fp8_e4m3 ? DType::bf16 : setup.type;
  setup.outputs_apart = setup.type == DType::fp8_e4m3 || setup.quantize != ScaleKind::none;
  const Scenario base = scenario_of(options, source);

  Scenario probe = base;
  probe.routing = source.all_ranks(options.tokens);
  const double rows = static_cast<double>(pairs_of(probe, false)) * (base.layout == Layout::expert_major ? 2.0 : 1.0);
  const auto hidden = static_cast<double>(options.hidden);
  const double per_set = rows * static_cast<double>(setup.sent_row_bytes()) +
                         static_cast<double>(setup.world * options.tokens) * hidden *
                             static_cast<double>(dtype_bytes(setup.type) + dtype_bytes(setup.out_type));
  setup.sets = options.sets > 0 ? static_cast<int>(options.sets)
                                : bench::rotation_sets(per_set, static_cast<double>(machine.llc_bytes),
                                                       static_cast<double>(machine.memory_available) / 3);
  // Every set is combined at least once: their results are checked.
  setup.options.warmup = std::max(options.warmup, setup.sets - options.iterations);
  setup.scenarios.assign(static_cast<size_t>(setup.sets), base);
  for (int r = 0; r < setup.world; ++r) {
    std::vector<Routing> batches = source.batches(r, options.tokens, setup.sets);
    for (size_t set = 0; set < setup.scenarios.size(); ++set) setup.scenarios[set].routing.push_back(std::move(batches[set]));
  }

  NormalConfig& c = setup.config;
  c.hidden = options.hidden;
  c.num_experts = base.experts;
  c.topk = base.topk;
  c.max_tokens = options.tokens;
  c.layout = base.layout;
  c.expert_alignment = base.alignment;
  c.row_type = setup.out_type;
  c.staging = options.staging == "ring" ? Staging::ring : Staging::direct;
  if (options.channels > 0) c.ring.num_channels = static_cast<int>(options.channels);
  if (options.send_chunk > 0) c.ring.send_chunk = static_cast<int>(options.send_chunk);
  if (options.slots > 0) c.ring.slots = static_cast<int>(options.slots);
  c.pool_bytes = pool_bytes(setup, most_rows(setup.scenarios, setup.world));
  return setup;
}

RankJob job_of(const Setup& setup, const bench::Machine& machine) {
  RankJob job;
  job.world = setup.world;
  job.processes = setup.options.processes;
  job.group.num_blocks = static_cast<int>(setup.options.blocks);
  job.group.num_warps = static_cast<int>(setup.options.warps);
  job.group.heap_bytes = NormalExchange::heap_bytes_for(setup.config, setup.world);
  for (int r = 0; r < setup.world && setup.options.pin == "cores"; ++r)
    job.cpus.push_back(bench::share_of_cpus(machine, r, setup.world));
  return job;
}

RoutingSource source_of(const BenchOptions& o) {
  return {"--routing", o.routing, {o.experts, o.topk, static_cast<int>(o.ranks), static_cast<uint64_t>(o.seed)}};
}

void merge_checks(BenchRun& run, const std::vector<json>& ranks) {
  for (size_t r = 0; r < ranks.size(); ++r) {
    for (const json& one : ranks[r].at("checks")) {
      const auto name = one[0].get<std::string>();
      auto known = std::find_if(run.checks.begin(), run.checks.end(), [&](const CheckResult& c) { return c.name == name; });
      if (known == run.checks.end()) known = run.checks.insert(known, CheckResult{name, true, "", 0});
      known->compared += one[3].get<int64_t>();
      if (one[1].get<bool>()) continue;
      if (known->passed) known->detail = fmt::format("rank {}: {}", r, one[2].get<std::string>());
      known->passed = false;
    }
  }
}

}  // namespace

bool BenchRun::passed() const {
  return std::all_of(checks.begin(), checks.end(), [](const CheckResult& c) { return c.passed; });
}

void check_exchange(const BenchOptions& options, const bench::Machine& machine) {
  const auto row = static_cast<double>(options.hidden) * static_cast<double>(dtype_bytes(type_of(options.dtype)));
  const double rows = static_cast<double>(options.ranks * options.tokens) * row;  // of one set
  check_room(options, 2 * rows, machine);                                         // before routing is made for so many tokens
  const RoutingSource source = source_of(options);
  const Setup setup = make_setup(options, machine, source);
  const auto heaps = static_cast<double>(setup.world) * static_cast<double>(job_of(setup, machine).group.heap_bytes);
  check_room(options, heaps + 2 * setup.sets * rows, machine);  // inputs and outputs
}

BenchRun measure_exchange(const BenchOptions& options, const bench::Machine& machine,
                          const std::function<void(double)>& on_progress) {
  const RoutingSource source = source_of(options);
  const Setup setup = make_setup(options, machine, source);
  const RankJob job = job_of(setup, machine);
  const auto total = static_cast<double>(setup.options.warmup + setup.options.iterations);
  const std::vector<json> ranks = run_ranks(
      job, [&](Group& group, RankLink& link) { return RankBench(setup, group, link).run(); },
      [&](int, int64_t done, const std::string&) { on_progress(static_cast<double>(done) / total); });

  BenchRun run;
  run.options = setup.options;
  run.experts = source.experts();
  run.topk = source.topk();
  run.routing = source.description();
  if (options.staging == "ring") run.ring = usual_ring(setup.config, setup.world);
  run.sets = setup.sets;
  run.heap_bytes = job.group.heap_bytes;
  std::vector<std::vector<double>> dispatch, combine, plan;
  for (const json& r : ranks) {
    dispatch.push_back(r.at("dispatch").get<std::vector<double>>());
    combine.push_back(r.at("combine").get<std::vector<double>>());
    plan.push_back(r.at("plan_us").get<std::vector<double>>());
    run.counted_remote += r.at("remote_bytes").get<double>();
  }
  const std::vector<double> d = bench::slowest(dispatch);
  const std::vector<double> c = bench::slowest(combine);
  std::vector<double> both;
  for (size_t i = 0; i < d.size(); ++i) both.push_back(d[i] + c[i]);
  run.dispatch = bench::summarize(d);
  run.combine = bench::summarize(c);
  run.both = bench::summarize(both);
  run.plan_us = bench::summarize(bench::slowest(plan)).p50;
  int64_t pairs = 0, remote = 0, routes = 0;
  for (const Scenario& s : setup.scenarios) {
    pairs += pairs_of(s, false);
    remote += pairs_of(s, true);
    for (const Routing& r : s.routing)
      routes += std::count_if(r.ids.begin(), r.ids.end(), [&](int32_t id) { return s.valid(id); });
  }
  const auto row = static_cast<double>(options.hidden);
  run.bytes = bench::exchange_bytes(
      options.ranks * options.tokens, pairs / setup.sets, remote / setup.sets, routes / setup.sets,
      row * static_cast<double>(dtype_bytes(setup.type)) + static_cast<double>(scale_row_bytes(options.hidden, setup.scales)),
      static_cast<double>(setup.sent_row_bytes()), row * static_cast<double>(dtype_bytes(setup.out_type)));
  run.working_set_bytes = setup.sets * (run.bytes.dispatch_limit + static_cast<double>(options.ranks * options.tokens) * row *
                                                                       static_cast<double>(dtype_bytes(setup.out_type)));
  merge_checks(run, ranks);
  return run;
}

}  // namespace switchyard::tool
