// SPDX-License-Identifier: Apache-2.0
// Small normal-mode calls for object and fault tests.
#pragma once

#include "harness/outcome.hpp"
#include "harness/small_arguments.hpp"
#include "switchyard/normal.hpp"

namespace harness {

/// An exchange object with valid arguments for every call. Each test invalidates one of them.
struct NormalRig : SmallArguments {
  static switchyard::NormalConfig config(switchyard::Staging staging = switchyard::Staging::direct,
                                         switchyard::Layout layout = switchyard::Layout::rank_major) {
    auto c = sized(switchyard::NormalConfig());
    c.layout = layout;
    c.staging = staging;
    c.ring = {2, 2, 4};
    return c;
  }

  explicit NormalRig(switchyard::Group& group, const switchyard::NormalConfig& c = config())
      : SmallArguments(group.rank()), exchange(group, c) {}
  switchyard::Dispatched dispatch() { return exchange.dispatch(x(), expert_ids(), weights.data()); }
  void combine(const switchyard::Dispatched& d) { exchange.combine(d.x, d.handle, out.data()); }
  void round() { combine(dispatch()); }

  switchyard::NormalExchange exchange;
};

}  // namespace harness
