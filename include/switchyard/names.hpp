// SPDX-License-Identifier: Apache-2.0
/// \file
/// Names of the values of Switchyard's enumerations, for options, files and error messages: to_string(DType::bf16) is "bf16",
/// and from_string<DType>("bf16") is DType::bf16. Each enumeration has one table, next to its definition.
#pragma once

#include <optional>
#include <string_view>

namespace switchyard {

/// A value of an enumeration and its name.
template <class E>
struct Named {
  E value;
  const char* name;
};

/// Specialized for every named enumeration, with `static constexpr Named<E> kAll[]` listing all values in ascending order from
/// 0.
template <class E>
struct NamesOf;

template <class E>
concept NamedEnum = requires {
  NamesOf<E>::kAll[0].name;
};

/// Returns "unknown" if `value` is not a named value of E.
template <NamedEnum E>
constexpr const char* to_string(E value) noexcept {
  for (const Named<E>& known : NamesOf<E>::kAll)
    if (known.value == value) return known.name;
  return "unknown";
}

/// Returns the value with this name, or nullopt.
template <NamedEnum E>
constexpr std::optional<E> from_string(std::string_view name) noexcept {
  for (const Named<E>& known : NamesOf<E>::kAll)
    if (name == known.name) return known.value;
  return std::nullopt;
}

/// Returns false for values without an enumerator, for example from a cast.
template <NamedEnum E>
constexpr bool is_named(E value) noexcept {
  for (const Named<E>& known : NamesOf<E>::kAll)
    if (known.value == value) return true;
  return false;
}

}  // namespace switchyard
