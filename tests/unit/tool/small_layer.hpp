// SPDX-License-Identifier: Apache-2.0
// A small layer on CPUs, for tests of the tool.
#pragma once

#include "tools/layer/layer_rank.hpp"

namespace switchyard::tool {

/// Two ranks with three tokens and one, a dropped route, and five experts.
inline LayerSpec small_layer(MoeExchange exchange) {
  LayerSpec spec;
  Scenario& s = spec.scenario;
  s.world = 2;
  s.experts = 5;
  s.topk = 2;
  s.hidden = 64;
  s.layout = Layout::expert_major;
  s.routing = {{5, 2, 3, {0, 1, 2, 3, 4, -1}, {0.5f, 0.5f, 1, 0.25f, 0.75f, 1}}, {5, 2, 1, {3, 0}, {1, 0.5f}}};
  spec.intermediate = 32;
  spec.exchange = exchange;
  return spec;
}

}  // namespace switchyard::tool
