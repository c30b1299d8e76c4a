// SPDX-License-Identifier: Apache-2.0
#include "check/check_result.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>

namespace switchyard::tool {
namespace {

using nlohmann::json;

CheckResult decode_check(const json& one) {
  return {one[0].get<std::string>(), one[1].get<bool>(), one[2].get<std::string>(), one[3].get<int64_t>(), one[4].get<bool>()};
}

/// Merges one rank's outcome into the combined outcome of all ranks.
void add(CheckResult& all, const CheckResult& one, size_t rank) {
  all.compared += one.compared;
  if (one.skipped && all.passed) {
    all.skipped = true;
    all.detail = one.detail;
  }
  if (one.passed) return;
  if (all.passed) all.detail = fmt::format("rank {}: {}", rank, one.detail);
  all.passed = all.skipped = false;
}

}  // namespace

bool all_passed(const std::vector<CheckResult>& checks) {
  return std::all_of(checks.begin(), checks.end(), [](const CheckResult& c) { return c.passed; });
}

json encode_checks(const std::vector<CheckResult>& checks) {
  json out = json::array();
  for (const CheckResult& c : checks) out.push_back({c.name, c.passed, c.detail, c.compared, c.skipped});
  return out;
}

std::vector<CheckResult> merged_by_name(const std::vector<json>& ranks) {
  std::vector<CheckResult> merged;
  for (size_t r = 0; r < ranks.size(); ++r) {
    for (const json& encoded : ranks[r]) {
      const CheckResult one = decode_check(encoded);
      auto known = std::find_if(merged.begin(), merged.end(), [&](const CheckResult& c) { return c.name == one.name; });
      if (known == merged.end()) known = merged.insert(known, CheckResult{one.name, true, "", 0});
      add(*known, one, r);
    }
  }
  return merged;
}

std::vector<CheckResult> merged_by_place(const std::vector<json>& ranks) {
  std::vector<CheckResult> merged;
  for (size_t r = 0; r < ranks.size(); ++r) {
    for (size_t i = 0; i < ranks[r].size(); ++i) {
      const CheckResult one = decode_check(ranks[r][i]);
      if (i >= merged.size()) merged.push_back({one.name, true, "", 0});
      add(merged[i], one, r);
    }
  }
  return merged;
}

std::vector<CheckResult> unmerged_by_rank(const std::vector<json>& ranks) {
  std::vector<CheckResult> checks;
  for (size_t r = 0; r < ranks.size(); ++r) {
    for (const json& encoded : ranks[r]) {
      checks.push_back(decode_check(encoded));
      checks.back().name += fmt::format(" on rank {}", r);
    }
  }
  return checks;
}

json checks_json(const std::vector<CheckResult>& checks) {
  json out = json::array();
  for (const CheckResult& c : checks)
    out.push_back(
        {{"name", c.name}, {"passed", c.passed}, {"detail", c.detail}, {"compared", c.compared}, {"skipped", c.skipped}});
  return out;
}

}  // namespace switchyard::tool
