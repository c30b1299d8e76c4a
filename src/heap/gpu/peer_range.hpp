// SPDX-License-Identifier: Apache-2.0
// The caller's own buffers, mapped by all ranks, so that rows can be transferred without a copy through the symmetric heap.
//
// Accepted: cudaMalloc memory (including blocks from caching allocators on top of it), and driver memory (cuMemCreate) that can
// be exported as a file descriptor. Each range must lie within one allocation and on its rank's GPU.
// Rejected: host memory, managed memory, memory from stream-ordered pools, other driver memory, and ranges that span several
// driver allocations (such as the chunks of an expandable segment).
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "bootstrap/bootstrap.hpp"

namespace switchyard::detail {

class DeviceSegment;

/// One buffer per rank, mapped for this rank's GPU. Destruction is local. The owner of a buffer may free it only after all
/// ranks have destroyed their ranges, followed by a barrier: with cudaMalloc, the mapping of a freed buffer is undefined.
class PeerRange {
 public:
  /// Address of the rank's buffer on this rank's GPU; null if its size is zero.
  std::byte* at(int rank) const { return at_.at(static_cast<size_t>(rank)); }
  size_t bytes(int rank) const { return bytes_.at(static_cast<size_t>(rank)); }
  int world() const noexcept { return static_cast<int>(at_.size()); }

  /// Collective. Each rank passes its buffer, in memory on GPU `device`; sizes may differ, and `p` may be null if `bytes` is 0.
  /// Throws, on all ranks, Error(invalid_argument) or Error(unsupported); the text names the detected and the accepted
  /// allocators. Threads: peers retain access to the memory as long as it is mapped, even after the range is destroyed.
  static std::shared_ptr<PeerRange> create(Bootstrap& bootstrap, int device, void* p, size_t bytes, Milliseconds deadline);

 private:
  PeerRange() = default;
  std::vector<std::byte*> at_;
  std::vector<size_t> bytes_;
  std::vector<std::shared_ptr<DeviceSegment>> mappings_;
};

}  // namespace switchyard::detail
