// SPDX-License-Identifier: Apache-2.0
#include "verify/verify.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "cli/build_info.hpp"
#include "cli/outputs.hpp"
#include "cli/progress.hpp"
#include "cli/style.hpp"
#include "cli/verb.hpp"
#include "device/gpu_probe.hpp"
#include "device/rank_device.hpp"
#include "layer/layer_rank.hpp"
#include "measure/machine.hpp"
#include "run/modes.hpp"
#include "run/names.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// Totals over all cases, by check name.
struct Tally {
  int64_t skipped = 0;
  int64_t passed = 0;
  int64_t failed = 0;
  int64_t compared = 0;
};

/// Replaces every case with one case per value.
template <class T, class Set>
void vary(std::vector<VerifyCase>& cases, const std::vector<T>& values, Set set) {
  std::vector<VerifyCase> next;
  for (const VerifyCase& c : cases) {
    for (const T& value : values) {
      next.push_back(c);
      set(next.back(), value);
    }
  }
  cases = std::move(next);
}

std::string label(const VerifyCase& c) {
  const std::string workers = c.gpus == 0 ? fmt::format("{}x{}", c.blocks, c.warps)
                              : c.sms > 0 ? fmt::format("{}gpu {}sm", c.gpus, c.sms)
                                          : fmt::format("{}gpu", c.gpus);
  const std::string how = mode_named(c.mode).has_layouts ? fmt::format("{} {} {}", c.mode, c.layout, c.staging) : c.mode;
  return fmt::format("{} {}{} {} W{} {} T{} H{}", how, c.dtype,
                     scales_named(c.quantize) == ScaleKind::none ? "" : "->fp8/" + c.quantize, c.routing, c.ranks, workers,
                     c.tokens, c.hidden);
}

json describe(const VerifyCase& c) {
  json out{{"mode", c.mode},       {"layout", c.layout}, {"dtype", c.dtype},   {"quantize", c.quantize}, {"staging", c.staging},
           {"routing", c.routing}, {"ranks", c.ranks},   {"blocks", c.blocks}, {"warps", c.warps},       {"tokens", c.tokens},
           {"hidden", c.hidden},   {"orders", c.orders}, {"seed", c.seed},     {"gpus", c.gpus},         {"sms", c.sms}};
  if (mode_named(c.mode).has_experts) out["intermediate"] = c.intermediate;
  return out;
}

void print_case(const VerifyCase& c, const std::vector<CheckResult>& checks, double seconds, bool verbose) {
  const bool passed = all_passed(checks);
  const auto made = std::count_if(checks.begin(), checks.end(), [](const CheckResult& r) { return !r.skipped; });
  fmt::print("{}  {:<72} {:>3} checks {:>9}\n", passed ? green("PASS") : red("FAIL"), label(c), made, duration(seconds));
  for (const CheckResult& r : checks) {
    if (verbose && r.skipped)
      fmt::print("      {}  {}: {}\n", yellow("SKIP"), r.name, r.detail);
    else if (verbose || !r.passed)
      fmt::print("      {}  {:<46} {:>12} compared\n", r.passed ? green("PASS") : red("FAIL"), r.name, grouped(r.compared));
    if (!r.passed) fmt::print("            {}\n", r.detail);
  }
  std::fflush(stdout);
}

/// Results so far.
class Report {
 public:
  explicit Report(const VerifyOptions& options) : options_(options), begin_(std::chrono::steady_clock::now()) {}

  void add(const VerifyCase& c, const std::vector<CheckResult>& checks, double seconds) {
    const bool passed = all_passed(checks);
    for (const CheckResult& r : checks) {
      if (tallies_.find(r.name) == tallies_.end()) order_.push_back(r.name);
      Tally& t = tallies_[r.name];
      (r.skipped ? t.skipped : r.passed ? t.passed : t.failed) += 1;
      if (r.skipped) reasons_.insert({r.name, r.detail});
      t.compared += r.compared;
    }
    cases_.push_back(
        {{"case", describe(c)}, {"seconds", seconds}, {"problem", ""}, {"checks", checks_json(checks)}, {"passed", passed}});
    failed_ += passed ? 0 : 1;
    if (!options_.json) print_case(c, checks, seconds, options_.verbose);
  }

  /// Adds a case that could not be run.
  void add(const VerifyCase& c, const Error& error) {
    cases_.push_back(
        {{"case", describe(c)}, {"seconds", 0}, {"problem", error.what()}, {"checks", json::array()}, {"passed", false}});
    if (problem_.empty()) problem_ = error.what();
    ++not_run_;
    if (options_.json) return;
    fmt::print("{}  {}\n      {}\n", red("ERROR"), label(c), error.what());
    std::fflush(stdout);
  }

  void print() const {
    if (options_.json) return print_report();
    int64_t checks = 0, compared = 0;
    Table table({"check", "passed", "failed", "compared"});
    for (const std::string& name : order_) {
      const Tally& t = tallies_.at(name);
      if (t.passed + t.failed == 0) continue;
      table.row({t.failed > 0 ? red(name) : name, grouped(t.passed), grouped(t.failed), grouped(t.compared)});
      checks += t.passed + t.failed;
      compared += t.compared;
    }
    fmt::print("\n{}", table.text());
    for (const auto& [name, why] : reasons_)
      fmt::print("  {} {} ({}): {}\n", yellow("skipped"), name, counted(tallies_.at(name).skipped, "case"), why);
    fmt::print("\n{}: {} cases, {} checks, {} values compared, {} cases failed{}, {}\n",
               failed_ > 0    ? red("FAIL")
               : not_run_ > 0 ? red("ERROR")
                              : green("PASS"),
               grouped(static_cast<int64_t>(cases_.size())), grouped(checks), grouped(compared), grouped(failed_),
               not_run_ > 0 ? fmt::format(", {} could not run", grouped(not_run_)) : "", duration(seconds_since(begin_)));
  }

  /// Ends the run. \returns the exit status
  int end() const {
    print();
    if (options_.json && not_run_ > 0)
      fmt::print(stderr, "switchyard: {} could not run: {}\n", counted(not_run_, "case"), problem_);
    if (failed_ > 0) return kExitCheckFailed;
    return not_run_ > 0 ? kExitRuntime : kExitOk;
  }

 private:
  void print_report() const {
    print_json({{"cases", cases_},
                {"passed", failed_ + not_run_ == 0},
                {"problem", problem_},
                {"commit", source_commit()},
                {"date", measure::utc_now()},
                {"backend", options_.backend},
                {"ranks_are", options_.processes ? "processes" : "threads"}});
  }

  const VerifyOptions& options_;
  const std::chrono::steady_clock::time_point begin_;
  std::vector<std::string> order_;  ///< order of the checks
  std::map<std::string, Tally> tallies_;
  std::set<std::pair<std::string, std::string>> reasons_;  ///< skipped checks, and why
  json cases_ = json::array();
  std::string problem_;  ///< problem of the first case that could not run
  int64_t failed_ = 0, not_run_ = 0;
};

/// Whether a case is run if --quantize is not given, which is so for unquantized rows and for layers whose sizes are allowed in
/// fp8.
bool runs_by_default(const VerifyCase& c) {
  if (scales_named(c.quantize) == ScaleKind::none) return true;
  return mode_named(c.mode).has_experts && layer_widths_allowed(c.hidden, c.intermediate, scales_named(c.quantize));
}

}  // namespace

std::vector<VerifyCase> verify_cases(const VerifyOptions& o) {
  VerifyCase first;
  first.orders = o.orders;
  first.intermediate = o.intermediate;
  std::vector<VerifyCase> cases{first};
  std::vector<int64_t> seeds;
  for (int64_t round = 0; round < o.repeat; ++round) seeds.push_back(o.seed + round);
  vary(cases, seeds, [](VerifyCase& c, int64_t v) { c.seed = static_cast<uint64_t>(v); });
  vary(cases, o.modes, [](VerifyCase& c, const std::string& v) { c.mode = v; });
  const std::vector<int64_t> ranks = o.ranks.empty() ? std::vector<int64_t>{1, 2, 4} : o.ranks;
  vary(cases, ranks, [](VerifyCase& c, int64_t v) { c.ranks = static_cast<int>(v); });
  vary(cases, o.routings, [](VerifyCase& c, const std::string& v) { c.routing = v; });
  vary(cases, o.layouts, [](VerifyCase& c, const std::string& v) { c.layout = v; });
  vary(cases, o.staging, [](VerifyCase& c, const std::string& v) { c.staging = v; });
  vary(cases, o.dtypes, [](VerifyCase& c, const std::string& v) { c.dtype = v; });
  vary(cases, o.quantize.empty() ? kQuantize : o.quantize, [](VerifyCase& c, const std::string& v) { c.quantize = v; });
  vary(cases, o.blocks, [](VerifyCase& c, int64_t v) { c.blocks = static_cast<int>(v); });
  vary(cases, o.warps, [](VerifyCase& c, int64_t v) { c.warps = static_cast<int>(v); });
  if (!o.sms.empty()) vary(cases, o.sms, [](VerifyCase& c, int64_t v) { c.sms = static_cast<int>(v); });
  vary(cases, o.tokens, [](VerifyCase& c, int64_t v) { c.tokens = v; });
  vary(cases, o.hidden, [](VerifyCase& c, int64_t v) { c.hidden = v; });
  // Low-latency calls have only one layout and one kind of staging.
  std::erase_if(cases, [&](const VerifyCase& c) {
    return !mode_named(c.mode).has_layouts && (c.layout != o.layouts.front() || c.staging != o.staging.front());
  });
  // fp8 rows are already quantized, and in some modes, rows travel unchanged.
  std::erase_if(cases, [](const VerifyCase& c) {
    const bool fp8 = rows_named(c.dtype).quantised(), quantised = scales_named(c.quantize) != ScaleKind::none;
    return mode_named(c.mode).plain_rows ? fp8 || quantised : fp8 && quantised;
  });
  const bool on_gpus = backend_named(o.backend) == Backend::cuda;
  std::erase_if(cases, [&](const VerifyCase& c) {
    if (!mode_named(c.mode).has_experts) return false;
    return c.dtype != "bf16" || (!on_gpus && scales_named(c.quantize) != ScaleKind::none);
  });
  if (o.quantize.empty()) std::erase_if(cases, [](const VerifyCase& c) { return !runs_by_default(c); });
  return cases;
}

namespace {

/// Throws if --intermediate is given but no requested mode has experts, and if a GPU does not support the layer widths.
void check_intermediate(const VerifyOptions& o) {
  const bool asked =
      std::any_of(o.modes.begin(), o.modes.end(), [](const std::string& mode) { return mode_named(mode).has_experts; });
  if (!asked && o.intermediate != VerifyOptions().intermediate)
    throw UsageError("--intermediate: given without --mode layer, whose experts have it");
  if (!asked || backend_named(o.backend) == Backend::cpu) return;
  for (const int64_t hidden : o.hidden) {
    check_layer_widths(hidden, o.intermediate, ScaleKind::none);
    for (const std::string& scales : o.quantize) check_layer_widths(hidden, o.intermediate, scales_named(scales));
  }
}

/// Resolves options (ranks) that depend on the GPUs. Returns the number of GPUs, or 0 for the CPU.
int fit_to_gpus(VerifyOptions& o) {
  if (backend_named(o.backend) == Backend::cpu) {
    if (!o.sms.empty()) throw UsageError("--sms: given with --backend cpu; multiprocessors belong to GPUs (--blocks, --warps)");
    return 0;
  }
  const UsedGpus used = gpus_to_use();
  const int gpus = used.count();
  if (!o.json) fmt::print("  GPUs: {}\n", used.probe.names());
  o.blocks = o.warps = {1};
  if (o.ranks.empty()) o.ranks = {gpus};
  return gpus;
}

/// Checks of a case that ran, even if calls of a rank failed. \throws Error if it could not run
std::vector<CheckResult> checks_of(const VerifyCase& c, const VerifyOptions& options, size_t arena) {
  try {
    return run_verify_case(c, options, arena);
  } catch (const RankError& e) {
    if (!e.blames_exchange()) throw;
    return {{"runs to its end", false, e.what(), 0}};
  }
}

/// Throws on invalid cases before anything runs. Returns the maximum device_bytes.
size_t check_cases(std::vector<VerifyCase>& cases, int gpus, const VerifyOptions& options) {
  if (cases.empty())
    throw UsageError(
        "the lists leave nothing to verify: --quantize applies to bf16, f16 and f32 rows only, flat rows are neither fp8 nor "
        "quantized, and those of a layer are bf16, quantized only with --backend cuda");
  const size_t available = measure::this_machine().memory_available;
  size_t arena = 0;
  for (VerifyCase& c : cases) {
    c.gpus = gpus;
    check_verify_case(c, options, available);
    if (gpus > 0) arena = std::max(arena, device_bytes(c, options));
  }
  return arena;
}

}  // namespace

int run_verify(const VerifyOptions& asked) {
  VerifyOptions options = asked;
  check_intermediate(options);
  const int gpus = fit_to_gpus(options);
  std::vector<VerifyCase> cases = verify_cases(options);
  const size_t arena = check_cases(cases, gpus, options);
  Report report(options);
  Progress progress(!options.json);
  progress.stage("verifying", static_cast<int64_t>(cases.size()));
  for (size_t i = 0; i < cases.size(); ++i) {
    const VerifyCase& c = cases[i];
    const auto begin = std::chrono::steady_clock::now();
    try {
      const std::vector<CheckResult> checks = checks_of(c, options, arena);
      report.add(c, checks, seconds_since(begin));
    } catch (const Error& e) {
      const bool proceeds = e.code() == ErrorCode::system;  // not enough memory for this case, but perhaps enough for the next
      if (proceeds || options.json) report.add(c, e);
      if (proceeds) continue;
      if (options.json) report.print();
      throw;
    }
    progress.update(static_cast<int64_t>(i) + 1, label(c));
  }
  progress.finish();
  return report.end();
}

}  // namespace switchyard::tool
