// SPDX-License-Identifier: Apache-2.0
// JSON files read by verbs.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace switchyard::tool {

/// A file named on the command line: its flag or argument, its path, and, for error messages, a description of the expected
/// contents.
struct InputFile {
  std::string flag, path, allowed;
};

/// Rejects the file. `problem` may quote its content and the parser's message. \throws UsageError
[[noreturn]] void refuse(const InputFile& file, const std::string& problem);

/// Parses the file, reading no further than the first invalid character. \throws UsageError with the line and column of that
/// character, or with the reason why nothing can be read
nlohmann::json read_json(const InputFile& file);

}  // namespace switchyard::tool
