// SPDX-License-Identifier: Apache-2.0
// The caller's own buffers, mapped by all ranks, so that rows can be transferred without a copy through the symmetric heap.
//
// Accepted: memory of cudaMalloc (also blocks of caching allocators on top of it), and driver memory (cuMemCreate) that can be
// exported as a file descriptor. Each range is within one allocation and on the GPU of its rank.
// Rejected: host memory, managed memory, memory of stream-ordered pools, other driver memory, and ranges that span several
// driver allocations (such as the chunks of an expandable segment).
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "bootstrap/bootstrap.hpp"

namespace switchyard::detail {

class DeviceSegment;

/// One buffer per rank, mapped for this rank's GPU. Destruction is local. The owner of a buffer may free it only after all
/// ranks have destroyed their ranges (a barrier in between): with cudaMalloc the mapping of a freed buffer is undefined.
class PeerRange {
 public:
  /// Address of that rank's buffer on this rank's GPU; null if its size is zero.
  std::byte* at(int rank) const { return at_.at(static_cast<size_t>(rank)); }
  size_t bytes(int rank) const { return bytes_.at(static_cast<size_t>(rank)); }
  int world() const noexcept { return static_cast<int>(at_.size()); }

  /// Collective. Each rank passes its buffer, in memory of GPU `device`; sizes may differ, and `p` may be null with 0 bytes.
  /// Throws, on all ranks, Error(invalid_argument or unsupported), whose text gives the detected and the allowed allocators.
  /// Threads: peers have access to the memory as long as it is mapped, even after the range is destroyed.
  static std::shared_ptr<PeerRange> create(Bootstrap& bootstrap, int device, void* p, size_t bytes, Milliseconds deadline);

 private:
  PeerRange() = default;
  std::vector<std::byte*> at_;
  std::vector<size_t> bytes_;
  std::vector<std::shared_ptr<DeviceSegment>> mappings_;
};

}  // namespace switchyard::detail
