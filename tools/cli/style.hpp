// SPDX-License-Identifier: Apache-2.0
// Terminal output: optional colors, human-readable numbers, aligned tables.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace switchyard::tool {

/// Color is on if stdout is a terminal and NO_COLOR is not set.
bool colour_on();
std::string bold(const std::string& text);
std::string green(const std::string& text);
std::string yellow(const std::string& text);
std::string red(const std::string& text);
std::string dim(const std::string& text);

/// "1.50 GiB", "28.7 MB", "12.3 ms", "1,234,567".
std::string binary_size(double bytes);
std::string decimal_size(double bytes);
std::string duration(double seconds);
std::string grouped(int64_t value);
/// "1 step", "4 steps".
std::string counted(int64_t n, const std::string& noun);

/// The first columns are left-aligned, and numbers (cells that start with a digit or sign) are right-aligned. Color codes take
/// up no width.
class Table {
 public:
  explicit Table(std::vector<std::string> header) : header_(std::move(header)) {}
  void row(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  std::string text(const std::string& indent = "  ") const;

 private:
  std::vector<std::string> header_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace switchyard::tool
