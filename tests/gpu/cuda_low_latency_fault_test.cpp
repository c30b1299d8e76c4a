// SPDX-License-Identifier: Apache-2.0
// Faults of low-latency calls on GPUs: ranks that never come or are late, other calls than the others', what the rest reports,
// and that the GPU works afterwards.
#include <chrono>
#include <thread>

#include "gpu/station_rig.hpp"

namespace harness {
namespace {

using Clock = std::chrono::steady_clock;
using switchyard::LowLatencyExchange;

constexpr int kWorld = 3;

StreamedCase small_case(ScaleKind scales = ScaleKind::none) {
  StreamedCase c;
  Form& f = c.form;
  f.seed = 5;
  f.world = kWorld;
  f.experts = 8;
  f.topk = 3;
  f.max_tokens = 9;
  f.hidden = 512;
  f.scales = scales;
  return c;
}

size_t heap_of(const StreamedCase& c) { return LowLatencyExchange::heap_bytes_for(c.config(), c.form.world); }

/// A group on the same GPUs in the same process works.
void calls_of_new_group() {
  const StreamedCase c = small_case();
  on_gpus(kWorld, heap_of(c), [&](Station& me) {
    me.f.set_context("a new group afterwards");
    LowLatencyExchange exchange(me.group, c.config());
    StationRig rig(me);
    Calls streamed(rig, exchange, c);
    me.meet();
    streamed.run(1, 20);
    expect_verdict(me, streamed, streamed.judged(), true);
  });
}

// --- A rank that never enqueues

struct Silence {
  const char* name;
  const char* operation;
  uint64_t call;
  void (*before)(Calls&);  ///< on all ranks
  void (*last)(Calls&);    ///< on all but the silent one
};
std::ostream& operator<<(std::ostream& out, const Silence& s) { return out << s.name; }

void nothing(Calls&) {}
void dispatched(Calls& c) { c.dispatch({1}, c.lane(0), 0, {}); }
constexpr Silence kSilences[] = {
    {"first_dispatch", "dispatch", 1, nothing, dispatched},
    {"receiving_half", "dispatch", 1, nothing,
     [](Calls& c) {
       c.dispatch({1}, c.lane(0), 0, {true, true, false, false});
     }},
    {"third_call", "dispatch", 3, [](Calls& c) { c.pair({1}, c.lane(0), 0, {}); }, dispatched},
    {"combine", "combine", 2, dispatched, [](Calls& c) { c.combine({2}, c.lane(0), 0, {}); }},
    {"combine_by_rank", "combine", 2, dispatched,
     [](Calls& c) {
       c.combine({2}, c.lane(0), 0, {false, true, true, false});
     }},
    {"all_to_all", "moe_all_to_all", 1, nothing, [](Calls& c) { c.all_to_all({1}, c.lane(0), {}); }},
};

class SilentLowLatencyRank : public testing::TestWithParam<Silence> {};

TEST_P(SilentLowLatencyRank, OthersReportItInFull) {
  const Silence& s = GetParam();
  constexpr int kSilent = 1;
  isolated([&] {
    for (const ScaleKind scales : {ScaleKind::none, ScaleKind::f32}) {
      if (scales != ScaleKind::none && (s.call == 3 || std::string(s.operation) == "moe_all_to_all")) continue;
      const StreamedCase c = small_case(scales);
      on_gpus(kWorld, heap_of(c), 1s, [&](Station& me) {
        LowLatencyExchange exchange(me.group, c.config());
        StationRig rig(me);
        Calls streamed(rig, exchange, c);
        me.meet();
        s.before(streamed);
        me.meet();
        const bool silent = me.rank() == kSilent;
        if (!silent) s.last(streamed);
        me.meet();
        if (!silent) {
          const Outcome o = outcome_of([&] { me.group.check(); });
          me.f.equal(static_cast<int>(ErrorCode::peer_timeout), static_cast<int>(o.code), "code, " + shown(o));
          me.f.equal(std::string(s.operation), std::string(o.report.operation), "operation");
          me.f.equal(s.call, o.report.call, "call");
          me.f.equal(me.rank(), o.report.waiting_rank, "waiting rank");
          me.f.equal(kSilent, o.report.awaited_rank, "awaited rank, " + o.text);
          me.f.check(o.report.site && *o.report.site, "no site");
          me.f.check(o.report.waited_ms > 500 && o.report.waited_ms < 5000,
                     "waited " + std::to_string(o.report.waited_ms) + " ms of a deadline of 1000 ms");
        }
        me.gather();
        const Outcome later = outcome_of([&] { dispatched(streamed); });
        me.f.check(later.code == ErrorCode::peer_failed || later.code == ErrorCode::peer_timeout,
                   "not sticky: " + shown(later));
        me.f.check(cudaDeviceSynchronize() == cudaSuccess && cudaGetLastError() == cudaSuccess, "the context failed");
        me.gather();
      });
    }
    calls_of_new_group();
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, SilentLowLatencyRank, testing::ValuesIn(kSilences),
                         [](const auto& s) { return std::string(s.param.name); });

// --- A rank that is late

/// 100 calls are queued when time runs out: together they cost about one deadline.
TEST(LateLowLatencyRank, HundredQueuedCallsCostOneDeadline) {
  constexpr int kLate = 2, kCalls = 100;
  constexpr auto kDeadline = 1s;
  const StreamedCase c = small_case();
  isolated([&] {
    on_gpus(kWorld, heap_of(c), kDeadline, [&](Station& me) {
      LowLatencyExchange exchange(me.group, c.config());
      StationRig rig(me);
      Calls streamed(rig, exchange, c);
      me.meet();
      if (me.rank() == kLate) rig.pause(3'000'000'000, me.stream());
      const auto start = Clock::now();
      uint64_t queued = 0;
      const Outcome refused = outcome_of([&] {
        for (; queued < kCalls; ++queued) streamed.dispatch({queued + 1}, streamed.lane(0), queued % 2, {});
      });
      me.f.check(queued > 1, "only " + std::to_string(queued) + " calls were queued: proves nothing, " + shown(refused));
      me.synchronize();
      me.f.check(Clock::now() - start < 10 * kDeadline, "the queued calls cost more than one deadline");
      me.gather();
      if (me.rank() == kLate) {
        const Outcome o = outcome_of([&] { me.group.check(); });
        me.f.equal(static_cast<int>(ErrorCode::peer_failed), static_cast<int>(o.code), "code at the late rank, " + shown(o));
        me.f.equal(static_cast<int>(ErrorCode::peer_timeout), static_cast<int>(o.reason), "reason there, " + shown(o));
      }
      me.gather();
      if (me.rank() != kLate) {
        const Outcome o = outcome_of([&] { me.group.check(); });
        me.f.equal(static_cast<int>(ErrorCode::peer_timeout), static_cast<int>(o.code), "code, " + shown(o));
        me.f.equal(kLate, o.report.awaited_rank, "awaited rank");
        me.f.equal(uint64_t{1}, o.report.call, "call");
      }
      me.f.check(cudaDeviceSynchronize() == cudaSuccess && cudaGetLastError() == cudaSuccess, "the context failed");
      me.gather();
    });
    calls_of_new_group();
  });
}

/// Late, but within the deadline: no fault, and the statistics name it.
TEST(LateLowLatencyRank, IsNamedByTheWaitStatistics) {
  const StreamedCase c = small_case(ScaleKind::f32);
  on_gpus(kWorld, heap_of(c), [&](Station& me) {
    LowLatencyExchange exchange(me.group, c.config());
    StationRig rig(me);
    Calls streamed(rig, exchange, c);
    me.meet();
    streamed.run(1, 4);
    me.meet();
    const auto before = me.group.wait_statistics();
    me.gather();
    if (me.rank() == 1) rig.pause(200'000'000, me.stream());
    dispatched(streamed);
    streamed.combine({2}, streamed.lane(0), 0, {});
    expect_verdict(me, streamed, streamed.judged(), true);
    const auto after = me.group.wait_statistics();
    if (me.rank() != 1) {
      for (size_t r = 0; r < kWorld; ++r)
        me.f.check(after[1].total_ms - before[1].total_ms >= after[r].total_ms - before[r].total_ms, "rank 1 is not slowest");
      me.f.check(after[1].waits > before[1].waits && after[1].max_ms > 50, "longest wait " + std::to_string(after[1].max_ms));
    }
    me.meet();
  });
}

// --- Other calls

/// Found by comparison, on all ranks.
TEST(LowLatencyMismatchOnGpus, IsFoundByAllRanks) {
  const StreamedCase c = small_case();
  isolated([&] {
    for (const int kind : {0, 1, 2}) {
      on_gpus(kWorld, heap_of(c), 20s, [&](Station& me) {
        me.f.set_context("mismatch " + std::to_string(kind));
        LowLatencyExchange exchange(me.group, c.config());
        StationRig rig(me);
        Calls streamed(rig, exchange, c);
        me.meet();
        dispatched(streamed);
        if (me.rank() != 1) {
          streamed.combine({2}, streamed.lane(0), 0, {});
        } else if (kind == 0) {
          dispatched(streamed);
        } else if (kind == 1) {
          streamed.combine({2}, streamed.lane(0), 0, {false, true, true, false});
        } else {
          streamed.all_to_all({2}, streamed.lane(0), {});
        }
        me.meet();
        const Outcome end = outcome_of([&] { me.group.check(); });
        const bool told = end.code == ErrorCode::peer_failed && end.reason == ErrorCode::mismatch;
        me.f.check(end.code == ErrorCode::mismatch || told, shown(end));
        me.gather();
      });
    }
    calls_of_new_group();
  });
}

}  // namespace
}  // namespace harness
