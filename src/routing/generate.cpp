// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include "layout/addressing.hpp"
#include "routing/check.hpp"
#include "routing/portable_math.hpp"
#include "routing/random.hpp"
#include "switchyard/routing.hpp"

namespace switchyard {
namespace {

using detail::check_range;
using detail::ExpertRanges;
using detail::Purpose;
using detail::refuse;
using detail::TokenRandom;

constexpr const char* kGenerate = "generate";
constexpr std::array<const char*, 6> kPatternNames = {"uniform",     "zipf",          "all_to_one",
                                                      "round_robin", "group_limited", "rank_skew"};

/// rank_skew: routes of a token to the experts of the busiest rank, on average.
double skewed_routes(const GeneratorSpec& spec) { return spec.topk * spec.rank_skew / spec.world; }

/// Draws `k` numbers below `n` in random order; they are distinct unless `duplicates` is set.
class UniformDraw {
 public:
  /// The result is valid until the next call.
  std::span<const int32_t> draw(TokenRandom& random, int n, int k, bool duplicates) {
    drawn_.clear();
    sorted_.clear();
    for (int i = 0; i < k; ++i) {
      int32_t value = static_cast<int32_t>(random.below(static_cast<uint64_t>(duplicates ? n : n - i)));
      if (!duplicates) {
        // `value` counts only free numbers; numbers already drawn are skipped.
        auto at = sorted_.begin();
        for (; at != sorted_.end() && value >= *at; ++at) ++value;
        sorted_.insert(at, value);
      }
      drawn_.push_back(value);
    }
    return drawn_;
  }

 private:
  std::vector<int32_t> drawn_, sorted_;
};

/// Draws experts by popularity: position i has likelihood (i + 1)^-exponent.
class ZipfDraw {
 public:
  ZipfDraw(const GeneratorSpec& spec, bool used) {
    if (!used) return;
    expert_.resize(static_cast<size_t>(spec.num_experts));
    std::iota(expert_.begin(), expert_.end(), 0);
    TokenRandom random(spec.seed, 0, 0, Purpose::popularity);
    for (size_t i = expert_.size(); i > 1; --i) std::swap(expert_[i - 1], expert_[random.below(i)]);
    tail_.resize(expert_.size() + 1);
    tail_.back() = 0;
    for (size_t i = expert_.size(); i-- > 0;) {  // from the smallest value, so that the tail keeps its precision
      tail_[i] = tail_[i + 1] + detail::portable_exp(-spec.zipf_exponent * detail::portable_log(static_cast<double>(i + 1)));
    }
  }

  /// The result is valid until the next call.
  std::span<const int32_t> draw(TokenRandom& random, int k, bool duplicates) {
    drawn_.clear();
    sorted_.clear();
    for (int i = 0; i < k; ++i) {
      const size_t position = draw_position(random.unit());
      if (!duplicates) sorted_.insert(std::lower_bound(sorted_.begin(), sorted_.end(), position), position);
      drawn_.push_back(expert_[position]);
    }
    return drawn_;
  }

 private:
  /// Calls visit(first, last) for every non-empty range of free positions, in order, until it returns true.
  template <class Visit>
  void each_gap(Visit visit) const {
    size_t first = 0;
    for (const size_t taken : sorted_) {
      if (taken > first && visit(first, taken)) return;
      first = taken + 1;
    }
    if (first < expert_.size()) visit(first, expert_.size());
  }

  /// Returns the free position at fraction `unit` of the total likelihood of all free positions. At least one position must be
  /// free.
  size_t draw_position(double unit) const {
    double free = 0;
    each_gap([&](size_t first, size_t last) {
      free += tail_[first] - tail_[last];
      return false;
    });
    double rest = unit * free;
    size_t found = 0;
    each_gap([&](size_t first, size_t last) {
      // The first position p with tail[first] - tail[p + 1] > rest; because of rounding, the last gap may have none.
      const auto begin = tail_.begin() + static_cast<std::ptrdiff_t>(first) + 1;
      const auto end = tail_.begin() + static_cast<std::ptrdiff_t>(last) + 1;
      const auto at = std::partition_point(begin, end, [&](double tail) { return tail_[first] - tail <= rest; });
      found = at == end ? last - 1 : first + static_cast<size_t>(at - begin);
      rest -= tail_[first] - tail_[last];
      return at != end;
    });
    return found;
  }

  std::vector<int32_t> expert_;  ///< by popularity
  std::vector<double> tail_;     ///< likelihood of position i and all later positions
  std::vector<int32_t> drawn_;
  std::vector<size_t> sorted_;  ///< positions taken by this token
};

/// Chooses the experts for consecutive tokens.
class Generator {
 public:
  Generator(const GeneratorSpec& spec, int rank) : spec_(spec), rank_(rank), zipf_(spec, spec.pattern == Pattern::zipf) {}

  void fill(int64_t token, int32_t* ids, float* weights) {
    choose(token, ids);
    drop(token, ids);
    weigh(token, ids, weights);
  }

 private:
  void choose(int64_t token, int32_t* ids) {
    TokenRandom random(spec_.seed, rank_, token, Purpose::experts);
    switch (spec_.pattern) {
      case Pattern::uniform: copy(uniform_.draw(random, spec_.num_experts, spec_.topk, spec_.duplicates), 0, ids); return;
      case Pattern::zipf: copy(zipf_.draw(random, spec_.topk, spec_.duplicates), 0, ids); return;
      case Pattern::all_to_one: choose_target(random, ids); return;
      case Pattern::round_robin:
        for (int k = 0; k < spec_.topk; ++k) {
          // (token * topk + k) mod E without overflow
          const int64_t start = (token % spec_.num_experts) * spec_.topk;
          ids[k] = static_cast<int32_t>((start + k) % spec_.num_experts);
        }
        return;
      case Pattern::group_limited: choose_in_groups(random, ids); return;
      case Pattern::rank_skew: choose_skewed(random, token, ids); return;
    }
  }

  void choose_skewed(TokenRandom& random, int64_t token, int32_t* ids) {
    const ExpertRanges experts{spec_.num_experts, spec_.world};
    const int first = experts.first(spec_.target), count = experts.count(spec_.target);
    const double each = skewed_routes(spec_), before = std::floor(static_cast<double>(token) * each);
    const int here = static_cast<int>(std::floor(static_cast<double>(token + 1) * each) - before);
    copy(uniform_.draw(random, count, here, spec_.duplicates), first, ids);
    const std::span<const int32_t> others =
        uniform_.draw(random, spec_.num_experts - count, spec_.topk - here, spec_.duplicates);
    for (size_t k = 0; k < others.size(); ++k)
      ids[static_cast<size_t>(here) + k] = others[k] < first ? others[k] : others[k] + count;
  }

  void choose_target(TokenRandom& random, int32_t* ids) {
    if (spec_.target_is_expert) {
      for (int k = 0; k < spec_.topk; ++k) ids[k] = k == 0 || spec_.duplicates ? spec_.target : -1;
      return;
    }
    const ExpertRanges experts{spec_.num_experts, spec_.world};
    copy(uniform_.draw(random, experts.count(spec_.target), spec_.topk, spec_.duplicates), experts.first(spec_.target), ids);
  }

  void choose_in_groups(TokenRandom& random, int32_t* ids) {
    const int size = spec_.num_experts / spec_.num_groups;
    const std::span<const int32_t> groups = groups_.draw(random, spec_.num_groups, spec_.topk_groups, false);
    const std::span<const int32_t> chosen = uniform_.draw(random, spec_.topk_groups * size, spec_.topk, spec_.duplicates);
    for (size_t k = 0; k < chosen.size(); ++k) ids[k] = groups[static_cast<size_t>(chosen[k] / size)] * size + chosen[k] % size;
  }

  static void copy(std::span<const int32_t> drawn, int32_t first, int32_t* ids) {
    for (size_t k = 0; k < drawn.size(); ++k) ids[k] = first + drawn[k];
  }

  void drop(int64_t token, int32_t* ids) const {
    if (spec_.drop_fraction <= 0) return;
    TokenRandom random(spec_.seed, rank_, token, Purpose::drops);
    for (int k = 0; k < spec_.topk; ++k) {
      if (random.unit() < spec_.drop_fraction) ids[k] = -1;
    }
  }

  void weigh(int64_t token, const int32_t* ids, float* weights) const {
    TokenRandom random(spec_.seed, rank_, token, Purpose::weights);
    float sum = 0;
    for (int k = 0; k < spec_.topk; ++k) {
      const float weight = static_cast<float>((random.next() >> 40) + 1) * 0x1p-24f;
      weights[k] = ids[k] >= 0 ? weight : 0.0f;
      sum += weights[k];
    }
    for (int k = 0; k < spec_.topk; ++k) {
      if (ids[k] >= 0) weights[k] /= sum;
    }
  }

  const GeneratorSpec& spec_;
  int rank_;
  UniformDraw uniform_, groups_;
  ZipfDraw zipf_;
};

void check_skew(const GeneratorSpec& spec) {
  check_range(kGenerate, "target", spec.target, 0, spec.world - 1);
  if (!(spec.rank_skew >= 0 && spec.rank_skew <= spec.world))
    refuse(kGenerate, "rank_skew", std::to_string(spec.rank_skew),
           "0 to " + std::to_string(spec.world) + ", the number of ranks");
  const int here = ExpertRanges{spec.num_experts, spec.world}.count(spec.target), others = spec.num_experts - here;
  const double routes = skewed_routes(spec), max_target = std::ceil(routes), max_others = spec.topk - std::floor(routes);
  if (spec.duplicates ? (max_target > 0 && here == 0) || (max_others > 0 && others == 0)
                      : max_target > here || max_others > others)
    refuse(kGenerate, "rank_skew", std::to_string(spec.rank_skew),
           "ratios for which each token finds its experts among " + std::to_string(here) + " of the busiest rank and " +
               std::to_string(others) + " others");
}

/// Checks target or groups, and returns the number of distinct experts that a token can choose.
int64_t check_pattern(const GeneratorSpec& spec) {
  switch (spec.pattern) {
    case Pattern::uniform:
    case Pattern::round_robin: return spec.num_experts;
    case Pattern::zipf:
      if (spec.zipf_exponent >= 0 && spec.zipf_exponent <= 16) return spec.num_experts;
      refuse(kGenerate, "zipf_exponent", std::to_string(spec.zipf_exponent), "0 to 16");
    case Pattern::all_to_one:
      check_range(kGenerate, "target", spec.target, 0, (spec.target_is_expert ? spec.num_experts : spec.world) - 1);
      if (spec.target_is_expert) return kMaxTopk;  // the other routes are dropped
      return ExpertRanges{spec.num_experts, spec.world}.count(spec.target);
    case Pattern::group_limited:
      check_range(kGenerate, "num_groups", spec.num_groups, 1, spec.num_experts);
      if (spec.num_experts % spec.num_groups != 0) {
        refuse(kGenerate, "num_groups", std::to_string(spec.num_groups),
               "divisors of num_experts " + std::to_string(spec.num_experts));
      }
      check_range(kGenerate, "topk_groups", spec.topk_groups, 1, spec.num_groups);
      return int64_t{spec.topk_groups} * (spec.num_experts / spec.num_groups);
    case Pattern::rank_skew: check_skew(spec); return spec.num_experts;
  }
  refuse(kGenerate, "pattern", std::to_string(static_cast<int>(spec.pattern)), "the values of Pattern");
}

void check_spec(const GeneratorSpec& spec, int rank, int64_t tokens) {
  check_range(kGenerate, "num_experts", spec.num_experts, 1, 1 << 24);
  check_range(kGenerate, "world", spec.world, 1, kMaxRanks);
  check_range(kGenerate, "rank", rank, 0, spec.world - 1);
  const int64_t eligible = check_pattern(spec);
  if (eligible == 0) {
    refuse(kGenerate, "target", std::to_string(spec.target), "ranks that hold experts (num_experts is smaller than world)");
  }
  if (spec.duplicates || spec.topk <= eligible) {
    check_range(kGenerate, "topk", spec.topk, 1, kMaxTopk);
  } else {
    refuse(kGenerate, "topk", std::to_string(spec.topk),
           "1 to " + std::to_string(std::min<int64_t>(eligible, kMaxTopk)) +
               ", the experts that a token can choose, without duplicates");
  }
  if (!(spec.drop_fraction >= 0 && spec.drop_fraction <= 1)) {
    refuse(kGenerate, "drop_fraction", std::to_string(spec.drop_fraction), "0 to 1");
  }
  detail::check_tokens(kGenerate, tokens, spec.topk);
}

}  // namespace

const char* to_string(Pattern pattern) noexcept {
  const auto i = static_cast<size_t>(pattern);
  return i < kPatternNames.size() ? kPatternNames[i] : "unknown";
}

Pattern pattern_from_string(const std::string& name) {
  std::string allowed;
  for (size_t i = 0; i < kPatternNames.size(); ++i) {
    if (name == kPatternNames[i]) return static_cast<Pattern>(i);
    allowed += (i > 0 ? ", " : "") + std::string(kPatternNames[i]);
  }
  refuse("pattern_from_string", "name", "'" + name + "'", allowed);
}

Routing generate(const GeneratorSpec& spec, int rank, int64_t tokens) {
  check_spec(spec, rank, tokens);
  Routing routing = detail::make_routing(kGenerate, spec.num_experts, spec.topk, tokens, true);
  Generator generator(spec, rank);
  for (int64_t t = 0; t < tokens; ++t) {
    generator.fill(t, routing.topk_ids.data() + t * spec.topk, routing.topk_weights.data() + t * spec.topk);
  }
  return routing;
}

void check_routing(const Routing& routing) {
  constexpr const char* kCheck = "routing";
  check_range(kCheck, "num_experts", routing.num_experts, 1, std::numeric_limits<int32_t>::max());
  check_range(kCheck, "topk", routing.topk, 1, kMaxTopk);
  detail::check_tokens(kCheck, routing.num_tokens, routing.topk);
  const int64_t routes = routing.num_tokens * routing.topk;
  const std::string shape = std::to_string(routes) + ", tokens * topk";
  if (std::ssize(routing.topk_ids) != routes) refuse(kCheck, "topk_ids.size()", std::to_string(routing.topk_ids.size()), shape);
  if (!routing.topk_weights.empty() && std::ssize(routing.topk_weights) != routes) {
    refuse(kCheck, "topk_weights.size()", std::to_string(routing.topk_weights.size()), "0, or " + shape);
  }
}

double mean_ranks_per_token(const Routing& routing, int world) {
  check_routing(routing);
  check_range("mean_ranks_per_token", "world", world, 1, kMaxRanks);
  if (routing.num_tokens == 0) return 0;
  const ExpertRanges experts{routing.num_experts, world};
  int64_t reached = 0;
  for (int64_t t = 0; t < routing.num_tokens; ++t) {
    uint64_t ranks = 0;  // kMaxRanks bits
    for (int k = 0; k < routing.topk; ++k) {
      const int32_t id = routing.topk_ids[static_cast<size_t>(t * routing.topk + k)];
      if (id >= 0 && id < routing.num_experts) ranks |= uint64_t{1} << experts.owner(id);
    }
    reached += __builtin_popcountll(ranks);
  }
  return static_cast<double>(reached) / static_cast<double>(routing.num_tokens);
}

}  // namespace switchyard
