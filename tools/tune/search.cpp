// SPDX-License-Identifier: Apache-2.0
#include "tune/search.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "cli/outputs.hpp"
#include "switchyard/low_latency.hpp"
#include "switchyard/normal.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

std::vector<int> with_default(std::initializer_list<int> list, int default_value, int max) {
  std::vector<int> out{default_value};
  for (const int value : list)
    if (value <= max) out.push_back(value);
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

TuneDimension sms(const char* name, int TuningValues::*target, int default_value, int max, std::vector<const char*> metrics) {
  std::vector<int> candidates = with_default({4, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 112, 128}, default_value, max);
  if (candidates.back() != max) candidates.push_back(max);
  return {name, target, std::move(candidates), default_value, std::move(metrics), true};
}

/// Warps per block for kernels that are compiled for `max` warps, which is their default.
TuneDimension warps(const char* name, int TuningValues::*target, int max, std::vector<const char*> metrics) {
  return {name, target, with_default({4, 6, 8, 10, 12, 14}, max, max), max, std::move(metrics), false};
}

std::vector<TuneStage> normal_stages(int max) {
  const int default_value = std::min(kDefaultSms, max), default_quantising = std::min(kDefaultQuantizingSms, max);
  const std::vector<const char*> dispatch{"/dispatch/p50_us"}, combine{"/combine/p50_us"},
      quantised{"/quantized_dispatch/p50_us"};
  // Without tuning, the number of stages follows from the row size; 0 selects this default.
  return {{sms("dispatch_sms", &TuningValues::dispatch_sms, default_value, max, dispatch),
           sms("combine_sms", &TuningValues::combine_sms, default_value, max, combine),
           sms("quantized_dispatch_sms", &TuningValues::quantized_dispatch_sms, default_quantising, max, quantised)},
          {{"dispatch_warps", &TuningValues::dispatch_warps, with_default({6, 8, 10, 12}, kMaxDispatchWarps, kMaxDispatchWarps),
            kMaxDispatchWarps, dispatch, false},
           {"combine_warps", &TuningValues::combine_warps,
            with_default({8, 12, 14, 16, 18}, kMaxCombineWarps, kMaxCombineWarps), kMaxCombineWarps, combine, false}},
          {{"dispatch_stages", &TuningValues::dispatch_stages, {0, 1, 2}, 0, dispatch, false}}};
}

std::vector<TuneStage> low_latency_stages(int64_t hidden, int default_value, int max) {
  const std::vector<const char*> dispatch{"/dispatch/p50_us"}, combine{"/combine_per_route/p50_us", "/combine_per_rank/p50_us"};
  std::vector<TuneStage> stages;
  if (max > 0)
    stages = {{sms("dispatch_sms", &TuningValues::dispatch_sms, max, max, dispatch),
               sms("combine_sms", &TuningValues::combine_sms, max, max, combine)},
              {warps("dispatch_warps", &TuningValues::dispatch_warps, kMaxLowLatencyWarps, dispatch),
               warps("combine_warps", &TuningValues::combine_warps, kMaxLowLatencyWarps, combine)}};
  constexpr int64_t kMinColumns = 128;  // per piece
  const int pieces = static_cast<int>(std::min<int64_t>(16, (hidden + kMinColumns - 1) / kMinColumns));
  stages.push_back({{"pieces",
                     &TuningValues::pieces,
                     with_default({1, 2, 3, 4, 6, 8, 10, 12, 14, 16}, default_value, pieces),
                     default_value,
                     {"/both_per_route/p50_us", "/both_per_rank/p50_us"},
                     false}});
  return stages;
}

std::vector<TuneStage> flat_stages(int max) {
  const std::vector<const char*> whole{"/all_to_all/p50_us"};
  return {{sms("sms", &TuningValues::sms, max, max, whole)},
          {warps("warps", &TuningValues::warps, kMaxLowLatencyWarps, whole)}};
}

std::vector<TuneStage> ledger_stages(int max) {
  const std::vector<const char*> kernel{"/kernel_us/median"};
  return {{sms("sms", &TuningValues::sms, max, max, kernel)},
          {warps("warps", &TuningValues::warps, kMaxLedgerWarps, kernel)},
          {{"chunk_kib", &TuningValues::chunk_kib, with_default({4, 8, 16, 32, 128}, kDefaultChunkKib, kMaxChunkKib),
            kDefaultChunkKib, kernel, false}}};
}

/// The best value in `times` (candidate, microseconds); 0 stands for the default.
int pick(const TuneDimension& d, const std::vector<std::pair<int, double>>& times, double slack) {
  if (times.empty()) return 0;
  double fastest = times.front().second;
  for (const auto& [value, us] : times) fastest = std::min(fastest, us);
  const auto near = [&](const auto& t) { return t.second <= fastest * (1 + slack); };
  const auto known = std::find_if(times.begin(), times.end(), [&](const auto& t) { return t.first == d.default_value; });
  if (!d.smallest && known != times.end() && near(*known)) return 0;
  const auto best = d.smallest ? std::find_if(times.begin(), times.end(), near)
                               : std::min_element(times.begin(), times.end(),
                                                  [](const auto& a, const auto& b) { return a.second < b.second; });
  return best->first == d.default_value ? 0 : best->first;
}

class Search {
 public:
  Search(double slack, const TuneMeasure& measure) : slack_(slack), measure_(measure) {}

  void run(const TuneStage& stage) {
    std::vector<std::vector<std::pair<int, double>>> times(stage.size());
    size_t max = 0;
    for (const TuneDimension& d : stage) max = std::max(max, d.candidates.size());
    const size_t first_trial = found.trials.size();
    for (size_t i = 0; i < max; ++i) {
      TuningValues values = found.values;
      std::string what;
      for (const TuneDimension& d : stage) {
        if (i >= d.candidates.size()) continue;
        set(values, d, d.candidates[i]);
        what += (what.empty() ? "" : ", ") + title(d, d.candidates[i]);
      }
      const json run = measure_(values, what);
      for (size_t k = 0; k < stage.size(); ++k)
        if (i < stage[k].candidates.size()) note(stage[k], stage[k].candidates[i], run, times[k]);
    }
    TuningValues better = found.values;
    bool differs = false;
    for (size_t k = 0; k < stage.size(); ++k) {
      const int value = pick(stage[k], times[k], slack_);
      better.*stage[k].target = value;
      differs = differs || (value != 0 && !stage[k].smallest);
    }
    if (differs) confirm(stage, better);
    found.values = better;
    for (const TuneDimension& d : stage) mark(d, first_trial);
  }

  TuneFound found;

 private:
  static std::string title(const TuneDimension& d, int value) {
    return std::string(d.name) + " " + (value == 0 ? "by row size" : std::to_string(value));
  }
  static void set(TuningValues& values, const TuneDimension& d, int value) {
    values.*d.target = value == d.default_value ? 0 : value;
  }

  static std::string problem_of(const json& run) { return run.value("problem", std::string()); }

  void note(const TuneDimension& d, int value, const json& run, std::vector<std::pair<int, double>>& times) {
    TuneTrial trial{d.name, value, 0, false, value == d.default_value, problem_of(run)};
    if (trial.problem.empty()) {
      trial.us = tune_metric(d, run);
      times.emplace_back(value, trial.us);
    }
    found.trials.push_back(std::move(trial));
  }

  /// The fastest values must win again when measured alongside the defaults.
  void confirm(const TuneStage& stage, TuningValues& better) {
    const json by_default = measure_(found.values, "again as usual"), chosen = measure_(better, "again as chosen");
    for (const TuneDimension& d : stage) {
      if (d.smallest || better.*d.target == 0) continue;
      const bool ok = problem_of(by_default).empty() && problem_of(chosen).empty() &&
                      tune_metric(d, chosen) * (1 + slack_) < tune_metric(d, by_default);
      if (!ok) better.*d.target = 0;
    }
  }

  void mark(const TuneDimension& d, size_t first) {
    const int value = found.values.*d.target == 0 ? d.default_value : found.values.*d.target;
    for (size_t i = first; i < found.trials.size(); ++i)
      if (found.trials[i].name == d.name) found.trials[i].chosen = found.trials[i].value == value;
  }

  double slack_;
  const TuneMeasure& measure_;
};

/// True if at least one call takes fewer multiprocessors than the default and none takes more.
bool uses_fewer_sms(const std::vector<TuneStage>& stages, const TuningValues& values) {
  bool fewer = false;
  for (const TuneStage& stage : stages) {
    for (const TuneDimension& d : stage) {
      if (!d.smallest || values.*d.target == 0) continue;
      if (values.*d.target > d.default_value) return false;
      fewer = fewer || values.*d.target < d.default_value;
    }
  }
  return fewer;
}

std::string why_not(const std::vector<TuneStage>& stages, const TuningValues& values, double slack,
                    const std::vector<TuneGain>& gains) {
  std::string slower;
  for (const TuneGain& g : gains)
    if (g.after > (1 + slack) * g.before) slower += fmt::format("{}{} ({})", slower.empty() ? "" : ", ", g.of, g.text());
  if (!slower.empty()) return "slower by more than the slack: " + slower;
  const auto faster = [&](const TuneGain& g) { return g.after * (1 + slack) < g.before; };
  if (std::any_of(gains.begin(), gains.end(), faster) || uses_fewer_sms(stages, values)) return "";
  return "not faster by more than the slack, nor do calls take fewer multiprocessors";
}

}  // namespace

std::vector<TuneStage> tune_stages(TuningMode mode, int64_t hidden, int default_pieces, int max_sms) {
  if (mode == TuningMode::low_latency) return low_latency_stages(hidden, default_pieces, max_sms);
  if (max_sms == 0) return {};
  switch (mode) {
    case TuningMode::normal:
    case TuningMode::normal_expert_major: return normal_stages(max_sms);
    case TuningMode::flat: return flat_stages(max_sms);
    case TuningMode::low_latency:
    case TuningMode::ledger: break;
  }
  return ledger_stages(max_sms);
}

std::string TuneGain::text() const { return fmt::format("{:+.1f} %", 100 * (after / before - 1)); }

double tune_metric(const TuneDimension& dimension, const json& run) {
  double us = 0;
  for (const char* metric : dimension.metrics) us += run.at(json::json_pointer(metric)).get<double>();
  return us;
}

TuneFound tune_search(const std::vector<TuneStage>& stages, double slack, const TuneMeasure& measure) {
  Search search(slack, measure);
  for (const TuneStage& stage : stages) search.run(stage);
  return std::move(search.found);
}

std::vector<std::string> tune_figures(TuningMode mode) {
  switch (mode) {
    case TuningMode::normal:
    case TuningMode::normal_expert_major: return {"/dispatch/p50_us", "/combine/p50_us", "/quantized_dispatch/p50_us"};
    case TuningMode::low_latency:
      return {"/dispatch/p50_us", "/combine_per_route/p50_us", "/combine_per_rank/p50_us", "/both_per_route/p50_us",
              "/both_per_rank/p50_us"};
    case TuningMode::flat: return {"/all_to_all/p50_us"};
    case TuningMode::ledger: break;
  }
  return {"/kernel_us/median"};
}

TuneVerdict tune_compare(TuningMode mode, const std::vector<TuneStage>& stages, const TuningValues& values, double slack,
                         const json& untuned, const std::function<json(bool)>& measure) {
  constexpr int kRounds = 3;
  const std::vector<std::string> figures = tune_figures(mode);
  const auto figure = [](const json& run, const std::string& at) { return run.at(json::json_pointer(at)).get<double>(); };
  TuneVerdict verdict;
  for (const std::string& at : figures) {
    const double us = figure(untuned, at);
    verdict.gains.push_back({at.substr(1, at.rfind('/') - 1), us, us});
  }
  if (values == TuningValues{}) return verdict;
  constexpr double kNone = std::numeric_limits<double>::infinity();
  for (TuneGain& g : verdict.gains) g.before = g.after = kNone;
  for (int round = 0; round < kRounds; ++round) {
    for (const bool with : {false, true}) {
      const json run = measure(with);
      for (size_t i = 0; i < figures.size(); ++i) {
        double& best = with ? verdict.gains[i].after : verdict.gains[i].before;
        best = std::min(best, figure(run, figures[i]));
      }
    }
  }
  verdict.dropped = why_not(stages, values, slack, verdict.gains);
  if (!verdict.dropped.empty())
    for (TuneGain& g : verdict.gains) g.after = g.before;
  return verdict;
}

}  // namespace switchyard::tool
