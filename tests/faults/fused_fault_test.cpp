// SPDX-License-Identifier: Apache-2.0
// Faults inside a fused layer on the CPU, after its plan: products that throw or take too long, and a rank that dies while
// computing them. fault_stories_test.cpp covers the faults common to all modes.
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <thread>

#include "harness/fleet.hpp"
#include "harness/outcome.hpp"
#include "modes/fused/fused_moe_rig.hpp"

namespace harness {
namespace {

using namespace std::chrono_literals;
using switchyard::ErrorCode;
using switchyard::Group;
using switchyard::detail::FusedMoe;

constexpr int kFusedWorld = 3, kBad = 1;

/// Makes two calls. In the second call, rank kBad runs `action` in a tile.
std::vector<Outcome> with_action(std::chrono::milliseconds timeout, const std::function<void()>& action) {
  return outcomes(kFusedWorld, options_with(timeout), [&](Group& group) {
    FusedMoeRig rig(group);
    rig.round();
    if (group.rank() == kBad) rig.products->on_tile = action;
    group.barrier();
    rig.round();
  });
}

TEST(FusedFaults, ProductsThatThrowEndTheCallOnAllRanks) {
  const auto all = with_action(600s, [] { throw std::runtime_error("my expert failed"); });
  EXPECT_EQ(code_name(all[kBad].code), "system") << all[kBad].text;
  EXPECT_NE(all[kBad].text.find("my expert failed"), std::string::npos) << all[kBad].text;
  for (const size_t r : {0, 2}) {
    EXPECT_EQ(code_name(all[r].code), "peer_failed") << all[r].text;
    EXPECT_EQ(all[r].failed_rank, kBad);
  }
}

/// Other workers on that rank may wait for the tile, and other ranks wait for its results.
TEST(FusedFaults, ADeadlineNamesWhatWasWaitedFor) {
  std::atomic<int> ended{0};  // a rank that still received the tile in time would have no error to report
  const auto all = outcomes(kFusedWorld, options_with(kSoon), [&](Group& group) {
    FusedMoeRig rig(group);
    rig.round();
    if (group.rank() == kBad) {
      rig.products->on_tile = [&] {
        while (ended < kFusedWorld - 1) std::this_thread::sleep_for(1ms);
      };
    }
    group.barrier();
    const Outcome o = outcome_of([&] { rig.round(); });
    if (group.rank() != kBad) ++ended;
    if (group.rank() == kBad) {  // it may have all data that it needs; then its next call fails
      const Outcome failure = o.code == ErrorCode::ok ? outcome_of([&] { group.barrier(); }) : o;
      EXPECT_TRUE(failure.code == ErrorCode::peer_failed || failure.code == ErrorCode::peer_timeout) << shown(failure);
    } else if (o.code == ErrorCode::peer_timeout) {
      EXPECT_STREQ(o.report.site, "layer_returned");
      EXPECT_STREQ(o.report.operation, "MoE layer");
      EXPECT_EQ(o.report.call, 2u);
      EXPECT_EQ(o.report.awaited_rank, kBad);
    } else {
      EXPECT_EQ(code_name(o.code), "peer_failed") << shown(o);  // another rank failed first
      EXPECT_EQ(code_name(o.reason), "peer_timeout") << shown(o);
    }
  });
  for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
}

/// Makes a call in which kBad computes each tile late by `delay`. Returns true if the others' statistics attribute the longest
/// waits to it.
bool slow_rank_waited_for_longest(std::chrono::milliseconds delay) {
  std::atomic<bool> longest{true};
  const auto all = outcomes(kFusedWorld, options_with(60s), [&](Group& group) {
    FusedMoeRig rig(group);
    rig.round();
    if (group.rank() == kBad) rig.products->on_tile = [delay] { std::this_thread::sleep_for(delay); };
    group.barrier();
    const auto before = group.wait_statistics();
    rig.round();
    const auto after = group.wait_statistics();
    if (group.rank() == kBad) return;
    EXPECT_GT(after[kBad].waits, before[kBad].waits);
    EXPECT_GT(after[kBad].max_ms, 50);  // the waits for the plan take microseconds
    for (size_t r = 0; r < kFusedWorld; ++r)
      if (after[kBad].total_ms - before[kBad].total_ms < after[r].total_ms - before[r].total_ms) longest = false;
  });
  for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
  return longest;
}

/// A rank plans in time but computes its products late: the other ranks' statistics name it, with a longer delay if other
/// programs delay the other ranks as well.
TEST(FusedFaults, SlowProductsAreChargedToTheirRank) {
  EXPECT_TRUE(slow_rank_waited_for_longest(200ms) || slow_rank_waited_for_longest(2s));
}

TEST(FusedFaults, RanksThatDoNotAllAddAreAMismatch) {
  expect_mismatch(outcomes(kFusedWorld, options_with(600s), [&](Group& group) {
    FusedMoeRig rig(group);
    rig.round();
    rig.layer.forward(rig.rows.data(), rig.expert_ids(), rig.weights.data(), rig.out.data(), {.add = group.rank() == kBad});
  }));
}

/// Tiles that do not exactly cover an expert's rows are rejected before any computation.
TEST(FusedFaults, TilesOfWrongSizesAreRefused) {
  class Uncut final : public switchyard::detail::FusedProducts {
   public:
    explicit Uncut(int64_t more) : more_(more) {}
    int64_t tile_rows(int64_t left) const override { return more_ < 0 ? 0 : left + more_; }
    void up(int, int, const void*, int64_t, void*) override { ADD_FAILURE(); }
    void down(int, int, const void*, int64_t, void*) override { ADD_FAILURE(); }

   private:
    int64_t more_;
  };
  for (const int64_t more : {-1, 1}) {
    const auto all = outcomes(kFusedWorld, options_with(60s), [&](Group& group) {
      SmallArguments a(group.rank());
      FusedMoe layer(group, FusedMoeRig::config(), std::make_shared<Uncut>(more));
      layer.forward(a.rows.data(), a.expert_ids(), nullptr, a.out.data());
    });
    int named = 0;
    for (const Outcome& o : all) {
      const bool failure = o.code == ErrorCode::peer_failed && o.reason == ErrorCode::invalid_argument;
      EXPECT_TRUE(failure || o.code == ErrorCode::invalid_argument) << shown(o);
      named += o.text.find("FusedProducts::tile_rows = ") != std::string::npos ? 1 : 0;
    }
    EXPECT_GE(named, 1);
  }
}

TEST(FusedFaults, ProductsMayOnlyBeMissingWithoutExperts) {
  for (const int experts : {2, 3}) {
    const auto all = outcomes(kFusedWorld, options_with(60s), [&](Group& group) {
      auto config = FusedMoeRig::config();
      config.num_experts = experts;
      SmallArguments a(group.rank(), experts);
      const auto products = group.rank() == 2 ? nullptr : FusedMoeRig::products_of(group);
      const Outcome end = outcome_of([&] {
        FusedMoe layer(group, config, products);
        layer.forward(a.rows.data(), a.expert_ids(), nullptr, a.out.data());
      });
      group.barrier();  // the group is still usable
      if (end.code != ErrorCode::ok) throw switchyard::Error(end.code, end.text);
    });
    for (const Outcome& o : all) {
      if (experts == 2)
        EXPECT_EQ(code_name(o.code), "ok") << o.text;
      else
        expect_text(o, ErrorCode::invalid_argument, "MoeLayer, rank 2: products is null");
    }
  }
}

#if !defined(__SANITIZE_THREAD__)
/// All deadlines are longer than the time limit of this program.
TEST(FusedFaults, AProcessThatIsKilledInATileIsNamed) {
  Fleet fleet;
  fleet.world = kFusedWorld;
  fleet.options = options_with(600s);
  const auto body = [&](Group& group, Failures& f) {
    FusedMoeRig rig(group);
    rig.round();
    if (group.rank() == kBad) rig.products->on_tile = [] { ::raise(SIGKILL); };
    const Outcome o = outcome_of([&] { rig.round(); });
    f.equal(std::string("peer_failed"), code_name(o.code), "code of " + o.text);
    f.equal(kBad, o.failed_rank, "failed rank");
  };
  EXPECT_EQ(joined(run_processes(fleet, body, uint64_t{1} << kBad)), "");
}

/// The same in the second pass of a call that is split. A pass has twelve rows of one expert, in four tiles.
TEST(FusedFaults, AProcessThatIsKilledInTheSecondPassIsNamed) {
  Fleet fleet;
  fleet.world = kFusedWorld;
  fleet.options = options_with(600s);
  const auto body = [&](Group& group, Failures& f) {
    auto config = FusedMoeRig::config();
    config.overflow = switchyard::Overflow::split;
    config.capacity = 2 * kFusedWorld * config.topk;  // of two tokens
    FusedMoeRig rig(group, config);
    rig.ids.assign(rig.ids.size(), 3);  // on rank kBad
    rig.round();
    std::atomic<int> tiles{0};
    rig.products->on_tile = [&] {
      if (++tiles > 4) ::raise(SIGKILL);
    };
    const Outcome o = outcome_of([&] { rig.round(); });
    f.equal(std::string("peer_failed"), code_name(o.code), "code of " + o.text);
    f.equal(kBad, o.failed_rank, "failed rank");
  };
  EXPECT_EQ(joined(run_processes(fleet, body, uint64_t{1} << kBad)), "");
}
#endif

}  // namespace
}  // namespace harness
