// SPDX-License-Identifier: Apache-2.0
#include "trace/summary.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "cli/build_info.hpp"
#include "cli/style.hpp"
#include "layer/layer_times.hpp"
#include "measure/figures.hpp"
#include "measure/machine.hpp"
#include "trace/calls.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

struct Link {
  int from = 0, to = 0;
  double bytes = 0;            ///< per call
  const char* by = "routing";  ///< or "trace": the bytes carried by its spans
};

/// Input of summaries.
struct Seen {
  int world = 1, num_warps = 1;
  uint64_t lost = 0, clock_error_ns = 0;
  std::vector<TraceSlice> slices;
  std::vector<TracePhase> phases;
};
Seen seen_of(const Trace& trace) {
  return {trace.world(), trace.options().num_warps, trace.lost(), trace.clock_error_ns(), trace.slices(), trace.summary()};
}
Seen seen_of(TraceFile file) {
  std::vector<TracePhase> phases = phases_of(file.slices);
  return {file.world, file.num_warps, file.lost, file.clock_error_ns, std::move(file.slices), std::move(phases)};
}

/// Direction of a span's rows: to the experts or back, and from or to the span's own rank.
struct Direction {
  bool back = false, to_rank = false;
};
Direction direction_of(const TraceSlice& s, const std::vector<const TraceSlice*>& calls_of_rank) {
  if (s.name == "send_rows") return {};
  if (s.name == "pull_rows") return {false, true};
  if (s.name == "pull_reduce" || s.name == "sum_returned") return {true, true};
  if (s.name != "ring_send") return {true, false};
  for (const TraceSlice* call : calls_of_rank)
    if (call->begin_us <= s.begin_us && s.begin_us <= call->begin_us + call->duration_us)
      return {call->name != "dispatch", false};
  return {};
}

std::map<int, std::vector<const TraceSlice*>> calls_of(const std::vector<TraceSlice>& slices) {
  std::map<int, std::vector<const TraceSlice*>> calls;
  for (const TraceSlice& s : slices)
    if (s.track < 0 && s.category == "call") calls[s.rank].push_back(&s);
  return calls;
}

/// The link that carried the most bytes in one direction, according to the spans. Spans do not name the peer. With two ranks,
/// it is the other rank; with more ranks, or if spans were lost, there is no result.
std::optional<Link> busiest_in_trace(const Seen& seen, bool back) {
  if (seen.world != 2 || seen.lost > 0) return std::nullopt;
  const auto calls = calls_of(seen.slices);
  std::map<std::string, size_t> times;  // of rank 0's calls
  if (const auto mine = calls.find(0); mine != calls.end())
    for (const TraceSlice* call : mine->second) ++times[call->name];
  if (times.empty()) return std::nullopt;
  size_t n = 0;
  for (const auto& [name, count] : times) n = std::max(n, count);
  double bytes[2] = {0, 0};  // by sender
  for (const TraceSlice& s : seen.slices) {
    if (s.bytes == 0 || s.rank > 1) continue;
    const auto mine = calls.find(s.rank);
    const Direction direction = direction_of(s, mine == calls.end() ? std::vector<const TraceSlice*>{} : mine->second);
    if (direction.back == back) bytes[direction.to_rank ? 1 - s.rank : s.rank] += s.bytes;
  }
  const int from = bytes[1] > bytes[0] ? 1 : 0;
  return Link{from, 1 - from, bytes[from] / static_cast<double>(n), "trace"};
}

/// Bytes of rows from or to other ranks, as carried by each rank's spans.
std::vector<double> carried_bytes(const Seen& seen) {
  std::vector<double> bytes(static_cast<size_t>(seen.world));
  for (const TraceSlice& s : seen.slices)
    if (s.rank >= 0 && s.rank < seen.world) bytes[static_cast<size_t>(s.rank)] += s.bytes;
  return bytes;
}

/// Number of rows that cross from a token's rank to the ranks of its experts: one per rank or one per route.
std::map<std::pair<int, int>, int64_t> link_rows(const Scenario& s, bool per_route) {
  std::map<std::pair<int, int>, int64_t> rows;
  for (int r = 0; r < s.world; ++r) {
    for (int64_t t = 0; t < s.tokens(r); ++t) {
      std::set<std::pair<int, int>> sent;  // rank, expert
      for (int k = 0; k < s.topk; ++k) {
        const int expert = s.id(r, t, k);
        if (s.valid(expert)) sent.insert({s.owner(expert), per_route ? expert : 0});
      }
      for (const auto& [d, expert] : sent)
        if (d != r) ++rows[{r, d}];
    }
  }
  return rows;
}

/// The link that carries the most payload from tokens to experts. Empty if the mode has no dispatch.
Link busiest_out(const BenchOptions& o, const Scenario& s) {
  Link heaviest;
  const Mode& mode = mode_named(o.mode);
  if (!mode.has_dispatch) return heaviest;
  const bool per_route = !mode.has_layouts && sending_named(o.sending) == Sending::per_route;
  for (const auto& [link, rows] : link_rows(s, per_route))
    if (const double bytes = static_cast<double>(rows) * static_cast<double>(sent_row_bytes(o)); bytes > heaviest.bytes)
      heaviest = {link.first, link.second, bytes};
  return heaviest;
}

/// The link that carries the most payload back to the tokens' ranks.
Link busiest_back(const BenchOptions& o, const Scenario& s) {
  const bool per_route = mode_named(o.mode).returns_per_route || order_named(o.order) == CombineOrder::per_route ||
                         (order_named(o.order) == CombineOrder::per_host && layout_named(o.layout) == Layout::expert_major);
  Link heaviest;
  for (const auto& [link, rows] : link_rows(s, per_route))
    if (const double bytes = static_cast<double>(rows) * static_cast<double>(returned_row_bytes(o)); bytes > heaviest.bytes)
      heaviest = {link.second, link.first, bytes};
  return heaviest;
}

Link busiest(const Seen& seen, const BenchOptions& o, const Scenario& s, bool back) {
  return busiest_in_trace(seen, back).value_or(back ? busiest_back(o, s) : busiest_out(o, s));
}

using Spans = std::vector<const TraceSlice*>;  // spans of one worker, by begin
std::map<int, std::map<int, Spans>> workers_of(const std::vector<TraceSlice>& slices) {
  std::map<int, std::map<int, Spans>> workers;  // rank -> track
  for (const TraceSlice& s : slices)
    if (s.track >= 0) workers[s.rank][s.track].push_back(&s);
  return workers;
}

/// A worker's first span that may extend into a call.
Spans::const_iterator first_in(const TraceSlice& call, const Spans& spans) {
  const auto first = std::lower_bound(spans.begin(), spans.end(), call.begin_us,
                                      [](const TraceSlice* s, double begin) { return s->begin_us < begin; });
  return first == spans.begin() ? first : first - 1;
}

/// False for warps that do not exist in the call's kernels.
bool takes_part(const TraceSlice& call, const Spans& spans) {
  const double call_end = call.begin_us + call.duration_us;
  for (auto s = first_in(call, spans); s != spans.end() && (*s)->begin_us < call_end; ++s)
    if ((*s)->begin_us + (*s)->duration_us > call.begin_us) return true;
  return false;
}

/// Share of the time between a rank's first and last records during which its workers recorded no activity. A call's time
/// counts only for the workers that participate in it.
struct Gaps {
  double window_us = 0, idle_share = 0;
};
Gaps gaps_of_rank(const std::map<int, Spans>& workers, const Spans& calls) {
  double begin = 1e300, end = 0, busy = 0, away = 0;
  for (const auto& [track, spans] : workers) {
    double reached = 0;
    for (const TraceSlice* s : spans) {
      const double s_end = s->begin_us + s->duration_us;
      begin = std::min(begin, s->begin_us);
      if (s_end <= reached) continue;
      busy += s_end - std::max(reached, s->begin_us);
      reached = s_end;
    }
    end = std::max(end, reached);
  }
  for (const TraceSlice* call : calls) {
    const double inside = std::min(call->begin_us + call->duration_us, end) - std::max(call->begin_us, begin);
    for (const auto& [track, spans] : workers)
      if (inside > 0 && !takes_part(*call, spans)) away += inside;
  }
  const double possible = (end - begin) * static_cast<double>(workers.size()) - away;
  return {end - begin, possible > 0 ? std::max(0.0, 1 - busy / possible) : 0};
}
std::map<int, Gaps> gaps_of(const std::vector<TraceSlice>& slices) {
  std::map<int, Spans> calls = calls_of(slices);
  std::map<int, Gaps> out;
  for (const auto& [rank, workers] : workers_of(slices)) out[rank] = gaps_of_rank(workers, calls[rank]);
  return out;
}

/// The longest period within a call during which a participating worker recorded no activity.
struct LongestGap {
  std::string call, after, before;
  int track = 0;
  double begin_us = 0, us = -1;  ///< from the begin of the call
};

/// Updates `longest` with the gaps of one call in the spans of one worker, which are sorted by their beginning.
void find_gap(const TraceSlice& call, const Spans& spans, LongestGap& longest) {
  if (!takes_part(call, spans)) return;
  const double call_end = call.begin_us + call.duration_us;
  double reached = call.begin_us;
  std::string after = "its begin";
  const auto offer = [&](double until, const std::string& before, int track) {
    if (until - reached > longest.us) longest = {call.name, after, before, track, reached - call.begin_us, until - reached};
  };
  for (auto at = first_in(call, spans); at != spans.end() && (*at)->begin_us < call_end; ++at) {
    const TraceSlice* const s = *at;
    const double end = s->begin_us + s->duration_us;
    if (end <= call.begin_us) continue;
    if (s->begin_us > reached) offer(s->begin_us, s->name, s->track);
    if (end < reached) continue;
    reached = end;
    after = s->name;
  }
  if (reached < call_end) offer(call_end, "its end", spans.front()->track);
}

/// Each rank's longest gap, among calls without lost spans.
std::map<int, LongestGap> longest_gaps(const std::vector<TraceSlice>& slices, bool some_forgotten) {
  const std::map<int, Spans> calls = calls_of(slices);
  std::map<int, std::map<int, Spans>> workers = workers_of(slices);
  std::map<int, LongestGap> out;
  for (const auto& [rank, all] : calls)
    for (const TraceSlice* call : all)
      for (const auto& [track, spans] : workers[rank])
        if (!some_forgotten || spans.front()->begin_us < call->begin_us) find_gap(*call, spans, out[rank]);
  return out;
}

/// For each rank, the total time in milliseconds that the workers of all other ranks waited for it.
std::vector<double> awaited_ms(const std::vector<TraceSlice>& slices, int world) {
  std::vector<double> ms(static_cast<size_t>(world));
  for (const TraceSlice& s : slices)
    if (s.category == "wait" && s.arg >= 0 && s.arg < world && s.arg != s.rank)
      ms[static_cast<size_t>(s.arg)] += s.duration_us * 1e-3;
  return ms;
}

/// Times of fused layers by rank.
void add_layers(json& out, const Seen& seen) {
  if (const std::vector<LayerTimes> layers = layer_times(seen.slices); !layers.empty())
    out["layers"] = layer_times_json(layers);
}
void print_layers(const Seen& seen) {
  if (const std::string text = layer_times_text(layer_times(seen.slices)); !text.empty()) fmt::print("\n{}", text);
}

std::string worker_name(const Seen& seen, int track) {
  return fmt::format("block {} warp {}", track / seen.num_warps, track % seen.num_warps);
}

json ranks_json(const Seen& seen) {
  const std::vector<double> awaited = awaited_ms(seen.slices, seen.world), carried = carried_bytes(seen);
  const std::map<int, LongestGap> longest = longest_gaps(seen.slices, seen.lost > 0);
  json ranks = json::array();
  for (const auto& [rank, g] : gaps_of(seen.slices)) {
    json entry = {{"rank", rank},
                  {"window_us", g.window_us},
                  {"idle_share", g.idle_share},
                  {"awaited_us", awaited[static_cast<size_t>(rank)] * 1e3},
                  {"carried_bytes", carried[static_cast<size_t>(rank)]}};
    if (const auto gap = longest.find(rank); gap != longest.end() && gap->second.us >= 0)
      entry["longest_gap"] = {{"us", gap->second.us},       {"worker", worker_name(seen, gap->second.track)},
                              {"call", gap->second.call},   {"begins_us", gap->second.begin_us},
                              {"after", gap->second.after}, {"before", gap->second.before}};
    ranks.push_back(std::move(entry));
  }
  return ranks;
}

json link_json(const Link& link) { return {{"from", link.from}, {"to", link.to}, {"bytes", link.bytes}, {"by", link.by}}; }

json phases_json(const Seen& seen) {
  json phases = json::array();
  for (const TracePhase& p : seen.phases)
    phases.push_back({{"rank", p.rank},
                      {"phase", p.name},
                      {"category", p.category},
                      {"count", p.count},
                      {"bytes", p.bytes},
                      {"total_us", p.total_ms * 1e3},
                      {"longest_us", p.max_ms * 1e3},
                      {"slowest_worker_us", p.slowest_ms * 1e3}});
  return phases;
}

double lower_quartile(std::vector<double> values) {
  const auto at = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 4);
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

void print_phases(const Seen& seen) {
  std::map<std::string, std::vector<const TracePhase*>> by_phase;
  std::vector<std::string> order;
  for (const TracePhase& p : seen.phases) {
    if (by_phase.find(p.name) == by_phase.end()) order.push_back(p.name);
    by_phase[p.name].push_back(&p);
  }
  Table table({"phase", "kind", "spans", "to or from others", "all workers", "longest span", "slowest worker", "on rank"});
  for (const std::string& name : order) {
    uint64_t spans = 0, bytes = 0;
    double total = 0, longest = 0;
    const TracePhase* slowest = by_phase[name].front();
    for (const TracePhase* p : by_phase[name]) {
      spans += p->count;
      bytes += p->bytes;
      total += p->total_ms;
      longest = std::max(longest, p->max_ms);
      if (p->slowest_ms > slowest->slowest_ms) slowest = p;
    }
    table.row({name, slowest->category, grouped(static_cast<int64_t>(spans)),
               bytes > 0 ? decimal_size(static_cast<double>(bytes)) : "", duration(total * 1e-3), duration(longest * 1e-3),
               duration(slowest->slowest_ms * 1e-3), std::to_string(slowest->rank)});
  }
  fmt::print("\n{}", table.text());
}

void print_ranks(const Seen& seen) {
  const std::vector<double> awaited = awaited_ms(seen.slices, seen.world), carried = carried_bytes(seen);
  const std::map<int, LongestGap> longest = longest_gaps(seen.slices, seen.lost > 0);
  Table ranks(
      {"rank", "first to last record", "not recorded", "to or from others", "others waited for it*", "longest gap", "where"});
  for (const auto& [rank, g] : gaps_of(seen.slices)) {
    const auto gap = longest.find(rank);
    const bool any = gap != longest.end() && gap->second.us >= 0;
    ranks.row({std::to_string(rank), duration(g.window_us * 1e-6), fmt::format("{:.0f} %", 100 * g.idle_share),
               decimal_size(carried[static_cast<size_t>(rank)]), duration(awaited[static_cast<size_t>(rank)] * 1e-3),
               any ? duration(gap->second.us * 1e-6) : "",
               any ? fmt::format("{}: {} to {}, {}", gap->second.call, gap->second.after, gap->second.before,
                                 worker_name(seen, gap->second.track))
                   : ""});
  }
  fmt::print("\n{}", ranks.text());
  const auto slowest = std::max_element(awaited.begin(), awaited.end());
  fmt::print("\n");
  if (seen.world > 1 && *slowest > 0)
    fmt::print("  Most awaited: rank {}.\n  * the waits of all workers of all other ranks for it, summed\n",
               static_cast<int>(slowest - awaited.begin()));
}

void print_link(const char* what, const Link& link) {
  if (link.bytes > 0)
    fmt::print("  Busiest link {}: rank {} to {}, {} per call, according to the {}.\n", what, link.from, link.to,
               decimal_size(link.bytes), link.by);
}

void print_clocks(const Seen& seen) {
  if (seen.clock_error_ns > 0)
    fmt::print("  Clocks of GPUs and host agree within {}.\n", duration(static_cast<double>(seen.clock_error_ns) * 1e-9));
}

/// The value of --events that would keep all spans if all workers recorded the same number: a power of two, at most the flag's
/// maximum.
int64_t enough_events(const Trace& trace, int world, int64_t given) {
  const int64_t workers = int64_t{trace.options().num_blocks} * trace.options().num_warps * world;
  const int64_t needed = given + (static_cast<int64_t>(trace.lost()) + workers - 1) / std::max<int64_t>(workers, 1);
  int64_t events = 16;
  while (events < needed && events < kMaxTraceEvents) events *= 2;
  return events;
}

}  // namespace

double TraceCost::share() const { return plain_us.empty() ? 0 : lower_quartile(traced_us) / lower_quartile(plain_us) - 1; }

json summary_json(const TraceVerbOptions& options, const Scenario& s, const Trace& trace, const TraceCost& cost) {
  const Seen seen = seen_of(trace);
  json out = {
      {"schema", "switchyard.trace/2"},
      {"commit", source_commit()},
      {"date", measure::utc_now()},
      {"machine", to_json(measure::this_machine())},
      {"mode", options.run.mode},
      {"backend", options.run.backend},
      {"calls", options.calls},
      {"config",
       {{"ranks", s.world},
        {"tokens", options.run.tokens},
        {"hidden", options.run.hidden},
        {"experts", s.experts},
        {"topk", s.topk},
        {"dtype", options.run.dtype},
        {"quantize", options.run.quantize},
        {"order", options.run.order},
        {"sms", options.run.sms},
        {"combine_sms", options.run.combine_sms},
        {"layout", options.run.layout},
        {"staging", options.run.staging},
        {"pieces", options.run.pieces},
        {"workers", trace.options().num_blocks * trace.options().num_warps},
        {"processes", options.run.processes},
        {"seed", options.run.seed},
        {"routing", options.run.routing},
        {"sending", options.run.sending}}},
      {"lost_events", trace.lost()},
      {"clock_error_us", static_cast<double>(trace.clock_error_ns()) * 1e-3},
      {"phases", phases_json(seen)},
      {"ranks", ranks_json(seen)},
      {"busiest_link",
       {{"out", link_json(busiest(seen, options.run, s, false))}, {"back", link_json(busiest(seen, options.run, s, true))}}},
      {"written_to", options.out}};
  if (mode_named(options.run.mode).has_experts) {
    out["config"]["form"] = options.run.form;
    out["config"]["intermediate"] = options.run.intermediate;
  }
  add_layers(out, seen);
  if (!options.gpus.empty()) out["gpus"] = options.gpus;
  if (!cost.plain_us.empty())
    out["recording"] = {{"calls_per_round", options.calls},
                        {"plain_us", cost.plain_us},
                        {"traced_us", cost.traced_us},
                        {"cost_share", cost.share()}};
  return out;
}

void print_summary(const TraceVerbOptions& options, const Scenario& s, const Trace& trace, const TraceCost& cost) {
  const Seen seen = seen_of(trace);
  print_phases(seen);
  print_ranks(seen);
  print_layers(seen);
  print_link("out", busiest(seen, options.run, s, false));
  print_link("back", busiest(seen, options.run, s, true));
  print_clocks(seen);
  if (!cost.plain_us.empty())
    fmt::print("  Recording costs {:+.1f} %: {} against {} per call, lower quartiles of {}.\n", 100 * cost.share(),
               duration(lower_quartile(cost.traced_us) * 1e-6), duration(lower_quartile(cost.plain_us) * 1e-6),
               counted(static_cast<int64_t>(cost.plain_us.size()), "round"));
  if (trace.lost() > 0)
    fmt::print("  {}: the oldest {} records were lost, and are missing from the figures above; --events {} would keep them\n",
               yellow("note"), grouped(static_cast<int64_t>(trace.lost())), enough_events(trace, s.world, options.events));
  fmt::print("  written to {} (open it at https://ui.perfetto.dev)\n", options.out);
}

json file_summary_json(const std::string& path, TraceFile file) {
  const Seen seen = seen_of(std::move(file));
  json links = json::object();
  for (const bool back : {false, true})
    if (const auto link = busiest_in_trace(seen, back)) links[back ? "back" : "out"] = link_json(*link);
  json out = {{"schema", "switchyard.trace/2"},
              {"read_from", path},
              {"config", {{"ranks", seen.world}}},
              {"lost_events", seen.lost},
              {"clock_error_us", static_cast<double>(seen.clock_error_ns) * 1e-3},
              {"phases", phases_json(seen)},
              {"ranks", ranks_json(seen)},
              {"busiest_link", links}};
  add_layers(out, seen);
  return out;
}

void print_file_summary(const std::string& path, TraceFile file) {
  const Seen seen = seen_of(std::move(file));
  fmt::print("{}\n  {}, {}\n", bold("switchyard trace --in"), path, counted(seen.world, "rank"));
  print_phases(seen);
  print_ranks(seen);
  print_layers(seen);
  for (const bool back : {false, true})
    if (const auto link = busiest_in_trace(seen, back)) print_link(back ? "back" : "out", *link);
  print_clocks(seen);
  if (seen.lost > 0)
    fmt::print("  {}: the oldest {} records were lost, and are missing from the figures above\n", yellow("note"),
               grouped(static_cast<int64_t>(seen.lost)));
}

}  // namespace switchyard::tool
