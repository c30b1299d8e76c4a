// SPDX-License-Identifier: Apache-2.0
// Outcomes of checks: as a rank tells them, put together for all ranks, and as JSON.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace switchyard::tool {

/// Outcome of one check on one rank, or of all ranks together.
struct CheckResult {
  std::string name;
  bool passed = true;
  std::string detail;    ///< the first difference, if any; of a check that was skipped, why
  int64_t compared = 0;  ///< elements, or table entries, that were compared
  bool skipped = false;  ///< what it would check is not there; it has passed then
};
inline CheckResult skipped(const std::string& name, const std::string& why) { return {name, true, why, 0, true}; }
bool all_passed(const std::vector<CheckResult>& checks);

/// As ranks tell them to whoever started them.
nlohmann::json encode_checks(const std::vector<CheckResult>& checks);
/// Element r is what rank r told. Merged are checks of the same name, or those at the same place of each rank's list: the
/// result passes if it does on all ranks, otherwise its detail names the first rank where it does not. Skipped are checks that
/// any rank has skipped.
std::vector<CheckResult> merged_by_name(const std::vector<nlohmann::json>& ranks);
std::vector<CheckResult> merged_by_place(const std::vector<nlohmann::json>& ranks);
/// Not merged: each is called "NAME on rank R".
std::vector<CheckResult> unmerged_by_rank(const std::vector<nlohmann::json>& ranks);

/// As documents have them: an object for each.
nlohmann::json checks_json(const std::vector<CheckResult>& checks);

}  // namespace switchyard::tool
