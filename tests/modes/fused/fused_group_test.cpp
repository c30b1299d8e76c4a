// SPDX-License-Identifier: Apache-2.0
// FusedMoe on the CPU, with ranks as threads and as processes: every element of every output equals an integer closed form, for
// every world size and every kind of worker. unit/layer/moe_fused_test.cpp tests it with real products.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/index.hpp"
#include "harness/draw.hpp"
#include "harness/everywhere.hpp"
#include "harness/outcome.hpp"
#include "modes/fused/fused_moe_rig.hpp"
#include "testing/test_access.hpp"

namespace harness {
namespace {

using namespace std::chrono_literals;
using switchyard::CombineOrder;
using switchyard::DType;
using switchyard::ErrorCode;
using switchyard::ExpertIds;
using switchyard::first_expert;
using switchyard::Group;
using switchyard::Overflow;
using switchyard::detail::FusedMoe;
using switchyard::detail::FusedMoeCall;
using switchyard::detail::FusedMoeConfig;

using switchyard::detail::idx;

/// A layer and its calls.
struct Scenario {
  FusedMoeConfig config;
  std::vector<int64_t> tokens;  ///< T of each rank
  bool one_expert = false;      ///< all routes go to the last expert; else to any expert, and some to none
  bool weighted = true;
  bool add = false;
  bool in_heap = false;  ///< the caller writes its tokens to the heap, from which peers read them
  bool stated = false;   ///< there are ids for two more tokens, and T is read from memory
  bool halves = false;   ///< dispatch_up and down_combine instead of forward
  bool doubled = false;  ///< in addition, the caller doubles all rows between the halves
  int64_t tile = 5;      ///< number of rows

  int world() const { return static_cast<int>(tokens.size()); }
};

Scenario scenario(int world) {
  Scenario s;
  for (int r = 0; r < world; ++r) s.tokens.push_back(world > 1 && r == 1 ? 0 : 11 + 7 * r % 5);
  s.config.hidden = 24;
  s.config.intermediate = 40;
  s.config.num_experts = 2 * world + 1;
  s.config.topk = 3;
  s.config.max_tokens = *std::max_element(s.tokens.begin(), s.tokens.end()) + 2;
  return s;
}

uint64_t hash_of(int call, int rank, int64_t a, int64_t b) {
  return oracle::mix(oracle::mix(static_cast<uint64_t>(call), static_cast<uint64_t>(rank)),
                     oracle::mix(static_cast<uint64_t>(a), static_cast<uint64_t>(b)));
}
float token_value(int call, int rank, int64_t t, int64_t c) { return static_cast<float>(hash_of(call, rank, t, c) % 4); }
float base_value(int rank, int64_t t, int64_t c) { return static_cast<float>(hash_of(99, rank, t, c) % 100); }
float weight_value(int call, int rank, int64_t f) { return static_cast<float>(1 + hash_of(call, rank, f, -1) % 3); }

/// The experts chosen for a rank's tokens.
std::vector<int32_t> ids_of(const Scenario& s, int call, int rank) {
  std::vector<int32_t> ids;
  for (int64_t f = 0; f < s.tokens[idx(rank)] * s.config.topk; ++f) {
    const auto any = static_cast<int32_t>(hash_of(call, rank, f, -2) % idx(s.config.num_experts + 1)) - 1;
    ids.push_back(s.one_expert ? s.config.num_experts - 1 : any);
  }
  return ids;
}

int owner_of(const Scenario& s, int32_t expert) {
  int owner = 0;
  while (first_expert(s.config.num_experts, s.world(), owner + 1) <= expert) ++owner;
  return owner;
}

/// The routes of `rank` that exceed a capacity. A rank's rows are ordered by expert, source, token and k.
std::vector<uint8_t> drops_of(const Scenario& s, int call, int rank) {
  std::vector<uint8_t> dropped(ids_of(s, call, rank).size());
  if (s.config.capacity == 0) return dropped;
  for (int owner = 0; owner < s.world(); ++owner) {
    int64_t row = 0;
    for (int e = first_expert(s.config.num_experts, s.world(), owner);
         e < first_expert(s.config.num_experts, s.world(), owner + 1); ++e) {
      for (int source = 0; source < s.world(); ++source) {
        const std::vector<int32_t> ids = ids_of(s, call, source);
        for (size_t f = 0; f < ids.size(); ++f)
          if (ids[f] == e && row++ >= s.config.capacity && source == rank) dropped[f] = 1;
      }
    }
  }
  return dropped;
}

std::vector<uint16_t> as_bf16(const std::vector<float>& values) {
  std::vector<uint16_t> out(values.size());
  for (size_t i = 0; i < values.size(); ++i)
    oracle::store(DType::bf16, reinterpret_cast<std::byte*>(out.data()), static_cast<int64_t>(i), values[i]);
  return out;
}

float as_bf16(float value) {
  std::byte rounded[2];
  oracle::store(DType::bf16, rounded, 0, value);
  return oracle::load(DType::bf16, rounded, 0);
}

/// The expected rows of `out` for a call: float32 sums of integers, whose order does not matter, rounded once; per_rank, the
/// sum of each rank is also rounded.
std::vector<uint16_t> expected_rows(const Scenario& s, int call, int rank) {
  const std::vector<int32_t> ids = ids_of(s, call, rank);
  const std::vector<uint8_t> dropped = drops_of(s, call, rank);
  std::vector<float> sums;
  for (int64_t t = 0; t < s.tokens[idx(rank)]; ++t) {
    const auto between = [&](int64_t j) { return token_value(call, rank, t, j % s.config.hidden); };
    for (int64_t c = 0; c < s.config.hidden; ++c) {
      float sum = s.add ? base_value(rank, t, c) : 0;
      std::vector<float> of_rank(idx(s.world()));
      for (int64_t f = t * s.config.topk; f < (t + 1) * s.config.topk; ++f) {
        if (ids[idx(f)] < 0 || dropped[idx(f)] != 0) continue;
        const float y =
            (between(c % s.config.intermediate) + between(s.config.intermediate - 1)) * static_cast<float>(ids[idx(f)] + 1);
        const float added = (s.weighted ? weight_value(call, rank, f) * y : y) * (s.doubled ? 2.F : 1.F);
        (s.config.order == CombineOrder::per_rank ? of_rank[idx(owner_of(s, ids[idx(f)]))] : sum) += added;
      }
      for (const float one : of_rank) sum += as_bf16(one);
      sums.push_back(sum);
    }
  }
  return as_bf16(sums);
}

/// Makes a rank's calls one after the other.
class Caller {
 public:
  Caller(Group& group, const Scenario& s)
      : s_(s),
        rank_(group.rank()),
        layer_(group, s.config,
               std::make_shared<IntegerProducts>(s.config.hidden, s.config.intermediate,
                                                 first_expert(s.config.num_experts, s.world(), rank_), s.tile)) {}

  void call(int call, Failures& f) {
    const int64_t tokens = s_.tokens[idx(rank_)], given = s_.stated ? tokens + 2 : tokens;
    std::vector<float> x, base, weights;
    for (int64_t t = 0; t < given; ++t) {
      for (int64_t c = 0; c < s_.config.hidden; ++c) {
        x.push_back(token_value(call, rank_, t, c));
        base.push_back(base_value(rank_, t, c));
      }
    }
    for (int64_t i = 0; i < given * s_.config.topk; ++i) weights.push_back(weight_value(call, rank_, i));
    const std::vector<uint16_t> rows = as_bf16(x);
    std::vector<uint16_t> out = as_bf16(base), expected = expected_rows(s_, call, rank_);
    expected.insert(expected.end(), out.begin() + static_cast<std::ptrdiff_t>(expected.size()), out.end());
    std::vector<int32_t> ids = ids_of(s_, call, rank_);
    ids.resize(idx(given * s_.config.topk), 0);
    const auto stated = static_cast<int32_t>(tokens);
    if (s_.in_heap && given > 0) std::memcpy(layer_.tokens(), rows.data(), rows.size() * 2);
    f.set_context("call " + std::to_string(call));
    const void* const given_x = s_.in_heap ? layer_.tokens() : rows.data();
    const ExpertIds given_ids = ExpertIds::of(ids.data(), given, s_.config.topk);
    const float* const given_weights = s_.weighted ? weights.data() : nullptr;
    const bool per_rank = s_.config.order == CombineOrder::per_rank;
    const FusedMoeCall settings{.device_tokens = s_.stated ? &stated : nullptr, .add = s_.add};
    if (s_.halves) {
      layer_.dispatch_up(given_x, given_ids, per_rank ? given_weights : nullptr, settings);
      look_between(call, f);
      layer_.down_combine(per_rank ? nullptr : given_weights, out.data(), {.add = s_.add});
    } else {
      layer_.forward(given_x, given_ids, given_weights, out.data(), settings);
    }
    f.equal_range(expected, out, "out");
    const bool reports = s_.config.overflow == Overflow::drop_and_report;
    f.equal_range(reports ? drops_of(s_, call, rank_) : std::vector<uint8_t>(), layer_.dropped(), "dropped");
  }
  FusedMoe& layer() { return layer_; }

 private:
  /// The rows of this rank's experts are contiguous, one per kept route.
  void look_between(int call, Failures& f) {
    const switchyard::detail::FusedMoeRows between = layer_.rows();
    const int first = first_expert(s_.config.num_experts, s_.world(), rank_),
              end = first_expert(s_.config.num_experts, s_.world(), rank_ + 1);
    int64_t row = 0;
    for (int e = first; e < end; ++e) {
      int64_t kept = 0;
      for (int source = 0; source < s_.world(); ++source) {
        const std::vector<int32_t> chosen = ids_of(s_, call, source);
        const std::vector<uint8_t> dropped = drops_of(s_, call, source);
        for (size_t i = 0; i < chosen.size(); ++i) kept += chosen[i] == e && dropped[i] == 0 ? 1 : 0;
      }
      f.equal(row, between.first_row[e - first], "first row of expert " + std::to_string(e));
      f.equal(kept, between.num_rows[e - first], "rows of expert " + std::to_string(e));
      row += kept;
    }
    f.check(row <= between.max_rows, "more rows than max_rows");
    auto* const h = static_cast<std::byte*>(between.data);
    for (int64_t i = 0; s_.doubled && i < row * s_.config.intermediate; ++i)
      oracle::store(DType::bf16, h, i, 2 * oracle::load(DType::bf16, h, i));
  }

  const Scenario& s_;
  int rank_;
  FusedMoe layer_;
};

void expect_exact_in_order(const Scenario& s, const Workers& workers, int calls) {
  const Fleet fleet = fleet_of(s.world(), workers, FusedMoe::heap_bytes(s.config, s.world()));
  const auto failures = run_ranks(ranks_of_suite(), fleet, [&](Group& group, Failures& f) {
    switchyard::detail::number_calls_from(group, (uint64_t{1} << 40) - 2);  // epochs wrap
    Caller caller(group, s);
    for (int call = 0; call < calls && !f.any(); ++call) caller.call(call, f);
  });
  EXPECT_EQ(joined(failures), "");
}

/// In both orders.
void expect_exact(Scenario s, const Workers& workers, int calls = 3) {
  for (const CombineOrder order : {CombineOrder::per_route, CombineOrder::per_rank}) {
    s.config.order = order;
    SCOPED_TRACE(to_string(order));
    expect_exact_in_order(s, workers, calls);
  }
}

class FusedMoes : public testing::TestWithParam<Where> {
 protected:
  static Scenario in_this_world() { return scenario(GetParam().world); }
  static void expect_exact(const Scenario& s) { harness::expect_exact(s, GetParam().workers); }
};

TEST_P(FusedMoes, AreExact) { expect_exact(in_this_world()); }

TEST_P(FusedMoes, AddToWhatIsThereAndNeedNoWeights) {
  Scenario s = in_this_world();
  s.add = true;
  s.weighted = false;
  expect_exact(s);
}

TEST_P(FusedMoes, TakeTokensFromTheHeapAndTFromMemory) {
  Scenario s = in_this_world();
  s.in_heap = s.stated = true;
  expect_exact(s);
}

TEST_P(FusedMoes, DropRoutesBeyondCapacity) {
  Scenario s = in_this_world();
  s.config.overflow = Overflow::drop_and_report;
  s.config.capacity = 7;
  expect_exact(s);
  s.one_expert = true;
  expect_exact(s);
}

TEST_P(FusedMoes, ComeInTwoHalves) {
  Scenario s = in_this_world();
  s.halves = true;
  expect_exact(s);
  s.add = s.stated = s.in_heap = true;
  expect_exact(s);
  s.add = false;
  s.doubled = true;
  s.config.overflow = Overflow::drop_and_report;
  s.config.capacity = 7;
  expect_exact(s);
}

TEST_P(FusedMoes, GiveOneExpertEverything) {
  Scenario s = in_this_world();
  s.one_expert = true;
  s.tile = 1;
  expect_exact(s);
}

TEST_P(FusedMoes, HaveRanksWithoutExpertsAndWithoutTokens) {
  Scenario s = in_this_world();
  s.config.num_experts = (s.world() + 1) / 2;
  s.tile = 1000;
  expect_exact(s);
  s.tokens.assign(s.tokens.size(), 0);
  expect_exact(s);
  s.config.max_tokens = 0;
  expect_exact(s);
}

INSTANTIATE_TEST_SUITE_P(Everywhere, FusedMoes, testing::ValuesIn(everywhere()), where_name);

/// A single worker per rank does all work in turn.
TEST(FusedMoeWorkers, OneSuffices) {
  for (const int world : {1, 2, 3, 8}) {
    Scenario s = scenario(world);
    expect_exact(s, {1, 1, false}, 10);
    s.halves = true;
    expect_exact(s, {1, 1, false}, 10);
  }
}

/// Ranks are processes, because threads of one group always have the same number of workers.
TEST(FusedMoeWorkers, MayDifferByRank) {
  const Scenario s = scenario(3);
  Fleet fleet = fleet_of(3, {2, 2, false}, FusedMoe::heap_bytes(s.config, 3));
  if (ranks_of_suite() == Ranks::processes) {
    fleet.per_rank.assign(3, fleet.options);
    fleet.per_rank[1].num_blocks = fleet.per_rank[1].num_warps = 1;
    fleet.per_rank[2].num_warps = 3;
  }
  const auto failures = run_ranks(ranks_of_suite(), fleet, [&](Group& group, Failures& f) {
    Caller caller(group, s);
    for (int call = 0; call < 5; ++call) caller.call(call, f);
  });
  EXPECT_EQ(joined(failures), "");
}

/// During sleep, the heap releases its memory except for the flags. Two layers of one group do not interfere.
TEST(FusedMoeObject, GoesOnAfterSleep) {
  const Scenario s = scenario(3);
  const Fleet fleet = fleet_of(3, {1, 2, false}, 2 * FusedMoe::heap_bytes(s.config, 3));
  const auto failures = run_ranks(ranks_of_suite(), fleet, [&](Group& group, Failures& f) {
    Caller first(group, s), second(group, s);
    for (int call = 0; call < 3; ++call) {
      first.call(call, f);
      second.call(call + 7, f);
      group.sleep();
      const Outcome end = outcome_of([&] { first.call(call, f); });
      f.equal(std::string("invalid_argument"), code_name(end.code), "code of " + end.text);
      group.wake();
    }
    second.call(3, f);
    first.call(4, f);
  });
  EXPECT_EQ(joined(failures), "");
}

/// Nothing is written, and the layer stays usable.
TEST(FusedMoeCapacity, IsAnErrorOnAllRanks) {
  Scenario s = scenario(3);
  s.config.capacity = 20;
  s.one_expert = true;
  const Fleet fleet = fleet_of(3, {1, 2, false}, FusedMoe::heap_bytes(s.config, 3));
  const auto failures = run_ranks(ranks_of_suite(), fleet, [&](Group& group, Failures& f) {
    Caller caller(group, s);
    std::vector<uint16_t> x(idx(s.config.max_tokens * s.config.hidden)), out(x.size(), 7), untouched = out;
    const std::vector<int32_t> all(idx(s.config.max_tokens * s.config.topk), 0);
    for (int i = 0; i < 2; ++i) {
      const Outcome end = outcome_of([&] {
        caller.layer().forward(x.data(), ExpertIds::of(all.data(), s.config.max_tokens, s.config.topk), nullptr, out.data());
      });
      f.equal(std::string("capacity_exceeded"), code_name(end.code), "code");
      f.check(end.text.find("rank 0 would receive 153 rows, its capacity is 20; ") != std::string::npos, end.text);
      f.check(out == untouched, "out was written");
      std::vector<uint16_t> none(x.size(), 7);
      const std::vector<int32_t> nobody(all.size(), -1);
      caller.layer().forward(x.data(), ExpertIds::of(nobody.data(), s.config.max_tokens, s.config.topk), nullptr, none.data());
      f.check(none == std::vector<uint16_t>(x.size()), "the next call gave no zeros");
    }
  });
  EXPECT_EQ(joined(failures), "");
}

/// A half called out of order, or with arguments for the other half, causes an error that ends the group.
TEST(FusedMoeObject, TakesHalvesInTurn) {
  const auto up = [](FusedMoeRig& rig) { rig.layer.dispatch_up(rig.rows.data(), rig.expert_ids(), nullptr); };
  const auto down = [](FusedMoeRig& rig, const FusedMoeCall& call = {}) {
    rig.layer.down_combine(rig.weights.data(), rig.out.data(), call);
  };
  const auto refused = [&](const std::string& text, bool behind_up, const std::function<void(FusedMoeRig&)>& call) {
    std::vector<Group> groups = Group::in_process(1);
    FusedMoeRig rig(groups[0]);
    rig.round();
    if (behind_up) up(rig);
    expect_text(outcome_of([&] { call(rig); }), ErrorCode::invalid_argument, text);
  };
  refused("down_combine has to follow dispatch_up, which has not been called", false, [&](auto& rig) { down(rig); });
  refused("down_combine has to follow dispatch_up", true, up);
  refused("down_combine has to follow dispatch_up", true, [](auto& rig) { rig.round(); });
  refused("out is null", true, [](auto& rig) { rig.layer.down_combine(nullptr, nullptr); });
  refused("with per_route, down_combine takes the weights", false,
          [](auto& rig) { rig.layer.dispatch_up(rig.rows.data(), rig.expert_ids(), rig.weights.data()); });
  refused("x is null", false, [](auto& rig) { rig.layer.dispatch_up(nullptr, rig.expert_ids(), nullptr); });
  const int32_t tokens = 1;
  refused("MoeLayerCall::device_tokens", true, [&](auto& rig) { down(rig, {.device_tokens = &tokens}); });

  {
    std::vector<Group> groups = Group::in_process(1);
    FusedMoeConfig config = FusedMoeRig::config();
    config.order = CombineOrder::per_rank;
    FusedMoeRig rig(groups[0], config);
    up(rig);
    expect_text(outcome_of([&] { down(rig); }), ErrorCode::invalid_argument, "with per_rank, dispatch_up takes the weights");
  }

  std::vector<Group> groups = Group::in_process(1);
  FusedMoeRig rig(groups[0]);
  rig.round();
  const auto whole = rig.out;
  for (int i = 0; i < 3; ++i) {
    up(rig);
    std::fill(rig.out.begin(), rig.out.end(), uint16_t{7});
    down(rig);
    EXPECT_EQ(rig.out, whole);
  }
  rig.round();
  EXPECT_EQ(rig.out, whole);
}

TEST(FusedMoeObject, ClampsTFromMemory) {
  std::vector<Group> groups = Group::in_process(1);
  FusedMoeRig rig(groups[0]);
  const auto with = [&](int32_t tokens) {
    std::vector<uint16_t> out(rig.out.size(), 7);
    rig.layer.forward(rig.rows.data(), rig.expert_ids(), rig.weights.data(), out.data(), {.device_tokens = &tokens});
    return out;
  };
  rig.round();
  EXPECT_EQ(with(1000), rig.out);
  EXPECT_EQ(with(FusedMoeRig::kTokens), rig.out);
  EXPECT_EQ(with(-3), std::vector<uint16_t>(rig.out.size(), 7));
}

TEST(FusedMoeObject, IsMoved) {
  std::vector<Group> groups = Group::in_process(1);
  FusedMoeRig rig(groups[0]);
  FusedMoe moved = std::move(rig.layer);
  const auto empty = [&](const std::function<void()>& call) {
    expect_text(outcome_of(call), ErrorCode::invalid_argument, "FusedMoe is empty");
  };
  // NOLINTBEGIN(bugprone-use-after-move)
  empty([&] { rig.round(); });
  empty([&] { (void)rig.layer.tokens(); });
  empty([&] { (void)rig.layer.rows(); });
  empty([&] { (void)rig.layer.dropped(); });
  empty([&] { (void)rig.layer.config(); });
  empty([&] { (void)rig.layer.last_call(); });
  // NOLINTEND(bugprone-use-after-move)
  EXPECT_TRUE(moved.dropped().empty());
  rig.layer = std::move(moved);
  rig.round();
  EXPECT_GT(rig.layer.last_call().total_us, 0);
  EXPECT_GT(rig.layer.last_call().local_bytes, 0u);
  EXPECT_EQ(rig.layer.last_call().remote_bytes, 0u);
  EXPECT_EQ(rig.layer.config().intermediate, FusedMoeRig::kIntermediate);
}

/// SWITCHYARD_RANDOM_LAYERS: the number of layers (default: 30).
TEST(FusedMoeShapes, AtRandom) {
  const uint64_t layers = from_environment("SWITCHYARD_RANDOM_LAYERS", 30);
  for (uint64_t i = 0; i < layers && !HasFailure(); ++i) {
    Draw draw(i + 500);
    Scenario s;
    s.tokens.resize(idx(draw.between(1, 5)));
    for (int64_t& t : s.tokens) t = draw.one_in(4) ? 0 : draw.between(1, 30);
    s.config.hidden = 8 * draw.between(1, 12);
    s.config.intermediate = 8 * draw.between(1, 12);
    s.config.num_experts = static_cast<int>(draw.between(1, 20));
    s.config.topk = static_cast<int>(draw.between(1, 8));
    s.config.max_tokens = *std::max_element(s.tokens.begin(), s.tokens.end()) + 2;
    s.config.overflow = Overflow::drop_and_report;
    if (draw.one_in(3)) s.config.capacity = draw.between(1, 40);
    s.one_expert = draw.one_in(6);
    s.weighted = draw.one_in(2);
    s.add = draw.one_in(3);
    s.in_heap = draw.one_in(3);
    s.stated = draw.one_in(3);
    s.halves = draw.one_in(3);
    s.tile = draw.between(1, 20);
    const Workers workers{static_cast<int>(draw.between(1, 2)), static_cast<int>(draw.between(1, 2)), draw.one_in(2)};
    SCOPED_TRACE("layer " + std::to_string(i));
    expect_exact(s, workers);
  }
}

}  // namespace
}  // namespace harness
