// SPDX-License-Identifier: Apache-2.0
#include "bench/case.hpp"

namespace switchyard::tool {

std::vector<nlohmann::json> part_of(const std::vector<nlohmann::json>& ranks, const char* key) {
  std::vector<nlohmann::json> parts;
  for (const nlohmann::json& r : ranks) parts.push_back(r.at(key));
  return parts;
}

measure::CopyLimit limit_now(Progress& progress, const BenchOptions& options, const measure::Machine& machine,
                             const char* title) {
  measure::CopyLimitOptions limit;
  limit.threads = machine.usable_cores();
  limit.row_bytes = static_cast<size_t>(options.hidden) * 2;
  limit.seconds = static_cast<double>(options.limit_ms) / 1000;
  progress.stage(title, 100);
  measure::CopyLimit result =
      measure::measure_copy_limit(machine, limit, [&](double done) { progress.update(static_cast<int64_t>(100 * done)); });
  progress.finish(fmt::format("{:.1f} GB/s with {} threads", result.best().gbs, result.threads));
  return result;
}

std::vector<std::string> limit_notes(double before, double after, double largest_share) {
  std::vector<std::string> notes;
  if (std::min(before, after) < std::max(before, after) * 2 / 3)
    notes.push_back(
        fmt::format("the copy limit was {:.1f} GB/s before and {:.1f} GB/s after: something else uses this machine, and shares "
                    "of the limit "
                    "say little",
                    before, after));
  if (largest_share > 1)
    notes.push_back(fmt::format("a share of the limit is {:.1f} %: the limit was measured too low, or rows lay in a cache",
                                100 * largest_share));
  return notes;
}

}  // namespace switchyard::tool
