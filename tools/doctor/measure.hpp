// SPDX-License-Identifier: Apache-2.0
// `switchyard doctor --measure`: the numbers of this machine from which `switchyard plan` predicts, each measured separately.
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
  int64_t hosts = 2;            ///< hosts of the test bed that the file describes: all of them are this machine
  int64_t seconds = 4;          ///< approximate duration for the rates of memory and network
};

/// Measures, writes the file and prints its content. \throws UsageError, Error, std::runtime_error \returns the exit status
int run_measure(const MeasureOptions& options);

/// A line of the report, and of `measured` in the file: the quantity and its method.
struct Method {
  std::string what, how;
};
using Methods = std::vector<Method>;

/// Cost of a call besides its rows: median microseconds, on the slowest rank, of a dispatch and of a combine that move nothing,
/// for groups of each of the sizes `ranks`. Ranks are threads.
void measure_calls(HostTopology& host, const std::vector<int>& ranks, Backend backend, Progress& progress);

/// Fills in all numbers of a host except calls and network.
void measure_cpu_host(HostTopology& host, double seconds, Progress& progress, Methods& methods);
/// The GPU counterpart of measure_cpu_host(). \throws UsageError if this build has no CUDA code
void measure_gpu_host(HostTopology& host, int gpus, const std::string& name, Progress& progress, Methods& methods);

}  // namespace switchyard::tool
