// SPDX-License-Identifier: Apache-2.0
// Final checks for every GPU fault test, in all modes. Each runs on all ranks after the calls.
#pragma once

#include <algorithm>
#include <string>

#include "arch/ops.hpp"
#include "gpu/harness/object_rig.hpp"

namespace harness {

/// The GPU is usable afterwards, and no pending error remains.
inline void expect_context_works(Station& me) {
  me.f.check(cudaDeviceSynchronize() == cudaSuccess && cudaGetLastError() == cudaSuccess, "the context failed");
}

/// The rank for which this rank has waited longest since its start.
inline int slowest(const Group& group) {
  const auto waits = group.wait_statistics();
  const auto longest =
      std::max_element(waits.begin(), waits.end(), [](const auto& a, const auto& b) { return a.total_ms < b.total_ms; });
  return static_cast<int>(longest - waits.begin());
}

/// Expected report for a call with a deadline of 1000 ms in which rank `awaited` is missing.
struct MissingRank {
  std::string operation;
  std::string site;  ///< empty: any site
  uint64_t call;
  bool raised_before = false;  ///< the flag was raised in the call before, and the report must say so
};
inline void expect_report(Station& me, const Outcome& o, const MissingRank& expected, int awaited) {
  me.f.equal(code_name(ErrorCode::peer_timeout), code_name(o.code), "code, " + shown(o));
  me.f.equal(expected.operation, std::string(o.report.operation), "operation");
  const std::string site = o.report.site ? o.report.site : "";
  me.f.check(expected.site.empty() ? !site.empty() : site == expected.site, "site '" + site + "'");
  me.f.equal(expected.call, o.report.call, "call");
  me.f.equal(me.rank(), o.report.waiting_rank, "waiting rank");
  me.f.equal(awaited, o.report.awaited_rank, "awaited rank");
  me.f.check(static_cast<int64_t>(o.report.expected - o.report.seen) > 0, "the flag was there");
  const uint64_t calls_behind =
      switchyard::detail::flag_epoch(o.report.expected) - switchyard::detail::flag_epoch(o.report.seen);
  if (expected.raised_before) me.f.equal(uint64_t{1}, calls_behind, "calls since the flag was raised, " + o.text);
  me.f.check(o.report.waited_ms > 500 && o.report.waited_ms < 5000,
             "waited " + std::to_string(o.report.waited_ms) + " ms of a deadline of 1000 ms");
  me.f.check(o.text.find("rank " + std::to_string(awaited)) != std::string::npos, o.text);
}

/// Every later call also ends with this error.
inline void expect_sticky(Station& me, const Outcome& later) {
  me.f.check(later.code == ErrorCode::peer_failed || later.code == ErrorCode::peer_timeout, "not sticky: " + shown(later));
}

/// In the first call, rank `late` arrived after the others' deadline. Its host receives the error although no other host has
/// checked yet.
inline void expect_late_arrival(Station& me, int late) {
  me.gather();
  if (me.rank() == late) {
    const Outcome o = outcome_of([&] { me.group.check(); });
    me.f.equal(code_name(ErrorCode::peer_failed), code_name(o.code), "code at the late rank, " + shown(o));
    me.f.equal(code_name(ErrorCode::peer_timeout), code_name(o.reason), "reason at the late rank, " + shown(o));
  }
  me.gather();
  if (me.rank() == late) return;
  const Outcome o = outcome_of([&] { me.group.check(); });
  me.f.equal(code_name(ErrorCode::peer_timeout), code_name(o.code), "code, " + shown(o));
  me.f.equal(late, o.report.awaited_rank, "awaited rank");
  me.f.equal(uint64_t{1}, o.report.call, "call");
}

}  // namespace harness
