// SPDX-License-Identifier: Apache-2.0
#include "cli/style.hpp"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>

namespace switchyard::tool {
namespace {

std::string coloured(const char* code, const std::string& text) {
  return colour_on() ? fmt::format("\033[{}m{}\033[0m", code, text) : text;
}

/// Width in terminal columns; escape sequences and UTF-8 continuation bytes occupy none.
size_t visible_width(const std::string& text) {
  size_t width = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\033') {
      while (i < text.size() && text[i] != 'm') ++i;
    } else if ((static_cast<unsigned char>(text[i]) & 0xC0u) != 0x80u) {
      ++width;
    }
  }
  return width;
}

bool looks_numeric(const std::string& text) {
  if (text.empty()) return true;
  const auto first = static_cast<unsigned char>(text[0]);
  return std::isdigit(first) != 0 ||
         ((text[0] == '-' || text[0] == '+') && (text.size() == 1 || std::isdigit(static_cast<unsigned char>(text[1])) != 0));
}

std::string scaled(double value, double base, const std::vector<std::string>& units) {
  size_t i = 0;
  while (std::abs(value) >= base && i + 1 < units.size()) {
    value /= base;
    ++i;
  }
  const int digits = i == 0 ? 0 : std::abs(value) < 10 ? 2 : std::abs(value) < 100 ? 1 : 0;
  return fmt::format("{:.{}f} {}", value, digits, units[i]);
}

}  // namespace

bool colour_on() {
  static const bool on = isatty(STDOUT_FILENO) != 0 && std::getenv("NO_COLOR") == nullptr;
  return on;
}
std::string bold(const std::string& text) { return coloured("1", text); }
std::string green(const std::string& text) { return coloured("32", text); }
std::string yellow(const std::string& text) { return coloured("33", text); }
std::string red(const std::string& text) { return coloured("1;31", text); }
std::string dim(const std::string& text) { return coloured("2", text); }

std::string binary_size(double bytes) { return scaled(bytes, 1024, {"B", "KiB", "MiB", "GiB", "TiB"}); }
std::string decimal_size(double bytes) { return scaled(bytes, 1000, {"B", "kB", "MB", "GB", "TB"}); }

std::string duration(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.1f} us", seconds * 1e6);
  if (seconds < 1) return fmt::format("{:.2f} ms", seconds * 1e3);
  return fmt::format("{:.2f} s", seconds);
}

std::string grouped(int64_t value) {
  std::string digits = std::to_string(value);
  for (auto at = static_cast<int64_t>(digits.size()) - 3; at > (value < 0 ? 1 : 0); at -= 3)
    digits.insert(static_cast<size_t>(at), 1, ',');
  return digits;
}

std::string counted(int64_t n, const std::string& noun) {
  std::string out = fmt::format("{} {}", grouped(n), noun);
  if (n != 1) out += noun.ends_with("s") ? "es" : "s";
  return out;
}

std::string Table::text(const std::string& indent) const {
  std::vector<size_t> widths;
  for (const std::string& cell : header_) widths.push_back(visible_width(cell));
  for (const auto& row : rows_) {
    for (size_t c = 0; c < row.size() && c < widths.size(); ++c) widths[c] = std::max(widths[c], visible_width(row[c]));
  }
  std::vector<bool> right(header_.size(), !rows_.empty());
  for (const auto& row : rows_) {
    for (size_t c = 0; c < row.size() && c < right.size(); ++c) right[c] = right[c] && looks_numeric(row[c]);
  }
  const auto line = [&](const std::vector<std::string>& cells, bool strong) {
    std::string out = indent;
    for (size_t c = 0; c < cells.size(); ++c) {
      const std::string pad(widths[c] - std::min(widths[c], visible_width(cells[c])), ' ');
      const std::string cell = strong ? bold(cells[c]) : cells[c];
      const bool last = c + 1 == cells.size();
      out += right[c] ? pad + cell : cell + (last ? "" : pad);
      if (!last) out += "  ";
    }
    return out + "\n";
  };
  std::string out = line(header_, true);
  for (const auto& row : rows_) out += line(row, false);
  return out;
}

}  // namespace switchyard::tool
