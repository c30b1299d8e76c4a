// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "bootstrap/bootstrap.hpp"
#include "layout/heap_view.hpp"

namespace switchyard::detail {

/// Mirrors of the headers of ranks that are processes on other hosts: their announcements, in memory that this rank's protocols
/// read.
class RemoteHeaders final : public RemoteObserver {
 public:
  /// `mine`: this rank's header, which must outlive the bootstrap's threads.
  RemoteHeaders(HeapHeader* mine, int world) : mine_(mine), headers_(new HeapHeader[static_cast<size_t>(world)]()) {}
  HeapHeader* of(int rank) const noexcept { return &headers_[static_cast<size_t>(rank)]; }

  std::vector<uint64_t> calls_after(uint64_t known, uint64_t& last) const override;
  void heard_calls(int rank, uint64_t last, std::span<const uint64_t> words) override;
  void heard_abort(uint64_t word) override;
  void heard_leave(int rank) override;

 private:
  HeapHeader* mine_;
  std::unique_ptr<HeapHeader[]> headers_;
};

}  // namespace switchyard::detail
