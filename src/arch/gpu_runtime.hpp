// SPDX-License-Identifier: Apache-2.0
// The GPU runtime as host code sees it: streams, events, graphs, memory, devices and launches in plain words. Nothing else in
// src names a function or type of the runtime, so another runtime is another version of this file. (Memory that is mapped by
// hand, and what the runtime does not tell, come from the driver: heap/gpu/driver.cuh.)
//
// Every function gives back the runtime's status; none throws, and none waits unless it says so. Errors stay the runtime's
// pending error until forget_error().
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
/// The calling thread's next question for a pending error finds none of before.
inline void forget_error() { (void)cudaGetLastError(); }

// ---- streams and events ----

using Stream = cudaStream_t;
using Event = cudaEvent_t;

/// The default stream that orders itself after all blocking streams; null means it, too.
inline Stream legacy_stream() { return cudaStreamLegacy; }
inline bool is_legacy(Stream stream) { return stream == nullptr || stream == cudaStreamLegacy; }
/// Another stream in each thread, under one name.
inline bool is_per_thread(Stream stream) { return stream == cudaStreamPerThread; }

/// On the current device; does not synchronise with the legacy stream.
inline Status make_stream(Stream* stream) { return cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking); }
/// What is enqueued on it still runs.
inline Status destroy_stream(Stream stream) { return cudaStreamDestroy(stream); }
/// A number that no other stream of the process has, ever. Not of a stream that is captured.
inline Status id_of(Stream stream, unsigned long long* id) { return cudaStreamGetId(stream, id); }
inline Status device_of(Stream stream, int* device) { return cudaStreamGetDevice(stream, device); }
/// Wait, on the host, for everything enqueued so far.
inline Status wait_for_stream(Stream stream) { return cudaStreamSynchronize(stream); }
inline Status wait_for_event(Event event) { return cudaEventSynchronize(event); }
inline Status wait_for_device() { return cudaDeviceSynchronize(); }

/// An event that takes no time: it only orders.
inline Status make_event(Event* event) { return cudaEventCreateWithFlags(event, cudaEventDisableTiming); }
inline Status destroy_event(Event event) { return cudaEventDestroy(event); }
inline Status record_event(Event event, Stream stream) { return cudaEventRecord(event, stream); }
/// What is enqueued on `stream` from now on comes after the event.
inline Status order_after(Stream stream, Event event) { return cudaStreamWaitEvent(stream, event, 0); }

// ---- graphs ----

using Graph = cudaGraph_t;
using CaptureMode = cudaStreamCaptureMode;
inline constexpr CaptureMode kRelaxedCapture = cudaStreamCaptureModeRelaxed;

/// Whether a stream is `captured` now, and if so the number of its capture and its graph.
inline Status capture_info(Stream stream, bool* captured, unsigned long long* id, Graph* graph) {
  cudaStreamCaptureStatus state = cudaStreamCaptureStatusNone;
  const Status status = cudaStreamGetCaptureInfo(stream, &state, id, graph);
  *captured = state == cudaStreamCaptureStatusActive;
  return status;
}
/// Sets the calling thread's capture mode, and gives the one before.
inline Status exchange_capture_mode(CaptureMode* mode) { return cudaThreadExchangeStreamCaptureMode(mode); }

/// What a graph can hold; `destroy` runs where no function of the runtime may be called, when the last holder lets go.
using GraphObject = cudaUserObject_t;
inline Status make_graph_object(GraphObject* made, void* object, void (*destroy)(void*)) {
  return cudaUserObjectCreate(made, object, destroy, 1, cudaUserObjectNoDestructorSync);
}
inline Status release_graph_object(GraphObject object) { return cudaUserObjectRelease(object, 1); }
/// The graph takes over the caller's reference.
inline Status give_to_graph(Graph graph, GraphObject object) {
  return cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove);
}

// ---- memory ----

/// On the current device.
inline Status allocate(void** memory, size_t bytes) { return cudaMalloc(memory, bytes); }
inline Status release(void* memory) { return cudaFree(memory); }
/// allocate and release in the order of streams, if the device has pools: neither call waits for other work.
inline Status has_pools(int* pools, int device) {
  return cudaDeviceGetAttribute(pools, cudaDevAttrMemoryPoolsSupported, device);
}
inline Status allocate_in_order(void** memory, size_t bytes, Stream stream) { return cudaMallocAsync(memory, bytes, stream); }
inline Status release_in_order(void* memory, Stream stream) { return cudaFreeAsync(memory, stream); }
inline Status room(size_t* free, size_t* total) { return cudaMemGetInfo(free, total); }

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

/// Makes ordinary host memory usable by kernels of all devices, at device_address_of().
inline Status share_host_memory(void* memory, size_t bytes) {
  return cudaHostRegister(memory, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable);
}
inline Status unshare_host_memory(void* memory) { return cudaHostUnregister(memory); }
inline Status device_address_of(void** address, void* host) { return cudaHostGetDevicePointer(address, host, 0); }

enum class MemoryKind : uint8_t {
  ordinary,  ///< of the host, unknown to the runtime
  pinned,    ///< of the host, known to it
  managed,   ///< moves between host and devices
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

/// A handle by which another process opens an allocation of allocate().
using MemoryHandle = cudaIpcMemHandle_t;
inline Status handle_of(MemoryHandle* handle, void* memory) { return cudaIpcGetMemHandle(handle, memory); }
inline Status open_memory(void** memory, const MemoryHandle& handle) {
  return cudaIpcOpenMemHandle(memory, handle, cudaIpcMemLazyEnablePeerAccess);
}
inline Status close_memory(void* memory) { return cudaIpcCloseMemHandle(memory); }

// ---- devices ----

inline Status count_devices(int* count) { return cudaGetDeviceCount(count); }
inline Status current_device(int* device) { return cudaGetDevice(device); }
/// For the calling thread. Makes a context on the device if it has none.
inline Status make_current(int device) { return cudaSetDevice(device); }
/// "0000:1b:00.0"
inline Status pci_address(char* text, int room, int device) { return cudaDeviceGetPCIBusId(text, room, device); }
inline Status can_access(int* can, int device, int peer) { return cudaDeviceCanAccessPeer(can, device, peer); }
/// Lets the current device access memory of allocate() on `peer`.
inline Status enable_access(int peer) { return cudaDeviceEnablePeerAccess(peer, 0); }

struct DeviceTraits {
  std::string name;
  std::array<char, 16> uuid{};
  int multiprocessors = 0;
  int shared_bytes = 0;  ///< that a block may ask for
  int generation = 0;    ///< 9: sm_90
};
inline Status traits_of(DeviceTraits* traits, int device) {
  cudaDeviceProp found{};
  const Status status = cudaGetDeviceProperties(&found, device);
  if (status != kOk) return status;
  traits->name = found.name;
  std::copy_n(found.uuid.bytes, traits->uuid.size(), traits->uuid.begin());
  traits->multiprocessors = found.multiProcessorCount;
  traits->shared_bytes = static_cast<int>(found.sharedMemPerBlockOptin);
  traits->generation = found.major;
  return kOk;
}

/// A function of the driver, in the form that it had in version 12.0; null if this driver has none of that name.
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
  /// The kernel's blocks may begin while the kernel before it on the stream ends. The kernel waits for that end before it reads
  /// anything.
  bool dependent = false;
};

/// Failures of other calls of the process are not its status.
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

/// Lets `kernel` have `bytes` of dynamic shared memory, and loads it on the current device.
template <class Kernel>
Status allow_shared(Kernel kernel, int bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

}  // namespace switchyard::detail::gpu
