// SPDX-License-Identifier: Apache-2.0
// Acceptance cases E1 to E20 of the flat exchange: every sum and, in the two-call form, every row, source and count is compared
// bit by bit, with both send methods.
//
// Entries: flat_threads and flat_processes; on GPUs, gpu_flat_threads and gpu_flat_processes. flat_full_test runs the contest's
// shapes at full size.
#include <algorithm>

#include "harness/everywhere.hpp"
#include "modes/flat/flat_shapes.hpp"

namespace harness {
namespace {

struct FlatWhere : Where {
  int num_sms;  ///< FlatScript::num_sms
};

class Flat : public testing::TestWithParam<FlatWhere> {
 protected:
  int world() const { return GetParam().world; }

  FlatScript script(const std::string& name, int experts, int topk, int64_t max_tokens, int64_t hidden = 144) const {
    FlatScript s;
    s.name = name;
    s.world = world();
    s.config.hidden = hidden;
    s.config.num_experts = experts;
    s.config.topk = topk;
    s.config.max_tokens = max_tokens;
    s.config.dtype = DType::f16;
    s.config.scales = ScaleKind::none;
    s.num_sms = GetParam().num_sms;
    s.seed = oracle::mix(std::hash<std::string>{}(name), static_cast<uint64_t>(world()));
    s.repeats = kSanitizer ? 1 : 3;
    s.max_delay_us = 100;
    return s;
  }
  /// Token counts from 0 to `max`, different on every rank.
  std::vector<int64_t> tokens(int64_t max, uint64_t seed) const {
    std::vector<int64_t> t;
    for (int r = 0; r < world(); ++r)
      t.push_back(static_cast<int64_t>(oracle::mix(seed, static_cast<uint64_t>(r)) % static_cast<uint64_t>(max + 1)));
    return t;
  }
  std::vector<int64_t> all(int64_t t) const { return std::vector<int64_t>(static_cast<size_t>(world()), t); }

  void expect_exact(const std::vector<FlatScript>& scripts) const {
    std::vector<FlatScript> both;
    for (FlatScript s : scripts) {
      for (const Sending sending : {Sending::per_rank, Sending::per_route}) {
        s.config.sending = sending;
        both.push_back(s);
        both.back().name += sending == Sending::per_rank ? " (per rank)" : " (per route)";
      }
    }
    EXPECT_EQ(run_scripts(ranks_of_suite(), GetParam().workers, both), "");
  }
};

/// Some sources have no rows for some ranks, or no rows at all, in consecutive calls on ranks that are late by varying amounts:
/// no flag is lost, and none is read too late.
TEST_P(Flat, E15_BackToBack) {
  auto s = script("E15", 2 * world(), 2, 5, 48);
  std::vector<int64_t> only_last = all(0);
  only_last.back() = 5;
  s.call(all(5), Routing::single_peer);
  s.call(only_last, Routing::own_rank);
  s.call(all(3), Routing::own_rank);
  s.call(tokens(5, 1), Routing::one_rank);
  s.call(all(0));
  // 1000 calls, except where processes share a GPU and take turns on it.
  const bool slow = kBackend == switchyard::Backend::cuda && ranks_of_suite() == Ranks::processes && world() > 5;
  s.repeats = kSanitizer || slow ? 40 : 200;
  expect_exact({s});
}

TEST_P(Flat, E16_OddShapes) {
  struct Shape {
    int64_t hidden;
    int topk, experts, pieces;
  };
  const Shape shapes[] = {{2880, 3, 12, 0}, {1, 5, 7, 0},       {7, 1, 1, 1},
                          {131, 3, 9, 2},   {1001, 32, 40, 16}, {272, 5, world(), 3}};
  constexpr DType kTypes[] = {DType::f16, DType::bf16, DType::f32};
  const int64_t max = kSanitizer ? 2 : 5;
  std::vector<FlatScript> scripts;
  for (const Shape& shape : shapes) {
    auto s = script("E16 H " + std::to_string(shape.hidden), shape.experts, shape.topk, max, shape.hidden);
    s.config.dtype = kTypes[(scripts.size() + static_cast<size_t>(world())) % 3];
    s.config.pieces = shape.pieces;
    s.call(tokens(max, 3));
    s.call(all(max), Routing::zipf).two_calls = true;
    s.calls.back().int64_ids = false;
    scripts.push_back(s);
  }
  expect_exact(scripts);
}

TEST_P(Flat, E17_FullAndEmpty) {
  auto s = script("E17", world() + 1, 3, 6);
  std::vector<int64_t> first_empty = all(6);
  first_empty.front() = 0;
  for (const auto& t : {all(6), all(0), first_empty, all(1), all(0), all(0), all(6)}) s.call(t);
  s.calls[2].two_calls = true;
  auto one = script("E17 at most one token", world(), 2, 1);
  one.call(all(1));
  one.call(tokens(1, 4));
  expect_exact({s, one});
}

TEST_P(Flat, TypesAndOptions) {
  std::vector<FlatScript> scripts;
  for (const DType type : {DType::bf16, DType::f16, DType::f32}) {
    auto s = script("types " + std::to_string(static_cast<int>(type)), 2 * world() + 1, 4, 6, 200);
    s.config.dtype = type;
    for (int i = 0; i < 4; ++i) {
      FlatCall& call = s.call(tokens(6, static_cast<uint64_t>(i)));
      call.weights = (i & 1) == 0;
      call.scaled = (i & 2) == 0;
      call.int64_ids = i < 2;
      call.x_pattern = Pattern::wild_values;
    }
    s.call(all(6)).two_calls = true;
    s.calls.back().x_pattern = Pattern::wild_values;
    scripts.push_back(s);
  }
  expect_exact(scripts);
}

TEST_P(Flat, DuplicatesAndDrops) {
  std::vector<FlatScript> scripts;
  auto repeated = script("duplicates", 2 * world() + 1, 5, 7);
  repeated.call(all(7), Routing::duplicates);
  repeated.call(tokens(7, 2), Routing::one_expert);
  repeated.call(all(7), Routing::duplicates).two_calls = true;
  scripts.push_back(repeated);
  for (const int percent : {30, 100}) {
    auto s = script("drops " + std::to_string(percent), world() + 2, 4, 7);
    s.call(tokens(7, 5)).drop_percent = percent;
    s.call(all(7), Routing::duplicates).drop_percent = percent;
    s.call(all(7)).two_calls = true;
    s.calls.back().drop_percent = percent;
    scripts.push_back(s);
  }
  expect_exact(scripts);
}

/// The caller supplies the experts' function, which must be applied to every element with the correct row, type and column.
/// Covers rows that are split into pieces and rows of odd sizes, alternating with calls without a function.
TEST_P(Flat, RowFunctions) {
  std::vector<FlatScript> scripts;
  for (const DType type : {DType::bf16, DType::f16, DType::f32}) {
    for (const int64_t hidden : {int64_t{272}, int64_t{131}}) {
      auto s = script("function " + std::to_string(static_cast<int>(type)) + " H " + std::to_string(hidden), 2 * world() + 1, 3,
                      6, hidden);
      s.config.dtype = type;
      s.config.pieces = type == DType::f32 ? 1 : 2;
      for (const auto routing : {Routing::uniform, Routing::duplicates, Routing::one_expert}) {
        FlatCall& call = s.call(tokens(6, static_cast<uint64_t>(hidden)), routing);
        call.function = true;
        call.weights = routing != Routing::uniform;
        call.x_pattern = Pattern::wild_values;
        call.drop_percent = 20;
      }
      s.call(all(6));
      s.call(all(6)).function = true;
      scripts.push_back(s);
    }
  }
  expect_exact(scripts);
}

/// Runs of 1, 2, 3 and 1 whole calls on one object, each followed by a pair of calls, across the epoch wraparound.
TEST_P(Flat, InterleavedOverTheWrap) {
  auto s = script("interleaved", world() + 1, 3, 4, 32);
  s.first_epoch = (uint64_t{1} << 40) - 5;
  for (const int whole : {1, 2, 3, 1}) {
    for (int i = 0; i < whole; ++i) s.call(tokens(4, 10 * static_cast<uint64_t>(whole) + static_cast<uint64_t>(i)));
    s.call(tokens(4, static_cast<uint64_t>(whole))).two_calls = true;
  }
  expect_exact({s});
}

std::string flat_where_name(const testing::TestParamInfo<FlatWhere>& info) {
  return where_name({Where(info.param), info.index});
}
/// On GPUs, uses as many multiprocessors as a worker has warps.
std::vector<FlatWhere> on_few_multiprocessors() {
  std::vector<FlatWhere> all;
  for (const Where& where : everywhere()) all.push_back({where, where.workers.warps});
  return all;
}
INSTANTIATE_TEST_SUITE_P(Everywhere, Flat, testing::ValuesIn(on_few_multiprocessors()), flat_where_name);

#if defined(SWITCHYARD_TEST_CUDA)
/// Calls as in user code, on the multiprocessors chosen by the library, which are all those of a rank. Uses few processes,
/// because processes that share a GPU take turns on it.
std::vector<FlatWhere> on_all_multiprocessors() {
  std::vector<FlatWhere> all;
  for (const Where& where : everywhere())
    if (ranks_of_suite() == Ranks::threads || where.world <= 2) all.push_back({where, 0});
  return all;
}
INSTANTIATE_TEST_SUITE_P(AllMultiprocessors, Flat, testing::ValuesIn(on_all_multiprocessors()), flat_where_name);

/// Shared memory has no room for the ids: kernels read them and count places with them in memory of the caller or of dispatch.
TEST(FlatLarge, MoreIdsThanSharedMemoryHolds) {
  std::vector<FlatScript> scripts;
  for (const DType type : {DType::bf16, DType::f16}) {
    for (const Sending sending : {Sending::per_rank, Sending::per_route}) {
      FlatScript s;
      s.name = std::string("8192 tokens of ") + (type == DType::bf16 ? "bf16" : "f16") +
               (sending == Sending::per_rank ? " (per rank)" : " (per route)");
      s.world = 2;
      s.config.hidden = 16;
      s.config.num_experts = 256;
      s.config.topk = 8;
      s.config.max_tokens = 8192;
      s.config.dtype = type;
      s.config.scales = ScaleKind::none;
      s.config.sending = sending;
      s.num_sms = 0;
      s.call({8192, 8001}).scaled = false;
      s.call({8190, 8192}, Routing::duplicates).drop_percent = 10;
      s.calls.back().int64_ids = false;
      s.call({7999, 8192}).function = true;
      s.call({8192, 8192}).two_calls = true;
      s.call({8192, 7003}, Routing::duplicates).two_calls = true;
      s.calls.back().scaled = false;
      scripts.push_back(s);
    }
  }
  EXPECT_EQ(run_scripts(ranks_of_suite(), {2, 1, false}, scripts), "");
}
#endif

TEST(FlatRanks, Many) {
  const int world = many_ranks();
  std::vector<FlatScript> scripts;
  for (const Sending sending : {Sending::per_rank, Sending::per_route}) {
    FlatScript s;
    s.name = sending == Sending::per_rank ? "many ranks (per rank)" : "many ranks (per route)";
    s.world = world;
    s.config.hidden = 24;
    s.config.num_experts = 2 * world + 3;
    s.config.topk = 5;
    s.config.max_tokens = 3;
    s.config.dtype = DType::f16;
    s.config.scales = ScaleKind::none;
    s.config.sending = sending;
    for (int i = 0; i < 4; ++i) {
      std::vector<int64_t> tokens;
      for (int r = 0; r < world; ++r) tokens.push_back((r + i) % 4);
      s.call(tokens, i == 2 ? Routing::one_rank : Routing::uniform).two_calls = i == 1;
    }
    s.repeats = kSanitizer ? 1 : 3;
    scripts.push_back(s);
  }
  EXPECT_EQ(run_scripts(ranks_of_suite(), {1, 1, false}, scripts), "");
}

// --- The contest's shapes

class Contest : public testing::TestWithParam<ContestRun> {};

/// E1 to E14. Long rows are shortened, so a shape takes at most a second.
TEST_P(Contest, IsExact) {
  const auto& [shape, world, num_sms] = GetParam();
  const int64_t elements = shape.max_tokens * shape.topk * shape.hidden;
  const int64_t cut = kSanitizer ? elements >> 16 : elements >> 20;
  const int64_t columns = shape.hidden / std::max<int64_t>(1, cut);
  auto script = contest_script(shape, world, columns);
  script.num_sms = num_sms;
  EXPECT_EQ(run_scripts(ranks_of_suite(), {2, 1, false}, {script}), "");
}

INSTANTIATE_TEST_SUITE_P(E01toE14, Contest, testing::ValuesIn(contest_runs(2)), contest_run_name);
#if defined(SWITCHYARD_TEST_CUDA)
INSTANTIATE_TEST_SUITE_P(E01toE14_AllMultiprocessors, Contest, testing::ValuesIn(contest_runs(0)), contest_run_name);
#endif

/// The contest's leaderboard runs repeatedly with different seeds. flat_full_test runs each benchmark with a hundred seeds.
TEST(ContestSeeds, E20_EveryThirteenth) {
  std::vector<FlatScript> scripts;
  ContestShape shape = kContestShapes[0];
  for (int i = 0; i < 25; ++i, shape.seed += 13) scripts.push_back(contest_script(shape, 4, 48));
  EXPECT_EQ(run_scripts(ranks_of_suite(), {2, 1, false}, scripts), "");
}

// --- Workers

class FlatWorkers : public testing::TestWithParam<Workers> {};

TEST_P(FlatWorkers, E18_OneToMany) {
  auto script = contest_script({8, 3, 272, 12, 5}, 4, 272);
  script.num_sms = std::min(GetParam().blocks * GetParam().warps, 28);  // GPUs: four ranks fit on 114 multiprocessors
  EXPECT_EQ(run_scripts(ranks_of_suite(), GetParam(), {script}), "");
}

INSTANTIATE_TEST_SUITE_P(E18, FlatWorkers,
                         testing::Values(Workers{1, 1}, Workers{1, 8}, Workers{8, 1, true}, Workers{4, 4}, Workers{64, 1}),
                         [](const auto& kind) { return to_string(kind.param); });

}  // namespace
}  // namespace harness
