// SPDX-License-Identifier: Apache-2.0
// Calls of MoeLayer with one more argument, for bindings: `known_memory`, as in exchange/normal/known_memory.hpp.
#pragma once

#include "switchyard/layer.hpp"

namespace switchyard::detail {

struct LayerCalls {
  static void forward(MoeLayer& layer, const void* x, const ExpertIds& ids, const float* weights, void* out,
                      const MoeLayerCall& call, bool known_memory);
};

}  // namespace switchyard::detail
