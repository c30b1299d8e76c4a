// SPDX-License-Identifier: Apache-2.0
// The GPUs of this machine, queried only through the driver: no CUDA toolkit and no link-time dependency is needed.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace switchyard::tool {

struct Gpu {
  std::string name;
  int compute_major = 0;
  int compute_minor = 0;
  int multiprocessors = 0;
  uint64_t memory_bytes = 0;
  bool virtual_memory = false;    ///< VMM allocations (cuMemCreate)
  bool file_descriptors = false;  ///< VMM allocations can be exported as POSIX file descriptors
  bool host_register = false;     ///< host memory can be registered (mapped for the GPU)
  int pci_bus = 0;
  int nvlinks = -1;  ///< active links; -1: unknown, NVML cannot be loaded
};

struct GpuProbe {
  bool driver = false;         ///< libcuda.so.1 was found and initialized
  std::string problem;         ///< the reason if not
  int cuda_version = 0;        ///< newest CUDA that the driver supports, 13000 = 13.0
  std::string driver_version;  ///< "580.65.06", from the kernel module; may be empty
  std::vector<Gpu> gpus;
  std::vector<std::vector<bool>> peer_access;     ///< [g][h]
  std::vector<std::vector<bool>> native_atomics;  ///< [g][h] all CUDA atomics work over the link: yes on NVLink, no on PCIe
  std::vector<std::vector<int>> link_rank;        ///< [g][h] the driver's ranking of the links, 0 is the fastest; -1: unknown

  /// "4 x NVIDIA H200", or a comma-separated list of names; "" without a GPU.
  std::string names() const;
};

/// Queries the driver in a child process so that this process can still fork ranks that use GPUs. Call it while this process
/// has only one thread.
GpuProbe probe_gpus();

/// The GPUs used by a run.
struct UsedGpus {
  GpuProbe probe;
  int count() const { return static_cast<int>(probe.gpus.size()); }
  /// Number of multiprocessors of one GPU, and a rank's share of them if `ranks` ranks are distributed over the GPUs.
  int sms() const { return probe.gpus.front().multiprocessors; }
  int64_t sms_of_rank(int64_t ranks) const { return sms() / ((ranks + count() - 1) / count()); }
  const std::string& name() const { return probe.gpus.front().name; }
  nlohmann::json described() const;
};
/// For --backend cuda; like probe_gpus(). \throws UsageError if this build has no CUDA code or there is no usable GPU
UsedGpus gpus_to_use();

}  // namespace switchyard::tool
