// SPDX-License-Identifier: Apache-2.0
// Chrome's JSON trace format, read by https://ui.perfetto.dev and chrome://tracing.
#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "switchyard/status.hpp"
#include "switchyard/trace.hpp"
#include "trace/trace_impl.hpp"

namespace switchyard {
namespace {

using detail::Event;
using detail::PlacedRecord;
using detail::RecordKind;

std::string json_quoted(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto u = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (u < 0x20) {
      char buffer[8];
      std::snprintf(buffer, sizeof buffer, "\\u%04x", u);
      out += buffer;
    } else {
      out += c;
    }
  }
  return out += '"';
}

/// Formats microseconds with nanosecond digits; exact for traces of up to 104 days. Perfetto multiplies them by 1000 as doubles
/// and truncates, which may lose a nanosecond: a span could then begin inside the previous one and be dropped. Adding a tenth
/// of a nanosecond prevents that.
std::string micros(uint64_t ns) {
  char buffer[40];
  const bool rounds_down = static_cast<uint64_t>(static_cast<double>(ns) / 1000.0 * 1000.0) < ns;
  std::snprintf(buffer, sizeof buffer, "%" PRIu64 ".%03" PRIu64 "%s", ns / 1000, ns % 1000, rounds_down ? "1" : "");
  return buffer;
}

/// Writes comma-separated event objects.
class Writer {
 public:
  void event(const std::string& fields) {
    text_ += first_ ? "\n{" : ",\n{";
    text_ += fields;
    text_ += '}';
    first_ = false;
  }
  void metadata(const char* what, int pid, int tid, const std::string& args) {
    event(std::string("\"ph\":\"M\",\"name\":\"") + what + "\",\"pid\":" + std::to_string(pid) +
          ",\"tid\":" + std::to_string(tid) + ",\"args\":{" + args + "}");
  }
  std::string take() { return std::move(text_); }

 private:
  std::string text_;
  bool first_ = true;
};

std::string place(int rank, int track) { return "\"pid\":" + std::to_string(rank) + ",\"tid\":" + std::to_string(track + 1); }

void write_names(Writer& out, const detail::Tracer& tracer) {
  const int rank = tracer.rank();
  out.metadata("process_name", rank, 0, "\"name\":\"rank " + std::to_string(rank) + "\"");
  out.metadata("process_sort_index", rank, 0, "\"sort_index\":" + std::to_string(rank));
  for (int track = detail::kHostTrack; track < tracer.workers(); ++track) {
    const std::string name = track == detail::kHostTrack ? "calls"
                                                         : "block " + std::to_string(track / tracer.num_warps()) + " warp " +
                                                               std::to_string(track % tracer.num_warps());
    out.metadata("thread_name", rank, track + 1, "\"name\":" + json_quoted(name));
    out.metadata("thread_sort_index", rank, track + 1, "\"sort_index\":" + std::to_string(track + 1));
  }
}

/// Returns false for user events, which have no row in the event table.
bool is_library_event(const PlacedRecord& p) { return p.record.event < static_cast<uint16_t>(Event::count_of_events); }

/// The kinds of spans that can end a wait of this kind; the last such span ended it.
std::initializer_list<Event> causes_of(Event wait) {
  static constexpr auto kEntered = {Event::dispatch, Event::combine, Event::all_to_all},
                        kCounts = {Event::exchange_counts, Event::plan},
                        kPlacement = {Event::dispatch, Event::exchange_counts, Event::combine},
                        kOutputs = {Event::combine, Event::reduce_local, Event::return_rows}, kRows = {Event::send_rows},
                        kPulled = {Event::pull_reduce, Event::sum_returned}, kExpertCount = {Event::send_counts},
                        kReturned = {Event::return_rows}, kLedger = {Event::ledger_combine, Event::return_segments},
                        kRing = {Event::ring_send, Event::ring_receive};
  static const std::pair<Event, std::initializer_list<Event>> all[] = {{Event::wait_entered, kEntered},
                                                                       {Event::wait_ledger_rows, kLedger},
                                                                       {Event::wait_ring, kRing},
                                                                       {Event::wait_counts, kCounts},
                                                                       {Event::wait_placement, kPlacement},
                                                                       {Event::wait_outputs, kOutputs},
                                                                       {Event::wait_rows, kRows},
                                                                       {Event::wait_message, kRows},
                                                                       {Event::wait_pulled, kPulled},
                                                                       {Event::wait_returned, kReturned},
                                                                       {Event::wait_expert_count, kExpertCount}};
  for (const auto& [event, causes] : all)
    if (event == wait) return causes;
  return {};
}

/// True if a span of this kind raises its signal early and continues; its begin then counts instead of its end.
bool signals_at_begin(Event cause) {
  return cause == Event::exchange_counts || std::string_view(detail::event_info(cause).category) == "call";
}

uint64_t signal_ns(const PlacedRecord& p) {
  return signals_at_begin(static_cast<Event>(p.record.event)) ? p.record.begin_ns : p.record.end_ns;
}

using Causes = std::map<std::pair<int, uint16_t>, std::vector<const PlacedRecord*>>;  // (rank, event) -> spans by signal time

/// Returns the last span that can have ended a wait of this kind for `rank`, among those that signaled up to `latest`, or null.
/// O(log n).
const PlacedRecord* cause_of(Event wait, int rank, uint64_t latest, const Causes& causes) {
  const PlacedRecord* best = nullptr;
  for (const Event cause : causes_of(wait)) {
    const auto spans = causes.find({rank, static_cast<uint16_t>(cause)});
    if (spans == causes.end()) continue;
    const auto later = std::upper_bound(spans->second.begin(), spans->second.end(), latest,
                                        [](uint64_t ns, const auto* p) { return ns < signal_ns(*p); });
    if (later == spans->second.begin()) continue;
    if (best == nullptr || signal_ns(**(later - 1)) > signal_ns(*best)) best = *(later - 1);
  }
  return best;
}

/// Each end of an arrow belongs to the innermost slice open at its time; the end of a slice is exclusive. An importer may add
/// rounded start times and durations, so arrow ends stay this far from the end of a slice.
constexpr uint64_t kInsideNs = 3;

/// Returns a time when `span` is open and no span inside it is: the last such time up to `wanted` or, if there is none, the
/// first one up to `latest`. The spans inside it follow it in the array, up to `end`. O(spans inside).
std::optional<uint64_t> time_inside(const PlacedRecord* span, const PlacedRecord* end, uint64_t wanted, uint64_t latest) {
  std::optional<uint64_t> best;
  uint64_t from = span->record.begin_ns;
  const auto offer = [&](uint64_t until) {
    if (until < from + kInsideNs) return;
    if (from <= wanted)
      best = std::min(wanted, until - kInsideNs);
    else if (!best && from <= latest)
      best = from;
  };
  for (const PlacedRecord* p = span + 1; p != end && p->rank == span->rank && p->track == span->track; ++p) {
    if (p->record.begin_ns >= span->record.end_ns) break;
    if (p->record.kind != RecordKind::span) continue;
    offer(p->record.begin_ns);
    from = std::max(from, p->record.end_ns + kInsideNs);
  }
  offer(span->record.end_ns);
  return best;
}

/// An arrow into a wait ends at a marker, a 1 ns slice just before the end of the wait: some importers take the slice that
/// begins first as the source, and a wait often begins before the span that ends it.
void write_arrow(Writer& out, int id, const PlacedRecord& from, uint64_t from_ns, const PlacedRecord& wait,
                 uint64_t marker_ns) {
  const std::string common = "\"cat\":\"flow\",\"name\":\"signal\",";
  const std::string head = place(wait.rank, wait.track) + ",\"ts\":" + micros(marker_ns);
  const std::string number = ",\"id\":" + std::to_string(id);
  out.event("\"ph\":\"X\",\"dur\":0.001," + common + head + ",\"args\":{\"rank\":" + std::to_string(from.rank) + "}");
  out.event("\"ph\":\"s\"," + common + place(from.rank, from.track) + ",\"ts\":" + micros(from_ns) + number);
  out.event("\"ph\":\"f\",\"bp\":\"e\"," + common + head + number);
}

/// Draws an arrow into every wait for one known rank, from that rank's last span that could have ended the wait. Writes no
/// arrow if either span is shorter than kInsideNs. O(n log n).
void write_flows(Writer& out, const std::vector<PlacedRecord>& all, uint64_t origin) {
  Causes causes;
  for (const PlacedRecord& p : all) {
    if (p.record.kind == RecordKind::span && is_library_event(p)) causes[{p.rank, p.record.event}].push_back(&p);
  }
  for (auto& [key, spans] : causes) {
    std::sort(spans.begin(), spans.end(), [](const auto* a, const auto* b) { return signal_ns(*a) < signal_ns(*b); });
  }
  int id = 0;
  for (const PlacedRecord& wait : all) {
    if (wait.record.kind != RecordKind::span || wait.record.arg < 0 || wait.record.arg == wait.rank) continue;
    if (!is_library_event(wait) || wait.record.end_ns < wait.record.begin_ns + kInsideNs) continue;
    const uint64_t marker = wait.record.end_ns - kInsideNs;
    const uint64_t latest = marker > 1 ? marker - 2 : 0;  // begins before the marker, also when rounded
    const PlacedRecord* const cause =
        cause_of(static_cast<Event>(wait.record.event), static_cast<int>(wait.record.arg), latest, causes);
    if (cause == nullptr) continue;
    const std::optional<uint64_t> from = time_inside(cause, all.data() + all.size(), signal_ns(*cause), latest);
    if (from) write_arrow(out, ++id, *cause, *from - origin, wait, marker - origin);
  }
}

/// One counter per rank: bytes of rows from or for other ranks in spans that have begun but not ended. O(n log n).
void write_bytes_in_flight(Writer& out, const std::vector<PlacedRecord>& all, uint64_t origin) {
  std::map<std::pair<int, uint64_t>, int64_t> changes;  // (rank, time)
  for (const PlacedRecord& p : all) {
    if (p.record.kind != RecordKind::span || p.record.bytes == 0) continue;
    changes[{p.rank, p.record.begin_ns}] += p.record.bytes;
    changes[{p.rank, p.record.end_ns}] -= p.record.bytes;
  }
  std::map<int, int64_t> in_flight;
  for (const auto& [at, change] : changes) {
    const int64_t bytes = in_flight[at.first] += change;
    if (change != 0)
      out.event("\"ph\":\"C\",\"name\":\"bytes in flight\",\"pid\":" + std::to_string(at.first) +
                ",\"ts\":" + micros(at.second - origin) + ",\"args\":{\"bytes\":" + std::to_string(bytes) + "}");
  }
}

}  // namespace

std::string Trace::chrome_json(bool flows) const {
  const std::vector<PlacedRecord> all = detail::placed_records(impl_->tracers, impl_->anchors.clock());
  const uint64_t origin = detail::origin_ns(all);
  Writer out;
  for (const detail::Tracer& tracer : impl_->tracers) write_names(out, tracer);
  for (const PlacedRecord& p : all) {
    const std::string_view name = impl_->event_name(p.record.event);
    const std::string_view unit = impl_->event_unit(p.record.event);
    const std::string bytes = p.record.bytes > 0 ? ",\"bytes\":" + std::to_string(p.record.bytes) : "";
    const std::string args =
        ",\"args\":{" + json_quoted(unit.empty() ? "value" : unit) + ":" + std::to_string(p.record.arg) + bytes + "}";
    const std::string common = "\"name\":" + json_quoted(name) +
                               ",\"cat\":" + json_quoted(impl_->event_category(p.record.event)) + "," + place(p.rank, p.track) +
                               ",\"ts\":" + micros(p.record.begin_ns - origin) + args;
    switch (p.record.kind) {
      case RecordKind::span:
        out.event("\"ph\":\"X\",\"dur\":" + micros(p.record.end_ns - p.record.begin_ns) + "," + common);
        break;
      case RecordKind::instant: out.event("\"ph\":\"i\",\"s\":\"t\"," + common); break;
    }
  }
  write_bytes_in_flight(out, all, origin);
  if (flows) write_flows(out, all, origin);
  return "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"producer\":\"switchyard\",\"world\":" + std::to_string(world()) +
         ",\"lost_events\":" + std::to_string(lost()) + ",\"clock_error_ns\":" + std::to_string(clock_error_ns()) +
         "},\"traceEvents\":[" + out.take() + "\n]}\n";
}

void Trace::write_chrome_json(const std::string& path, bool flows) const {
  const std::string text = chrome_json(flows);
  std::FILE* file = std::fopen(path.c_str(), "wb");
  bool ok = file != nullptr;
  int error = errno;
  if (ok) {
    ok = std::fwrite(text.data(), 1, text.size(), file) == text.size();
    error = errno;
    if (std::fclose(file) != 0 && ok) {
      ok = false;
      error = errno;
    }
  }
  if (!ok) throw Error(ErrorCode::io, "Trace: cannot write " + path + ": " + std::strerror(error));
}

}  // namespace switchyard
