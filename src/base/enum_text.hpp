// SPDX-License-Identifier: Apache-2.0
// Text forms of enumeration values for error messages.
#pragma once

#include <string>
#include <vector>

#include "switchyard/names.hpp"

namespace switchyard::detail {

/// "a", "a or b", "a, b or c".
inline std::string any_of(const std::vector<std::string>& choices) {
  std::string text;
  for (size_t i = 0; i < choices.size(); ++i) text += (i == 0 ? "" : i + 1 == choices.size() ? " or " : ", ") + choices[i];
  return text;
}

/// The names of the values for which `allowed` is true: "bf16, f16 or f32".
template <NamedEnum E, class Allowed>
std::string names_where(Allowed&& allowed) {
  std::vector<std::string> names;
  for (const Named<E>& known : NamesOf<E>::kAll)
    if (allowed(known.value)) names.emplace_back(known.name);
  return any_of(names);
}

/// All values with their numbers, as used in C programs and casts: "none (0), f32 (1) or ue8m0 (2)".
template <NamedEnum E>
std::string numbered_names() {
  std::vector<std::string> names;
  for (const Named<E>& known : NamesOf<E>::kAll)
    names.push_back(std::string(known.name) + " (" + std::to_string(static_cast<int>(known.value)) + ")");
  return any_of(names);
}

/// The name, or the number if the value has no name.
template <NamedEnum E>
std::string text_of(E value) {
  return is_named(value) ? to_string(value) : std::to_string(static_cast<int>(value));
}

}  // namespace switchyard::detail
