// SPDX-License-Identifier: Apache-2.0
// Parts shared by the pages with plots.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace switchyard::tool {

/// Escapes text for use between tags and in attributes.
std::string escaped(const std::string& text);
/// The beginning of a page, up to its sections. `lead` is HTML; `document` names the machine, commit and date.
std::string page_head(const std::string& title, const std::string& lead, const nlohmann::json& document);

}  // namespace switchyard::tool
