// SPDX-License-Identifier: Apache-2.0
// The published ledger format in bytes (D9): sizes, packing of tables, and unpacking.
#include <gtest/gtest.h>

#include <cstring>

#include "harness/outcome.hpp"
#include "modes/ledger/ledger_rig.hpp"

namespace harness {
namespace {

using switchyard::LedgerConfig;
using switchyard::LedgerTables;

TEST(LedgerFormat, D09_BytesOfThePublishedFormat) {
  const auto full = switchyard::ledger_format_bytes(published_config(64, 7168, 8, 4), 2, 24);
  EXPECT_EQ(full.workspace, 2304u);
  EXPECT_EQ(full.route_meta, 2432u);
  EXPECT_EQ(full.window, 7340160u);
  EXPECT_EQ(full.guard, 4096u);
  const auto quick = switchyard::ledger_format_bytes(published_config(8, 64, 2, 2), 2, 24);
  EXPECT_EQ(quick.workspace, 2304u);
  EXPECT_EQ(quick.route_meta, 448u);
  EXPECT_EQ(quick.window, 2176u);
  EXPECT_EQ(switchyard::ledger_format_bytes(published_config(8, 64, 2, 2), 2, 1).workspace, 256u);  // the minimum
  // 8 ranks, 136 experts (17 per rank) padded to 144, and 3 * 5 = 15 routes.
  const auto wide = switchyard::ledger_format_bytes(published_config(3, 50, 5, 136), 8, 40);
  EXPECT_EQ(wide.workspace, 4u * 40 * (8 + 144));
  EXPECT_EQ(wide.route_meta, 2u * 4 * 8 * 144 + 64 + 128 + 576);
  EXPECT_EQ(wide.window, 1536u + 64 + 64);
}

/// Writes `values` at `begin`.
void put(std::vector<std::byte>& bytes, size_t begin, const std::vector<int32_t>& values) {
  ASSERT_LE(begin + values.size() * 4, bytes.size());
  std::memcpy(bytes.data() + begin, values.data(), values.size() * 4);
}

/// The published fixture: 64 tokens, top-8 of 4 experts, 2 ranks. Built solely from the format description.
std::vector<std::byte> published_bytes(int32_t rank) {
  std::vector<std::byte> bytes(2432);
  std::vector<int32_t> counts, prefix, rows;
  for (int s = 0; s < 2; ++s) {
    for (int32_t e = 0; e < 16; ++e) {
      counts.push_back(e < 4 ? 128 : 0);
      prefix.push_back(e < 4 ? 128 * (e + 1) : 512);
    }
  }
  for (int32_t f = 0; f < 512; ++f) rows.push_back(128 * ((f + rank) % 4) + f / 4);
  put(bytes, 0, counts);
  put(bytes, 128, rows);
  put(bytes, 2176, prefix);
  put(bytes, 2304, {0, 256});
  put(bytes, 2368, {0, 0, 128, 128});
  return bytes;
}

TEST(LedgerFormat, TheFixtureByteByByte) {
  LedgerScenario s;
  s.problem.world = 2;
  s.problem.experts = 4;
  s.problem.topk = 8;
  s.tokens = {64, 64};
  s.hidden = 7168;
  s.fixture = true;
  const auto c = make_ledger_case(s);
  for (int rank = 0; rank < 2; ++rank)
    EXPECT_EQ(switchyard::pack_route_meta(golden_tables(*c, rank), make_config(*c), 2, rank), published_bytes(rank)) << rank;
}

void expect_equal(const LedgerTables& a, const LedgerTables& b) {
  EXPECT_EQ(a.world, b.world);
  EXPECT_EQ(a.num_experts, b.num_experts);
  EXPECT_EQ(a.num_experts_padded, b.num_experts_padded);
  EXPECT_EQ(a.num_local_experts, b.num_local_experts);
  EXPECT_EQ(a.peer_token_per_expert, b.peer_token_per_expert);
  EXPECT_EQ(a.expanded_row_idx, b.expanded_row_idx);
  EXPECT_EQ(a.cumsum_per_expert, b.cumsum_per_expert);
  EXPECT_EQ(a.dispatch_offset, b.dispatch_offset);
  EXPECT_EQ(a.prev_sum_before_rank, b.prev_sum_before_rank);
}

/// Ranks with different token and expert counts, tokens without a route, and ranks without tokens.
std::shared_ptr<const LedgerCase> uneven_case(int world) {
  LedgerScenario s;
  s.problem.world = world;
  s.problem.experts = 2 * world + 1;
  s.problem.topk = 3;
  s.problem.alignment = 4;
  for (int r = 0; r < world; ++r) s.tokens.push_back(r % 3 == 1 ? 0 : 4 + r % 5);
  s.hidden = 24;
  s.drop_percent = 20;
  return make_ledger_case(s);
}

TEST(LedgerFormat, ThereAndBack) {
  for (const int world : {1, 2, 5, 8, 64}) {
    const auto c = uneven_case(world);
    const LedgerConfig config = make_config(*c);
    for (int rank = 0; rank < world; ++rank) {
      const LedgerTables tables = golden_tables(*c, rank);
      const int64_t tokens = c->problem.tokens(rank);
      std::vector<std::byte> bytes = switchyard::pack_route_meta(tables, config, world, rank);
      const auto at = switchyard::route_meta_layout(config, world, rank, tokens);
      EXPECT_EQ(bytes.size(), at.bytes);
      EXPECT_LE(at.bytes, switchyard::ledger_format_bytes(config, world, 24).route_meta);
      for (const size_t begin : {at.peer_token_per_expert, at.expanded_row_idx, at.cumsum_per_expert, at.dispatch_offset,
                                 at.prev_sum_before_rank, at.bytes})
        EXPECT_EQ(begin % 64, 0u);
      bytes.resize(bytes.size() + 100, std::byte{0xEE});  // a larger buffer
      expect_equal(tables, switchyard::unpack_route_meta(bytes, config, world, rank, tokens));
    }
  }
}

/// Runs `body` on every rank of a group that has memory for an operator for this case.
std::vector<Outcome> ledger_outcomes(const LedgerCase& c, const std::function<void(switchyard::Group&)>& body) {
  const int world = c.problem.world;
  const size_t heap = switchyard::LedgerCombine::heap_bytes(make_config(c), world);
  return outcomes(world, options_with(std::chrono::seconds(60), heap), body);
}

/// The operator is run twice from bytes alone and gives the same bits as with tables and as the oracle.
TEST(LedgerFormat, CombineByPackedTables) {
  for (const int world : {1, 2, 8}) {
    const auto c = uneven_case(world);
    const auto all = ledger_outcomes(*c, [&](switchyard::Group& group) {
      switchyard::LedgerCombine ledger(group, make_config(*c));
      LedgerRankData data(*c, group.rank(), 0);
      ledger.combine(data.y(), data.probs(), data.tables(), data.out().data());
      const std::vector<std::byte> by_tables = data.out();
      std::vector<std::byte> bytes = switchyard::pack_route_meta(data.tables(), ledger.config(), world, group.rank());
      for (int turn = 0; turn < 2; ++turn) {
        std::fill(data.out().begin(), data.out().end(), std::byte{0xEE});
        switchyard::combine_by_ledger(data.y(), data.probs(), bytes, ledger, c->problem.tokens(group.rank()),
                                      data.out().data());
        bytes.resize(bytes.size() + 100, std::byte{0xEE});  // a larger buffer
        EXPECT_EQ(data.out(), by_tables);
        Failures f;
        data.check_out(f);
        const switchyard::ConstRows returned = ledger.returned();
        data.check_returned(returned.data, returned.rows, f);
        EXPECT_FALSE(f.any()) << joined(f.take());
      }
    });
    for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
  }
}

/// If bytes are invalid on one rank, its error names the field and index, and the errors on the other ranks name that rank.
TEST(LedgerFormat, CombineByBytesThatAreWrong) {
  constexpr int kWorld = 3, kBad = 2;
  const auto c = uneven_case(kWorld);
  const auto at = switchyard::route_meta_layout(make_config(*c), kWorld, kBad, c->problem.tokens(kBad));
  struct Spoiled {
    size_t begin;  ///< offset of the value that is overwritten
    int32_t value;
    int64_t more_tokens;  ///< in addition to the rank's own tokens
    size_t bytes;
    const char* in_text;
  };
  const Spoiled cases[] = {
      {at.peer_token_per_expert + 4 * (16 + 1), -3, 0, at.bytes, "LedgerTables::peer_token_per_expert[1][1] = -3: must be at"},
      {at.expanded_row_idx + 4 * 2, 77, 0, at.bytes, "LedgerTables::expanded_row_idx[2] = 77: must be -1 or below"},
      {at.cumsum_per_expert + 4 * 16, -1, 0, at.bytes, "LedgerTables::cumsum_per_expert[1][0] = -1: must be"},
      {at.dispatch_offset, -4, 0, at.bytes, "LedgerTables::dispatch_offset[0] = -4: must be at least 0"},
      {at.prev_sum_before_rank + 4 * 2, 99, 0, at.bytes, "LedgerTables::prev_sum_before_rank[1][0] = 99: must be"},
      {at.dispatch_offset, 0, 0, at.bytes - 1, "route_meta.size() = "},
      {at.dispatch_offset, 0, 100, at.bytes, "tokens = "},
  };
  for (const Spoiled& bad : cases) {
    const auto all = ledger_outcomes(*c, [&](switchyard::Group& group) {
      switchyard::LedgerCombine ledger(group, make_config(*c));
      LedgerRankData data(*c, group.rank(), 0);
      std::vector<std::byte> bytes = switchyard::pack_route_meta(data.tables(), ledger.config(), kWorld, group.rank());
      int64_t tokens = c->problem.tokens(group.rank());
      if (group.rank() == kBad) {
        put(bytes, bad.begin, {bad.value});
        bytes.resize(bad.bytes);
        tokens += bad.more_tokens;
      }
      switchyard::combine_by_ledger(data.y(), data.probs(), bytes, ledger, tokens, data.out().data());
    });
    EXPECT_EQ(code_name(all[kBad].code), "invalid_argument") << all[kBad].text;
    EXPECT_NE(all[kBad].text.find(bad.in_text), std::string::npos) << all[kBad].text;
    for (int r = 0; r < kBad; ++r) {
      EXPECT_EQ(code_name(all[static_cast<size_t>(r)].code), "peer_failed") << bad.in_text;
      EXPECT_EQ(all[static_cast<size_t>(r)].failed_rank, kBad);
    }
  }
}

TEST(LedgerFormat, WhatIsWrongIsNamed) {
  const LedgerConfig config = published_config(64, 7168, 8, 4);
  const auto refused = [&](const char* in_text, std::vector<std::byte> bytes, int64_t tokens = 64, int rank = 1) {
    const Outcome o = outcome_of([&] { (void)switchyard::unpack_route_meta(bytes, config, 2, rank, tokens); });
    EXPECT_EQ(code_name(o.code), "invalid_argument") << in_text;
    EXPECT_NE(o.text.find(in_text), std::string::npos) << o.text;
  };
  const auto with = [](size_t at, int32_t value) {
    std::vector<std::byte> bytes = published_bytes(1);
    put(bytes, at, {value});
    return bytes;
  };
  EXPECT_NO_THROW((void)switchyard::unpack_route_meta(published_bytes(1), config, 2, 1, 64));
  refused("route_meta.size() = 2431: must be at least 2432, the tables of rank 1 with 64 tokens", std::vector<std::byte>(2431));
  refused("tokens = 65: must be in [0, 64]", published_bytes(1), 65);
  refused("rank = 2: must be in [0, 1]", published_bytes(1), 64, 2);
  refused("peer_token_per_expert[1][2] = -1: must be at least 0", with(4 * (16 + 2), -1));
  refused("peer_token_per_expert[0][5] = 1: must be 0 in the padding columns, from 4 on", with(4 * 5, 1));
  refused("expanded_row_idx[3] = 512: must be -1 or below 512", with(128 + 4 * 3, 512));
  refused("cumsum_per_expert[0][0] = 0: must be 128, the inclusive prefix", with(2176, 0));
  refused("dispatch_offset[1] = 255: must be at least 256", with(2304 + 4, 255));
  refused("prev_sum_before_rank[1][0] = 0: must be 128", with(2368 + 4 * 2, 0));
  refused("cumsum_per_expert[0][0] = ", published_bytes(1), 32);  // bytes of another M, which have other field offsets

  LedgerTables tables = switchyard::unpack_route_meta(published_bytes(0), config, 2, 0, 64);
  tables.dispatch_offset[1] = 0;
  const Outcome o = outcome_of([&] { (void)switchyard::pack_route_meta(tables, config, 2, 0); });
  EXPECT_NE(o.text.find("dispatch_offset[1] = 0: must be at least 256"), std::string::npos) << o.text;
}

}  // namespace
}  // namespace harness
