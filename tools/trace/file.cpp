// SPDX-License-Identifier: Apache-2.0
#include "trace/file.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "cli/json_input.hpp"
#include "cli/verb.hpp"
#include "switchyard/types.hpp"

namespace switchyard::tool {

using nlohmann::json;

namespace {

constexpr int kMaxTraceWarps = 1024, kMaxTraceTracks = 1024 * kMaxTraceWarps;  ///< per block, and per rank: the limits of Trace
constexpr double kMaxMicros = 9e12;                                            ///< times are exact up to 104 days

/// Reads a span's arguments: the argument named by the span's unit and, optionally, the number of bytes that it carried.
void take_arguments(const json& args, TraceSlice& slice) {
  for (const auto& [name, value] : args.items()) {
    if (name == "bytes" && args.size() > 1)
      slice.bytes = value.get<uint32_t>();
    else
      slice.arg = value.get<int64_t>();
  }
}

/// Rounds to the value that the span had in the run, because files may deviate by a tenth of a nanosecond.
double whole_ns(double us) { return std::round(us * 1e3) / 1e3; }

/// A span of a file. \throws BadEvent
TraceSlice slice_from(const json& e, size_t index, int world) {
  TraceSlice s;
  e.at("name").get_to(s.name);
  e.at("cat").get_to(s.category);
  const auto number = [&](const char* what, double min, double max) {
    const json& value = e.at(what);
    const auto given = value.is_number() ? value.get<double>() : std::nan("");
    if (!(given >= min && given <= max))
      throw BadEvent(fmt::format("traceEvents[{}] ('{}'): {} is {}; allowed: {:.15g} to {:.15g}", index, s.name, what,
                                 value.dump(), min, max));
    return given;
  };
  s.rank = static_cast<int>(number("pid", 0, world - 1));
  s.track = static_cast<int>(number("tid", 0, kMaxTraceTracks)) - 1;
  s.begin_us = whole_ns(number("ts", 0, kMaxMicros));
  s.duration_us = whole_ns(number("dur", 0, kMaxMicros));
  take_arguments(e.at("args"), s);
  return s;
}

/// Number of warps that an event implies: "block 3 warp 1" implies at least 2. \throws BadEvent
int warps_in(const json& metadata, size_t index) {
  if (metadata.at("name") != "thread_name") return 1;
  const auto name = metadata.at("args").at("name").get<std::string>();
  const size_t at = name.rfind(" warp ");
  if (at == std::string::npos) return 1;
  int warp = -1;
  std::from_chars(name.data() + at + 6, name.data() + name.size(), warp);
  if (warp < 0 || warp >= kMaxTraceWarps)
    throw BadEvent(fmt::format("traceEvents[{}]: '{}' given; allowed: warp 0 to {}", index, name, kMaxTraceWarps - 1));
  return warp + 1;
}

}  // namespace

TraceFile trace_file_from(const json& document) {
  TraceFile file;
  const json& other = document.at("otherData");
  other.at("world").get_to(file.world);
  other.at("lost_events").get_to(file.lost);
  file.clock_error_ns = other.value("clock_error_ns", uint64_t{0});  // early traces have none
  if (file.world < 1 || file.world > kMaxRanks)
    throw BadEvent(fmt::format("otherData.world is {}; allowed: 1 to {}", file.world, kMaxRanks));
  const json& events = document.at("traceEvents");
  if (!events.is_array()) throw BadEvent("traceEvents is not a list");
  for (size_t i = 0; i < events.size(); ++i) {
    const json& e = events[i];
    const auto kind = e.at("ph").get<std::string>();
    if (kind == "M") file.num_warps = std::max(file.num_warps, warps_in(e, i));
    if (kind != "X") continue;
    if (e.value("cat", "") != "flow") file.slices.push_back(slice_from(e, i, file.world));
  }
  std::stable_sort(file.slices.begin(), file.slices.end(), [](const TraceSlice& a, const TraceSlice& b) {
    return std::tuple(a.rank, a.track, a.begin_us, -a.duration_us) < std::tuple(b.rank, b.track, b.begin_us, -b.duration_us);
  });
  return file;
}

TraceFile read_trace_file(const std::string& path) {
  const InputFile file{"--in", path, "a trace that `switchyard trace` or Trace::write_chrome_json wrote"};
  const json document = read_json(file);
  try {
    if (document.at("otherData").at("producer") != "switchyard") refuse(file, "is a trace of another program");
    return trace_file_from(document);
  } catch (const UsageError&) {
    throw;
  } catch (const std::exception& e) {
    refuse(file, std::string("is not such a trace: ") + e.what());
  }
}

std::vector<TracePhase> phases_of(const std::vector<TraceSlice>& slices) {
  std::vector<TracePhase> phases;
  std::map<std::pair<int, std::string>, size_t> known;  // (rank, name)
  std::vector<std::map<int, double>> by_track;
  for (const TraceSlice& s : slices) {
    const auto [at, is_new] = known.try_emplace({s.rank, s.name}, phases.size());
    if (is_new) {
      TracePhase& p = phases.emplace_back();
      p.name = s.name;
      p.category = s.category;
      p.rank = s.rank;
      by_track.emplace_back();
    }
    TracePhase& p = phases[at->second];
    const double ms = s.duration_us * 1e-3;
    ++p.count;
    p.total_ms += ms;
    p.max_ms = std::max(p.max_ms, ms);
    p.arg_sum += s.arg;
    p.bytes += s.bytes;
    p.slowest_ms = std::max(p.slowest_ms, by_track[at->second][s.track] += ms);
  }
  return phases;
}

}  // namespace switchyard::tool
