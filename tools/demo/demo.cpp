// SPDX-License-Identifier: Apache-2.0
#include "demo/demo.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <filesystem>

#include "cli/build_info.hpp"
#include "cli/outputs.hpp"
#include "cli/style.hpp"
#include "cli/verb.hpp"
#include "device/rank_device.hpp"
#include "layer/moe_reference.hpp"
#include "measure/result_file.hpp"
#include "report/demo_page.hpp"
#include "run/in_child.hpp"

namespace switchyard::tool {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

/// Sizes by minimum number of cores, smallest first.
struct Size {
  int min_cores;
  int64_t hidden, intermediate, tokens;
};
constexpr Size kSizes[] = {{1, 256, 64, 128},   {1, 512, 128, 256},    {2, 1024, 256, 256},
                           {8, 2048, 512, 256}, {24, 4096, 1024, 512}, {64, 7168, 2048, 512}};

/// Memory for the whole demo: packed weights on all ranks, rows, and the reference's data.
double bytes_needed(const Size& s, int64_t ranks, int64_t experts, int64_t topk) {
  const auto h = static_cast<double>(s.hidden);
  const double weights = static_cast<double>(experts) * 3 * h * static_cast<double>(s.intermediate) * 2;
  const double rows = static_cast<double>(ranks * s.tokens) * h * 2 * (2.0 * static_cast<double>(topk) * 1.5 + 4);
  const double program = (48.0 + 2.0 * static_cast<double>(ranks)) * (1 << 20);  // code, threads, trace, report (measured)
  return weights * 1.1 + rows + program;
}

/// Memory on all GPUs: weights and, on each rank, space for any possible routing (received rows, returned rows, and the rows
/// between the two products of the experts). The fused form needs the same amount again, plus space for its tokens and returned
/// rows.
double gpu_bytes_needed(const Size& s, int64_t ranks, int64_t experts, int64_t topk) {
  const auto h = static_cast<double>(s.hidden), width = static_cast<double>(s.intermediate);
  const double rows = static_cast<double>(ranks * s.tokens * topk) + static_cast<double>(experts);
  const double inbox = static_cast<double>(s.tokens * (1 + topk)) * h * 2;
  return static_cast<double>(experts) * 3 * h * width * 2 +
         static_cast<double>(ranks) * (2 * rows * (2 * h + width) * 2 + inbox + (64 << 20));
}

/// Whether a group of all GPUs is expected to work, judged by the driver, the kernel architecture, and peer access between
/// every pair.
bool fits(const GpuProbe& probe) {
  const auto hopper = [](const Gpu& g) { return g.compute_major == 9; };
  bool ok =
      probe.cuda_version / 1000 >= cuda_runtime_version() / 1000 && std::all_of(probe.gpus.begin(), probe.gpus.end(), hopper);
  for (size_t a = 0; a < probe.gpus.size(); ++a)
    for (size_t b = 0; b < probe.gpus.size(); ++b) ok = ok && (a == b || probe.peer_access[a][b]);
  return ok;
}

/// auto selects GPUs if this build supports them and the machine has one.
Backend choose_backend(const DemoOptions& o, const GpuProbe& probe) {
  const bool usable = built_with_cuda() && !probe.gpus.empty();
  const bool direct = staging_named(o.staging) == Staging::direct;
  if (o.backend == "auto") return usable && fits(probe) && direct ? Backend::cuda : Backend::cpu;
  if (backend_named(o.backend) == Backend::cpu) return Backend::cpu;
  if (!built_with_cuda()) throw UsageError(no_cuda_text());
  if (!usable)
    throw UsageError(fmt::format("--backend: 'cuda' given, but no GPU can be used ({}); allowed: cpu, auto",
                                 probe.problem.empty() ? "the driver finds none" : probe.problem));
  if (!direct) throw UsageError("--staging: 'ring' given; allowed with --backend cuda: direct");
  return Backend::cuda;
}

void say_backend(const DemoPlan& plan) {
  const auto gpus = static_cast<int64_t>(plan.probe.gpus.size());
  if (plan.on_gpus()) {
    fmt::print("  backend   cuda: {}{}\n", plan.probe.names(),
               plan.options.ranks > gpus ? fmt::format(", shared by {} ranks (for tests and demos)", plan.options.ranks) : "");
    if (plan.gated()) fmt::print("            the gate runs on the host\n");
    return;
  }
  fmt::print("  backend   cpu{}\n",
             gpus == 0           ? ": no GPU is needed"
             : built_with_cuda() ? fmt::format(" ({} present, not used)", plan.probe.names())
                                 : fmt::format(": this build has no GPU backend ({} present, not used)", plan.probe.names()));
}

void print_setup(const DemoPlan& plan, const measure::Machine& machine, const DemoOptions& asked) {
  const DemoOptions& o = plan.options;
  const bool fitted = asked.hidden == 0 || asked.intermediate == 0 || asked.tokens == 0;
  fmt::print("  layer     {} experts, top-{}, hidden {}, intermediate {}, bf16{}\n", plan.shape.experts, plan.shape.topk,
             o.hidden, o.intermediate,
             fitted ? fmt::format(" (size fitted to {} and {} of memory)", counted(machine.usable_cores(), "core"),
                                  binary_size(static_cast<double>(machine.memory_available)))
                    : "");
  fmt::print("  ranks     {}{}, {} tokens per rank and step, {}\n", counted(o.ranks, o.processes ? "process" : "thread"),
             o.blocks * o.warps > 1 ? fmt::format(" x {} workers", o.blocks * o.warps) : "", o.tokens,
             counted(o.steps, "step"));
  fmt::print("  routing   {}\n\n", plan.source->description());
  std::fflush(stdout);
}

void print_times(const DemoPlan& plan, const DemoOutcome& outcome) {
  const auto of_phase = [&](double StepTimes::*phase) {
    std::vector<std::vector<double>> per_rank(static_cast<size_t>(plan.options.ranks));
    for (const auto& step : outcome.steps) {
      for (size_t r = 0; r < step.size(); ++r) per_rank[r].push_back(step[r].times.*phase);
    }
    return measure::summarize(measure::slowest(per_rank));
  };
  fmt::print("\n  slowest rank, median of {}\n", counted(plan.options.steps, "step"));
  if (plan.gated()) fmt::print("    gate        {:>10}\n", duration(of_phase(&StepTimes::gate).p50));
  fmt::print("    dispatch    {:>10}\n    expert MLP  {:>10}   {}\n    combine     {:>10}\n",
             duration(of_phase(&StepTimes::dispatch).p50), duration(of_phase(&StepTimes::expert).p50),
             dim(outcome.expert_implementation), duration(of_phase(&StepTimes::combine).p50));
  if (plan.fused)
    fmt::print("    fused       {:>10}   {}\n", duration(of_phase(&StepTimes::fused).p50),
               dim("the whole layer in one call: " + outcome.fused_implementation));
  if (!plan.why_not_fused.empty()) fmt::print("    fused       not run: {}\n", plan.why_not_fused);
  fmt::print("  A demo checks results; to compare with the limits of this machine: switchyard bench{}\n",
             plan.on_gpus() ? " --backend cuda" : "");
  if (!outcome.layers.empty()) fmt::print("\n{}", layer_times_text(outcome.layers));
}

void print_check(bool passed, const std::string& text) { fmt::print("  {}  {}\n", passed ? green("PASS") : red("FAIL"), text); }

bool print_checks(const DemoOutcome& outcome, const std::vector<double>& errors) {
  bool passed = true;
  fmt::print("\n");
  for (const CheckResult& c : outcome.checks) {
    passed = passed && c.passed;
    print_check(c.passed, fmt::format("{}: {} values compared", c.name, grouped(c.compared)));
    if (!c.passed) fmt::print("        {}\n", c.detail);
  }
  const double worst = *std::max_element(errors.begin(), errors.end());
  const bool close = worst <= kLayerTolerance;
  print_check(
      close,
      fmt::format(
          "whole layer against a single-rank reference without exchange: largest error of a token {:.2f} % (at most {:.2f} %)",
          100 * worst, 100 * kLayerTolerance));
  return passed && close;
}

std::string report_in(const std::string& folder) { return (fs::path(folder) / "report.html").string(); }
std::string trace_in(const std::string& folder) { return (fs::path(folder) / "trace.json").string(); }

void make_folder(const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (error) throw UsageError(fmt::format("--out: cannot make the folder '{}': {}", path, error.message()));
  check_outputs({{"--out", report_in(path), kMinReportBytes}, {"--out", trace_in(path), kMinJsonBytes}});
}

}  // namespace

DemoOptions fit_to_machine(const DemoOptions& options, const measure::Machine& machine, const GpuProbe& probe, int experts) {
  DemoOptions o = options;
  const int64_t topk = o.topk > 0 ? o.topk : 8;
  const double limit = static_cast<double>(machine.memory_available) / 4;
  const bool on_gpus = backend_named(o.backend) == Backend::cuda;
  uint64_t gpu_memory = 0;
  for (const Gpu& gpu : probe.gpus) gpu_memory += gpu.memory_bytes;
  Size chosen = kSizes[0];
  for (const Size& s : kSizes) {
    const bool fits_gpus = gpu_bytes_needed(s, o.ranks, experts, topk) <= static_cast<double>(gpu_memory) / 2;
    const bool fits_host = bytes_needed(s, o.ranks, experts, topk) <= limit;
    if (machine.usable_cores() >= s.min_cores && fits_host && (!on_gpus || fits_gpus)) chosen = s;
  }
  if (o.hidden == 0) o.hidden = chosen.hidden;
  if (o.intermediate == 0) o.intermediate = options.hidden > 0 ? std::max<int64_t>(16, o.hidden / 32 * 8) : chosen.intermediate;
  if (o.tokens == 0) o.tokens = chosen.tokens;
  const std::string sizes =
      fmt::format("--hidden {} --intermediate {} --tokens {} --ranks {}", o.hidden, o.intermediate, o.tokens, o.ranks);
  const Size size{0, o.hidden, o.intermediate, o.tokens};
  require_memory(sizes, bytes_needed(size, o.ranks, experts, topk), machine.memory_available);
  if (on_gpus) require_memory(sizes + ", on GPUs", gpu_bytes_needed(size, o.ranks, experts, topk), gpu_memory);
  return o;
}

std::vector<double> compare_with_reference(const DemoPlan& plan, const DemoOutcome& outcome, int threads, Progress& progress) {
  const DemoOptions& o = plan.options;
  const ExpertWeights weights(plan.shape.seed, o.hidden, o.intermediate);
  progress.stage("single-rank reference", o.steps * plan.shape.experts);
  std::vector<double> errors;
  for (size_t step = 0; step < outcome.steps.size(); ++step) {
    std::vector<RowArray> x;
    ReferenceInput input;
    for (int r = 0; r < plan.shape.world; ++r) {
      x.push_back(token_rows(plan.shape.seed, step, r, o.tokens, o.hidden, DType::bf16, ScaleKind::none));
      input.routing.push_back(outcome.steps[step][static_cast<size_t>(r)].routing);
    }
    for (const RowArray& rows : x) input.rows.push_back(reinterpret_cast<const uint16_t*>(rows.row(0)));
    const int64_t before = static_cast<int64_t>(step) * plan.shape.experts;
    const auto expected =
        moe_reference(input, weights, o.hidden, o.intermediate, threads, [&](int64_t n) { progress.update(before + n); });
    double worst = 0;
    for (size_t r = 0; r < expected.size(); ++r) {
      for (int64_t t = 0; t < o.tokens; ++t) {
        const auto row = static_cast<size_t>(t * o.hidden);
        worst = std::max(worst, row_error(&outcome.steps[step][r].out[row], &expected[r][row], o.hidden));
      }
    }
    errors.push_back(worst);
  }
  progress.finish();
  return errors;
}

int run_demo(const DemoOptions& asked) {
  const GpuProbe probe = probe_gpus();
  DemoOptions options = asked;
  options.backend = to_string(choose_backend(asked, probe));
  if (options.ranks == 0) options.ranks = 8;
  const measure::Machine machine = measure::this_machine();
  RoutingGeometry geometry{asked.experts, asked.topk, static_cast<int>(options.ranks), static_cast<uint64_t>(asked.seed)};
  const auto source = std::make_shared<RoutingSource>("--routing", asked.routing, geometry);
  options.topk = source->topk();
  options = fit_to_machine(options, machine, probe, source->experts());
  if (options.hidden % 8 != 0)
    throw UsageError(fmt::format("--hidden: {} given; allowed: a multiple of 8 (rows of 16 bytes)", options.hidden));
  if (options.intermediate % 8 != 0 && backend_named(options.backend) == Backend::cuda)
    throw UsageError(
        fmt::format("--intermediate: {} given; allowed with --backend cuda: a multiple of 8", options.intermediate));
  make_folder(options.out);

  fmt::print("{}\n  machine   {}, {}, {}\n", bold("switchyard demo"), machine.cpu_model,
             counted(machine.usable_cores(), "core"), machine.os);
  const DemoPlan plan = make_demo_plan(options, source, probe);
  say_backend(plan);
  print_setup(plan, machine, asked);

  Progress progress;
  const DemoOutcome outcome = run_demo_ranks(plan, progress);
  const std::vector<double> errors = compare_with_reference(plan, outcome, machine.usable_cores(), progress);

  print_times(plan, outcome);
  const bool passed = print_checks(outcome, errors);
  const std::string html = report_in(options.out), trace = trace_in(options.out);
  measure::write_file(trace, outcome.trace.chrome_json());
  write_report(html, demo_report(plan, outcome, errors, machine, passed));
  fmt::print(
      "\n  report    {}   (open it in a browser)\n  trace     {}   (open it at https://ui.perfetto.dev or "
      "chrome://tracing)\n\n{}\n",
      fs::absolute(html).lexically_normal().string(), fs::absolute(trace).lexically_normal().string(),
      passed ? green("PASS") : red("FAIL"));
  return passed ? kExitOk : kExitCheckFailed;
}

}  // namespace switchyard::tool
