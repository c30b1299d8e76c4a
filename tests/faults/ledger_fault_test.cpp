// SPDX-License-Identifier: Apache-2.0
// Ledger combine (case D8) and faults specific to this mode: rejected tables, ranks with different ledgers, and the rank that
// is named among many. fault_stories_test.cpp covers the faults common to all modes.
#include <gtest/gtest.h>

#include <cstring>

#include "faults/stalled_page.hpp"
#include "modes/ledger/small_ledger.hpp"

namespace harness {
namespace {

using namespace std::chrono_literals;
using switchyard::ErrorCode;
using switchyard::Group;
using switchyard::LedgerCombine;
using switchyard::LedgerConfig;
using switchyard::LedgerTables;
using switchyard::PreparedLedger;

/// Two ranks and five experts (three on rank 0), with some ids out of range and each expert's rows padded to a multiple of 4.
std::shared_ptr<const LedgerCase> small_case(uint64_t seed = 3) {
  LedgerScenario s;
  s.name = "small";
  s.problem.world = 2;
  s.problem.experts = 5;
  s.problem.topk = 2;
  s.problem.alignment = 4;
  s.tokens = {9, 6};
  s.hidden = 16;
  s.seed = seed;
  s.drop_percent = 10;
  return make_ledger_case(s);
}

// --- Tables that are refused

struct BadTables {
  const char* name;
  const char* in_text;  ///< names field and index
  void (*spoil)(LedgerTables& t, LedgerConfig& config);
};
std::ostream& operator<<(std::ostream& out, const BadTables& b) { return out << b.name; }

/// Returns the last route that has a row.
size_t late_route(const LedgerTables& t) {
  size_t f = t.expanded_row_idx.size() - 1;
  while (t.expanded_row_idx[f] < 0) --f;
  return f;
}

const BadTables kBadTables[] = {
    {"world", "LedgerTables::world = 3", [](LedgerTables& t, LedgerConfig&) { t.world = 3; }},
    {"experts", "LedgerTables::num_experts = 4", [](LedgerTables& t, LedgerConfig&) { t.num_experts = 4; }},
    {"padding", "LedgerTables::num_experts_padded = 5", [](LedgerTables& t, LedgerConfig&) { t.num_experts_padded = 5; }},
    {"num_local_experts", "LedgerTables::num_local_experts = 2",
     [](LedgerTables& t, LedgerConfig&) { t.num_local_experts = 2; }},
    {"short_counts", "peer_token_per_expert.size() = 31",
     [](LedgerTables& t, LedgerConfig&) { t.peer_token_per_expert.pop_back(); }},
    {"short_prefix", "cumsum_per_expert.size() = 31", [](LedgerTables& t, LedgerConfig&) { t.cumsum_per_expert.pop_back(); }},
    {"short_offsets", "dispatch_offset.size() = 2", [](LedgerTables& t, LedgerConfig&) { t.dispatch_offset.pop_back(); }},
    {"long_sums", "prev_sum_before_rank.size() = 7",
     [](LedgerTables& t, LedgerConfig&) { t.prev_sum_before_rank.push_back(0); }},
    {"half_a_token", "expanded_row_idx.size() = 17: must be a multiple of topk = 2",
     [](LedgerTables& t, LedgerConfig&) { t.expanded_row_idx.pop_back(); }},
    {"too_many_tokens", "expanded_row_idx.size() = 18: ", [](LedgerTables&, LedgerConfig& c) { c.max_tokens = 8; }},
    {"negative_count", "peer_token_per_expert[1][2] = -1: must be at least 0",
     [](LedgerTables& t, LedgerConfig&) { t.peer_token_per_expert[16 + 2] = -1; }},
    {"rows_of_no_expert", "peer_token_per_expert[0][7] = 1: must be 0 in the padding columns, from 5 on",
     [](LedgerTables& t, LedgerConfig&) { t.peer_token_per_expert[7] = 1; }},
    {"exclusive_prefix", "cumsum_per_expert[0][0] = 0: must be ",
     [](LedgerTables& t, LedgerConfig&) {
       t.cumsum_per_expert.insert(t.cumsum_per_expert.begin(), 0);
       t.cumsum_per_expert.pop_back();
     }},
    {"prefix_of_padding", "cumsum_per_expert[1][15] = 0: must be ",
     [](LedgerTables& t, LedgerConfig&) { t.cumsum_per_expert[31] = 0; }},
    {"prefix_one_off", "cumsum_per_expert[1][3] = ", [](LedgerTables& t, LedgerConfig&) { t.cumsum_per_expert[16 + 3]++; }},
    {"more_rows_than_room", "max_tokens * topk = 18 returned rows",
     [](LedgerTables& t, LedgerConfig&) {
       t.peer_token_per_expert[16] += 10;
       for (size_t e = 0; e < 16; ++e) t.cumsum_per_expert[16 + e] += 10;
     }},
    {"overlapping_experts", "dispatch_offset[1] = 0: must be at least ",
     [](LedgerTables& t, LedgerConfig&) { t.dispatch_offset[1] = 0; }},
    {"negative_offset", "dispatch_offset[0] = -4: must be at least 0",
     [](LedgerTables& t, LedgerConfig&) { t.dispatch_offset[0] = -4; }},
    {"beyond_int32", "dispatch_offset[2] = 2147483647: the expert's ",
     [](LedgerTables& t, LedgerConfig&) { t.dispatch_offset[2] = 2147483647; }},
    {"beyond_max_rows", "must end within 10 rows", [](LedgerTables&, LedgerConfig& c) { c.max_rows = 10; }},
    {"sum_before", "prev_sum_before_rank[1][2] = 99: must be ",
     [](LedgerTables& t, LedgerConfig&) { t.prev_sum_before_rank[3 + 2] = 99; }},
    {"row_too_low", "expanded_row_idx[4] = -2: must be -1 or below ",
     [](LedgerTables& t, LedgerConfig&) { t.expanded_row_idx[4] = -2; }},
    {"row_too_high", "= 18: must be -1 or below ",
     [](LedgerTables& t, LedgerConfig&) { t.expanded_row_idx[late_route(t)] = 18; }},
    {"row_twice", "has this row already",
     [](LedgerTables& t, LedgerConfig&) { t.expanded_row_idx[late_route(t)] = t.expanded_row_idx[0]; }},
};

class LedgerCheck : public testing::TestWithParam<BadTables> {};

TEST_P(LedgerCheck, NamesFieldAndIndex) {
  const auto c = small_case();
  LedgerTables tables = golden_tables(*c, 0);
  LedgerConfig config = make_config(*c);
  EXPECT_NO_THROW(switchyard::check_ledger(tables, config, 2, 0));
  GetParam().spoil(tables, config);
  const Outcome o = outcome_of([&] { switchyard::check_ledger(tables, config, 2, 0); });
  EXPECT_EQ(code_name(o.code), "invalid_argument");
  EXPECT_NE(o.text.find(GetParam().in_text), std::string::npos) << o.text;
}

INSTANTIATE_TEST_SUITE_P(D08, LedgerCheck, testing::ValuesIn(kBadTables),
                         [](const auto& b) { return std::string(b.param.name); });

TEST(Ledger, D08_AllRoutesAtMinusOneAreLegal) {
  const auto c = small_case();
  LedgerTables tables = golden_tables(*c, 1);
  std::fill(tables.expanded_row_idx.begin(), tables.expanded_row_idx.end(), -1);
  EXPECT_NO_THROW(switchyard::check_ledger(tables, make_config(*c), 2, 1));
}

// --- Sizes

TEST(Ledger, MemoryIsWhatItSays) {
  LedgerConfig config = published_config(5, 37, 3, 7);
  const auto need = LedgerCombine::memory_required(config, 3);
  auto groups = Group::in_process(3, options_with(10s, LedgerCombine::heap_bytes(config, 3)));
  switchyard::launch::on_threads(groups.size(), [&](size_t r) {
    LedgerCombine ledger(groups[r], config);
    EXPECT_EQ(groups[r].heap_used(), need.total());
  });
  EXPECT_EQ(groups[0].heap_used(), 0u);
}

// --- Objects and ranks

TEST(Ledger, PrepareIsLocalAndForOneObject) {
  const auto c = small_case();
  const auto all = outcomes(2, options_with(60s, size_t{1} << 20), [&](Group& group) {
    SmallLedger one(group, c), two(group, c);
    LedgerTables broken = one.tables;
    broken.dispatch_offset[0] = -1;
    EXPECT_EQ(code_name(outcome_of([&] { (void)one.ledger.prepare(broken); }).code), "invalid_argument");
    one.combine();  // the peers are not affected
    const PreparedLedger prepared = one.ledger.prepare(one.tables);
    if (group.rank() == 0) two.combine();
    if (group.rank() == 1) {
      const Outcome o = outcome_of([&] { two.ledger.combine(two.y, nullptr, prepared, two.out); });
      EXPECT_NE(o.text.find("prepared by another LedgerCombine"), std::string::npos) << o.text;
    }
  });
  EXPECT_EQ(code_name(all[0].code), "peer_failed") << all[0].text;
}

TEST(Ledger, RanksWithOtherLedgersFindOut) {
  const auto c = small_case();
  const auto all = outcomes(2, options_with(60s), [&](Group& group) {
    SmallLedger rig(group, c);
    LedgerTables& t = rig.tables;
    if (group.rank() == 1) {  // its tables have one row fewer from rank 0 in the last expert
      ASSERT_GT(t.peer_token_per_expert[4], 0);
      t.peer_token_per_expert[4]--;
      for (size_t e = 4; e < 16; ++e) t.cumsum_per_expert[e]--;
      t.prev_sum_before_rank[2 + 1]--;
    }
    rig.combine();
  });
  expect_mismatch(all);
  for (const Outcome& o : all) EXPECT_NE(o.text.find("ledgers differ"), std::string::npos) << o.text;
}

/// The fifth of eight ranks is silent: the other ranks still sum all tokens that do not need it, and the error names the silent
/// rank.
TEST(Ledger, TheSilentOneIsNamedAmongMany) {
  LedgerScenario s;
  s.problem.world = 8;
  s.problem.experts = 8;
  s.problem.topk = 1;
  s.routing = Routing::own_rank;
  s.tokens.assign(8, 4);
  s.hidden = 16;
  const auto c = make_ledger_case(s);
  const auto all = outcomes(8, options_with(kSoon), [&](Group& group) {
    SmallLedger rig(group, c);
    group.barrier();
    if (group.rank() == 5) return;
    const Outcome o = outcome_of([&] { rig.combine(); });
    Failures f;
    rig.data.check_out(f);  // all rows were the rank's own
    EXPECT_FALSE(f.any()) << joined(f.take());
    EXPECT_EQ(code_name(o.code), "peer_timeout") << o.text;
    EXPECT_EQ(o.report.awaited_rank, 5);
  });
  for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
}

/// Rank 0's token needs two rows, from ranks 1 and 2. Rank 1's row has arrived. Rank 2 has entered the call but stops before
/// sending its row, and is therefore named.
TEST(Ledger, TheRankWhoseRowIsMissingIsNamed) {
  for (const int64_t hidden : {64, 65}) {  // sentinel rows, and others
    SCOPED_TRACE(hidden);
    LedgerScenario s;
    s.problem.world = 3;
    s.problem.experts = 3;
    s.problem.topk = 3;
    s.tokens = {1, 0, 0};
    s.hidden = hidden;
    const auto c = make_ledger_case(s);
    StalledPage page;
    const auto all = outcomes(3, options_with(kSoon), [&](Group& group) {
      SmallLedger rig(group, c);
      rig.combine();  // ensures that in the next call all ranks have made a call before
      const PreparedLedger ledger = rig.ledger.prepare(rig.tables);
      if (group.rank() == 2) {
        ASSERT_EQ(rig.y.rows, 1);
        std::memcpy(page.data(), rig.y.data, static_cast<size_t>(hidden) * 2);
        rig.y.data = page.data();
        page.stall();
      }
      group.barrier();
      const Outcome o = outcome_of([&] { rig.ledger.combine(rig.y, rig.data.probs(), ledger, rig.out); });
      if (group.rank() != 0) return;  // rank 1 does not wait for any row
      EXPECT_TRUE(page.was_held());
      EXPECT_EQ(code_name(o.code), "peer_timeout") << o.text;
      EXPECT_EQ(o.report.awaited_rank, 2);
      EXPECT_STREQ(o.report.site, hidden == 64 ? "returned" : "ledger_rows");
      page.release();
    });
    for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
  }
}

/// Flags and sentinel rows survive sleep: a sentinel word that became zero would look as if it had arrived.
TEST(Ledger, SleepBetweenCalls) {
  const auto c = small_case();
  const auto all = outcomes(2, options_with(60s, size_t{8} << 20), [&](Group& group) {
    SmallLedger rig(group, c);
    const PreparedLedger prepared = rig.ledger.prepare(rig.tables);
    for (int i = 0; i < 3; ++i) {
      Failures f("turn " + std::to_string(i));
      rig.ledger.combine(rig.y, rig.data.probs(), prepared, rig.out);
      rig.data.check_out(f);
      group.sleep();
      const Outcome o = outcome_of([&] { (void)rig.ledger.returned(); });
      EXPECT_NE(o.text.find("the group sleeps"), std::string::npos) << o.text;
      group.wake();
      EXPECT_FALSE(f.any()) << joined(f.take());
    }
  });
  for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
}

TEST(Ledger, ObjectsAndLedgersInTurn) {
  const auto a = small_case(5), b = small_case(6);
  const auto all = outcomes(2, options_with(60s), [&](Group& group) {
    SmallLedger one(group, a), two(group, b);
    const PreparedLedger first = one.ledger.prepare(one.tables), second = one.ledger.prepare(two.tables);
    LedgerCombine moved = std::move(one.ledger);
    for (int i = 0; i < 3; ++i) {
      Failures f("turn " + std::to_string(i));
      moved.combine(one.y, one.data.probs(), first, one.out);
      one.data.check_out(f);
      two.combine();
      two.data.check_out(f);
      moved.combine(two.y, two.data.probs(), second, two.out);
      two.data.check_out(f);
      two.data.check_returned(moved.returned().data, moved.returned().rows, f);
      EXPECT_FALSE(f.any()) << joined(f.take());
    }
  });
  for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
}

}  // namespace
}  // namespace harness
