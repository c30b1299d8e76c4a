// SPDX-License-Identifier: Apache-2.0
// The page of `switchyard bench --html`: plots and a table from the --json document, for CPU and GPUs.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace switchyard::tool {

/// One self-contained page, with plots drawn here and without scripts or external resources. Shows time and share of the limit
/// over the swept quantity with the most values, with one pair of plots for each combination of the other swept quantities.
/// Values common to all runs are at the top. `document` has the schema switchyard.bench/1 and at least one run.
std::string bench_html(const nlohmann::json& document);

}  // namespace switchyard::tool
