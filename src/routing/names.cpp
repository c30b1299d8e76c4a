// SPDX-License-Identifier: Apache-2.0
#include "routing/names.hpp"

#include <algorithm>

namespace switchyard::detail {
namespace {

constexpr std::string_view kIds = "topk_ids", kWeights = "topk_weights";

/// Removes `word{n}.` from the front of `text` and sets `number`; returns false if `text` begins with `word` in any other form.
bool take_number(std::string_view& text, std::string_view word, int& number) {
  if (!text.starts_with(word)) return true;
  std::string_view rest = text.substr(word.size());
  const size_t digits = std::min(rest.find_first_not_of("0123456789"), rest.size());
  if (digits < 1 || digits > 6 || digits == rest.size() || rest[digits] != '.') return false;
  number = 0;
  for (const char c : rest.substr(0, digits)) number = number * 10 + (c - '0');
  text = rest.substr(digits + 1);
  return true;
}

}  // namespace

std::optional<TensorName> parse_tensor_name(std::string_view name) {
  TensorName parsed;
  if (!take_number(name, "layer", parsed.layer) || !take_number(name, "rank", parsed.rank)) return std::nullopt;
  if (name != kIds && name != kWeights) return std::nullopt;
  parsed.is_weights = name == kWeights;
  return parsed;
}

std::string format_tensor_name(const TensorName& name) {
  std::string text;
  if (name.layer >= 0) text += "layer" + std::to_string(name.layer) + ".";
  if (name.rank >= 0) text += "rank" + std::to_string(name.rank) + ".";
  return text + std::string(name.is_weights ? kWeights : kIds);
}

std::optional<std::string> weights_path(const std::string& path) {
  const size_t slash = path.rfind('/');
  const size_t at = path.rfind(kIds);
  if (at == std::string::npos || (slash != std::string::npos && at < slash)) return std::nullopt;
  std::string weights = path;
  return weights.replace(at, kIds.size(), kWeights);
}

}  // namespace switchyard::detail
