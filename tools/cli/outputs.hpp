// SPDX-License-Identifier: Apache-2.0
// Output files of verbs, with early checks that they can be written; JSON on standard output; memory limits.
#pragma once

#include <cstddef>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace switchyard::tool {

/// Lower bounds for the sizes of output files, slightly below those of tiny runs.
inline constexpr size_t kMinJsonBytes = 2048, kMinPageBytes = 8192, kMinReportBytes = 28'000;

/// A file that a verb writes when it ends; an empty path means no file.
struct OutputFile {
  std::string flag, path;
  size_t least = 0;  ///< minimum size in bytes
};
/// Checks that the files can be written before minutes are spent on measurements. Leaves no file behind. --json and --html
/// accept "-": standard output then carries only that document, and the verb prints to stderr. \throws UsageError, also if two
/// flags name the same file
void check_outputs(const std::vector<OutputFile>& files);

/// Throws if `needed` exceeds nine tenths of the available memory. `what`: the flags and values that determine it. \throws
/// UsageError
void require_memory(const std::string& what, double needed, size_t available);

/// Prints the JSON document of a verb with a --json toggle to standard output.
void print_json(const nlohmann::json& document);

}  // namespace switchyard::tool
