// SPDX-License-Identifier: Apache-2.0
// `switchyard bench`: dispatch and combine, and whole layers, timed and verified, against the limits of the same machine in the
// same run.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "bench/case.hpp"
#include "bench/options.hpp"
#include "cli/verb.hpp"

namespace switchyard::tool {

extern const Verb kBenchVerb;

/// Names of the modes that can be measured.
std::vector<std::string> bench_modes();
/// What measures a mode on a backend. \throws UsageError without CUDA code in this build, if it takes GPUs
std::unique_ptr<BenchCase> make_bench_case(const Mode& mode, Backend backend);
/// \returns the exit status
int run_bench(const BenchOptions& options);

}  // namespace switchyard::tool
