// SPDX-License-Identifier: Apache-2.0
// What the modes' checks of arguments have in common. Every text names the argument, what was given and what is allowed.
#pragma once

#include <cstdint>
#include <string>

#include "switchyard/status.hpp"
#include "switchyard/types.hpp"

namespace switchyard::detail {

[[noreturn]] inline void invalid(const std::string& text) { throw Error(ErrorCode::invalid_argument, text); }

inline void check_range(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high)
    invalid(std::string(name) + " = " + std::to_string(value) + ": must be in [" + std::to_string(low) + ", " +
            std::to_string(high) + "]");
}

inline const char* name_of(DType type) {
  switch (type) {
    case DType::bf16: return "bf16";
    case DType::f16: return "f16";
    case DType::f32: return "f32";
    case DType::fp8_e4m3: return "fp8_e4m3";
  }
  return "unknown";
}

}  // namespace switchyard::detail
