// SPDX-License-Identifier: Apache-2.0
// The page of `switchyard tune --html`, from what --json writes.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace switchyard::tool {

/// One self-contained page like bench_html's: for each shape what is chosen and gained, and a plot of time over value for each
/// key that was searched. `document` has the schema switchyard.tune/1.
std::string tune_html(const nlohmann::json& document);

}  // namespace switchyard::tool
