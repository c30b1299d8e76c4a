// SPDX-License-Identifier: Apache-2.0
// Charts of the pages: lines over numbers, or points over words, drawn as SVG.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace switchyard::tool {

struct ChartPoint {
  double x, y;
};
/// `color`: a variable of the pages' style, for example "--move".
struct ChartLine {
  std::string name;
  const char* color;
  bool dashed = false;
  std::vector<ChartPoint> points;
};
/// The horizontal axis of a chart. With `words`, values are evenly spaced at 0, 1, ..., and not joined by a line.
struct ChartAxis {
  std::string title;
  bool words = false;
  std::function<std::string(double)> text;   ///< a value as displayed
  std::function<std::string(double)> label;  ///< the part of it that fits below the axis
};

/// Axes are logarithmic if values differ by a factor of 8 or more. `unit` follows every value; `share`: per cent of a limit.
std::string chart(const std::vector<ChartLine>& lines, const ChartAxis& over, const std::string& unit, bool share);
/// Names and colors of the lines.
std::string chart_keys(const std::vector<ChartLine>& lines);
/// Formats a value as in charts.
std::string chart_number(double value);

}  // namespace switchyard::tool
