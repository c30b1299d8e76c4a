// SPDX-License-Identifier: Apache-2.0
#include "heap/gpu/device_memory.hpp"

#include <atomic>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "heap/gpu/copy_stream.hpp"
#include "heap/gpu/device_guard.hpp"
#include "heap/gpu/driver.cuh"
#include "heap/memory_limits.hpp"
#include "switchyard/status.hpp"

namespace switchyard::detail {
namespace {

std::atomic<uint64_t> g_allocations{0};

CUmemAllocationProp properties(int device) {
  CUmemAllocationProp p = {};
  p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  p.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  p.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  p.location.id = device;
  return p;
}

CUdeviceptr address_of(const std::byte* data) { return reinterpret_cast<CUdeviceptr>(data); }

std::string gpu_text(int device) { return "GPU " + std::to_string(device); }

/// The device must be current.
[[noreturn]] void throw_out_of_memory(int device, size_t asked) {
  gpu::forget_error();
  size_t free = 0, total = 0;
  check(gpu::memory_info(&free, &total), "cudaMemGetInfo of " + gpu_text(device));
  throw Error(ErrorCode::system, gpu_text(device) + " has no room for " + describe_bytes(asked) + " (" + std::to_string(asked) +
                                     " bytes): " + std::to_string(free) + " of " + std::to_string(total) +
                                     " bytes are free; lower heap_bytes or free memory of that GPU");
}

/// PCI address of a device, or "?".
std::string pci_of(int device) {
  char text[32] = "?";
  if (gpu::pci_address(text, sizeof text, device) != gpu::kOk) gpu::forget_error();
  return text;
}

void finish(const char* what) { check(gpu::wait_for_stream(copy_stream()), what); }

}  // namespace

uint64_t num_device_allocations() noexcept { return g_allocations.load(std::memory_order_relaxed); }
void count_device_allocation() noexcept { g_allocations.fetch_add(1, std::memory_order_relaxed); }

// ---- physical memory ----

PhysicalMemory::PhysicalMemory(PhysicalMemory&& other) noexcept
    : handle_(other.handle_), held_(std::exchange(other.held_, false)) {}

PhysicalMemory& PhysicalMemory::operator=(PhysicalMemory&& other) noexcept {
  std::swap(handle_, other.handle_);
  std::swap(held_, other.held_);
  return *this;
}

PhysicalMemory::~PhysicalMemory() {
  if (held_) driver().release(handle_);
}

PhysicalMemory PhysicalMemory::adopt(uint64_t handle) noexcept {
  PhysicalMemory memory;
  memory.handle_ = handle;
  memory.held_ = true;
  return memory;
}

PhysicalMemory PhysicalMemory::create(int device, size_t bytes) {
  const DeviceGuard guard(device);
  const CUmemAllocationProp wanted = properties(device);
  CUmemGenericAllocationHandle handle = 0;
  count_device_allocation();
  const CUresult result = driver().create(&handle, bytes, &wanted, 0);
  if (result == CUDA_ERROR_OUT_OF_MEMORY) throw_out_of_memory(device, bytes);
  check(result, "cuMemCreate of " + describe_bytes(bytes) + " on " + gpu_text(device));
  return adopt(handle);
}

PhysicalMemory PhysicalMemory::import_from(int fd) {
  CUmemGenericAllocationHandle handle = 0;
  // The driver expects the descriptor itself in place of a pointer.
  void* const as_pointer = reinterpret_cast<void*>(static_cast<uintptr_t>(fd));
  check(driver().import_handle(&handle, as_pointer, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
        "cuMemImportFromShareableHandle of a peer's memory");
  return adopt(handle);
}

UniqueFd PhysicalMemory::export_fd() const {
  int fd = -1;
  check(driver().export_handle(&fd, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0), "cuMemExportToShareableHandle");
  return UniqueFd(fd);
}

bool vmm_supported(int device) {
  CUdevice handle = 0;
  check(driver().device_get(&handle, device), "cuDeviceGet of " + gpu_text(device));
  for (const CUdevice_attribute attribute : {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
                                             CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED}) {
    int value = 0;
    check(driver().device_attribute(&value, attribute, handle), "cuDeviceGetAttribute of " + gpu_text(device));
    if (value == 0) return false;
  }
  return true;
}

size_t vmm_granularity(int device) {
  const DeviceGuard guard(device);
  const CUmemAllocationProp wanted = properties(device);
  size_t granularity = 0;
  check(driver().granularity(&granularity, &wanted, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
        "cuMemGetAllocationGranularity of " + gpu_text(device));
  return granularity;
}

// ---- mappings ----

VmmSegment::VmmSegment(int device, size_t bytes, size_t alignment) : DeviceSegment(device), bytes_(bytes) {
  const DeviceGuard guard(device);
  CUdeviceptr address = 0;
  check(driver().reserve(&address, bytes, alignment, 0, 0), "cuMemAddressReserve of " + describe_bytes(bytes));
  data_ = reinterpret_cast<std::byte*>(address);
}

VmmSegment::~VmmSegment() {
  try {
    const DeviceGuard guard(device_);
    if (mapped_) driver().unmap(address_of(data_), bytes_);
    driver().free_address(address_of(data_), bytes_);
  } catch (const Error&) {
    // The driver is shutting down and releases everything.
  }
}

void VmmSegment::map(const PhysicalMemory& memory, std::span<const int> devices) {
  const DeviceGuard guard(device_);
  check(driver().map(address_of(data_), bytes_, 0, memory.handle(), 0), "cuMemMap of " + describe_bytes(bytes_));
  std::vector<CUmemAccessDesc> access;
  for (const int device : devices) {
    CUmemAccessDesc d = {};
    d.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    d.location.id = device;
    d.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    access.push_back(d);
  }
  const CUresult result = driver().set_access(address_of(data_), bytes_, access.data(), access.size());
  if (result != CUDA_SUCCESS) driver().unmap(address_of(data_), bytes_);
  check(result, "cuMemSetAccess of " + describe_bytes(bytes_));
  mapped_ = true;
}

void VmmSegment::unmap() {
  if (!mapped_) return;
  const DeviceGuard guard(device_);
  check(driver().unmap(address_of(data_), bytes_), "cuMemUnmap of " + describe_bytes(bytes_));
  mapped_ = false;
}

MallocSegment::MallocSegment(int device, size_t bytes) : DeviceSegment(device) {
  const DeviceGuard guard(device);
  void* data = nullptr;
  count_device_allocation();
  const gpu::Status error = gpu::allocate(&data, bytes);
  if (error == gpu::kOutOfMemory) throw_out_of_memory(device, bytes);
  check(error, "cudaMalloc of " + describe_bytes(bytes) + " on " + gpu_text(device));
  data_ = static_cast<std::byte*>(data);
}

MallocSegment::~MallocSegment() {
  if (data_ == nullptr) return;
  try {
    const DeviceGuard guard(device_);
    if (gpu::release(data_) != gpu::kOk) gpu::forget_error();
  } catch (const Error&) {
    // The driver is shutting down and releases everything.
  }
}

IpcHandle ipc_handle_of(void* base) {
  gpu::MemoryHandle handle = {};
  static_assert(sizeof handle == sizeof(IpcHandle));
  check(gpu::handle_of(&handle, base), "cudaIpcGetMemHandle");
  IpcHandle bytes;
  std::memcpy(bytes.data(), &handle, sizeof handle);
  return bytes;
}

IpcSegment::IpcSegment(int device, const IpcHandle& bytes) : DeviceSegment(device) {
  const DeviceGuard guard(device);
  gpu::MemoryHandle handle = {};
  std::memcpy(&handle, bytes.data(), sizeof handle);
  void* data = nullptr;
  check(gpu::open_memory(&data, handle), "cudaIpcOpenMemHandle of a peer's memory");
  data_ = static_cast<std::byte*>(data);
}

IpcSegment::~IpcSegment() {
  try {
    const DeviceGuard guard(device_);
    if (gpu::close_memory(data_) != gpu::kOk) gpu::forget_error();
  } catch (const Error&) {
    // The driver is shutting down and releases everything.
  }
}

// ---- peers ----

void enable_peer_access(int device, int peer) {
  if (device == peer) return;
  const DeviceGuard guard(device);
  const gpu::Status error = gpu::enable_access(peer);
  if (error == gpu::kPeerAlreadyEnabled) {
    gpu::forget_error();
    return;
  }
  check(error, "cudaDeviceEnablePeerAccess from " + gpu_text(device) + " to " + gpu_text(peer));
}

void check_peer_access(int device, int peer) {
  if (device == peer) return;
  int can = 0;
  check(gpu::can_access(&can, device, peer), "cudaDeviceCanAccessPeer of " + gpu_text(device) + " and " + gpu_text(peer));
  if (can != 0) return;
  throw Error(ErrorCode::unsupported, gpu_text(device) + " (" + pci_of(device) + ") cannot access the memory of " +
                                          gpu_text(peer) + " (" + pci_of(peer) +
                                          "): use GPUs linked by NVLink or PCIe peer to peer ('nvidia-smi topo "
                                          "-p2p r' shows them), or check that IOMMU and ACS are off");
}

// ---- host access ----

void fill_zero(std::byte* data, size_t bytes) {
  check(gpu::fill(data, 0, bytes, copy_stream()), "cudaMemsetAsync of a heap segment");
  finish("clearing a heap segment");
}

void copy_to_host(void* to, const std::byte* from, size_t bytes) {
  check(gpu::copy_to_host(to, from, bytes, copy_stream()), "cudaMemcpyAsync to host");
  finish("copying heap memory to the host");
}

void copy_to_device(std::byte* to, const void* from, size_t bytes) {
  check(gpu::copy_to_device(to, from, bytes, copy_stream()), "cudaMemcpyAsync to device");
  finish("restoring heap memory from the host");
}

}  // namespace switchyard::detail
