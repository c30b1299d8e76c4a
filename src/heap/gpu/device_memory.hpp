// SPDX-License-Identifier: Apache-2.0
// Memory of one rank's segment on a GPU, and mappings of it: VMM allocations, cudaMalloc, opened cudaIpc handles.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/unique_fd.hpp"

namespace switchyard::detail {

/// Number of times that this process has requested GPU memory from the driver, which calls of an exchange object never do.
/// Every call site counts its request before making it.
uint64_t num_device_allocations() noexcept;
void count_device_allocation() noexcept;

/// One reference to a VMM allocation of the driver. The memory lives until its last reference and its last mapping, in any
/// process, are released.
class PhysicalMemory {
 public:
  PhysicalMemory() = default;
  PhysicalMemory(PhysicalMemory&& other) noexcept;
  PhysicalMemory& operator=(PhysicalMemory&& other) noexcept;
  ~PhysicalMemory();

  /// `bytes` is a multiple of vmm_granularity(device). Throws Error(system) naming requested, free and total bytes.
  static PhysicalMemory create(int device, size_t bytes);
  /// Imports a descriptor from export_fd, of this or another process. The caller keeps `fd`.
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
/// Granularity of sizes and addresses of memory on `device` (2 MiB on the GPUs known so far).
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

/// An address range, reserved for the lifetime of the object, with or without memory mapped to it.
class VmmSegment final : public DeviceSegment {
 public:
  VmmSegment(int device, size_t bytes, size_t alignment);
  ~VmmSegment() override;

  /// Maps `memory` to the addresses, readable and writable by `devices`. On an exception nothing is mapped. The mapping holds
  /// its own reference.
  void map(const PhysicalMemory& memory, std::span<const int> devices);
  /// Idempotent. Throws Error(system) if the driver refuses.
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
/// `base`: the start of a cudaMalloc allocation, whose device is current.
IpcHandle ipc_handle_of(void* base);

/// Memory of another process, mapped for `device` by its cudaIpc handle. The owner must not free it before this object is
/// destroyed.
class IpcSegment final : public DeviceSegment {
 public:
  IpcSegment(int device, const IpcHandle& handle);
  ~IpcSegment() override;
};

/// Memory owned by another rank of this process.
class BorrowedSegment final : public DeviceSegment {
 public:
  BorrowedSegment(int device, std::byte* data) : DeviceSegment(device) { data_ = data; }
};

/// Enables access of `device` to cudaMalloc memory of `peer`. Idempotent.
void enable_peer_access(int device, int peer);
/// Throws Error(unsupported) naming both devices unless `device` can access memory of `peer`.
void check_peer_access(int device, int peer);

/// Synchronous accesses from the host on a separate stream, so that they do not wait for other work. The device is current.
void fill_zero(std::byte* data, size_t bytes);
void copy_to_host(void* to, const std::byte* from, size_t bytes);
void copy_to_device(std::byte* to, const void* from, size_t bytes);

}  // namespace switchyard::detail
