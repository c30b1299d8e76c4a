// SPDX-License-Identifier: Apache-2.0
// What the benches of decode-sized calls share: the CPU's clock, the slowest rank, what is left to choose.
#include <fmt/core.h>

#include <algorithm>
#include <chrono>

#include "bench_low_latency.hpp"
#include "bench_points.hpp"
#include "build_info.hpp"
#include "cli.hpp"
#include "gpu_probe.hpp"
#include "low_latency_check.hpp"

namespace switchyard::tool {

using nlohmann::json;

namespace {

class HostClock final : public LatencyClock {
 public:
  explicit HostClock(Group& group) : group_(group), device_(make_host_device()) {}
  RankDevice& device() override { return *device_; }
  std::vector<double> time(const std::function<void()>& call, int64_t warmup, int64_t n) override {
    std::vector<double> all;
    for (int64_t i = 0; i < warmup + n; ++i) {
      group_.barrier();
      const auto begin = std::chrono::steady_clock::now();
      call();
      if (i >= warmup) all.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
    return all;
  }
  json limits(size_t, size_t, int64_t, int64_t) override { return json::object(); }
  void idle(double microseconds) override {
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double, std::micro>(microseconds);
    while (std::chrono::steady_clock::now() < end) {
    }
  }
  void compute(double microseconds) override {
    if (rounds_per_us_ == 0) calibrate();
    work(static_cast<int64_t>(microseconds * rounds_per_us_));
  }

 private:
  /// Dependent multiplications and additions.
  void work(int64_t rounds) {
    float a = sink_, b = 1;
    for (int64_t i = 0; i < rounds; ++i) {
      a = a * 0.5f + b;
      b = b * 0.5f + a * 0.25f;
    }
    sink_ = b;
  }
  /// By the fastest of some turns, as ranks may disturb each other.
  void calibrate() {
    constexpr int64_t kRounds = 1 << 16;
    for (int turn = 0; turn < 8; ++turn) {
      const auto begin = std::chrono::steady_clock::now();
      work(kRounds);
      const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
      rounds_per_us_ = std::max(rounds_per_us_, static_cast<double>(kRounds) / took.count());
    }
  }

  volatile float sink_ = 1;
  double rounds_per_us_ = 0;
  Group& group_;
  std::unique_ptr<RankDevice> device_;
};

}  // namespace

std::unique_ptr<LatencyClock> make_host_clock(Group& group) { return std::make_unique<HostClock>(group); }

std::vector<double> time_entered_late(ReplayClock& clock, int self, int64_t late_us, const std::function<void()>& call,
                                      int64_t warmup, int64_t n) {
  if (late_us == 0) return clock.time(call, warmup, n);
  const auto late = static_cast<double>(late_us);
  std::vector<double> seconds = clock.time(
      [&] {
        clock.idle(self == 0 ? late : 0);  // on all: as many launches
        call();
      },
      warmup, n);
  for (double& s : seconds) s -= late * 1e-6;
  return seconds;
}

void print_late(const BenchOptions& any) {
  const bool swept = std::find(any.swept.begin(), any.swept.end(), "late-us") != any.swept.end();
  if (!swept && any.late_us == 0) return;
  fmt::print("  Rank 0 entered {} after the others; times count from then, also of ranks that waited.\n",
             swept ? "so many microseconds" : fmt::format("{} us", any.late_us));
}

RankJob latency_job(const Scenario& s, const LowLatencyConfig& config, const BenchOptions& o, size_t row_bytes) {
  RankJob job;
  job.world = s.world;
  job.processes = o.processes;
  job.group.timeout = std::chrono::seconds(10);
  job.group.num_blocks = static_cast<int>(o.blocks);
  job.group.num_warps = static_cast<int>(std::max<int64_t>(1, o.warps));
  job.group.heap_bytes = LowLatencyExchange::heap_bytes_for(config, s.world);
  if (o.backend == "cuda") {
    job.group.backend = Backend::cuda;
    job.group.heap_bytes += cuda_clock_bytes(s, o, row_bytes);
  }
  return job;
}

void check_latency_room(const BenchOptions& o, const RankJob& job, size_t rank_bytes, const bench::Machine& machine) {
  if (o.backend == "cpu") check_room(o, job.world * static_cast<double>(job.group.heap_bytes + rank_bytes), machine);
}

double most_remote_bytes(const std::vector<json>& ranks) {
  double most = 0;
  for (const json& r : ranks) most = std::max(most, r.at("remote_bytes").get<double>());
  return most;
}

std::vector<CheckResult> checks_of(const std::vector<json>& ranks) {
  std::vector<CheckResult> checks;
  for (size_t r = 0; r < ranks.size(); ++r)
    for (const json& c : ranks[r].at("checks"))
      checks.push_back({fmt::format("{} on rank {}", c[0].get<std::string>(), r), c[1].get<bool>(), c[2].get<std::string>(),
                        c[3].get<int64_t>()});
  return checks;
}

json checks_json(const std::vector<CheckResult>& checks) {
  json out = json::array();
  for (const CheckResult& c : checks)
    out.push_back({{"name", c.name}, {"passed", c.passed}, {"detail", c.detail}, {"compared", c.compared}});
  return out;
}

bench::Times times_of(const std::vector<json>& ranks, const json::json_pointer& key) {
  std::vector<std::vector<double>> all;
  for (const json& r : ranks) all.push_back(r.at(key).get<std::vector<double>>());
  return bench::summarize(bench::slowest(all));
}

int64_t MeasuredGpus::sms_of_rank(int64_t ranks) const {
  const auto gpus = static_cast<int64_t>(names.size());
  return sms / ((ranks + gpus - 1) / gpus);
}

MeasuredGpus gpus_to_measure() {
  const GpuProbe probe = probe_gpus();  // not here: ranks may be forked
  if (probe.gpus.empty()) throw UsageError("--backend: 'cuda' given, but no GPU or driver is usable; see `switchyard doctor`");
  MeasuredGpus gpus;
  for (const Gpu& g : probe.gpus) gpus.names.push_back(g.name);
  gpus.sms = probe.gpus.front().multiprocessors;
  gpus.described = {{"names", gpus.names},
                    {"sms", gpus.sms},
                    {"driver", probe.driver_version},
                    {"driver_cuda", probe.cuda_version},
                    {"runtime_cuda", cuda_runtime_version()}};
  return gpus;
}

json fit_points(const BenchOptions& options, std::vector<BenchOptions>& points) {
  json described = nullptr;
  const bench::Machine machine = bench::this_machine();
  if (options.backend == "cuda") {
    const MeasuredGpus gpus = gpus_to_measure();
    described = gpus.described;
    for (BenchOptions& o : points) {
      if (o.ranks == 0) o.ranks = static_cast<int64_t>(gpus.names.size());
      choose_sms(o, gpus.names.front(), gpus.sms_of_rank(o.ranks));
    }
  }
  for (BenchOptions& o : points) {
    if (o.ranks == 0) o.ranks = machine.usable_cores() >= 16 ? 8 : 2;
    if (o.backend != "cuda" && o.warps == 0) o.warps = std::max<int64_t>(1, machine.usable_cores() / (o.ranks * o.blocks));
    if (o.quantize != "none" && o.dtype == "fp8") throw UsageError("--quantize: fp8 rows are quantised already");
    if (o.tokens > 65535) throw UsageError(fmt::format("--tokens: {} given; low-latency mode takes at most 65535", o.tokens));
    if (o.commit.empty()) o.commit = source_commit();
  }
  return described;
}

}  // namespace switchyard::tool
