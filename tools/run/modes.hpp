// SPDX-License-Identifier: Apache-2.0
// The tool's modes: what is true of a mode whichever verb runs it. What a verb does in a mode stands in that verb's own table,
// in tools/bench/driver.cpp, tools/verify/case.cpp, tools/trace/calls.cpp and tools/tune/tune.cpp.
#pragma once

#include <string>

#include "switchyard/tuning.hpp"
#include "switchyard/types.hpp"

namespace switchyard::tool {

struct Mode {
  const char* name;                ///< as --mode takes it
  TuningMode tuning;               ///< the mode whose entries its objects take
  TuningMode expert_major_tuning;  ///< the mode whose entries they take where --layout is expert_major
  bool has_layouts;                ///< --layout, --staging, --order and --alignment apply; otherwise rows are expert-major
  bool has_dispatch;               ///< rows go out; the ledger combine only brings them back
  bool has_experts;                ///< experts compute between the calls, on rows of bf16 tokens
  bool plain_rows;                 ///< rows travel as they are: neither fp8 rows nor --quantize
  bool one_launch;                 ///< a call is one launch, with one number of multiprocessors
  bool returns_per_route;          ///< a row comes back for each route, whatever --order says
  int default_sms;                 ///< of a call that names no number; 0: all of the rank's
  int64_t max_tokens;              ///< of a rank

  TuningMode tuning_of(Layout layout) const { return layout == Layout::expert_major ? expert_major_tuning : tuning; }
};

/// kLayer is a layer in separate calls: experts, and the calls of normal or low-latency mode around them. What is said of
/// tuning, multiprocessors and tokens there is that of normal mode.
extern const Mode kNormal, kLowLatency, kFlat, kLedger, kLayer;

/// \throws std::invalid_argument for another word than a mode's name
const Mode& mode_named(const std::string& name);

}  // namespace switchyard::tool
