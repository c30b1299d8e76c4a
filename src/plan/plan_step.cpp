// SPDX-License-Identifier: Apache-2.0
// The planner for one call (plan_step). Each search closes one rank at a time: the least loaded open rank takes rows from the
// most loaded one, up to the mean of the open ranks, and receives no more. A rank therefore has replicas of few other ranks'
// experts, fetches are spread over the ranks, and spare_slots_to_level() spare slots per rank level any load.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "layout/addressing.hpp"
#include "plan/expert_division.hpp"
#include "switchyard/expert_map.hpp"
#include "switchyard/group.hpp"
#include "switchyard/status.hpp"

namespace switchyard {

namespace {

using detail::ExpertDivision;
using detail::holds;
using detail::slot_idx;

/// The slot of each expert that keeps its weights: that of home_map() if it holds the expert, else the first slot with it.
std::vector<int> kept_slots(const ExpertMap& map) {
  std::vector<int> kept(slot_idx(map.num_experts), -1);
  const detail::ExpertRanges home{map.num_experts, map.world};
  for (int p = 0; p < map.num_slots(); ++p)
    if (const int32_t e = map.expert_of_slot[slot_idx(p)]; e >= 0) {
      const int rank = home.owner(e), at = rank * map.slots_per_rank + e - home.first(rank);
      if (kept[slot_idx(e)] < 0 || p == at) kept[slot_idx(e)] = p;
    }
  return kept;
}

constexpr int kHeights = 4;  // number of targets above the mean

/// Predicted times.
struct Costs {
  int64_t level;   ///< maximum rank load below which the time no longer decreases
  double row_s;    ///< of a row
  double fetch_s;  ///< of one set of weights
  double move_s;   ///< of any number of fetches, in addition

  double seconds(int64_t max_load, int max_fetches) const {
    const double rows = static_cast<double>(std::max(max_load, level)) * row_s;
    return max_fetches == 0 ? rows : rows + move_s + max_fetches * fetch_s;
  }
};

/// A replica that a search adds.
struct Added {
  int rank;
  int32_t expert;
};

/// The replicas added by a search, up to the point at which the predicted time is lowest.
struct Found {
  std::vector<Added> added;
  double seconds = std::numeric_limits<double>::infinity();
  int fetches = 0;  ///< of all ranks
  int64_t max_load = 0;
};

/// near: prefers experts that a rank holds in the current map and that have at least half of the rows it needs.
enum class Choice { min_slots, near };

class Search {
 public:
  /// `map` contains the experts that stay, `loads` their rows. A rank adds at most `limit` replicas.
  Search(const ExpertMap& current, const std::vector<int>& kept, const Costs& costs, ExpertMap map, SlotLoads loads, int limit,
         Choice choice, int64_t height)
      : current_(current),
        kept_(kept),
        costs_(costs),
        map_(std::move(map)),
        loads_(std::move(loads)),
        limit_(limit),
        choice_(choice),
        height_(height),
        received_(slot_idx(current.world), 0),
        sent_(slot_idx(current.world), 0),
        is_open_(slot_idx(current.world), 1) {}

  Found run() {
    remember();
    int64_t sum = std::accumulate(loads_.of_rank.begin(), loads_.of_rank.end(), int64_t{0});
    for (int open = map_.world; open > 1; --open) {
      const auto [low, high] = ends();
      if (load(high) <= costs_.level) break;
      fill(low, high, std::max(sum / open, height_) - load(low));
      is_open_[slot_idx(low)] = 0;
      sum -= load(low);
    }
    best_.added.resize(used_);
    return std::move(best_);
  }

 private:
  int64_t load(int rank) const { return loads_.of_rank[slot_idx(rank)]; }

  /// The least and the most loaded open rank; of equal ranks, the lowest. \pre at least two are open
  std::pair<int, int> ends() const {
    int low = -1, high = -1;
    for (int r = 0; r < map_.world; ++r) {
      if (is_open_[slot_idx(r)] == 0) continue;
      if (low < 0 || load(r) < load(low)) low = r;
      if (high < 0 || load(r) > load(high)) high = r;
    }
    return {low, high};
  }

  /// Moves up to `wanted` rows from rank `from` to new replicas on `rank`, or to replicas already there.
  void fill(int rank, int from, int64_t wanted) {
    for (int added = 0; wanted > 0 && added < limit_; ++added) {
      const int p = choose(rank, from, wanted);
      if (p < 0) return;
      const int32_t e = map_.expert_of_slot[slot_idx(p)];
      const int q = slot_for(rank, e);
      if (q < 0) return;
      const int64_t rows = std::min(wanted, loads_.of_slot[slot_idx(p)]);
      move(p, -rows);
      move(q, rows);
      wanted -= rows;
      if (map_.expert_of_slot[slot_idx(q)] != e) add(rank, q, e);
      remember();
    }
  }

  void move(int slot, int64_t rows) {
    loads_.of_slot[slot_idx(slot)] += rows;
    loads_.of_rank[slot_idx(slot / map_.slots_per_rank)] += rows;
  }

  void add(int rank, int slot, int32_t e) {
    map_.expert_of_slot[slot_idx(slot)] = e;
    best_.added.push_back({rank, e});
    if (holds(current_, rank, e)) return;
    ++fetches_;
    const int source = kept_[slot_idx(e)] / map_.slots_per_rank;
    max_moves_ = std::max({max_moves_, ++received_[slot_idx(rank)], ++sent_[slot_idx(source)]});
  }

  void remember() {
    const double seconds = costs_.seconds(loads_.max(), max_moves_);
    if (seconds >= best_.seconds) return;
    best_.seconds = seconds;
    best_.max_load = loads_.max();
    best_.fetches = fetches_;
    used_ = best_.added.size();
  }

  /// The slot of rank `from` with the fewest rows among those with at least `wanted`, else the slot with the most rows; -1 if
  /// the rank has no rows.
  int choose(int rank, int from, int64_t wanted) const {
    int chosen = -1, near = -1;
    const auto is_better = [&](int p, int than) {
      if (than < 0) return true;
      const int64_t a = loads_.of_slot[slot_idx(p)], b = loads_.of_slot[slot_idx(than)];
      return (a >= wanted) != (b >= wanted) ? a >= wanted : (a >= wanted ? a < b : a > b);
    };
    for (int p = from * map_.slots_per_rank; p < (from + 1) * map_.slots_per_rank; ++p) {
      if (loads_.of_slot[slot_idx(p)] == 0) continue;
      if (is_better(p, chosen)) chosen = p;
      if (choice_ == Choice::min_slots) continue;
      const int32_t e = map_.expert_of_slot[slot_idx(p)];
      if (2 * loads_.of_slot[slot_idx(p)] >= wanted && is_better(p, near) && holds(current_, rank, e)) near = p;
    }
    return near >= 0 ? near : chosen;
  }

  /// The slot of `rank` that holds `e`, else an empty slot, else -1.
  int slot_for(int rank, int32_t e) const {
    int found = -1;
    for (int p = rank * map_.slots_per_rank; p < (rank + 1) * map_.slots_per_rank; ++p) {
      if (map_.expert_of_slot[slot_idx(p)] == e) return p;
      if (map_.expert_of_slot[slot_idx(p)] < 0) found = p;
    }
    return found;
  }

  const ExpertMap& current_;
  const std::vector<int>& kept_;
  const Costs& costs_;
  ExpertMap map_;
  SlotLoads loads_;
  const int limit_;
  const Choice choice_;
  const int64_t height_;              ///< ranks are filled at least to this load
  std::vector<int> received_, sent_;  ///< [W] sets of weights
  int max_moves_ = 0;                 ///< the maximum of both
  int fetches_ = 0;
  std::vector<char> is_open_;
  Found best_;
  size_t used_ = 0;  ///< number of elements of best_.added at the lowest time
};

/// `map` with the replicas that a search added. An expert that its rank already holds keeps its slot, and slots that remain
/// empty keep the replicas of `current`.
ExpertMap with_added(ExpertMap map, const std::vector<Added>& added, const ExpertMap& current) {
  const auto place = [&](const Added& a, const auto& may_use) {
    for (int p = a.rank * map.slots_per_rank; p < (a.rank + 1) * map.slots_per_rank; ++p)
      if (map.expert_of_slot[slot_idx(p)] < 0 && may_use(current.expert_of_slot[slot_idx(p)])) {
        map.expert_of_slot[slot_idx(p)] = a.expert;
        return true;
      }
    return false;
  };
  std::vector<Added> fetched;
  for (const Added& a : added)
    if (!place(a, [&](int32_t now) { return now == a.expert; })) fetched.push_back(a);
  for (const Added& a : fetched)
    if (!place(a, [](int32_t now) { return now < 0; })) place(a, [](int32_t) { return true; });
  for (size_t p = 0; p < map.expert_of_slot.size(); ++p)
    if (map.expert_of_slot[p] < 0) map.expert_of_slot[p] = current.expert_of_slot[p];
  return map;
}

/// The map with the lowest predicted time of several searches.
ExpertMap search_all(std::span<const int64_t> routes, const ExpertMap& current, const SlotLoads& now, const Costs& costs) {
  const std::vector<int> kept = kept_slots(current);
  ExpertMap home = current, used = current;
  std::fill(home.expert_of_slot.begin(), home.expert_of_slot.end(), -1);
  SlotLoads at_home{std::vector<int64_t>(now.of_slot.size(), 0), std::vector<int64_t>(now.of_rank.size(), 0)};
  for (int e = 0; e < current.num_experts; ++e) {
    const int p = kept[slot_idx(e)];
    home.expert_of_slot[slot_idx(p)] = e;
    at_home.of_slot[slot_idx(p)] = routes[slot_idx(e)];
    at_home.of_rank[slot_idx(p / current.slots_per_rank)] += routes[slot_idx(e)];
  }
  for (size_t p = 0; p < now.of_slot.size(); ++p)
    if (now.of_slot[p] == 0) used.expert_of_slot[p] = home.expert_of_slot[p];

  struct Best {
    Found found;
    const ExpertMap* start;
  };
  Best best{{{}, costs.seconds(now.max(), 0), 0}, &current};
  const auto consider = [&](const ExpertMap& map, const SlotLoads& loads, int limit, Choice choice, int64_t height = 0) {
    Found found = Search(current, kept, costs, map, loads, limit, choice, height).run();
    const int64_t reached = found.max_load;
    if (found.seconds < best.found.seconds || (found.seconds == best.found.seconds && found.fetches < best.found.fetches))
      best = {std::move(found), &map};
    return reached;
  };
  const int slots = current.slots_per_rank;
  for (int limit = 1;; limit = std::min(2 * limit, slots)) {
    consider(used, now, limit, Choice::near);
    consider(home, at_home, limit, Choice::near);
    if (limit == slots) break;
  }
  // Higher targets than the mean need fewer fetches, and may be the lowest that the spare slots permit.
  int64_t low = costs.level, high = now.max();
  for (int64_t above = (high - low) / 2, i = 0; i < kHeights && above > 0; ++i, above /= 2) {
    consider(used, now, slots, Choice::near, low + above);
    high = std::min(high, consider(home, at_home, slots, Choice::min_slots, low + above));
  }
  high = std::min(high, consider(home, at_home, slots, Choice::min_slots));
  for (int i = 0; i < kHeights && high > low + low / 128; ++i) {
    const int64_t height = low + (high - low) / 2, reached = consider(home, at_home, slots, Choice::min_slots, height);
    if (reached > height) low = height;
    high = std::min(high, reached);
  }
  return with_added(*best.start, best.found.added, current);
}

}  // namespace

namespace detail {

void check_step(double expert_bytes, const StepOptions& options) {
  const auto check = [](const char* name, double value, bool is_valid, const char* allowed) {
    if (!is_valid || !std::isfinite(value))
      throw Error(ErrorCode::invalid_argument,
                  std::string(name) + " = " + std::to_string(value) + ": must be a finite number of " + allowed);
  };
  if (options.tile < 1 || options.tile > int64_t{1} << 40)
    throw Error(ErrorCode::invalid_argument, "StepOptions::tile = " + std::to_string(options.tile) + ": must be in [1, 2^40]");
  check("expert_bytes", expert_bytes, expert_bytes >= 0, "at least 0");
  check("StepOptions::link_bytes_per_s", options.link_bytes_per_s, options.link_bytes_per_s > 0, "more than 0");
  check("StepOptions::seconds_per_row", options.seconds_per_row, options.seconds_per_row >= 0, "at least 0");
  check("StepOptions::seconds_per_move", options.seconds_per_move, options.seconds_per_move >= 0, "at least 0");
}

}  // namespace detail

int spare_slots_to_level(int num_experts, int world) {
  if (num_experts < 1 || world < 1 || world > kMaxRanks)
    throw Error(ErrorCode::invalid_argument, "spare_slots_to_level: " + std::to_string(num_experts) + " experts on " +
                                                 std::to_string(world) + " ranks: must be at least 1 and in [1, " +
                                                 std::to_string(kMaxRanks) + "]");
  const int64_t own = detail::ExpertRanges{num_experts, world}.max_count();
  return static_cast<int>((own * (world - 1) + world - 1) / world);
}

StepPlan plan_step(std::span<const int64_t> routes_per_expert, const ExpertMap& current, double expert_bytes,
                   const StepOptions& options) {
  SlotLoads now = divide_routes(current, routes_per_expert);  // validates both
  detail::check_step(expert_bytes, options);
  const int64_t total = std::accumulate(routes_per_expert.begin(), routes_per_expert.end(), int64_t{0});
  StepPlan plan;
  plan.mean = (total + current.world - 1) / current.world;
  plan.max_before = now.max();
  const Costs costs{plan.mean + options.tile, options.seconds_per_row, expert_bytes / options.link_bytes_per_s,
                    options.seconds_per_move};
  plan.map = plan.max_before <= costs.level ? current : search_all(routes_per_expert, current, now, costs);
  plan.loads = std::move(now);
  if (plan.map != current) plan.loads = ExpertDivision(plan.map, routes_per_expert).loads();
  for (int r = 0; r < current.world; ++r)
    for (int p = r * current.slots_per_rank; p < (r + 1) * current.slots_per_rank; ++p) {
      const int32_t e = plan.map.expert_of_slot[slot_idx(p)];
      if (e != current.expert_of_slot[slot_idx(p)] && !holds(current, r, e)) plan.fetched.push_back(p);
    }
  return plan;
}

}  // namespace switchyard
