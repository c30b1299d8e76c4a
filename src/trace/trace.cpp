// SPDX-License-Identifier: Apache-2.0
#include "switchyard/trace.hpp"

#include <algorithm>
#include <bit>
#include <fstream>
#include <limits>
#include <map>
#include <mutex>

#include "switchyard/status.hpp"
#include "switchyard/types.hpp"
#include "trace/trace_impl.hpp"

namespace switchyard {
namespace detail {
namespace {

constexpr EventInfo kEvents[] = {
#define SWITCHYARD_TRACE_EVENT(name, category, unit) {#name, category, unit},
#include "trace/events.def"
#undef SWITCHYARD_TRACE_EVENT
};
constexpr auto kNumEvents = static_cast<uint16_t>(Event::count_of_events);
static_assert(std::size(kEvents) == kNumEvents);

}  // namespace

const EventInfo& event_info(Event event) { return kEvents[static_cast<size_t>(event)]; }

namespace {

/// Reads both clocks eight times and returns the pair with the smallest gap.
std::pair<uint64_t, uint64_t> ticks_and_ns() {
  uint64_t best_round_trip = std::numeric_limits<uint64_t>::max();
  std::pair<uint64_t, uint64_t> best;
  for (int i = 0; i < 8; ++i) {
    const uint64_t before = Tracer::ticks(), ns = Tracer::now_ns(), after = Tracer::ticks();
    if (after - before >= best_round_trip) continue;
    best_round_trip = after - before;
    best = {before + best_round_trip / 2, ns};
  }
  return best;
}

constexpr uint64_t kAnchorIntervalNs = 1'000'000;

/// True if the kernel uses the counter for timekeeping. The kernel first checks the counter against other clocks, and stops
/// using it if it differs between cores.
bool kernel_counts_ticks() {
#if defined(__x86_64__)
  std::ifstream in("/sys/devices/system/clocksource/clocksource0/current_clocksource");
  std::string source;
  return in >> source && source == "tsc";
#else
  return false;
#endif
}

}  // namespace

void ClockAnchors::add() {
  const std::lock_guard lock(mutex_);
  const auto [ticks, ns] = ticks_and_ns();
  anchors_.add_latest(ticks, ns, kAnchorIntervalNs);
}

TickClock ClockAnchors::clock() const {
  TickClock clock;
  {
    const std::lock_guard lock(mutex_);
    clock = anchors_;
  }
  const auto [ticks, ns] = ticks_and_ns();
  clock.add_latest(ticks, ns, kAnchorIntervalNs);
  clock.sort();
  return clock;
}

Tracer::Tracer(int rank, int num_blocks, int num_warps, size_t capacity, ClockAnchors* anchors)
    : rank_(rank),
      num_blocks_(num_blocks),
      num_warps_(num_warps),
      anchors_(anchors),
      tracks_(static_cast<size_t>(num_blocks) * static_cast<size_t>(num_warps) + 1) {
  static std::once_flag once;
  std::call_once(once, [] { counts_ticks = kernel_counts_ticks(); });
  for (Track& track : tracks_) {
    track.records = std::make_unique<TraceRecord[]>(capacity);
    track.capacity = capacity;
  }
}

void Tracer::clear() noexcept {
  for (Track& track : tracks_) track.size = track.next = track.lost = 0;
}

TraceRecord timed(TraceRecord record, const TickClock& clock) {
  if (!record.in_ticks) return record;
  record.begin_ns = clock.ns(record.begin_ns);
  record.end_ns = clock.ns(record.end_ns);
  record.in_ticks = 0;
  return record;
}

std::vector<PlacedRecord> placed_records(const std::vector<Tracer>& tracers, const TickClock& clock) {
  std::vector<PlacedRecord> all;
  for (const Tracer& tracer : tracers) {
    for (int track = kHostTrack; track < tracer.workers(); ++track) {
      const auto first = static_cast<std::ptrdiff_t>(all.size());
      for (size_t i = 0; i < tracer.size(track); ++i)
        all.push_back({tracer.rank(), track, timed(tracer.record(track, i), clock)});
      std::stable_sort(all.begin() + first, all.end(), [](const PlacedRecord& a, const PlacedRecord& b) {
        if (a.record.begin_ns != b.record.begin_ns) return a.record.begin_ns < b.record.begin_ns;
        return a.record.end_ns > b.record.end_ns;
      });
    }
  }
  return all;
}

uint64_t origin_ns(const std::vector<PlacedRecord>& records) {
  uint64_t origin = std::numeric_limits<uint64_t>::max();
  for (const PlacedRecord& p : records) origin = std::min(origin, p.record.begin_ns);
  return records.empty() ? 0 : origin;
}

}  // namespace detail

namespace {

using detail::Event;
using detail::kNumEvents;
using detail::Tracer;

void require(bool ok, const char* name, int64_t given, const char* allowed) {
  if (ok) return;
  throw Error(ErrorCode::invalid_argument,
              std::string("Trace: ") + name + " is " + std::to_string(given) + "; allowed: " + allowed);
}

double to_ms(uint64_t ns) { return static_cast<double>(ns) / 1e6; }

}  // namespace

std::string_view Trace::Impl::event_name(uint16_t event) const {
  if (event < kNumEvents) return detail::event_info(static_cast<Event>(event)).name;
  const size_t i = size_t{event} - kNumEvents;
  return i < user_events.size() ? std::string_view(user_events[i].first) : "?";
}

std::string_view Trace::Impl::event_category(uint16_t event) const {
  return event < kNumEvents ? detail::event_info(static_cast<Event>(event)).category : "user";
}

std::string_view Trace::Impl::event_unit(uint16_t event) const {
  if (event < kNumEvents) return detail::event_info(static_cast<Event>(event)).unit;
  const size_t i = size_t{event} - kNumEvents;
  return i < user_events.size() ? std::string_view(user_events[i].second) : "";
}

Trace::Trace(int world, const TraceOptions& options) {
  require(world >= 1 && world <= kMaxRanks, "world", world, "1 to 64");
  require(options.num_blocks >= 1 && options.num_blocks <= 1024, "num_blocks", options.num_blocks, "1 to 1024");
  require(options.num_warps >= 1 && options.num_warps <= 1024, "num_warps", options.num_warps, "1 to 1024");
  require(options.events_per_track >= 1 && options.events_per_track <= (size_t{1} << 26), "events_per_track",
          static_cast<int64_t>(options.events_per_track), "1 to 67108864");
  impl_ = std::make_unique<Impl>();
  impl_->options = options;
  impl_->tracers.reserve(static_cast<size_t>(world));
  for (int r = 0; r < world; ++r)
    impl_->tracers.emplace_back(r, options.num_blocks, options.num_warps, std::bit_ceil(options.events_per_track),
                                &impl_->anchors);
  impl_->anchors.add();
}

Trace::Trace(Trace&&) noexcept = default;
Trace& Trace::operator=(Trace&&) noexcept = default;
Trace::~Trace() = default;

int Trace::world() const { return static_cast<int>(impl_->tracers.size()); }
const TraceOptions& Trace::options() const { return impl_->options; }
Tracer* Trace::tracer(int rank) const noexcept {
  Impl* impl = impl_.pointer().get();
  const auto at = static_cast<size_t>(rank);
  return impl && rank >= 0 && at < impl->tracers.size() ? &impl->tracers[at] : nullptr;
}

uint16_t Trace::event(std::string_view name, std::string_view unit) {
  for (size_t i = 0; i < kNumEvents + impl_->user_events.size(); ++i) {
    const auto e = static_cast<uint16_t>(i);
    if (impl_->event_name(e) == name) return e;
  }
  require(impl_->user_events.size() < 4096, "number of own events", 4097, "up to 4096");
  impl_->user_events.emplace_back(name, unit);
  return static_cast<uint16_t>(kNumEvents + impl_->user_events.size() - 1);
}

Trace::Span::Span(Trace* trace, int rank, uint16_t event, int64_t arg) noexcept
    : tracer_(trace != nullptr ? trace->tracer(rank) : nullptr),
      begin_(tracer_ != nullptr ? Tracer::ticks() : 0),
      arg_(arg),
      event_(event) {}

Trace::Span::~Span() {
  if (tracer_ == nullptr) return;
  tracer_->tick_span(detail::kHostTrack, event_, begin_, Tracer::ticks(), arg_);
}

void Trace::clear() {
  for (Tracer& tracer : impl_->tracers) tracer.clear();
}

uint64_t Trace::lost() const {
  uint64_t lost = 0;
  for (const Tracer& tracer : impl_->tracers) {
    for (int track = detail::kHostTrack; track < tracer.workers(); ++track) lost += tracer.lost(track);
  }
  return lost;
}

uint64_t Trace::clock_error_ns() const {
  uint64_t max = 0;
  for (const Tracer& tracer : impl_->tracers) max = std::max(max, tracer.clock_error_ns());
  return max;
}

std::vector<TracePhase> Trace::summary() const {
  struct Sum {
    TracePhase phase;
    std::map<int, uint64_t> per_track_ns;
  };
  std::map<std::pair<int, uint16_t>, Sum> sums;
  for (const detail::PlacedRecord& p : detail::placed_records(impl_->tracers, impl_->anchors.clock())) {
    if (p.record.kind != detail::RecordKind::span) continue;
    Sum& sum = sums[{p.rank, p.record.event}];
    const uint64_t ns = p.record.end_ns - p.record.begin_ns;
    sum.phase.rank = p.rank;
    sum.phase.count += 1;
    sum.phase.total_ms += to_ms(ns);
    sum.phase.max_ms = std::max(sum.phase.max_ms, to_ms(ns));
    sum.phase.arg_sum += p.record.arg;
    sum.phase.bytes += p.record.bytes;
    sum.per_track_ns[p.track] += ns;
  }
  std::vector<TracePhase> out;
  for (auto& [key, sum] : sums) {
    sum.phase.name = impl_->event_name(key.second);
    sum.phase.category = impl_->event_category(key.second);
    sum.phase.unit = impl_->event_unit(key.second);
    for (const auto& [track, ns] : sum.per_track_ns) sum.phase.slowest_ms = std::max(sum.phase.slowest_ms, to_ms(ns));
    out.push_back(std::move(sum.phase));
  }
  return out;
}

std::vector<TraceSlice> Trace::slices() const {
  const std::vector<detail::PlacedRecord> all = detail::placed_records(impl_->tracers, impl_->anchors.clock());
  const uint64_t origin = detail::origin_ns(all);
  std::vector<TraceSlice> out;
  for (const detail::PlacedRecord& p : all) {
    if (p.record.kind != detail::RecordKind::span) continue;
    out.push_back({p.rank, p.track, std::string(impl_->event_name(p.record.event)),
                   std::string(impl_->event_category(p.record.event)), static_cast<double>(p.record.begin_ns - origin) / 1e3,
                   static_cast<double>(p.record.end_ns - p.record.begin_ns) / 1e3, p.record.arg, p.record.bytes});
  }
  return out;
}

}  // namespace switchyard
