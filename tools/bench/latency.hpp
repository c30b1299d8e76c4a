// SPDX-License-Identifier: Apache-2.0
// Code shared by the cases with decode-sized calls (low latency and flat) on the CPU and on GPUs.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "bench/case.hpp"
#include "check/low_latency_rank.hpp"
#include "device/gpu_probe.hpp"

namespace switchyard::tool {

/// A configuration: its options (with experts and topk filled in), its scenario, and the config of its exchange.
struct LatencyPoint {
  BenchOptions options;
  Scenario scenario;
  LowLatencyConfig config;
};
/// Creates the routes of `tokens[r]` tokens on each rank r.
LatencyPoint latency_point(const BenchOptions& options, const std::vector<int64_t>& tokens);
/// The group on which a point is measured.
RankJob job_of(const LatencyPoint& point);
/// Throws UsageError if the machine's memory cannot hold `rank_bytes` of inputs and outputs for each rank.
void check_latency_memory(const LatencyPoint& point, size_t rank_bytes, const measure::Machine& machine);
/// Collective. A rank's clock. On GPUs, it also measures the limits for the point's rows.
std::unique_ptr<Clock> latency_clock(const LatencyPoint& point, Group& group);
/// Symmetric memory per rank.
size_t symmetric_bytes(const LatencyPoint& point);

/// Resolves options left on automatic, but not the multiprocessors of a layer, which chooses them for each of its kernels.
/// Returns the GPUs, or nothing on the CPU. \throws UsageError
std::optional<UsedGpus> fit_points(std::vector<BenchOptions>& points, const measure::Machine& machine);
/// Maximum of "remote_bytes" in the results of all ranks.
double max_remote_bytes(const std::vector<nlohmann::json>& ranks);

/// A measured point with decode-sized calls.
struct LatencyRun : MeasuredPoint {
  LatencyPoint point;
  double remote_bytes = 0;  ///< maximum that a rank writes
};

template <class Run>
class LatencyCase : public BenchCaseOf<Run> {
 public:
  void fit(std::vector<BenchOptions>& points) final {
    gpus_ = fit_points(points, machine_);
    backend_ = points.front().backend;
    for (const BenchOptions& o : points) check_words(o);
  }
  std::string what() const final { return fmt::format("{} --backend {}", title(), backend_); }
  void complete(nlohmann::json& document) const override {
    if (gpus_) document["gpus"] = gpus_->described();
    this->add_runs(document);
  }

 protected:
  virtual std::string title() const = 0;
  const measure::Machine machine_ = measure::this_machine();
  std::string backend_;

 private:
  std::optional<UsedGpus> gpus_;
};

}  // namespace switchyard::tool
