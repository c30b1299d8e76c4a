// SPDX-License-Identifier: Apache-2.0
// Each measurement is a run of bench (or of `verify ledger`) in which SWITCHYARD_TUNING names a file with candidate values.
#include "tune/tune.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>

#include "bench/driver.hpp"
#include "cli/build_info.hpp"
#include "cli/outputs.hpp"
#include "cli/progress.hpp"
#include "cli/style.hpp"
#include "cli/verb.hpp"
#include "cli/words.hpp"
#include "device/gpu_probe.hpp"
#include "measure/result_file.hpp"
#include "report/tune_page.hpp"
#include "run/in_turn.hpp"
#include "run/names.hpp"
#include "switchyard/ledger.hpp"
#include "switchyard/status.hpp"
#include "tune/file.hpp"
#include "tune/search.hpp"
#include "verify/ledger.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

LedgerVerifyOptions ledger_of(const BenchOptions& o) {
  LedgerVerifyOptions l;
  l.backend = o.backend;
  l.processes = o.processes;
  l.ranks = o.ranks;
  l.tokens = o.tokens;
  l.hidden = o.hidden;
  l.topk = o.topk > 0 ? o.topk : 8;
  l.experts = o.ranks * std::max<int64_t>(1, (o.experts > 0 ? o.experts : 256) / o.ranks);
  return l;
}

void check_ledger_shape(const BenchOptions& o) {
  const LedgerVerifyOptions l = ledger_of(o);
  LedgerConfig config;
  config.hidden = l.hidden;
  config.num_experts = static_cast<int>(l.experts);
  config.topk = static_cast<int>(l.topk);
  config.max_tokens = l.tokens;
  (void)LedgerCombine::memory_required(config, static_cast<int>(l.ranks), Backend::cuda);
}
json measured_ledger_shape(const BenchOptions& o, int gpus) { return measured_ledger(ledger_of(o), gpus); }

std::unique_ptr<BenchCase> bench_case(const BenchOptions& o) {
  return make_bench_case(mode_named(o.mode), backend_named(o.backend));
}
void check_bench_shape(const BenchOptions& o) { bench_case(o)->check(o); }
json measured_bench_shape(const BenchOptions& o, int) { return bench_case(o)->measured(o); }

/// A mode's tuning properties.
struct TuneMode {
  TuningMode tuning;
  const Mode& mode;
  Layout layout;
  int64_t alignment;
  int64_t default_token_count;
  bool on_cpu;                                            ///< has values to tune on the CPU
  bool quantised;                                         ///< --quantize applies to every row
  void (*check)(const BenchOptions& shape);               ///< throws for invalid options before anything is measured
  json (*measured)(const BenchOptions& shape, int gpus);  ///< \throws RankError, UsageError
};
/// In tuning order: the values found for low_latency are in effect when flat is measured. Normal mode's expert-major rows are
/// aligned as required by grouped GEMMs.
constexpr TuneMode kModes[] = {
    {TuningMode::normal, kNormal, Layout::rank_major, 1, 4096, false, false, check_bench_shape, measured_bench_shape},
    {TuningMode::normal_expert_major, kNormal, Layout::expert_major, 128, 4096, false, false, check_bench_shape,
     measured_bench_shape},
    {TuningMode::low_latency, kLowLatency, Layout::rank_major, 1, 128, true, true, check_bench_shape, measured_bench_shape},
    {TuningMode::flat, kFlat, Layout::rank_major, 1, 128, false, false, check_bench_shape, measured_bench_shape},
    {TuningMode::ledger, kLedger, Layout::rank_major, 1, 128, false, false, check_ledger_shape, measured_ledger_shape}};

const TuneMode& mode_of(TuningMode tuning) {
  return *std::find_if(std::begin(kModes), std::end(kModes), [&](const TuneMode& m) { return m.tuning == tuning; });
}
const TuneMode& tune_mode_named(const std::string& name) {
  return *std::find_if(std::begin(kModes), std::end(kModes), [&](const TuneMode& m) { return name == to_string(m.tuning); });
}

/// Scales of the quantizing dispatches that normal mode measures in addition to other dispatches. "" in other modes.
std::string quantised_beside(const TuneOptions& o, const TuneMode& mode) {
  if (&mode.mode != &kNormal) return "";
  return scales_named(o.quantize) == ScaleKind::none ? to_string(ScaleKind::f32) : o.quantize;
}

/// The device on which tuning runs, the same for all shapes.
struct Place {
  std::string device = "cpu";
  int gpus = 0;       ///< 0: the CPU
  int max_sms = 0;    ///< per rank
  int64_t warps = 1;  ///< CPU: workers per rank
  json described;     ///< the GPUs, for the JSON
  std::string limit_text;
  json limit;  ///< CPU: copy limit
};

/// A shape to tune.
struct Shape {
  TuningKey key;
  BenchOptions base;
  std::optional<BenchOptions> quantising = {};  ///< measured in addition; see quantised_beside()
};
struct Tuned {
  TuningEntry entry;
  TuneFound found;
  TuneVerdict verdict;
  std::string limits;  ///< CUDA: bare kernels of the first untuned run
};

TuneOptions resolved(const TuneOptions& asked) {
  TuneOptions o = asked;
  if (backend_named(o.backend) == Backend::cuda && !built_with_cuda()) throw UsageError(no_cuda_text());
  const bool cpu = backend_named(o.backend) == Backend::cpu;
  for (const TuneMode& m : kModes)
    if (asked.modes.empty() && (!cpu || m.on_cpu)) o.modes.emplace_back(to_string(m.tuning));
  for (const std::string& name : o.modes) {
    const TuneMode& m = tune_mode_named(name);
    if (cpu && !m.on_cpu)
      throw UsageError(fmt::format(
          "--mode: '{}' given with --backend cpu; {} has nothing to tune there. Allowed: low_latency (the pieces of a row, "
          "which flat shares)",
          o.modes.size() == std::size(kModes) ? "all" : joined(o.modes, ","), name));
    for (const int64_t tokens : o.tokens)
      if (tokens > m.mode.max_tokens)
        throw UsageError(fmt::format("--tokens: {} given; mode {} takes at most {}", tokens, name, m.mode.max_tokens));
  }
  for (const auto& [flag, text] : {std::pair("--commit", o.commit), {"--routing", o.routing}})
    if (text.find_first_of("\r\n") != std::string::npos)  // the texts become comments in the file
      throw UsageError(fmt::format("{}: a text with a line break given; allowed: one line", flag));
  if (o.commit.empty()) o.commit = source_commit();
  return o;
}

Place place_of(TuneOptions& o) {
  Place place;
  if (backend_named(o.backend) == Backend::cpu) {
    std::vector<BenchOptions> points(1);
    points.front().mode = kLowLatency.name;
    points.front().ranks = o.ranks;
    bench_case(points.front())->fit(points);
    o.ranks = points.front().ranks;
    place.warps = points.front().warps;
    return place;
  }
  const UsedGpus gpus = gpus_to_use();
  if (o.ranks == 0) o.ranks = gpus.count();
  for (const Gpu& gpu : gpus.probe.gpus)
    if (gpu.name != gpus.name())
      throw UsageError(
          fmt::format("--backend: cuda given where GPUs differ ({} and {}); allowed: GPUs of one kind, chosen with "
                      "CUDA_VISIBLE_DEVICES",
                      gpus.name(), gpu.name));
  place.device = gpus.name();
  place.gpus = gpus.count();
  place.max_sms = static_cast<int>(gpus.sms_of_rank(o.ranks));
  place.described = gpus.described();
  if (std::find(o.modes.begin(), o.modes.end(), kLedger.name) != o.modes.end() && o.ranks > place.gpus)
    throw UsageError(fmt::format("--ranks: {} given with mode ledger and {}; allowed: a GPU for each rank", o.ranks,
                                 counted(place.gpus, "GPU")));
  return place;
}

BenchOptions base_of(const TuneOptions& o, const Place& place, const TuneMode& mode, int64_t hidden, int64_t tokens) {
  BenchOptions b;
  b.backend = o.backend;
  b.mode = mode.mode.name;
  b.layout = to_string(mode.layout);
  b.alignment = mode.alignment;
  b.ranks = o.ranks;
  b.warps = place.warps;
  b.tokens = tokens;
  b.hidden = hidden;
  b.experts = o.experts;
  b.topk = o.topk;
  b.quantize = mode.quantised ? o.quantize : to_string(ScaleKind::none);
  b.routing = o.routing;
  b.iterations = o.iterations;
  b.warmup = o.warmup;
  b.processes = o.processes;
  b.seed = o.seed;
  b.commit = o.commit;
  return b;
}

std::vector<Shape> shapes_of(const TuneOptions& o, const Place& place) {
  std::vector<Shape> shapes;
  for (const TuneMode& mode : kModes) {
    if (std::find(o.modes.begin(), o.modes.end(), to_string(mode.tuning)) == o.modes.end()) continue;
    const std::vector<int64_t> default_tokens{mode.default_token_count};
    for (const int64_t hidden : o.hidden)
      for (const int64_t tokens : o.tokens.empty() ? default_tokens : o.tokens) {
        const TuningKey key{place.device, mode.tuning, static_cast<int>(o.ranks), hidden, tokens};
        Shape& shape = shapes.emplace_back(Shape{key, base_of(o, place, mode, hidden, tokens)});
        const std::string scales = quantised_beside(o, mode);
        if (!scales.empty()) shape.quantising.emplace(shape.base).quantize = scales;
      }
  }
  return shapes;
}

class Tuner {
 public:
  Tuner(const TuneOptions& options, const Place& place, std::vector<TuningEntry> kept, Progress& progress)
      : options_(options), place_(place), kept_(std::move(kept)), progress_(progress) {}

  Tuned tune(const Shape& shape) {
    Tuned t;
    t.entry.key = shape.key;
    const json first = measured(shape, in_force(t.entry), {}, "untuned", place_.gpus > 0);
    require(first);
    LowLatencyConfig config;
    config.hidden = shape.key.hidden;
    config.topk = first.value(json::json_pointer("/config/topk"), 0);  // that of the routing, unless it was given
    config.max_tokens = shape.key.max_tokens;
    const std::vector<TuneStage> stages =
        tune_stages(shape.key.mode, shape.key.hidden, default_pieces(config, shape.key.ranks), place_.max_sms);
    t.limits = limits_of(first);
    const double slack = static_cast<double>(options_.slack) / 100;
    t.found = tune_search(stages, slack, [&](const TuningValues& values, const std::string& what) {
      json run = measured(shape, in_force({shape.key, values}), values, what, false);
      const bool refused = run.contains("problem") && !run.contains("passed");
      if (!refused) require(run);
      return run;
    });
    t.verdict = tune_compare(shape.key.mode, stages, t.found.values, slack, first, [&](bool with) {
      const TuningValues none{};
      json run =
          measured(shape, in_force({shape.key, with ? t.found.values : none}), {}, with ? "with the file" : "without", false);
      require(run);
      return run;
    });
    if (t.verdict.dropped.empty()) t.entry.values = t.found.values;
    kept_.insert(kept_.begin(), t.entry);
    return t;
  }

  json runs = json::array();

 private:
  /// The entries of the file to be written, including `entry`.
  std::vector<TuningEntry> in_force(const TuningEntry& entry) const {
    std::vector<TuningEntry> all{entry};
    all.insert(all.end(), kept_.begin(), kept_.end());
    return all;
  }

  static void require(const json& run) {
    const auto problem = run.value("problem", std::string());  // a ledger's report always has one
    if (!problem.empty()) throw Error(ErrorCode::system, "tune: " + problem);
    if (!run.value("verified", run.value("passed", false)))
      throw std::runtime_error("tune: results are wrong; this shape gets no entry. See: switchyard verify");
  }

  json measured(const Shape& shape, const std::vector<TuningEntry>& entries, const TuningValues& values,
                const std::string& what, bool limits) {
    override_.set(entries);
    const auto once = [&](BenchOptions o, bool with_limits) {
      o.limits = with_limits;
      o.pieces = values.pieces;  // set explicitly, so a number unsupported on this device is rejected
      if (place_.gpus > 0) choose_sms(o, place_.device, place_.max_sms);
      return mode_of(shape.key.mode).measured(o, place_.gpus);
    };
    progress_.stage(fmt::format("{}, {}, hidden {}: {}", to_string(shape.key.mode), counted(shape.key.max_tokens, "token"),
                                shape.key.hidden, what),
                    1);
    json run;
    try {
      run = once(shape.base, limits);
      if (shape.quantising) add_quantised(run, once(*shape.quantising, false));
      progress_.finish(times_of(run));
    } catch (const RankError& error) {
      run = {{"problem", error.what()}};
      progress_.finish("not possible");
    }
    run["tuning"] = entries.front().text();
    run["what"] = what;
    runs.push_back(run);
    return run;
  }

  static void add_quantised(json& run, const json& quantised) {
    run["quantized_dispatch"] = quantised.at("dispatch");
    run["quantized_config"] = quantised.at("config");
    if (run.at("verified") == true) run["verified"] = quantised.at("verified");
  }

  static std::string times_of(const json& run) {
    std::string out;
    for (const char* key : {"dispatch", "combine", "quantized_dispatch", "combine_per_route", "combine_per_rank", "all_to_all"})
      if (run.contains(key))
        out += fmt::format("{}{} {:.1f} us", out.empty() ? "" : ", ", key, run.at(key).at("p50_us").get<double>());
    if (run.contains("kernel_us") && !run.at("kernel_us").is_null())
      out += fmt::format("kernel {:.1f} us", run.at("kernel_us").at("median").get<double>());
    return out;
  }

  static std::string limits_of(const json& run) {
    std::string out;
    for (const auto& [key, name] : {std::pair("push_limit", "push"), {"pull_limit", "pull"}})
      if (run.contains(key))
        out += fmt::format("{}{} {:.1f} us", out.empty() ? "bare kernels, untuned SMs: " : ", ", name,
                           run.at(key).at("p50_us").get<double>());
    return out;
  }

  const TuneOptions& options_;
  const Place& place_;
  std::vector<TuningEntry> kept_;
  TuningOverride override_;
  Progress& progress_;
};

std::string shape_text(const TuningKey& key) {
  return fmt::format("{}, {}, {}, hidden {}", to_string(key.mode), counted(key.ranks, "rank"), counted(key.max_tokens, "token"),
                     key.hidden);
}

std::string values_text(const TuningEntry& entry) {
  TuningEntry none = entry;
  none.values = {};
  const std::string text = entry.text(), key = none.text();
  return text == key ? "the library's own values" : text.substr(key.size() + 1);
}

CommentedEntry commented(const TuneOptions& o, const Place& place, const Tuned& t) {
  CommentedEntry out{t.entry, {}};
  std::string about = fmt::format("{}, switchyard {}, commit {}: {} as {}, {} routing", measure::utc_now(), version(), o.commit,
                                  counted(o.ranks, "rank"), o.processes ? "processes" : "threads", o.routing);
  if (mode_of(t.entry.key.mode).quantised && scales_named(o.quantize) != ScaleKind::none)
    about += ", fp8 rows (" + o.quantize + ")";
  const std::string beside = quantised_beside(o, mode_of(t.entry.key.mode));
  if (!beside.empty()) about += ", quantized_dispatch with " + beside + " scales";
  for (const std::string& limit : {place.limit_text, t.limits})
    if (!limit.empty()) about += "; " + limit;
  out.comments.push_back(about);
  if (t.entry.values == TuningValues{}) {
    const std::string& dropped = t.verdict.dropped;
    out.comments.push_back("the library's own values" + (dropped.empty() ? "" : "; others were found and dropped: " + dropped));
  }
  for (const TuneGain& g : t.verdict.gains)
    out.comments.push_back(fmt::format("{}: {:.1f} us, untuned {:.1f} us ({})", g.of, g.after, g.before, g.text()));
  return out;
}

void print_tables(const std::vector<Tuned>& all) {
  for (const Tuned& t : all) {
    fmt::print("\n{}\n", bold(shape_text(t.entry.key)));
    Table tried({"tried", "value", "time", ""});
    for (const TuneTrial& trial : t.found.trials) {
      const std::string mark = fmt::format("{}{}", trial.chosen ? green("chosen") : "",
                                           trial.is_default ? (trial.chosen ? ", the default" : "the default") : "");
      tried.row({trial.name, trial.value == 0 ? "by row size" : std::to_string(trial.value),
                 trial.problem.empty() ? fmt::format("{:.1f} us", trial.us) : "-",
                 trial.problem.empty() ? mark : "not possible: " + trial.problem});
    }
    fmt::print("{}", tried.text());
    if (!t.verdict.dropped.empty())
      fmt::print("  {}: the chosen values are dropped: measured alternately with the library's own values, they were {}\n",
                 yellow("note"), t.verdict.dropped);
  }
  Table found({"mode", "ranks", "tokens", "hidden", "chosen", "of", "untuned", "tuned", ""});
  for (const Tuned& t : all) {
    for (const TuneGain& g : t.verdict.gains) {
      const TuningKey& key = t.entry.key;
      found.row({to_string(key.mode), std::to_string(key.ranks), std::to_string(key.max_tokens), std::to_string(key.hidden),
                 values_text(t.entry), g.of, fmt::format("{:.1f} us", g.before), fmt::format("{:.1f} us", g.after), g.text()});
    }
  }
  fmt::print("\n{}\n{}", bold("What it gains"), found.text());
  fmt::print(
      "\n  Medians of the slowest rank; of candidates, sums of the calls by which the value is judged.\n"
      "  untuned: without the entry, that is with the library's own values (flat: and the pieces found for low_latency);\n"
      "  tuned: with it. Both are measured alternately, three times each, and the best of each figure counts.\n");
}

json document_of(const TuneOptions& o, const Place& place, const std::vector<Tuned>& all, json runs, const Stopped& stopped) {
  json document = {{"schema", "switchyard.tune/1"},
                   {"what", "switchyard tune --backend " + o.backend},
                   {"commit", o.commit},
                   {"version", version()},
                   {"date", measure::utc_now()},
                   {"machine", to_json(measure::this_machine())},
                   {"slack_percent", o.slack},
                   {"runs", std::move(runs)},
                   {"chosen", json::array()}};
  if (stopped.error) document["stopped"] = stopped.what;
  if (!place.described.is_null()) document["gpus"] = place.described;
  if (!place.limit.is_null()) document["copy_limit"] = place.limit;
  for (const Tuned& t : all) {
    json gains = json::array();
    for (const TuneGain& g : t.verdict.gains) gains.push_back({{"of", g.of}, {"untuned_us", g.before}, {"tuned_us", g.after}});
    json trials = json::array();
    for (const TuneTrial& trial : t.found.trials)
      trials.push_back({{"name", trial.name},
                        {"value", trial.value},
                        {"us", trial.us},
                        {"chosen", t.verdict.dropped.empty() ? trial.chosen : trial.is_default},  // the values finally in force
                        {"usual", trial.is_default},
                        {"problem", trial.problem}});
    document["chosen"].push_back({{"entry", t.entry.text()},
                                  {"shape", shape_text(t.entry.key)},
                                  {"values", values_text(t.entry)},
                                  {"gains", gains},
                                  {"trials", trials}});
    if (!t.verdict.dropped.empty()) document["chosen"].back()["dropped"] = t.verdict.dropped;
  }
  return document;
}

std::vector<TuningEntry> entries_without(const std::string& text, const std::string& name, const std::vector<Shape>& shapes) {
  std::vector<TuningEntry> kept;
  for (const TuningEntry& entry : TuningFile::parse(text, name).entries)
    if (std::none_of(shapes.begin(), shapes.end(), [&](const Shape& s) { return s.key == entry.key; })) kept.push_back(entry);
  return kept;
}

std::string old_text(const std::string& path) {
  try {
    return read_or_new(path);
  } catch (const Error& error) {
    throw UsageError(fmt::format("--out: {}. Repair or remove it, or choose another file", error.what()));
  }
}

/// Writes the tuning file, --json and --html. Returns an exception instead of throwing it so that the findings are always
/// printed.
std::exception_ptr write_all(const TuneOptions& o, const std::string& tuning, const json& document) {
  try {
    measure::write_file(o.out, tuning);
    if (!o.json_path.empty()) measure::write_json(o.json_path, document);
    if (!o.html_path.empty()) measure::write_file(o.html_path, tune_html(document));
  } catch (const std::exception&) {
    return std::current_exception();
  }
  return nullptr;
}

}  // namespace

std::vector<std::string> tune_modes() {
  std::vector<std::string> names;
  for (const TuneMode& m : kModes) names.emplace_back(to_string(m.tuning));
  return names;
}

int run_tune(const TuneOptions& asked) {
  TuneOptions o = resolved(asked);
  Place place = place_of(o);
  const std::vector<Shape> shapes = shapes_of(o, place);
  for (const Shape& shape : shapes) mode_of(shape.key.mode).check(shape.base);
  const std::string old = old_text(o.out);
  check_outputs(
      {{"--out", o.out, old.size() + 1}, {"--json", o.json_path, kMinJsonBytes}, {"--html", o.html_path, kMinPageBytes}});
  fmt::print("{}\n  {}, {}, {}, commit {}, {}\n\n", bold("switchyard tune"), place.device, counted(o.ranks, "rank"),
             counted(static_cast<int64_t>(shapes.size()), "shape"), o.commit, measure::utc_now());
  std::fflush(stdout);
  Progress progress;
  if (place.gpus == 0) {
    const measure::CopyLimit limit = copy_limit_of(progress, shapes.front().base, measure::this_machine());
    place.limit = to_json(limit);
    place.limit_text = fmt::format("copy limit {:.1f} GB/s", limit.best().gbs);
  }
  Tuner tuner(o, place, entries_without(old, o.out, shapes), progress);
  std::vector<Tuned> all;
  const Stopped stopped = in_turn(progress, shapes.size(), [&](size_t i) {
    all.push_back(tuner.tune(shapes[i]));
    return "";  // its stages have ended
  });
  std::vector<CommentedEntry> entries;
  for (const Tuned& t : all) entries.push_back(commented(o, place, t));
  const json document = document_of(o, place, all, std::move(tuner.runs), stopped);
  const std::exception_ptr problem = write_all(o, merged(old, entries), document);
  print_tables(all);
  if (problem) std::rethrow_exception(problem);
  const std::string path = std::filesystem::absolute(o.out).lexically_normal().string();
  std::string written = o.out;
  for (const std::string& also : {o.json_path, o.html_path})
    if (!also.empty() && also != measure::kStandardOutput) written += ", " + also;
  fmt::print("\n  written to {}\n", written);
  if (!all.empty() && std::all_of(all.begin(), all.end(), [](const Tuned& t) { return t.entry.values == TuningValues{}; }))
    fmt::print("  No candidate is better here than the library's own values, which the new entries keep in force.\n");
  fmt::print("\n  To use it, before groups are formed, on every rank:\n    export SWITCHYARD_TUNING={}\n", path);
  return stopped.status(true);
}

}  // namespace switchyard::tool
