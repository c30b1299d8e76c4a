// SPDX-License-Identifier: Apache-2.0
#include "layer/layer_times.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "cli/style.hpp"

namespace switchyard::tool {
namespace {

struct Interval {
  double begin = 0, end = 0;
  double length() const { return std::max(0.0, end - begin); }
};

/// One call, and the parts of the rank's spans that lie within it.
struct Call {
  Interval time;
  std::vector<Interval> ups, downs, sums, waits, communication;
};

/// The kind of a worker's span, or null if the span has none.
std::vector<Interval> Call::*kind_of(const TraceSlice& s) {
  if (s.name == "expert_up") return &Call::ups;
  if (s.name == "expert_down") return &Call::downs;
  if (s.name == "sum_returned") return &Call::sums;
  if (s.name == "pull_rows" || s.name == "return_rows") return &Call::communication;
  return s.category == "wait" ? &Call::waits : nullptr;
}

double total(const std::vector<Interval>& all) {
  double sum = 0;
  for (const Interval& one : all) sum += one.length();
  return sum;
}

/// Merges intervals: the result is in ascending order, and no two intervals in it touch.
std::vector<Interval> merged(std::vector<Interval> all) {
  std::sort(all.begin(), all.end(), [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  std::vector<Interval> out;
  for (const Interval& one : all) {
    if (!out.empty() && one.begin <= out.back().end)
      out.back().end = std::max(out.back().end, one.end);
    else
      out.push_back(one);
  }
  return out;
}

/// Length of the part of `one` that lies in `within`, a result of merged().
double inside(const Interval& one, const std::vector<Interval>& within) {
  double sum = 0;
  auto at =
      std::lower_bound(within.begin(), within.end(), one.begin, [](const Interval& w, double begin) { return w.end < begin; });
  for (; at != within.end() && at->begin < one.end; ++at)
    sum += Interval{std::max(at->begin, one.begin), std::min(at->end, one.end)}.length();
  return sum;
}

/// The part of a span that lies within a call; empty if there is none.
Interval part_of(const TraceSlice& s, const Call& call) {
  return {std::max(s.begin_us, call.time.begin), std::min(s.begin_us + s.duration_us, call.time.end)};
}

bool computes(const TraceSlice& s) {
  return s.track >= 0 && (s.name == "expert_up" || s.name == "expert_down" || s.name == "sum_returned");
}

using Spans = std::vector<const TraceSlice*>;

/// A rank's calls, ordered by their beginning.
std::vector<Call> calls_of(const Spans& spans) {
  std::vector<Call> calls;
  for (const TraceSlice* s : spans)
    if (s->track < 0 && s->name == "layer") calls.push_back({{s->begin_us, s->begin_us + s->duration_us}, {}, {}, {}, {}, {}});
  std::sort(calls.begin(), calls.end(), [](const Call& a, const Call& b) { return a.time.begin < b.time.begin; });
  return calls;
}

/// Calls each(call, part) for every part of a span that lies within a call.
template <class Each>
void for_each_part(const TraceSlice& s, std::vector<Call>& calls, Each each) {
  auto call =
      std::lower_bound(calls.begin(), calls.end(), s.begin_us, [](const Call& c, double begin) { return c.time.end < begin; });
  for (; call != calls.end() && call->time.begin < s.begin_us + s.duration_us; ++call)
    if (const Interval part = part_of(s, *call); part.length() > 0) each(*call, part);
}

/// Adds the parts of spans to their calls and returns the workers that multiply or sum. Only the waits of these workers are
/// added.
std::set<int> place(const Spans& spans, std::vector<Call>& calls) {
  std::set<int> workers;
  for (const TraceSlice* s : spans)
    if (computes(*s)) for_each_part(*s, calls, [&](Call&, const Interval&) { workers.insert(s->track); });
  for (const TraceSlice* s : spans) {
    const auto kind = s->track < 0 ? nullptr : kind_of(*s);
    if (!kind || (kind == &Call::waits && workers.count(s->track) == 0)) continue;
    for_each_part(*s, calls, [&](Call& call, const Interval& part) { (call.*kind).push_back(part); });
  }
  return workers;
}

/// Adds up the sums of one call.
void add(LayerTimes& t, const Call& call) {
  t.call_us += call.time.length();
  t.up_share += total(call.ups);
  t.down_share += total(call.downs);
  t.sum_share += total(call.sums);
  t.wait_share += total(call.waits);
  t.communication_us += total(call.communication);
  std::vector<Interval> products = call.ups;
  products.insert(products.end(), call.downs.begin(), call.downs.end());
  products = merged(std::move(products));
  for (const Interval& one : call.communication) t.hidden_us += inside(one, products);
}

/// Computes the mean times before and after the products.
void add_edges(LayerTimes& t, const std::vector<Call>& calls) {
  double before = 0, after = 0, n = 0;
  for (const Call& call : calls) {
    if (call.ups.empty() || call.downs.empty()) continue;
    const auto by_begin = [](const Interval& a, const Interval& b) { return a.begin < b.begin; };
    const auto by_end = [](const Interval& a, const Interval& b) { return a.end < b.end; };
    before += std::min_element(call.ups.begin(), call.ups.end(), by_begin)->begin - call.time.begin;
    after += call.time.end - std::max_element(call.downs.begin(), call.downs.end(), by_end)->end;
    ++n;
  }
  if (n == 0) return;
  t.before_up_us = before / n;
  t.after_down_us = after / n;
}

LayerTimes times_of(int rank, const Spans& spans, size_t left_out) {
  std::vector<Call> calls = calls_of(spans);
  calls.erase(calls.begin(), calls.begin() + static_cast<std::ptrdiff_t>(std::min(left_out, calls.size())));
  LayerTimes t;
  t.rank = rank;
  t.calls = static_cast<int64_t>(calls.size());
  if (calls.empty()) return t;
  t.workers = static_cast<int>(place(spans, calls).size());
  for (const Call& call : calls) add(t, call);
  add_edges(t, calls);
  const double possible = t.call_us * t.workers, n = static_cast<double>(t.calls);
  for (double LayerTimes::*share :
       {&LayerTimes::up_share, &LayerTimes::down_share, &LayerTimes::sum_share, &LayerTimes::wait_share})
    t.*share = possible > 0 ? t.*share / possible : 0;
  for (double LayerTimes::*us : {&LayerTimes::call_us, &LayerTimes::communication_us, &LayerTimes::hidden_us}) t.*us /= n;
  return t;
}

std::string percent(double share) { return fmt::format("{:.1f} %", 100 * share); }

}  // namespace

std::vector<LayerTimes> layer_times(const std::vector<TraceSlice>& slices, size_t left_out) {
  std::map<int, Spans> ranks;
  for (const TraceSlice& s : slices) ranks[s.rank].push_back(&s);
  std::vector<LayerTimes> out;
  for (const auto& [rank, spans] : ranks)
    if (const LayerTimes t = times_of(rank, spans, left_out); t.calls > 0) out.push_back(t);
  return out;
}

TraceOptions layer_trace_options(Backend backend, int64_t sms, int64_t blocks, int64_t warps) {
  constexpr size_t kEvents = 1024;
  TraceOptions o;
  o.num_blocks = static_cast<int>(backend == Backend::cuda ? sms : blocks);
  o.num_warps = backend == Backend::cuda ? kMaxDeviceWarps : static_cast<int>(warps);
  o.events_per_track = kEvents;
  return o;
}

std::vector<TraceSlice> recorded(Group& group, const RankDevice& device, Trace& trace, const std::function<void()>& run) {
  device.wait();
  group.barrier();
  group.set_trace(&trace);
  group.barrier();
  run();
  device.wait();
  group.barrier();
  group.set_trace(nullptr);
  group.barrier();
  return trace.slices();
}

std::vector<LayerTimes> record_layers(Group& group, const RankDevice& device, const TraceOptions& options, int calls,
                                      const std::function<void()>& call) {
  Trace trace(group.size(), options);
  const std::vector<TraceSlice> slices = recorded(group, device, trace, [&] {
    for (int i = 0; i < calls; ++i) call();
  });
  return trace.lost() > 0 ? std::vector<LayerTimes>{} : layer_times(slices, 1);
}

nlohmann::json layer_times_json(const std::vector<LayerTimes>& times) {
  nlohmann::json out = nlohmann::json::array();
  for (const LayerTimes& t : times)
    out.push_back({{"rank", t.rank},
                   {"calls", t.calls},
                   {"call_us", t.call_us},
                   {"before_up_us", t.before_up_us},
                   {"after_down_us", t.after_down_us},
                   {"workers", t.workers},
                   {"up_share", t.up_share},
                   {"down_share", t.down_share},
                   {"sum_share", t.sum_share},
                   {"wait_share", t.wait_share},
                   {"communication_us", t.communication_us},
                   {"hidden_share", t.hidden_share()}});
  return out;
}

LayerTimes layer_times_from(const nlohmann::json& encoded) {
  LayerTimes t;
  encoded.at("rank").get_to(t.rank);
  encoded.at("calls").get_to(t.calls);
  encoded.at("call_us").get_to(t.call_us);
  encoded.at("before_up_us").get_to(t.before_up_us);
  encoded.at("after_down_us").get_to(t.after_down_us);
  encoded.at("workers").get_to(t.workers);
  encoded.at("up_share").get_to(t.up_share);
  encoded.at("down_share").get_to(t.down_share);
  encoded.at("sum_share").get_to(t.sum_share);
  encoded.at("wait_share").get_to(t.wait_share);
  encoded.at("communication_us").get_to(t.communication_us);
  t.hidden_us = encoded.at("hidden_share").get<double>() * t.communication_us;
  return t;
}

std::string layer_times_text(const std::vector<LayerTimes>& times) {
  if (times.empty()) return {};
  Table table({"rank", "layer", "before up", "up", "down", "sums", "waits", "after down", "communication*", "hidden"});
  for (const LayerTimes& t : times)
    table.row({std::to_string(t.rank), duration(t.call_us * 1e-6), duration(t.before_up_us * 1e-6), percent(t.up_share),
               percent(t.down_share), percent(t.sum_share), percent(t.wait_share), duration(t.after_down_us * 1e-6),
               duration(t.communication_us * 1e-6), percent(t.hidden_share())});
  return table.text() +
         "  up, down, sums, waits: shares of the layer's time, of the workers that multiply and sum.\n"
         "  * pull_rows and return_rows, summed over all workers; hidden: the part during which some worker of the rank "
         "computes a product\n";
}

}  // namespace switchyard::tool
