// SPDX-License-Identifier: Apache-2.0
// The page of `switchyard tune --html`, from the document of --json.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace switchyard::tool {

/// One self-contained page like bench_html's: for each shape the choice and the gain, and a plot of time over value for each
/// searched key. `document` has the schema switchyard.tune/1.
std::string tune_html(const nlohmann::json& document);

}  // namespace switchyard::tool
