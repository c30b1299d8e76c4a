// SPDX-License-Identifier: Apache-2.0
#include "switchyard/trace.hpp"

#include <algorithm>
#include <limits>
#include <map>

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

Tracer::Tracer(int rank, int num_blocks, int num_warps, size_t capacity)
    : rank_(rank),
      num_blocks_(num_blocks),
      num_warps_(num_warps),
      tracks_(static_cast<size_t>(num_blocks) * static_cast<size_t>(num_warps) + 1) {
  for (Track& track : tracks_) {
    track.records = std::make_unique<TraceRecord[]>(capacity);
    track.capacity = capacity;
  }
}

void Tracer::clear() noexcept {
  for (Track& track : tracks_) track.size = track.next = track.lost = 0;
}

std::vector<PlacedRecord> placed_records(const std::vector<Tracer>& tracers) {
  std::vector<PlacedRecord> all;
  for (const Tracer& tracer : tracers) {
    for (int track = kHostTrack; track < tracer.workers(); ++track) {
      const auto first = static_cast<std::ptrdiff_t>(all.size());
      for (size_t i = 0; i < tracer.size(track); ++i) all.push_back({tracer.rank(), track, tracer.record(track, i)});
      std::stable_sort(all.begin() + first, all.end(), [](const PlacedRecord& a, const PlacedRecord& b) {
        if (a.record.begin_ns != b.record.begin_ns) return a.record.begin_ns < b.record.begin_ns;
        return a.record.end_ns > b.record.end_ns;
      });
    }
  }
  return all;
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

uint64_t Trace::Impl::origin_ns() const {
  uint64_t origin = std::numeric_limits<uint64_t>::max();
  for (const Tracer& tracer : tracers) {
    for (int track = detail::kHostTrack; track < tracer.workers(); ++track) {
      for (size_t i = 0; i < tracer.size(track); ++i) origin = std::min(origin, tracer.record(track, i).begin_ns);
    }
  }
  return origin == std::numeric_limits<uint64_t>::max() ? 0 : origin;
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
    impl_->tracers.emplace_back(r, options.num_blocks, options.num_warps, options.events_per_track);
}

Trace::Trace(Trace&&) noexcept = default;
Trace& Trace::operator=(Trace&&) noexcept = default;
Trace::~Trace() = default;

int Trace::world() const noexcept { return static_cast<int>(impl_->tracers.size()); }
const TraceOptions& Trace::options() const noexcept { return impl_->options; }
Tracer* Trace::tracer(int rank) const noexcept { return &impl_->tracers[static_cast<size_t>(rank)]; }

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
      begin_ns_(tracer_ != nullptr ? Tracer::now_ns() : 0),
      arg_(arg),
      event_(event) {}

Trace::Span::~Span() {
  if (tracer_ == nullptr) return;
  tracer_->append(detail::kHostTrack, {begin_ns_, Tracer::now_ns(), arg_, event_, detail::RecordKind::span});
}

void Trace::clear() noexcept {
  for (Tracer& tracer : impl_->tracers) tracer.clear();
}

uint64_t Trace::lost() const noexcept {
  uint64_t lost = 0;
  for (const Tracer& tracer : impl_->tracers) {
    for (int track = detail::kHostTrack; track < tracer.workers(); ++track) lost += tracer.lost(track);
  }
  return lost;
}

uint64_t Trace::clock_error_ns() const noexcept {
  uint64_t most = 0;
  for (const Tracer& tracer : impl_->tracers) most = std::max(most, tracer.clock_error_ns());
  return most;
}

std::vector<TracePhase> Trace::summary() const {
  struct Sum {
    TracePhase phase;
    std::map<int, uint64_t> per_track_ns;
  };
  std::map<std::pair<int, uint16_t>, Sum> sums;
  for (const detail::PlacedRecord& p : detail::placed_records(impl_->tracers)) {
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
  const uint64_t origin = impl_->origin_ns();
  std::vector<TraceSlice> out;
  for (const detail::PlacedRecord& p : detail::placed_records(impl_->tracers)) {
    if (p.record.kind != detail::RecordKind::span) continue;
    out.push_back({p.rank, p.track, std::string(impl_->event_name(p.record.event)),
                   std::string(impl_->event_category(p.record.event)), static_cast<double>(p.record.begin_ns - origin) / 1e3,
                   static_cast<double>(p.record.end_ns - p.record.begin_ns) / 1e3, p.record.arg, p.record.bytes});
  }
  return out;
}

}  // namespace switchyard
