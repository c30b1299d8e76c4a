// SPDX-License-Identifier: Apache-2.0
// Fields that must be identical on all ranks; errors name the differing field and both values.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "base/enum_text.hpp"
#include "base/mix_hash.hpp"

namespace switchyard::detail {

struct AgreedField {
  const char* name;  ///< as in errors: "NormalConfig::hidden"
  int64_t value;
  std::string (*text)(int64_t) = nullptr;  ///< formats a value; null: as a number
};
using AgreedFields = std::vector<AgreedField>;

template <class T>
AgreedField agreed(const char* name, T value) {
  if constexpr (NamedEnum<T>)
    return {name, static_cast<int64_t>(value), [](int64_t v) { return text_of(static_cast<T>(v)); }};
  else if constexpr (std::is_same_v<T, bool>)
    return {name, int64_t{value}, [](int64_t v) { return std::string(v != 0 ? "true" : "false"); }};
  else
    return {name, static_cast<int64_t>(value)};
}

inline uint64_t hash_of(uint64_t seed, const AgreedFields& fields) {
  for (const AgreedField& field : fields) seed = mix_hash(seed, static_cast<uint64_t>(field.value));
  return seed;
}

/// The values of one rank, in the form in which they are gathered.
struct AgreedProposal {
  static constexpr size_t kMaxFields = 24;
  char object[24] = {};  ///< the object that the rank constructs
  int64_t values[kMaxFields] = {};

  AgreedProposal() = default;
  AgreedProposal(const char* made, const AgreedFields& fields) {
    assert(fields.size() <= kMaxFields);  // further fields would not be compared
    std::strncpy(object, made, sizeof object - 1);
    for (size_t i = 0; i < std::min(fields.size(), kMaxFields); ++i) values[i] = fields[i].value;
  }
};

struct Difference {
  std::string text;             ///< empty: no difference
  const char* field = nullptr;  ///< the field named in the text, if any
};

/// The first difference among the proposals of all ranks; identical on every rank. `proposal_of(r)` is the proposal of rank r;
/// `fields` are this rank's fields.
template <class ProposalOf>
Difference find_difference(const AgreedFields& fields, size_t world, const ProposalOf& proposal_of) {
  const auto rank = [](size_t r) { return "rank " + std::to_string(r); };
  const AgreedProposal& first = proposal_of(0);
  for (size_t r = 1; r < world; ++r)
    if (const AgreedProposal& other = proposal_of(r); std::strncmp(first.object, other.object, sizeof first.object) != 0)
      return {"rank 0 makes " + std::string(first.object) + " and " + rank(r) + " " + other.object +
              "; all ranks make the same objects in the same order"};
  const auto text = [](const AgreedField& field, int64_t value) {
    return field.text != nullptr ? field.text(value) : std::to_string(value);
  };
  for (size_t r = 1; r < world; ++r)
    for (size_t i = 0; i < std::min(fields.size(), AgreedProposal::kMaxFields); ++i)
      if (const AgreedProposal& other = proposal_of(r); first.values[i] != other.values[i])
        return {std::string(fields[i].name) + " = " + text(fields[i], first.values[i]) + " on rank 0 and " +
                    text(fields[i], other.values[i]) + " on " + rank(r) + ": must be equal on all ranks",
                fields[i].name};
  return {};
}

}  // namespace switchyard::detail
