// SPDX-License-Identifier: Apache-2.0
// Memory of one rank's segment on a GPU and its mappings: VMM allocations, cudaMalloc memory, opened cudaIpc handles.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/unique_fd.hpp"

namespace switchyard::detail {

/// Number of times this process has requested GPU memory from the driver; calls on exchange objects never do. Every call site
/// counts its request before making it.
uint64_t num_device_allocations() noexcept;
void count_device_allocation() noexcept;

/// One reference to a VMM allocation in the driver. The memory lives until its last reference and its last mapping in any
/// process are released.
class PhysicalMemory {
 public:
  PhysicalMemory() = default;
  PhysicalMemory(PhysicalMemory&& other) noexcept;
  PhysicalMemory& operator=(PhysicalMemory&& other) noexcept;
  ~PhysicalMemory();

  /// `bytes` is a multiple of vmm_granularity(device). Throws Error(system) naming the requested, free and total bytes.
  static PhysicalMemory create(int device, size_t bytes);
  /// Imports a descriptor exported with export_fd by this or another process. The caller keeps `fd`.
  static PhysicalMemory import_from(int fd);
  UniqueFd export_fd() const;
  uint64_t handle() const noexcept { return handle_; }
  explicit operator bool() const noexcept { return held_; }
  /// Takes ownership of a driver handle.
  static PhysicalMemory adopt(uint64_t handle) noexcept;

 private:
  uint64_t handle_ = 0;
  bool held_ = false;
};

/// True if `device` can allocate VMM memory and export it as a file descriptor.
bool vmm_supported(int device);
/// Granularity of the sizes and addresses of memory on `device` (2 MiB on all GPUs known so far).
size_t vmm_granularity(int device);

/// One mapping of one rank's segment in this process.
class DeviceSegment {
 public:
  virtual ~DeviceSegment() = default;
  DeviceSegment(const DeviceSegment&) = delete;
  DeviceSegment& operator=(const DeviceSegment&) = delete;
  std::byte* data() const noexcept { return data_; }

 protected:
  explicit DeviceSegment(int device) : device_(device) {}
  int device_;  ///< its context is current for calls to the driver
  std::byte* data_ = nullptr;
};

/// An address range that is reserved for the lifetime of the object, with or without memory mapped to it.
class VmmSegment final : public DeviceSegment {
 public:
  VmmSegment(int device, size_t bytes, size_t alignment);
  ~VmmSegment() override;

  /// Maps `memory` to the addresses, readable and writable by `devices`. If it throws, nothing is mapped. The mapping holds its
  /// own reference.
  void map(const PhysicalMemory& memory, std::span<const int> devices);
  /// Idempotent. Throws Error(system) if the driver call fails.
  void unmap();
  bool mapped() const noexcept { return mapped_; }

 private:
  size_t bytes_;
  bool mapped_ = false;
};

/// Memory from cudaMalloc.
class MallocSegment final : public DeviceSegment {
 public:
  MallocSegment(int device, size_t bytes);
  ~MallocSegment() override;
  /// Leaves the memory allocated until the process ends, because a peer may still have it mapped.
  void abandon() noexcept { data_ = nullptr; }
};

using IpcHandle = std::array<std::byte, 64>;
/// `base` is the start of a cudaMalloc allocation, whose device is current.
IpcHandle ipc_handle_of(void* base);

/// Another process's memory, mapped for `device` through its cudaIpc handle. The owner must not free it before this object is
/// destroyed.
class IpcSegment final : public DeviceSegment {
 public:
  IpcSegment(int device, const IpcHandle& handle);
  ~IpcSegment() override;
};

/// Memory owned by another rank in this process.
class BorrowedSegment final : public DeviceSegment {
 public:
  BorrowedSegment(int device, std::byte* data) : DeviceSegment(device) { data_ = data; }
};

/// Gives `device` access to cudaMalloc memory on `peer`. Idempotent.
void enable_peer_access(int device, int peer);
/// Throws Error(unsupported) naming both devices unless `device` can access memory on `peer`.
void check_peer_access(int device, int peer);

/// Synchronous accesses from the host on a separate stream, so that they do not wait for other work. The device is current.
void fill_zero(std::byte* data, size_t bytes);
void copy_to_host(void* to, const std::byte* from, size_t bytes);
void copy_to_device(std::byte* to, const void* from, size_t bytes);

}  // namespace switchyard::detail
