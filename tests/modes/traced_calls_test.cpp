// SPDX-License-Identifier: Apache-2.0
// Traces of real calls on the CPU: every byte that crosses a link is recorded in some span, waits end when sums begin, and a
// track that is too short retains the end of the run.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <thread>

#include "modes/fused/fused_moe_rig.hpp"
#include "modes/ledger/ledger_rig.hpp"
#include "modes/low_latency/low_latency_rig.hpp"
#include "modes/normal/normal_rig.hpp"
#include "switchyard/ledger.hpp"
#include "switchyard/trace.hpp"
#include "trace/tracer.hpp"

namespace harness {
namespace {

using namespace std::chrono_literals;
using switchyard::CombineOrder;
using switchyard::Group;
using switchyard::Layout;
using switchyard::Staging;
using switchyard::Trace;
using switchyard::detail::Event;
using switchyard::detail::TraceRecord;

constexpr int kWorld = 3;

Trace trace_for(const switchyard::GroupOptions& options, size_t events = 1 << 12) {
  switchyard::TraceOptions t;
  t.num_blocks = options.num_blocks;
  t.num_warps = options.num_warps;
  t.events_per_track = events;
  return Trace(kWorld, t);
}

void expect_all_ok(const std::vector<Outcome>& all) {
  for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
}

/// Payload over links: as reported by the ranks and by the phases that transport it, and as recorded in the spans of these
/// phases.
struct Crossed {
  std::atomic<uint64_t> reported{0};
  std::map<std::string, uint64_t> traced(const Trace& trace) const {
    std::map<std::string, uint64_t> bytes;
    for (const auto& phase : trace.summary())
      if (phase.bytes > 0) bytes[phase.name] += phase.bytes;
    return bytes;
  }
};

/// Config for calls that send rows unchanged.
switchyard::LowLatencyConfig plain_rows() {
  switchyard::LowLatencyConfig c = LowLatencyRig::config();
  c.scales = switchyard::ScaleKind::none;
  return c;
}

/// Runs `body` on all ranks while recording, and adds up the values of last_call().
std::map<std::string, uint64_t> traced_bytes(uint64_t& reported, const std::function<void(Group&, Crossed&)>& body) {
  const auto options = options_with(60s);
  Trace trace = trace_for(options);
  Crossed crossed;
  expect_all_ok(outcomes(kWorld, options, [&](Group& group) {
    group.set_trace(&trace);
    body(group, crossed);
    group.set_trace(nullptr);
    group.barrier();
  }));
  EXPECT_EQ(trace.lost(), 0u);
  reported = crossed.reported;
  return crossed.traced(trace);
}

using Expected = std::map<std::string, uint64_t>;

TEST(TracedCalls, SpansOfNormalModeCarryEveryByteThatCrosses) {
  for (const Staging staging : {Staging::direct, Staging::ring}) {
    for (const Layout layout : {Layout::rank_major, Layout::expert_major}) {
      for (const CombineOrder order : {CombineOrder::per_rank, CombineOrder::per_route}) {
        if (layout == Layout::rank_major && order == CombineOrder::per_route) continue;
        SCOPED_TRACE(testing::Message() << "ring " << (staging == Staging::ring) << ", expert-major "
                                        << (layout == Layout::expert_major) << ", per_route "
                                        << (order == CombineOrder::per_route));
        uint64_t sent = 0, returned = 0;
        const Expected out = traced_bytes(sent, [&](Group& group, Crossed& crossed) {
          NormalRig rig(group, NormalRig::config(staging, layout));
          rig.dispatch();
          crossed.reported += rig.exchange.last_call().remote_bytes;
          group.barrier();
        });
        EXPECT_GT(sent, 0u);
        EXPECT_EQ(out, (Expected{{staging == Staging::ring ? "ring_send" : "send_rows", sent}}));
        const Expected both = traced_bytes(returned, [&](Group& group, Crossed& crossed) {
          NormalRig rig(group, NormalRig::config(staging, layout));
          const auto d = rig.dispatch();
          switchyard::CombineOptions o;
          o.order = order;
          rig.exchange.combine(d.x, d.handle, rig.out.data(), o);
          crossed.reported += rig.exchange.last_call().remote_bytes;
          group.barrier();
        });
        EXPECT_GT(returned, 0u);
        uint64_t sum = 0;
        for (const auto& [name, bytes] : both) sum += bytes;
        EXPECT_EQ(sum, sent + returned);
      }
    }
  }
}

TEST(TracedCalls, SpansOfLowLatencyCarryEveryByteThatCrosses) {
  for (const CombineOrder order : {CombineOrder::per_rank, CombineOrder::per_route}) {
    uint64_t sent = 0, returned = 0;
    const Expected out = traced_bytes(sent, [&](Group& group, Crossed& crossed) {
      LowLatencyRig rig(group);
      rig.dispatch();
      crossed.reported += rig.exchange.last_call().remote_bytes;
      group.barrier();
    });
    EXPECT_GT(sent, 0u);
    EXPECT_EQ(out, (Expected{{"send_rows", sent}}));
    const Expected both = traced_bytes(returned, [&](Group& group, Crossed& crossed) {
      LowLatencyRig rig(group);
      rig.dispatch();
      rig.combine(order);
      crossed.reported += rig.exchange.last_call().remote_bytes;
      group.barrier();
    });
    EXPECT_GT(returned, 0u);
    EXPECT_EQ(both, (Expected{{"return_rows", returned}, {"send_rows", sent}}));
  }
  uint64_t reported = 0;
  const Expected flat = traced_bytes(reported, [&](Group& group, Crossed& crossed) {
    LowLatencyRig rig(group, plain_rows());
    rig.exchange.moe_all_to_all(rig.x(), rig.expert_ids(), rig.out.data());
    crossed.reported += rig.exchange.last_call().remote_bytes;
    group.barrier();
  });
  EXPECT_EQ(flat.size(), 2u);
  EXPECT_EQ(flat.at("send_rows") + flat.at("return_rows"), reported);
}

TEST(TracedCalls, SpansOfTheLedgerCombineCarryEveryByteThatCrosses) {
  uint64_t reported = 0;
  const Expected traced = traced_bytes(reported, [&](Group& group, Crossed& crossed) {
    NormalRig rig(group, NormalRig::config(Staging::direct, Layout::expert_major));
    const auto d = rig.dispatch();
    switchyard::LedgerConfig c;
    c.hidden = NormalRig::kHidden;
    c.num_experts = NormalRig::kExperts;
    c.topk = NormalRig::kTopk;
    c.max_tokens = NormalRig::kTokens;
    c.dtype = switchyard::DType::bf16;
    switchyard::LedgerCombine ledger(group, c);
    const auto prepared = ledger.prepare(d.handle.ledger());
    ledger.combine(d.x, rig.weights.data(), prepared, rig.out.data());
    crossed.reported += ledger.last_call().remote_bytes;
    group.barrier();
  });
  EXPECT_GT(reported, 0u);
  EXPECT_EQ(traced.at("return_segments"), reported);
  EXPECT_EQ(traced.size(), 2u);  // the other one is the dispatch's send_rows
}

TEST(TracedCalls, SpansOfAFusedLayerCarryEveryByteThatCrosses) {
  uint64_t reported = 0;
  const Expected traced = traced_bytes(reported, [&](Group& group, Crossed& crossed) {
    FusedMoeRig rig(group);
    rig.round();
    crossed.reported += rig.layer.last_call().remote_bytes;
    group.barrier();
  });
  EXPECT_EQ(traced.size(), 2u);
  EXPECT_GT(traced.at("pull_rows"), 0u);
  EXPECT_EQ(traced.at("pull_rows") + traced.at("return_rows"), reported);
}

/// For a call, every worker has spans with all kinds of work. A wait that was already satisfied has no span.
TEST(TracedCalls, AFusedLayerHasItsTilesAndItsCall) {
  const auto options = options_with(60s);
  Trace trace = trace_for(options);
  expect_all_ok(outcomes(kWorld, options, [&](Group& group) {
    FusedMoeRig rig(group);
    group.set_trace(&trace);
    rig.round();
    group.set_trace(nullptr);
    group.barrier();
  }));
  std::map<std::string, int> spans, rows;
  for (const auto& s : trace.slices()) {
    ++spans[s.name];
    rows[s.name] += static_cast<int>(s.arg);
    if (s.category == "wait") {
      EXPECT_TRUE(s.arg >= -1 && s.arg < kWorld) << s.name << " " << s.arg;
    }
  }
  constexpr int kRoutes = kWorld * static_cast<int>(FusedMoeRig::kTokens) * FusedMoeRig::kTopk;
  EXPECT_EQ(rows["layer"], kWorld * FusedMoeRig::kTokens);
  EXPECT_EQ(spans["plan"], 2 * kWorld);
  EXPECT_EQ(spans["exchange_counts"], kWorld);
  EXPECT_EQ(rows["expert_up"], kRoutes);
  EXPECT_EQ(rows["expert_down"], kRoutes);
  EXPECT_EQ(rows["pull_rows"], kRoutes);
  EXPECT_EQ(rows["return_rows"], kRoutes);
  EXPECT_EQ(rows["sum_returned"], kRoutes);
  EXPECT_EQ(spans["sum_returned"], kWorld * FusedMoeRig::kTokens);
}

/// Records of one track, oldest first, with times in ticks.
std::vector<TraceRecord> records_of(const Trace& trace, int rank, int track) {
  std::vector<TraceRecord> all;
  for (size_t i = 0; i < trace.tracer(rank)->size(track); ++i) all.push_back(trace.tracer(rank)->record(track, i));
  return all;
}

/// Whether a call has to wait for rows depends on the machine, so calls are made until one has to.
TEST(TracedCalls, AWaitForRowsEndsWhereTheirSumBegins) {
  constexpr int kMaxCalls = 20000;
  auto options = options_with(60s);
  options.num_warps = 1;
  Trace trace = trace_for(options);
  std::atomic<bool> seen{false};
  expect_all_ok(outcomes(kWorld, options, [&](Group& group) {
    LowLatencyRig rig(group, plain_rows());
    for (int call = 0; call < kMaxCalls; ++call) {
      group.set_trace(&trace);
      rig.exchange.moe_all_to_all(rig.x(), rig.expert_ids(), rig.out.data());
      group.set_trace(nullptr);
      const std::vector<TraceRecord> mine = records_of(trace, group.rank(), 0);
      for (size_t i = 0; i < mine.size(); ++i) {
        if (mine[i].event != static_cast<uint16_t>(Event::wait_returned)) continue;
        EXPECT_TRUE(mine[i].arg >= 0 && mine[i].arg < kWorld);
        ASSERT_LT(i + 1, mine.size());
        EXPECT_EQ(mine[i + 1].event, static_cast<uint16_t>(Event::sum_returned));
        EXPECT_EQ(mine[i + 1].begin_ns, mine[i].end_ns);
        seen = true;
      }
      group.barrier();
      const bool enough = seen;
      group.barrier();  // all have read `seen`
      if (enough) break;
      if (group.rank() == 0) trace.clear();
      group.barrier();
    }
  }));
  EXPECT_TRUE(seen) << "no call of " << kMaxCalls << " waited for rows";
}

/// Delay of the late rank, which is much longer than a call currently takes on this machine, so the other ranks wait only for
/// the late rank; at least `least`. Collective. `call` makes a call.
using Slowest = std::atomic<std::chrono::nanoseconds::rep>;
std::chrono::nanoseconds lateness(Group& group, std::chrono::nanoseconds least, Slowest& slowest,
                                  const std::function<void()>& call) {
  for (int i = 0; i < 4; ++i) {
    group.barrier();
    const auto begin = std::chrono::steady_clock::now();
    call();
    const std::chrono::nanoseconds took = std::chrono::steady_clock::now() - begin;
    for (auto max = slowest.load(); max < took.count() && !slowest.compare_exchange_weak(max, took.count());) {
    }
  }
  group.barrier();
  return std::max(least, std::chrono::nanoseconds(4 * slowest.load()));
}

/// Waits on ranks other than `late` that name it, by phase. Long waits are longer than half of its delay: "long" counts those
/// that name it, and "others" those that name another rank.
using Named = std::map<std::string, int>;
Named waits_for(const Trace& trace, int late, std::chrono::nanoseconds delay) {
  Named named;
  for (const auto& s : trace.slices()) {
    if (s.rank == late || s.category != "wait" || s.name == "barrier") continue;
    if (s.duration_us > 0.5e-3 * static_cast<double>(delay.count())) ++named[s.arg == late ? "long" : "others"];
    if (s.arg == late) ++named[s.name];
  }
  return named;
}

/// `named_with` makes calls in which one rank is late by at least `least`, and sets `wanted` to the number of waits for it. The
/// machine may pause the other ranks as well: then they wait for each other, or come after the late rank. A longer delay
/// exceeds such pauses. `phase`, if not empty, is that of all waits for the late rank.
void expect_late_named(const std::string& phase,
                       const std::function<Named(std::chrono::nanoseconds least, int& wanted)>& named_with) {
  Named named;
  int wanted = 0;
  for (const std::chrono::milliseconds least : {40ms, 400ms, 2000ms}) {
    named = named_with(least, wanted);
    const bool in_phase = phase.empty() || named[phase] >= wanted;
    if (in_phase && named["long"] >= wanted && named["others"] * 4 <= named["long"]) return;
  }
  EXPECT_GE(phase.empty() ? wanted : named[phase], wanted) << phase;
  EXPECT_GE(named["long"], wanted);
  EXPECT_LE(named["others"] * 4, named["long"]) << named["others"] << " long waits name a rank that was not late";
}

bool has_wait_for_rows(const Trace& trace, int of) {
  const Named named = waits_for(trace, of, 1s);
  return named.contains("wait_message") || named.contains("wait_returned");
}

/// Makes calls until one waits for rows of rank `of`. Collective.
void wait_for_rows(Group& group, LowLatencyRig& rig, Trace& trace, int of, std::atomic<bool>& seen) {
  constexpr int kMaxBatches = 100, kRounds = 50;
  for (int batch = 0; batch < kMaxBatches && !seen; ++batch) {
    group.set_trace(&trace);
    for (int i = 0; i < kRounds; ++i) rig.round();
    group.set_trace(nullptr);
    group.barrier();
    if (group.rank() == 0) {
      seen = has_wait_for_rows(trace, of);
      trace.clear();
    }
    group.barrier();
  }
}

/// One rank is late in every call. Whether its entry is observed before its rows arrive depends on the machine: if all its rows
/// always arrive with its entry, further calls are made, in which no rank is late on purpose.
TEST(TracedCalls, WaitsOfLowLatencyNameTheLateRank) {
  constexpr int kLate = 2, kMaxRounds = 20;
  const auto options = options_with(60s);
  expect_late_named("wait_entered", [&](std::chrono::nanoseconds least, int& wanted) {
    Trace trace = trace_for(options), more = trace_for(options);
    std::atomic<bool> enough{false};
    Slowest slowest{0};
    std::chrono::nanoseconds delay{};
    int rounds = 0;
    expect_all_ok(outcomes(kWorld, options, [&](Group& group) {
      LowLatencyRig rig(group);
      const auto mine = lateness(group, least, slowest, [&] { rig.dispatch(), rig.combine(); });
      if (group.rank() == 0) delay = mine;
      const auto late = [&](auto&& call) {
        group.barrier();
        if (group.rank() == kLate) std::this_thread::sleep_for(mine);
        group.set_trace(&trace);
        call();
        group.set_trace(nullptr);
      };
      for (int round = 1; round <= kMaxRounds && !enough; ++round) {
        late([&] { rig.dispatch(); });
        late([&] { rig.combine(); });
        group.barrier();
        if (group.rank() == 0) {
          enough = has_wait_for_rows(trace, kLate);
          rounds = round;
        }
        group.barrier();
      }
      wait_for_rows(group, rig, more, kLate, enough);
    }));
    EXPECT_TRUE(enough) << "no wait for rows of the late rank";
    wanted = 4 * rounds;  // two other ranks, two calls
    return waits_for(trace, kLate, delay);
  });
}

/// Every token has rows from all ranks, and those from the late rank (the highest-numbered one) arrive some time after its
/// entry. An implementation that guesses would name the first rank.
TEST(TracedCalls, WaitsOfTheLedgerCombineNameTheLateSender) {
  constexpr int kLate = 2, kCalls = 4;
  for (const int64_t hidden : {8192, 8191}) {  // sentinel rows, and others
    SCOPED_TRACE(hidden);
    LedgerScenario s;
    s.problem.world = kWorld;
    s.problem.experts = kWorld;
    s.problem.topk = kWorld;
    s.tokens = {16, 16, 16};
    s.hidden = hidden;
    const auto c = make_ledger_case(s);
    const auto options = options_with(60s, switchyard::LedgerCombine::heap_bytes(make_config(*c), kWorld));
    expect_late_named("", [&](std::chrono::nanoseconds least, int& wanted) {
      Trace trace = trace_for(options);
      Slowest slowest{0};
      std::chrono::nanoseconds delay{};
      expect_all_ok(outcomes(kWorld, options, [&](Group& group) {
        switchyard::LedgerCombine ledger(group, make_config(*c));
        LedgerRankData data(*c, group.rank(), 0);
        const auto prepared = ledger.prepare(data.tables());
        const auto combine = [&] { ledger.combine(data.y(), data.probs(), prepared, data.out().data()); };
        const auto mine = lateness(group, least, slowest, combine);
        if (group.rank() == 0) delay = mine;
        for (int call = 0; call < kCalls; ++call) {
          group.barrier();
          if (group.rank() == kLate) std::this_thread::sleep_for(mine);
          group.set_trace(&trace);
          combine();
          group.set_trace(nullptr);
        }
        group.barrier();
      }));
      wanted = 2 * kCalls;
      return waits_for(trace, kLate, delay);
    });
  }
}

TEST(TracedCalls, WaitsForRingsNameARankAndHoldNoWork) {
  const auto options = options_with(60s);
  Trace trace = trace_for(options);
  expect_all_ok(outcomes(kWorld, options, [&](Group& group) {
    NormalRig rig(group, NormalRig::config(Staging::ring));
    group.set_trace(&trace);
    for (int i = 0; i < 50; ++i) rig.round();
    group.set_trace(nullptr);
    group.barrier();
  }));
  uint64_t waits = 0;
  for (int rank = 0; rank < kWorld; ++rank) {
    for (int track = 0; track < options.num_warps; ++track) {
      std::vector<TraceRecord> waited, worked;
      for (const TraceRecord& r : records_of(trace, rank, track)) {
        if (r.event == static_cast<uint16_t>(Event::wait_ring)) waited.push_back(r);
        if (r.event == static_cast<uint16_t>(Event::ring_send) || r.event == static_cast<uint16_t>(Event::ring_receive))
          worked.push_back(r);
      }
      for (const TraceRecord& r : worked) EXPECT_GT(r.arg, 0) << "a span without rows";
      for (const TraceRecord& wait : waited) {
        EXPECT_TRUE(wait.arg >= 0 && wait.arg < kWorld) << wait.arg;
        for (const TraceRecord& r : worked) EXPECT_TRUE(r.begin_ns >= wait.end_ns || r.end_ns <= wait.begin_ns);
      }
      waits += waited.size();
    }
  }
  EXPECT_GT(waits, 0u);
}

TEST(TracedCalls, ALongRunKeepsItsEnd) {
  const auto options = options_with(60s);
  Trace trace = trace_for(options, 16);
  uint64_t last_begins = 0;
  expect_all_ok(outcomes(kWorld, options, [&](Group& group) {
    LowLatencyRig rig(group);
    group.set_trace(&trace);
    for (int i = 0; i < 20; ++i) rig.round();
    group.barrier();
    if (group.rank() == 0) last_begins = switchyard::detail::Tracer::ticks();
    group.barrier();
    rig.round();
    group.set_trace(nullptr);
    group.barrier();
  }));
  EXPECT_GT(trace.lost(), 0u);
  for (int rank = 0; rank < kWorld; ++rank) {
    const auto calls = records_of(trace, rank, switchyard::detail::kHostTrack);
    ASSERT_EQ(calls.size(), 16u);
    EXPECT_EQ(calls.back().event, static_cast<uint16_t>(Event::combine));
    EXPECT_GE(calls.back().begin_ns, last_begins);
  }
}

}  // namespace
}  // namespace harness
