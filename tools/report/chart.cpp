// SPDX-License-Identifier: Apache-2.0
#include "report/chart.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "cli/style.hpp"
#include "report/page.hpp"

namespace switchyard::tool {
namespace {

/// Maps values linearly or logarithmically to positions in [from, to] pixels.
struct Scale {
  double low, high, from, to;
  bool logarithmic;
  double operator()(double v) const {
    const double f = logarithmic ? std::log(v / low) / std::log(high / low) : (v - low) / (high - low);
    return from + (to - from) * (high > low ? f : 0.5);
  }
};

/// 1, 2 or 5 times a power of ten, at least v.
double nice(double v) {
  const double power = std::pow(10, std::floor(std::log10(v)));
  for (const double m : {1.0, 2.0, 5.0}) {
    if (m * power >= v * 0.999999) return m * power;
  }
  return 10 * power;
}

std::vector<double> ticks_of(const Scale& s) {
  std::vector<double> out;
  if (!s.logarithmic) {
    const double step = nice(std::max(s.high - s.low, 1e-9) / 6);
    for (double v = std::ceil(s.low / step) * step; v <= s.high * 1.000001; v += step) out.push_back(v);
    return out;
  }
  for (double power = std::pow(10, std::floor(std::log10(s.low))); power <= s.high; power *= 10) {
    for (const double m : {1.0, 2.0, 5.0}) {
      if (m * power >= s.low * 0.999 && m * power <= s.high * 1.001) out.push_back(m * power);
    }
  }
  return out;
}

constexpr double kWidth = 560, kHeight = 330, kLeft = 62, kRight = 14, kTop = 14, kBottom = 44;

std::string axes(const Scale& x, const Scale& y, const std::set<double>& values, const ChartAxis& over,
                 const std::string& unit) {
  std::string out;
  for (const double v : ticks_of(y)) {
    out +=
        fmt::format("<line class=\"axis\" x1=\"{0}\" x2=\"{1}\" y1=\"{2:.1f}\" y2=\"{2:.1f}\"/>", kLeft, kWidth - kRight, y(v));
    out +=
        fmt::format("<text x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{}{}</text>", kLeft - 8, y(v) + 4, chart_number(v), unit);
  }
  double last = -1e9;
  for (const double v : values) {  // the measured values, where there is room
    if (x(v) - last < 44 && !over.words) continue;
    last = x(v);
    out += fmt::format("<text x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{}</text>", x(v), kHeight - kBottom + 18,
                       escaped(over.label(v)));
  }
  return out + fmt::format("<text x=\"{}\" y=\"{}\" text-anchor=\"middle\" class=\"strong\">{}</text>",
                           (kLeft + kWidth - kRight) / 2, kHeight - 6, escaped(over.title));
}

}  // namespace

std::string chart_number(double v) {
  if (v >= 1000) return grouped(static_cast<int64_t>(std::llround(v)));
  return v == std::round(v) ? fmt::format("{:.0f}", v) : fmt::format("{:.3g}", v);
}

std::string chart(const std::vector<ChartLine>& all, const ChartAxis& over, const std::string& unit, bool share) {
  std::set<double> xs;
  double low = 1e300, high = 0;
  for (const ChartLine& s : all) {
    for (const ChartPoint& p : s.points) {
      xs.insert(p.x);
      low = std::min(low, p.y);
      high = std::max(high, p.y);
    }
  }
  if (xs.empty()) return "<p class=\"note\">There is nothing to draw.</p>";
  const bool words = over.words, log_x = !words && *xs.begin() > 0 && *xs.rbegin() / *xs.begin() >= 8,
             log_y = !share && low > 0 && high / low >= 8;
  const double margin = words ? (kWidth - kRight - kLeft) / (2 * static_cast<double>(xs.size())) : 18;
  const Scale x{*xs.begin(), *xs.rbegin(), kLeft + margin, kWidth - kRight - margin, log_x};
  const Scale y{log_y ? low * 0.8 : 0, log_y ? high * 1.25 : std::max(high * 1.08, share ? 105.0 : 1e-9), kHeight - kBottom,
                kTop, log_y};
  std::string out = fmt::format("<svg viewBox=\"0 0 {} {}\" role=\"img\">", kWidth, kHeight) + axes(x, y, xs, over, unit);
  for (const ChartLine& s : all) {
    std::string path;
    for (const ChartPoint& p : s.points) path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : "L", x(p.x), y(p.y));
    if (!words)
      out += fmt::format("<path d=\"{}\" style=\"fill:none;stroke:var({});stroke-width:2{}\"/>", path, s.color,
                         s.dashed ? ";stroke-dasharray:5 4" : "");
    for (const ChartPoint& p : s.points) {
      out += fmt::format(
          "<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{}\" style=\"fill:var({})\"><title>{}: {}{} at {} {}</title></circle>",
          x(p.x), y(p.y), s.dashed ? 2.5 : 4, s.color, escaped(s.name), chart_number(p.y), unit, escaped(over.text(p.x)),
          escaped(over.title));
    }
  }
  return out + "</svg>";
}

std::string chart_keys(const std::vector<ChartLine>& all) {
  std::string out = "<div class=\"keys\">";
  for (const ChartLine& s : all) {
    out += fmt::format(
        "<span><svg viewBox=\"0 0 26 8\"><line x1=\"0\" x2=\"26\" y1=\"4\" y2=\"4\" "
        "style=\"stroke:var({});stroke-width:2.5{}\"/></svg>{}</span>",
        s.color, s.dashed ? ";stroke-dasharray:5 4" : "", escaped(s.name));
  }
  return out + "</div>";
}

}  // namespace switchyard::tool
