// SPDX-License-Identifier: Apache-2.0
#include "trace_verb.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>

#include "../../bench/result_file.hpp"
#include "cli.hpp"
#include "gpu_probe.hpp"
#include "ranks.hpp"
#include "style.hpp"
#include "switchyard/trace.hpp"
#include "trace_calls.hpp"
#include "trace_summary.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

constexpr int kDeviceWarps = 20;  ///< most warps per block of any kernel

Scenario scenario_of(BenchOptions& o) {
  const RoutingSource source("--routing", o.routing,
                             {o.experts, o.topk, static_cast<int>(o.ranks), static_cast<uint64_t>(o.seed)});
  Scenario s;
  s.world = static_cast<int>(o.ranks);
  s.experts = source.experts();
  s.topk = source.topk();
  s.hidden = o.hidden;
  s.layout = o.mode != "normal" || o.layout == "expert_major" ? Layout::expert_major : Layout::rank_major;
  s.alignment = o.mode != "normal" ? 1 : static_cast<int>(o.alignment);
  s.seed = static_cast<uint64_t>(o.seed);
  s.routing = source.all_ranks(o.tokens);
  o.experts = s.experts;
  o.topk = s.topk;
  return s;
}

/// Collective. Microseconds per call of `n` calls, on this rank.
double time_calls(TracedCalls& calls, int64_t n, Group& group, RankDevice& device) {
  group.barrier();
  const auto begin = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < n; ++i) calls.call();
  device.wait();
  const std::chrono::duration<double, std::micro> spent = std::chrono::steady_clock::now() - begin;
  return spent.count() / static_cast<double>(n);
}

/// Collective. Rounds of the same calls without recording and with it, in turn.
json time_recording(const TraceVerbOptions& options, TracedCalls& calls, const TraceOptions& trace_options, Group& group,
                    RankDevice& device) {
  json plain = json::array(), traced = json::array();
  Trace trace(group.size(), trace_options);
  for (int64_t i = 0; i < options.cost_rounds; ++i) {
    plain.push_back(time_calls(calls, options.calls, group, device));
    group.set_trace(&trace);
    traced.push_back(time_calls(calls, options.calls, group, device));
    group.barrier();
    group.set_trace(nullptr);
    trace.clear();
  }
  return {{"plain", plain}, {"traced", traced}};
}

json traced_rank(const TraceVerbOptions& options, const Scenario& s, const TraceOptions& trace_options, int gpus,
                 Group& group) {
  const BenchOptions& o = options.run;
  const std::unique_ptr<RankDevice> host = make_host_device();
  RankDevice& device = gpus > 0 ? rank_device(group.rank(), gpus, traced_device_bytes(o, s)) : *host;
  group.barrier();
  Trace trace(s.world, trace_options);
  json cost;
  {
    const std::unique_ptr<TracedCalls> calls = make_traced_calls(o, s, group, device);
    for (int64_t i = 0; i < o.warmup; ++i) calls->call();
    device.wait();
    cost = time_recording(options, *calls, trace_options, group, device);
    group.barrier();
    group.set_trace(&trace);
    group.barrier();
    for (int64_t i = 0; i < options.calls; ++i) calls->call();
    device.wait();
    group.barrier();
    group.set_trace(nullptr);
    group.check();
    group.barrier();
  }
  const std::vector<std::byte> bytes = trace.serialize(group.rank());
  const auto* raw = reinterpret_cast<const uint8_t*>(bytes.data());
  return {{"trace", json::binary({raw, raw + bytes.size()})}, {"cost", cost}};
}

/// Of each round the slowest rank.
TraceCost cost_of(const std::vector<json>& ranks) {
  const auto slowest = [&](const char* which) {
    std::vector<double> most;
    for (const json& rank : ranks) {
      const auto mine = rank.at("cost").at(which).get<std::vector<double>>();
      most.resize(mine.size());
      for (size_t i = 0; i < mine.size(); ++i) most[i] = std::max(most[i], mine[i]);
    }
    return most;
  };
  return {slowest("plain"), slowest("traced")};
}

/// Fills in what was left to choose. Returns the number of GPUs, 0 for the CPU.
int fit(TraceVerbOptions& options) {
  BenchOptions& o = options.run;
  int gpus = 0;
  if (o.backend == "cuda") {
    if (!built_with_cuda()) throw UsageError(no_cuda_text());
    const GpuProbe probe = probe_gpus();
    gpus = static_cast<int>(probe.gpus.size());
    options.gpus = fmt::format("{}, driver {}", probe.names(), probe.driver_version);
    if (gpus == 0) throw UsageError("--backend: 'cuda' given, but no GPU or driver is usable; see `switchyard doctor`");
    if (o.ranks == 0) o.ranks = gpus;
    const int64_t most = probe.gpus.front().multiprocessors / ((o.ranks + gpus - 1) / gpus);
    choose_sms(o, probe.gpus.front().name, most);
  }
  if (o.ranks == 0) o.ranks = 2;
  if (o.warps == 0) o.warps = 1;
  if (o.mode == "normal" && o.order == "per_route" && o.layout == "rank_major")
    throw UsageError("--order: 'per_route' given with --layout rank_major; allowed: per_rank, or --layout expert_major");
  if (o.mode == "flat" && (o.dtype == "fp8" || o.quantize != "none"))
    throw UsageError(
        "--mode: 'flat' given with fp8 rows; its rows travel as they are: --dtype bf16, f16 or f32, --quantize none");
  if (o.mode == "ledger" && (o.dtype == "fp8" || o.quantize != "none"))
    throw UsageError(
        "--mode: 'ledger' given with fp8 rows; it returns rows as they are: --dtype bf16, f16 or f32, --quantize none");
  if (o.quantize != "none" && o.dtype == "fp8") throw UsageError("--quantize: fp8 rows are quantised already");
  return gpus;
}

}  // namespace

static int summarise_file(const TraceVerbOptions& options) {
  TraceFile file = read_trace_file(options.in);
  if (options.json)
    fmt::print("{}\n", file_summary_json(options.in, std::move(file)).dump(2));
  else
    print_file_summary(options.in, std::move(file));
  return kExitOk;
}

int run_trace(const TraceVerbOptions& asked) {
  if (!asked.in.empty()) return summarise_file(asked);
  TraceVerbOptions options = asked;
  BenchOptions& o = options.run;
  check_outputs({{"--out", options.out, kLeastJson}});
  const int gpus = fit(options);
  const Scenario s = scenario_of(o);
  TraceOptions trace_options;
  trace_options.num_blocks = static_cast<int>(gpus > 0 ? std::max(o.sms, o.combine_sms) : o.blocks);
  trace_options.num_warps = gpus > 0 ? kDeviceWarps : static_cast<int>(o.warps);
  trace_options.events_per_track = static_cast<size_t>(options.events);
  RankJob job;
  job.world = s.world;
  job.processes = o.processes;
  job.group.timeout = std::chrono::seconds(20);
  job.group.backend = gpus > 0 ? Backend::cuda : Backend::cpu;
  job.group.num_blocks = static_cast<int>(o.blocks);
  job.group.num_warps = static_cast<int>(o.warps);
  job.group.heap_bytes = traced_heap_bytes(o, s);
  if (!options.json)
    fmt::print("{}\n  {} mode on {}, {} ranks, {} tokens per rank, hidden {}, top-{} of {}, {} after {} to warm up\n",
               bold("switchyard trace"), o.mode, gpus > 0 ? "GPUs" : "the CPU", o.ranks, o.tokens, o.hidden, o.topk, o.experts,
               counted(options.calls, "call"), o.warmup);
  std::fflush(stdout);
  const std::vector<json> ranks =
      run_ranks(job, [&](Group& group, RankLink&) { return traced_rank(options, s, trace_options, gpus, group); });
  Trace trace(s.world, trace_options);
  for (const json& rank : ranks) {
    const auto& bytes = rank.at("trace").get_binary();
    trace.merge(std::as_bytes(std::span(bytes.data(), bytes.size())));
  }
  std::exception_ptr problem;  // the summary is printed all the same
  try {
    bench::write_file(options.out, trace.chrome_json());
  } catch (const std::exception&) {
    problem = std::current_exception();
  }
  if (options.json)
    fmt::print("{}\n", summary_json(options, s, trace, cost_of(ranks)).dump(2));
  else
    print_summary(options, s, trace, cost_of(ranks));
  if (problem) std::rethrow_exception(problem);
  return kExitOk;
}

}  // namespace switchyard::tool
