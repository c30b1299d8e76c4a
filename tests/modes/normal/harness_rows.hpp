// SPDX-License-Identifier: Apache-2.0
// What harness.cpp and scenario_runner.cpp share.
#pragma once

#include "modes/normal/scenario.hpp"

namespace harness {

inline size_t idx(int64_t i) { return static_cast<size_t>(i); }

enum Stream : uint64_t { kRows = 1, kOutputs, kBias, kReplaced, kDelay };

inline DType sent_type(const Scenario& s) { return s.quantize == ScaleKind::none ? s.x_type : DType::fp8_e4m3; }
inline ScaleKind sent_scales(const Scenario& s) { return s.quantize == ScaleKind::none ? s.x_scales : s.quantize; }
inline int64_t row_bytes(const Scenario& s, DType type) {
  return s.hidden * static_cast<int64_t>(switchyard::dtype_bytes(type));
}

}  // namespace harness
