// SPDX-License-Identifier: Apache-2.0
// Driver entry points for the CUDA heap, looked up at run time: the library does not link libcuda and can be loaded on machines
// without a driver. Host code.
#pragma once

#include <cuda.h>

#include <string>

#include "arch/gpu_runtime.hpp"

namespace switchyard::detail {

struct Driver {
  decltype(&::cuInit) init;
  decltype(&::cuDeviceGet) device_get;
  decltype(&::cuDeviceGetAttribute) device_attribute;
  decltype(&::cuDevicePrimaryCtxRetain) retain_primary_context;
  decltype(&::cuCtxPushCurrent) push_context;
  decltype(&::cuCtxPopCurrent) pop_context;
  decltype(&::cuCtxGetCurrent) current_context;
  decltype(&::cuGetErrorName) error_name;
  decltype(&::cuGetErrorString) error_string;
  decltype(&::cuMemCreate) create;
  decltype(&::cuMemRelease) release;
  decltype(&::cuMemGetAllocationGranularity) granularity;
  decltype(&::cuMemExportToShareableHandle) export_handle;
  decltype(&::cuMemImportFromShareableHandle) import_handle;
  decltype(&::cuMemAddressReserve) reserve;
  decltype(&::cuMemAddressFree) free_address;
  decltype(&::cuMemMap) map;
  decltype(&::cuMemUnmap) unmap;
  decltype(&::cuMemSetAccess) set_access;
  decltype(&::cuMemRetainAllocationHandle) retain_handle;
  decltype(&::cuMemGetAllocationPropertiesFromHandle) properties_of;
  decltype(&::cuMemGetAddressRange) address_range;
  decltype(&::cuPointerGetAttribute) pointer_attribute;
  decltype(&::cuPointerGetAttributes) pointer_attributes;
  decltype(&::cuEventQuery) event_query;  ///< cudaEventQuery would leave "not ready" as the caller's pending error
};

/// Looked up and initialized on the first call. Throws Error(unsupported) if there is no driver or if any entry point is
/// missing. Any thread.
const Driver& driver();

/// Like gpu::look_up, but uses a single driver query that sets no runtime error; unknown memory counts as ordinary memory.
gpu::MemoryPlace place_of(const void* memory);

/// "CUDA_ERROR_OUT_OF_MEMORY (out of memory)"
std::string describe(CUresult result);
std::string describe(gpu::Status error);
/// Throw Error(system) "<what>: <error>" unless the result is success. Clears the runtime's pending error.
void check(CUresult result, const std::string& what);
void check(gpu::Status error, const std::string& what);

}  // namespace switchyard::detail
