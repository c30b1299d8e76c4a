// SPDX-License-Identifier: Apache-2.0
// Result files, written either completely or not at all.
#pragma once

#include <cstddef>
#include <string>

namespace switchyard::measure {

/// The path that denotes standard output.
inline constexpr const char* kStandardOutput = "-";
/// Redirects stdout to stderr from now on. The original standard output receives only what write_file writes to
/// kStandardOutput, so a program that reads it receives a single document.
void claim_standard_output();

/// Writes `text` to a new file next to `path`, which then replaces `path` and keeps the permissions of an existing file. A link
/// stays a link; a device, a pipe or a file that cannot be replaced is written in place. \throws std::runtime_error naming the
/// path
void write_file(const std::string& path, const std::string& text);

/// Reason why write_file(path) with at least `least` bytes would fail, as far as it can be determined in advance; "" if there
/// is none. Leaves everything unchanged.
std::string why_not_writable(const std::string& path, size_t least = 0);

}  // namespace switchyard::measure
