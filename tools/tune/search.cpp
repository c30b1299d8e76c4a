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

std::vector<int> with_usual(std::initializer_list<int> list, int usual, int most) {
  std::vector<int> out{usual};
  for (const int value : list)
    if (value <= most) out.push_back(value);
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

TuneDimension sms(const char* name, int TuningValues::*target, int usual, int most, std::vector<const char*> metrics) {
  std::vector<int> candidates = with_usual({4, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 112, 128}, usual, most);
  if (candidates.back() != most) candidates.push_back(most);
  return {name, target, std::move(candidates), usual, std::move(metrics), true};
}

/// Warps per block of kernels that are compiled for `most`, which is what they take without a tuning.
TuneDimension warps(const char* name, int TuningValues::*target, int most, std::vector<const char*> metrics) {
  return {name, target, with_usual({4, 6, 8, 10, 12, 14}, most, most), most, std::move(metrics), false};
}

std::vector<TuneStage> normal_stages(int most) {
  const int usual = std::min(kDefaultSms, most), usual_quantising = std::min(kDefaultQuantizingSms, most);
  const std::vector<const char*> dispatch{"/dispatch/p50_us"}, combine{"/combine/p50_us"},
      quantised{"/quantized_dispatch/p50_us"};
  // Without a tuning stages follow from the row's size: 0 is that choice.
  return {{sms("dispatch_sms", &TuningValues::dispatch_sms, usual, most, dispatch),
           sms("combine_sms", &TuningValues::combine_sms, usual, most, combine),
           sms("quantized_dispatch_sms", &TuningValues::quantized_dispatch_sms, usual_quantising, most, quantised)},
          {{"dispatch_warps", &TuningValues::dispatch_warps, with_usual({6, 8, 10, 12}, kMostDispatchWarps, kMostDispatchWarps),
            kMostDispatchWarps, dispatch, false},
           {"combine_warps", &TuningValues::combine_warps,
            with_usual({8, 12, 14, 16, 18}, kMostCombineWarps, kMostCombineWarps), kMostCombineWarps, combine, false}},
          {{"dispatch_stages", &TuningValues::dispatch_stages, {0, 1, 2}, 0, dispatch, false}}};
}

std::vector<TuneStage> low_latency_stages(int64_t hidden, int usual, int most) {
  const std::vector<const char*> dispatch{"/dispatch/p50_us"}, combine{"/combine_per_route/p50_us", "/combine_per_rank/p50_us"};
  std::vector<TuneStage> stages;
  if (most > 0)
    stages = {{sms("dispatch_sms", &TuningValues::dispatch_sms, most, most, dispatch),
               sms("combine_sms", &TuningValues::combine_sms, most, most, combine)},
              {warps("dispatch_warps", &TuningValues::dispatch_warps, kMostLowLatencyWarps, dispatch),
               warps("combine_warps", &TuningValues::combine_warps, kMostLowLatencyWarps, combine)}};
  constexpr int64_t kLeastColumns = 128;  // of a piece
  const int pieces = static_cast<int>(std::min<int64_t>(16, (hidden + kLeastColumns - 1) / kLeastColumns));
  stages.push_back({{"pieces",
                     &TuningValues::pieces,
                     with_usual({1, 2, 3, 4, 6, 8, 10, 12, 14, 16}, usual, pieces),
                     usual,
                     {"/both_per_route/p50_us", "/both_per_rank/p50_us"},
                     false}});
  return stages;
}

std::vector<TuneStage> flat_stages(int most) {
  const std::vector<const char*> whole{"/all_to_all/p50_us"};
  return {{sms("sms", &TuningValues::sms, most, most, whole)},
          {warps("warps", &TuningValues::warps, kMostLowLatencyWarps, whole)}};
}

std::vector<TuneStage> ledger_stages(int most) {
  const std::vector<const char*> kernel{"/kernel_us/median"};
  return {{sms("sms", &TuningValues::sms, most, most, kernel)},
          {warps("warps", &TuningValues::warps, kMostLedgerWarps, kernel)},
          {{"chunk_kib", &TuningValues::chunk_kib, with_usual({4, 8, 16, 32, 128}, kUsualChunkKib, kMostChunkKib),
            kUsualChunkKib, kernel, false}}};
}

/// The value of the best of `times` (candidate, microseconds); 0: the usual one.
int pick(const TuneDimension& d, const std::vector<std::pair<int, double>>& times, double slack) {
  if (times.empty()) return 0;
  double fastest = times.front().second;
  for (const auto& [value, us] : times) fastest = std::min(fastest, us);
  const auto near = [&](const auto& t) { return t.second <= fastest * (1 + slack); };
  const auto known = std::find_if(times.begin(), times.end(), [&](const auto& t) { return t.first == d.usual; });
  if (!d.fewest && known != times.end() && near(*known)) return 0;
  const auto best =
      d.fewest ? std::find_if(times.begin(), times.end(), near)
               : std::min_element(times.begin(), times.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  return best->first == d.usual ? 0 : best->first;
}

class Search {
 public:
  Search(double slack, const TuneMeasure& measure) : slack_(slack), measure_(measure) {}

  void run(const TuneStage& stage) {
    std::vector<std::vector<std::pair<int, double>>> times(stage.size());
    size_t most = 0;
    for (const TuneDimension& d : stage) most = std::max(most, d.candidates.size());
    const size_t first_trial = found.trials.size();
    for (size_t i = 0; i < most; ++i) {
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
      differs = differs || (value != 0 && !stage[k].fewest);
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
  static void set(TuningValues& values, const TuneDimension& d, int value) { values.*d.target = value == d.usual ? 0 : value; }

  static std::string problem_of(const json& run) { return run.value("problem", std::string()); }

  void note(const TuneDimension& d, int value, const json& run, std::vector<std::pair<int, double>>& times) {
    TuneTrial trial{d.name, value, 0, false, value == d.usual, problem_of(run)};
    if (trial.problem.empty()) {
      trial.us = tune_metric(d, run);
      times.emplace_back(value, trial.us);
    }
    found.trials.push_back(std::move(trial));
  }

  /// What was fastest once must be so again, measured side by side with the usual values.
  void confirm(const TuneStage& stage, TuningValues& better) {
    const json usual = measure_(found.values, "again as usual"), chosen = measure_(better, "again as chosen");
    for (const TuneDimension& d : stage) {
      if (d.fewest || better.*d.target == 0) continue;
      const bool ok = problem_of(usual).empty() && problem_of(chosen).empty() &&
                      tune_metric(d, chosen) * (1 + slack_) < tune_metric(d, usual);
      if (!ok) better.*d.target = 0;
    }
  }

  void mark(const TuneDimension& d, size_t first) {
    const int value = found.values.*d.target == 0 ? d.usual : found.values.*d.target;
    for (size_t i = first; i < found.trials.size(); ++i)
      if (found.trials[i].name == d.name) found.trials[i].chosen = found.trials[i].value == value;
  }

  double slack_;
  const TuneMeasure& measure_;
};

/// Whether some call takes fewer multiprocessors than the library would, and none takes more.
bool takes_fewer(const std::vector<TuneStage>& stages, const TuningValues& values) {
  bool fewer = false;
  for (const TuneStage& stage : stages) {
    for (const TuneDimension& d : stage) {
      if (!d.fewest || values.*d.target == 0) continue;
      if (values.*d.target > d.usual) return false;
      fewer = fewer || values.*d.target < d.usual;
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
  if (std::any_of(gains.begin(), gains.end(), faster) || takes_fewer(stages, values)) return "";
  return "not faster by more than the slack, nor do calls take fewer multiprocessors";
}

}  // namespace

std::vector<TuneStage> tune_stages(TuningMode mode, int64_t hidden, int usual_pieces, int most_sms) {
  if (mode == TuningMode::low_latency) return low_latency_stages(hidden, usual_pieces, most_sms);
  if (most_sms == 0) return {};
  switch (mode) {
    case TuningMode::normal:
    case TuningMode::normal_expert_major: return normal_stages(most_sms);
    case TuningMode::flat: return flat_stages(most_sms);
    case TuningMode::low_latency:
    case TuningMode::ledger: break;
  }
  return ledger_stages(most_sms);
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
