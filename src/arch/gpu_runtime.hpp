// SPDX-License-Identifier: Apache-2.0
// Host interface to the GPU runtime: streams, events, graphs, memory, devices and launches. No other file in src uses functions
// or types of the runtime, so another runtime requires only another version of this file. (Explicitly mapped memory, and
// queries missing from the runtime, use the driver: heap/gpu/driver.cuh.)
//
// Every function returns the runtime's status. No function throws, and none waits unless documented. An error stays pending in
// the runtime until forget_error().
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

namespace switchyard::detail::gpu {

// ---- status ----

using Status = cudaError_t;
inline constexpr Status kOk = cudaSuccess;
inline constexpr Status kOutOfMemory = cudaErrorMemoryAllocation;
inline constexpr Status kPeerAlreadyEnabled = cudaErrorPeerAccessAlreadyEnabled;

/// "cudaErrorMemoryAllocation"
inline const char* name_of(Status status) { return cudaGetErrorName(status); }
/// "out of memory"
inline const char* text_of(Status status) { return cudaGetErrorString(status); }
/// Clears the calling thread's pending error.
inline void forget_error() { (void)cudaGetLastError(); }

// ---- streams and events ----

using Stream = cudaStream_t;
using Event = cudaEvent_t;

/// The default stream, which synchronizes with all blocking streams; also denoted by null.
inline Stream legacy_stream() { return cudaStreamLegacy; }
inline bool is_legacy(Stream stream) { return stream == nullptr || stream == cudaStreamLegacy; }
/// True while a blocking stream is captured: work on the legacy stream would invalidate that capture. The query does not.
inline bool legacy_is_blocked() {
  cudaStreamCaptureStatus state = cudaStreamCaptureStatusNone;
  const Status status = cudaStreamIsCapturing(cudaStreamLegacy, &state);
  if (status != cudaSuccess) (void)cudaGetLastError();
  return status == cudaErrorStreamCaptureImplicit;
}
/// A single handle that denotes a different stream in each thread.
inline bool is_per_thread(Stream stream) { return stream == cudaStreamPerThread; }

/// Created on the current device; does not synchronize with the legacy stream.
inline Status make_stream(Stream* stream) { return cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking); }
/// Work already enqueued on the stream still runs.
inline Status destroy_stream(Stream stream) { return cudaStreamDestroy(stream); }
/// An id that is never reused by another stream of the process. Must not be called for a stream in capture.
inline Status id_of(Stream stream, unsigned long long* id) { return cudaStreamGetId(stream, id); }
inline Status device_of(Stream stream, int* device) { return cudaStreamGetDevice(stream, device); }
/// Blocks the host until all work enqueued so far has finished.
inline Status wait_for_stream(Stream stream) { return cudaStreamSynchronize(stream); }
inline Status wait_for_event(Event event) { return cudaEventSynchronize(event); }
inline Status wait_for_device() { return cudaDeviceSynchronize(); }

/// An event without timing, used for ordering only.
inline Status make_event(Event* event) { return cudaEventCreateWithFlags(event, cudaEventDisableTiming); }
inline Status destroy_event(Event event) { return cudaEventDestroy(event); }
inline Status record_event(Event event, Stream stream) { return cudaEventRecord(event, stream); }
/// Orders later work on `stream` after the event.
inline Status order_after(Stream stream, Event event) { return cudaStreamWaitEvent(stream, event, 0); }

// ---- graphs ----

using Graph = cudaGraph_t;
using CaptureMode = cudaStreamCaptureMode;
inline constexpr CaptureMode kRelaxedCapture = cudaStreamCaptureModeRelaxed;

/// Sets `captured` and, if the stream is being captured, the id and the graph of its capture.
inline Status capture_info(Stream stream, bool* captured, unsigned long long* id, Graph* graph) {
  cudaStreamCaptureStatus state = cudaStreamCaptureStatusNone;
  const Status status = cudaStreamGetCaptureInfo(stream, &state, id, graph);
  *captured = state == cudaStreamCaptureStatusActive;
  return status;
}
/// Sets the calling thread's capture mode and returns the previous one.
inline Status exchange_capture_mode(CaptureMode* mode) { return cudaThreadExchangeStreamCaptureMode(mode); }

/// An object owned by graphs. `destroy` is called when the last owner releases the object; it must not call any runtime
/// function.
using GraphObject = cudaUserObject_t;
inline Status make_graph_object(GraphObject* made, void* object, void (*destroy)(void*)) {
  return cudaUserObjectCreate(made, object, destroy, 1, cudaUserObjectNoDestructorSync);
}
inline Status release_graph_object(GraphObject object) { return cudaUserObjectRelease(object, 1); }
/// Transfers the caller's reference to the graph.
inline Status give_to_graph(Graph graph, GraphObject object) {
  return cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove);
}

// ---- memory ----

/// On the current device.
inline Status allocate(void** memory, size_t bytes) { return cudaMalloc(memory, bytes); }
inline Status release(void* memory) { return cudaFree(memory); }
/// Stream-ordered counterparts of allocate and release, for devices with memory pools; neither waits for other work.
inline Status has_pools(int* pools, int device) {
  return cudaDeviceGetAttribute(pools, cudaDevAttrMemoryPoolsSupported, device);
}
inline Status allocate_in_order(void** memory, size_t bytes, Stream stream) { return cudaMallocAsync(memory, bytes, stream); }
inline Status release_in_order(void* memory, Stream stream) { return cudaFreeAsync(memory, stream); }
inline Status memory_info(size_t* free, size_t* total) { return cudaMemGetInfo(free, total); }

inline Status fill(void* to, int byte, size_t bytes, Stream stream) { return cudaMemsetAsync(to, byte, bytes, stream); }
inline Status copy_to_host(void* to, const void* from, size_t bytes, Stream stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream);
}
inline Status copy_to_device(void* to, const void* from, size_t bytes, Stream stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream);
}
inline Status copy_on_device(void* to, const void* from, size_t bytes, Stream stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}

/// Makes ordinary host memory accessible to kernels on all devices, at device_address_of().
inline Status share_host_memory(void* memory, size_t bytes) {
  return cudaHostRegister(memory, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable);
}
inline Status unshare_host_memory(void* memory) { return cudaHostUnregister(memory); }
inline Status device_address_of(void** address, void* host) { return cudaHostGetDevicePointer(address, host, 0); }

enum class MemoryKind : uint8_t {
  ordinary,  ///< host memory unknown to the runtime
  pinned,    ///< host memory known to the runtime
  managed,   ///< migrates between host and devices
  device,
};
struct MemoryPlace {
  MemoryKind kind = MemoryKind::ordinary;
  int device = -1;
};
inline Status look_up(MemoryPlace* place, const void* memory) {
  cudaPointerAttributes found{};
  const Status status = cudaPointerGetAttributes(&found, memory);
  place->device = found.device;
  place->kind = found.type == cudaMemoryTypeUnregistered ? MemoryKind::ordinary
                : found.type == cudaMemoryTypeHost       ? MemoryKind::pinned
                : found.type == cudaMemoryTypeManaged    ? MemoryKind::managed
                                                         : MemoryKind::device;
  return status;
}

/// A handle with which another process can open memory from allocate().
using MemoryHandle = cudaIpcMemHandle_t;
inline Status handle_of(MemoryHandle* handle, void* memory) { return cudaIpcGetMemHandle(handle, memory); }
inline Status open_memory(void** memory, const MemoryHandle& handle) {
  return cudaIpcOpenMemHandle(memory, handle, cudaIpcMemLazyEnablePeerAccess);
}
inline Status close_memory(void* memory) { return cudaIpcCloseMemHandle(memory); }

// ---- devices ----

inline Status count_devices(int* count) { return cudaGetDeviceCount(count); }
inline Status current_device(int* device) { return cudaGetDevice(device); }
/// For the calling thread. Creates a context on the device if none exists.
inline Status make_current(int device) { return cudaSetDevice(device); }
/// "0000:1b:00.0"
inline Status pci_address(char* text, int capacity, int device) { return cudaDeviceGetPCIBusId(text, capacity, device); }
inline Status can_access(int* can, int device, int peer) { return cudaDeviceCanAccessPeer(can, device, peer); }
/// Gives the current device access to memory from allocate() on `peer`.
inline Status enable_access(int peer) { return cudaDeviceEnablePeerAccess(peer, 0); }

struct DeviceTraits {
  std::string name;
  std::array<char, 16> uuid{};
  int multiprocessors = 0;
  int shared_bytes = 0;    ///< maximum that a block may request
  int reserved_bytes = 0;  ///< of shared memory, before a block's own
  int generation = 0;      ///< 9: sm_90
};
inline Status traits_of(DeviceTraits* traits, int device) {
  cudaDeviceProp found{};
  const Status status = cudaGetDeviceProperties(&found, device);
  if (status != kOk) return status;
  traits->name = found.name;
  std::copy_n(found.uuid.bytes, traits->uuid.size(), traits->uuid.begin());
  traits->multiprocessors = found.multiProcessorCount;
  traits->shared_bytes = static_cast<int>(found.sharedMemPerBlockOptin);
  traits->reserved_bytes = static_cast<int>(found.reservedSharedMemPerBlock);
  traits->generation = found.major;
  return kOk;
}

/// The version 12.0 form of a driver function; null if this driver lacks it.
inline Status driver_function(void** function, const char* name) {
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const Status status = cudaGetDriverEntryPointByVersion(name, function, 12000, cudaEnableDefault, &found);
  if (status != kOk || found != cudaDriverEntryPointSuccess) *function = nullptr;
  return status;
}

// ---- launches ----

struct Grid {
  int blocks = 1, threads = 32;
  uint32_t shared_bytes = 0;
  /// Allows the kernel's blocks to start before the previous kernel on the stream has ended. The kernel must wait for the
  /// previous kernel's end before it reads anything.
  bool dependent = false;
};

/// Returns only the status of the launch itself, not pending errors from other calls in the process.
template <class... Given>
Status launch(void (*kernel)(Given...), const Grid& grid, Stream stream, const std::type_identity_t<Given>&... given) {
  cudaLaunchAttribute dependent{};
  dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid.blocks));
  config.blockDim = dim3(static_cast<unsigned>(grid.threads));
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = stream;
  config.attrs = &dependent;
  config.numAttrs = grid.dependent ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, given...);
}

/// Allows `kernel` to use `bytes` of dynamic shared memory, and loads it on the current device.
template <class Kernel>
Status allow_shared(Kernel kernel, int bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

}  // namespace switchyard::detail::gpu
