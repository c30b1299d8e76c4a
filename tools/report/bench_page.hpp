// SPDX-License-Identifier: Apache-2.0
// The page for `switchyard bench --html`: plots and a table from the --json document, for the CPU and GPUs.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace switchyard::tool {

/// Returns a self-contained page with plots drawn here and without scripts or external resources. Shows time and share of the
/// limit over the swept quantity that has the most values, with one pair of plots for each combination of the other swept
/// quantities. Values common to all runs are at the top. `document` has the schema switchyard.bench/1 and contains at least one
/// run.
std::string bench_html(const nlohmann::json& document);

}  // namespace switchyard::tool
