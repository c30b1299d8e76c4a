// SPDX-License-Identifier: Apache-2.0
// MoeLayer on the CPU, with ranks as threads: the same bits as the same calls made separately, a comparison with float64, and
// all call options.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "harness/outcome.hpp"
#include "switchyard/layer.hpp"
#include "switchyard/trace.hpp"
#include "unit/expert/host_rig.hpp"
#include "unit/layer/moe_rank.hpp"

namespace switchyard {
namespace {

using testing::HostRig;
using testing::MoeCase;
using testing::MoeRank;
using Rank = MoeRank<HostRig>;

/// Runs `body` on every rank of a group for `m`. `body` must return an empty string.
void on_ranks(const MoeCase& m, const std::function<std::string(Rank&, Group&)>& body, size_t layers = 1) {
  GroupOptions options;
  options.heap_bytes = m.heap_bytes(Backend::cpu, layers);
  std::vector<Group> groups = Group::in_process(m.c.world(), options);
  std::vector<std::string> found(groups.size());
  launch::on_threads(groups.size(), [&](size_t r) {
    const harness::Outcome end = harness::outcome_of([&] {
      HostRig rig;
      Rank rank(rig, groups[r], m);
      found[r] = body(rank, groups[r]);
    });
    found[r] += end.text;
  });
  for (const std::string& text : found) EXPECT_EQ(text, "");
}

class MoeLayers : public ::testing::TestWithParam<MoeCase> {};

TEST_P(MoeLayers, GiveTheBitsOfTheirCalls) {
  on_ranks(GetParam(), [](Rank& rank, Group&) {
    std::string found;
    for (uint32_t call = 0; call < 2; ++call) {
      rank.write(call);
      rank.forward();
      rank.by_hand(false);
      found += rank.judge(call, false);
    }
    return found;
  });
}

TEST_P(MoeLayers, AddToWhatIsThere) {
  on_ranks(GetParam(), [](Rank& rank, Group&) {
    std::string found;
    for (uint32_t call = 0; call < 2; ++call) {
      rank.write(call);
      rank.forward({.add = true});
      rank.by_hand(true);
      found += rank.judge(call, true);
    }
    return found;
  });
}

// Layers that share everything except their weights, called alternately: each produces the same bits as a separate layer with
// those weights, even after the layer that they were created from is destroyed.
TEST_P(MoeLayers, ShareAllButTheirWeights) {
  const auto body = [](Rank& rank, Group& group) {
    const MoeWeights others = rank.other_weights();
    MoeLayer second = rank.layer().with_weights(others), alone = rank.made(group, others);
    std::string found;
    rank.write(3);
    rank.forward_by(alone);
    const auto expected = rank.result();
    const auto like_alone = [&](MoeLayer& layer, const char* when) {
      rank.write(3);
      rank.forward_by(layer);
      if (rank.result() != expected) found += std::string("other bits than a layer of its own ") + when + "; ";
    };
    for (const char* when : {"at first", "again"}) {
      like_alone(second, when);
      rank.write(3);
      rank.forward();
      if (rank.tokens() > 0 && rank.result() == expected) found += "the weights of the other layer; ";
      rank.by_hand(false);
      found += rank.judge(3, false);
    }
    rank.layer() = std::move(second);
    like_alone(rank.layer(), "after the first one's end");
    MoeLayer third = rank.layer().with_weights(others);
    like_alone(third, "as the third");
    return found;
  };
  on_ranks(GetParam(), body, 2);
}

// The token count T is read from memory: rows beyond it are left unchanged, and the others are as if the ids had ended at T.
// Counts out of range are clamped.
TEST_P(MoeLayers, ReadTheNumberOfTokens) {
  const MoeCase& m = GetParam();
  on_ranks(m, [&](Rank& rank, Group&) {
    std::string found;
    for (const int32_t given : {5, 1000, -3}) {
      rank.write(7);
      *rank.device_tokens() = given;
      rank.forward({.device_tokens = rank.device_tokens()});
      const std::vector<std::byte> got = rank.result(), base = rank.base_of(7);
      const int64_t here = std::clamp<int64_t>(given, 0, rank.tokens());
      const auto cut = static_cast<std::ptrdiff_t>(static_cast<size_t>(here) * m.c.row_bytes());
      if (!std::equal(got.begin() + cut, got.end(), base.begin() + cut)) found += "rows behind T were written. ";
      if (std::equal(got.begin(), got.begin() + cut, base.begin()) && here > 0) found += "rows of tokens were not written. ";
    }
    return found;
  });
}

INSTANTIATE_TEST_SUITE_P(Cpu, MoeLayers, ::testing::ValuesIn(testing::in_both_forms(testing::moe_cases())),
                         [](const auto& c) { return c.param.c.name; });

// The weights may be discarded after construction. The products differ from those with `view`.
TEST(MoeLayer, PacksWeights) {
  MoeCase m{.c = {.name = "packed", .tokens = {40, 9, 0}}, .storage = WeightStorage::packed};
  on_ranks(m, [](Rank& rank, Group&) {
    rank.write(3);
    rank.forward();
    rank.by_hand(false);
    return rank.judge(3, false);
  });
}

TEST(MoeLayer, HasManyRanks) {
  for (const bool masked : {false, true}) {
    MoeCase m{.c = {.name = masked ? "masked" : "normal", .masked = masked, .experts = 7, .topk = 4, .tokens = {13, 0, 20, 1}}};
    on_ranks(m, [](Rank& rank, Group&) {
      rank.write(4);
      rank.forward();
      rank.by_hand(false);
      return rank.judge(4, false);
    });
  }
}

// The spans of a rank's call track, in order, with the rows of its experts.
TEST(MoeLayer, RecordsItsSteps) {
  for (const bool masked : {false, true}) {
    const MoeCase m{.c = {.name = "traced", .masked = masked, .experts = 5, .topk = 1, .tokens = {13, 0, 20}}};
    on_ranks(m, [&](Rank& rank, Group& group) {
      int64_t rows = 0;
      for (int r = 0; r < m.c.world(); ++r)
        for (const int32_t id : testing::LayerInput(m.c, 2, r).ids)
          rows += id >= first_expert(5, 3, group.rank()) && id < first_expert(5, 3, group.rank() + 1);
      Trace trace(group.size(), {group.options().num_blocks, group.options().num_warps});
      MoeLayer second = rank.layer().with_weights(rank.other_weights());
      rank.write(2);
      rank.forward();
      group.set_trace(&trace);
      rank.forward();
      rank.forward_by(second);
      group.set_trace(nullptr);
      rank.forward();
      std::string steps;
      double end = 0;
      for (const TraceSlice& s : trace.slices()) {
        if (s.track >= 0 || (s.category != "call" && s.category != "compute")) continue;
        steps += s.name + (s.begin_us < end ? " (early) " : " ") + (s.name == "expert_mlp" ? std::to_string(s.arg) + " " : "");
        end = s.begin_us + s.duration_us;
      }
      const std::string call = "dispatch expert_mlp " + std::to_string(rows) + " combine ";
      return steps == call + call ? "" : "recorded: " + steps + ", expected twice: " + call;
    });
  }
}

TEST(MoeLayer, TakesNoTokensAnywhere) {
  for (const bool masked : {false, true}) {
    MoeCase m{.c = {.name = "none", .masked = masked, .tokens = {4, 4}}};
    on_ranks(m, [&](Rank& rank, Group&) {
      rank.layer().forward(nullptr, ExpertIds::of(static_cast<const int32_t*>(nullptr), 0, m.c.topk), nullptr, nullptr);
      rank.layer().forward(nullptr, ExpertIds::of(static_cast<const int64_t*>(nullptr), 0, m.c.topk), nullptr, nullptr,
                           {.add = true});
      rank.write(2);
      rank.forward();
      rank.by_hand(false);
      return rank.judge(2, false);
    });
  }
}

// Without weights, all weights are 1; a token without an expert gets +0.
TEST(MoeLayer, NeedsNoWeights) {
  for (const MoeExchange exchange : {MoeExchange::normal, MoeExchange::low_latency}) {
    MoeCase m{.c = {.name = "unweighted", .topk = 1, .tokens = {2}}};
    GroupOptions options;
    MoeLayerConfig config = m.moe();
    config.exchange = exchange;
    config.invalid_ids = switchyard::InvalidIds::count;
    options.heap_bytes = MoeLayer::heap_bytes(config, 1);
    std::vector<Group> groups = Group::in_process(1, options);
    HostRig rig;
    const testing::RankWeights w = make_weights(rig, m, 0, m.c.experts);
    MoeLayer layer(groups[0], config, w.w13, w.w2);
    const std::vector<std::byte> x = testing::normal_rows(DType::bf16, 2 * m.c.hidden, 1, 5);
    const int32_t ids[] = {1, 99};
    const float ones[] = {1, 1};
    std::vector<std::byte> out(x.size(), std::byte{0xff}), weighted = out;
    layer.forward(x.data(), ExpertIds::of(ids, 2, 1), nullptr, out.data());
    layer.forward(x.data(), ExpertIds::of(ids, 2, 1), ones, weighted.data());
    EXPECT_EQ(out, weighted);
    EXPECT_EQ(layer.invalid_ids(), 2);
    const auto of_nobody = out.begin() + static_cast<std::ptrdiff_t>(m.c.row_bytes());
    EXPECT_TRUE(std::all_of(of_nobody, out.end(), [](std::byte b) { return b == std::byte{0}; }));
    EXPECT_FALSE(std::all_of(out.begin(), of_nobody, [](std::byte b) { return b == std::byte{0}; }));
  }
}

TEST(MoeLayer, IsMoved) {
  MoeCase m{.c = {.name = "moved", .tokens = {6, 6}}};
  on_ranks(m, [&](Rank& rank, Group&) {
    rank.write(1);
    MoeLayer moved = std::move(rank.layer());
    rank.layer() = std::move(moved);
    rank.forward();
    rank.by_hand(false);
    return rank.judge(1, false);
  });
}

MoeCase with_capacity(Overflow overflow) {
  return {.c = {.name = "capacity", .tokens = {40, 30}, .only = 4}, .capacity = 140, .overflow = overflow};
}

// All ranks report the error, nothing is written, and the next call is unaffected.
TEST(MoeLayer, FailsBeyondCapacity) {
  on_ranks(with_capacity(Overflow::fail), [&](Rank& rank, Group&) {
    rank.write(0);
    const harness::Outcome end = harness::outcome_of([&] { rank.forward(); });
    std::string found = end.code == ErrorCode::capacity_exceeded ? "" : "not capacity_exceeded: " + end.text;
    if (rank.result() != rank.base_of(0)) found += "out was written";
    if (!rank.layer().dropped().empty()) found += "something was dropped";
    std::vector<uint16_t> x(256), out(256, 0xffff);  // output of a token without an expert
    const std::vector<int32_t> ids(3, -1);
    rank.layer().forward(x.data(), ExpertIds::of(ids.data(), 1, 3), nullptr, out.data());
    if (out != x) found += "the next call gave no zeros";
    return found;
  });
}

// The expert's rank has room for all routes from rank 0 and for some from rank 1.
TEST(MoeLayer, DropsBeyondCapacity) {
  const MoeCase m = with_capacity(Overflow::drop_and_report);
  on_ranks(m, [&](Rank& rank, Group& group) {
    std::string found;
    for (uint32_t call = 0; call < 2; ++call) {
      rank.write(call);
      rank.forward();
      rank.by_hand(false);
      found += rank.judge(call, false);
      const std::vector<uint8_t> dropped = rank.dropped();
      if (dropped.size() != static_cast<size_t>(rank.tokens() * m.c.topk)) found += "dropped() has another size. ";
      const bool some = std::count(dropped.begin(), dropped.end(), 1) > 0;
      if (some != (group.rank() == 1)) found += some ? "routes of rank 0 were dropped. " : "nothing was dropped. ";
    }
    return found;
  });
}

}  // namespace
}  // namespace switchyard
