// SPDX-License-Identifier: Apache-2.0
// Checks of enumeration options, shared by all modes. The allowed values are those in the enumerations' tables.
#pragma once

#include <string>

#include "base/enum_text.hpp"
#include "exchange/group/exchange_base.hpp"
#include "switchyard/types.hpp"

namespace switchyard::detail {

/// Throws Error(invalid_argument) if `value` is not an enumerator of E.
template <NamedEnum E>
void check_enum(const char* name, E value) {
  if (!is_named(value)) invalid_value(name, text_of(value), numbered_names<E>());
}

/// "bf16, f16 or f32".
inline std::string combined_types() { return names_where<DType>(dtype_combines); }

/// Checks the type of the rows that an object will combine. Throws Error(invalid_argument) if rows of this type cannot be
/// summed.
inline void check_combining_type(const char* name, DType type) {
  if (!dtype_combines(type)) invalid_value(name, text_of(type), combined_types());
}

/// Checks the type of the rows combined by a call. Throws Error(unsupported) for a type that only dispatch supports.
inline void check_combined_rows(const char* name, DType type) {
  check_enum(name, type);
  if (!dtype_combines(type))
    throw Error(ErrorCode::unsupported,
                std::string(name) + " = " + to_string(type) + ": combine takes " + combined_types() + " rows", name);
}

}  // namespace switchyard::detail
