// SPDX-License-Identifier: Apache-2.0
// The search of `switchyard tune`: what may vary in each mode, in which order, and which value is chosen. Knows no clock and no
// device: what measures is given to it.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "switchyard/tuning.hpp"

namespace switchyard::tool {

/// A value to be found.
struct TuneDimension {
  const char* name;
  int TuningValues::*target;
  std::vector<int> candidates;       ///< ascending, `usual` among them
  int usual;                         ///< what the library does without a tuning
  std::vector<const char*> metrics;  ///< of a run, as JSON pointers to microseconds; their sum counts
  bool fewest;                       ///< the smallest within the slack of the fastest; else the fastest
};
/// Dimensions that do not touch each other's metrics: they vary in the same measurements.
using TuneStage = std::vector<TuneDimension>;

/// What a mode has to tune, stage by stage; none on the CPU but pieces. `usual_pieces`: untuned. `most_sms`: of a rank, 0 on
/// the CPU.
std::vector<TuneStage> tune_stages(TuningMode mode, int64_t hidden, int usual_pieces, int most_sms);
/// Microseconds of a run by the metrics of a dimension.
double tune_metric(const TuneDimension& dimension, const nlohmann::json& run);

/// One candidate that was measured.
struct TuneTrial {
  std::string name;
  int value = 0;
  double us = 0;        ///< 0: it could not be measured
  bool chosen = false;  ///< in the end
  bool usual = false;
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

}  // namespace switchyard::tool
