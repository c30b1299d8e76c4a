// SPDX-License-Identifier: Apache-2.0
// `switchyard trace`: a timeline of the work of every warp on every rank during a few calls, and a summary of it.
#pragma once

#include <cstdint>
#include <string>

#include "bench/options.hpp"
#include "cli/verb.hpp"

namespace switchyard::tool {

extern const Verb kTraceVerb;

inline constexpr int64_t kMaxTraceEvents = 1 << 20;  ///< per worker

struct TraceVerbOptions {
  BenchOptions run;  ///< the traced run; its measurement options are not used
  int64_t calls = 1;
  int64_t cost_rounds = 0;  ///< number of rounds; each makes `calls` calls without and with recording
  int64_t events = 256;
  std::string out = "switchyard-trace.json";
  std::string in;  ///< an existing trace; no run takes place
  bool json = false;
  std::string gpus;  ///< names and driver, filled in by the run
};

/// \returns the exit status
int run_trace(const TraceVerbOptions& options);

}  // namespace switchyard::tool
