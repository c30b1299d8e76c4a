// SPDX-License-Identifier: Apache-2.0
#include "cli/flags.hpp"

#include <algorithm>
#include <iterator>
#include <string_view>

#include "switchyard/status.hpp"

namespace switchyard::tool {
namespace {

/// A field in the library's configs and options, and the flag that sets it. No verb has the flags -M, -K, --pes and
/// --experts-per-pe of the published ledger check; they are listed for suggestions.
struct FieldFlag {
  std::string_view field;
  const char* flag;
};
constexpr FieldFlag kFieldFlags[] = {
    {"max_tokens", "--tokens"},
    {"max_tokens", "-M"},
    {"hidden", "--hidden"},
    {"hidden", "-K"},
    {"world", "--ranks"},
    {"world", "--pes"},
    {"num_experts", "--experts"},
    {"num_experts", "--experts-per-pe"},
    {"topk", "--topk"},
    {"pieces", "--pieces"},
    {"expert_alignment", "--alignment"},
    {"num_channels", "--channels"},
    {"slots", "--slots"},
    {"send_chunk", "--send-chunk"},
    {"num_blocks", "--blocks"},
    {"num_warps", "--warps"},
    {"num_sms", "--sms"},
};

bool contains(const std::vector<std::string>& all, const std::string& one) {
  return std::find(all.begin(), all.end(), one) != all.end();
}

/// Translates "NormalConfig::hidden" into the corresponding flag, or returns it unchanged if there is none.
std::string as_flag(std::string_view field, const std::vector<std::string>& flags) {
  const size_t colons = field.rfind("::");
  const std::string_view member = colons == std::string_view::npos ? field : field.substr(colons + 2);
  for (const FieldFlag& one : kFieldFlags)
    if (one.field == member && contains(flags, one.flag)) return one.flag;
  return std::string(field);
}

}  // namespace

std::string text_with_flags(const Error& error, const std::vector<std::string>& flags) {
  const std::string_view text = error.what(), field = error.field();
  if (field.empty()) return std::string(text);
  const auto begin = static_cast<size_t>(field.data() - text.data());
  std::string out(text.substr(0, begin));
  for (size_t at = 0; at < field.size();) {  // may be a product: "max_tokens * topk", "num_blocks x num_warps"
    const size_t end = std::min(field.find(' ', at), field.size());
    out += as_flag(field.substr(at, end - at), flags);
    if (end < field.size()) out += ' ';
    at = end + 1;
  }
  return out.append(text.substr(begin + field.size()));
}

std::string same_flag(const std::string& flag, const std::vector<std::string>& candidates) {
  if (flag == "gpu" && contains(candidates, "cuda")) return "cuda";
  for (const FieldFlag& one : kFieldFlags) {
    if (flag != one.flag) continue;
    for (const FieldFlag& other : kFieldFlags)
      if (one.field == other.field && contains(candidates, other.flag)) return other.flag;
  }
  return "";
}

}  // namespace switchyard::tool
