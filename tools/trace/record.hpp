// SPDX-License-Identifier: Apache-2.0
// `switchyard trace`: a timeline of what every warp of every rank did in a few calls, and a summary of it.
#pragma once

#include <cstdint>
#include <string>

#include "bench/options.hpp"
#include "cli/verb.hpp"

namespace switchyard::tool {

extern const Verb kTraceVerb;

inline constexpr int64_t kMaxTraceEvents = 1 << 20;  ///< of a worker

struct TraceVerbOptions {
  BenchOptions run;  ///< what is run; its measuring options are not used
  int64_t calls = 1;
  int64_t cost_rounds = 0;  ///< of `calls` without recording and with it
  int64_t events = 256;
  std::string out = "switchyard-trace.json";
  std::string in;  ///< a written trace: nothing is run
  bool json = false;
  std::string gpus;  ///< names and driver, filled in
};

/// \returns the exit status
int run_trace(const TraceVerbOptions& options);

}  // namespace switchyard::tool
