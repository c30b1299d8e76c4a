// SPDX-License-Identifier: Apache-2.0
// Exchange of counts and placements: the first and second messages of a call. One warp of each rank runs this code.
//
// | flag      | written by | read by   | order           | scope  | reuse              |
// | counts    | each rank  | all ranks | release/acquire | system | epoch, never reset |
// | placement | each rank  | all ranks | release/acquire | system | epoch, never reset |
//
// There are two sets of buffers, selected by the parity of the call. A rank writes the buffers of call n + 2 only after its
// call n + 1 has ended. By then, it has acquired this rank's flag of call n + 1, which this rank set after the end of its call
// n. A peer is therefore at most one call ahead and never overwrites a buffer that is still being read.
#pragma once

#include "layout/control.hpp"
#include "protocol/wait.hpp"

namespace switchyard::detail {

/// Announces to all ranks that rank `writer` has reached `site` in this call. Releases everything previously settled.
template <class A>
SWITCHYARD_FN void publish_for(typename A::Warp& w, const CallContext& call, const ControlLayout& control, Site site,
                               int writer) {
  A::template publish_to<Scope::system>(
      w, call.world(),
      [&](int r) {
        return FlagStore{reach<A>(call.heap, r, control.flag(site, writer)), call.word()};
      },
      site);
}
/// publish_for() for this rank.
template <class A>
SWITCHYARD_FN void publish_all(typename A::Warp& w, const CallContext& call, const ControlLayout& control, Site site) {
  publish_for<A>(w, call, control, site, call.rank());
}

/// True for operations that begin with an exchange of counts.
SWITCHYARD_FN constexpr bool sends_counts(Operation operation) {
  return operation == Operation::dispatch || operation == Operation::layer;
}

/// If rank `r`, whose `counts` flag is given, sends counts in this call, records the mismatch and returns true.
template <class A>
struct CountsArrived {
  SWITCHYARD_FN bool operator()(typename A::Warp& w, const CallContext* call, const uint64_t* counts, int r) const {
    if (A::peek(counts) != call->word()) return false;
    return !record_mismatch<A>(w, *call, Site::placement, r);
  }
};

/// Waits, in a separate span, until all ranks have reached `site` (counts or placement) in this call. A rank making a fresh
/// dispatch waits for counts before it publishes a placement, so it would wait forever if other ranks made a cached dispatch or
/// a combine. Those ranks detect the mismatch from that rank's counts. Its flag cannot belong to a later call while this call
/// still awaits it.
template <class A>
SWITCHYARD_FN bool wait_placements(typename A::Warp& w, const CallContext& call, const ControlLayout& control, Site site) {
  WarpSpan<A> span(w, call, site == Site::counts ? Event::wait_counts : Event::wait_placement, -1);
  const auto diverged = [&](typename A::Warp& warp, int r) {
    return !sends_counts(call.operation) &&
           A::out_of_line(warp, CountsArrived<A>{}, &call,
                          static_cast<const uint64_t*>(call.heap.local(control.flag(Site::counts, r))), r);
  };
  return wait_ranks<A>(
      w, call, [&](int r) { return call.heap.local(control.flag(site, r)); }, site, span, diverged);
}

/// Writes the counts row of rank `source` (counts_row_bytes long, in private memory) to all ranks and releases its `counts`
/// flag.
template <class A>
SWITCHYARD_FN void publish_counts(typename A::Warp& w, const CallContext& call, const ControlLayout& control, int source,
                                  const void* row) {
  A::multicast_to(
      w, call.world(), [&](int r) -> void* { return reach<A>(call.heap, r, control.counts_head(call.epoch, source)); }, row,
      static_cast<size_t>(control.counts_row_bytes()));
  A::settle(w);
  publish_for<A>(w, call, control, Site::counts, source);
}

/// Relay for a single host, with nothing to forward.
struct NoRelay {
  template <class Warp>
  SWITCHYARD_FN bool operator()(Warp&) const {
    return true;
  }
};

/// Writes this rank's counts row to all ranks and waits for theirs. In between, `relay(w)` obtains the rows from other hosts.
/// Returns false after recording a fault.
template <class A, class Relay = NoRelay>
SWITCHYARD_FN bool exchange_counts(typename A::Warp& w, const CallContext& call, const ControlLayout& control, const void* row,
                                   const Relay& relay = {}) {
  publish_counts<A>(w, call, control, call.rank(), row);
  if (!relay(w)) return false;
  return wait_placements<A>(w, call, control, Site::counts);
}

/// Writes `place` to all ranks and releases `placement` along with everything previously settled. `distances` is null or
/// contains one offset per reader ([W]), which is added to `place.rows`. It is used if the rows are outside the heap, where
/// each reader maps them at a different distance from its mapping of this rank's segment. `own_rows` is null or the value of
/// `place.rows` for this rank itself.
template <class A>
SWITCHYARD_FN void publish_placement(typename A::Warp& w, const CallContext& call, const ControlLayout& control,
                                     const Placement& place, const uint64_t* distances = nullptr,
                                     const uint64_t* own_rows = nullptr) {
  if (distances == nullptr && own_rows == nullptr) {
    A::multicast_to(
        w, call.world(), [&](int r) -> void* { return reach<A>(call.heap, r, control.placement(call.epoch, call.rank())); },
        &place, sizeof(Placement));
  } else {
    A::for_lanes(w, call.world(), [&](int r) {
      if (!is_mapped<A>(call.heap, r)) return;
      Placement place_for_reader = place;
      if (distances != nullptr) place_for_reader.rows += distances[r];
      if (own_rows != nullptr && r == call.rank()) place_for_reader.rows = *own_rows;
      *call.heap.at(r, control.placement(call.epoch, call.rank())) = place_for_reader;
    });
  }
  A::settle(w);
  publish_all<A>(w, call, control, Site::placement);
}

/// Writes the placement of rank `source`, received as bytes from another host, to the ranks of this host and releases
/// `placement`.
template <class A>
void publish_placement_of(typename A::Warp& w, const CallContext& call, const ControlLayout& control, int source,
                          const std::byte* place) {
  A::multicast_to(
      w, call.world(), [&](int r) -> void* { return reach<A>(call.heap, r, control.placement(call.epoch, source)); }, place,
      sizeof(Placement));
  A::settle(w);
  publish_for<A>(w, call, control, Site::placement, source);
}

/// True if this rank can read the memory offered by `place`, i.e. it has not ended its part of the registration.
SWITCHYARD_FN inline bool reachable(const CallContext& call, const Placement& place) {
  return place.memory == 0 || (call.registered != nullptr && (*call.registered >> (place.memory - 1) & 1u) != 0);
}

/// True if rank r can take part and has made the same call.
SWITCHYARD_FN inline bool agrees(const CallContext& call, const ControlLayout& control, uint64_t signature, int r) {
  const Placement& place = *call.heap.local(control.placement(call.epoch, r));
  return place.status == 0 && place.signature == signature && reachable(call, place);
}

/// Call after wait_placements(). Returns true if every rank can take part and has made the same call. All ranks get the same
/// result unless a rank made a different call or ended a registration that others use; both are mismatches.
inline bool all_agree(const CallContext& call, const ControlLayout& control, uint64_t signature) {
  bool agree = true;
  for (int r = 0; r < call.world(); ++r) agree = agree && agrees(call, control, signature, r);
  return agree;
}
/// all_agree(), evaluated by the lanes of one warp.
template <class A>
SWITCHYARD_FN bool all_agree(typename A::Warp& w, const CallContext& call, const ControlLayout& control, uint64_t signature) {
  return A::lanes_where(w, call.world(), [&](int r) { return !agrees(call, control, signature, r); }) == 0;
}

}  // namespace switchyard::detail
