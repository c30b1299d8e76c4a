// SPDX-License-Identifier: Apache-2.0
#include "report/bench_page.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "cli/style.hpp"
#include "cli/words.hpp"
#include "measure/figures.hpp"
#include "report/chart.hpp"
#include "report/page.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

/// A quantity that may differ between runs.
struct Axis {
  const char* key;    ///< key in the config
  const char* title;  ///< name on the page
  const char* swept;  ///< name in `swept` of the document
  bool words = false;
};
constexpr Axis kAxes[] = {
    {"tokens_per_rank", "tokens per rank", "tokens"},
    {"sms", "SMs", "sms"},
    {"ranks", "ranks", "ranks"},
    {"hidden", "hidden", "hidden"},
    {"topk", "experts per token", "topk"},
    {"experts", "experts", "experts"},
    {"intermediate", "intermediate", "intermediate"},
    {"pieces", "pieces", "pieces"},
    {"late_us", "rank 0 enters late, us", "late-us"},
    {"capacity_percent", "capacity, % of the mean", "capacity"},
    {"spare_slots", "spare slots per rank", "spare-slots"},
    {"blocks", "blocks", "blocks"},
    {"warps", "warps", "warps"},
    {"dtype", "rows", "dtype", true},
    {"quantize", "quantised", "quantize", true},
    {"routing", "routing", "routing", true},
    {"layout", "layout", "layout", true},
    {"order", "order of combine", "order", true},
    {"sending", "sending", "sending", true},
    {"scale_order", "order of scales", "scale-order", true},
};

/// A line in a plot: the path of its values within a run, and its style.
struct Line {
  std::string name;
  std::vector<const char*> path;
  const char* color;
  bool dashed = false;
};

const std::vector<Line> kTimes = {{"dispatch", {"dispatch", "p50_us"}, "--move"},
                                  {"combine", {"combine", "p50_us"}, "--compute"},
                                  {"cached dispatch", {"cached_dispatch", "p50_us"}, "--plan"},
                                  {"combine per route", {"combine_per_route", "p50_us"}, "--compute"},
                                  {"combine per rank", {"combine_per_rank", "p50_us"}, "--plan"},
                                  {"both, per route", {"both_per_route", "p50_us"}, "--user"},
                                  {"both, per rank", {"both_per_rank", "p50_us"}, "--call"},
                                  {"whole exchange", {"all_to_all", "p50_us"}, "--move"},
                                  {"in two calls", {"two_calls", "p50_us"}, "--compute"},
                                  {"up", {"up", "p50_us"}, "--plan"},
                                  {"down", {"down", "p50_us"}, "--user"},
                                  {"up + down", {"experts", "p50_us"}, "--call"},
                                  {"layer", {"layer", "p50_us"}, "--ink"},
                                  {"fused layer", {"fused", "p50_us"}, "--good"},
                                  {"push limit", {"push_limit", "p50_us"}, "--move", true},
                                  {"pull limit", {"pull_limit", "p50_us"}, "--compute", true}};
const std::vector<Line> kShares = {{"layer", {"share_of_limit", "layer"}, "--ink"},
                                   {"fused layer", {"share_of_limit", "fused"}, "--user"},
                                   {"dispatch", {"share_of_limit", "dispatch"}, "--move"},
                                   {"combine", {"share_of_limit", "combine"}, "--compute"},
                                   {"cached dispatch", {"share_of_limit", "cached_dispatch"}, "--plan"}};

/// With replicas of experts.
const std::vector<Line> kLoads = {{"with replicas", {"busiest_over_mean"}, "--ink"},
                                  {"without replicas", {"replicas", "busiest_over_mean_without_replicas"}, "--call", true}};
const std::vector<Line> kMoved = {{"weights", {"replicas", "bytes_moved"}, "--move"}};

/// A run's value of a quantity, as displayed.
std::string text_of(const json& run, const Axis& axis) {
  const json& config = run.at("config");
  if (axis.words) return config.value(axis.key, std::string("-"));
  return chart_number(static_cast<double>(config.value(axis.key, int64_t{0})));
}

/// An axis's distinct values over all runs, in order of appearance.
std::vector<std::string> texts_of(const json& runs, const Axis& axis) {
  std::vector<std::string> texts;
  for (const json& run : runs) {
    const std::string text = text_of(run, axis);
    if (std::find(texts.begin(), texts.end(), text) == texts.end()) texts.push_back(text);
  }
  return texts;
}

/// The horizontal axis of a plot, with numbers at their positions or evenly spaced words.
struct Horizontal {
  Horizontal(const json& runs, const Axis& given)
      : axis(given), words(given.words ? texts_of(runs, given) : decltype(words)()) {}
  double place(const json& run) const {
    if (!axis.words) return static_cast<double>(run.at("config").value(axis.key, int64_t{0}));
    return static_cast<double>(std::find(words.begin(), words.end(), text_of(run, axis)) - words.begin());
  }
  std::string text(double at) const { return axis.words ? words[static_cast<size_t>(at)] : chart_number(at); }
  /// The part of the text that fits below an axis.
  std::string label(double at) const {
    const size_t max_chars = axis.words ? 70 / words.size() : 70;
    const std::string whole = text(at);
    return whole.size() <= max_chars ? whole : whole.substr(0, std::max<size_t>(max_chars, 4) - 3) + "...";
  }

  ChartAxis chart_axis() const {
    return {axis.title, axis.words, [this](double at) { return text(at); }, [this](double at) { return label(at); }};
  }

  const Axis& axis;
  std::vector<std::string> words;
};

std::vector<ChartPoint> points_of(const std::vector<const json*>& runs, const Horizontal& over, const Line& line,
                                  double scale) {
  std::vector<ChartPoint> out;
  for (const json* run : runs) {
    const json* at = run;
    for (const char* key : line.path) at = at && at->contains(key) ? &at->at(key) : nullptr;
    if (at && at->is_number()) out.push_back({over.place(*run), at->get<double>() * scale});
  }
  std::sort(out.begin(), out.end(), [](const ChartPoint& a, const ChartPoint& b) { return a.x < b.x; });
  return out;
}

std::vector<ChartLine> series_of(const std::vector<const json*>& runs, const Horizontal& over, const std::vector<Line>& lines,
                                 double scale) {
  std::vector<ChartLine> out;
  for (const Line& line : lines) {
    ChartLine s{line.name, line.color, line.dashed, points_of(runs, over, line, scale)};
    if (!s.points.empty()) out.push_back(std::move(s));
  }
  return out;
}

std::string table_of(const json& runs, const std::vector<size_t>& varied) {
  std::vector<const Line*> lines;  // solid lines of the plot for which the runs have values
  for (const Line& line : kTimes)
    if (!line.dashed && runs.at(0).contains(line.path[0])) lines.push_back(&line);
  const bool shares = runs.at(0).contains("share_of_limit"), plan = runs.at(0).contains("plan_us");
  const char* const plan_key = runs.at(0).contains("plan_launch_us") ? "plan_launch_us" : "plan_us";
  std::string out = "<div class=\"scroll\"><table><tr>";
  for (const size_t a : varied) out += fmt::format("<th>{}</th>", kAxes[a].title);
  for (const Line* line : lines) {
    const char* const tail = measure::tail_name(runs.at(0).at(line->path[0]).value("iterations", int64_t{100}));
    out += fmt::format("<th>{}</th><th>{}</th>{}", line->name, tail, shares ? "<th>of limit</th>" : "");
  }
  out += fmt::format("{}<th>checked</th></tr>", plan ? "<th>plan</th>" : "");
  for (const json& run : runs) {
    out += "<tr>";
    for (const size_t a : varied) out += fmt::format("<td>{}</td>", escaped(text_of(run, kAxes[a])));
    for (const Line* line : lines) {
      const json& times = run.at(line->path[0]);
      out += fmt::format("<td>{}</td><td>{}</td>", duration(times.at("p50_us").get<double>() * 1e-6),
                         duration(times.at("p99_us").get<double>() * 1e-6));
      if (!shares) continue;
      const json& share = run.at("share_of_limit");
      out += share.contains(line->path[0]) ? fmt::format("<td>{:.0f} %</td>", 100 * share.at(line->path[0]).get<double>())
                                           : "<td>-</td>";
    }
    if (plan) out += fmt::format("<td>{}</td>", duration(run.at(plan_key).get<double>() * 1e-6));
    const json& verified = run.at("verified");
    out += fmt::format("<td>{}</td></tr>", verified.is_null()     ? "no"
                                           : verified.get<bool>() ? "<b class=\"good\">PASS</b>"
                                                                  : "<b class=\"bad\">FAIL</b>");
  }
  return out + "</table></div>";
}

/// A column in the table of fused layers: the minimum of a share or the maximum of a time over ranks.
struct WorkersColumn {
  const char *title, *key;
  bool share;  ///< minimum over ranks, per cent; otherwise maximum, microseconds
};
constexpr WorkersColumn kWorkersColumns[] = {{"up", "up_share", true},
                                             {"down", "down_share", true},
                                             {"sums", "sum_share", true},
                                             {"before up", "before_up_us", false},
                                             {"after down", "after_down_us", false},
                                             {"communication", "communication_us", false},
                                             {"hidden", "hidden_share", true}};

std::string workers_cell(const json& ranks, const WorkersColumn& column) {
  std::vector<double> values;
  for (const json& rank : ranks) values.push_back(rank.at(column.key).get<double>());
  if (column.share) return fmt::format("{:.1f} %", 100 * *std::min_element(values.begin(), values.end()));
  return duration(*std::max_element(values.begin(), values.end()) * 1e-6);
}

/// What the warps of fused layers do; empty if there are no fused layers.
std::string fused_section(const json& runs, const std::vector<size_t>& varied) {
  std::string rows;
  for (const json& run : runs) {
    const json ranks = run.value("fused_workers", json::array());
    if (ranks.empty()) continue;
    rows += "<tr>";
    for (const size_t a : varied) rows += fmt::format("<td>{}</td>", escaped(text_of(run, kAxes[a])));
    for (const WorkersColumn& column : kWorkersColumns) rows += fmt::format("<td>{}</td>", workers_cell(ranks, column));
    rows += "</tr>";
  }
  if (rows.empty()) return "";
  std::string head;
  for (const size_t a : varied) head += fmt::format("<th>{}</th>", kAxes[a].title);
  for (const WorkersColumn& column : kWorkersColumns) head += fmt::format("<th>{}</th>", column.title);
  return "<section class=\"card\"><h2>The fused layer</h2><div class=\"scroll\"><table><tr>" + head + "</tr>" + rows +
         "</table></div><p class=\"note\">From traces of calls other than the timed ones. up, down, sums: tensor-core products "
         "and sums, as shares of the time of the warps that do them; communication: time of moving rows, summed over all "
         "warps; hidden: its share while some warp of the rank multiplies. Shares are the minimum over ranks, times the "
         "maximum.</p></section>\n";
}

/// Description of the method behind a mode's figures. For normal mode on the CPU, it names the limit.
struct LimitsText {
  const char* mode;
  bool gpus;
  const char* text;
};
constexpr LimitsText kLimitsTexts[] = {
    {"flat", true, "Medians of the slowest rank, each exchange timed inside a replayed CUDA graph with a cold L2."},
    {"flat", false, "Medians of the slowest rank from entry to exit."},
    {"layer", true,
     "Medians of the slowest rank with a cold L2. The limit of a layer is up + down, its experts' products without exchange on "
     "the same rows in the same run; the share is that limit / the layer's time."},
    {"layer", false,
     "Medians of the slowest rank from entry to exit. The limit of a layer is up + down, its experts without exchange on the "
     "same rows in the same run; the share is that limit / the layer's time."},
    {"low_latency", false, "Medians of the slowest rank from entry to exit."},
    {"low_latency", true,
     "Medians of the slowest rank, each call timed inside a replayed CUDA graph with a cold L2. The limits are bare "
     "kernels that move the same rows on as many SMs in the same run, with a barrier at the end."},
    {"normal", true,
     "Medians of the slowest rank from CUDA event to CUDA event with a cold L2, the plan included in dispatch. The "
     "limits are bare kernels that move the "
     "same rows between the same places on as many SMs in the same run; the shares are limit / time."}};

std::string limits_text(const json& d) {
  const std::string mode = d.at("runs").at(0).at("config").value("mode", std::string("normal"));
  const bool gpus = d.contains("gpus");
  for (const LimitsText& text : kLimitsTexts)
    if (mode == text.mode && gpus == text.gpus) return text.text;
  return fmt::format(
      "Medians of the slowest rank from entry to exit. The limit is the copy of all cores in the same run, {:.1f} GB/s read + "
      "written; the shares are the bytes of a call at that speed / time.",
      d.at("copy_limit").value("gb_per_s", 0.0));
}

/// Columns of the table: those whose values differ between runs. A value may depend on another one: warps on ranks, or SMs on a
/// tuning.
std::vector<size_t> varied_in(const json& runs) {
  std::vector<size_t> varied;
  for (size_t a = 0; a < std::size(kAxes); ++a)
    if (a == 0 || texts_of(runs, kAxes[a]).size() > 1) varied.push_back(a);
  return varied;
}

/// Swept quantities. The first one is the horizontal axis: numeric quantities take precedence over words, and then the quantity
/// with the most values is chosen. Each combination of the others has its own plots. Old documents do not name swept
/// quantities; for these documents, it is the first quantity that varies.
std::vector<size_t> swept_in(const json& document) {
  const json& runs = document.at("runs");
  if (!document.contains("swept")) {
    const auto varies = [&](const Axis& axis) { return texts_of(runs, axis).size() > 1; };
    const Axis* const first = std::find_if(std::begin(kAxes), std::end(kAxes), varies);
    return {first == std::end(kAxes) ? 0 : static_cast<size_t>(first - kAxes)};
  }
  const json& swept = document.at("swept");
  std::vector<size_t> axes;
  for (size_t a = 0; a < std::size(kAxes); ++a)
    if (std::find(swept.begin(), swept.end(), kAxes[a].swept) != swept.end()) axes.push_back(a);
  if (axes.empty()) axes.push_back(0);
  const auto rank = [&](size_t a) { return std::pair(!kAxes[a].words, texts_of(runs, kAxes[a]).size()); };
  const auto max = std::max_element(axes.begin(), axes.end(), [&](size_t a, size_t b) { return rank(a) < rank(b); });
  std::rotate(axes.begin(), max, max + 1);
  return axes;
}

/// A config value if all runs share it, else null.
json shared(const json& runs, const char* key) {
  json value = runs.at(0).at("config").value(key, json());
  for (const json& run : runs)
    if (run.at("config").value(key, json()) != value) return nullptr;
  return value;
}

/// Values common to all runs.
std::string common_text(const json& runs) {
  std::vector<std::string> parts;
  const auto add = [&](const char* key, const std::string& before, const std::string& after) {
    const json value = shared(runs, key);
    if (!value.is_null()) parts.push_back(before + (value.is_string() ? value.get<std::string>() : value.dump()) + after);
  };
  add("mode", "", " mode");
  add("exchange", "", " exchange");
  add("ranks", "", " ranks");
  add("ranks_are", "ranks are ", "");
  add("layout", "", "");
  add("dtype", "", " rows");
  add("hidden", "hidden ", "");
  add("intermediate", "intermediate ", "");
  add("topk", "top-", "");
  add("experts", "", " experts");
  add("routing", "", " routing");
  add("order", "", " combine");
  add("sending", "sent ", "");
  return joined(parts, ", ");
}

/// Caveats about the figures.
std::string bench_notes_of(const json& document) {
  std::string out;
  for (const json& note : document.value("notes", json::array()))
    out += "<p class=\"note\">Note: " + escaped(note.get<std::string>()) + ".</p>";
  if (document.contains("stopped"))
    out += "<p class=\"note\">Not everything was measured: " + escaped(document.at("stopped").get<std::string>()) + "</p>";
  return out;
}

/// Plots of the load before and after, and of the bytes moved for it; empty without replicas.
std::string replicas_section(const std::vector<const json*>& runs, const Horizontal& over) {
  const std::vector<ChartLine> moved = series_of(runs, over, kMoved, 1e-6), loads = series_of(runs, over, kLoads, 1);
  if (moved.empty()) return "";
  return fmt::format(
      "<div class=\"two\"><div><h3>Load of the busiest rank over the mean</h3>{}{}</div><div><h3>Bytes moved to spare slots, "
      "MB</h3>{}{}</div></div>",
      chart(loads, over.chart_axis(), "", false), chart_keys(loads), chart(moved, over.chart_axis(), "", false),
      chart_keys(moved));
}

}  // namespace

std::string bench_html(const json& document) {
  const json& runs = document.at("runs");
  const std::vector<size_t> swept = swept_in(document);
  const Horizontal over(runs, kAxes[swept.front()]);
  std::vector<std::pair<std::string, std::vector<const json*>>> groups;
  for (const json& run : runs) {
    std::string key;
    for (const size_t a : swept)
      if (a != swept.front()) key += fmt::format("{}{} {}", key.empty() ? "" : ", ", text_of(run, kAxes[a]), kAxes[a].title);
    auto known = std::find_if(groups.begin(), groups.end(), [&](const auto& g) { return g.first == key; });
    if (known == groups.end()) known = groups.insert(known, {key, {}});
    known->second.push_back(&run);
  }
  std::string page = page_head("Switchyard bench", escaped(common_text(runs)), document);
  for (const auto& [key, group] : groups) {
    const std::vector<ChartLine> times = series_of(group, over, kTimes, 1);
    const std::vector<ChartLine> shares = series_of(group, over, kShares, 100);
    page += fmt::format("<section class=\"card\">{}<div class=\"two\"><div><h3>Time, microseconds</h3>{}{}</div>",
                        key.empty() ? "" : "<h2>" + escaped(key) + "</h2>", chart(times, over.chart_axis(), "", false),
                        chart_keys(times));
    if (!shares.empty())
      page += fmt::format("<div><h3>Share of the limit</h3>{}{}</div>", chart(shares, over.chart_axis(), " %", true),
                          chart_keys(shares));
    page += "</div>" + replicas_section(group, over) + "</section>\n";
  }
  page += fused_section(runs, varied_in(runs));
  page += "<section class=\"card\"><h2>All figures</h2>" + table_of(runs, varied_in(runs)) + "<p class=\"note\">" +
          limits_text(document) + "</p>" + bench_notes_of(document) + "</section>\n</main>\n</body>\n</html>\n";
  return page;
}

}  // namespace switchyard::tool
