// SPDX-License-Identifier: Apache-2.0
// Low-latency mode over several hosts on the CPU: crossing tokens and rows, and the rounds of a call.
#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include "exchange/group/host_rails.hpp"
#include "exchange/low_latency/hosts/remote_plan.hpp"
#include "heap/heap.hpp"
#include "protocol/hosts/low_latency_forward.hpp"
#include "protocol/hosts/low_latency_returns.hpp"

namespace switchyard::detail {

/// Data that a dispatch into an output stores for its combine over several hosts.
struct CrossedOutput {
  std::vector<int> host_of;            ///< [W] of the group that dispatched
  std::vector<CrossedTokens> crossed;  ///< of each rank for which this one is the proxy, ascending
};

class LowLatencyLinks : public HostRails {
 public:
  LowLatencyLinks(const HostMap& map, int rank, std::unique_ptr<Carrier> carrier, int64_t round_bytes, uint64_t flags,
                  const LowLatencyLayout& layout);
  /// Bytes of a rank's memory for rows returned to ranks of other hosts; identical on all ranks.
  int64_t returned_bytes() const { return remote_.bytes(); }
  void set_returned(std::unique_ptr<SymmetricHeap> memory);

  /// The sending half of a dispatch: determines the crossing tokens, announces the call to other hosts and makes room for its
  /// rounds. The result is valid until the call ends.
  const MessageRails& begin(const LowLatencyDispatchParams& p);
  /// The receiving half, after the headers have arrived: makes room for arriving tokens and posts its rounds.
  const MessageRails& receive(const LowLatencyDispatchParams& p, CrossedOutput& output);
  /// Announces a combine to other hosts.
  void begin(const LowLatencyCombineParams& p);
  /// Returns `p` with the slots of the ranks on other hosts.
  RemoteCombineParams remote(const LowLatencyCombineParams& p) const { return {p, remote_}; }
  /// The receiving half of a combine, after the headers have arrived.
  const ReturnRails& receive(const RemoteCombineParams& p, const CrossedOutput& output);

  /// Waits for the headers of the ranks for which this one is the proxy and announces these ranks to this host. Call from one
  /// warp. Returns false after a (recorded) fault.
  template <class A>
  bool meet(typename A::Warp& w, const CallContext& call, const LowLatencyLayout& l) {
    return take_relay<A>(w, call, carrier(), relay_, peers_, [&](int source, int64_t crossing, const std::byte* message) {
      uint64_t header = 0;
      std::memcpy(&header, message, sizeof header);
      crossing_[static_cast<size_t>(source)] = crossing;
      if (call.operation == Operation::dispatch)
        post_counts_of<A>(w, call, l, source, experts_[static_cast<size_t>(own_host_)],
                          reinterpret_cast<const int32_t*>(message + sizeof header));
      publish_header_of<A>(w, call, l, source, header);
    });
  }

 private:
  void list_leaving(const LowLatencyDispatchParams& p);
  /// Splits `count` tokens of one source into few enough rounds that each round has a slot.
  ItemsInRounds in_rounds(int64_t count, Ring& ring) const;
  ReturnedRows rounds_of(const LowLatencyCombineParams& p, int64_t tokens) const;
  CrossedTokens& crossed_of(CrossedOutput& output, int source) const;
  void prepare_rail(const RemoteCombineParams& p, const CrossedOutput& output, size_t i);

  const LowLatencyLayout layout_;
  const RemotePlan plan_;
  std::vector<std::vector<int32_t>> experts_;  ///< [hosts] experts of its ranks, ascending
  std::vector<int> host_of_rail_;
  RemoteReturns remote_;
  std::unique_ptr<SymmetricHeap> returned_;
  // State of the current call.
  uint64_t relay_ = 0;
  std::vector<int32_t> counts_;                ///< [E] rows sent to each expert
  std::vector<std::vector<int32_t>> leaving_;  ///< [hosts]
  std::vector<int64_t> crossing_;              ///< [W] tokens from each rank for which this one is the proxy
  std::vector<MessageRail> message_rails_;
  std::vector<ReturnRail> return_rails_;
  std::vector<std::vector<int64_t>> rows_out_, rows_in_;  ///< by peer
  MessageRails messages_;
  ReturnRails returns_;
};

}  // namespace switchyard::detail
