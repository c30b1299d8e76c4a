// SPDX-License-Identifier: Apache-2.0
// `switchyard doctor`: what this machine can do, what not, why, and what to do about it.
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
  std::string value;   ///< what was found
  std::string reason;  ///< why it is limited or missing; empty if ok
  std::string action;  ///< what to do; empty if nothing
};

std::vector<Finding> check_cpu();
std::vector<Finding> check_memory();
std::vector<Finding> check_processes();
std::vector<Finding> check_gpus();
/// Findings about the GPUs of any machine. `heap_choice`: value of SWITCHYARD_CUDA_HEAP, or "".
std::vector<Finding> gpu_findings(const GpuProbe& probe, const std::string& heap_choice);
/// Traces: `ticks` of the GPUs' global timers, in nanoseconds.
Finding timer_finding(const std::vector<uint64_t>& ticks);
/// Memory of GPUs passed as file descriptors: `problems` of each, "" if it works.
Finding descriptor_finding(const std::vector<std::string>& problems);
/// Expert compute on GPUs, on each of which a few rows are computed: `problems` of each, "" if they are as on the host.
std::vector<std::string> try_experts(int gpus);  ///< nothing without CUDA code; not in a process that will fork ranks
Finding experts_finding(const std::vector<std::string>& problems);
/// What one object of normal mode takes of each rank's memory: CPU, or CUDA with `available` bytes on each GPU.
Finding memory_finding(Backend backend, int world, uint64_t available);
/// The backend cuda, from the findings above and whether this build has it.
Finding judge_cuda(const std::vector<Finding>& found, bool in_build);
/// What tuning groups would have; `devices`: this machine's, as the keys of entries name them.
Finding tuning_finding(const std::vector<std::string>& devices);
std::vector<Finding> check_tuning();
std::vector<Finding> check_libraries();
/// The variables of this process: the rank that they make it, and each of them.
std::vector<Finding> check_environment();
/// The backends, judged from the findings of the others.
std::vector<Finding> judge_backends(const std::vector<Finding>& found);

struct DoctorOptions {
  bool json = false;
};
/// \returns the exit status: kExitOk if the CPU backend works in both forms, else kExitCheckFailed.
int run_doctor(const DoctorOptions& options);

}  // namespace switchyard::tool
