// SPDX-License-Identifier: Apache-2.0
// Calls of every mode that one rank leaves out because it is gone. Ranks are threads or processes.
#pragma once

#include <functional>
#include <memory>
#include <ostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "modes/flat/flat_rig.hpp"
#include "modes/ledger/ledger_rig.hpp"
#include "modes/low_latency/low_latency_rig.hpp"
#include "modes/normal/normal_rig.hpp"

namespace harness {

/// What the code of a rank throws that has had enough.
struct OwnError : std::runtime_error {
  OwnError() : std::runtime_error("my expert failed") {}
};

/// Prepared calls of the ledger combine.
struct SmallLedger {
  explicit SmallLedger(switchyard::Group& group)
      : given(make_case(group.size())), data(*given, group.rank(), 0), ledger(group, make_config(*given)) {}
  void combine() { ledger.combine(data.y(), data.probs(), data.tables(), data.out().data()); }

  static std::shared_ptr<const LedgerCase> make_case(int world) {
    LedgerScenario s;
    s.name = "small";
    s.problem.world = world;
    s.problem.experts = 5;
    s.problem.topk = 2;
    s.problem.alignment = 4;
    for (int r = 0; r < world; ++r) s.tokens.push_back(9 - r);
    s.hidden = 16;
    s.seed = 3;
    return make_ledger_case(s);
  }

  std::shared_ptr<const LedgerCase> given;
  LedgerRankData data;
  switchyard::LedgerCombine ledger;
};

struct Departure {
  const char* name;
  /// `go()` returns on ranks that stay, and throws OwnError on the one that does not, with its objects around it.
  std::function<void(switchyard::Group&, const std::function<void()>& go)> body;
};
inline std::ostream& operator<<(std::ostream& out, const Departure& d) { return out << d.name; }

using Go = const std::function<void()>&;

/// A round of normal mode, then `calls`.
inline std::function<void(switchyard::Group&, Go)> normal_departure(switchyard::Staging staging, switchyard::Layout layout,
                                                                    void (*calls)(FaultRig&, Go)) {
  return [staging, layout, calls](switchyard::Group& group, Go go) {
    FaultRig rig(group, FaultRig::config(staging, layout));
    rig.round();
    calls(rig, go);
  };
}

inline std::vector<Departure> departures_of_normal_mode() {
  using switchyard::Layout;
  using switchyard::Staging;
  constexpr auto dispatch = [](FaultRig& rig, Go go) {
    go();
    rig.dispatch();
  };
  constexpr auto cached = [](FaultRig& rig, Go go) {
    const auto d = rig.dispatch();
    go();
    (void)rig.exchange.dispatch(rig.x(), d.handle);
  };
  constexpr auto combine = [](FaultRig& rig, Go go) {
    const auto d = rig.dispatch();
    go();
    rig.combine(d);
  };
  constexpr auto by_route = [](FaultRig& rig, Go go) {
    const auto d = rig.dispatch();
    go();
    switchyard::CombineOptions o;
    o.order = switchyard::CombineOrder::per_route;
    rig.exchange.combine(d.x, d.handle, rig.out.data(), o);
  };
  return {{"dispatch", normal_departure(Staging::direct, Layout::rank_major, dispatch)},
          {"cached_dispatch", normal_departure(Staging::direct, Layout::rank_major, cached)},
          {"combine", normal_departure(Staging::direct, Layout::rank_major, combine)},
          {"combine_by_expert", normal_departure(Staging::direct, Layout::expert_major, combine)},
          {"combine_by_route", normal_departure(Staging::direct, Layout::expert_major, by_route)},
          {"ring_dispatch", normal_departure(Staging::ring, Layout::rank_major, dispatch)},
          {"ring_combine", normal_departure(Staging::ring, Layout::expert_major, combine)}};
}

/// The same for low latency.
inline std::function<void(switchyard::Group&, Go)> low_latency_departure(void (*calls)(LowLatencyRig&, Go)) {
  return [calls](switchyard::Group& group, Go go) {
    LowLatencyRig rig(group);
    rig.round();
    calls(rig, go);
  };
}

inline std::vector<Departure> departures_of_other_modes() {
  using switchyard::Group;
  return {{"low_latency_dispatch", low_latency_departure([](LowLatencyRig& rig, Go go) {
             go();
             rig.dispatch();
           })},
          {"low_latency_combine", low_latency_departure([](LowLatencyRig& rig, Go go) {
             rig.dispatch();
             go();
             rig.combine();
           })},
          {"low_latency_combine_by_rank", low_latency_departure([](LowLatencyRig& rig, Go go) {
             rig.dispatch();
             go();
             rig.combine(switchyard::CombineOrder::per_rank);
           })},
          {"low_latency_receive", low_latency_departure([](LowLatencyRig& rig, Go go) {
             rig.dispatch_send()();
             go();
             rig.combine_send()();
           })},
          {"flat",
           [](Group& group, Go go) {
             FlatRig rig(group);
             rig.round();
             go();
             rig.round();
           }},
          {"ledger", [](Group& group, Go go) {
             SmallLedger rig(group);
             rig.combine();
             go();
             rig.combine();
           }}};
}

inline std::vector<Departure> departures_of_set_up() {
  using switchyard::Group;
  return {{"barrier",
           [](Group& group, Go go) {
             group.barrier();
             go();
             group.barrier();
           }},
          {"all_gather",
           [](Group& group, Go go) {
             int mine = group.rank();
             std::vector<int> all(static_cast<size_t>(group.size()));
             group.barrier();
             go();
             group.all_gather(&mine, sizeof mine, all.data());
           }},
          {"construction",
           [](Group& group, Go go) {
             group.barrier();
             go();
             const switchyard::NormalExchange exchange(group, FaultRig::config());
           }},
          {"register_memory", [](Group& group, Go go) {
             group.barrier();
             go();
             (void)group.register_memory(nullptr, 0);
           }}};
}

inline std::vector<Departure> departures() {
  std::vector<Departure> all = departures_of_normal_mode();
  for (const auto& more : {departures_of_other_modes(), departures_of_set_up()})
    all.insert(all.end(), more.begin(), more.end());
  return all;
}

/// Of a rank that stayed.
inline bool says_that_it_left(const Outcome& o, int rank) {
  return o.code == switchyard::ErrorCode::peer_failed && o.failed_rank == rank &&
         o.text.find("rank " + std::to_string(rank) + " left the group") != std::string::npos;
}

}  // namespace harness
