// SPDX-License-Identifier: Apache-2.0
#include "doctor/doctor.hpp"

#include <fmt/core.h>
#include <gnu/libc-version.h>
#include <hwy/highway.h>
#include <hwy/targets.h>
#include <unistd.h>

#include <CLI/Version.hpp>
#include <algorithm>
#include <nlohmann/json.hpp>
#include <cstdlib>
#include <filesystem>
#include <oneapi/dnnl/dnnl.hpp>

#include "cli/build_info.hpp"
#include "cli/outputs.hpp"
#include "cli/style.hpp"
#include "cli/verb.hpp"
#include "cli/words.hpp"
#include "device/rank_device.hpp"
#include "switchyard/status.hpp"
#include "switchyard/tuning.hpp"

namespace switchyard::tool {
namespace {

const char* isa_name(dnnl::cpu_isa isa) {
  switch (isa) {
    case dnnl::cpu_isa::sse41: return "SSE4.1";
    case dnnl::cpu_isa::avx: return "AVX";
    case dnnl::cpu_isa::avx2: return "AVX2";
    case dnnl::cpu_isa::avx512_core: return "AVX-512";
    case dnnl::cpu_isa::avx512_core_vnni: return "AVX-512 VNNI";
    case dnnl::cpu_isa::avx512_core_bf16: return "AVX-512 BF16";
    case dnnl::cpu_isa::avx512_core_amx: return "AVX-512 and AMX";
    case dnnl::cpu_isa::avx2_vnni: return "AVX2 VNNI";
    default: return "its best for this CPU";
  }
}

bool on_path(const std::string& program) {
  const char* path = std::getenv("PATH");
  for (const std::string& dir : split(path == nullptr ? "" : path, ':')) {
    if (!dir.empty() && access((dir + "/" + program).c_str(), X_OK) == 0) return true;
  }
  return false;
}

std::string verdict_text(Verdict verdict) {
  switch (verdict) {
    case Verdict::ok: return green("ok     ");
    case Verdict::limited: return yellow("limited");
    case Verdict::no: return red("no     ");
    case Verdict::note: return dim("-      ");
  }
  return "";
}

const char* verdict_name(Verdict verdict) {
  switch (verdict) {
    case Verdict::ok: return "ok";
    case Verdict::limited: return "limited";
    case Verdict::no: return "no";
    case Verdict::note: return "note";
  }
  return "";
}

bool all_work(const std::vector<Finding>& found, const std::vector<std::string>& groups) {
  return std::none_of(found.begin(), found.end(), [&](const Finding& f) {
    return f.verdict == Verdict::no && std::find(groups.begin(), groups.end(), f.group) != groups.end();
  });
}

void print(const std::vector<Finding>& found) {
  constexpr size_t kName = 24;
  std::string group;
  for (const Finding& f : found) {
    if (f.group != group) fmt::print("{}{}\n", group.empty() ? "" : "\n", bold(f.group));
    group = f.group;
    fmt::print("  {} {:<{}} {}\n", verdict_text(f.verdict), f.name, kName, f.value);
    const std::string margin(11 + kName, ' ');
    if (!f.reason.empty()) fmt::print("{}{}\n", margin, dim("why: " + f.reason));
    if (!f.action.empty()) fmt::print("{}{}\n", margin, "do:  " + f.action);
  }
}

}  // namespace

std::vector<Finding> check_libraries() {
  std::vector<Finding> out;
  out.push_back({"Libraries", "switchyard", Verdict::ok, build_description(), "", ""});
  const dnnl_version_t* dnnl = dnnl_version();
  Finding gemm{"Libraries",
               "oneDNN",
               Verdict::ok,
               fmt::format("{}.{}.{}, uses {}", dnnl->major, dnnl->minor, dnnl->patch, isa_name(dnnl::get_effective_cpu_isa())),
               "",
               ""};
  if (const char* cap = std::getenv("DNNL_MAX_CPU_ISA")) {
    gemm.verdict = Verdict::limited;
    gemm.reason = std::string("DNNL_MAX_CPU_ISA=") + cap + " caps the instruction set";
    gemm.action = "unset DNNL_MAX_CPU_ISA";
  }
  out.push_back(gemm);
  const int64_t targets = hwy::SupportedTargets();
  const int64_t best = targets & -targets;  // lower bits are better targets
  out.push_back({"Libraries", "Highway", Verdict::ok,
                 fmt::format("{}.{}.{}, best target {}", HWY_MAJOR, HWY_MINOR, HWY_PATCH, hwy::TargetName(best)), "", ""});
  out.push_back({"Libraries", "C library", Verdict::ok, fmt::format("glibc {}", gnu_get_libc_version()), "", ""});
  Finding mpi{"Libraries", "Open MPI", Verdict::note, "found", "", ""};
  if (!on_path("mpirun")) {
    mpi.value = "not found";
    mpi.reason = "only the benchmark's peer (mpi_alltoallv) and launching ranks with mpirun need it";
    mpi.action = "apt-get install openmpi-bin libopenmpi-dev, if you want that comparison";
  }
  out.push_back(mpi);
  return out;
}

Finding tuning_finding(const std::vector<std::string>& devices) {
  Finding f{"Tuning", "tuning", Verdict::ok, "", "", ""};
  try {
    const Tuning tuning = Tuning::from_environment();
    for (const TuningFile& file : tuning.files()) {
      const auto here = std::count_if(file.entries.begin(), file.entries.end(), [&](const TuningEntry& e) {
        return std::any_of(devices.begin(), devices.end(), [&](const std::string& device) {
          TuningKey asked = e.key;
          asked.device = device;
          const TuningEntry* const found = file.nearest(asked);
          return found != nullptr && found->key.device == e.key.device;
        });
      });
      f.value += fmt::format("{}{}: {} for {}", f.value.empty() ? "" : "; then ", file.name,
                             here == 0 ? "nothing" : fmt::format("{} of {} entries", here, file.entries.size()),
                             joined(devices, ", "));
      if (here > 0 || &file == &tuning.files().back()) continue;
      f.verdict = Verdict::limited;
      f.reason = "the file has no entry for a device of this machine";
      f.action = "switchyard tune --out " + file.name;
    }
  } catch (const Error& error) {
    f.verdict = Verdict::no;
    f.value = error.what();
    f.reason = "forming a group fails";
    f.action = "repair the file, or unset SWITCHYARD_TUNING";
  }
  return f;
}

std::vector<Finding> check_tuning() {
  std::vector<std::string> devices{"cpu"};
  for (const Gpu& gpu : probe_gpus().gpus)
    if (std::find(devices.begin(), devices.end(), gpu.name) == devices.end()) devices.push_back(gpu.name);
  return {tuning_finding(devices)};
}

std::vector<Finding> judge_backends(const std::vector<Finding>& found) {
  std::vector<Finding> out;
  Finding threads{"Backends", "cpu, ranks as threads", Verdict::ok, "ready", "", ""};
  if (!all_work(found, {"Memory", "Tuning"}))
    threads = {"Backends", threads.name, Verdict::no, "not usable", "see the lines marked 'no' above", ""};
  out.push_back(threads);
  Finding processes{"Backends", "cpu, ranks as processes", Verdict::ok, "ready", "", ""};
  if (!all_work(found, {"Memory", "Processes", "Tuning"})) {
    processes = {"Backends", processes.name, Verdict::no, "not usable", "see the lines marked 'no' above", ""};
  }
  out.push_back(processes);
  out.push_back(judge_cuda(found, built_with_cuda()));
  return out;
}

int run_doctor(const DoctorOptions& options) {
  std::vector<Finding> found;
  for (const auto check :
       {check_cpu, check_memory, check_processes, check_gpus, check_libraries, check_tuning, check_environment}) {
    for (Finding& f : check()) found.push_back(std::move(f));
  }
  const std::vector<Finding> backends = judge_backends(found);
  found.insert(found.end(), backends.begin(), backends.end());
  const bool works = all_work(backends, {"Backends"});
  if (options.json) {
    nlohmann::json lines = nlohmann::json::array();
    for (const Finding& f : found) {
      lines.push_back({{"group", f.group},
                       {"name", f.name},
                       {"verdict", verdict_name(f.verdict)},
                       {"value", f.value},
                       {"why", f.reason},
                       {"do", f.action}});
    }
    print_json({{"findings", lines}, {"ok", works}});
  } else {
    print(found);
    fmt::print("\n{}\n", works ? "All requirements of the CPU backend are met. Next: switchyard demo"
                               : "A requirement of the CPU backend is missing: see the lines marked 'no'.");
  }
  return works ? kExitOk : kExitCheckFailed;
}

}  // namespace switchyard::tool
