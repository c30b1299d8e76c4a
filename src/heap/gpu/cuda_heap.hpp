// SPDX-License-Identifier: Apache-2.0
// Symmetric heap in GPU memory. Every rank owns one segment on its GPU; all ranks map all segments for reading and writing by
// their own GPU. The control words that the host polls are in a separate heap in host memory.
//
// Kinds:
//   vmm: the default; driver allocations (cuMemCreate) are passed as file descriptors. Teardown is local: memory is freed with
//        its last user, even after a peer has died.
//   ipc: cudaMalloc with cudaIpc handles, used if vmm is unavailable or if any rank sets SWITCHYARD_CUDA_HEAP=ipc. Teardown
//        between processes is collective; sleep is not supported.
// Values of SWITCHYARD_CUDA_HEAP: auto (default), vmm (an error if unavailable) or ipc.
//
// Limits: each host maps only the segments of its own ranks, whose GPUs access each other as peers; segments on other hosts are
// null. Sizes are rounded up to the driver's granularity (2 MiB). Ranks may share a GPU. No call waits for work on the caller's
// streams, except for sleep(). All calls preserve the current device, and create contexts only on the GPUs of this process's
// ranks.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "heap/gpu/peer_range.hpp"
#include "heap/heap.hpp"

namespace switchyard::detail {

class DeviceSegment;

class CudaHeap final : public SymmetricHeap {
 public:
  enum class Kind { vmm, ipc };

  /// Collective. Uses processes or threads, as in `bootstrap`. `device` is this rank's GPU; ranks may have different GPUs or
  /// share one. `bytes` is identical on all ranks. The segments are zero. Throws, on all ranks, Error(invalid_argument) for an
  /// invalid index, size or environment variable, Error(unsupported) naming two GPUs that are not peers, Error(mismatch), or
  /// Error(system) naming the requested, free and total bytes. With kind ipc between processes, the heap keeps a pointer to
  /// `bootstrap`, which must not leave or be destroyed before the heap is closed or destroyed. close() then waits at most
  /// `deadline`.
  static std::unique_ptr<CudaHeap> create(Bootstrap& bootstrap, size_t bytes, int device, Milliseconds deadline);
  /// Creates the heaps of all ranks in this process at once, from one thread: rank r uses devices[r]. One address per segment.
  static std::vector<std::unique_ptr<CudaHeap>> create_in_process(const std::vector<int>& devices, size_t bytes) {
    return create_in_process(HostMap(static_cast<int>(devices.size())), devices, bytes);
  }
  static std::vector<std::unique_ptr<CudaHeap>> create_in_process(const HostMap& hosts, const std::vector<int>& devices,
                                                                  size_t bytes);

  ~CudaHeap() override;
  CudaHeap(const CudaHeap&) = delete;
  CudaHeap& operator=(const CudaHeap&) = delete;

  int device() const noexcept { return device_; }
  /// "vmm" or "ipc".
  const char* kind() const noexcept { return kind_ == Kind::vmm ? "vmm" : "ipc"; }

  /// Unmaps and releases everything; idempotent, never throws; the addresses in view() are invalid afterwards. This rank's work
  /// on the heap must have finished. Local for vmm, and for ipc between threads. Between processes, ipc is collective and must
  /// precede Bootstrap::leave(); it does not wait for a departed rank. If a rank does not arrive in time, this rank's memory
  /// stays allocated until the process ends, because that rank may still use it.
  void close() noexcept;
  /// Returns false if close() requires the bootstrap.
  bool closes_alone() const noexcept { return bootstrap_ == nullptr; }

  /// Kind vmm; ipc: Error(unsupported). Synchronizes the device and copies the ranges in `keep` to host memory (Error(system)
  /// if host memory is insufficient). While the heap sleeps, none of its addresses may be used.
  void sleep(Bootstrap& bootstrap, std::span<const Range> keep, Milliseconds deadline) override;
  void wake(Bootstrap& bootstrap, Milliseconds deadline) override;

  /// Collective: see PeerRange::create. The range is independent of the heap and may outlive it.
  std::shared_ptr<PeerRange> register_range(Bootstrap& bootstrap, void* p, size_t bytes, Milliseconds deadline) const {
    return PeerRange::create(bootstrap, device_, p, bytes, deadline);
  }

 private:
  struct Parts;
  struct Kept {
    size_t offset;
    std::vector<std::byte> bytes;
  };
  CudaHeap(const HeapView& view, Parts parts);
  static HeapView view_of(const Parts& parts, int rank);
  void keep_ranges(std::span<const Range> keep);
  void unmap_mine();
  void restore();

  int device_;
  Kind kind_;
  bool same_process_;
  std::vector<int> users_;                                ///< devices that access this rank's mappings
  std::vector<std::shared_ptr<DeviceSegment>> segments_;  ///< null: on another host
  std::vector<Kept> kept_;
  Bootstrap* bootstrap_;  ///< for a collective teardown, else null
  Milliseconds deadline_;
};

}  // namespace switchyard::detail
