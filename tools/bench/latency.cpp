// SPDX-License-Identifier: Apache-2.0
#include "bench/latency.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>

#include "check/row_moves.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

/// Maximum number of bytes delivered to a rank by the limits.
size_t limit_bytes(const LatencyPoint& p) {
  size_t rows = 0;
  for (int r = 0; r < p.scenario.world; ++r) rows += static_cast<size_t>(p.scenario.tokens(r));
  return rows * returned_row_bytes(p.options);
}

}  // namespace

LatencyPoint latency_point(const BenchOptions& options, const std::vector<int64_t>& tokens) {
  const RoutingSource source = routing_source(options);
  LatencyPoint p;
  p.options = options;
  p.scenario = shape_of(options, source);
  for (int r = 0; r < p.scenario.world; ++r)
    p.scenario.routing.push_back(std::move(source.batches(r, tokens[static_cast<size_t>(r)], 1).front()));
  p.options.experts = source.experts();
  p.options.topk = source.topk();
  p.config = low_latency_config(options, p.scenario);
  return p;
}

RankJob job_of(const LatencyPoint& p) {
  const BenchOptions& o = p.options;
  RankJob job;
  job.world = p.scenario.world;
  job.processes = o.processes;
  job.group.timeout = std::chrono::seconds(10);
  job.group.num_blocks = static_cast<int>(o.blocks);
  job.group.num_warps = static_cast<int>(std::max<int64_t>(1, o.warps));
  job.group.heap_bytes = LowLatencyExchange::heap_bytes(p.config, p.scenario.world);
  if (on_gpus(o)) {
    job.group.backend = Backend::cuda;
    job.group.heap_bytes += gpu_clock_bytes(limit_bytes(p));
  }
  return job;
}

void check_latency_memory(const LatencyPoint& p, size_t rank_bytes, const measure::Machine& machine) {
  const RankJob job = job_of(p);
  if (!on_gpus(p.options))
    check_point_memory(p.options, job.world * static_cast<double>(job.group.heap_bytes + rank_bytes), machine);
}

std::unique_ptr<Clock> latency_clock(const LatencyPoint& p, Group& group) {
  if (!on_gpus(p.options)) return make_host_clock(group);
  const PlannedMoves planned = plan_moves(p.scenario);
  const auto rank = static_cast<size_t>(group.rank());
  return make_gpu_clock(group, Timing::replayed,
                        {&planned.moves[rank], nullptr, p.scenario.tokens(group.rank()), limit_bytes(p)});
}

size_t symmetric_bytes(const LatencyPoint& p) {
  return LowLatencyExchange::memory_required(p.config, p.scenario.world).total();
}

std::optional<UsedGpus> fit_points(std::vector<BenchOptions>& points, const measure::Machine& machine) {
  std::optional<UsedGpus> gpus;
  if (on_gpus(points.front())) gpus = gpus_to_use();  // queries the driver in a child process: ranks may be forked
  for (BenchOptions& o : points) {
    if (gpus) {
      if (o.ranks == 0) o.ranks = gpus->count();
      if (!mode_named(o.mode).has_experts) choose_sms(o, gpus->name(), gpus->sms_of_rank(o.ranks));
      continue;
    }
    if (o.ranks == 0) o.ranks = default_ranks(machine);
    if (o.warps == 0) o.warps = default_warps(machine, o.ranks * o.blocks);
  }
  return gpus;
}

double max_remote_bytes(const std::vector<json>& ranks) {
  double max = 0;
  for (const json& r : ranks) max = std::max(max, r.at("remote_bytes").get<double>());
  return max;
}

}  // namespace switchyard::tool
