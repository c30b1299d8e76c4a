// SPDX-License-Identifier: Apache-2.0
// `switchyard doctor`: capabilities and limitations of this machine, with reasons and remedies.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/verb.hpp"
#include "device/gpu_probe.hpp"
#include "switchyard/group.hpp"

namespace switchyard::tool {

extern const Verb kDoctorVerb;

enum class Verdict { ok, limited, no, note };

/// One line of the report.
struct Finding {
  std::string group;
  std::string name;
  Verdict verdict = Verdict::note;
  std::string value;   ///< observed value
  std::string reason;  ///< why it is limited or missing; empty if ok
  std::string action;  ///< remedy; empty if none is needed
};

std::vector<Finding> check_cpu();
std::vector<Finding> check_memory();
std::vector<Finding> check_processes();
std::vector<Finding> check_gpus();
/// Findings about GPUs, from a probe of any machine. `heap_choice`: the value of SWITCHYARD_CUDA_HEAP, or "".
std::vector<Finding> gpu_findings(const GpuProbe& probe, const std::string& heap_choice);
/// Timers for traces. `ticks`: resolution of each GPU's global timer in nanoseconds.
Finding timer_finding(const std::vector<uint64_t>& ticks);
/// Findings about passing GPU memory as file descriptors. `problems`: for each GPU, "" if it works.
Finding descriptor_finding(const std::vector<std::string>& problems);
/// Expert computation on GPUs: each computes a few rows. `problems`: for each GPU, "" if its results equal the host's.
std::vector<std::string> try_experts(int gpus);  ///< empty without CUDA code; not in a process that will fork ranks
Finding experts_finding(const std::vector<std::string>& problems);
/// Memory per rank for one normal-mode object, either on the CPU or on CUDA with `available` bytes on each GPU.
Finding memory_finding(Backend backend, int world, uint64_t available);
/// Judges the cuda backend by the findings above and by whether this build includes it.
Finding judge_cuda(const std::vector<Finding>& found, bool in_build);
/// The tuning that groups would use. `devices`: the devices of this machine, named as in the keys of entries.
Finding tuning_finding(const std::vector<std::string>& devices);
std::vector<Finding> check_tuning();
std::vector<Finding> check_libraries();
/// Environment variables of this process: the rank they define, and the variables themselves.
std::vector<Finding> check_environment();
/// Judges the backends by the other findings.
std::vector<Finding> judge_backends(const std::vector<Finding>& found);

struct DoctorOptions {
  bool json = false;
};
/// \returns the exit status: kExitOk if the CPU backend works in both forms, else kExitCheckFailed.
int run_doctor(const DoctorOptions& options);
/// Prints the engines in the Python environment that SWITCHYARD_PYTHON names, or python3. \returns the exit status:
/// kExitCheckFailed if a value of an environment variable is refused or this Python has no package switchyard
/// \throws std::runtime_error if Python cannot be started or fails
int list_engines();

}  // namespace switchyard::tool
