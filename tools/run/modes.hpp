// SPDX-License-Identifier: Apache-2.0
// The tool's modes, with those properties of a mode that do not depend on the verb. Properties needed by only one verb are in
// that verb's own table, in tools/bench/driver.cpp, tools/verify/case.cpp, tools/trace/calls.cpp or tools/tune/tune.cpp.
#pragma once

#include <string>

#include "switchyard/tuning.hpp"
#include "switchyard/types.hpp"

namespace switchyard::tool {

struct Mode {
  const char* name;                ///< value of --mode
  TuningMode tuning;               ///< the mode whose tuning entries apply
  TuningMode expert_major_tuning;  ///< the mode whose tuning entries apply with --layout expert_major
  bool has_layouts;                ///< --layout, --staging, --order and --alignment apply; otherwise rows are expert-major
  bool has_dispatch;               ///< dispatches rows; the ledger combine only returns rows
  bool has_experts;                ///< experts compute between the calls, on rows of bf16 tokens
  bool plain_rows;                 ///< rows travel unchanged: neither fp8 rows nor --quantize
  bool one_launch;                 ///< a call is one launch, with one number of multiprocessors
  bool returns_per_route;          ///< one row returns for each route, regardless of --order
  int default_sms;                 ///< default number of multiprocessors per call; 0: all of the rank
  int64_t max_tokens;              ///< per rank

  TuningMode tuning_of(Layout layout) const { return layout == Layout::expert_major ? expert_major_tuning : tuning; }
};

/// kLayer is a layer made of separate calls, with experts between the calls of normal or low-latency mode. It uses the tuning,
/// multiprocessors and tokens of normal mode.
extern const Mode kNormal, kLowLatency, kFlat, kLedger, kLayer;

/// \throws std::invalid_argument if no mode has that name
const Mode& mode_named(const std::string& name);

}  // namespace switchyard::tool
