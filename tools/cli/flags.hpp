// SPDX-License-Identifier: Apache-2.0
// Which flags set the fields of the library's configs and options.
#pragma once

#include <string>
#include <vector>

namespace switchyard {
class Error;
}

namespace switchyard::tool {

/// The text of an error of the library, in which the field that it is about, or each factor of a product of fields, is called
/// by the one of `flags` that sets it: "LowLatencyConfig::max_tokens = 70000: ..." becomes "--tokens = 70000: ...". The text
/// stays as it is where no flag does.
std::string text_with_flags(const Error& error, const std::vector<std::string>& flags);

/// The candidate that sets what `flag` sets in another verb, or "cuda" for "gpu"; "" if there is none.
std::string same_flag(const std::string& flag, const std::vector<std::string>& candidates);

}  // namespace switchyard::tool
