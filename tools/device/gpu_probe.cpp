// SPDX-License-Identifier: Apache-2.0
#include "device/gpu_probe.hpp"

#include <dlfcn.h>
#include <fmt/core.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/verb.hpp"
#include "device/rank_device.hpp"
#include "run/in_child.hpp"

namespace switchyard::tool {
namespace {

// The parts of the driver API's C ABI used in this file. Numbers are CUdevice_attribute and CUdevice_P2PAttribute values.
constexpr int kMultiprocessors = 16;
constexpr int kPciBus = 33;
constexpr int kComputeMajor = 75;
constexpr int kComputeMinor = 76;
constexpr int kHostRegister = 99;
constexpr int kVirtualMemory = 102;
constexpr int kPosixFileDescriptors = 103;
constexpr int kP2pPerformanceRank = 1;
constexpr int kP2pNativeAtomics = 3;

/// A library that may not be installed.
class Driver {
 public:
  explicit Driver(const char* library) : library_(dlopen(library, RTLD_NOW | RTLD_LOCAL)) {}
  ~Driver() {
    if (library_ != nullptr) dlclose(library_);
  }
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;
  explicit operator bool() const { return library_ != nullptr; }

  /// Calls a driver function. Returns -1 if this driver lacks the function.
  template <class... Args>
  int call(const char* name, Args... args) const {
    void* symbol = dlsym(library_, name);
    if (symbol == nullptr) return -1;
    return reinterpret_cast<int (*)(Args...)>(symbol)(args...);
  }
  std::string error_text(int code) const {
    const char* text = nullptr;
    if (code == -1 || call("cuGetErrorString", code, &text) != 0 || text == nullptr) return "error " + std::to_string(code);
    return std::string(text) + " (error " + std::to_string(code) + ")";
  }

 private:
  void* library_;
};

/// The first word in the kernel module's banner that consists only of digits and dots.
std::string module_version() {
  std::ifstream in("/proc/driver/nvidia/version");
  std::string line;
  std::getline(in, line);
  std::istringstream words(line);
  for (std::string word; words >> word;) {
    if (word.find('.') != std::string::npos && word.find_first_not_of("0123456789.") == std::string::npos) return word;
  }
  return "";
}

int attribute(const Driver& driver, int attribute, int device) {
  int value = 0;
  return driver.call("cuDeviceGetAttribute", &value, attribute, device) == 0 ? value : 0;
}

Gpu describe(const Driver& driver, int device) {
  Gpu gpu;
  char name[256] = {};
  if (driver.call("cuDeviceGetName", name, static_cast<int>(sizeof name), device) == 0) gpu.name = name;
  size_t bytes = 0;
  if (driver.call("cuDeviceTotalMem_v2", &bytes, device) == 0) gpu.memory_bytes = bytes;
  gpu.compute_major = attribute(driver, kComputeMajor, device);
  gpu.compute_minor = attribute(driver, kComputeMinor, device);
  gpu.multiprocessors = attribute(driver, kMultiprocessors, device);
  gpu.virtual_memory = attribute(driver, kVirtualMemory, device) != 0;
  gpu.file_descriptors = attribute(driver, kPosixFileDescriptors, device) != 0;
  gpu.host_register = attribute(driver, kHostRegister, device) != 0;
  gpu.pci_bus = attribute(driver, kPciBus, device);
  return gpu;
}

/// Counts the active NVLinks of each device.
void count_nvlinks(const Driver& driver, std::vector<Gpu>& gpus) {
  constexpr unsigned kMaxLinks = 18;  // NVML_NVLINK_MAX_LINKS
  const Driver nvml("libnvidia-ml.so.1");
  if (!nvml || nvml.call("nvmlInit_v2") != 0) return;
  for (size_t g = 0; g < gpus.size(); ++g) {
    char bus[32] = {};
    void* device = nullptr;
    if (driver.call("cuDeviceGetPCIBusId", bus, static_cast<int>(sizeof bus), static_cast<int>(g)) != 0) continue;
    if (nvml.call("nvmlDeviceGetHandleByPciBusId_v2", static_cast<const char*>(bus), &device) != 0) continue;
    gpus[g].nvlinks = 0;
    for (unsigned link = 0; link < kMaxLinks; ++link) {
      int active = 0;
      if (nvml.call("nvmlDeviceGetNvLinkState", device, link, &active) == 0 && active == 1) ++gpus[g].nvlinks;
    }
  }
  nvml.call("nvmlShutdown");
}

/// Initializes the driver without creating a context.
GpuProbe probe_in_process() {
  GpuProbe probe;
  probe.driver_version = module_version();
  const Driver driver("libcuda.so.1");
  if (!driver) {
    probe.problem = "libcuda.so.1 was not found";
    return probe;
  }
  driver.call("cuDriverGetVersion", &probe.cuda_version);
  const int code = driver.call("cuInit", 0u);
  if (code != 0) {
    probe.problem = "cuInit: " + driver.error_text(code);
    return probe;
  }
  probe.driver = true;
  int count = 0;
  driver.call("cuDeviceGetCount", &count);
  for (int device = 0; device < count; ++device) probe.gpus.push_back(describe(driver, device));
  count_nvlinks(driver, probe.gpus);
  const auto n = static_cast<size_t>(count);
  probe.peer_access.assign(n, std::vector<bool>(n));
  probe.native_atomics.assign(n, std::vector<bool>(n));
  probe.link_rank.assign(n, std::vector<int>(n, -1));
  for (int from = 0; from < count; ++from) {
    for (int to = 0; to < count; ++to) {
      if (from == to) continue;
      int yes = 0;
      int atomics = 0;
      if (driver.call("cuDeviceCanAccessPeer", &yes, from, to) != 0) yes = 0;
      if (driver.call("cuDeviceGetP2PAttribute", &atomics, kP2pNativeAtomics, from, to) != 0) atomics = 0;
      probe.peer_access[static_cast<size_t>(from)][static_cast<size_t>(to)] = yes != 0;
      probe.native_atomics[static_cast<size_t>(from)][static_cast<size_t>(to)] = atomics != 0;
      int rank = 0;
      if (driver.call("cuDeviceGetP2PAttribute", &rank, kP2pPerformanceRank, from, to) == 0)
        probe.link_rank[static_cast<size_t>(from)][static_cast<size_t>(to)] = rank;
    }
  }
  return probe;
}

using nlohmann::json;

json to_json(const GpuProbe& p) {
  json gpus = json::array();
  for (const Gpu& g : p.gpus)
    gpus.push_back({g.name, g.compute_major, g.compute_minor, g.multiprocessors, g.memory_bytes, g.virtual_memory,
                    g.file_descriptors, g.host_register, g.pci_bus, g.nvlinks});
  return {{"driver", p.driver}, {"problem", p.problem},   {"cuda", p.cuda_version},      {"version", p.driver_version},
          {"gpus", gpus},       {"peers", p.peer_access}, {"atomics", p.native_atomics}, {"links", p.link_rank}};
}

GpuProbe probe_from(const json& j) {
  GpuProbe p;
  j.at("driver").get_to(p.driver);
  j.at("problem").get_to(p.problem);
  j.at("cuda").get_to(p.cuda_version);
  j.at("version").get_to(p.driver_version);
  for (const json& g : j.at("gpus"))
    p.gpus.push_back({g[0].get<std::string>(), g[1].get<int>(), g[2].get<int>(), g[3].get<int>(), g[4].get<uint64_t>(),
                      g[5].get<bool>(), g[6].get<bool>(), g[7].get<bool>(), g[8].get<int>(), g[9].get<int>()});
  p.peer_access = j.at("peers").get<std::vector<std::vector<bool>>>();
  p.native_atomics = j.at("atomics").get<std::vector<std::vector<bool>>>();
  p.link_rank = j.at("links").get<std::vector<std::vector<int>>>();
  return p;
}

}  // namespace

std::string GpuProbe::names() const {
  if (gpus.empty()) return "";
  bool same = true;
  std::string all;
  for (const Gpu& g : gpus) {
    same = same && g.name == gpus[0].name;
    all += (all.empty() ? "" : ", ") + g.name;
  }
  return same ? std::to_string(gpus.size()) + " x " + gpus[0].name : all;
}

GpuProbe probe_gpus() {
  try {
    return probe_from(run_in_child([] { return to_json(probe_in_process()); }));
  } catch (const std::exception& e) {
    GpuProbe none;
    none.problem = e.what();
    return none;
  }
}

nlohmann::json UsedGpus::described() const {
  std::vector<std::string> names;
  for (const Gpu& g : probe.gpus) names.push_back(g.name);
  return {{"names", names},
          {"sms", sms()},
          {"driver", probe.driver_version},
          {"driver_cuda", probe.cuda_version},
          {"runtime_cuda", cuda_runtime_version()}};
}

UsedGpus gpus_to_use() {
  if (!built_with_cuda()) throw UsageError(no_cuda_text());
  UsedGpus used{probe_gpus()};
  if (used.probe.gpus.empty())
    throw UsageError(fmt::format("--backend: 'cuda' given, but no GPU can be used ({}); see switchyard doctor",
                                 used.probe.problem.empty() ? "the driver finds none" : used.probe.problem));
  return used;
}

}  // namespace switchyard::tool
