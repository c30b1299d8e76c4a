// SPDX-License-Identifier: Apache-2.0
// Charts of the pages: lines over numbers, or points over words, drawn here as SVG.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace switchyard::tool {

struct ChartPoint {
  double x, y;
};
/// `color`: a variable of the pages' style, as "--move".
struct ChartLine {
  std::string name;
  const char* color;
  bool dashed = false;
  std::vector<ChartPoint> points;
};
/// What a chart is over. With `words` values lie side by side, 0, 1, ..., and no line joins them.
struct ChartAxis {
  std::string title;
  bool words = false;
  std::function<std::string(double)> text;   ///< a value as it is told
  std::function<std::string(double)> label;  ///< the same, as much of it as fits below the axis
};

/// Axes are logarithmic where values differ by 8 times or more. `unit` follows every value; `share`: per cent of a limit.
std::string chart(const std::vector<ChartLine>& lines, const ChartAxis& over, const std::string& unit, bool share);
/// Names and colours of the lines.
std::string chart_keys(const std::vector<ChartLine>& lines);
/// A value as charts write it.
std::string chart_number(double value);

}  // namespace switchyard::tool
