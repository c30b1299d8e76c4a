// SPDX-License-Identifier: Apache-2.0
// Outcomes of checks: how ranks encode them, how they are merged over all ranks, and their JSON form.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace switchyard::tool {

/// Outcome of one check on a single rank or on all ranks together.
struct CheckResult {
  std::string name;
  bool passed = true;
  std::string detail;    ///< the first difference, if any; for a skipped check the reason
  int64_t compared = 0;  ///< number of compared elements or table entries
  bool skipped = false;  ///< the subject of the check is absent; `passed` is true
};
inline CheckResult skipped(const std::string& name, const std::string& why) { return {name, true, why, 0, true}; }
bool all_passed(const std::vector<CheckResult>& checks);

/// Encodes the checks of a rank for the process that started it.
nlohmann::json encode_checks(const std::vector<CheckResult>& checks);
/// `ranks[r]` holds the encoded checks of rank r. Merges checks with the same name, or checks at the same position in each
/// rank's list. A merged check passes if it passes on all ranks; otherwise, its detail names the first rank on which it fails.
/// It is skipped if any rank skipped it.
std::vector<CheckResult> merged_by_name(const std::vector<nlohmann::json>& ranks);
std::vector<CheckResult> merged_by_place(const std::vector<nlohmann::json>& ranks);
/// Lists the checks without merging them; each is named "NAME on rank R".
std::vector<CheckResult> unmerged_by_rank(const std::vector<nlohmann::json>& ranks);

/// Checks as an array of JSON objects.
nlohmann::json checks_json(const std::vector<CheckResult>& checks);

}  // namespace switchyard::tool
