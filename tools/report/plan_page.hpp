// SPDX-License-Identifier: Apache-2.0
// The page for `switchyard plan --html`, generated from the --json document.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace switchyard::tool {

/// Returns a self-contained page in the style of bench_html. It shows time, bytes and memory over the number of ranks for each
/// variant, the phases of the time, and a table. `document` has the schema switchyard.plan/1.
std::string plan_html(const nlohmann::json& document);

}  // namespace switchyard::tool
