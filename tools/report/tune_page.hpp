// SPDX-License-Identifier: Apache-2.0
// The page of `switchyard tune --html`, from the --json document.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace switchyard::tool {

/// One self-contained page in the style of bench_html: for each shape the choice and the gain, and for each searched key a plot
/// of time over value. `document` has the schema switchyard.tune/1.
std::string tune_html(const nlohmann::json& document);

}  // namespace switchyard::tool
