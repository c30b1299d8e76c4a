// SPDX-License-Identifier: Apache-2.0
// Flags that set fields in the library's configs and options.
#pragma once

#include <string>
#include <vector>

namespace switchyard {
class Error;
}

namespace switchyard::tool {

/// Replaces the field in the text of a library error, or each factor of a product of fields, by the flag in `flags` that sets
/// it: "LowLatencyConfig::max_tokens = 70000: ..." becomes "--tokens = 70000: ...". Fields without a flag are left unchanged.
std::string text_with_flags(const Error& error, const std::vector<std::string>& flags);

/// The candidate that sets the same value as `flag` does in another verb, or "cuda" for "gpu"; "" if there is none.
std::string same_flag(const std::string& flag, const std::vector<std::string>& candidates);

}  // namespace switchyard::tool
