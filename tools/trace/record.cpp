// SPDX-License-Identifier: Apache-2.0
#include "trace/record.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>

#include "cli/outputs.hpp"
#include "cli/style.hpp"
#include "cli/verb.hpp"
#include "device/gpu_probe.hpp"
#include "measure/result_file.hpp"
#include "run/ranks.hpp"
#include "switchyard/trace.hpp"
#include "trace/calls.hpp"
#include "trace/summary.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

Scenario scenario_of(BenchOptions& o) {
  const RoutingSource source = routing_source(o);
  Scenario s = shape_of(o, source);
  s.routing = source.all_ranks(o.tokens);
  o.experts = s.experts;
  o.topk = s.topk;
  return s;
}

/// Collective. Microseconds per call, averaged over `n` calls on this rank.
double time_calls(TracedCalls& calls, int64_t n, Group& group, RankDevice& device) {
  group.barrier();
  const auto begin = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < n; ++i) calls.call();
  device.wait();
  const std::chrono::duration<double, std::micro> spent = std::chrono::steady_clock::now() - begin;
  return spent.count() / static_cast<double>(n);
}

/// Collective. Alternates rounds of the same calls without and with recording.
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
  const std::shared_ptr<RankDevice> given = rank_device(group.rank(), gpus, trace_mode(o).device_bytes(o, s));
  RankDevice& device = *given;
  group.barrier();
  Trace trace(s.world, trace_options);
  json cost;
  {
    const std::unique_ptr<TracedCalls> calls = trace_mode(o).make(o, s, group, device);
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

/// Cost of recording, computed from each round's slowest rank.
TraceCost cost_of(const std::vector<json>& ranks) {
  const auto slowest = [&](const char* which) {
    std::vector<double> max;
    for (const json& rank : ranks) {
      const auto mine = rank.at("cost").at(which).get<std::vector<double>>();
      max.resize(mine.size());
      for (size_t i = 0; i < mine.size(); ++i) max[i] = std::max(max[i], mine[i]);
    }
    return max;
  };
  return {slowest("plain"), slowest("traced")};
}

/// A run: its scenario, its number of GPUs (0 on the CPU), and the number of blocks that record.
struct Fitted {
  Scenario scenario;
  int gpus = 0;
  int64_t blocks = 0;
};

/// Resolves options left on automatic.
Fitted fit(TraceVerbOptions& options) {
  BenchOptions& o = options.run;
  const bool on_gpus = backend_named(o.backend) == Backend::cuda, whole_layer = mode_named(o.mode).has_experts;
  std::optional<UsedGpus> used;
  if (on_gpus) {
    used = gpus_to_use();
    options.gpus = fmt::format("{}, driver {}", used->probe.names(), used->probe.driver_version);
    if (o.ranks == 0) o.ranks = used->count();
  }
  if (o.ranks == 0) o.ranks = 2;
  if (o.warps == 0) o.warps = 1;
  if (used && !whole_layer) choose_sms(o, used->name(), used->sms_of_rank(o.ranks));
  check_words(o);
  Fitted fitted{scenario_of(o), used ? used->count() : 0, used ? std::max(o.sms, o.combine_sms) : o.blocks};
  if (whole_layer) settle_layer(o, fitted.scenario);
  if (used && fitted.blocks == 0) fitted.blocks = used->sms_of_rank(o.ranks);  // a layer chooses for each of its kernels
  return fitted;
}

std::string form_text(const BenchOptions& o) {
  return mode_named(o.mode).has_experts ? fmt::format(", {} form, intermediate {},", o.form, o.intermediate) : "";
}

}  // namespace

static int summarise_file(const TraceVerbOptions& options) {
  TraceFile file = read_trace_file(options.in);
  if (options.json)
    print_json(file_summary_json(options.in, std::move(file)));
  else
    print_file_summary(options.in, std::move(file));
  return kExitOk;
}

int run_trace(const TraceVerbOptions& asked) {
  if (!asked.in.empty()) return summarise_file(asked);
  TraceVerbOptions options = asked;
  BenchOptions& o = options.run;
  check_outputs({{"--out", options.out, kMinJsonBytes}});
  const Fitted fitted = fit(options);
  const Scenario& s = fitted.scenario;
  const int gpus = fitted.gpus;
  TraceOptions trace_options;
  trace_options.num_blocks = static_cast<int>(fitted.blocks);
  trace_options.num_warps = gpus > 0 ? kMaxDeviceWarps : static_cast<int>(o.warps);
  trace_options.events_per_track = static_cast<size_t>(options.events);
  RankJob job;
  job.world = s.world;
  job.processes = o.processes;
  job.group.timeout = std::chrono::seconds(20);
  job.group.backend = gpus > 0 ? Backend::cuda : Backend::cpu;
  job.group.num_blocks = static_cast<int>(o.blocks);
  job.group.num_warps = static_cast<int>(o.warps);
  job.group.heap_bytes = trace_mode(o).heap_bytes(o, s);
  if (!options.json)
    fmt::print("{}\n  {} mode{} on {}, {} ranks, {} tokens per rank, hidden {}, top-{} of {}, {} after {} to warm up\n",
               bold("switchyard trace"), o.mode, form_text(o), gpus > 0 ? "GPUs" : "the CPU", o.ranks, o.tokens, o.hidden,
               o.topk, o.experts, counted(options.calls, "call"), o.warmup);
  std::fflush(stdout);
  const std::vector<json> ranks =
      run_ranks(job, [&](Group& group, RankLink&) { return traced_rank(options, s, trace_options, gpus, group); });
  Trace trace(s.world, trace_options);
  for (const json& rank : ranks) {
    const auto& bytes = rank.at("trace").get_binary();
    trace.merge(std::as_bytes(std::span(bytes.data(), bytes.size())));
  }
  std::exception_ptr problem;  // rethrown after the summary is printed
  try {
    measure::write_file(options.out, trace.chrome_json());
  } catch (const std::exception&) {
    problem = std::current_exception();
  }
  if (options.json)
    print_json(summary_json(options, s, trace, cost_of(ranks)));
  else
    print_summary(options, s, trace, cost_of(ranks));
  if (problem) std::rethrow_exception(problem);
  return kExitOk;
}

}  // namespace switchyard::tool
