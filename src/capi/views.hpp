// SPDX-License-Identifier: Apache-2.0
// Checks of individual members, called by the generated conversions (capi/structs.hpp, capi/layer/structs.hpp). Error texts
// name the member as `of`->`member`; the name is built only on error.
#pragma once

#include <cstdint>
#include <string>

#include "base/enum_text.hpp"
#include "capi/sized.hpp"
#include "switchyard/c/switchyard.h"
#include "switchyard/types.hpp"

namespace switchyard::detail {

// Templates are declared inline for their visibility: otherwise the export map treats a template as a function of the public
// type that it returns.

/// Throws ArgumentError unless `value` is an enumerator of E.
template <NamedEnum E>
inline E to_enum(const char* name, int32_t value) {
  for (const Named<E>& known : NamesOf<E>::kAll)
    if (static_cast<int32_t>(known.value) == value) return known.value;
  throw ArgumentError(std::string(name) + " = " + std::to_string(value) + ": must be " + numbered_names<E>());
}
template <NamedEnum E>
inline E to_enum_of(const char* of, const char* member, int32_t value) {
  for (const Named<E>& known : NamesOf<E>::kAll)
    if (static_cast<int32_t>(known.value) == value) return known.value;
  return to_enum<E>((std::string(of) + "->" + member).c_str(), value);
}

inline void require_range_of(const char* of, const char* member, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) require_range((std::string(of) + "->" + member).c_str(), value, low, high);
}

inline void require_of(const char* of, const char* member, const void* pointer) {
  if (!pointer) require(pointer, (std::string(of) + "->" + member).c_str());
}

inline bool to_bool(const char* name, int32_t value) {
  require_range(name, value, 0, 1);
  return value != 0;
}
inline bool to_bool_of(const char* of, const char* member, int32_t value) {
  require_range_of(of, member, value, 0, 1);
  return value != 0;
}

static_assert(SY_MAX_RANKS == kMaxRanks && SY_MAX_TOPK == kMaxTopk && SY_SCALE_GROUP == kScaleGroup);

}  // namespace switchyard::detail
