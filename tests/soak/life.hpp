// SPDX-License-Identifier: Apache-2.0
// One life in a soak test: ranks form groups, work and end, with all choices drawn from one seed.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace soak {

inline constexpr int kMaxLanes = 2;  ///< of each rank, each with its own thread, group, objects and streams

enum class End { in_order, throws, killed };
inline const char* name_of(End end) { return end == End::in_order ? "in_order" : end == End::throws ? "throws" : "killed"; }

/// Number of steps within which all ranks are certain to make a call that needs the others.
inline constexpr int kStepsToHear = 12;

struct Life {
  uint64_t seed = 0;
  int world = 2;
  bool processes = false;
  int lanes = kMaxLanes;
  int steps = 0;   ///< of each lane
  int hidden = 0;  ///< columns of a row
  End end = End::in_order;
  int victim = 0, victim_lane = 0, last_step = 0;  ///< the rank and lane that end before the others, and when
};

/// Draws numbers that are identical on all ranks, and numbers that are specific to one rank.
inline uint64_t draw(uint64_t seed, uint64_t a, uint64_t b = 0) {
  uint64_t x = seed * 0xD1342543DE82EF95u + 1;
  for (const uint64_t word : {a, b}) {
    x = (x ^ word) * 0x9E3779B97F4A7C15u + 0xD1B54A32D192ED03u;
    x = (x ^ x >> 29) * 0xBF58476D1CE4E5B9u;
    x ^= x >> 32;
  }
  return x;
}

/// `threads` and `processes` specify the allowed kinds of ranks; one of several processes may be killed. min_steps must exceed
/// kStepsToHear.
inline Life draw_life(uint64_t seed, int world, bool threads, bool processes, int min_steps, const int (&widths)[3]) {
  Life life;
  life.seed = seed;
  life.world = world;
  life.processes = processes && (!threads || draw(seed, 1) % 2 == 0);
  life.lanes = draw(seed, 8) % 4 == 0 ? 1 : kMaxLanes;
  life.steps = min_steps + static_cast<int>(draw(seed, 2) % static_cast<uint64_t>(3 * min_steps));
  life.hidden = widths[draw(seed, 3) % 3];
  const uint64_t way = draw(seed, 4) % 4;
  life.end = world == 1 || way < 2 ? End::in_order : way == 2 || !life.processes ? End::throws : End::killed;
  life.victim = static_cast<int>(draw(seed, 5) % static_cast<uint64_t>(world));
  life.victim_lane = static_cast<int>(draw(seed, 6) % static_cast<uint64_t>(life.lanes));
  life.last_step = 1 + static_cast<int>(draw(seed, 7) % static_cast<uint64_t>(life.steps - kStepsToHear));
  return life;
}

/// A lane's activity: counts by name, and each step.
struct Report {
  std::map<std::string, uint64_t> counts;
  std::map<int, std::string> steps;
  std::string last_steps() const {
    std::string text;
    int left = 12;
    for (auto at = steps.rbegin(); at != steps.rend() && left-- > 0; ++at)
      text = " " + std::to_string(at->first) + ":" + at->second + "," + text;
    return text;
  }
};

}  // namespace soak
