// SPDX-License-Identifier: Apache-2.0
#include "doctor/measure.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cli/build_info.hpp"
#include "cli/outputs.hpp"
#include "cli/style.hpp"
#include "device/clock.hpp"
#include "cli/verb.hpp"
#include "device/gpu_probe.hpp"
#include "measure/figures.hpp"
#include "measure/loopback.hpp"
#include "measure/primitives.hpp"
#include "run/names.hpp"
#include "run/ranks.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

constexpr int kMaxMeasuredRanks = 8;  ///< on a CPU; ranks beyond this share its cores in the same way
constexpr int64_t kEmptyCalls = 200, kWarmup = 20;

/// Measures calls without tokens on one rank.
json empty_calls(Group& group, const NormalConfig& config, Clock& clock) {
  NormalExchange exchange(group, config);
  void* const stream = clock.device().stream();
  const ExpertIds ids{nullptr, 0, config.topk, false};
  const ConstRows x{nullptr, 0, config.hidden, config.dtype};
  DispatchOptions dispatching;
  dispatching.stream = stream;
  CombineOptions combining;
  combining.stream = stream;
  Dispatched kept = exchange.dispatch(x, ids, nullptr, dispatching);
  const auto dispatch = clock.time([&] { (void)exchange.dispatch(x, ids, nullptr, dispatching); }, kWarmup, kEmptyCalls);
  const auto combine = clock.time([&] { exchange.combine(kept.x, kept.handle, nullptr, combining); }, kWarmup, kEmptyCalls);
  group.barrier();
  return {{"dispatch", dispatch}, {"combine", combine}};
}

RankJob empty_job(const NormalConfig& config, int world, Backend backend) {
  RankJob job;
  job.world = world;
  job.group.backend = backend;
  job.group.heap_bytes = NormalExchange::heap_bytes(config, world, backend);
  if (backend == Backend::cuda) {
    job.group.heap_bytes += gpu_clock_bytes(0);
  } else {
    job.group.num_warps = 1;  // the time to wake further workers is a separate number
  }
  return job;
}

std::vector<int> measured_ranks(int max) {
  std::vector<int> ranks;
  for (int r = 1; r < max; r *= 2) ranks.push_back(r);
  ranks.push_back(max);
  return ranks;
}

NetworkTopology measured_network(const Topology& t, const MeasureOptions& o, Progress& progress, Methods& methods) {
  progress.stage("loopback network of this machine");
  const int workers = measure::this_machine().usable_cores();
  const measure::NetworkRates rates = measure::measure_loopback(workers, static_cast<double>(o.seconds) / 4);
  progress.finish(fmt::format("{:.2f} GB/s each way, {:.1f} us", rates.gbs, rates.us));
  methods.push_back(
      {"network", fmt::format("TCP over 127.0.0.1 by the library's socket carrier: two threads that send and receive chunks of "
                              "{} at the same time, three in flight; host_gbs: {}, bytes sent by all",
                              binary_size(static_cast<double>(rates.chunk_bytes)), counted(rates.pairs, "such pair"))});
  NetworkTopology n;
  n.rails = t.host.ranks;
  n.gbs = rates.gbs;
  n.us = rates.us;
  n.post_us = rates.post_us;
  n.host_gbs = rates.host_gbs;
  return n;
}

void print(const Topology& t, const Methods& methods) {
  const HostTopology& h = t.host;
  const auto move = [](const MoveRate& rate) {
    std::string text = fmt::format("{:.1f} GB/s read, {:.1f} written", rate.read_gbs, rate.write_gbs);
    if (rate.host_read_gbs > 0) text += fmt::format("; all workers {:.1f}, {:.1f}", rate.host_read_gbs, rate.host_write_gbs);
    return text + (rate.start_us > 0 ? fmt::format(", after {:.1f} us", rate.start_us) : "");
  };
  Table table({"what", "measured"});
  table.row({"copy", move(h.copy)});
  table.row({"sum", move(h.sum)});
  table.row({"quantise", fmt::format("{:.1f} GB/s read", h.quantize_gbs)});
  table.row({"link", fmt::format("{:.1f} GB/s written, {:.1f} read, {:.2f} us", h.link_gbs, h.link_read_gbs, h.link_us)});
  for (size_t i = 0; i < h.call_ranks.size(); ++i)
    table.row({counted(h.call_ranks[i], "rank"),
               fmt::format("empty dispatch {:.1f} us, combine {:.1f} us", h.dispatch_us[i], h.combine_us[i])});
  if (h.wake_us > 0) table.row({"waking a worker", fmt::format("{:.1f} us", h.wake_us)});
  if (h.route_ns > 0)
    table.row({"planning", fmt::format("{:.1f} ns per route; records: {:.1f} ns per route to write, {:.1f} to read", h.route_ns,
                                       h.record_write_ns, h.record_read_ns)});
  table.row({"network", fmt::format("{:.2f} GB/s each way, {:.1f} us, {:.1f} us per message", t.network.gbs, t.network.us,
                                    t.network.post_us)});
  fmt::print("\n{}\n", table.text());
  for (const Method& method : methods) fmt::print("  {}: {}\n", dim(method.what), method.how);
}

}  // namespace

void measure_calls(HostTopology& host, const std::vector<int>& ranks, Backend backend, Progress& progress) {
  NormalConfig config;
  config.hidden = 7168;
  config.num_experts = 256;
  config.topk = 8;
  config.max_tokens = 1;
  for (const int world : ranks) {
    config.pool_bytes = 0;
    const MemoryRequirement need = NormalExchange::memory_required(config, world, backend);
    config.pool_bytes = 2 * (need.pool_bytes + need.private_bytes);  // a combine reads rows of an earlier dispatch
    progress.stage(fmt::format("calls that move nothing, {}", counted(world, "rank")));
    const std::vector<json> results = run_ranks(empty_job(config, world, backend), [&](Group& group, RankLink&) {
      const auto clock = backend == Backend::cuda ? make_gpu_clock(group, Timing::enqueued, {}) : make_host_clock(group);
      return empty_calls(group, config, *clock);
    });
    host.call_ranks.push_back(world);
    host.dispatch_us.push_back(measure::times_of(results, "/dispatch").p50 * 1e6);
    host.combine_us.push_back(measure::times_of(results, "/combine").p50 * 1e6);
    progress.finish(fmt::format("{:.1f} and {:.1f} us", host.dispatch_us.back(), host.combine_us.back()));
  }
}

void measure_cpu_host(HostTopology& host, double seconds, Progress& progress, Methods& methods) {
  const measure::Machine machine = measure::this_machine();
  host.workers = machine.usable_cores();
  host.ranks = std::min(kMaxRanks, std::max(kMaxMeasuredRanks, host.workers));
  progress.stage("rows, planning, flags", 100);
  measure::PrimitiveOptions options;
  options.workers = host.workers;
  options.seconds = seconds;
  const measure::HostPrimitives p =
      measure::measure_primitives(machine, options, [&](double done) { progress.update(static_cast<int64_t>(100 * done)); });
  progress.finish(fmt::format("with {}", counted(p.workers, "thread")));
  const auto rate = [](const measure::RowRates& rates) {
    return MoveRate{0, rates.worker.read_gbs, rates.worker.write_gbs, rates.all.read_gbs, rates.all.write_gbs};
  };
  host.copy = rate(p.copy);
  host.sum = rate(p.sum);
  host.quantize_gbs = p.quantize_gbs;
  host.host_quantize_gbs = p.all_quantize_gbs;
  host.link_gbs = host.link_read_gbs = p.link_gbs;
  host.link_us = p.flag_us;
  host.wake_us = p.wake_us;
  host.route_ns = p.planning.route_ns;
  host.record_write_ns = p.planning.record_write_ns;
  host.record_read_ns = p.planning.record_read_ns;
  const std::string rows =
      fmt::format("rows of {} bytes that no cache holds, by the library's row functions; one pinned thread, and all {}",
                  p.row_bytes, p.workers);
  methods.push_back({"copy", rows + "; read once and written to 1, 2 and 4 places, a line through the three times"});
  methods.push_back({"sum", rows + "; 1, 2 and 4 bf16 rows summed to one, by the same method"});
  methods.push_back({"quantize", rows + " and written to 2 places with their scales, less the time of writing"});
  methods.push_back(
      {"link",
       "rows in the cache to memory that another thread touched first, all threads at once; link_us: two threads that "
       "answer each other's flags; wake_us: a thread that slept 300 us"});
  methods.push_back({"planning",
                     "the library's planning functions, a new handle each time, and records written among rows of 7168 bytes, "
                     "less the time of the rows; "
                     "in memory that no cache holds; 4096 tokens, top-8 of 256 experts, two ranks"});
}

int run_measure(const MeasureOptions& o) {
  check_outputs({{"--measure", o.path, kMinJsonBytes}});
  const Backend backend = backend_named(o.backend);
  Topology t;
  Methods methods;
  Progress progress;
  std::vector<int> ranks;
  const measure::Machine machine = measure::this_machine();
  if (backend == Backend::cuda) {
    const UsedGpus gpus = gpus_to_use();
    measure_gpu_host(t.host, gpus.count(), gpus.name(), progress, methods);
    t.name = gpus.probe.names();
    ranks = measured_ranks(gpus.count());
  } else {
    measure_cpu_host(t.host, static_cast<double>(o.seconds), progress, methods);
    t.name = fmt::format("{}, {}", machine.cpu_model, counted(machine.usable_cores(), "core"));
    ranks = measured_ranks(t.host.ranks);
  }
  measure_calls(t.host, ranks, backend, progress);
  methods.push_back(
      {"calls",
       fmt::format(
           "a dispatch and a combine without tokens, median of {} on the slowest rank; ranks are threads of one worker each",
           kEmptyCalls)});
  t.hosts.assign(static_cast<size_t>(o.hosts), t.host.ranks);
  t.one_machine = true;
  t.has_network = true;
  t.network = measured_network(t, o, progress, methods);
  t.source = fmt::format("doctor --measure on {}, commit {}, {}", t.name, source_commit(), measure::utc_now());
  json document = to_json(t);
  for (const Method& method : methods) document["measured"][method.what] = method.how;
  measure::write_json(o.path, document);
  print(t, methods);
  fmt::print("  written to {}\n  Next: switchyard plan {}\n", o.path, o.path);
  return kExitOk;
}

}  // namespace switchyard::tool
