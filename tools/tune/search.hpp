// SPDX-License-Identifier: Apache-2.0
// The search performed by `switchyard tune`: the dimensions of each mode, their order, and the selection of values. It is
// independent of clocks and devices, because the caller supplies the measurement.
#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "switchyard/tuning.hpp"

namespace switchyard::tool {

/// A tunable value.
struct TuneDimension {
  const char* name;
  int TuningValues::*target;
  std::vector<int> candidates;       ///< ascending, include `default_value`
  int default_value;                 ///< the library's choice without tuning
  std::vector<const char*> metrics;  ///< of a run, as JSON pointers to microseconds; their sum is compared
  bool smallest;                     ///< choose the smallest value within the slack of the fastest; else the fastest
};
/// Dimensions that do not affect one another's metrics. They are varied in the same measurements.
using TuneStage = std::vector<TuneDimension>;

/// Stages of a mode's search; on the CPU, only pieces can be tuned. `default_pieces`: untuned. `max_sms`: number per rank, 0 on
/// the CPU.
std::vector<TuneStage> tune_stages(TuningMode mode, int64_t hidden, int default_pieces, int max_sms);
/// Microseconds of a run, summed over a dimension's metrics.
double tune_metric(const TuneDimension& dimension, const nlohmann::json& run);

/// A measured candidate.
struct TuneTrial {
  std::string name;
  int value = 0;
  double us = 0;        ///< 0: it could not be measured
  bool chosen = false;  ///< after all measurements
  bool is_default = false;
  std::string problem;
};
struct TuneFound {
  TuningValues values;  ///< 0 where the library's own choice is equally good
  std::vector<TuneTrial> trials;
};
/// \returns the times of a run with these values, or an object whose "problem" (which may be present and empty) states why they
/// are impossible
using TuneMeasure = std::function<nlohmann::json(const TuningValues& values, const std::string& what)>;
/// Runs the stages in order, each with the values chosen in earlier stages. `slack`: differences up to this fraction are
/// treated as noise. A non-default value must be faster by more than the slack in two measurements, unless the smallest value
/// is sought.
TuneFound tune_search(const std::vector<TuneStage>& stages, double slack, const TuneMeasure& measure);

/// A figure of a mode, in microseconds before and after tuning.
struct TuneGain {
  std::string of;
  double before = 0, after = 0;
  std::string text() const;  ///< "+1.2 %"
};
/// All figures that matter to a user of the mode, as JSON pointers to a run's microseconds. For low_latency, they include the
/// figures for both calls back to back, which are a metric only in the stage that tunes the pieces.
std::vector<std::string> tune_figures(TuningMode mode);
/// The final decision about the values that were found.
struct TuneVerdict {
  std::vector<TuneGain> gains;  ///< of each of tune_figures()
  std::string dropped;          ///< reason why the values do not merit an entry; empty if they do, or if there are none
};
/// Measures alternately without and with `values`, three times each, and compares the best of each figure. Values merit an
/// entry if no figure is slower by more than the slack and, in addition, either a figure is faster by more than the slack or a
/// call takes fewer multiprocessors (and none takes more). If there are no values, nothing is measured, and the gains compare
/// `untuned` with itself. `measure(true)` measures with the values.
TuneVerdict tune_compare(TuningMode mode, const std::vector<TuneStage>& stages, const TuningValues& values, double slack,
                         const nlohmann::json& untuned, const std::function<nlohmann::json(bool with)>& measure);

}  // namespace switchyard::tool
