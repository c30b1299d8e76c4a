// SPDX-License-Identifier: Apache-2.0
// Small calls for fault tests, and errors as data.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "harness/fleet.hpp"
#include "switchyard/normal.hpp"

namespace harness {

/// How a call ended.
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

/// For messages.
inline std::string shown(const Outcome& o) { return std::string(switchyard::to_string(o.code)) + ": " + o.text; }

/// Deadline of a test that waits for it: short beside the patience of whoever runs it, long beside the pauses that a loaded
/// machine imposes on a rank. Ranks meet before the call that is to fail, so that only its own lateness counts.
inline constexpr std::chrono::milliseconds kSoon{1200};

inline std::string code_name(switchyard::ErrorCode code) { return switchyard::to_string(code); }

inline switchyard::GroupOptions options_with(std::chrono::milliseconds timeout, size_t heap = size_t{8} << 20) {
  switchyard::GroupOptions o;
  o.heap_bytes = heap;
  o.timeout = timeout;
  o.num_warps = 2;
  return o;
}

/// Runs `body` per rank and returns how each ended. Every rank's objects are destroyed before it returns: a destructor that
/// hangs after a fault hangs the test.
inline std::vector<Outcome> outcomes(int world, const switchyard::GroupOptions& options,
                                     const std::function<void(switchyard::Group&)>& body) {
  auto groups = switchyard::Group::in_process(world, options);
  std::vector<Outcome> all(groups.size());
  std::vector<std::thread> threads;
  for (size_t r = 0; r < groups.size(); ++r) threads.emplace_back([&, r] { all[r] = outcome_of([&] { body(groups[r]); }); });
  for (auto& t : threads) t.join();
  return all;
}

/// Every rank must learn of it: by its own comparison, or from the first one that compared.
inline void expect_mismatch(const std::vector<Outcome>& all) {
  for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "mismatch") << o.text;
}

/// An exchange object with valid arguments for every call; a test spoils one of them.
struct FaultRig {
  static constexpr int kExperts = 8, kTopk = 2;
  static constexpr int64_t kHidden = 64, kTokens = 6;

  static switchyard::NormalConfig config(switchyard::Staging staging = switchyard::Staging::direct,
                                         switchyard::Layout layout = switchyard::Layout::rank_major) {
    switchyard::NormalConfig c;
    c.hidden = kHidden;
    c.num_experts = kExperts;
    c.topk = kTopk;
    c.max_tokens = kTokens;
    c.layout = layout;
    c.staging = staging;
    c.ring = {2, 2, 4};
    return c;
  }

  explicit FaultRig(switchyard::Group& group, const switchyard::NormalConfig& c = config()) : exchange(group, c) {
    for (int64_t f = 0; f < kTokens * kTopk; ++f) ids.push_back(static_cast<int32_t>((f * 3 + group.rank()) % kExperts));
  }
  switchyard::ConstRows x() const { return {rows.data(), kTokens, kHidden, switchyard::DType::bf16}; }
  switchyard::ExpertIds expert_ids() const { return switchyard::ExpertIds::of(ids.data(), kTokens, kTopk); }
  switchyard::Dispatched dispatch() { return exchange.dispatch(x(), expert_ids(), weights.data()); }
  void combine(const switchyard::Dispatched& d) { exchange.combine(d.x, d.handle, out.data()); }
  void round() { combine(dispatch()); }

  switchyard::NormalExchange exchange;
  std::vector<int32_t> ids;
  std::vector<uint16_t> rows = std::vector<uint16_t>(kTokens * kHidden, 0x3F80), out = std::vector<uint16_t>(kTokens * kHidden);
  std::vector<float> weights = std::vector<float>(kTokens * kTopk, 0.5f);
};

}  // namespace harness
