// SPDX-License-Identifier: Apache-2.0
#include "report/tune_page.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <vector>

#include "report/page.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

constexpr double kStripWidth = 560, kStripHeight = 260, kStripLeft = 20, kStripRight = 20, kStripTop = 34, kStripBottom = 40;

std::string value_of(const json& trial) {
  const auto value = trial.at("value").get<int64_t>();
  return value == 0 ? "by row size" : std::to_string(value);
}

/// One bar for each value, starting at 0; the bar is green for the chosen value, and gray for the library's default if that
/// differs.
std::string bars(const std::vector<const json*>& trials) {
  double max = 0;
  for (const json* t : trials) max = std::max(max, t->at("us").get<double>());
  const double step = (kStripWidth - kStripLeft - kStripRight) / static_cast<double>(trials.size()),
               plot_height = kStripHeight - kStripTop - kStripBottom;
  std::string out = fmt::format("<svg viewBox=\"0 0 {} {}\" role=\"img\">", kStripWidth, kStripHeight);
  for (size_t i = 0; i < trials.size(); ++i) {
    const json& t = *trials[i];
    const double us = t.at("us").get<double>(), height = max > 0 ? plot_height * us / max : 0;
    const double middle = kStripLeft + step * (static_cast<double>(i) + 0.5), top = kStripHeight - kStripBottom - height;
    const bool chosen = t.at("chosen").get<bool>(), is_default = t.at("usual").get<bool>();
    const char* const color = chosen ? "--good" : is_default ? "--muted" : "--move";
    if (us > 0)
      out += fmt::format(
          "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" style=\"fill:var({})\"><title>{}: {:.1f} us"
          "</title></rect>",
          middle - 0.38 * step, top, 0.76 * step, height, color, value_of(t), us);
    out += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\">{}</text>", middle, top - 6,
                       us >= 100 ? fmt::format("{:.0f}", us)
                       : us > 0  ? fmt::format("{:.1f}", us)
                                 : "-");
    out += fmt::format("<text x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{}</text>", middle, kStripHeight - kStripBottom + 18,
                       value_of(t));
  }
  return out + "</svg>";
}

std::string section_of(const json& chosen) {
  std::string out = fmt::format("<section class=\"card\"><h2>{}</h2><p>{}</p>", escaped(chosen.at("shape").get<std::string>()),
                                escaped("Chosen: " + chosen.at("values").get<std::string>()));
  out += "<div class=\"scroll\"><table><tr><th>of</th><th>untuned</th><th>tuned</th></tr>";
  for (const json& gain : chosen.at("gains"))
    out += fmt::format("<tr><td>{}</td><td>{:.1f} us</td><td>{:.1f} us</td></tr>", escaped(gain.at("of").get<std::string>()),
                       gain.at("untuned_us").get<double>(), gain.at("tuned_us").get<double>());
  out += "</table></div><div class=\"two\">";
  std::vector<std::pair<std::string, std::vector<const json*>>> keys;  // in search order
  for (const json& trial : chosen.at("trials")) {
    const auto name = trial.at("name").get<std::string>();
    auto known = std::find_if(keys.begin(), keys.end(), [&](const auto& k) { return k.first == name; });
    if (known == keys.end()) known = keys.insert(known, {name, {}});
    known->second.push_back(&trial);
  }
  for (const auto& [name, trials] : keys)
    out += fmt::format("<div><h3>Time, microseconds, over {}</h3>{}</div>", escaped(name), bars(trials));
  return out + "</div></section>\n";
}

}  // namespace

std::string tune_html(const json& document) {
  std::string page = page_head("Switchyard tune", escaped(document.at("what").get<std::string>()), document);
  for (const json& chosen : document.at("chosen")) page += section_of(chosen);
  page +=
      "<section class=\"card\"><p class=\"note\">Each bar is one measurement, the sum of the calls that the value changes, "
      "with the values found before in force. Green: the chosen value; gray: the library's default, if it is another value. "
      "Tables: the best of three alternating measurements.</p>";
  if (document.contains("stopped"))
    page += "<p class=\"note\">Not everything was measured: " + escaped(document.at("stopped").get<std::string>()) + "</p>";
  return page + "</section>\n</main>\n</body>\n</html>\n";
}

}  // namespace switchyard::tool
