// SPDX-License-Identifier: Apache-2.0
#include "cli/outputs.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/style.hpp"
#include "cli/verb.hpp"
#include "measure/result_file.hpp"

namespace switchyard::tool {

void check_outputs(const std::vector<OutputFile>& files) {
  std::vector<std::filesystem::path> targets;
  for (const OutputFile& file : files) {
    if (file.path.empty()) continue;
    const bool standard = file.path == measure::kStandardOutput;
    if (standard && file.flag != "--json" && file.flag != "--html")
      throw UsageError(file.flag + ": '-' given; allowed: a file (--json - and --html - write to standard output)");
    const std::string problem = measure::why_not_writable(file.path, file.least);
    if (!problem.empty()) throw UsageError(file.flag + ": cannot write '" + file.path + "': " + problem);
    std::error_code ignored;
    targets.push_back(std::filesystem::weakly_canonical(std::filesystem::absolute(file.path, ignored), ignored));
    if (std::find(targets.begin(), targets.end() - 1, targets.back()) != targets.end() - 1)
      throw UsageError(file.flag + ": '" + file.path + "' given, to which another flag also writes; allowed: a different file");
  }
  for (const OutputFile& file : files)
    if (file.path == measure::kStandardOutput) measure::claim_standard_output();
}

void require_memory(const std::string& what, double needed, size_t available) {
  const auto max = static_cast<double>(available);
  if (needed <= 0.9 * max) return;
  throw UsageError(what + " need about " + binary_size(needed) + ", " + binary_size(max) +
                   " are available; make one of them smaller");
}

void print_json(const nlohmann::json& document) {
  fmt::print("{}\n", document.dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
}

}  // namespace switchyard::tool
