// SPDX-License-Identifier: Apache-2.0
// `switchyard tune`: determines launch shapes and pieces by measurement and writes the library's tuning file.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/verb.hpp"

namespace switchyard::tool {

extern const Verb kTuneVerb;

struct TuneOptions {
  std::string backend = "cpu";
  std::vector<std::string> modes;  ///< empty: all modes with tunable values on this backend
  int64_t ranks = 0;               ///< 0: as in bench
  std::vector<int64_t> tokens;     ///< empty: by mode
  std::vector<int64_t> hidden{7168};
  int64_t experts = 0, topk = 0;
  std::string quantize = "f32";  ///< low_latency: scales; normal: scales of the quantizing dispatches (f32 if none)
  std::string routing = "uniform";
  int64_t iterations = 100, warmup = 10;
  int64_t slack = 3;  ///< per cent
  bool processes = false;
  int64_t seed = 1;
  std::string out = "switchyard.tuning";
  std::string json_path, html_path;
  std::string commit;
};

/// Names of the tunable modes. Normal mode has two.
std::vector<std::string> tune_modes();
/// \returns the exit status
int run_tune(const TuneOptions& options);

}  // namespace switchyard::tool
