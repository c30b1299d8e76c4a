// SPDX-License-Identifier: Apache-2.0
// Interface between the driver of `switchyard bench` and one mode on one backend.
#pragma once

#include <fmt/core.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/options.hpp"
#include "bench/points.hpp"
#include "check/check_result.hpp"
#include "cli/progress.hpp"
#include "device/clock.hpp"
#include "measure/figures.hpp"
#include "run/names.hpp"
#include "run/ranks.hpp"

namespace switchyard::tool {

class BenchCase {
 public:
  virtual ~BenchCase() = default;
  /// Resolves the options left on automatic, in all points. \throws UsageError
  virtual void fit(std::vector<BenchOptions>& points) = 0;
  /// Validates a fitted point before anything is measured. \throws UsageError, or the library's Error
  virtual void check(const BenchOptions& point) const = 0;
  /// Title of the document written by --json.
  virtual std::string what() const = 0;
  virtual void print_head(const std::vector<BenchOptions>& points) const = 0;
  /// begin() runs before the first point and end() after the last one.
  virtual void begin(Progress&, const BenchOptions&) {}
  virtual void end() {}
  /// Measures a point, stores its results, and returns a short summary. \throws RankError, Error, UsageError
  virtual std::string measure(const BenchOptions& point, Progress& progress) = 0;
  /// The entry for a measured point in the runs of --json.
  virtual nlohmann::json measured(const BenchOptions& point) = 0;
  /// Adds all results to the JSON document.
  virtual void complete(nlohmann::json& document) const = 0;
  virtual void print() const = 0;
  virtual bool passed() const = 0;
};

// One factory per mode and backend.
std::unique_ptr<BenchCase> make_normal_on_cpu();
std::unique_ptr<BenchCase> make_normal_on_gpus();
std::unique_ptr<BenchCase> make_low_latency();
std::unique_ptr<BenchCase> make_flat();
std::unique_ptr<BenchCase> make_layer();

/// A measured point: its options, with all choices resolved, and the checks of its results.
struct MeasuredPoint {
  BenchOptions options;
  std::vector<CheckResult> checks;
  bool passed() const { return all_passed(checks); }
};

/// Handling of points, shared by all cases. `Run` is a MeasuredPoint with figures.
template <class Run>
class BenchCaseOf : public BenchCase {
 public:
  std::string measure(const BenchOptions& point, Progress& progress) final {
    runs_.push_back(run(point, &progress));
    return words_of(runs_.back()) + (runs_.back().passed() ? "" : ", RESULTS DIFFER");
  }
  nlohmann::json measured(const BenchOptions& point) final { return describe(run(point, nullptr)); }
  bool passed() const final {
    return std::all_of(runs_.begin(), runs_.end(), [](const Run& r) { return r.passed(); });
  }

 protected:
  virtual Run run(const BenchOptions& point, Progress* progress) = 0;
  virtual std::string words_of(const Run& run) const = 0;
  virtual nlohmann::json describe(const Run& run) const = 0;

  void add_runs(nlohmann::json& document) const {
    for (const Run& run : runs_) document["runs"].push_back(describe(run));
  }
  /// The options of the first point.
  const BenchOptions& any() const { return runs_.front().options; }
  const char* tail() const { return measure::tail_name(any().iterations); }
  /// Prints a note below the table that explains why the table has no p99.
  void print_tail_of_table() const { print_tail(any()); }
  void print_failures() const {
    for (const Run& r : runs_)
      for (const CheckResult& c : r.checks)
        if (!c.passed) fmt::print("  {} {} at {}: {}\n", red("FAIL"), c.name, point_title(r.options), c.detail);
  }

  std::vector<Run> runs_;
};

/// The last cell in a table row.
inline std::string checked_cell(const MeasuredPoint& run) {
  if (!run.options.verify) return yellow("no");
  return run.passed() ? green("PASS") : red("FAIL");
}
/// Value for the JSON document; null if nothing was checked.
inline nlohmann::json verified_json(const MeasuredPoint& run) {
  return run.options.verify ? nlohmann::json(run.passed()) : nlohmann::json(nullptr);
}
inline std::string us(double seconds) { return fmt::format("{:.1f}", seconds * 1e6); }
inline bool on_gpus(const BenchOptions& o) { return backend_named(o.backend) == Backend::cuda; }
/// Name of the row type in tables; quantized rows travel as fp8.
inline std::string rows_text(const BenchOptions& o) {
  return scales_named(o.quantize) == ScaleKind::none ? o.dtype : o.dtype + ">fp8";
}

/// Number of multiprocessors per call, or two numbers if a tuning chooses different ones for dispatch and combine.
inline std::string sms_text(const BenchOptions& o) {
  return o.sms == o.combine_sms ? std::to_string(o.sms) : fmt::format("{}, {}", o.sms, o.combine_sms);
}

/// The values at `key` in the results of all ranks.
std::vector<nlohmann::json> part_of(const std::vector<nlohmann::json>& ranks, const char* key);

/// Measures this machine's copy limit once (it does not depend on the point) and shows progress.
measure::CopyLimit copy_limit_of(Progress& progress, const BenchOptions& options, const measure::Machine& machine);
/// Returns why the copy limit is not credible if `largest_share` of it exceeds 1, else "".
std::string limit_note(double largest_share);

}  // namespace switchyard::tool
