// SPDX-License-Identifier: Apache-2.0
// The flat exchange as an object: the balance of its work split (E19), invalid arguments specific to it, and ranks that make
// different calls. tests/faults/fault_stories_test.cpp covers the faults common to all modes.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <numeric>

#include "arch/cpu/cpu_arch.hpp"
#include "exchange/group/impl.hpp"
#include "exchange/low_latency/impl.hpp"
#include "faults/misuses.hpp"
#include "modes/flat/flat_rig.hpp"
#include "modes/normal/scenario.hpp"
#include "testing/test_access.hpp"

namespace harness {
namespace {

using namespace std::chrono_literals;
using switchyard::ErrorCode;
using switchyard::Sending;

// --- E19: a balanced split of unbalanced work

using switchyard::detail::Cpu;
using switchyard::detail::CpuWarp;

/// Messages are numbered across all sources, so the message counts of the warps differ by at most one, regardless of the
/// senders.
TEST(FlatSplit, E19_MessagesPerWarpDifferByOne) {
  namespace detail = switchyard::detail;
  LowLatencyConfig config = FlatRig::config();
  config.max_tokens = 1000;
  for (const int pieces : {1, 3}) {
    for (const Sending sending : {Sending::per_rank, Sending::per_route}) {
      config.hidden = 128 * pieces;
      config.pieces = pieces;
      config.sending = sending;
      const std::vector<int64_t> tokens = {900, 31, 0, 69};  // one rank holds nine tenths
      const auto layout = detail::low_latency_layout(config, 4, 0);
      std::vector<uint64_t> flags(static_cast<size_t>(layout.flags_bytes()) / 8);
      detail::CallContext call;
      call.epoch = 7;
      call.heap.world = 4;
      call.heap.base[0] = reinterpret_cast<std::byte*>(flags.data());
      for (int s = 0; s < 4; ++s)
        *call.heap.local(layout.header(7, s)) = detail::flag_word(7, static_cast<uint64_t>(tokens[static_cast<size_t>(s)]));
      for (const int blocks : {1, 2, 7, 40}) {
        std::map<std::tuple<int, int64_t, int>, int> seen;
        std::vector<int64_t> share;
        for (int i = 0; i < 3 * blocks; ++i) {
          CpuWarp warp(i / 3, i % 3, blocks, 3, nullptr);
          int64_t n = 0;
          detail::for_each_message<Cpu>(warp, call, layout, [&](int source, int64_t unit, int piece) {
            ++seen[{source, unit, piece}];
            ++n;
            return true;
          });
          share.push_back(n);
        }
        const auto [min, max] = std::minmax_element(share.begin(), share.end());
        EXPECT_LE(*max - *min, 1) << blocks << " blocks";
        EXPECT_EQ(seen.size(), static_cast<size_t>(1000 * pieces * layout.units_per_token()));
        for (const auto& [message, times] : seen) EXPECT_EQ(times, 1);
      }
    }
  }
}

/// Ids for a call in which only the first `senders` ranks have tokens, so the warps of the other ranks only answer rows.
struct SplitCall {
  int senders, experts, topk;
  std::vector<std::vector<int64_t>> ids;  ///< by rank
};
constexpr int kSplitWorld = 8;

/// A call with 1800 tokens on rank 0 and 200 on rank 1.
SplitCall nine_tenths(int experts, int topk, Routing routing = Routing::uniform) {
  SplitCall call{2, experts, topk, {}};
  const RoutingShape shape{kSplitWorld, experts, topk};
  for (int rank = 0; rank < kSplitWorld; ++rank)
    call.ids.push_back(make_ids(routing, shape, 1, rank, rank == 0 ? 1800 : rank == 1 ? 200 : 0, 0));
  return call;
}

/// Number of rows answered by each of a rank's `warps` warps, in ascending order, if the messages from all ranks are assigned
/// in turn.
std::vector<uint64_t> dealt_rows(const SplitCall& call, int rank, int warps) {
  std::vector<uint64_t> rows(static_cast<size_t>(warps));
  size_t message = 0;
  for (const auto& ids : call.ids)
    for (size_t f = 0; f < ids.size(); f += static_cast<size_t>(call.topk), ++message)
      for (size_t k = 0; k < static_cast<size_t>(call.topk); ++k)
        rows[message % rows.size()] += ids[f + k] / (call.experts / kSplitWorld) == rank;
  std::sort(rows.begin(), rows.end());
  return rows;
}

/// Makes the call on 8 ranks with `blocks` blocks of 3 warps each, whole or in its two-call form. \returns by warp, ascending:
/// the numbers of answered rows, excluding ranks that send; in the two-call form, the numbers of rows returned by combine
std::vector<std::vector<uint64_t>> answered_rows(const SplitCall& call, int blocks, bool two_calls = false) {
  LowLatencyConfig config = FlatRig::config();
  config.num_experts = call.experts;
  config.topk = call.topk;
  config.max_tokens = 2000;
  auto options = options_with(60s);
  options.num_blocks = blocks;
  options.num_warps = 3;
  options.heap_bytes = LowLatencyExchange::heap_bytes(config, kSplitWorld);
  std::vector<std::vector<uint64_t>> rows(kSplitWorld);
  const auto all = outcomes(kSplitWorld, options, [&](Group& group) {
    LowLatencyExchange exchange(group, config);
    const auto rank = static_cast<size_t>(group.rank());
    const auto tokens = static_cast<int64_t>(call.ids[rank].size()) / call.topk;
    const std::vector<uint16_t> x(static_cast<size_t>(tokens * FlatRig::kHidden), 0x3F80);
    std::vector<uint16_t> out(x.size());
    const ConstRows given{x.data(), tokens, FlatRig::kHidden, DType::bf16};
    const ExpertIds ids = ExpertIds::of(call.ids[rank].data(), tokens, call.topk);
    if (two_calls) {
      switchyard::LowLatencyOutput output = exchange.make_output();
      exchange.dispatch(given, ids, output);
      exchange.combine({output.x.data, output.x.rows, FlatRig::kHidden, DType::bf16}, output, out.data());
    } else {
      exchange.moe_all_to_all(given, ids, out.data());
    }
    const uint16_t sum = switchyard::detail::bf16_from_f32(static_cast<float>(call.topk));
    for (const uint16_t y : out) ASSERT_EQ(y, sum);
    if (!two_calls && group.rank() < call.senders) return;
    for (const auto& warp : group.impl().moved) rows[rank].push_back(warp.payload_rows);
    std::sort(rows[rank].begin(), rows[rank].end());
  });
  for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
  return rows;
}

/// If every token goes to every rank, the row counts answered by the warps differ by at most one.
TEST(FlatSplit, E19_RowsPerWarpDifferByOne) {
  const auto rows = answered_rows(nine_tenths(kSplitWorld, kSplitWorld), 2);
  for (size_t r = 2; r < rows.size(); ++r) {
    EXPECT_EQ(std::accumulate(rows[r].begin(), rows[r].end(), uint64_t{0}), 2000u);
    EXPECT_LE(rows[r].back() - rows[r].front(), 1u);
  }
}

/// If tokens go to only some of the ranks, a warp gets the rows of every n-th message, where n is the number of warps.
/// Regardless of the senders, the split is as balanced as the routing, and no warp has more rows than its share of messages
/// contains. Design 0014 lists the resulting spread.
TEST(FlatSplit, E19_RowsPerWarpOfRoutedTokens) {
  struct Shape {
    int experts, topk;
    Routing routing;
  };
  for (const Shape& s : {Shape{8, 2, Routing::uniform}, Shape{64, 6, Routing::uniform}, Shape{256, 8, Routing::uniform},
                         Shape{8, 1, Routing::round_robin}}) {
    const SplitCall call = nine_tenths(s.experts, s.topk, s.routing);
    for (const int blocks : {2, 7, 12}) {
      const auto rows = answered_rows(call, blocks);
      const int warps = 3 * blocks;
      const double mean = 2000.0 * s.topk / kSplitWorld / warps;
      for (int r = call.senders; r < kSplitWorld; ++r) {
        const auto& of_warp = rows[static_cast<size_t>(r)];
        const auto where =
            "rank " + std::to_string(r) + " of E" + std::to_string(s.experts) + ", warps " + std::to_string(warps);
        EXPECT_EQ(of_warp, dealt_rows(call, r, warps)) << where;
        EXPECT_LE(of_warp.back(), static_cast<uint64_t>((2000 + warps - 1) / warps * s.topk)) << where;
        if (s.routing != Routing::uniform) continue;  // every eighth token in turn: some warps have no rows
        EXPECT_LE(static_cast<double>(of_warp.back()) - mean, 4 * std::sqrt(mean)) << where;
        EXPECT_GE(static_cast<double>(of_warp.front()) - mean, -4 * std::sqrt(mean)) << where;
      }
    }
  }
}

/// In the two-call form, combine distributes only the existing rows, and the shares differ by at most one for any routing.
TEST(FlatSplit, E19_RowsPerWarpOfCombine) {
  for (const Routing routing : {Routing::uniform, Routing::round_robin, Routing::one_rank}) {
    const SplitCall call = nine_tenths(64, 2, routing);
    for (const int blocks : {2, 7}) {
      const auto rows = answered_rows(call, blocks, true);
      uint64_t all = 0;
      for (const auto& of_warp : rows) {
        ASSERT_EQ(of_warp.size(), static_cast<size_t>(3 * blocks));
        all += std::accumulate(of_warp.begin(), of_warp.end(), uint64_t{0});
        EXPECT_LE(of_warp.back() - of_warp.front(), 1u) << blocks << " blocks";
      }
      EXPECT_EQ(all, 2000u * 2) << blocks << " blocks";
    }
  }
}

// --- Misuse on one rank

/// Ids that end where `out` begins, and weights that begin where `out` ends, do not overlap with it.
TEST(FlatMisuse, NotOfWhatLiesBesideOut) {
  const auto all = outcomes(2, options_with(60s), [&](Group& group) {
    FlatRig rig(group);
    const size_t ids_bytes = rig.ids.size() * 4, out_bytes = rig.out.size() * 2;
    std::vector<uint32_t> memory((2 * ids_bytes + out_bytes) / 4);
    auto* const begin = reinterpret_cast<std::byte*>(memory.data());
    std::memcpy(begin, rig.ids.data(), ids_bytes);
    std::memcpy(begin + ids_bytes + out_bytes, rig.weights.data(), ids_bytes);
    FlatRig::Arguments a = rig.arguments();
    a.ids.data = begin;
    a.out = begin + ids_bytes;
    a.options.topk_weights = reinterpret_cast<const float*>(begin + ids_bytes + out_bytes);
    rig.call(a);
    rig.round();
    EXPECT_EQ(std::memcmp(a.out, rig.out.data(), out_bytes), 0);
  });
  for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
}

TEST(FlatMisuse, QuantisedRows) {
  for (const ScaleKind scales : {ScaleKind::f32, ScaleKind::ue8m0}) {
    const auto all = outcomes(1, options_with(60s), [&](Group& group) {
      LowLatencyConfig config = FlatRig::config();
      config.scales = scales;
      FlatRig(group, config).round();
    });
    expect_misuse(all, 0, ErrorCode::unsupported, "LowLatencyConfig::scales must be none");
  }
}

TEST(FlatMisuse, ExpertScaleOfSums) {
  const auto all = outcomes(2, options_with(60s), [&](Group& group) {
    FlatRig rig(group);
    rig.dispatch();
    rig.combine(CombineOrder::per_rank, group.rank() == 0 ? rig.scale.data() : nullptr);
  });
  expect_misuse(all, 0, ErrorCode::unsupported, "expert_scale with per_rank");
}

TEST(FlatMisuse, BetweenTheHalvesOfAnotherCall) {
  const auto all = outcomes(2, options_with(60s), [&](Group& group) {
    FlatRig rig(group);
    const auto a = rig.arguments();
    const auto receive = rig.exchange.dispatch_send(a.x, a.ids, rig.output);
    if (group.rank() == 0) rig.round();
    receive();
    rig.combine();
  });
  expect_misuse(all, 0, ErrorCode::invalid_argument, "call its hook first");
}

/// Experts may differ by rank: one rank adds 1 to the elements, another multiplies them by 3, and a third returns them
/// unchanged.
TEST(FlatFunctions, MayDifferByRank) {
  const auto all = outcomes(3, options_with(60s), [&](Group& group) {
    FlatRig rig(group);
    FlatRig::Arguments a = rig.arguments();
    a.options.expert_scale = nullptr;
    a.options.topk_weights = nullptr;
    const auto plus = switchyard::RowFunction::on_cpu([](float x, const switchyard::RowOrigin&, int64_t) { return x + 1; });
    const auto times = switchyard::RowFunction::on_cpu([](float x, const switchyard::RowOrigin&, int64_t) { return x * 3; });
    if (group.rank() == 0) a.options.row_function = &plus;
    if (group.rank() == 1) a.options.row_function = &times;
    rig.call(a);
    const int owner_of[FlatRig::kExperts] = {0, 0, 0, 1, 1, 1, 2, 2};
    const int answer[] = {2, 3, 1};
    for (int64_t t = 0; t < FlatRig::kTokens; ++t) {
      int sum = 0;
      for (int k = 0; k < FlatRig::kTopk; ++k) sum += answer[owner_of[rig.ids[static_cast<size_t>(t * FlatRig::kTopk + k)]]];
      const auto want = static_cast<float>(sum);
      for (int64_t c = 0; c < FlatRig::kHidden; ++c)
        ASSERT_EQ(switchyard::detail::f32_from_bf16(rig.out[static_cast<size_t>(t * FlatRig::kHidden + c)]), want) << t;
    }
  });
  for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
}

/// The contest's expert, x * (1 + its rank), gives the same bits as a row function and with the same factor in expert_scale.
TEST(FlatFunctions, TheContestsExpert) {
  const auto all = outcomes(3, options_with(60s), [&](Group& group) {
    FlatRig rig(group);
    for (size_t i = 0; i < rig.rows.size(); ++i) rig.rows[i] = static_cast<uint16_t>(0x3E00 + (i * 37 + 11) % 0x300);
    const float factor = 1.0f + static_cast<float>(group.rank());
    std::fill(rig.scale.begin(), rig.scale.end(), factor);
    rig.round();
    const std::vector<uint16_t> scaled = rig.out;
    std::fill(rig.out.begin(), rig.out.end(), uint16_t{0xFFFF});
    const auto contest =
        switchyard::RowFunction::on_cpu([factor](float x, const switchyard::RowOrigin&, int64_t) { return x * factor; });
    FlatRig::Arguments a = rig.arguments();
    a.options.expert_scale = nullptr;
    a.options.row_function = &contest;
    rig.call(a);
    EXPECT_EQ(rig.out, scaled);
  });
  for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
}

struct ForeignFunction final : switchyard::detail::RowFunctionBase {
  ForeignFunction() noexcept : RowFunctionBase(switchyard::Backend::cuda) {}
};

TEST(FlatMisuse, RowFunction) {
  using switchyard::RowFunction;
  const auto identity = RowFunction::on_cpu([](float x, const switchyard::RowOrigin&, int64_t) { return x; });
  const RowFunction none, foreign(std::make_shared<const ForeignFunction>());
  struct Case {
    const RowFunction* function;
    bool scaled;
    const char* in_text;
  };
  const Case cases[] = {{&identity, true, "row_function and expert_scale are both given"},
                        {&none, false, "row_function is empty"},
                        {&foreign, false, "made for the other backend: this group takes RowFunction::on_cpu"}};
  for (const Case& bad : cases) {
    const auto all = outcomes(2, options_with(60s), [&](Group& group) {
      FlatRig rig(group);
      FlatRig::Arguments a = rig.arguments();
      if (group.rank() == 1) {
        a.options.row_function = bad.function;
        if (!bad.scaled) a.options.expert_scale = nullptr;
      }
      rig.call(a);
    });
    expect_misuse(all, 1, ErrorCode::invalid_argument, bad.in_text);
  }
}

// --- Different calls

TEST(FlatMismatch, AnotherCallOnOneRank) {
  const std::function<void(FlatRig&)> others[] = {
      [](FlatRig& rig) { rig.dispatch(); },
      [](FlatRig& rig) { rig.combine(); },
      [](FlatRig& rig) { rig.combine(CombineOrder::per_rank); },
  };
  for (const auto& other : others) {
    expect_mismatch(outcomes(3, options_with(60s), [&](Group& group) {
      FlatRig rig(group);
      rig.dispatch();
      group.rank() == 2 ? other(rig) : rig.round();
    }));
  }
}

}  // namespace
}  // namespace harness
