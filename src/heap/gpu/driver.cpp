// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <atomic>
#include <mutex>

#include "heap/gpu/device_guard.hpp"
#include "heap/gpu/driver.cuh"
#include "switchyard/status.hpp"

namespace switchyard::detail {
namespace {

constexpr int kMaxDevices = 128;

template <class Function>
void find(Function& function, const char* name) {
  void* address = nullptr;
  const gpu::Status error = gpu::driver_function(&address, name);
  if (error != gpu::kOk) {
    gpu::forget_error();
    throw Error(ErrorCode::unsupported, std::string("the CUDA driver cannot be used: ") + describe(error));
  }
  if (address == nullptr) {
    throw Error(ErrorCode::unsupported, std::string("the CUDA driver has no ") + name + ": install driver 580 or later");
  }
  function = reinterpret_cast<Function>(address);
}

Driver load() {
  Driver d = {};
  find(d.init, "cuInit");
  find(d.device_get, "cuDeviceGet");
  find(d.device_attribute, "cuDeviceGetAttribute");
  find(d.retain_primary_context, "cuDevicePrimaryCtxRetain");
  find(d.push_context, "cuCtxPushCurrent");
  find(d.pop_context, "cuCtxPopCurrent");
  find(d.current_context, "cuCtxGetCurrent");
  find(d.error_name, "cuGetErrorName");
  find(d.error_string, "cuGetErrorString");
  find(d.create, "cuMemCreate");
  find(d.release, "cuMemRelease");
  find(d.granularity, "cuMemGetAllocationGranularity");
  find(d.export_handle, "cuMemExportToShareableHandle");
  find(d.import_handle, "cuMemImportFromShareableHandle");
  find(d.reserve, "cuMemAddressReserve");
  find(d.free_address, "cuMemAddressFree");
  find(d.map, "cuMemMap");
  find(d.unmap, "cuMemUnmap");
  find(d.set_access, "cuMemSetAccess");
  find(d.retain_handle, "cuMemRetainAllocationHandle");
  find(d.properties_of, "cuMemGetAllocationPropertiesFromHandle");
  find(d.address_range, "cuMemGetAddressRange");
  find(d.pointer_attribute, "cuPointerGetAttribute");
  find(d.pointer_attributes, "cuPointerGetAttributes");
  find(d.event_query, "cuEventQuery");
  if (const CUresult result = d.init(0); result != CUDA_SUCCESS) {
    const char* name = nullptr;
    d.error_name(result, &name);
    throw Error(ErrorCode::unsupported, std::string("cuInit: ") + (name != nullptr ? name : "unknown error"));
  }
  return d;
}

/// Returns the device's context, which stays retained once created, so that every later call is a single load. First checks the
/// index.
CUcontext primary_context(int device) {
  static std::mutex mutex;
  static std::array<std::atomic<CUcontext>, kMaxDevices> contexts = {};
  if (device >= 0 && device < kMaxDevices)
    if (CUcontext known = contexts[static_cast<size_t>(device)].load(std::memory_order_acquire)) return known;
  check_device_index(device);
  if (device >= kMaxDevices) throw Error(ErrorCode::unsupported, "more than " + std::to_string(kMaxDevices) + " GPUs");
  const std::lock_guard lock(mutex);
  std::atomic<CUcontext>& context = contexts[static_cast<size_t>(device)];
  if (context.load(std::memory_order_relaxed) == nullptr) {
    CUdevice handle = 0;
    check(driver().device_get(&handle, device), "cuDeviceGet of GPU " + std::to_string(device));
    CUcontext fresh = nullptr;
    check(driver().retain_primary_context(&fresh, handle), "cannot use GPU " + std::to_string(device));
    context.store(fresh, std::memory_order_release);
  }
  return context.load(std::memory_order_relaxed);
}

}  // namespace

const Driver& driver() {
  static const Driver functions = load();
  return functions;
}

gpu::MemoryPlace place_of(const void* memory) {
  // For unknown memory, the driver leaves these unchanged or sets them to 0.
  uint64_t type = 0, managed = 0;
  int device = -1;
  std::array asked = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
  std::array<void*, 3> answers = {&type, &managed, &device};
  gpu::MemoryPlace place;
  const CUresult result =
      driver().pointer_attributes(asked.size(), asked.data(), answers.data(), reinterpret_cast<CUdeviceptr>(memory));
  if (result != CUDA_SUCCESS) return place;
  place.device = device;
  if (managed != 0)
    place.kind = gpu::MemoryKind::managed;
  else if (type == CU_MEMORYTYPE_HOST)
    place.kind = gpu::MemoryKind::pinned;
  else if (type == CU_MEMORYTYPE_DEVICE)
    place.kind = gpu::MemoryKind::device;
  return place;
}

std::string describe(CUresult result) {
  const char* name = nullptr;
  const char* text = nullptr;
  driver().error_name(result, &name);
  driver().error_string(result, &text);
  if (name == nullptr) return "CUDA driver error " + std::to_string(static_cast<int>(result));
  return std::string(name) + " (" + (text != nullptr ? text : "no text") + ")";
}

std::string describe(gpu::Status error) { return std::string(gpu::name_of(error)) + " (" + gpu::text_of(error) + ")"; }

void check(CUresult result, const std::string& what) {
  if (result != CUDA_SUCCESS) throw Error(ErrorCode::system, what + ": " + describe(result));
}

void check(gpu::Status error, const std::string& what) {
  if (error == gpu::kOk) return;
  gpu::forget_error();
  throw Error(ErrorCode::system, what + ": " + describe(error));
}

int count_devices() {
  int count = 0;
  const gpu::Status error = gpu::count_devices(&count);
  if (error != gpu::kOk) {
    gpu::forget_error();
    throw Error(ErrorCode::unsupported, "no GPU can be used: " + describe(error));
  }
  if (count == 0) throw Error(ErrorCode::unsupported, "no GPU is visible (see CUDA_VISIBLE_DEVICES)");
  return count;
}

void check_device_index(int device) {
  const int count = count_devices();
  if (device >= 0 && device < count) return;
  throw Error(ErrorCode::invalid_argument, "device = " + std::to_string(device) + ": must be in [0, " + std::to_string(count) +
                                               "), the visible GPUs (see CUDA_VISIBLE_DEVICES)");
}

DeviceGuard::DeviceGuard(int device) {
  CUcontext wanted = primary_context(device), current = nullptr;
  if (driver().current_context(&current) == CUDA_SUCCESS && current == wanted) return;
  if (const CUresult result = driver().push_context(wanted); result != CUDA_SUCCESS)
    check(result, "cannot make GPU " + std::to_string(device) + " current");
  pushed_ = true;
}

DeviceGuard::~DeviceGuard() {
  CUcontext popped = nullptr;
  if (pushed_) driver().pop_context(&popped);
}

}  // namespace switchyard::detail
