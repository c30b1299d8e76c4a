// SPDX-License-Identifier: Apache-2.0
// The search of `switchyard tune`: what may vary in each mode, in which order, and which value is chosen. Knows no clock and no
// device: what measures is given to it.
#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "switchyard/tuning.hpp"

namespace switchyard::tool {

/// A value to be found.
struct TuneDimension {
  const char* name;
  int TuningValues::*target;
  std::vector<int> candidates;       ///< ascending, `default_value` among them
  int default_value;                 ///< what the library does without a tuning
  std::vector<const char*> metrics;  ///< of a run, as JSON pointers to microseconds; their sum counts
  bool smallest;                     ///< the smallest within the slack of the fastest; else the fastest
};
/// Dimensions that do not touch each other's metrics: they vary in the same measurements.
using TuneStage = std::vector<TuneDimension>;

/// What a mode has to tune, stage by stage; none on the CPU but pieces. `usual_pieces`: untuned. `max_sms`: of a rank, 0 on
/// the CPU.
std::vector<TuneStage> tune_stages(TuningMode mode, int64_t hidden, int usual_pieces, int max_sms);
/// Microseconds of a run by the metrics of a dimension.
double tune_metric(const TuneDimension& dimension, const nlohmann::json& run);

/// One candidate that was measured.
struct TuneTrial {
  std::string name;
  int value = 0;
  double us = 0;        ///< 0: it could not be measured
  bool chosen = false;  ///< in the end
  bool is_default = false;
  std::string problem;
};
struct TuneFound {
  TuningValues values;  ///< 0 where the library's own choice is as good
  std::vector<TuneTrial> trials;
};
/// \returns what a run with these values took, or an object whose "problem" says why they are not possible (there may be an
/// empty one).
using TuneMeasure = std::function<nlohmann::json(const TuningValues& values, const std::string& what)>;
/// Stage after stage, each with what those before have chosen. `slack`: differences up to this share are noise; a value other
/// than the usual one must be faster by more, twice (unless the fewest are sought).
TuneFound tune_search(const std::vector<TuneStage>& stages, double slack, const TuneMeasure& measure);

/// A figure of a mode: its untuned and tuned microseconds.
struct TuneGain {
  std::string of;
  double before = 0, after = 0;
  std::string text() const;  ///< "+1.2 %"
};
/// Every figure that a user of the mode waits for, as JSON pointers to microseconds of a run: of low_latency also those of both
/// calls back to back, which no stage but that of the pieces looks at.
std::vector<std::string> tune_figures(TuningMode mode);
/// What found values are worth in the end.
struct TuneVerdict {
  std::vector<TuneGain> gains;  ///< of each of tune_figures()
  std::string dropped;          ///< why the values are not worth an entry; empty: they are, or there are none
};
/// Measures without and with `values` in turn, three times, and compares the best of each figure. Values are worth an entry if
/// no figure is slower by more than the slack, and one is faster by more than that, or calls take fewer multiprocessors (none
/// of them more). Without values nothing is measured: the gains are those of `untuned` over itself. `measure(true)` is with
/// them.
TuneVerdict tune_compare(TuningMode mode, const std::vector<TuneStage>& stages, const TuningValues& values, double slack,
                         const nlohmann::json& untuned, const std::function<nlohmann::json(bool with)>& measure);

}  // namespace switchyard::tool
