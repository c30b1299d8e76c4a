// SPDX-License-Identifier: Apache-2.0
// The page for `switchyard tune --html`, generated from the --json document.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace switchyard::tool {

/// Returns a self-contained page in the style of bench_html. It shows the choice and the gain for each shape, and a plot of
/// time over value for each searched key. `document` has the schema switchyard.tune/1.
std::string tune_html(const nlohmann::json& document);

}  // namespace switchyard::tool
