// SPDX-License-Identifier: Apache-2.0
// Ledger combine, cases D1 to D7, D10 and D11: returned rows and sums are compared bit by bit.
//
// Entries: ledger_threads and ledger_processes (label multiproc). Timeout: 120 s.
#include <array>
#include <map>
#include <set>

#include "harness/everywhere.hpp"
#include "modes/ledger/ledger_rig.hpp"

namespace harness {
namespace {

using Cases = std::vector<std::shared_ptr<const LedgerCase>>;

constexpr int kRepeats = kSanitizer ? 1 : 3;

LedgerScenario shape(const std::string& name, int world, int experts, int topk, std::vector<int64_t> tokens,
                     int64_t hidden = 64) {
  LedgerScenario s;
  s.name = name;
  s.problem.world = world;
  s.problem.experts = experts;
  s.problem.topk = topk;
  s.problem.alignment = 1;
  s.tokens = std::move(tokens);
  s.hidden = hidden;
  s.repeats = kRepeats;
  return s;
}
std::vector<int64_t> each(int world, int64_t tokens) { return std::vector<int64_t>(static_cast<size_t>(world), tokens); }

LedgerScenario published(int64_t tokens, int64_t hidden, int topk, int experts_per_rank) {
  LedgerScenario s = shape("published", 2, 2 * experts_per_rank, topk, each(2, tokens), hidden);
  s.fixture = true;
  return s;
}

TEST(Ledger, D01_D02_PublishedShapes) {
  for (const Workers& workers : {Workers{1, 1, false}, Workers{2, 3, true}}) {
    for (const int sms : {2, 0}) {  // CUDA: 0 means all that the rank may use; on the CPU the workers count
      if (sms == 0 && kBackend != switchyard::Backend::cuda) continue;
      LedgerScenario large = published(64, kSanitizer ? 1024 : 7168, 8, 2), quick = published(8, 64, 2, 1);
      large.num_sms = quick.num_sms = sms;
      EXPECT_EQ(run_cases(ranks_of_suite(), workers, {make_ledger_case(large)}), "");
      EXPECT_EQ(run_cases(ranks_of_suite(), workers, {make_ledger_case(quick)}), "");
    }
  }
}

TEST(Ledger, D01_TheFixturesTables) {
  const auto c = make_ledger_case(published(64, 8, 8, 2));
  const switchyard::LedgerTables zero = golden_tables(*c, 0), one = golden_tables(*c, 1);
  for (int e = 0; e < 4; ++e) EXPECT_EQ(zero.peer_token_per_expert[static_cast<size_t>(e)], 128);
  EXPECT_EQ(std::vector<int32_t>(zero.expanded_row_idx.begin(), zero.expanded_row_idx.begin() + 6),
            (std::vector<int32_t>{0, 128, 256, 384, 1, 129}));
  EXPECT_EQ(std::vector<int32_t>(one.expanded_row_idx.begin(), one.expanded_row_idx.begin() + 5),
            (std::vector<int32_t>{128, 256, 384, 0, 129}));
  EXPECT_EQ(one.dispatch_offset, (std::vector<int32_t>{0, 256}));
  EXPECT_EQ(zero.prev_sum_before_rank, (std::vector<int32_t>{0, 0, 128, 128}));
}

/// One and several workers, with immediate and deferred copies. Groups on GPUs have no workers.
std::vector<Workers> kinds_of_workers() {
  if (kBackend == switchyard::Backend::cuda) return {Workers{}};
  return {{1, 1, false}, {2, 1, true}, {2, 2, false}, {2, 3, true}};
}

/// Records which pairs of values from two draws occurred together in a case.
class PairsSeen {
 public:
  using Draws = std::array<int, 6>;
  void add(const Draws& draws) {
    for (size_t a = 0; a < draws.size(); ++a) {
      values_[a].insert(draws[a]);
      for (size_t b = 0; b < a; ++b) pairs_[{b, a}].insert({draws[b], draws[a]});
    }
  }
  void expect_all() const {
    for (const auto& [which, met] : pairs_)
      EXPECT_EQ(met.size(), values_[which.first].size() * values_[which.second].size()) << which.first << ", " << which.second;
  }

 private:
  std::set<int> values_[std::tuple_size_v<Draws>];
  std::map<std::pair<size_t, size_t>, std::set<std::pair<int, int>>> pairs_;
};

/// Type, experts and workers are drawn for each shape, so no two of the six draws are coupled.
TEST(Ledger, D03_ShapesOfAllKinds) {
  const DType types[] = {DType::f16, DType::bf16, DType::f32};
  const int experts[] = {1, 2, 3, 17};
  const std::vector<Workers> kinds = kinds_of_workers();
  PairsSeen seen;
  int n = 0;
  for (const int world : {1, 2, 4, 8}) {
    std::vector<Cases> cases(kinds.size());
    for (const int64_t hidden : {64, 1000, 1024, 1100, 7168}) {
      for (const int topk : {1, 2, 8, 16, 17, 32}) {
        const auto draw = [&](uint64_t what, size_t of) { return oracle::mix(1, static_cast<uint64_t>(n), what) % of; };
        ++n;
        const DType type = types[draw(0, 3)];
        const int per_rank = experts[draw(1, 4)];
        const size_t kind = draw(2, kinds.size());
        seen.add({world, static_cast<int>(hidden), topk, static_cast<int>(type), per_rank, static_cast<int>(kind)});
        if (kSanitizer && n % 5 != 0) continue;
        LedgerScenario s = shape("H" + std::to_string(hidden) + " K" + std::to_string(topk) + " E/W" + std::to_string(per_rank),
                                 world, world * per_rank, topk, each(world, hidden * topk > 50000 ? 1 : 3), hidden);
        s.type = type;
        s.seed = static_cast<uint64_t>(n);
        cases[kind].push_back(make_ledger_case(s));
      }
    }
    for (size_t kind = 0; kind < kinds.size(); ++kind) {
      if (cases[kind].empty()) continue;
      EXPECT_EQ(run_cases(ranks_of_suite(), kinds[kind], cases[kind]), "") << "W" << world << " " << to_string(kinds[kind]);
    }
  }
  seen.expect_all();
}

TEST(Ledger, ManyRanks) {
  const int world = many_ranks();
  Cases cases;
  for (const DType type : {DType::f16, DType::bf16, DType::f32}) {
    for (const int64_t hidden : {24, 7}) {  // sentinel rows, rows followed by flags
      LedgerScenario s = shape("many ranks", world, 2 * world + 2, 4, each(world, 2), hidden);
      s.type = type;
      s.tokens[5] = s.tokens.back() = 0;
      s.mask_percent = 20;
      cases.push_back(make_ledger_case(s));
    }
  }
  EXPECT_EQ(run_cases(ranks_of_suite(), {1, 1, false}, cases), "");
}

class LedgerAcceptance : public testing::TestWithParam<Where> {
 protected:
  int world() const { return GetParam().world; }
  LedgerScenario base(const std::string& name, int topk, int64_t tokens, int64_t hidden = 64) const {
    return shape(name, world(), 2 * world() + 3, topk, each(world(), tokens), hidden);  // some ranks hold one expert more
  }
  void expect_exact(const std::vector<LedgerScenario>& scenarios) const {
    Cases cases;
    for (LedgerScenario s : scenarios) {
      s.num_sms = GetParam().workers.warps;
      cases.push_back(make_ledger_case(s));
    }
    EXPECT_EQ(run_cases(ranks_of_suite(), GetParam().workers, cases), "");
  }
};

TEST_P(LedgerAcceptance, D04_RoutesThatAreNotThere) {
  std::vector<LedgerScenario> all;
  for (const int percent : {30, 100}) {
    LedgerScenario s = base("ids outside " + std::to_string(percent) + " %", 3, 9);
    s.drop_percent = percent;
    all.push_back(s);
    s = base("masked " + std::to_string(percent) + " %", 3, 9);
    s.mask_percent = percent;
    all.push_back(s);
  }
  expect_exact(all);
}

TEST_P(LedgerAcceptance, D05_CountsOfAllKinds) {
  std::vector<LedgerScenario> all;
  for (const int64_t rows : {1, 7, 8, 9, 16}) {
    LedgerScenario s = base("one expert, " + std::to_string(rows) + " rows", 1, rows, 1024);
    s.routing = Routing::one_expert;
    all.push_back(s);
  }
  for (const Routing routing : kAllRoutings) {
    LedgerScenario s = base(to_string(routing), 3, 11, 40);
    s.routing = routing;
    s.problem.alignment = 4;
    all.push_back(s);
  }
  expect_exact(all);
}

TEST_P(LedgerAcceptance, D07_CallsWithoutClearing) {
  LedgerScenario s = base("20 calls over the wrap", 2, 5, 32);
  s.first_epoch = (uint64_t{1} << 40) - 5;
  s.repeats = 20;
  s.mask_percent = 10;
  expect_exact({s});
}

TEST_P(LedgerAcceptance, D10_RowTypes) {
  std::vector<LedgerScenario> all;
  for (const DType type : {DType::f16, DType::bf16, DType::f32}) {
    for (const int64_t hidden : {1, 37, 1024}) {  // one element; odd bytes; whole vectors
      LedgerScenario s = base("type " + std::to_string(static_cast<int>(type)) + " H" + std::to_string(hidden), 3, 6, hidden);
      s.type = type;
      s.pattern = hidden == 37 ? Pattern::wild_values : Pattern::random_values;
      s.probs = hidden != 1;
      all.push_back(s);
    }
    LedgerScenario ones = base("words of ones", 3, 6, 512);  // equals the content of a row that has not arrived
    ones.type = type;
    ones.pattern = Pattern::blank_words;
    all.push_back(ones);
  }
  expect_exact(all);
}

/// Covers any assignment of the returned rows, not only that of a stable sort, and ranks without experts.
TEST_P(LedgerAcceptance, LedgersOfOtherMakers) {
  std::vector<LedgerScenario> all;
  for (const int64_t hidden : {64, 37}) {
    LedgerScenario s = base("rows in any order", 3, 9, hidden);
    s.shuffled = true;
    s.mask_percent = 20;
    s.problem.alignment = 8;
    all.push_back(s);
    s = base("fewer experts than ranks", 2, 7, hidden);
    s.problem.experts = world() > 1 ? world() - 1 : 1;
    all.push_back(s);
  }
  expect_exact(all);
}

TEST_P(LedgerAcceptance, D11_TokensDiffer) {
  LedgerScenario some = base("unequal", 3, 0), none = base("no tokens at all", 3, 0), last = base("only the last rank", 3, 0);
  for (int r = 0; r < world(); ++r) some.tokens[static_cast<size_t>(r)] = r % 3 == 1 ? 0 : 5 + 3 * r;
  last.tokens.back() = 13;
  expect_exact({some, none, last});
}

/// D6: the tables of a dispatch equal the oracle's, and a combine with them gives the same bits as a combine with the handle.
TEST_P(LedgerAcceptance, D06_LedgerOfADispatch) {
  if (kBackend == switchyard::Backend::cuda) GTEST_SKIP() << "speaks of host memory; gpu_object_test has it for GPUs";
  LedgerScenario s = base("from a dispatch", 3, 12, 64);
  s.problem.alignment = 8;
  s.drop_percent = 10;
  s.tokens.front() = 0;
  s.type = DType::bf16;
  const auto c = make_ledger_case(s);
  switchyard::NormalConfig normal;
  normal.hidden = s.hidden;
  normal.num_experts = c->problem.experts;
  normal.topk = c->problem.topk;
  normal.max_tokens = c->problem.max_tokens;
  normal.layout = Layout::expert_major;
  normal.expert_alignment = 8;
  normal.invalid_ids = switchyard::InvalidIds::count;
  Fleet fleet;
  fleet.world = world();
  fleet.options.heap_bytes =
      switchyard::NormalExchange::heap_bytes(normal, world()) + switchyard::LedgerCombine::heap_bytes(make_config(*c), world());
  fleet.options.num_blocks = GetParam().workers.blocks;
  fleet.options.num_warps = GetParam().workers.warps;
  fleet.deferred = GetParam().workers.deferred;
  const RankBody body = [&](switchyard::Group& group, Failures& f) {
    switchyard::NormalExchange exchange(group, normal);
    switchyard::LedgerCombine ledger(group, make_config(*c));
    LedgerRankData data(*c, group.rank(), 0);
    const std::vector<int64_t>& ids = c->problem.ids[static_cast<size_t>(group.rank())];
    const int64_t tokens = c->problem.tokens(group.rank());
    const std::vector<uint16_t> x(static_cast<size_t>(tokens * s.hidden), 0x3F80);
    const auto d = exchange.dispatch({x.data(), tokens, s.hidden, DType::bf16},
                                     switchyard::ExpertIds::of(ids.data(), tokens, normal.topk), data.probs());
    const switchyard::LedgerTables ours = d.handle.ledger(), golden = golden_tables(*c, group.rank());
    f.equal_range(golden.peer_token_per_expert, ours.peer_token_per_expert, "peer_token_per_expert");
    f.equal_range(golden.expanded_row_idx, ours.expanded_row_idx, "expanded_row_idx");
    f.equal_range(golden.cumsum_per_expert, ours.cumsum_per_expert, "cumsum_per_expert");
    f.equal_range(golden.dispatch_offset, ours.dispatch_offset, "dispatch_offset");
    f.equal_range(golden.prev_sum_before_rank, ours.prev_sum_before_rank, "prev_sum_before_rank");
    f.equal(data.y().rows, d.rows, "rows of the expert buffer");
    switchyard::CombineOptions options;
    options.order = CombineOrder::per_route;
    std::vector<std::byte> by_handle(data.out().size());
    exchange.combine(data.y(), d.handle, by_handle.data(), options);
    ledger.combine(data.y(), data.probs(), ours, data.out().data());
    f.check(by_handle == data.out(), "combine by the ledger and by the handle differ");
    data.check_out(f);
  };
  EXPECT_EQ(joined(run_ranks(ranks_of_suite(), fleet, body)), "");
}

INSTANTIATE_TEST_SUITE_P(Everywhere, LedgerAcceptance, testing::ValuesIn(everywhere()), where_name);

}  // namespace
}  // namespace harness
