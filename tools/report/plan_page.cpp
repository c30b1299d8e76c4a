// SPDX-License-Identifier: Apache-2.0
#include "report/plan_page.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <vector>

#include "cli/style.hpp"
#include "report/chart.hpp"
#include "report/page.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

struct Known {
  const char* name;   ///< in the document
  const char* title;  ///< on the page
  const char* color;
};
constexpr Known kVariantLines[] = {{"flat_per_route", "flat, a row per route", "--user"},
                                   {"flat_per_rank", "flat, a row per rank", "--plan"},
                                   {"hierarchical", "hierarchical, exact rows return", "--move"},
                                   {"per_host", "hierarchical, a sum per host returns", "--compute"}};
constexpr Known kPhaseLines[] = {
    {"network", "network", "--peak"},   {"links", "links", "--move"},     {"memory", "memory", "--compute"},
    {"quantise", "quantise", "--user"}, {"call", "call", "--call"},       {"counts", "counts", "--plan"},
    {"plan", "plan", "--bad"},          {"records", "records", "--good"}, {"fill", "fill", "--ink"}};

const Known& known(const std::string& variant) {
  for (const Known& line : kVariantLines)
    if (variant == line.name) return line;
  throw json::other_error::create(501, "variant '" + variant + "' is not known", nullptr);
}

ChartAxis ranks_axis() {
  const auto whole = [](double ranks) { return fmt::format("{:.0f}", ranks); };
  return {"ranks", false, whole, whole};
}

/// One line for each variant: `value` of its entry at each number of ranks.
std::vector<ChartLine> lines_of(const json& points, const std::function<double(const json&)>& value) {
  std::vector<ChartLine> lines;
  for (const Known& line : kVariantLines) {
    ChartLine one{line.title, line.color, false, {}};
    for (const json& point : points)
      for (const json& entry : point.at("variants"))
        if (entry.at("variant") == line.name) one.points.push_back({point.at("ranks").get<double>(), value(entry)});
    if (!one.points.empty()) lines.push_back(std::move(one));
  }
  return lines;
}

/// Removes points with a value of 0, because an axis may be logarithmic, and lines without any other points.
std::vector<ChartLine> positive(std::vector<ChartLine> lines) {
  for (ChartLine& line : lines) std::erase_if(line.points, [](const ChartPoint& p) { return p.y <= 0; });
  std::erase_if(lines, [](const ChartLine& line) { return line.points.empty(); });
  return lines;
}

/// One line for each phase of a variant's `call`; phases that do not overlap are dashed.
std::vector<ChartLine> phases_of(const json& points, const std::string& variant, const char* call) {
  std::vector<ChartLine> lines;
  for (const Known& known_phase : kPhaseLines) {
    ChartLine one{known_phase.title, known_phase.color, false, {}};
    for (const json& point : points)
      for (const json& entry : point.at("variants")) {
        if (entry.at("variant") != variant) continue;
        for (const json& phase : entry.at(call).at("phases")) {
          if (phase.at("name") != known_phase.name) continue;
          one.points.push_back({point.at("ranks").get<double>(), phase.at("us").get<double>()});
          one.dashed = !phase.at("overlaps").get<bool>();
        }
      }
    if (!one.points.empty()) lines.push_back(std::move(one));
  }
  return positive(std::move(lines));
}

std::string half(const std::string& title, const std::vector<ChartLine>& lines) {
  return "<div><h3>" + escaped(title) + "</h3>" + chart(lines, ranks_axis(), "", false) + chart_keys(lines) + "</div>";
}

double both_us(const json& entry) {
  return entry.at("dispatch").at("us").get<double>() + entry.at("combine").at("us").get<double>();
}

const json* entry_of(const json& point, const std::string& variant) {
  for (const json& entry : point.at("variants"))
    if (entry.at("variant") == variant) return &entry;
  return nullptr;
}

/// Speedups of the other variants relative to the first; empty if the first is absent.
std::vector<ChartLine> gains_of(const json& points) {
  const std::string first = kVariantLines[0].name;
  if (entry_of(points.at(0), first) == nullptr) return {};
  std::vector<ChartLine> lines;
  for (const Known& line : kVariantLines) {
    ChartLine one{line.title, line.color, line.name == first, {}};
    for (const json& point : points)
      if (const json* entry = entry_of(point, line.name))
        one.points.push_back({point.at("ranks").get<double>(), both_us(*entry_of(point, first)) / both_us(*entry)});
    if (!one.points.empty()) lines.push_back(std::move(one));
  }
  return lines;
}

std::string tile(const std::string& label, const std::string& value, const std::string& note) {
  return fmt::format(
      "<div class=\"tile\"><div class=\"label\">{}</div><div class=\"value\">{}</div><p class=\"note\">{}</p></div>",
      escaped(label), escaped(value), escaped(note));
}

/// Bottlenecks of both calls.
std::string bounds_of(const json& entry) {
  const std::string dispatch = entry.at("dispatch").at("bottleneck"), combine = entry.at("combine").at("bottleneck");
  return dispatch == combine ? dispatch : dispatch + " and " + combine;
}

/// Tiles for the largest possible group or, if there is none, for the smallest point.
std::string tiles(const json& points) {
  const json* shown = &points.at(0);
  for (const json& point : points)
    if (!point.at("variants").at(0).at("memory").at("continued").get<bool>() && point.at("ranks") > shown->at("ranks"))
      shown = &point;
  std::string out = "<div class=\"tiles\">" + tile("on", counted(shown->at("ranks").get<int64_t>(), "rank"),
                                                   "of " + counted(shown->at("hosts").get<int64_t>(), "host"));
  for (const json& entry : shown->at("variants"))
    out += tile(known(entry.at("variant")).title, duration(both_us(entry) * 1e-6),
                "dispatch and combine, bound by " + bounds_of(entry));
  return out + "</div>";
}

std::string times_section(const json& points) {
  const auto us = [](const char* call) { return [call](const json& entry) { return entry.at(call).at("us").get<double>(); }; };
  const auto crossing = [](const json& e) {
    return (e.at("dispatch").at("bytes").at("network_out").get<double>() +
            e.at("combine").at("bytes").at("network_out").get<double>()) *
           1e-6;
  };
  const auto memory = [](const json& e) { return e.at("memory").at("total_bytes").get<double>() / (1 << 30); };
  std::string out = "<section class=\"card\"><h2>Over the number of ranks</h2><div class=\"two\">" +
                    half("Dispatch and combine, microseconds", lines_of(points, both_us)) +
                    half("Sent to the network per rank, MB, both calls", positive(lines_of(points, crossing))) +
                    "</div><div class=\"two\">" + half("Dispatch, microseconds", lines_of(points, us("dispatch"))) +
                    half("Combine, microseconds", lines_of(points, us("combine"))) + "</div>";
  const std::vector<ChartLine> gains = gains_of(points);
  out += "<div class=\"two\">" + half("Memory per rank, GiB", lines_of(points, memory)) +
         (gains.empty() ? std::string("<div></div>") : half("Time of a flat exchange per route / time", gains)) + "</div>";
  return out +
         "<p class=\"note\">Within one host nothing crosses the network, and the last three variants are "
         "equal.</p></section>\n";
}

std::vector<std::string> variants_of(const json& points) {
  std::vector<std::string> names;
  for (const json& entry : points.at(0).at("variants")) names.push_back(entry.at("variant"));
  return names;
}

std::string phases_section(const json& points) {
  std::string out;
  for (const std::string& variant : variants_of(points))
    out += fmt::format(
        "<section class=\"card\"><h2>Where the time goes <small>{}</small></h2><div class=\"two\">{}{}</div></section>\n",
        escaped(known(variant).title), half("Dispatch, microseconds", phases_of(points, variant, "dispatch")),
        half("Combine, microseconds", phases_of(points, variant, "combine")));
  return out;
}

std::string row_of(const json& point, const json& entry, bool first) {
  const json &dispatch = entry.at("dispatch"), &combine = entry.at("combine"), &memory = entry.at("memory");
  const auto time = [](const json& call) { return duration(call.at("us").get<double>() * 1e-6); };
  const auto bytes = [](const json& call, const char* name) { return decimal_size(call.at("bytes").at(name).get<double>()); };
  std::string out = first
                        ? fmt::format("<tr><td>{}</td><td>{}</td>", point.at("ranks").get<int>(), point.at("hosts").get<int>())
                        : std::string("<tr><td></td><td></td>");
  out += fmt::format("<td class=\"words\">{}</td>", escaped(known(entry.at("variant")).title));
  for (const json* call : {&dispatch, &combine})
    out += fmt::format("<td>{}</td><td class=\"words\">{}</td><td>{}</td><td>{}</td>", time(*call),
                       escaped((*call).at("bottleneck").get<std::string>()), bytes(*call, "network_out"),
                       bytes(*call, "link_out"));
  return out + fmt::format("<td>{}{}</td></tr>", binary_size(memory.at("total_bytes").get<double>()),
                           memory.at("continued").get<bool>() ? " *" : "");
}

std::string table_section(const json& points) {
  std::string out =
      "<section class=\"card\"><h2>All figures</h2><div class=\"scroll\"><table><tr><th>ranks</th><th>hosts</th><th "
      "class=\"words\">variant</th>"
      "<th>dispatch</th><th class=\"words\">bottleneck</th><th>network</th><th>links</th><th>combine</th>"
      "<th class=\"words\">bottleneck</th><th>network</th>"
      "<th>links</th><th>memory</th></tr>";
  bool continued = false;
  for (const json& point : points) {
    bool first = true;
    for (const json& entry : point.at("variants")) {
      out += row_of(point, entry, first);
      continued = continued || entry.at("memory").at("continued").get<bool>();
      first = false;
    }
  }
  out +=
      "</table></div><p class=\"note\">network, links: bytes sent by the rank that sends most. "
      "memory: per rank, as required by the library, "
      "plus that of crossing rows.";
  if (continued) out += " *: a group has at most 64 ranks; the library's numbers are extrapolated.";
  return out + "</p>";
}

std::string plan_notes_of(const json& document) {
  const json& topology = document.at("topology");
  std::string out =
      "<p class=\"note\">Nothing was measured here: "
      "the figures follow from counted rows and the numbers of the topology, "
      "whose source is: " +
      escaped(topology.at("source").get<std::string>()) +
      ". A solid phase overlaps with the other solid ones, and the longest of them counts; dashed ones are added.</p>";
  for (const json& note : document.value("notes", json::array()))
    out += "<p class=\"note\">Note: " + escaped(note.get<std::string>()) + ".</p>";
  return out;
}

}  // namespace

std::string plan_html(const json& document) {
  const json& points = document.at("points");
  return page_head("Switchyard plan", escaped(document.at("what").get<std::string>()), document) + tiles(points) +
         times_section(points) + phases_section(points) + table_section(points) + plan_notes_of(document) +
         "</section>\n</main>\n</body>\n</html>\n";
}

}  // namespace switchyard::tool
