// SPDX-License-Identifier: Apache-2.0
// The views of a plan, in cases small enough to work out by hand.
#include <gtest/gtest.h>

#include "plan/views.hpp"
#include "switchyard/status.hpp"
#include "unit/plan/plan_cluster.hpp"

namespace plan_test {
namespace {

using switchyard::Error;
using switchyard::ErrorCode;
using switchyard::Layout;
using Ints = std::vector<int32_t>;

/// Two ranks, four experts (0 and 1 on rank 0), top-2. Rank 0 has three tokens, and rank 1 has two.
oracle::Problem hand_problem(Layout layout) {
  oracle::Problem p;
  p.world = 2;
  p.experts = 4;
  p.topk = 2;
  p.max_tokens = 3;
  p.layout = layout;
  p.ids = {{0, 2,  //
            3, 3,  //
            -1, 1},
           {1, 0,  //
            2, 9}};
  return p;
}

TEST(Matrices, ByHand) {
  const auto handles = make_handles(hand_problem(Layout::rank_major), true, 0);
  const auto m = make_matrices(*handles[0], 2);  // channels: tokens {0, 1} and {2}; on rank 1: {0} and {1}
  EXPECT_EQ(m.rank_prefix_matrix, (Ints{2, 2, 3, 3}));
  EXPECT_EQ(m.channel_prefix_matrix, (Ints{1, 2, 2, 2}));
  EXPECT_EQ(m.recv_src_idx, (Ints{0, 2, 0}));
  EXPECT_EQ(m.recv_channel_prefix_matrix, (Ints{0, 1, 0, 1}));
  EXPECT_EQ(m.is_token_in_rank, (std::vector<uint8_t>{1, 1, 0, 1, 1, 0}));
  EXPECT_EQ(m.send_head, (Ints{0, 0, -1, 1, 0, -1}));
}

TEST(Matrices, DoNotDependOnLayout) {
  const auto rank_major = make_handles(hand_problem(Layout::rank_major), false, 0);
  const auto expert_major = make_handles(hand_problem(Layout::expert_major), false, 0);
  for (size_t r = 0; r < 2; ++r) {
    const auto a = make_matrices(*rank_major[r], 3), b = make_matrices(*expert_major[r], 3);
    EXPECT_EQ(a.rank_prefix_matrix, b.rank_prefix_matrix);
    EXPECT_EQ(a.recv_src_idx, b.recv_src_idx);
    EXPECT_EQ(a.send_head, b.send_head);
    EXPECT_EQ(a.recv_channel_prefix_matrix, b.recv_channel_prefix_matrix);
  }
}

TEST(Matrices, RankMajorCapacityCutsTheLastRows) {
  oracle::Problem p = hand_problem(Layout::rank_major);
  p.size = switchyard::SizePolicy::capacity;
  p.overflow = switchyard::Overflow::drop_and_report;
  p.capacity = {2, 1};
  const auto handles = make_handles(p, true, 0);
  const auto m = make_matrices(*handles[0], 1);
  EXPECT_EQ(m.rank_prefix_matrix, (Ints{2, 1, 2, 1}));
  EXPECT_EQ(m.recv_src_idx, (Ints{0, 2}));
  EXPECT_EQ(m.is_token_in_rank, (std::vector<uint8_t>{1, 1, 0, 0, 1, 0}));
}

TEST(Matrices, RefuseNoChannels) {
  const auto handles = make_handles(hand_problem(Layout::rank_major), true, 0);
  for (const int channels : {0, -1}) {
    try {
      make_matrices(*handles[0], channels);
      ADD_FAILURE() << "no error";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::invalid_argument);
      EXPECT_NE(std::string(e.what()).find("num_channels is " + std::to_string(channels)), std::string::npos) << e.what();
    }
  }
}

TEST(Ledger, ByHand) {
  const auto handles = make_handles(hand_problem(Layout::expert_major), true, 0);
  const auto l = make_ledger(*handles[0]);
  EXPECT_EQ(l.num_experts_padded, 16);
  EXPECT_EQ(Ints(l.peer_token_per_expert.begin(), l.peer_token_per_expert.begin() + 4), (Ints{1, 1, 1, 2}));
  EXPECT_EQ(Ints(l.cumsum_per_expert.begin(), l.cumsum_per_expert.begin() + 5), (Ints{1, 2, 3, 5, 5}));
  EXPECT_EQ(Ints(l.cumsum_per_expert.begin() + 16, l.cumsum_per_expert.begin() + 20), (Ints{1, 2, 3, 3}));
  EXPECT_EQ(l.expanded_row_idx, (Ints{0, 2, 3, 4, -1, 1}));
  EXPECT_EQ(l.dispatch_offset, (Ints{0, 2}));
  EXPECT_EQ(l.prev_sum_before_rank, (Ints{0, 0, 1, 1}));
}

/// The fixture published with the original ledger: 2 ranks, 64 tokens, top-8 of 4 experts, expert(f) = (f + rank) mod 4.
TEST(Ledger, D06_PublishedFixture) {
  oracle::Problem p;
  p.world = 2;
  p.experts = 4;
  p.topk = 8;
  p.max_tokens = 64;
  p.layout = Layout::expert_major;
  for (int r = 0; r < 2; ++r) {
    p.ids.emplace_back();
    for (int64_t f = 0; f < 64 * 8; ++f) p.ids.back().push_back((f + r) % 4);
  }
  const auto handles = make_handles(p, false, 0);
  const auto first = make_ledger(*handles[0]), second = make_ledger(*handles[1]);
  for (int s = 0; s < 2; ++s)
    for (int e = 0; e < 4; ++e) EXPECT_EQ(first.peer_token_per_expert[static_cast<size_t>(s * 16 + e)], 128);
  EXPECT_EQ(Ints(first.expanded_row_idx.begin(), first.expanded_row_idx.begin() + 6), (Ints{0, 128, 256, 384, 1, 129}));
  EXPECT_EQ(Ints(second.expanded_row_idx.begin(), second.expanded_row_idx.begin() + 5), (Ints{128, 256, 384, 0, 129}));
  EXPECT_EQ(first.dispatch_offset, (Ints{0, 256}));
  EXPECT_EQ(first.prev_sum_before_rank, (Ints{0, 0, 128, 128}));
}

TEST(Ledger, AlignmentPadsTheExpertBuffer) {
  oracle::Problem p = hand_problem(Layout::expert_major);
  p.alignment = 8;
  EXPECT_EQ(make_ledger(*make_handles(p, true, 0)[0]).dispatch_offset, (Ints{0, 8}));
  p.layout = Layout::rank_major;
  EXPECT_EQ(make_ledger(*make_handles(p, true, 0)[0]).dispatch_offset, (Ints{0, 2}));
}

TEST(Addressing, ExpertsAreSpreadEvenly) {
  for (int world = 1; world <= switchyard::kMaxRanks; ++world) {
    for (const int experts : {1, 2, 7, 63, 64, 65, 100, 257}) {
      const switchyard::detail::ExpertRanges map{experts, world};
      oracle::Problem p;
      p.world = world;
      p.experts = experts;
      for (int r = 0; r < world; ++r) {
        ASSERT_EQ(map.first(r), p.first_expert(r));
        ASSERT_EQ(map.count(r), p.first_expert(r + 1) - p.first_expert(r));
        ASSERT_LE(map.count(r), map.max_count());
      }
      for (int e = 0; e < experts; ++e) ASSERT_EQ(map.owner(e), p.owner(e)) << "W " << world << " E " << experts << " e " << e;
    }
  }
}

TEST(Addressing, ChannelsCoverTheTokens) {
  using switchyard::detail::channel_begin;
  for (const int64_t tokens : {0, 1, 9, 10, 11, 257}) {
    for (const int channels : {1, 2, 10, 300}) {
      EXPECT_EQ(channel_begin(tokens, channels, 0), 0);
      EXPECT_EQ(channel_begin(tokens, channels, channels), tokens);
      const int64_t per = (tokens + channels - 1) / channels;
      for (int c = 0; c < channels; ++c) {
        const int64_t n = channel_begin(tokens, channels, c + 1) - channel_begin(tokens, channels, c);
        EXPECT_GE(n, 0);
        EXPECT_LE(n, per);
      }
    }
  }
}

TEST(Addressing, SourcesPack) {
  const int64_t packed = switchyard::detail::pack_source(63, 31, 0xFFFFFFFF);
  EXPECT_EQ(packed >> 48, 63);
  EXPECT_EQ(packed >> 32 & 0xFFFF, 31);
  EXPECT_EQ(packed & 0xFFFFFFFF, 0xFFFFFFFF);
}

}  // namespace
}  // namespace plan_test
