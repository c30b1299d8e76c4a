// SPDX-License-Identifier: Apache-2.0
// Normal mode over several hosts on the CPU: crossing tokens and rows, and the rounds of a call.
#pragma once

#include <memory>
#include <vector>

#include "exchange/group/host_rails.hpp"
#include "plan/hosts.hpp"
#include "protocol/hosts/forward.hpp"
#include "protocol/hosts/returns.hpp"

namespace switchyard::detail {

class HostLinks : public HostRails {
 public:
  HostLinks(const HostMap& map, int rank, std::unique_ptr<Carrier> carrier, int64_t round_bytes, uint64_t flags);

  /// Sets `leaving` of a fresh dispatch before the counts are sent, and makes room for its crossing tokens.
  void list_leaving(const LocalPlan& local, HandleData& h) const;
  /// Records that `count` tokens of `source` cross to this host. Call once its counts have arrived.
  static void set_crossing(const HandleData& h, int source, int64_t count) { crossed_of(h, source).count = count; }

  /// Prepares the rounds of a call. Call once the placements have arrived. The result is valid until the next call.
  const HostDispatchParams& prepare(const DispatchParams& p, const HandleData& h);
  /// `weighted`: CombineOrder::per_host multiplies rows by the weights sent by the dispatch.
  const HostCombineParams& prepare(const CombineParams& p, const HandleData& h, bool weighted);

 private:
  int places_on(int host, int topk) const;
  static CrossedTokens& crossed_of(const HandleData& h, int source);
  void prepare_rail(const DispatchParams& p, const HandleData& h, size_t i);
  void prepare_rail(const CombineParams& p, const HandleData& h, bool weighted, size_t i);
  ReturnedRows rounds_of(const CombineParams& p, int64_t tokens, bool weights) const;

  // Indexed by peer.
  std::vector<std::vector<int64_t>> rows_out_, rows_in_;
  std::vector<DispatchRail> dispatch_rails_;
  std::vector<CombineRail> combine_rails_;
  HostDispatchParams dispatch_;
  HostCombineParams combine_;
};

}  // namespace switchyard::detail
