// SPDX-License-Identifier: Apache-2.0
// `switchyard doctor --measure`: the numbers of this machine that `switchyard plan` predicts from, each measured by itself.
#pragma once

#include <string>
#include <vector>

#include "cli/progress.hpp"
#include "plan/topology.hpp"
#include "switchyard/types.hpp"

namespace switchyard::tool {

struct MeasureOptions {
  std::string path;             ///< the topology file
  std::string backend = "cpu";  ///< cuda: the GPUs of this machine
  int64_t hosts = 2;            ///< of the test bed that the file describes: all of them are this machine
  int64_t seconds = 4;          ///< for the rates of memory and network, roughly
};

/// Measures, writes the file and says what is in it. \throws UsageError, Error, std::runtime_error \returns the exit status
int run_measure(const MeasureOptions& options);

/// A line of the report, and of `measured` in the file: what, how.
struct Method {
  std::string what, how;
};
using Methods = std::vector<Method>;

/// Medians over the slowest rank, microseconds, of a dispatch and a combine that move nothing, on groups of so many ranks that
/// are threads: what a call costs besides its rows.
void measure_calls(HostTopology& host, const std::vector<int>& ranks, Backend backend, Progress& progress);

/// Fills in all of a host's numbers but calls and network.
void measure_cpu_host(HostTopology& host, double seconds, Progress& progress, Methods& methods);
/// The same of GPUs. \throws UsageError without CUDA code in this build
void measure_gpu_host(HostTopology& host, int gpus, const std::string& name, Progress& progress, Methods& methods);

}  // namespace switchyard::tool
