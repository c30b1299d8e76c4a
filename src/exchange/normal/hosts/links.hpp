// SPDX-License-Identifier: Apache-2.0
// Normal mode over several hosts on the CPU: crossing tokens and rows, and the rounds of a call.
#pragma once

#include <memory>
#include <vector>

#include "arch/cpu/warp.hpp"
#include "exchange/hosts/rails.hpp"
#include "exchange/hosts/schedule.hpp"
#include "plan/hosts.hpp"
#include "protocol/hosts/combine.hpp"
#include "protocol/hosts/dispatch.hpp"

namespace switchyard::detail {

class HostLinks : public HostRails {
 public:
  HostLinks(const HostMap& map, int rank, std::unique_ptr<Carrier> carrier, int64_t round_bytes);

  /// Sets `leaving` of a fresh dispatch before the counts are sent, and makes room for its crossing tokens.
  void list_leaving(const LocalPlan& local, HandleData& h) const;
  /// Records that `count` tokens of `source` cross to this host. Call once its counts have arrived.
  static void set_crossing(const HandleData& h, int source, int64_t count) { crossed_of(h, source).count = count; }

  /// The rails and rounds of one call, valid until the next one.
  struct Moving {
    std::vector<DispatchRail> rails;
    int64_t rounds = 1;
  };
  struct Summing {
    std::vector<CombineRail> rails;
    ReturnedTokens own;  ///< rounds of this rank's tokens, identical for all returning hosts
    ReturningHosts hosts;
    int64_t rounds = 1;
  };
  /// Call once the placements have arrived.
  const Moving& prepare(const DispatchParams& p, const HandleData& h);
  /// `weighted`: CombineOrder::per_host multiplies rows by the weights sent by the dispatch.
  const Summing& prepare(CpuWarp& w, const CombineParams& p, const HandleData& h, bool weighted);
  /// Posts round k of the call, which is round `first` + k of the carrier. \returns the number of bytes sent (dispatch) or
  /// received (combine)
  uint64_t post(const Moving& call, uint64_t first, int64_t k);
  uint64_t post(const Summing& call, uint64_t first, int64_t k);

 private:
  int places_on(int host, int topk) const;
  static CrossedTokens& crossed_of(const HandleData& h, int source);
  void prepare_rail(const DispatchParams& p, const HandleData& h, size_t i);
  void prepare_rail(CpuWarp& w, const CombineParams& p, const HandleData& h, bool weighted, size_t i);
  ReturnedTokens rows_of(const CombineParams& p, int64_t tokens, bool weights) const;

  // Indexed by peer.
  std::vector<std::vector<RoundCut>> cuts_out_, cuts_in_;
  struct alignas(64) Counter {
    uint64_t value = 0;
  };
  std::vector<Counter> arrivals_;
  std::vector<ReturnedTokens> of_host_;  ///< [hosts]
  Moving moving_;
  Summing summing_;
};

}  // namespace switchyard::detail
