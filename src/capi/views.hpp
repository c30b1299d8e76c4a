// SPDX-License-Identifier: Apache-2.0
// Conversions to C++ of common C arguments: enumeration numbers, rows, ids. Checks everything that the C++ type cannot express.
#pragma once

#include <cstdint>
#include <string>

#include "base/enum_text.hpp"
#include "capi/sized.hpp"
#include "switchyard/c/switchyard.h"
#include "switchyard/types.hpp"

namespace switchyard::detail {

// Templates are declared inline for their visibility: otherwise the export map takes one for a function of the public type that
// it returns.

/// Throws ArgumentError unless `value` is a value of E.
template <NamedEnum E>
inline E to_enum(const char* name, int32_t value) {
  for (const Named<E>& known : NamesOf<E>::kAll)
    if (static_cast<int32_t>(known.value) == value) return known.value;
  throw ArgumentError(std::string(name) + " = " + std::to_string(value) + ": must be " + numbered_names<E>());
}
/// to_enum() of the member `of`->`member`; builds the name only for the error.
template <NamedEnum E>
inline E to_enum_of(const char* of, const char* member, int32_t value) {
  for (const Named<E>& known : NamesOf<E>::kAll)
    if (static_cast<int32_t>(known.value) == value) return known.value;
  return to_enum<E>((std::string(of) + "->" + member).c_str(), value);
}

inline bool to_bool(const char* name, int32_t value) {
  require_range(name, value, 0, 1);
  return value != 0;
}

/// Converts sy_const_row_view or sy_row_view to ConstRows or Rows.
template <class Twin, class View>
inline Twin rows_of(const View* rows, const View& defaults, const char* name) {
  const View r = read_struct(rows, defaults, name);
  return {r.data,   r.rows,
          r.cols,   to_enum_of<DType>(name, "dtype", r.dtype),
          r.scales, to_enum_of<ScaleKind>(name, "scale_kind", r.scale_kind)};
}

inline ConstRows to_rows(const sy_const_row_view* rows, const char* name) {
  return rows_of<ConstRows, sy_const_row_view>(rows, SY_CONST_ROW_VIEW_INIT, name);
}
inline Rows to_rows(const sy_row_view* rows, const char* name) {
  return rows_of<Rows, sy_row_view>(rows, SY_ROW_VIEW_INIT, name);
}

inline ExpertIds to_ids(const sy_expert_ids* ids) {
  const sy_expert_ids i = read_struct<sy_expert_ids>(ids, SY_EXPERT_IDS_INIT, "topk_ids");
  return {i.data, i.tokens, i.topk, to_bool("topk_ids->is_int64", i.is_int64)};
}

}  // namespace switchyard::detail
