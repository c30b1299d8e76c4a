// SPDX-License-Identifier: Apache-2.0
// Low-latency mode over several hosts on the CPU: the messages of a call and its round.
#pragma once

#include <memory>
#include <vector>

#include "exchange/hosts/rails.hpp"
#include "exchange/low_latency/hosts/remote_plan.hpp"
#include "heap/heap.hpp"
#include "protocol/hosts/low_latency_phases.hpp"

namespace switchyard::detail {

/// Data that a dispatch into an output stores for its combine over several hosts.
struct CrossedOutput {
  std::vector<int> host_of;  ///< [W] of the group that dispatched
  std::vector<int32_t> ids;  ///< CrossedIds
};

class LowLatencyLinks : public HostRails {
 public:
  LowLatencyLinks(const HostMap& map, int rank, std::unique_ptr<Carrier> carrier, const LowLatencyLayout& layout);
  /// Bytes of a rank's memory for rows returned to ranks of other hosts; identical on all ranks.
  int64_t returned_bytes() const { return returns_.bytes(); }
  void set_returned(std::unique_ptr<SymmetricHeap> memory);

  const RemoteRails& remote() const { return remote_; }
  /// Makes room in an output for a dispatch.
  CrossedIds take_crossed(CrossedOutput& output) const;
  PhasedCombineParams phased(const LowLatencyCombineParams& p, CrossedOutput& output) const;
  /// Computes p.first_rows. Call before the rows of a combine are collected.
  void place_rows(const PhasedCombineParams& p);
  /// Post the round of a call. round() is then its number.
  void post_dispatch();
  void post_combine(const PhasedCombineParams& p);
  uint64_t round() const { return round_; }

 private:
  void post(const std::vector<PeerTransfer>& transfers);

  const LowLatencyLayout layout_;
  const RemotePlan plan_;
  RemoteRails remote_;
  RemoteReturns returns_;
  std::unique_ptr<SymmetricHeap> returned_;
  std::vector<int32_t> first_rows_;
  uint64_t round_ = 0;
};

}  // namespace switchyard::detail
