// SPDX-License-Identifier: Apache-2.0
// GPU measurements: bare kernels copy, send, read and quantize rows, as for the limits in `bench`.
#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cli/style.hpp"
#include "device/clock.hpp"
#include "doctor/measure.hpp"
#include "measure/figures.hpp"
#include "measure/primitives.hpp"
#include "run/ranks.hpp"
#include "switchyard/normal.hpp"
#include "switchyard/tuning.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

constexpr int64_t kHidden = 7168;
constexpr size_t kRowBytes = kHidden * 2;
constexpr int64_t kTokens[] = {512, 4096};
constexpr int64_t kPlaces[] = {1, 2, 4};
constexpr int64_t kMeasured = 50, kWarmup = 5;

/// Destinations of each token's row on rank `rank`: `places` locations in its own memory, or one location on each other rank.
measure::RowMoves moves_of(int rank, int world, int64_t tokens, int64_t places, bool to_others) {
  measure::RowMoves moves;
  moves.begin.push_back(0);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t p = 0; p < (to_others ? world : places); ++p) {
      if (to_others && p == rank) continue;
      moves.rank.push_back(to_others ? static_cast<int32_t>(p) : rank);
      moves.row.push_back(static_cast<int32_t>(to_others ? rank * tokens + t : p * tokens + t));
    }
    moves.begin.push_back(static_cast<int32_t>(moves.rank.size()));
  }
  return moves;
}

double median(std::vector<double> seconds) { return measure::summarize(std::move(seconds)).p50; }

double best(const LimitTimes& shapes) {
  double least = median(shapes.front());
  for (const std::vector<double>& times : shapes) least = std::min(least, median(times));
  return least;
}

struct Sms {
  int copy, sum, quantize;
};
/// Number of multiprocessors used by calls by default.
Sms default_sms(const std::string& gpu, int world) {
  const TuningValues tuned = Tuning::from_environment().find({gpu, TuningMode::normal, world, kHidden, kTokens[1]});
  const auto chosen = [](int value, int default_value) { return value > 0 ? value : default_value; };
  return {chosen(tuned.dispatch_sms, kDefaultSms), chosen(tuned.combine_sms, kDefaultSms),
          chosen(tuned.quantized_dispatch_sms, kDefaultQuantizingSms)};
}

/// Seconds taken by one rank to push and pull these rows, without the concluding meeting of all ranks.
json moved(Group& group, const Sms& sms, int64_t tokens, int64_t places, bool to_others) {
  const int world = group.size();
  const measure::RowMoves moves = moves_of(group.rank(), world, tokens, places, to_others);
  const auto rows = static_cast<size_t>(tokens) * static_cast<size_t>(std::max<int64_t>(places, world));
  const auto clock = make_gpu_clock(group, Timing::enqueued, {&moves, nullptr, tokens, rows * kRowBytes});
  const double meeting = median(clock->meeting_limit(kWarmup, kMeasured));
  const double push = best(clock->push_limits(kRowBytes, sms.copy, kWarmup, kMeasured));
  const double pull = best(clock->pull_limits(kRowBytes, sms.sum, kWarmup, kMeasured));
  group.barrier();
  return {{"push", std::max(0.0, push - meeting)}, {"pull", std::max(0.0, pull - meeting)}, {"meeting", meeting}};
}

json measured_on(Group& group, const Sms& sms) {
  json out;
  for (const int64_t tokens : kTokens)
    for (const int64_t places : kPlaces) out["own"].push_back(moved(group, sms, tokens, places, false));
  for (const int64_t tokens : kTokens)
    if (group.size() > 1) out["others"].push_back(moved(group, sms, tokens, 1, true));
  const auto clock = make_gpu_clock(group, Timing::enqueued, {});
  for (const int64_t tokens : kTokens)
    out["quantize"].push_back(median(clock->quantize_limit(tokens, kHidden, sms.quantize, kWarmup, kMeasured)));
  group.barrier();
  return out;
}

/// The slowest rank's time.
double slowest(const std::vector<json>& ranks, const std::string& at) {
  double max = 0;
  for (const json& rank : ranks) max = std::max(max, rank.at(json::json_pointer(at)).get<double>());
  return max;
}

/// Line through the times for few and for many rows (`per_token` bytes each): microseconds at zero rows, and GB/s.
struct Line {
  double start_us, gbs;
};
Line line_of(double few, double many, double per_token) {
  const double each = std::max((many - few) / static_cast<double>(kTokens[1] - kTokens[0]), 1e-12);
  return {std::max(0.0, (few - each * static_cast<double>(kTokens[0])) * 1e6), per_token / each * 1e-9};
}

/// Own memory: rows are read once and written to 1, 2 or 4 places, or the reverse.
MoveRate memory_rate(const std::vector<json>& ranks, const char* what, bool many_read) {
  double ns_per_byte[3], start = 0;
  for (size_t p = 0; p < 3; ++p) {
    const auto at = [&](size_t size) { return slowest(ranks, fmt::format("/own/{}/{}", size * 3 + p, what)); };
    const Line line = line_of(at(0), at(1), kRowBytes);
    ns_per_byte[p] = 1 / line.gbs;
    if (p == 0) start = line.start_us;
  }
  const measure::RowRate rate = measure::rate_of_line(ns_per_byte, many_read);
  return {start, rate.read_gbs, rate.write_gbs, 0, 0};
}

}  // namespace

void measure_gpu_host(HostTopology& host, int gpus, const std::string& name, Progress& progress, Methods& methods) {
  host.workers = 0;
  host.ranks = gpus;
  const Sms sms = default_sms(name, gpus);
  RankJob job;
  job.world = gpus;
  job.group.backend = Backend::cuda;
  job.group.heap_bytes = gpu_clock_bytes(static_cast<size_t>(kTokens[1]) * static_cast<size_t>(std::max(4, gpus)) * kRowBytes);
  progress.stage(fmt::format("rows on {}", counted(gpus, "GPU")));
  const std::vector<json> ranks = run_ranks(job, [&](Group& group, RankLink&) { return measured_on(group, sms); });
  progress.finish(fmt::format("on {}, {} and {} SMs", sms.copy, sms.sum, sms.quantize));
  host.copy = memory_rate(ranks, "push", false);
  host.sum = memory_rate(ranks, "pull", true);
  host.quantize_gbs = line_of(slowest(ranks, "/quantize/0"), slowest(ranks, "/quantize/1"), kRowBytes).gbs;
  host.link_us = slowest(ranks, "/own/0/meeting") * 1e6 / 2;
  // A single GPU has no links, so these placeholders avoid division by zero.
  host.link_gbs = host.copy.write_gbs;
  host.link_read_gbs = host.sum.read_gbs;
  if (gpus > 1) {
    const double bytes = static_cast<double>(kRowBytes) * (gpus - 1);
    const auto rate = [&](const char* what) {
      return line_of(slowest(ranks, fmt::format("/others/0/{}", what)), slowest(ranks, fmt::format("/others/1/{}", what)),
                     bytes)
          .gbs;
    };
    host.link_gbs = rate("push");
    host.link_read_gbs = rate("pull");
  }
  const std::string rows = fmt::format(
      "bare kernels over 512 and 4096 tokens of {} bytes, L2 cold, without the meeting of all GPUs at the end; "
      "slope and start of a line",
      kRowBytes);
  methods.push_back({"copy", fmt::format("{}; each row to 1, 2 and 4 places of the GPU's own memory, {} SMs", rows, sms.copy)});
  methods.push_back({"sum", fmt::format("{}; 1, 2 and 4 bf16 rows of its own memory, {} SMs", rows, sms.sum)});
  methods.push_back(
      {"quantize", fmt::format("the library's quantization into shared memory, {} SMs, by the same method", sms.quantize)});
  methods.push_back(
      {"link", fmt::format("{}; each row to all other GPUs at once, or one of each summed; link_us: half of a meeting", rows)});
}

}  // namespace switchyard::tool
