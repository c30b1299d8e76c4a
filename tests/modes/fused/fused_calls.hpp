// SPDX-License-Identifier: Apache-2.0
// Calls of FusedMoe on CPU groups, with ranks as threads or processes, and their results: an integer closed form of every
// element of every output.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/index.hpp"
#include "harness/draw.hpp"
#include "harness/everywhere.hpp"
#include "modes/fused/fused_moe_rig.hpp"
#include "testing/test_access.hpp"

namespace harness {

using switchyard::CombineOrder;
using switchyard::DType;
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
  bool alternates = false;      ///< one_expert in every second call
  bool weighted = true;
  bool add = false;
  bool in_heap = false;  ///< the caller writes its tokens to the heap, from which peers read them
  bool stated = false;   ///< there are ids for two more tokens, and T is read from memory
  bool halves = false;   ///< dispatch_up and down_combine instead of forward
  bool doubled = false;  ///< in addition, the caller doubles all rows between the halves
  int64_t tile = 5;      ///< number of rows

  int world() const { return static_cast<int>(tokens.size()); }
};

inline Scenario scenario(int world) {
  Scenario s;
  for (int r = 0; r < world; ++r) s.tokens.push_back(world > 1 && r == 1 ? 0 : 11 + 7 * r % 5);
  s.config.hidden = 24;
  s.config.intermediate = 40;
  s.config.num_experts = 2 * world + 1;
  s.config.topk = 3;
  s.config.max_tokens = *std::max_element(s.tokens.begin(), s.tokens.end()) + 2;
  return s;
}

/// Sizes, tokens and kinds of arguments at random.
inline Scenario scenario_at_random(Draw& draw) {
  Scenario s;
  s.tokens.resize(idx(draw.between(1, 5)));
  for (int64_t& t : s.tokens) t = draw.one_in(4) ? 0 : draw.between(1, 30);
  s.config.hidden = 8 * draw.between(1, 12);
  s.config.intermediate = 8 * draw.between(1, 12);
  s.config.num_experts = static_cast<int>(draw.between(1, 20));
  s.config.topk = static_cast<int>(draw.between(1, 8));
  s.config.max_tokens = *std::max_element(s.tokens.begin(), s.tokens.end()) + 2;
  s.weighted = draw.one_in(2);
  s.add = draw.one_in(3);
  s.in_heap = draw.one_in(3);
  s.stated = draw.one_in(3);
  s.tile = draw.between(1, 20);
  return s;
}
inline Workers workers_at_random(Draw& draw) {
  return {static_cast<int>(draw.between(1, 2)), static_cast<int>(draw.between(1, 2)), draw.one_in(2)};
}

inline uint64_t hash_of(int call, int rank, int64_t a, int64_t b) {
  return oracle::mix(oracle::mix(static_cast<uint64_t>(call), static_cast<uint64_t>(rank)),
                     oracle::mix(static_cast<uint64_t>(a), static_cast<uint64_t>(b)));
}
inline float token_value(int call, int rank, int64_t t, int64_t c) { return static_cast<float>(hash_of(call, rank, t, c) % 4); }
inline float base_value(int rank, int64_t t, int64_t c) { return static_cast<float>(hash_of(99, rank, t, c) % 100); }
inline float weight_value(int call, int rank, int64_t f) { return static_cast<float>(1 + hash_of(call, rank, f, -1) % 3); }

/// The experts chosen for a rank's tokens.
inline std::vector<int32_t> ids_of(const Scenario& s, int call, int rank) {
  std::vector<int32_t> ids;
  for (int64_t f = 0; f < s.tokens[idx(rank)] * s.config.topk; ++f) {
    const auto any = static_cast<int32_t>(hash_of(call, rank, f, -2) % idx(s.config.num_experts + 1)) - 1;
    ids.push_back(s.one_expert || (s.alternates && call % 2 == 1) ? s.config.num_experts - 1 : any);
  }
  return ids;
}

inline int owner_of(const Scenario& s, int32_t expert) {
  int owner = 0;
  while (first_expert(s.config.num_experts, s.world(), owner + 1) <= expert) ++owner;
  return owner;
}

/// The routes of `rank` that exceed a capacity. A rank's rows are ordered by expert, source, token and k.
inline std::vector<uint8_t> drops_of(const Scenario& s, int call, int rank) {
  std::vector<uint8_t> dropped(ids_of(s, call, rank).size());
  if (s.config.capacity == 0 || s.config.overflow == Overflow::split) return dropped;
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

inline std::vector<uint16_t> as_bf16(const std::vector<float>& values) {
  std::vector<uint16_t> out(values.size());
  for (size_t i = 0; i < values.size(); ++i)
    oracle::store(DType::bf16, reinterpret_cast<std::byte*>(out.data()), static_cast<int64_t>(i), values[i]);
  return out;
}

inline float as_bf16(float value) {
  std::byte rounded[2];
  oracle::store(DType::bf16, rounded, 0, value);
  return oracle::load(DType::bf16, rounded, 0);
}

/// The expected rows of `out` for a call: float32 sums of integers, whose order does not matter, rounded once; per_rank, the
/// sum of each rank is also rounded.
inline std::vector<uint16_t> expected_rows(const Scenario& s, int call, int rank) {
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

inline void expect_exact_in_order(const Scenario& s, const Workers& workers, int calls) {
  const Fleet fleet = fleet_of(s.world(), workers, FusedMoe::heap_bytes(s.config, s.world()));
  const auto failures = run_ranks(ranks_of_suite(), fleet, [&](Group& group, Failures& f) {
    switchyard::detail::number_calls_from(group, (uint64_t{1} << 40) - 2);  // epochs wrap
    Caller caller(group, s);
    for (int call = 0; call < calls && !f.any(); ++call) caller.call(call, f);
  });
  EXPECT_EQ(joined(failures), "");
}

/// In both orders.
inline void expect_exact(Scenario s, const Workers& workers, int calls = 3) {
  for (const CombineOrder order : {CombineOrder::per_route, CombineOrder::per_rank}) {
    s.config.order = order;
    SCOPED_TRACE(to_string(order));
    expect_exact_in_order(s, workers, calls);
  }
}

}  // namespace harness
