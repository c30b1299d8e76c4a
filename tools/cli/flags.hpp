// SPDX-License-Identifier: Apache-2.0
// The flags that set the fields of the library's configs and options.
#pragma once

#include <string>
#include <vector>

namespace switchyard {
class Error;
}

namespace switchyard::tool {

/// The text of a library error with its field, or each factor of a product of fields, replaced by the one of `flags` that sets
/// it: "LowLatencyConfig::max_tokens = 70000: ..." becomes "--tokens = 70000: ...". Fields without such a flag stay unchanged.
std::string text_with_flags(const Error& error, const std::vector<std::string>& flags);

/// The candidate that sets the same value as `flag` of another verb, or "cuda" for "gpu"; "" if there is none.
std::string same_flag(const std::string& flag, const std::vector<std::string>& candidates);

}  // namespace switchyard::tool
