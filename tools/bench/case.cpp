// SPDX-License-Identifier: Apache-2.0
#include "bench/case.hpp"

namespace switchyard::tool {

std::vector<nlohmann::json> part_of(const std::vector<nlohmann::json>& ranks, const char* key) {
  std::vector<nlohmann::json> parts;
  for (const nlohmann::json& r : ranks) parts.push_back(r.at(key));
  return parts;
}

measure::CopyLimit copy_limit_of(Progress& progress, const BenchOptions& options, const measure::Machine& machine) {
  measure::CopyLimitOptions limit;
  limit.threads = machine.usable_cores();
  limit.row_bytes = static_cast<size_t>(options.hidden) * 2;
  limit.seconds = static_cast<double>(options.limit_ms) / 1000;
  progress.stage("copy limit", 100);
  measure::CopyLimit result =
      measure::measure_copy_limit(machine, limit, [&](double done) { progress.update(static_cast<int64_t>(100 * done)); });
  progress.finish(fmt::format("{:.1f} GB/s with {} threads", result.best().gbs, result.threads));
  return result;
}

std::string limit_note(double largest_share) {
  if (largest_share <= 1) return "";
  return fmt::format(
      "a share of the limit is {:.1f} %: other load slowed the measurement of the limit, or rows were in a cache",
      100 * largest_share);
}

}  // namespace switchyard::tool
