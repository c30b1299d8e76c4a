// SPDX-License-Identifier: Apache-2.0
#include "bench/driver.hpp"

#include <cstdio>
#include <stdexcept>

#include "bench/points.hpp"
#include "cli/build_info.hpp"
#include "cli/outputs.hpp"
#include "cli/verb.hpp"
#include "measure/result_file.hpp"
#include "report/bench_page.hpp"
#include "run/in_turn.hpp"
#include "switchyard/tuning.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

/// This verb's cases for a mode.
struct BenchMode {
  const Mode& mode;
  std::unique_ptr<BenchCase> (*on_cpu)();
  std::unique_ptr<BenchCase> (*on_gpus)();
};
constexpr BenchMode kModes[] = {{kNormal, make_normal_on_cpu, make_normal_on_gpus},
                                {kLowLatency, make_low_latency, make_low_latency},
                                {kFlat, make_flat, make_flat},
                                {kLayer, make_layer, make_layer}};

/// Contents of --json without the runs.
json document_of(const std::string& what, const BenchOptions& any, const Stopped& stopped) {
  json document = {{"schema", "switchyard.bench/1"},
                   {"what", what},
                   {"commit", any.commit},
                   {"version", version()},
                   {"date", measure::utc_now()},
                   {"machine", to_json(measure::this_machine())},
                   {"swept", any.swept},
                   {"runs", json::array()}};
  if (stopped.error) document["stopped"] = stopped.what;
  return document;
}

/// Writes --json and --html. Returns an exception instead of throwing it so that the figures are always printed.
[[nodiscard]] std::exception_ptr write_results(const BenchOptions& options, const json& document) {
  try {
    if (!options.json_path.empty()) measure::write_json(options.json_path, document);
    if (!options.html_path.empty()) measure::write_file(options.html_path, bench_html(document));
  } catch (const std::exception&) {
    return std::current_exception();
  }
  return nullptr;
}

/// Prints the paths of the written files. \throws the exception returned by write_results
void print_written(const BenchOptions& options, const std::exception_ptr& problem) {
  if (problem) std::rethrow_exception(problem);
  for (const std::string& path : {options.json_path, options.html_path})
    if (!path.empty() && path != measure::kStandardOutput) fmt::print("  written to {}\n", path);
}

/// Handles a process that is one of several ranks started by a launcher. Only the first rank prints.
void be_one_of(const Membership& me, BenchOptions& o) {
  const std::string started = fmt::format("the launcher started {} ranks", me.world);
  if (mode_named(o.mode).has_layouts && !on_gpus(o))
    throw UsageError(
        "--backend cpu --mode normal: " + started +
        ", but here bench starts its ranks itself, so that the copy limit is that of the machine; run it without a launcher");
  if (o.ranks != 0 && o.ranks != me.world) throw UsageError(fmt::format("--ranks: '{}' given; {}", o.ranks, started));
  for (const std::string& sweep : o.sweep)
    if (sweep.rfind("ranks=", 0) == 0) throw UsageError(fmt::format("--sweep: '{}' given; {}", sweep, started));
  o.ranks = me.world;
  o.processes = true;
  if (me.rank == 0) return;
  o.json_path.clear();
  o.html_path.clear();
  Progress::silence();
  if (std::freopen("/dev/null", "w", stdout) == nullptr) throw std::runtime_error("/dev/null cannot be opened");
}

}  // namespace

std::vector<std::string> bench_modes() {
  std::vector<std::string> names;
  for (const BenchMode& m : kModes) names.emplace_back(m.mode.name);
  return names;
}

std::unique_ptr<BenchCase> make_bench_case(const Mode& mode, Backend backend) {
  if (backend == Backend::cuda && !built_with_cuda()) throw UsageError(no_cuda_text());
  for (const BenchMode& m : kModes)
    if (&m.mode == &mode) return backend == Backend::cuda ? m.on_gpus() : m.on_cpu();
  throw UsageError(std::string("--mode: '") + mode.name + "' given; it is not measured by bench");
}

int run_bench(const BenchOptions& given) {
  BenchOptions options = given;
  if (const auto me = join_launched_ranks()) be_one_of(*me, options);
  std::vector<BenchOptions> points = bench_points(options);
  check_outputs({{"--json", options.json_path, kMinJsonBytes}, {"--html", options.html_path, kMinPageBytes}});
  (void)Tuning::from_environment();  // groups would reject an invalid file
  const std::unique_ptr<BenchCase> one = make_bench_case(mode_named(options.mode), backend_named(options.backend));
  for (BenchOptions& point : points)
    if (point.commit.empty()) point.commit = source_commit();
  one->fit(points);
  for (const BenchOptions& point : points) one->check(point);
  one->print_head(points);
  std::fflush(stdout);

  Progress progress;
  std::vector<std::string> titles;
  for (const BenchOptions& point : points) titles.push_back(point_title(point));
  progress.align(titles);
  one->begin(progress, points.front());
  const Stopped stopped = in_turn(progress, points.size(), [&](size_t i) {
    progress.stage(titles[i], 100);
    return one->measure(points[i], progress);
  });
  one->end();
  json document = document_of(one->what(), points.front(), stopped);
  one->complete(document);
  const std::exception_ptr problem = write_results(options, document);
  one->print();
  print_written(options, problem);
  return stopped.status(one->passed());
}

}  // namespace switchyard::tool
