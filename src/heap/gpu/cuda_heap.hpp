// SPDX-License-Identifier: Apache-2.0
// Symmetric heap in GPU memory. Every rank owns one segment on its GPU; all ranks map all segments, readable and writable by
// their own GPU. The control words that the host polls are in a separate heap in host memory.
//
// Kinds:
//   vmm   driver allocations (cuMemCreate), passed as file descriptors. Teardown is local: memory is freed with its last
//         user, also after a peer has died. The default.
//   ipc   cudaMalloc and cudaIpc handles. Used if vmm is unavailable, or with SWITCHYARD_CUDA_HEAP=ipc on any rank. Teardown
//         between processes is collective; no sleep.
// SWITCHYARD_CUDA_HEAP: auto (default), vmm (an error if unavailable) or ipc.
//
// Limits: each host maps its own ranks' segments, whose GPUs access each other as peers; segments of other hosts are null.
// Sizes are rounded up to the driver's granularity (2 MiB). Ranks may share a GPU. No call waits for work on the caller's
// streams, except sleep. All calls preserve the current device and create contexts only on GPUs of this process's ranks.
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

  /// Collective. Processes or threads, as in `bootstrap`. `device` is the GPU of this rank; it may differ by rank and repeat.
  /// `bytes` is the same on all ranks. The segments are zero. Throws, on all ranks, Error(invalid_argument) for a wrong index,
  /// size or environment variable, Error(unsupported) naming two GPUs that are not peers, Error(mismatch), or Error(system)
  /// naming requested, free and total bytes. With kind ipc between processes the heap keeps a pointer to `bootstrap`, which
  /// must outlive the heap or its close(), and must not have left; close() then waits at most `deadline`.
  static std::unique_ptr<CudaHeap> create(Bootstrap& bootstrap, size_t bytes, int device, Milliseconds deadline);
  /// Creates the heaps of all ranks of this process at once, from one thread: rank r has devices[r]. One address per segment.
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
  /// on the heap must have ended. vmm, and ipc between threads: local. ipc between processes: collective, and before
  /// Bootstrap::leave(); does not wait for a departed rank. If a rank does not arrive in time, this rank's memory stays
  /// allocated until the process ends, because that rank may still use it.
  void close() noexcept;
  /// False if close() requires the bootstrap.
  bool closes_alone() const noexcept { return bootstrap_ == nullptr; }

  /// Kind vmm; ipc: Error(unsupported). Synchronizes the device and copies the ranges `keep` to host memory (Error(system) if
  /// host memory is insufficient). During sleep no address of the heap may be used.
  void sleep(Bootstrap& bootstrap, std::span<const Range> keep, Milliseconds deadline) override;
  void wake(Bootstrap& bootstrap, Milliseconds deadline) override;

  /// Collective: see PeerRange::create. The range does not depend on the heap and may outlive it.
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
