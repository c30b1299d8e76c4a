// SPDX-License-Identifier: Apache-2.0
// When a construction fails, all ranks report the same error, and the group stays usable. Deadline tests: where each deadline
// applies, changes at run time, and groups without a deadline.
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "faults/watched_calls.hpp"
#include "switchyard/row_memory.hpp"

namespace harness {
namespace {

using namespace std::chrono_literals;
using std::chrono::milliseconds;
using switchyard::Error;
using switchyard::ErrorCode;
using switchyard::Group;
using switchyard::GroupOptions;
using switchyard::LedgerCombine;
using switchyard::LedgerConfig;
using switchyard::NormalConfig;
using switchyard::RowMemory;
using switchyard::Staging;

/// Creates an object of one mode with a config that fits, is too large for the heap, is invalid, or differs from that of the
/// peers.
enum class Size { fits, too_large, wrong, other };
struct Mode {
  const char* name;
  std::function<void(Group&, Size)> make_and_call;
};
std::ostream& operator<<(std::ostream& out, const Mode& m) { return out << m.name; }

template <class Config>
Config sized(Config config, Size size) {
  if (size == Size::too_large) config.max_tokens = 60000;
  if (size == Size::wrong) config.topk = 99;
  if (size == Size::other) config.max_tokens += 1;
  return config;
}

std::vector<Mode> modes() {
  const auto normal = [](Staging staging) {
    return [staging](Group& group, Size size) {
      NormalConfig config = NormalRig::config(staging);
      if (size == Size::too_large) config.ring = {32, 6, 4096};
      NormalRig(group, sized(config, size)).round();
    };
  };
  return {{"normal", normal(Staging::direct)},
          {"ring", normal(Staging::ring)},
          {"low_latency", [](Group& group, Size size) { LowLatencyRig(group, sized(LowLatencyRig::config(), size)).round(); }},
          {"fused", [](Group& group, Size size) { FusedMoeRig(group, sized(FusedMoeRig::config(), size)).round(); }},
          {"ledger", [](Group& group, Size size) {
             if (size == Size::fits) return SmallLedger(group).combine();
             LedgerCombine(group, sized(make_config(*SmallLedger::make_case(group.size())), size));
           }}};
}

class Construction : public testing::TestWithParam<Mode> {};

/// Construction fails twice, on every rank or on only one; then a smaller object is created and used, at the same heap offset
/// on all ranks.
TEST_P(Construction, FailsAlikeAndLeavesTheGroupUsable) {
  constexpr int kWorld = 3;
  const std::pair<Size, ErrorCode> failures[] = {{Size::too_large, ErrorCode::heap_exhausted},
                                                 {Size::wrong, ErrorCode::invalid_argument},
                                                 {Size::other, ErrorCode::mismatch}};
  for (const auto& [size, code] : failures) {
    for (const int culprit : {-1, 0, 2}) {  // -1: all ranks
      if (culprit < 0 && size == Size::other) continue;
      std::vector<Outcome> first(kWorld), second(kWorld);
      const auto all = outcomes(kWorld, options_with(600s, size_t{1} << 20), [&, size = size](Group& group) {
        const auto r = static_cast<size_t>(group.rank());
        const Size mine = culprit < 0 || culprit == group.rank() ? size : Size::fits;
        std::this_thread::sleep_for(milliseconds(5 * group.rank()));
        first[r] = outcome_of([&] { GetParam().make_and_call(group, mine); });
        EXPECT_EQ(group.heap_used(), 0u);
        second[r] = outcome_of([&] { GetParam().make_and_call(group, mine); });
        EXPECT_EQ(group.heap_used(), 0u);
        GetParam().make_and_call(group, Size::fits);
        group.barrier();
      });
      for (size_t r = 0; r < kWorld; ++r) {
        EXPECT_EQ(code_name(all[r].code), "ok") << all[r].text;
        EXPECT_EQ(code_name(first[r].code), code_name(code)) << first[r].text;
        EXPECT_EQ(first[r].text, first[0].text);
        EXPECT_EQ(second[r].text, first[0].text);
      }
      const std::string culprit_text = "rank " + std::to_string(std::max(culprit, 0));
      if (size == Size::too_large) {
        EXPECT_NE(first[0].text.find(" bytes of the symmetric heap, of which "), std::string::npos) << first[0].text;
        EXPECT_NE(first[0].text.find("::heap_bytes(...), or to the sum over its objects"), std::string::npos) << first[0].text;
      }
      if (size != Size::other) {
        EXPECT_NE(first[0].text.find(culprit_text), std::string::npos) << first[0].text;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Faults, Construction, testing::ValuesIn(modes()),
                         [](const auto& m) { return std::string(m.param.name); });

/// Each rank has released different objects, as may happen in Python before a garbage collection.
TEST_P(Construction, FindsAPlaceThatIsFreeOnAllRanks) {
  constexpr int kWorld = 3, kObjects = 4;
  for (const unsigned seed : {1u, 2u, 3u}) {
    const auto all = outcomes(kWorld, options_with(600s, size_t{8} << 20), [&](Group& group) {
      std::vector<RowMemory> held;
      for (int i = 0; i < kObjects; ++i) held.emplace_back(group, 40000 + 70000 * static_cast<size_t>(i));
      for (int i = 0; i < kObjects; ++i)
        if ((seed * 7 + static_cast<unsigned>(i * (group.rank() + 1))) % 3 == 0) held[static_cast<size_t>(i)] = {};
      std::vector<RowMemory> more;
      for (int i = 0; i < 2; ++i) {
        GetParam().make_and_call(group, Size::fits);
        more.emplace_back(group, 50000);
      }
      held.clear();
      GetParam().make_and_call(group, Size::fits);
      more.clear();
      group.barrier();
      EXPECT_EQ(group.heap_used(), 0u);
    });
    for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
  }
}

TEST(Place, IsSoughtWhereAllRanksHaveRoom) {
  const auto all = outcomes(2, options_with(600s, size_t{1} << 20), [&](Group& group) {
    constexpr size_t kBytes = 300 << 10;
    std::vector<RowMemory> held;
    for (int i = 0; i < 3; ++i) held.emplace_back(group, kBytes);
    held[group.rank() == 0 ? 0 : 2] = {};
    const Outcome none = outcome_of([&] { RowMemory(group, kBytes); });
    EXPECT_EQ(code_name(none.code), "heap_exhausted") << none.text;
    EXPECT_NE(none.text.find("RowMemory, rank 0: needs 307200 bytes"), std::string::npos) << none.text;
    EXPECT_NE(none.text.find("that are gone here"), std::string::npos) << none.text;
    held[group.rank() == 0 ? 2 : 0] = {};
    const RowMemory first(group, kBytes), third(group, kBytes);
    held.clear();
  });
  for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
}

/// One rank spends more time loading its weights than a call may take.
TEST_P(Construction, WaitsForTheRendezvousDeadline) {
  const auto all = outcomes(2, options_with(100ms), [&](Group& group) {
    if (group.rank() == 1) std::this_thread::sleep_for(600ms);
    const Outcome made = outcome_of([&] { GetParam().make_and_call(group, Size::wrong); });
    EXPECT_EQ(code_name(made.code), "invalid_argument") << made.text;
    group.set_timeout(60s);  // allows for calls on a loaded machine
    GetParam().make_and_call(group, Size::fits);
  });
  for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
}

/// One rank fails in the caller's code before its construction begins, and reports the failure.
TEST_P(Construction, EndsWithTheErrorOfARankThatDoesNotBegin) {
  constexpr int kWorld = 3;
  for (const int culprit : {0, 2}) {
    std::vector<Outcome> first(kWorld);
    const auto all = outcomes(kWorld, options_with(600s, size_t{1} << 20), [&](Group& group) {
      first[static_cast<size_t>(group.rank())] = outcome_of([&] {
        if (group.rank() != culprit) return GetParam().make_and_call(group, Size::fits);
        group.agree("a model", [] { throw Error(ErrorCode::io, "no such file"); });
      });
      EXPECT_EQ(group.heap_used(), 0u);
      GetParam().make_and_call(group, Size::fits);
      group.barrier();
    });
    for (size_t r = 0; r < kWorld; ++r) {
      EXPECT_EQ(code_name(all[r].code), "ok") << all[r].text;
      EXPECT_EQ(code_name(first[r].code), "io") << first[r].text;
      EXPECT_NE(first[r].text.find("rank " + std::to_string(culprit) + ": no such file"), std::string::npos) << first[r].text;
    }
  }
}

TEST(Agreement, GathersOrThrowsOnAllRanksAlike) {
  constexpr int kWorld = 3;
  const auto all = outcomes(kWorld, options_with(100ms), [](Group& group) {
    if (group.rank() == 1) std::this_thread::sleep_for(600ms);
    int32_t mine = 0, gathered[kWorld] = {};
    const auto share = [&] { mine = 10 + group.rank(); };
    group.agree("a model", share, &mine, sizeof mine, gathered);
    EXPECT_EQ(std::vector(gathered, gathered + kWorld), (std::vector<int32_t>{10, 11, 12}));
    const Outcome subjects = outcome_of([&] { group.agree(group.rank() == 2 ? "a layer" : "a model", share); });
    EXPECT_EQ(code_name(subjects.code), "mismatch");
    EXPECT_NE(subjects.text.find("rank 0 makes a model and rank 2 a layer"), std::string::npos) << subjects.text;
    const Outcome status = outcome_of([&] { group.agree("a model", share, &mine, sizeof mine, nullptr); });
    EXPECT_EQ(code_name(status.code), "invalid_argument");
    EXPECT_NE(status.text.find("a model, rank 0: a model: all is null, with bytes = 4"), std::string::npos) << status.text;
    group.set_timeout(60s);
    group.barrier();
  });
  for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
}

// --- Deadlines

/// Setup functions other than object constructors, including wake().
TEST(SetupDeadline, IsThatOfTheRendezvous) {
  const auto all = outcomes(2, options_with(100ms), [](Group& group) {
    int ordinary = 0;
    const std::function<void()> steps[] = {[&] { (void)group.register_memory(&ordinary, sizeof ordinary); },
                                           [&] { group.sleep(); }, [&] { group.wake(); }};
    for (const auto& step : steps) {
      if (group.rank() == 1) std::this_thread::sleep_for(600ms);
      step();
    }
  });
  for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
}

TEST(CallDeadline, IsChangedAtRunTime) {
  const auto all = outcomes(2, options_with(600s), [&](Group& group) {
    NormalRig rig(group);
    rig.round();
    for (const milliseconds bad : {0ms, -1ms, milliseconds::min()}) {
      const Outcome o = outcome_of([&] { group.set_timeout(bad); });
      EXPECT_EQ(code_name(o.code), "invalid_argument") << o.text;
      EXPECT_EQ(group.options().timeout, milliseconds(600s));
    }
    group.set_timeout(kSoon);
    EXPECT_EQ(group.options().timeout, kSoon);
    group.barrier();
    if (group.rank() == 1) return;
    rig.dispatch();
  });
  EXPECT_EQ(code_name(all[0].code), "peer_timeout") << all[0].text;
  EXPECT_GE(all[0].report.waited_ms, static_cast<double>(kSoon.count()));
}

/// Durations that exceed 64 bits in nanoseconds, and the minimum and maximum allowed durations.
TEST(CallDeadline, MayBeAnyDuration) {
  using std::chrono::nanoseconds;
  const milliseconds max = std::chrono::duration_cast<milliseconds>(nanoseconds::max());
  for (const milliseconds never : {milliseconds::max(), milliseconds::max() / 2, max, max + 1ms, 2 * max + 100ms,
                                   milliseconds(int64_t{1} << 62), milliseconds(std::chrono::hours(24 * 365 * 20))}) {
    GroupOptions options = options_with(never);
    options.rendezvous_timeout = never;
    for (const auto& mode : modes()) {
      const auto all = outcomes(2, options, [&](Group& group) {
        if (group.rank() == 1) std::this_thread::sleep_for(10ms);
        group.barrier();
        if (group.rank() == 0) std::this_thread::sleep_for(10ms);
        mode.make_and_call(group, Size::fits);
        (void)group.register_memory(nullptr, 0);
      });
      for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << never.count() << ", " << mode.name << ": " << o.text;
    }
  }
}

TEST(CallDeadline, ZeroAndLessAreRefused) {
  for (const milliseconds bad : {0ms, -1ms, milliseconds::min()}) {
    GroupOptions options;
    options.timeout = bad;
    EXPECT_EQ(code_name(outcome_of([&] { (void)Group::in_process(1, options); }).code), "invalid_argument");
    options = GroupOptions();
    options.rendezvous_timeout = bad;
    EXPECT_EQ(code_name(outcome_of([&] { (void)Group::in_process(1, options); }).code), "invalid_argument");
  }
}

}  // namespace
}  // namespace harness
