// SPDX-License-Identifier: Apache-2.0
// One self-contained HTML file: data, style and script inside, nothing fetched from anywhere.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace switchyard::tool {

/// The page. `data` is what demo_report makes.
std::string report_html(const nlohmann::json& data);
/// \throws switchyard::Error(io) naming the path
void write_report(const std::string& path, const nlohmann::json& data);

// The page's parts (report_style.cpp, report_script.cpp).
extern const char* const kReportStyle;
extern const char* const kReportScript;

}  // namespace switchyard::tool
