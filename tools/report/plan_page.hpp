// SPDX-License-Identifier: Apache-2.0
// The page of `switchyard plan --html`, from what --json writes.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace switchyard::tool {

/// One self-contained page like bench_html's: time, bytes and memory over the number of ranks for each variant, where the time
/// goes, and a table. `document` has the schema switchyard.plan/1.
std::string plan_html(const nlohmann::json& document);

}  // namespace switchyard::tool
