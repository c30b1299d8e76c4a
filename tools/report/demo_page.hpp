// SPDX-License-Identifier: Apache-2.0
// The report of `switchyard demo`: a single self-contained HTML file with data, style and script, without external resources.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace switchyard::tool {

/// Returns the page. `data` is a result of demo_report.
std::string report_html(const nlohmann::json& data);
/// \throws switchyard::Error(io) naming the path
void write_report(const std::string& path, const nlohmann::json& data);

}  // namespace switchyard::tool
