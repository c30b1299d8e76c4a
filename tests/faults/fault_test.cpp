// SPDX-License-Identifier: Apache-2.0
// Faults among threads: ranks that never call, misuse on one rank, mismatches, exhaustion; errors by kind, rank and field;
// nothing hangs. Deadlines are long where a peer must be told at once (a lost message would show as PeerTimeout) and short
// where time must run out.
#include <gtest/gtest.h>

#include <barrier>
#include <chrono>
#include <thread>

#include "faults/fault_misuses.hpp"

namespace harness {
namespace {

using namespace std::chrono_literals;
using switchyard::Error;
using switchyard::Group;
using switchyard::Layout;
using switchyard::NormalConfig;
using switchyard::NormalExchange;
using switchyard::Staging;

// --- A rank that never comes
// ---------------------------------------------------------------------------------------------------------

struct Silence {
  const char* name;
  const char* operation;
  const char* site;
  uint64_t call;
  Staging staging;
  std::function<void(FaultRig&, bool silent)> body;  ///< the silent rank leaves out the last call
};
std::ostream& operator<<(std::ostream& out, const Silence& s) { return out << s.name; }

std::vector<Silence> silences() {
  auto dispatch = [](FaultRig& rig, bool silent) {
    if (!silent) rig.dispatch();
  };
  auto second_dispatch = [](FaultRig& rig, bool silent) {
    rig.round();
    if (!silent) rig.dispatch();
  };
  auto cached = [](FaultRig& rig, bool silent) {
    const auto handle = rig.dispatch().handle;
    if (!silent) (void)rig.exchange.dispatch(rig.x(), handle);
  };
  auto combine = [](FaultRig& rig, bool silent) {
    const Dispatched d = rig.dispatch();
    if (!silent) rig.combine(d);
  };
  return {{"dispatch", "dispatch", "counts", 1, Staging::direct, dispatch},
          {"second_dispatch", "dispatch", "counts", 3, Staging::direct, second_dispatch},
          {"cached", "dispatch", "placement", 2, Staging::direct, cached},
          {"combine", "combine", "placement", 2, Staging::direct, combine},
          {"ring_dispatch", "dispatch", "counts", 1, Staging::ring, dispatch},
          {"ring_cached", "dispatch", "placement", 2, Staging::ring, cached},
          {"ring_combine", "combine", "placement", 2, Staging::ring, combine}};
}

class SilentRank : public testing::TestWithParam<Silence> {};

TEST_P(SilentRank, OthersReportItInFull) {
  const Silence& s = GetParam();
  for (const int world : {2, 4}) {
    const int silent = world - 1;
    std::barrier gone(world);
    const auto all = outcomes(world, options_with(kSoon), [&](Group& group) {
      FaultRig rig(group, FaultRig::config(s.staging));
      const auto outcome = outcome_of([&] { s.body(rig, group.rank() == silent); });
      gone.arrive_and_wait();
      if (group.rank() != silent) {
        // Sticky: every later call ends at once, and says why.
        EXPECT_EQ(code_name(outcome_of([&] { rig.dispatch(); }).code), "peer_failed");
        EXPECT_EQ(code_name(outcome_of([&] { group.check(); }).code), "peer_failed");
        EXPECT_EQ(code_name(outcome_of([&] { NormalExchange again(group, FaultRig::config()); }).code), "peer_failed");
      } else {
        const auto late = outcome_of([&] { s.body(rig, false); });
        EXPECT_EQ(code_name(late.code), "peer_failed") << late.text;
        EXPECT_EQ(code_name(late.reason), "peer_timeout") << late.text;
      }
      if (outcome.code == ErrorCode::peer_timeout) throw switchyard::PeerTimeout(outcome.report);
      if (outcome.code != ErrorCode::ok) throw Error(outcome.code, outcome.text);
    });
    for (int r = 0; r < world; ++r) {
      const Outcome& o = all[static_cast<size_t>(r)];
      if (r == silent) {
        EXPECT_EQ(code_name(o.code), "ok") << o.text;
        continue;
      }
      EXPECT_EQ(code_name(o.code), "peer_timeout") << o.text;
      EXPECT_STREQ(o.report.operation, s.operation);
      EXPECT_STREQ(o.report.site, s.site);
      EXPECT_EQ(o.report.call, s.call);
      EXPECT_EQ(o.report.waiting_rank, r);
      EXPECT_EQ(o.report.awaited_rank, silent);
      EXPECT_GT(static_cast<int64_t>(o.report.expected - o.report.seen), 0);
      EXPECT_GT(o.report.waited_ms, 0);
      EXPECT_NE(o.text.find("rank " + std::to_string(silent)), std::string::npos) << o.text;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Faults, SilentRank, testing::ValuesIn(silences()),
                         [](const auto& s) { return std::string(s.param.name); });

TEST(SilentRankElsewhere, ConstructionAndBarrier) {
  auto options = options_with(kSoon);
  options.rendezvous_timeout = kSoon;
  for (const bool barrier : {false, true}) {
    const auto all = outcomes(3, options, [&](Group& group) {
      if (group.rank() == 1) return;
      if (barrier) {
        group.barrier();
      } else {
        NormalExchange exchange(group, FaultRig::config());
      }
    });
    EXPECT_EQ(code_name(all[1].code), "ok");
    for (const size_t r : {size_t{0}, size_t{2}}) {
      EXPECT_EQ(code_name(all[r].code), "peer_timeout") << all[r].text;
      EXPECT_EQ(all[r].report.awaited_rank, 1);
      EXPECT_EQ(all[r].report.waiting_rank, static_cast<int>(r));
    }
  }
}

/// Ten queued calls after a fault cost one deadline, not ten: with a minute each, the test would not end in time.
TEST(SilentRankElsewhere, LaterCallsFailAtOnce) {
  const auto all = outcomes(2, options_with(kSoon), [&](Group& group) {
    FaultRig rig(group);
    if (group.rank() == 1) return;
    EXPECT_EQ(code_name(outcome_of([&] { rig.dispatch(); }).code), "peer_timeout");
    for (int i = 0; i < 1000; ++i) EXPECT_EQ(code_name(outcome_of([&] { rig.dispatch(); }).code), "peer_failed");
  });
  EXPECT_EQ(code_name(all[0].code), "ok") << all[0].text;
}

// --- Misuse on one rank
// ----------------------------------------------------------------------------------------------------------------

class MisuseOnOneRank : public testing::TestWithParam<Misuse> {};

TEST_P(MisuseOnOneRank, ThrowsThereAndEndsThePeers) {
  const Misuse& m = GetParam();
  for (const Staging staging : {Staging::direct, Staging::ring}) {
    constexpr int kWorld = 3, kBad = 1;
    const auto all = outcomes(kWorld, options_with(60s), [&](Group& group) {
      FaultRig rig(group, FaultRig::config(staging));
      m.body(rig, group.rank() == kBad);
    });
    EXPECT_EQ(code_name(all[kBad].code), code_name(m.code)) << all[kBad].text;
    EXPECT_NE(all[kBad].text.find(m.in_text), std::string::npos) << all[kBad].text;
    for (const size_t r : {size_t{0}, size_t{2}}) {
      EXPECT_EQ(code_name(all[r].code), "peer_failed") << all[r].text;
      EXPECT_EQ(all[r].failed_rank, kBad);
      EXPECT_EQ(code_name(all[r].reason), code_name(m.code)) << all[r].text;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Faults, MisuseOnOneRank, testing::ValuesIn(misuses()),
                         [](const auto& m) { return std::string(m.param.name); });

// --- Different calls
// -------------------------------------------------------------------------------------------------------------------

TEST(Mismatch, DispatchOptions) {
  using Spoil = std::function<void(DispatchOptions&)>;
  const Spoil spoils[] = {[](DispatchOptions& o) { o.quantize = ScaleKind::f32; },
                          [](DispatchOptions& o) { o.padding = switchyard::Padding::unspecified; },
                          [](DispatchOptions& o) { o.size = switchyard::SizePolicy::worst_case; },
                          [](DispatchOptions& o) { o.overflow = switchyard::Overflow::drop_and_report; }};
  for (const Staging staging : {Staging::direct, Staging::ring}) {
    for (const auto& spoil : spoils) {
      expect_mismatch(outcomes(3, options_with(60s), [&](Group& group) {
        FaultRig rig(group, FaultRig::config(staging));
        DispatchOptions options;
        if (group.rank() == 2) spoil(options);
        (void)rig.exchange.dispatch(rig.x(), rig.expert_ids(), rig.weights.data(), options);
      }));
    }
  }
}

TEST(Mismatch, WeightsOnSomeRanksOnly) {
  expect_mismatch(outcomes(3, options_with(60s), [&](Group& group) {
    FaultRig rig(group);
    (void)rig.exchange.dispatch(rig.x(), rig.expert_ids(), group.rank() == 1 ? nullptr : rig.weights.data());
  }));
}

TEST(Mismatch, CachedOptionsAndTypes) {
  for (const Staging staging : {Staging::direct, Staging::ring}) {
    expect_mismatch(outcomes(2, options_with(60s), [&](Group& group) {
      FaultRig rig(group, FaultRig::config(staging));
      const auto handle = rig.dispatch().handle;
      DispatchOptions options;
      if (group.rank() == 1) options.quantize = ScaleKind::ue8m0;
      (void)rig.exchange.dispatch(rig.x(), handle, options);
    }));
  }
}

TEST(Mismatch, CombineOptionsAndTypes) {
  for (const Staging staging : {Staging::direct, Staging::ring}) {
    for (const int kind : {0, 1, 2}) {
      expect_mismatch(outcomes(3, options_with(60s), [&](Group& group) {
        FaultRig rig(group, FaultRig::config(staging, Layout::expert_major));
        const Dispatched d = rig.dispatch();
        ConstRows y = d.x;
        CombineOptions options;
        if (group.rank() == 0 && kind == 0) options.order = switchyard::CombineOrder::per_route;
        if (group.rank() == 0 && kind == 1) options.apply_weights = false;
        if (group.rank() == 0 && kind == 2) y.dtype = DType::f16;
        rig.exchange.combine(y, d.handle, rig.out.data(), options);
      }));
    }
  }
}

TEST(Mismatch, Configurations) {
  using Spoil = std::function<void(NormalConfig&)>;
  const Spoil spoils[] = {[](NormalConfig& c) { c.hidden = 128; },
                          [](NormalConfig& c) { c.num_experts = 9; },
                          [](NormalConfig& c) { c.topk = 3; },
                          [](NormalConfig& c) { c.max_tokens = 7; },
                          [](NormalConfig& c) { c.expert_alignment = 2; },
                          [](NormalConfig& c) { c.layout = Layout::expert_major; },
                          [](NormalConfig& c) { c.staging = Staging::ring; }};
  for (const auto& spoil : spoils) {
    const auto all = outcomes(3, options_with(60s), [&](Group& group) {
      NormalConfig config = FaultRig::config();
      if (group.rank() == 1) spoil(config);
      NormalExchange exchange(group, config);
    });
    for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "mismatch") << o.text;
  }
}

// --- Exhaustion
// ------------------------------------------------------------------------------------------------------------------------

TEST(Pool, ExhaustedOnOneRankFailsOnAllAndIsNotSticky) {
  NormalConfig config = FaultRig::config();
  const size_t one = NormalExchange::memory_required(config, 3).pool_bytes;
  config.pool_bytes = one * 3 / 2;
  const auto all = outcomes(3, options_with(60s), [&](Group& group) {
    FaultRig rig(group, config);
    std::vector<Dispatched> held;
    int failures = 0;
    std::vector<switchyard::RowBuffer> fill;  // rank 1's pool is full before the others' are
    const auto handle = rig.dispatch().handle;
    if (group.rank() == 1) {
      const Outcome full = outcome_of([&] {
        while (true) fill.push_back(rig.exchange.allocate_rows(handle, DType::bf16));
      });
      EXPECT_EQ(code_name(full.code), "pool_exhausted") << full.text;
    }
    for (int i = 0; i < 3; ++i) {
      const Outcome o = outcome_of([&] { held.push_back(rig.dispatch()); });
      failures += o.code == ErrorCode::pool_exhausted;
      EXPECT_EQ(code_name(o.code), "pool_exhausted") << o.text;
      EXPECT_NE(o.text.find("rank 1"), std::string::npos) << o.text;
      EXPECT_EQ(code_name(outcome_of([&] { group.check(); }).code), "ok");
    }
    EXPECT_EQ(failures, 3);
    fill.clear();
    group.barrier();
    rig.round();
    rig.round();
  });
  for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
}

TEST(Pool, ExhaustedByStagingOfOrdinaryRows) {
  NormalConfig config = FaultRig::config();
  const auto all = outcomes(2, options_with(60s), [&](Group& group) {
    FaultRig rig(group, config);
    const Dispatched d = rig.dispatch();
    std::vector<uint16_t> y(static_cast<size_t>(d.rows * FaultRig::kHidden), 0x3F80);
    std::vector<switchyard::RowBuffer> fill;
    if (group.rank() == 0)
      (void)outcome_of([&] {
        while (true) fill.push_back(rig.exchange.allocate_rows(d.handle, DType::bf16));
      });
    const ConstRows rows{y.data(), d.rows, FaultRig::kHidden, DType::bf16};
    const Outcome o = outcome_of([&] { rig.exchange.combine(rows, d.handle, rig.out.data()); });
    EXPECT_EQ(code_name(o.code), "pool_exhausted") << o.text;
    fill.clear();
    group.barrier();
    rig.exchange.combine(rows, d.handle, rig.out.data());
    EXPECT_EQ(rig.out[0] & 0x7F80, rig.out[5] & 0x7F80);
  });
  for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
}

TEST(Heap, TooSmallNamesSizes) {
  NormalConfig config = FaultRig::config();
  config.max_tokens = 4096;
  const auto all =
      outcomes(2, options_with(60s, size_t{1} << 20), [&](Group& group) { NormalExchange exchange(group, config); });
  for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "heap_exhausted") << o.text;
}

TEST(Heap, FormulaIsExact) {
  for (const Staging staging : {Staging::direct, Staging::ring}) {
    const NormalConfig config = FaultRig::config(staging, Layout::expert_major);
    const auto all = outcomes(3, options_with(60s, NormalExchange::heap_bytes_for(config, 3)), [&](Group& group) {
      FaultRig rig(group, config);
      EXPECT_GE(group.heap_used(), NormalExchange::memory_required(config, 3).total());
      rig.round();
    });
    for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
  }
}

// --- The rest
// --------------------------------------------------------------------------------------------------------------------------

TEST(Abort, EndsEveryWaitAndNamesTheRank) {
  const auto all = outcomes(3, options_with(60s), [&](Group& group) {
    FaultRig rig(group);
    if (group.rank() == 2) {
      group.abort(static_cast<int32_t>(ErrorCode::io));
      group.abort(static_cast<int32_t>(ErrorCode::system));  // only the first counts
      return;
    }
    rig.dispatch();
  });
  for (const size_t r : {size_t{0}, size_t{1}}) {
    EXPECT_EQ(code_name(all[r].code), "peer_failed") << all[r].text;
    EXPECT_EQ(all[r].failed_rank, 2);
    EXPECT_EQ(code_name(all[r].reason), "io");
  }
}

/// Also the waits of set-up calls: a barrier, the construction of an object.
TEST(Abort, EndsSetUpCallsLongBeforeTheirDeadline) {
  for (const bool barrier : {false, true}) {
    const auto all = outcomes(3, options_with(600s), [&](Group& group) {  // beyond this program's time limit
      if (group.rank() == 2) return group.abort(static_cast<int32_t>(ErrorCode::io));
      if (barrier)
        group.barrier();
      else
        NormalExchange exchange(group, FaultRig::config());
    });
    for (const size_t r : {size_t{0}, size_t{1}}) {
      EXPECT_EQ(code_name(all[r].code), "peer_failed") << all[r].text;
      EXPECT_EQ(all[r].failed_rank, 2);
      EXPECT_EQ(code_name(all[r].reason), "io");
    }
  }
}

TEST(WaitStatistics, NameTheSlowRank) {
  const auto all = outcomes(3, options_with(60s), [&](Group& group) {
    FaultRig rig(group);
    rig.round();
    group.barrier();
    const auto before = group.wait_statistics();
    if (group.rank() == 1) std::this_thread::sleep_for(50ms);
    rig.round();
    const auto after = group.wait_statistics();
    ASSERT_EQ(after.size(), 3u);
    if (group.rank() == 1) return;
    EXPECT_GT(after[1].waits, before[1].waits);
    EXPECT_GT(after[1].total_ms, before[1].total_ms);
    EXPECT_GE(after[1].total_ms, after[1].max_ms);
  });
  for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
}

/// The largest counts that travel in the 24 bits of a flag's value: a record per token of an expert-major source, and with the
/// mark of the end a row per route of a ring's stream.
TEST(Construction, CountsFitTheFlagsThatCarryThem) {
  const auto outcome_with = [](Staging staging, Layout layout, int topk, int64_t max_tokens) {
    NormalConfig config = FaultRig::config(staging, layout);
    config.hidden = 8;
    config.topk = topk;
    config.max_tokens = max_tokens;
    return outcome_of([&] { (void)NormalExchange::memory_required(config, 2); });
  };
  struct Bound {
    Staging staging;
    Layout layout;
    int topk;
    int64_t most;
    const char* in_text;
  };
  const Bound bounds[] = {
      {Staging::direct, Layout::expert_major, 2, 16777215, "max_tokens (expert-major) = 16777216: must be in [0, 16777215]"},
      {Staging::direct, Layout::rank_major, 2, 67108864, "max_tokens = 67108865"},
      {Staging::ring, Layout::expert_major, 1, 8388607, "max_tokens * topk (rows of one ring stream) = 8388608"},
      {Staging::ring, Layout::rank_major, 1, 8388607, "max_tokens * topk (rows of one ring stream) = 8388608"},
  };
  for (const Bound& b : bounds) {
    for (const int64_t fewer : {0, 1}) {
      const Outcome o = outcome_with(b.staging, b.layout, b.topk, b.most - fewer);
      EXPECT_EQ(code_name(o.code), "ok") << o.text;
    }
    const Outcome o = outcome_with(b.staging, b.layout, b.topk, b.most + 1);
    EXPECT_EQ(code_name(o.code), "invalid_argument") << b.in_text;
    EXPECT_NE(o.text.find(b.in_text), std::string::npos) << o.text;
  }
}

TEST(Construction, NamesTheField) {
  using Spoil = std::function<void(NormalConfig&)>;
  const std::pair<const char*, Spoil> spoils[] = {{"hidden", [](NormalConfig& c) { c.hidden = 0; }},
                                                  {"hidden", [](NormalConfig& c) { c.hidden = 4; }},
                                                  {"num_experts", [](NormalConfig& c) { c.num_experts = 0; }},
                                                  {"topk", [](NormalConfig& c) { c.topk = 33; }},
                                                  {"max_tokens", [](NormalConfig& c) { c.max_tokens = -1; }},
                                                  {"expert_alignment", [](NormalConfig& c) { c.expert_alignment = 0; }},
                                                  {"slots",
                                                   [](NormalConfig& c) {
                                                     c.staging = Staging::ring;
                                                     c.ring.slots = 1;
                                                   }},
                                                  {"send_chunk",
                                                   [](NormalConfig& c) {
                                                     c.staging = Staging::ring;
                                                     c.ring.send_chunk = 9;
                                                   }},
                                                  {"num_channels", [](NormalConfig& c) {
                                                     c.staging = Staging::ring;
                                                     c.ring.num_channels = 257;
                                                   }}};
  for (const auto& [field, spoil] : spoils) {
    NormalConfig config = FaultRig::config();
    spoil(config);
    const Outcome o = outcome_of([&] { (void)NormalExchange::memory_required(config, 2); });
    EXPECT_EQ(code_name(o.code), "invalid_argument") << field;
    EXPECT_NE(o.text.find(field), std::string::npos) << o.text;
    const auto all = outcomes(2, options_with(60s), [&](Group& group) { NormalExchange exchange(group, config); });
    for (const Outcome& end : all) {
      const bool told = end.code == ErrorCode::peer_failed && end.reason == ErrorCode::invalid_argument;
      EXPECT_TRUE(end.code == ErrorCode::invalid_argument || told) << end.text;
    }
  }
}

}  // namespace
}  // namespace harness
