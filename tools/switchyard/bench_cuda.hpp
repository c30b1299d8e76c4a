// SPDX-License-Identifier: Apache-2.0
// `switchyard bench --backend cuda`: dispatch and combine on GPUs against the limit of the links in the same run.
#pragma once

#include "bench.hpp"

namespace switchyard::tool {

/// What is wrong with a configuration before anything is measured: UsageError, or the library's Error.
void check_normal_cuda(const BenchOptions& options);
/// One configuration without anything left to choose: its entry in the runs of --json. \throws RankError, UsageError
nlohmann::json measured_normal_cuda(const BenchOptions& options);
/// `points`: every configuration to measure. \returns the exit status. Without CUDA code in this build: throws UsageError.
int run_bench_cuda(const BenchOptions& options, std::vector<BenchOptions> points);

}  // namespace switchyard::tool
