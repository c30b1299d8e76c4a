// SPDX-License-Identifier: Apache-2.0
// Faults of low-latency calls on GPUs: ranks that never call, are late, are killed, or make different calls; the errors of the
// other ranks; and the usability of the GPU afterwards.
#include <unistd.h>

#include <chrono>
#include <thread>
#include <tuple>

#include "gpu/faults/fault_checks.hpp"
#include "gpu/harness/captured_calls.hpp"
#include "gpu/harness/killed_rank.hpp"

namespace harness {
namespace {

using Clock = std::chrono::steady_clock;
using switchyard::LowLatencyExchange;

StreamedCase small_case(int world, ScaleKind scales = ScaleKind::none) {
  StreamedCase c;
  Form& f = c.form;
  f.seed = 5;
  f.world = world;
  f.experts = 8;
  f.topk = 3;
  f.max_tokens = 9;
  f.hidden = 512;
  f.scales = scales;
  return c;
}

size_t heap_of(const StreamedCase& c) { return LowLatencyExchange::heap_bytes(c.config(), c.form.world); }

/// A new group works on the same GPUs in the same process.
void calls_of_new_group(int world) {
  const StreamedCase c = small_case(world);
  on_gpus(world, heap_of(c), [&](Station& me) {
    me.f.set_context("a new group afterwards");
    LowLatencyExchange exchange = c.make(me.group);
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
  void (*last)(Calls&);    ///< on all ranks except the silent one
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

class SilentLowLatencyRank : public testing::TestWithParam<std::tuple<int, Silence>> {};

TEST_P(SilentLowLatencyRank, OthersReportItInFull) {
  const auto& [world, s] = GetParam();
  constexpr int kSilent = 1;
  isolated([&] {
    for (const ScaleKind scales : {ScaleKind::none, ScaleKind::f32}) {
      if (scales != ScaleKind::none && (s.call == 3 || std::string(s.operation) == "moe_all_to_all")) continue;
      const StreamedCase c = small_case(world, scales);
      on_gpus(world, heap_of(c), 1s, [&](Station& me) {
        LowLatencyExchange exchange = c.make(me.group);
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
          expect_report(me, o, {s.operation, "", s.call}, kSilent);
        }
        me.gather();
        const Outcome later = outcome_of([&] { dispatched(streamed); });
        expect_sticky(me, later);
        expect_context_works(me);
        me.gather();
      });
    }
    calls_of_new_group(world);
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, SilentLowLatencyRank, testing::Combine(testing::Values(2, 4, 8), testing::ValuesIn(kSilences)),
                         [](const auto& c) {
                           return "W" + std::to_string(std::get<0>(c.param)) + "_" + std::get<1>(c.param).name;
                         });

// --- A rank that is late

class LateLowLatencyRank : public testing::TestWithParam<int> {};

/// When the deadline passes, 100 calls are queued; together they take about one deadline.
TEST_P(LateLowLatencyRank, HundredQueuedCallsCostOneDeadline) {
  constexpr int kCalls = 100;
  constexpr auto kDeadline = 1s;
  const int world = GetParam(), late = world - 1;
  const StreamedCase c = small_case(world);
  isolated([&] {
    on_gpus(world, heap_of(c), kDeadline, [&](Station& me) {
      LowLatencyExchange exchange = c.make(me.group);
      StationRig rig(me);
      Calls streamed(rig, exchange, c);
      me.meet();
      if (me.rank() == late) rig.pause(3'000'000'000, me.stream());
      const auto start = Clock::now();
      uint64_t queued = 0;
      const Outcome refused = outcome_of([&] {
        for (; queued < kCalls; ++queued) streamed.dispatch({queued + 1}, streamed.lane(0), queued % 2, {});
      });
      me.f.check(queued > 1, "only " + std::to_string(queued) + " calls were queued: proves nothing, " + shown(refused));
      me.synchronize();
      me.f.check(Clock::now() - start < 10 * kDeadline, "the queued calls cost more than one deadline");
      expect_late_arrival(me, late);
      expect_context_works(me);
      me.gather();
    });
    calls_of_new_group(world);
  });
}

/// A rank that is late but within the deadline causes no fault, and the statistics name it.
TEST_P(LateLowLatencyRank, IsNamedByTheWaitStatistics) {
  const int world = GetParam();
  const StreamedCase c = small_case(world, ScaleKind::f32);
  on_gpus(world, heap_of(c), [&](Station& me) {
    LowLatencyExchange exchange = c.make(me.group);
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
      for (size_t r = 0; r < before.size(); ++r)
        me.f.check(after[1].total_ms - before[1].total_ms >= after[r].total_ms - before[r].total_ms, "rank 1 is not slowest");
      me.f.check(after[1].waits > before[1].waits && after[1].max_ms > 50, "longest wait " + std::to_string(after[1].max_ms));
    }
    me.meet();
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, LateLowLatencyRank, testing::Values(2, 4, 8),
                         [](const auto& w) { return "W" + std::to_string(w.param); });

// --- Different calls

/// All ranks detect this by comparison.
TEST(LowLatencyMismatchOnGpus, IsFoundByAllRanks) {
  constexpr int kWorld = 3;
  const StreamedCase c = small_case(kWorld);
  isolated([&] {
    for (const int kind : {0, 1, 2}) {
      on_gpus(kWorld, heap_of(c), 20s, [&](Station& me) {
        me.f.set_context("mismatch " + std::to_string(kind));
        LowLatencyExchange exchange = c.make(me.group);
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
        me.f.check(end.code == ErrorCode::mismatch, shown(end));
        me.gather();
      });
    }
    calls_of_new_group(kWorld);
  });
}

/// Two outputs are filled; then rank 1 sums the rows of the wrong one. In unsplit calls, T is in device memory.
struct OtherOutput {
  const char* name;
  Calls::Choices dispatches, combine;
  bool captured;
};
std::ostream& operator<<(std::ostream& out, const OtherOutput& o) { return out << o.name; }
constexpr OtherOutput kOtherOutputs[] = {
    {"whole", {}, {}, false},
    {"by_rank", {}, {false, true, true, false}, false},
    {"in_halves", {true, true, false, false}, {true, true, false, false}, false},
    {"in_a_graph", {}, {}, true},
};

/// Dispatches into both outputs, as calls 1 and 2 of four.
void fill_both(Calls& c, const OtherOutput& o, const uint64_t* replays = nullptr) {
  for (const size_t output : {0, 1}) c.dispatch({1 + output, replays, 4}, c.lane(0), output, o.dispatches);
}

void other_output_on_rank_1(Station& me, Calls& streamed, StationRig& rig, const OtherOutput& o) {
  auto& lane = streamed.lane(0);
  me.meet();
  fill_both(streamed, o);  // allowed: combined in any order, even twice, in the same way on all ranks
  for (const size_t output : {1, 0, 0, 1}) streamed.combine({3}, lane, output, o.combine);
  expect_verdict(me, streamed, 6, true);
  const size_t other = me.rank() == 1 ? 1 : 0;
  const auto start = Clock::now();
  Outcome end;
  if (o.captured) {
    const CapturedCalls alike(me, rig, [&](uint64_t* replays) {
      fill_both(streamed, o, replays);
      for (const size_t output : {1, 0}) streamed.combine({4 - output, replays, 4}, lane, output, o.combine);
    });
    const CapturedCalls mixed(me, rig, [&](uint64_t* replays) {
      fill_both(streamed, o, replays);
      streamed.combine({3, replays, 4}, lane, other, o.combine);
    });
    for (int replay = 0; replay < 3; ++replay) alike.launch();
    expect_verdict(me, streamed, 6 + 3 * 4, true);
    mixed.launch();
    me.meet();
  } else {
    end = outcome_of([&] {  // the hook may raise the error
      fill_both(streamed, o);
      streamed.combine({3}, lane, other, o.combine);
    });
    me.meet();
  }
  if (end.code == ErrorCode::ok) end = outcome_of([&] { me.group.check(); });
  me.f.check(end.code == ErrorCode::mismatch, shown(end));
  me.f.check(Clock::now() - start < 15s, "found by a deadline");
  me.gather();
}

class OtherOutputOnGpus : public testing::TestWithParam<std::tuple<int, OtherOutput>> {};

TEST_P(OtherOutputOnGpus, IsFoundByAllRanks) {
  const auto& [world, o] = GetParam();
  const StreamedCase c = small_case(world);
  isolated([&, &o = o, &world = world] {
    on_gpus(world, heap_of(c), 20s, [&](Station& me) {
      LowLatencyExchange exchange = c.make(me.group);
      StationRig rig(me);
      Calls streamed(rig, exchange, c);
      other_output_on_rank_1(me, streamed, rig, o);
    });
    calls_of_new_group(world);
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, OtherOutputOnGpus, testing::Combine(testing::Values(2, 3), testing::ValuesIn(kOtherOutputs)),
                         [](const auto& c) {
                           return "W" + std::to_string(std::get<0>(c.param)) + "_" + std::get<1>(c.param).name;
                         });

// --- Killed processes

/// Rank 1 is killed in a call after which others are queued: either it waits for the other ranks, which have not called, or
/// they wait for it.
struct KilledLowLatency {
  static constexpr int kWorld = 3, kVictim = 1;
  static constexpr uint64_t kCalls = 60;
  static constexpr auto kDeadline = 8s;
  bool it_waits;
  std::string store = "unix:@switchyard-killed-" + std::to_string(::getpid()) + (it_waits ? "-it-waits" : "-others-wait");

  /// Whether all of the victim's calls are queued when it is killed.
  bool queues_before(int rank) const { return (rank == kVictim) == it_waits; }
};

void rank_of_killed(switchyard::test::ChildRank& child, const KilledLowLatency& k) {
  const StreamedCase c = small_case(k.kWorld, ScaleKind::f32);
  Group group = join_killed(child, k, heap_of(c));
  Meeting alone(1);
  Failures failures("rank " + std::to_string(child.rank()));
  Station me(group, failures, alone);
  LowLatencyExchange exchange = c.make(group);
  StationRig rig(me);
  Calls streamed(rig, exchange, c);
  streamed.run(1, 8);
  expect_verdict(me, streamed, streamed.judged(), true);
  for (const auto& text : failures.take()) child.say(text);
  group.barrier();
  uint64_t queued = 0;
  const auto queue = [&] {
    for (; queued < k.kCalls; ++queued) streamed.dispatch({100 + queued}, streamed.lane(0), queued % 2, {});
  };
  be_killed_or_survive(child, k, me, queue, [&] { return queued; });
  require_failed(child, outcome_of([&] { dispatched(streamed); }), "not sticky");
  require_context_works(child);
  child.say("done");
}

class KilledLowLatencyProcess : public testing::TestWithParam<bool> {};

TEST_P(KilledLowLatencyProcess, OthersEndWithinTheDeadline) { kill_one(KilledLowLatency{GetParam()}, rank_of_killed); }

INSTANTIATE_TEST_SUITE_P(Gpu, KilledLowLatencyProcess, testing::Bool(),
                         [](const auto& c) { return std::string(c.param ? "it_waits" : "others_wait"); });

}  // namespace
}  // namespace harness
