// SPDX-License-Identifier: Apache-2.0
// One rank's records as bytes, for ranks that are processes on one host. Uses native byte order, because the bytes never leave
// the host.
#include <algorithm>
#include <cstring>
#include <utility>

#include "switchyard/status.hpp"
#include "switchyard/trace.hpp"
#include "trace/trace_impl.hpp"

namespace switchyard {
namespace {

constexpr uint64_t kMagic = 0x3352545359ULL;  // "YSTR3"

void put_bytes(std::vector<std::byte>& out, const void* bytes, size_t count) {
  const size_t at = out.size();
  out.resize(at + count);
  if (count > 0) std::memcpy(out.data() + at, bytes, count);
}

template <class T>
void put(std::vector<std::byte>& out, const T& value) {
  put_bytes(out, &value, sizeof value);
}

void put_text(std::vector<std::byte>& out, const std::string& text) {
  put(out, static_cast<uint64_t>(text.size()));
  put_bytes(out, text.data(), text.size());
}

[[noreturn]] void damaged(const std::string& what) { throw Error(ErrorCode::invalid_argument, "Trace::merge: " + what); }

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : rest_(bytes) {}
  template <class T>
  T get() {
    T value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  std::string text() {
    const std::span<const std::byte> raw = take(get<uint64_t>());
    return {reinterpret_cast<const char*>(raw.data()), raw.size()};
  }
  bool empty() const { return rest_.empty(); }

 private:
  std::span<const std::byte> take(uint64_t n) {
    if (n > rest_.size())
      damaged("the bytes end early: " + std::to_string(n) + " wanted, " + std::to_string(rest_.size()) + " left");
    const std::span<const std::byte> head = rest_.first(n);
    rest_ = rest_.subspan(n);
    return head;
  }
  std::span<const std::byte> rest_;
};

}  // namespace

std::vector<std::byte> Trace::serialize(int rank) const {
  if (rank < 0 || rank >= world())
    throw Error(ErrorCode::invalid_argument,
                "Trace::serialize: rank is " + std::to_string(rank) + "; allowed: 0 to " + std::to_string(world() - 1));
  const detail::Tracer& tracer = impl_->tracers[static_cast<size_t>(rank)];
  const detail::TickClock clock = impl_->anchors.clock();
  std::vector<std::byte> out;
  put(out, kMagic);
  for (const int value : {world(), rank, impl_->options.num_blocks, impl_->options.num_warps})
    put(out, static_cast<int32_t>(value));
  put(out, static_cast<uint64_t>(impl_->user_events.size()));
  for (const auto& [name, unit] : impl_->user_events) {
    put_text(out, name);
    put_text(out, unit);
  }
  put(out, tracer.clock_error_ns());
  for (int track = detail::kHostTrack; track < tracer.workers(); ++track) {
    put(out, static_cast<uint64_t>(tracer.size(track)));
    put(out, tracer.lost(track));
    for (size_t i = 0; i < tracer.size(track); ++i) put(out, detail::timed(tracer.record(track, i), clock));
  }
  return out;
}

void Trace::merge(std::span<const std::byte> bytes) {
  Impl& impl = *impl_;
  Reader in(bytes);
  if (in.get<uint64_t>() != kMagic) damaged("the bytes were not made by Trace::serialize");
  const int32_t file_world = in.get<int32_t>();
  const int32_t rank = in.get<int32_t>();
  const int32_t blocks = in.get<int32_t>();
  const int32_t warps = in.get<int32_t>();
  if (file_world != world() || blocks != impl.options.num_blocks || warps != impl.options.num_warps) {
    damaged("world, num_blocks, num_warps are " + std::to_string(file_world) + ", " + std::to_string(blocks) + ", " +
            std::to_string(warps) + "; this Trace has " + std::to_string(world()) + ", " +
            std::to_string(impl.options.num_blocks) + ", " + std::to_string(impl.options.num_warps));
  }
  if (rank < 0 || rank >= file_world)
    damaged("rank is " + std::to_string(rank) + "; allowed: 0 to " + std::to_string(file_world - 1));
  const uint64_t num_events = in.get<uint64_t>();
  if (num_events > 4096) damaged("number of own events is " + std::to_string(num_events) + "; allowed: up to 4096");
  std::vector<uint16_t> own_events;
  for (uint64_t i = 0; i < num_events; ++i) {
    const std::string name = in.text();
    own_events.push_back(event(name, in.text()));
  }
  constexpr auto kBuiltIn = static_cast<uint16_t>(detail::Event::count_of_events);
  detail::Tracer& tracer = impl.tracers[static_cast<size_t>(rank)];
  const uint64_t clock_error_ns = in.get<uint64_t>();
  std::vector<std::pair<int, detail::TraceRecord>> records;  // nothing is appended before all bytes have been parsed
  std::vector<uint64_t> file_lost;
  for (int track = detail::kHostTrack; track < tracer.workers(); ++track) {
    const uint64_t size = in.get<uint64_t>();
    file_lost.push_back(in.get<uint64_t>());
    for (uint64_t i = 0; i < size; ++i) {
      auto record = in.get<detail::TraceRecord>();
      if (record.event >= kBuiltIn) {
        if (size_t{record.event} - kBuiltIn >= own_events.size())
          damaged("event " + std::to_string(record.event) + " has no name");
        record.event = own_events[size_t{record.event} - kBuiltIn];
      }
      if (record.kind > detail::RecordKind::instant || record.in_ticks || record.end_ns < record.begin_ns)
        damaged("a record is not a record");
      records.emplace_back(track, record);
    }
  }
  if (!in.empty()) damaged("bytes follow the last track");
  tracer.set_clock_error_ns(std::max(tracer.clock_error_ns(), clock_error_ns));
  for (const auto& [track, record] : records) tracer.append(track, record);
  for (size_t i = 0; i < file_lost.size(); ++i) tracer.add_lost(static_cast<int>(i) + detail::kHostTrack, file_lost[i]);
}

}  // namespace switchyard
