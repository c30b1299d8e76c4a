// SPDX-License-Identifier: Apache-2.0
// `switchyard demo`: a complete MoE layer over several ranks, with checks and a report.
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
  std::string backend = "auto";  ///< run_demo replaces it by cpu or cuda
  std::string routing = "recorded";
  int64_t ranks = 8;
  int64_t tokens = 0;  ///< per rank and step; 0: fitted to the machine, like the next two fields
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

/// Chooses sizes of the layer such that the demo takes well under a minute and at most a quarter of the memory; with the
/// backend cuda, also at most half of the GPUs' memory. \throws UsageError if requested sizes do not fit
DemoOptions fit_to_machine(const DemoOptions& options, const measure::Machine& machine, const GpuProbe& probe, int experts);

/// All data needed by a rank, identical on all ranks.
struct DemoPlan {
  DemoOptions options;
  std::shared_ptr<const RoutingSource> source;
  Scenario shape;                             ///< without routing
  std::vector<std::vector<Routing>> routing;  ///< [step][rank]; empty if a gate computes it from the rows
  int64_t max_rows = 0;                       ///< maximum of any rank in any step; bounds the pool
  GpuProbe probe;                             ///< GPUs of this machine, used or not
  bool fused = false;                         ///< the fused form also runs, on the rows of each step
  std::string why_not_fused;                  ///< on GPUs: the library's reason if it does not
  bool on_gpus() const { return backend_named(options.backend) == Backend::cuda; }
  bool gated() const { return source->is_gate(); }
  /// Order of combine's sum: that of the fused form if it runs, because its results are compared bit by bit with those of the
  /// separate calls.
  CombineOrder order() const { return fused ? CombineOrder::per_route : CombineOrder::per_rank; }
};
DemoPlan make_demo_plan(const DemoOptions& options, std::shared_ptr<const RoutingSource> source, const GpuProbe& probe = {});

/// Seconds for one step on one rank. On a GPU, each measurement lasts until the enqueued work has finished.
struct StepTimes {
  double gate = 0, dispatch = 0, expert = 0, combine = 0;
  double fused = 0;  ///< the whole layer in one call
};
/// Results from one step on one rank.
struct StepResult {
  StepTimes times;
  Routing routing;
  int64_t rows = 0;  ///< received, padding included
  uint64_t remote_bytes = 0;
  std::vector<uint16_t> out;  ///< bf16 [T, H]
};
struct DemoOutcome {
  std::vector<std::vector<StepResult>> steps;  ///< [step][rank]
  std::vector<CheckResult> checks;             ///< all checks except those against the reference, merged over ranks and steps
  Trace trace;
  std::vector<LayerTimes> layers;  ///< fused, last step's rows, recorded separately: ranks ascending; empty if incomplete
  std::string fused_implementation;
  std::string expert_implementation;
  size_t heap_bytes = 0;
  double seconds = 0;  ///< from the start of the ranks to the end of the last step
};
/// Starts the ranks, and runs all steps and the exact checks of the exchange.
DemoOutcome run_demo_ranks(const DemoPlan& plan, Progress& progress);
/// Maximum relative error over all tokens, compared with the single-rank reference, for each step.
std::vector<double> compare_with_reference(const DemoPlan& plan, const DemoOutcome& outcome, int threads, Progress& progress);

/// All data for the report.
nlohmann::json demo_report(const DemoPlan& plan, const DemoOutcome& outcome, const std::vector<double>& errors,
                           const measure::Machine& machine, bool passed);

/// \returns the exit status
int run_demo(const DemoOptions& options);

}  // namespace switchyard::tool
