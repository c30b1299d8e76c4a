// SPDX-License-Identifier: Apache-2.0
// Charts for the pages, drawn as SVG: lines over numbers, or points over words.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace switchyard::tool {

struct ChartPoint {
  double x, y;
};
/// `color`: a variable in the pages' style, for example "--move".
struct ChartLine {
  std::string name;
  const char* color;
  bool dashed = false;
  std::vector<ChartPoint> points;
};
/// The horizontal axis of a chart. With `words`, values are evenly spaced at 0, 1, ..., and are not joined by a line.
struct ChartAxis {
  std::string title;
  bool words = false;
  std::function<std::string(double)> text;   ///< a value as displayed
  std::function<std::string(double)> label;  ///< the part of it that fits below the axis
};

/// Axes are logarithmic if values differ by a factor of 8 or more. `unit` follows every value; with `share`, values are
/// percentages of a limit.
std::string chart(const std::vector<ChartLine>& lines, const ChartAxis& over, const std::string& unit, bool share);
/// Legend with the lines' names and colors.
std::string chart_keys(const std::vector<ChartLine>& lines);
/// Formats a value as in the charts.
std::string chart_number(double value);

}  // namespace switchyard::tool
