// SPDX-License-Identifier: Apache-2.0
// `switchyard bench`: times and verifies dispatch, combine and whole layers, and compares them with limits measured on the same
// machine in the same run.
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
/// The case of a mode on a backend. \throws UsageError if it needs GPUs and this build has no CUDA code
std::unique_ptr<BenchCase> make_bench_case(const Mode& mode, Backend backend);
/// \returns the exit status
int run_bench(const BenchOptions& options);

}  // namespace switchyard::tool
