// SPDX-License-Identifier: Apache-2.0
// Calls of every mode, each with its preceding calls, for fault tests inside the call: a rank stays silent, leaves, aborts or
// is killed. Each test is written once for all calls. Ranks are threads or processes.
#pragma once

#include <functional>
#include <ostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "harness/outcome.hpp"
#include "modes/flat/flat_rig.hpp"
#include "modes/fused/fused_moe_rig.hpp"
#include "modes/ledger/small_ledger.hpp"
#include "modes/low_latency/low_latency_rig.hpp"
#include "modes/normal/normal_rig.hpp"

namespace harness {

/// Thrown by a rank's own code when it gives up.
struct OwnError : std::runtime_error {
  OwnError() : std::runtime_error("my expert failed") {}
};

/// Makes the call, repeats it, or skips it. The rank's object already exists.
using Watch = std::function<void(const std::function<void()>& call)>;

struct WatchedCall {
  std::string name;
  const char* operation;  ///< operation of the call in reports; empty for set-up calls
  const char* site;       ///< the site at which a rank waits for a rank that does not make the call
  uint64_t number;        ///< number of the call
  std::function<void(switchyard::Group&, const Watch&)> body;

  /// Creates an object, makes the preceding calls, and then makes the call under test, in which all ranks wait for each other.
  void play(switchyard::Group& group, const Watch& watch) const {
    bool called = false;
    body(group, [&](const std::function<void()>& call) {
      called = true;
      watch(call);
    });
    if (!called) throw std::logic_error(name + ": the call was left out");
  }
};
inline std::ostream& operator<<(std::ostream& out, const WatchedCall& c) { return out << c.name; }

/// Runs `rounds` rounds before the calls; a rig's round() makes the calls of its mode.
template <class Rig, class Make>
std::function<void(switchyard::Group&, const Watch&)> after_rounds(int rounds, Make make, void (*calls)(Rig&, const Watch&)) {
  return [rounds, make, calls](switchyard::Group& group, const Watch& watch) {
    Rig rig = make(group);
    for (int i = 0; i < rounds; ++i) rig.round();
    calls(rig, watch);
  };
}

inline std::vector<WatchedCall> calls_of_normal_mode() {
  using switchyard::Layout;
  using switchyard::Staging;
  constexpr auto dispatch = [](NormalRig& rig, const Watch& watch) { watch([&] { rig.dispatch(); }); };
  constexpr auto cached = [](NormalRig& rig, const Watch& watch) {
    const auto d = rig.dispatch();
    watch([&] { (void)rig.exchange.dispatch(rig.x(), d.handle); });
  };
  constexpr auto combine = [](NormalRig& rig, const Watch& watch) {
    const auto d = rig.dispatch();
    watch([&] { rig.combine(d); });
  };
  constexpr auto by_route = [](NormalRig& rig, const Watch& watch) {
    const auto d = rig.dispatch();
    switchyard::CombineOptions o;
    o.order = switchyard::CombineOrder::per_route;
    watch([&] { rig.exchange.combine(d.x, d.handle, rig.out.data(), o); });
  };
  const auto with = [](int rounds, Staging staging, Layout layout, void (*calls)(NormalRig&, const Watch&)) {
    const auto make = [staging, layout](switchyard::Group& group) {
      return NormalRig(group, NormalRig::config(staging, layout));
    };
    return after_rounds<NormalRig>(rounds, make, calls);
  };
  constexpr Layout kByRank = Layout::rank_major, kByExpert = Layout::expert_major;
  return {{"first_dispatch", "dispatch", "counts", 1, with(0, Staging::direct, kByRank, dispatch)},
          {"dispatch", "dispatch", "counts", 3, with(1, Staging::direct, kByRank, dispatch)},
          {"cached_dispatch", "dispatch", "placement", 4, with(1, Staging::direct, kByRank, cached)},
          {"combine", "combine", "placement", 4, with(1, Staging::direct, kByRank, combine)},
          {"combine_by_expert", "combine", "placement", 4, with(1, Staging::direct, kByExpert, combine)},
          {"combine_by_route", "combine", "placement", 4, with(1, Staging::direct, kByExpert, by_route)},
          {"ring_first_dispatch", "dispatch", "counts", 1, with(0, Staging::ring, kByRank, dispatch)},
          {"ring_dispatch", "dispatch", "counts", 3, with(1, Staging::ring, kByRank, dispatch)},
          {"ring_cached_dispatch", "dispatch", "placement", 4, with(1, Staging::ring, kByRank, cached)},
          {"ring_combine", "combine", "placement", 4, with(1, Staging::ring, kByExpert, combine)}};
}

inline std::vector<WatchedCall> calls_of_low_latency_mode() {
  constexpr auto make = [](switchyard::Group& group) { return LowLatencyRig(group); };
  constexpr auto dispatch = [](LowLatencyRig& rig, const Watch& watch) { watch([&] { rig.dispatch(); }); };
  constexpr auto halves = [](LowLatencyRig& rig, const Watch& watch) { watch([&] { rig.dispatch_send()(); }); };
  constexpr auto combine = [](LowLatencyRig& rig, const Watch& watch) {
    rig.dispatch();
    watch([&] { rig.combine(); });
  };
  constexpr auto by_rank = [](LowLatencyRig& rig, const Watch& watch) {
    rig.dispatch();
    watch([&] { rig.combine(switchyard::CombineOrder::per_rank); });
  };
  constexpr auto receive = [](LowLatencyRig& rig, const Watch& watch) {
    rig.dispatch_send()();
    watch([&] { rig.combine_send()(); });
  };
  const char* const site = "call_header";
  return {{"low_latency_first_dispatch", "dispatch", site, 1, after_rounds<LowLatencyRig>(0, make, dispatch)},
          {"low_latency_first_halves", "dispatch", site, 1, after_rounds<LowLatencyRig>(0, make, halves)},
          {"low_latency_dispatch", "dispatch", site, 3, after_rounds<LowLatencyRig>(1, make, dispatch)},
          {"low_latency_combine", "combine", site, 4, after_rounds<LowLatencyRig>(1, make, combine)},
          {"low_latency_combine_by_rank", "combine", site, 4, after_rounds<LowLatencyRig>(1, make, by_rank)},
          {"low_latency_receive", "combine", site, 4, after_rounds<LowLatencyRig>(1, make, receive)}};
}

inline std::vector<WatchedCall> calls_of_other_modes() {
  constexpr auto flat = [](switchyard::Group& group) { return FlatRig(group); };
  constexpr auto ledger = [](switchyard::Group& group) { return SmallLedger(group); };
  constexpr auto fused = [](switchyard::Group& group) { return FusedMoeRig(group); };
  constexpr auto layer = [](FusedMoeRig& rig, const Watch& watch) { watch([&] { rig.round(); }); };
  constexpr auto exchange = [](FlatRig& rig, const Watch& watch) { watch([&] { rig.round(); }); };
  constexpr auto combine = [](SmallLedger& rig, const Watch& watch) { watch([&] { rig.round(); }); };
  return {{"flat_first", "moe_all_to_all", "call_header", 1, after_rounds<FlatRig>(0, flat, exchange)},
          {"flat", "moe_all_to_all", "call_header", 4, after_rounds<FlatRig>(3, flat, exchange)},
          {"ledger_first", "ledger combine", "ledger_rows", 1, after_rounds<SmallLedger>(0, ledger, combine)},
          {"ledger", "ledger combine", "ledger_rows", 4, after_rounds<SmallLedger>(3, ledger, combine)},
          {"fused_first", "MoE layer", "counts", 1, after_rounds<FusedMoeRig>(0, fused, layer)},
          {"fused", "MoE layer", "counts", 4, after_rounds<FusedMoeRig>(3, fused, layer)}};
}

inline std::vector<WatchedCall> set_up_calls() {
  using switchyard::Group;
  const auto call = [](std::string name, void (*make)(Group&)) {
    return WatchedCall{std::move(name), "", "", 0, [make](Group& group, const Watch& watch) {
                         group.barrier();
                         watch([&] { make(group); });
                       }};
  };
  return {call("barrier", [](Group& group) { group.barrier(); }),
          call("all_gather",
               [](Group& group) {
                 int mine = group.rank();
                 std::vector<int> all(static_cast<size_t>(group.size()));
                 group.all_gather(&mine, sizeof mine, all.data());
               }),
          call("construction", [](Group& group) { const switchyard::NormalExchange exchange(group, NormalRig::config()); }),
          call("register_memory", [](Group& group) { (void)group.register_memory(nullptr, 0); })};
}

/// Calls on objects of all modes.
inline std::vector<WatchedCall> exchange_calls() {
  std::vector<WatchedCall> all = calls_of_normal_mode();
  for (const auto& more : {calls_of_low_latency_mode(), calls_of_other_modes()})
    all.insert(all.end(), more.begin(), more.end());
  return all;
}
inline std::vector<WatchedCall> all_calls() {
  std::vector<WatchedCall> all = exchange_calls();
  for (const auto& more : set_up_calls()) all.push_back(more);
  return all;
}

/// Whether the outcome, on a rank that has not left, reports that `rank` left the group.
inline bool reports_departure(const Outcome& o, int rank) {
  return o.code == switchyard::ErrorCode::peer_failed && o.failed_rank == rank &&
         o.text.find("rank " + std::to_string(rank) + " left the group") != std::string::npos;
}

}  // namespace harness
