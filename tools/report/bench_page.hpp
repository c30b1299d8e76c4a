// SPDX-License-Identifier: Apache-2.0
// The page of `switchyard bench --html`: plots and a table from what --json writes, on the CPU and on GPUs.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace switchyard::tool {

/// One self-contained page: drawn here, no script, nothing fetched from anywhere. Time and share of the limit over what was
/// `swept` (the quantity with most values), one pair of plots for each combination of the others; at the top what all runs have
/// in common. `document` has the schema switchyard.bench/1 and at least one run.
std::string bench_html(const nlohmann::json& document);

}  // namespace switchyard::tool
