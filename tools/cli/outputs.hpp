// SPDX-License-Identifier: Apache-2.0
// Files that verbs write, and what stands in the way of writing them; JSON on standard output; memory.
#pragma once

#include <cstddef>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace switchyard::tool {

/// What the least of each kind of file has, a little less than what tiny runs write.
inline constexpr size_t kMinJsonBytes = 2048, kMinPageBytes = 8192, kMinReportBytes = 28'000;

/// A file that a verb writes when it is done; no path: it does not.
struct OutputFile {
  std::string flag, path;
  size_t least = 0;  ///< bytes that it will have at least
};
/// What cannot be written is better known before minutes of measuring. Leaves no file behind. --json and --html may say "-":
/// standard output then gets that document alone, and what the verb prints goes to stderr. \throws UsageError, also if two
/// flags name the same file
void check_outputs(const std::vector<OutputFile>& files);

/// Refuses what does not fit into nine tenths of the memory. `what`: flags and values that decide it. \throws UsageError
void require_memory(const std::string& what, double needed, size_t available);

/// What a verb with a switch --json prints: the document, on standard output.
void print_json(const nlohmann::json& document);

}  // namespace switchyard::tool
