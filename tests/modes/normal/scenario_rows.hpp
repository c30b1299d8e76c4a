// SPDX-License-Identifier: Apache-2.0
// Code shared by scenario.cpp and scenario_calls.cpp.
#pragma once

#include "harness/rank_steps.hpp"
#include "modes/normal/scenario.hpp"

namespace harness {

inline DType sent_type(const Scenario& s) { return s.quantize == ScaleKind::none ? s.x_type : DType::fp8_e4m3; }
inline ScaleKind sent_scales(const Scenario& s) { return s.quantize == ScaleKind::none ? s.x_scales : s.quantize; }
inline int64_t row_bytes(const Scenario& s, DType type) {
  return static_cast<int64_t>(switchyard::dtype_bytes(type, s.hidden));
}

}  // namespace harness
