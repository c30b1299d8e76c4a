// SPDX-License-Identifier: Apache-2.0
#include "heap/gpu/peer_range.hpp"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "bootstrap/deadline.hpp"
#include "heap/collective_step.hpp"
#include "heap/gpu/device_guard.hpp"
#include "heap/gpu/device_memory.hpp"
#include "heap/gpu/driver.cuh"
#include "heap/gpu/process_id.hpp"
#include "switchyard/status.hpp"

namespace switchyard::detail {
namespace {

constexpr const char* kSubject = "registration of a buffer";
constexpr const char* kAllowed =
    "; allowed are cudaMalloc, and cuMemCreate with CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR; or let the call copy";

enum class Allocator : int32_t { none, cuda_malloc, vmm };

/// A rank's contribution: its buffer and the allocation that contains it.
struct Offer {
  Allocator allocator = Allocator::none;
  int32_t device = -1;
  uint64_t address = 0;  ///< of the buffer
  uint64_t bytes = 0;
  uint64_t base = 0;  ///< of the allocation
  uint64_t base_bytes = 0;
  ProcessId process;
  IpcHandle handle = {};  ///< cuda_malloc between processes
};

std::string hexadecimal(const void* p) {
  char text[32];
  std::snprintf(text, sizeof text, "%p", p);
  return text;
}

[[noreturn]] void refuse(ErrorCode code, const void* p, const std::string& found) {
  throw Error(code, "buffer at " + hexadecimal(p) + " is " + found + kAllowed);
}

/// Rejects all memory except device memory; the buffer must be on `device`.
void check_placement(const void* p, int device) {
  gpu::MemoryPlace place;
  check(gpu::look_up(&place, p), "cudaPointerGetAttributes of " + hexadecimal(p));
  switch (place.kind) {
    case gpu::MemoryKind::ordinary: refuse(ErrorCode::invalid_argument, p, "ordinary host memory (malloc, new, mmap)");
    case gpu::MemoryKind::pinned:
      refuse(ErrorCode::invalid_argument, p, "pinned host memory (cudaMallocHost or cudaHostRegister)");
    case gpu::MemoryKind::managed: refuse(ErrorCode::unsupported, p, "managed memory (cudaMallocManaged)");
    case gpu::MemoryKind::device: break;
  }
  if (place.device == device) return;
  throw Error(ErrorCode::invalid_argument, "buffer at " + hexadecimal(p) + " lies on GPU " + std::to_string(place.device) +
                                               ": must lie on GPU " + std::to_string(device) + ", the one of its rank");
}

/// A reference to the driver memory at `p`; empty for other memory.
PhysicalMemory driver_memory_at(const void* p) {
  CUmemGenericAllocationHandle handle = 0;
  if (driver().retain_handle(&handle, const_cast<void*>(p)) != CUDA_SUCCESS) return {};
  return PhysicalMemory::adopt(handle);
}

bool from_pool(CUdeviceptr address) {
  CUmemoryPool pool = nullptr;
  return driver().pointer_attribute(&pool, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, address) == CUDA_SUCCESS && pool != nullptr;
}

bool has_ipc_handle(CUdeviceptr address) {
  int capable = 0;
  return driver().pointer_attribute(&capable, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, address) == CUDA_SUCCESS &&
         capable != 0;
}

/// Determines the kind of the buffer. For driver memory, `memory` receives the reference passed to the peers.
Offer describe_buffer(void* p, size_t bytes, int device, bool same_process, PhysicalMemory& memory) {
  Offer offer;
  offer.process = ProcessId::mine();
  offer.device = device;
  if (bytes == 0) return offer;
  if (p == nullptr) {
    throw Error(ErrorCode::invalid_argument,
                "buffer = null with " + std::to_string(bytes) + " bytes: null is for 0 bytes only");
  }
  const DeviceGuard guard(device);
  check_placement(p, device);
  const auto address = reinterpret_cast<CUdeviceptr>(p);
  if (from_pool(address)) refuse(ErrorCode::unsupported, p, "memory of a stream-ordered pool (cudaMallocAsync)");
  offer.allocator = Allocator::cuda_malloc;
  if (!has_ipc_handle(address)) {
    memory = driver_memory_at(p);
    if (memory) {
      offer.allocator = Allocator::vmm;
      CUmemAllocationProp properties = {};
      check(driver().properties_of(&properties, memory.handle()), "cuMemGetAllocationPropertiesFromHandle");
      if ((properties.requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) == 0)
        refuse(ErrorCode::unsupported, p, "driver memory (cuMemCreate) that cannot be exported as a file descriptor");
    } else if (!same_process) {
      refuse(ErrorCode::unsupported, p, "device memory without a cudaIpc handle (a variable, or imported memory)");
    }
  }
  CUdeviceptr base = 0;
  size_t base_bytes = 0;
  check(driver().address_range(&base, &base_bytes, address), "cuMemGetAddressRange of " + hexadecimal(p));
  if (bytes > base + base_bytes - address) {
    const bool vmm = offer.allocator == Allocator::vmm;
    throw Error(vmm ? ErrorCode::unsupported : ErrorCode::invalid_argument,
                "buffer at " + hexadecimal(p) + " of " + std::to_string(bytes) +
                    " bytes reaches beyond its allocation, which has " + std::to_string(base + base_bytes - address) +
                    " bytes from there" +
                    (vmm ? " (driver memory in several chunks, as of expandable segments): use one allocation" : ""));
  }
  offer.address = address;
  offer.bytes = bytes;
  offer.base = base;
  offer.base_bytes = base_bytes;
  if (offer.allocator == Allocator::cuda_malloc && !same_process) offer.handle = ipc_handle_of(reinterpret_cast<void*>(base));
  return offer;
}

/// A placeholder for ranks without driver memory.
UniqueFd placeholder_fd() {
  UniqueFd fd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!fd) throw Error(ErrorCode::system, std::string("open /dev/null: ") + std::strerror(errno));
  return fd;
}

/// Threads: gives the GPUs of all ranks access to this rank's driver memory.
void grant_access(const Offer& mine, const std::vector<Offer>& offers) {
  std::vector<int> devices;
  for (const Offer& offer : offers) devices.push_back(offer.device);
  std::sort(devices.begin(), devices.end());
  devices.erase(std::unique(devices.begin(), devices.end()), devices.end());
  std::vector<CUmemAccessDesc> access;
  for (const int device : devices) {
    CUmemAccessDesc d = {};
    d.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    d.location.id = device;
    d.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    access.push_back(d);
  }
  const DeviceGuard guard(mine.device);
  check(driver().set_access(mine.base, mine.base_bytes, access.data(), access.size()), "cuMemSetAccess of a buffer");
}

/// Maps another rank's buffer for `device`, starting at the base of its allocation.
std::shared_ptr<DeviceSegment> map_peer(const Offer& offer, int fd, int device) {
  if (offer.allocator == Allocator::cuda_malloc) return std::make_shared<IpcSegment>(device, offer.handle);
  auto segment = std::make_shared<VmmSegment>(device, offer.base_bytes, vmm_granularity(device));
  segment->map(PhysicalMemory::import_from(fd), std::span(&device, 1));
  return segment;
}

bool passes_descriptors(const Bootstrap& bootstrap, const std::vector<Offer>& offers) {
  return !bootstrap.same_process() &&
         std::any_of(offers.begin(), offers.end(), [](const Offer& o) { return o.allocator == Allocator::vmm; });
}

}  // namespace

std::shared_ptr<PeerRange> PeerRange::create(Bootstrap& bootstrap, int device, void* p, size_t bytes, Milliseconds budget) {
  const Deadline deadline(budget);
  const auto me = static_cast<size_t>(bootstrap.rank());
  PhysicalMemory memory;
  UniqueFd fd;
  const std::vector<Offer> offers = propose_step(bootstrap, deadline, kSubject, [&] {
    const Offer offer = describe_buffer(p, bytes, device, bootstrap.same_process(), memory);
    if (!bootstrap.same_process()) fd = memory ? memory.export_fd() : placeholder_fd();
    return offer;
  });
  const Offer& mine = offers[me];
  std::vector<UniqueFd> fds;
  if (passes_descriptors(bootstrap, offers)) fds = bootstrap.exchange_fds(fd.get(), deadline.remaining());

  auto range = std::shared_ptr<PeerRange>(new PeerRange());
  run_step(bootstrap, deadline, kSubject, [&] {
    if (bootstrap.same_process() && mine.allocator == Allocator::vmm) grant_access(mine, offers);
    for (size_t r = 0; r < offers.size(); ++r) {
      const Offer& offer = offers[r];
      uint64_t address = offer.address;
      // Memory of ranks in this process already has an address.
      const bool has_address =
          r == me || bootstrap.same_process() || (offer.allocator == Allocator::cuda_malloc && offer.process == mine.process);
      if (offer.allocator != Allocator::none && !has_address) {
        range->mappings_.push_back(map_peer(offer, fds.empty() ? -1 : fds[r].get(), device));
        address = reinterpret_cast<uint64_t>(range->mappings_.back()->data()) + (offer.address - offer.base);
      } else if (offer.allocator == Allocator::cuda_malloc) {
        enable_peer_access(device, offer.device);
      }
      range->at_.push_back(reinterpret_cast<std::byte*>(address));
      range->bytes_.push_back(static_cast<size_t>(offer.bytes));
    }
  });
  return range;
}

}  // namespace switchyard::detail
