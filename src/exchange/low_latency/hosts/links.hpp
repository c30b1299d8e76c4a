// SPDX-License-Identifier: Apache-2.0
// Low-latency mode over several hosts on the CPU: the messages and rounds of a call.
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
  /// `round_bytes`: as for HostRails; at most 256 KiB of it are used, so that the rounds of a small combine overlap too.
  LowLatencyLinks(const HostMap& map, int rank, std::unique_ptr<Carrier> carrier, int64_t round_bytes,
                  const LowLatencyLayout& layout);
  /// Bytes of a rank's memory for rows returned to ranks of other hosts; identical on all ranks.
  int64_t returned_bytes() const { return returns_.bytes(); }
  void set_returned(std::unique_ptr<SymmetricHeap> memory);

  const RemoteRails& remote() const { return remote_; }
  /// Makes room in an output for a dispatch.
  CrossedIds take_crossed(CrossedOutput& output) const;
  PhasedCombineParams phased(const LowLatencyCombineParams& p, CrossedOutput& output) const;
  /// Computes the places of a combine's rows. Call before collect_returned(). \returns the number of rounds
  int64_t place_rows(const PhasedCombineParams& p);
  /// Bytes of the rows that a combine receives from other hosts. Call after place_rows().
  uint64_t received_bytes(const PhasedCombineParams& p) const;
  void post_dispatch(uint64_t round);
  /// Posts round k of a combine. `first`: the number of its round 0.
  void post_combine(const PhasedCombineParams& p, uint64_t first, int64_t k);

 private:
  static constexpr int64_t kMaxRoundBytes = int64_t{1} << 18;

  const LowLatencyLayout layout_;
  const RemotePlan plan_;
  RemoteRails remote_;
  RemoteReturns returns_;
  std::unique_ptr<SymmetricHeap> returned_;
  std::vector<CrossingSlots> placed_;  ///< PhasedCombineParams::placed
};

}  // namespace switchyard::detail
