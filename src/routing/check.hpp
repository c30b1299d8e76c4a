// SPDX-License-Identifier: Apache-2.0
// Argument checks for the routing functions, with uniform wording.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "switchyard/routing.hpp"

namespace switchyard::detail {

/// Throws Error(invalid_argument) with the text "<function>: <name> is <given>; allowed: <allowed>".
[[noreturn]] inline void refuse(const std::string& function, const std::string& name, const std::string& given,
                                const std::string& allowed) {
  throw Error(ErrorCode::invalid_argument, function + ": " + name + " is " + given + "; allowed: " + allowed);
}

/// Throws unless low <= value <= high.
inline void check_range(const char* function, const char* name, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return;
  refuse(function, name, std::to_string(value), std::to_string(low) + " to " + std::to_string(high));
}

/// Maximum number of tokens for which a [T, count] array has a representable size.
constexpr int64_t max_tokens(int64_t count) { return (int64_t{1} << 47) / count; }

/// Throws unless `tokens` is within range for arrays of shape [tokens, count].
inline void check_tokens(const char* function, int64_t tokens, int64_t count) {
  check_range(function, "tokens", tokens, 0, max_tokens(count));
}

/// Returns a zero-filled routing [tokens, topk]. The arguments must already have been checked. \throws Error(system) if memory
/// is insufficient.
inline Routing make_routing(const char* function, int num_experts, int topk, int64_t tokens, bool with_weights) {
  Routing routing;
  routing.num_experts = num_experts;
  routing.topk = topk;
  routing.num_tokens = tokens;
  const size_t routes = static_cast<size_t>(tokens) * static_cast<size_t>(topk);
  try {
    routing.topk_ids.resize(routes);
    if (with_weights) routing.topk_weights.resize(routes);
  } catch (const std::exception&) {  // bad_alloc, length_error
    throw Error(ErrorCode::system, std::string(function) + ": no memory for the routes of " + std::to_string(tokens) +
                                       " tokens with topk " + std::to_string(topk));
  }
  return routing;
}

}  // namespace switchyard::detail
