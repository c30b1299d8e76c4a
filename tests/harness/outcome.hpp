// SPDX-License-Identifier: Apache-2.0
// Errors as data, and deadlines for error tests.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "launch/on_threads.hpp"
#include "switchyard/group.hpp"

namespace harness {

/// Result of a call.
struct Outcome {
  switchyard::ErrorCode code = switchyard::ErrorCode::ok;
  int failed_rank = -1;                                      ///< PeerFailed
  switchyard::ErrorCode reason = switchyard::ErrorCode::ok;  ///< PeerFailed
  switchyard::WaitReport report;                             ///< PeerTimeout
  std::string text;
};

inline Outcome outcome_of(const std::function<void()>& call) {
  Outcome o;
  try {
    call();
  } catch (const switchyard::PeerTimeout& e) {
    o = {e.code(), -1, switchyard::ErrorCode::ok, e.report(), e.what()};
  } catch (const switchyard::PeerFailed& e) {
    o = {e.code(), e.rank(), e.reason(), {}, e.what()};
  } catch (const switchyard::Error& e) {
    o = {e.code(), -1, switchyard::ErrorCode::ok, {}, e.what()};
  }
  return o;
}

/// Returns the error of a call that all ranks made incorrectly, from the rank that detected it first.
inline switchyard::ErrorCode cause_of(const Outcome& o) {
  return o.code == switchyard::ErrorCode::peer_failed ? o.reason : o.code;
}

/// Describes an outcome for messages.
inline std::string shown(const Outcome& o) { return std::string(switchyard::to_string(o.code)) + ": " + o.text; }

/// Deadline for tests that wait until it has passed: short for the person who runs them, but long compared with the pauses that
/// a loaded machine imposes on a rank. Ranks meet before the failing call, so only delays within the call count.
inline constexpr std::chrono::milliseconds kSoon{1200};

inline std::string code_name(switchyard::ErrorCode code) { return switchyard::to_string(code); }

/// Expects this error code and a text that contains `part`.
inline void expect_text(const Outcome& found, switchyard::ErrorCode code, const std::string& part) {
  EXPECT_EQ(code_name(found.code), code_name(code)) << found.text;
  EXPECT_NE(found.text.find(part), std::string::npos) << "'" << found.text << "' should contain '" << part << "'";
}

inline switchyard::GroupOptions options_with(std::chrono::milliseconds timeout, size_t heap = size_t{8} << 20) {
  switchyard::GroupOptions o;
  o.heap_bytes = heap;
  o.timeout = timeout;
  o.num_warps = 2;
  return o;
}

/// Runs `body` on each rank and returns the outcome of each. Every rank's objects are destroyed before it returns, so a
/// destructor that hangs after a fault hangs the test.
inline std::vector<Outcome> outcomes(int world, const switchyard::GroupOptions& options,
                                     const std::function<void(switchyard::Group&)>& body) {
  auto groups = switchyard::Group::in_process(world, options);
  std::vector<Outcome> all(groups.size());
  switchyard::launch::on_threads(groups.size(), [&](size_t r) { all[r] = outcome_of([&] { body(groups[r]); }); });
  return all;
}

/// Every rank must receive the error, either from its own comparison or from the rank that compared first.
inline void expect_mismatch(const std::vector<Outcome>& all) {
  for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "mismatch") << o.text;
}

/// `text`: error of calls whose selectors, passed as `option`, used different maps. Returns the compared value of the higher
/// rank minus that of the lower rank, modulo 8; -1 if the text does not contain both. The values of selectors created one after
/// the other with maps of equal version differ by 3, those of consecutive maps of a selector by 1.
inline int map_difference(const std::string& text, const std::string& option) {
  const std::string name = "map of " + option + " (its version + 3 * the selector's number, modulo 8)";
  const size_t at = text.find(name);
  int one = 0, other = 0, rank = 0, other_rank = 0;
  if (at == std::string::npos ||
      std::sscanf(text.c_str() + at + name.size(), " = %d on rank %d and %d on rank %d", &one, &rank, &other, &other_rank) != 4)
    return -1;
  return ((rank > other_rank ? one - other : other - one) + 8) % 8;
}

}  // namespace harness
