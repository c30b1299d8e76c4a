// SPDX-License-Identifier: Apache-2.0
// `switchyard demo`: a whole MoE layer over several ranks, checked, with a report to look at.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "check/check_result.hpp"
#include "check/scenario.hpp"
#include "cli/progress.hpp"
#include "cli/verb.hpp"
#include "device/gpu_probe.hpp"
#include "layer/layer_times.hpp"
#include "measure/figures.hpp"
#include "run/names.hpp"
#include "run/routing_source.hpp"
#include "switchyard/trace.hpp"

namespace switchyard::tool {

extern const Verb kDemoVerb;

struct DemoOptions {
  std::string backend = "auto";  ///< run_demo makes it cpu or cuda
  std::string routing = "recorded";
  int64_t ranks = 8;
  int64_t tokens = 0;  ///< per rank and step; 0: fitted to the machine, as are the next two
  int64_t hidden = 0;
  int64_t intermediate = 0;
  int64_t steps = 4;
  int64_t experts = 0;
  int64_t topk = 0;
  int64_t blocks = 1;
  int64_t warps = 1;
  int64_t alignment = 16;
  int64_t seed = 1;
  std::string staging = "direct";
  bool processes = false;
  std::string out = "switchyard-report";
};

/// Sizes of the layer, chosen so that the demo runs in well under a minute and takes at most a quarter of the memory, and with
/// the backend cuda at most half of that of the GPUs. \throws UsageError if the sizes asked for do not fit.
DemoOptions fit_to_machine(const DemoOptions& options, const measure::Machine& machine, const GpuProbe& probe, int experts);

/// Everything that a rank needs to know; equal on all ranks.
struct DemoPlan {
  DemoOptions options;
  std::shared_ptr<const RoutingSource> source;
  Scenario shape;                             ///< without routing
  std::vector<std::vector<Routing>> routing;  ///< [step][rank]; empty if a gate makes it from the rows
  int64_t most_rows = 0;                      ///< of any rank in any step; bounds the pool
  GpuProbe probe;                             ///< GPUs of this machine, used or not
  bool fused = false;                         ///< the fused form runs besides, on the rows of each step
  std::string why_not_fused;                  ///< on GPUs: why it does not, as the library says
  bool on_gpus() const { return backend_named(options.backend) == Backend::cuda; }
  bool gated() const { return source->is_gate(); }
  /// Of combine's sum: that of the fused form where it runs, whose bits are compared with those of separate calls.
  CombineOrder order() const { return fused ? CombineOrder::per_route : CombineOrder::per_rank; }
};
DemoPlan make_demo_plan(const DemoOptions& options, std::shared_ptr<const RoutingSource> source, const GpuProbe& probe = {});

/// Seconds of one step on one rank, each on a GPU to the end of what it enqueued.
struct StepTimes {
  double gate = 0, dispatch = 0, expert = 0, combine = 0;
  double fused = 0;  ///< the whole layer in one call
};
/// What one step did on one rank.
struct StepResult {
  StepTimes times;
  Routing routing;
  int64_t rows = 0;  ///< received, padding included
  uint64_t remote_bytes = 0;
  std::vector<uint16_t> out;  ///< bf16 [T, H]
};
struct DemoOutcome {
  std::vector<std::vector<StepResult>> steps;  ///< [step][rank]
  std::vector<CheckResult> checks;             ///< but for the reference: all ranks and steps together
  Trace trace;
  std::vector<LayerTimes> layers;  ///< fused, of the last step's rows, recorded apart: ranks ascending; empty if incomplete
  std::string fused_implementation;
  std::string expert_implementation;
  size_t heap_bytes = 0;
  double seconds = 0;  ///< start of the ranks to end of the last step
};
/// Starts the ranks, runs all steps and the exact checks of the exchange.
DemoOutcome run_demo_ranks(const DemoPlan& plan, Progress& progress);
/// Largest relative error of any token against the single-rank reference, by step.
std::vector<double> compare_with_reference(const DemoPlan& plan, const DemoOutcome& outcome, int threads, Progress& progress);

/// Everything that the report shows.
nlohmann::json demo_report(const DemoPlan& plan, const DemoOutcome& outcome, const std::vector<double>& errors,
                           const measure::Machine& machine, bool passed);

/// \returns the exit status
int run_demo(const DemoOptions& options);

}  // namespace switchyard::tool
