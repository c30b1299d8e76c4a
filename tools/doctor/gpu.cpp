// SPDX-License-Identifier: Apache-2.0
// doctor's findings about GPUs: driver information, and the timer as read by a kernel.
#include <fmt/core.h>

#include <algorithm>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "cli/style.hpp"
#include "device/rank_device.hpp"
#include "doctor/doctor.hpp"
#include "run/in_child.hpp"
#include "switchyard/normal.hpp"

namespace switchyard::tool {
namespace {

constexpr int kCudaNeeded = 13000;

Finding driver_finding(const GpuProbe& probe) {
  Finding f{"GPU",
            "driver",
            Verdict::ok,
            fmt::format("{}CUDA {}.{}", probe.driver_version.empty() ? "" : probe.driver_version + ", ",
                        probe.cuda_version / 1000, probe.cuda_version % 1000 / 10),
            "",
            ""};
  if (probe.cuda_version < kCudaNeeded) {
    f.verdict = Verdict::limited;
    f.reason = "GPU code of this project needs a driver for CUDA 13.0 (580 or later)";
    f.action = "update the NVIDIA driver";
  }
  return f;
}

Finding gpu_finding(size_t index, const Gpu& gpu) {
  Finding f{"GPU",
            fmt::format("GPU {}", index),
            Verdict::ok,
            fmt::format("{}, sm_{}{}, {} SMs, {}, PCI bus {:02x}", gpu.name, gpu.compute_major, gpu.compute_minor,
                        gpu.multiprocessors, binary_size(static_cast<double>(gpu.memory_bytes)), gpu.pci_bus),
            "",
            ""};
  if (gpu.compute_major != 9) {
    f.verdict = Verdict::limited;
    f.reason = "kernels are compiled for sm_90a (Hopper), unless CMAKE_CUDA_ARCHITECTURES says otherwise";
  }
  return f;
}

/// Lists ordered pairs, because access may differ by direction.
template <class Test>
std::string pairs_where(size_t gpus, Test&& test) {
  std::string out;
  for (size_t a = 0; a < gpus; ++a) {
    for (size_t b = 0; b < gpus; ++b) {
      if (a != b && test(a, b)) out += fmt::format("{}{}>{}", out.empty() ? "" : ", ", a, b);
    }
  }
  return out;
}

Finding peer_finding(const GpuProbe& p) {
  const size_t n = p.gpus.size();
  const std::string missing = pairs_where(n, [&](size_t a, size_t b) { return !p.peer_access[a][b]; });
  Finding f{"GPU", "peer access", Verdict::ok, "every pair", "", ""};
  if (missing.empty()) return f;
  const bool none = pairs_where(n, [&](size_t a, size_t b) { return p.peer_access[a][b]; }).empty();
  f.verdict = none ? Verdict::no : Verdict::limited;
  f.value = none ? "no pair" : "not " + missing;
  f.reason = "ranks on these GPUs cannot write each other's memory, so a group cannot hold them";
  f.action = "check nvidia-smi topo -m, the IOMMU (ACS) and that fabricmanager runs; or choose GPUs with CUDA_VISIBLE_DEVICES";
  return f;
}

/// One row of the peer matrix.
Finding links_of(const GpuProbe& p, size_t gpu) {
  std::string nvlink, other, none;
  const auto add = [](std::string& list, size_t i) { list += fmt::format("{}{}", list.empty() ? "" : " ", i); };
  for (size_t i = 0; i < p.gpus.size(); ++i) {
    if (i == gpu) continue;
    add(!p.peer_access[gpu][i] ? none : p.native_atomics[gpu][i] ? nvlink : other, i);
  }
  std::string text;
  for (const auto& [name, list] : {std::pair("NVLink to", &nvlink), {"PCIe to", &other}, {"no access to", &none}}) {
    if (!list->empty()) text += fmt::format("{}{} {}", text.empty() ? "" : ", ", name, *list);
  }
  return {"GPU", fmt::format("links of GPU {}", gpu), Verdict::note, text, "", ""};
}

/// Active NVLinks of each GPU.
Finding nvlinks_finding(const GpuProbe& p) {
  Finding f{"GPU", "active NVLinks", Verdict::note, "", "", ""};
  bool known = true, same = true;
  for (size_t g = 0; g < p.gpus.size(); ++g) {
    const int links = p.gpus[g].nvlinks;
    known = known && links >= 0;
    same = same && links == p.gpus[0].nvlinks;
    f.value += fmt::format("{}{} on GPU {}", g == 0 ? "" : ", ", links, g);
  }
  if (!known) f.value = "unknown (no NVML)";
  if (!known) return f;
  if (same) f.value = fmt::format("{} on {}", p.gpus[0].nvlinks, p.gpus.size() == 1 ? "GPU 0" : "every GPU");
  if (same) return f;
  f.verdict = Verdict::limited;
  f.reason = "exchanges run at the speed of the GPU with the fewest links";
  f.action = "nvidia-smi nvlink --status shows which are down";
  return f;
}

Finding atomics_finding(const GpuProbe& p) {
  const size_t n = p.gpus.size();
  const std::string missing =
      pairs_where(n, [&](size_t a, size_t b) { return p.peer_access[a][b] && !p.native_atomics[a][b]; });
  std::string ranks;
  for (size_t a = 0; a < n; ++a)
    for (size_t b = 0; b < n; ++b)
      if (a != b && p.link_rank[a][b] > 0)
        ranks += fmt::format("{}{}>{}: {}", ranks.empty() ? "" : ", ", a, b, p.link_rank[a][b]);
  Finding f{"GPU",       "native peer atomics",
            Verdict::ok, "every pair" + (ranks.empty() ? std::string() : "; slower links by the driver's rank: " + ranks),
            "",          ""};
  if (missing.empty()) return f;
  f.verdict = Verdict::limited;
  f.value = "not " + missing;
  f.reason = "these pairs have no NVLink (PCIe has no such atomics): everything works, at the speed of PCIe";
  return f;
}

/// The kind of heap that a group on these GPUs would use, decided as in heap/gpu.
Finding heap_finding(const GpuProbe& p, const std::string& choice) {
  const auto exports = [](const Gpu& g) { return g.virtual_memory && g.file_descriptors; };
  const bool all = std::all_of(p.gpus.begin(), p.gpus.end(), exports);
  Finding f{"GPU", "symmetric heap", Verdict::ok, "vmm: driver allocations passed as file descriptors", "", ""};
  if (all && choice != "ipc") return f;
  if (choice == "vmm") {
    return {f.group,
            f.name,
            Verdict::no,
            "SWITCHYARD_CUDA_HEAP=vmm, but a GPU does not support it",
            "memory cannot be exported as file descriptors: forming a group fails",
            "unset SWITCHYARD_CUDA_HEAP"};
  }
  f.verdict = Verdict::limited;
  f.value = "ipc: cudaMalloc and cudaIpc handles";
  f.reason = std::string(all ? "SWITCHYARD_CUDA_HEAP=ipc requests it" : "memory cannot be exported as file descriptors") +
             ": ranks must be processes and leave together, and there is no sleep";
  f.action = all ? "unset SWITCHYARD_CUDA_HEAP"
                 : "needs a driver and a GPU with the virtual memory API (not under some MIG or vGPU set-ups)";
  return f;
}

Finding host_memory_finding(const GpuProbe& p) {
  Finding f{"GPU", "registered host memory", Verdict::ok, "kernels can write it", "", ""};
  for (size_t g = 0; g < p.gpus.size(); ++g) {
    if (p.gpus[g].host_register) continue;
    f.verdict = Verdict::no;
    f.value = fmt::format("not on GPU {}", g);
    f.reason = "faults and aborts pass between kernels and hosts through it (cudaHostRegister): forming a group fails";
    f.action = "use the CPU backend there";
    break;
  }
  return f;
}

Finding no_driver_finding(const GpuProbe& p) {
  return {"GPU",
          "driver",
          Verdict::note,
          "none: " + p.problem,
          "the CPU backend needs none",
          p.driver_version.empty()
              ? "to use GPUs: install NVIDIA driver 580 or later"
              : "a kernel module is loaded (" + p.driver_version + "): give the container access (docker --gpus all)"};
}

bool is_kind_of_heap(const std::string& choice) {
  return choice.empty() || choice == "auto" || choice == "vmm" || choice == "ipc";
}

}  // namespace

std::vector<Finding> gpu_findings(const GpuProbe& probe, const std::string& heap_choice) {
  std::vector<Finding> out{probe.driver ? driver_finding(probe) : no_driver_finding(probe)};
  for (size_t g = 0; g < probe.gpus.size(); ++g) out.push_back(gpu_finding(g, probe.gpus[g]));
  if (probe.driver && probe.gpus.empty())
    out.push_back({"GPU", "devices", Verdict::no, "the driver finds none", "CUDA_VISIBLE_DEVICES may hide them",
                   "unset CUDA_VISIBLE_DEVICES, or docker --gpus all"});
  if (probe.gpus.size() > 1) {
    out.push_back(peer_finding(probe));
    for (size_t g = 0; g < probe.gpus.size(); ++g) out.push_back(links_of(probe, g));
    out.push_back(atomics_finding(probe));
    out.push_back(nvlinks_finding(probe));
  }
  if (!is_kind_of_heap(heap_choice))
    out.push_back({"GPU", "symmetric heap", Verdict::no, "SWITCHYARD_CUDA_HEAP=" + heap_choice,
                   "no such kind of heap: forming a group on GPUs fails", "set it to auto, vmm or ipc"});
  else if (!probe.gpus.empty())
    out.push_back(heap_finding(probe, heap_choice));
  if (!probe.gpus.empty()) out.push_back(host_memory_finding(probe));
  return out;
}

Finding descriptor_finding(const std::vector<std::string>& problems) {
  Finding f{"GPU", "descriptor exchange", Verdict::ok, "memory exported, passed, imported, mapped, written and read", "", ""};
  std::string wrong;
  for (size_t g = 0; g < problems.size(); ++g)
    if (!problems[g].empty()) wrong += fmt::format("{}GPU {}: {}", wrong.empty() ? "" : "; ", g, problems[g]);
  if (wrong.empty()) return f;
  f.verdict = Verdict::no;
  f.value = wrong;
  f.reason =
      "the GPU reports support, but a group of processes cannot be formed if memory cannot be passed as file descriptors";
  f.action = "SWITCHYARD_CUDA_HEAP=ipc does not need it; containers and sandboxes may forbid it";
  return f;
}

Finding timer_finding(const std::vector<uint64_t>& ticks) {
  constexpr uint64_t kFine = 2000;  // a traced call takes tens of microseconds
  std::string each;
  bool same = true, fine = true;
  for (size_t g = 0; g < ticks.size(); ++g) {
    each += fmt::format("{}{} ns on GPU {}", g == 0 ? "" : ", ", ticks[g], g);
    same = same && ticks[g] == ticks[0];
    fine = fine && ticks[g] > 0 && ticks[g] <= kFine;
  }
  Finding f{"GPU", "global timer", Verdict::ok, "ticks every " + (same ? fmt::format("{} ns", ticks.at(0)) : each), "", ""};
  if (fine) return f;
  f.verdict = Verdict::limited;
  f.reason = "traces: spans of different ranks may be shifted against each other by as much (inside a kernel they are exact)";
  f.action = "end profilers and virtual GPU set-ups that coarsen it";
  return f;
}

Finding memory_finding(Backend backend, int world, uint64_t available) {
  NormalConfig config;
  config.hidden = 7168;
  config.num_experts = 256;
  config.topk = 8;
  config.max_tokens = 4096;
  const MemoryRequirement need = NormalExchange::memory_required(config, world, backend);
  const auto size = [](size_t bytes) { return binary_size(static_cast<double>(bytes)); };
  Finding f{backend == Backend::cuda ? "GPU" : "Memory",
            "normal mode",
            Verdict::note,
            fmt::format("{} per rank for 4096 tokens of hidden 7168, bf16, top-8 of 256, {}: pool with staging {}, control {}",
                        size(need.total()), counted(world, "rank"), size(need.pool_bytes), size(need.control_bytes)),
            "",
            ""};
  const uint64_t all = backend == Backend::cuda ? need.total() : need.total() * static_cast<uint64_t>(world);
  if (all <= available) return f;
  f.reason = fmt::format("{} are there", size(available));
  f.action = "fewer max_tokens, or ring staging (Staging::ring), which bounds it";
  return f;
}

std::vector<Finding> check_gpus() {
  const char* choice = std::getenv("SWITCHYARD_CUDA_HEAP");
  const GpuProbe probe = probe_gpus();
  std::vector<Finding> out = gpu_findings(probe, choice != nullptr ? choice : "");
  if (probe.gpus.empty()) return out;
  const auto gpus = static_cast<int>(probe.gpus.size());
  try {
    const auto ticks = run_in_child([&]() -> nlohmann::json { return measure_timer_ticks(gpus); }).get<std::vector<uint64_t>>();
    if (!ticks.empty()) out.push_back(timer_finding(ticks));
  } catch (const std::exception& e) {
    out.push_back({"GPU", "global timer", Verdict::limited, std::string("not read: ") + e.what(),
                   "a kernel of this build did not run there", ""});
  }
  try {
    const auto problems = run_in_child([&]() -> nlohmann::json { return try_experts(gpus); }).get<std::vector<std::string>>();
    if (!problems.empty()) out.push_back(experts_finding(problems));
  } catch (const std::exception& e) {
    out.push_back(experts_finding({e.what()}));
  }
  const Finding& heap = *std::find_if(out.begin(), out.end(), [](const Finding& f) { return f.name == "symmetric heap"; });
  if (heap.verdict == Verdict::ok) {  // the heap consists of driver allocations
    std::vector<std::string> problems;
    try {
      problems = run_in_child([&]() -> nlohmann::json {
                   return try_descriptor_exchange(gpus, probe.peer_access);
                 }).get<std::vector<std::string>>();
    } catch (const std::exception& e) {
      problems = {e.what()};
    }
    if (!problems.empty()) out.push_back(descriptor_finding(problems));
  }
  out.push_back(memory_finding(Backend::cuda, gpus, probe.gpus.front().memory_bytes));
  return out;
}

Finding judge_cuda(const std::vector<Finding>& found, bool in_build) {
  size_t gpus = 0;
  std::string missing, limited;
  for (const Finding& f : found) {
    if (f.group != "GPU" && f.group != "Tuning") continue;
    gpus += f.name.rfind("GPU ", 0) == 0 ? 1 : 0;
    if (f.verdict == Verdict::no) missing += (missing.empty() ? "" : ", ") + f.name;
    if (f.verdict == Verdict::limited) limited += (limited.empty() ? "" : ", ") + f.name;
  }
  Finding f{"Backends", "cuda", Verdict::note, "", "", ""};
  if (!in_build) {
    f.value = "not in this build";
    f.reason = gpus > 0 ? fmt::format("{} present, but this build has the CPU backend only",
                                      counted(static_cast<int64_t>(gpus), "GPU"))
                        : "this build has the CPU backend only";
    f.action = "build with nvcc 13.0: ./dev build --preset cuda";
  } else if (gpus == 0) {
    f.value = "not usable here";
    f.reason = "no GPU can be reached: see GPU above";
  } else if (!missing.empty()) {
    f.verdict = Verdict::limited;
    f.value = missing == "peer access" ? "ready, with all ranks on one GPU" : "not usable";
    f.reason = "see above: " + missing;
  } else {
    f.verdict = limited.empty() ? Verdict::ok : Verdict::limited;
    f.value = fmt::format("ready on {}", counted(static_cast<int64_t>(gpus), "GPU"));
    if (!limited.empty()) f.reason = "see above: " + limited;
    f.action = "switchyard verify --backend cuda";
  }
  return f;
}

}  // namespace switchyard::tool
