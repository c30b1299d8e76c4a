// SPDX-License-Identifier: Apache-2.0
// `switchyard doctor --measure`: the figures for this machine on which `switchyard plan` bases its predictions, each measured
// separately.
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
  int64_t hosts = 2;            ///< hosts of the test bed that the file describes; all of them are this machine
  int64_t seconds = 4;          ///< approximate duration of the memory and network measurements
};

/// Measures, writes the file and prints its content. \throws UsageError, Error, std::runtime_error \returns the exit status
int run_measure(const MeasureOptions& options);

/// A line of the report and of `measured` in the file, which states what was measured and how.
struct Method {
  std::string what, how;
};
using Methods = std::vector<Method>;

/// Cost of a call apart from its rows, for a group of each size in `ranks`: the slowest rank's median microseconds for a
/// dispatch and for a combine that move nothing. Ranks are threads.
void measure_calls(HostTopology& host, const std::vector<int>& ranks, Backend backend, Progress& progress);

/// Fills in all figures of a host except those of calls and network.
void measure_cpu_host(HostTopology& host, double seconds, Progress& progress, Methods& methods);
/// The GPU counterpart of measure_cpu_host(). \throws UsageError if this build has no CUDA code
void measure_gpu_host(HostTopology& host, int gpus, const std::string& name, Progress& progress, Methods& methods);

}  // namespace switchyard::tool
