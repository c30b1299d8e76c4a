// SPDX-License-Identifier: Apache-2.0
// Files of results: there as a whole or not at all.
#pragma once

#include <cstddef>
#include <string>

namespace switchyard::measure {

/// The path that means standard output.
inline constexpr const char* kStandardOutput = "-";
/// From now on what is printed to stdout goes to stderr, and what write_file writes to kStandardOutput, and nothing else, to
/// what standard output was: a program that reads it gets one document.
void claim_standard_output();

/// Writes `text` to a new file beside `path` that then takes its place, with the permissions of a file that was there. A link
/// stays one; a device, a pipe or a file that cannot be replaced is written as it is. \throws std::runtime_error naming the
/// path
void write_file(const std::string& path, const std::string& text);

/// Why write_file(path) of at least `least` bytes would fail, as far as it can be known before; "" if nothing speaks against
/// it. Leaves everything as it was.
std::string why_not_writable(const std::string& path, size_t least = 0);

}  // namespace switchyard::measure
