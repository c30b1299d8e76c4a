// SPDX-License-Identifier: Apache-2.0
// Runs the device's planning method on the host for random routings: prefix sums over the gathered counts, and the decisions in
// plan/decisions.hpp, route by route. Every table must equal the host's plan. tests/gpu/objects/cuda_plan_test.cpp tests the
// kernel itself.
#include <gtest/gtest.h>

#include <limits>

#include "base/index.hpp"
#include "plan/decisions.hpp"
#include "unit/plan/plan_cluster.hpp"

namespace plan_test {
namespace {

using switchyard::Layout;
using namespace switchyard::detail;

/// Counts S and D in the same way as pass 1 of the kernel.
struct Counts {
  explicit Counts(const oracle::Problem& p)
      : map{p.experts, p.world}, routes(idx(p.world), std::vector<int64_t>(idx(p.experts))) {
    touching.assign(idx(p.world), std::vector<int64_t>(idx(p.world)));
    for (int s = 0; s < p.world; ++s) {
      for (int64_t t = 0; t < p.tokens(s); ++t) {
        uint64_t mask = 0;
        for (int k = 0; k < p.topk; ++k) {
          const int64_t id = p.ids[idx(s)][idx(t * p.topk + k)];
          if (id < 0 || id >= p.experts) continue;
          ++routes[idx(s)][idx(id)];
          mask |= uint64_t{1} << map.owner(static_cast<int>(id));
        }
        for (int d = 0; d < p.world; ++d) touching[idx(s)][idx(d)] += static_cast<int64_t>(mask >> d & 1);
      }
    }
  }
  ExpertRanges map;
  std::vector<std::vector<int64_t>> routes, touching;
};

/// The plan of one rank.
struct Tables {
  std::vector<int32_t> ids, route_row, send_rank, send_row, send_record;
  std::vector<uint8_t> dropped;
  std::vector<int64_t> first_row, kept, aligned, padding, local_dropped, record_begin;
  int64_t rows = 0, records = 0;
  bool operator==(const Tables&) const = default;
};

class DevicePlan {
 public:
  DevicePlan(const oracle::Problem& p, int rank) : p_(p), rank_(rank), c_(p) {
    for (int d = 0; d < p.world; ++d)
      capacity_.push_back(p.size == switchyard::SizePolicy::capacity ? p.capacity[idx(d)]
                                                                     : std::numeric_limits<int64_t>::max());
    start_.resize(idx(p.experts));
    record_.assign(idx(p.world), 0);
    place_experts();
    for (int d = 0; d < p.world; ++d)
      for (int s = 0; s < rank; ++s) record_[idx(d)] += c_.touching[idx(s)][idx(d)];
    size_receiver();
    for (int64_t t = 0; t < p.tokens(rank); ++t) {
      place_routes(t);
      list_sends(t);
    }
  }
  const Tables& tables() const { return out_; }

 private:
  bool expert_major() const { return p_.layout == Layout::expert_major; }

  void place_experts() {
    for (int d = 0; d < p_.world; ++d) {
      int64_t row = 0;
      for (int e = c_.map.first(d); e < c_.map.first(d) + c_.map.count(d); ++e) {
        int64_t total = 0, before = 0;
        for (int s = 0; s < p_.world; ++s) {
          if (s < rank_) before += c_.routes[idx(s)][idx(e)];
          total += c_.routes[idx(s)][idx(e)];
        }
        start_[idx(e)] = row + before;
        if (d == rank_ && expert_major()) place_local_expert(e, row, total);
        row += round_up(total, p_.alignment);
      }
      if (d == rank_) needed_ = row;
    }
  }
  void place_local_expert(int e, int64_t row, int64_t total) {
    const int64_t capacity = capacity_[idx(rank_)];
    int64_t kept = 0, at = row;
    for (int s = 0; s < p_.world; ++s) {
      const int64_t count = c_.routes[idx(s)][idx(e)];
      const int64_t fits = kept_of(at, count, capacity);
      dropped_[idx(s)].push_back(count - fits);
      kept += fits;
      at += count;
    }
    const ExpertRows rows = expert_rows(row, total, kept, p_.alignment, capacity);
    out_.first_row.push_back(rows.first);
    out_.kept.push_back(kept);
    out_.aligned.push_back(rows.aligned);
    out_.padding.insert(out_.padding.end(), {rows.padding_begin, rows.padding_end});
  }
  void size_receiver() {
    int64_t records = 0;
    for (int s = 0; s < p_.world; ++s) records += c_.touching[idx(s)][idx(rank_)];
    const ReceivedSizes sizes =
        received_sizes(expert_major(), expert_major() ? needed_ : records, records, capacity_[idx(rank_)]);
    out_.rows = sizes.rows;
    out_.records = sizes.records;
    int64_t at = 0;
    for (int s = 0; s <= p_.world; ++s) {
      out_.record_begin.push_back(record_begin_of(at, sizes.records));
      if (s < p_.world) at += c_.touching[idx(s)][idx(rank_)];
    }
    for (const auto& of_source : dropped_)
      out_.local_dropped.insert(out_.local_dropped.end(), of_source.begin(), of_source.end());
  }
  /// Determines the ids, dropped flags and (in the expert-major layout) rows of token t's routes.
  void place_routes(int64_t t) {
    mask_ = 0;
    for (int k = 0; k < p_.topk; ++k) {
      const int64_t id = p_.ids[idx(rank_)][idx(t * p_.topk + k)];
      const bool valid = id >= 0 && id < p_.experts;
      const int owner = valid ? c_.map.owner(static_cast<int>(id)) : 0;
      if (valid) mask_ |= uint64_t{1} << owner;
      const int64_t row = valid && expert_major() ? start_[idx(id)]++ : record_[idx(owner)];
      const bool kept = valid && keeps(row, capacity_[idx(owner)]);
      out_.ids.push_back(kept ? static_cast<int32_t>(id) : -1);
      out_.dropped.push_back(valid && !kept ? 1 : 0);
      out_.route_row.push_back(kept ? static_cast<int32_t>(row) : -1);
    }
  }
  /// Ranks are in ascending order; the first kept route is the primary one.
  void list_sends(int64_t t) {
    for (int d = 0; d < p_.world; ++d) {
      if ((mask_ >> d & 1) == 0) continue;
      const int64_t record = record_[idx(d)]++;
      if (!expert_major() && !keeps(record, capacity_[idx(d)])) continue;
      int32_t row = -1;
      for (int k = p_.topk - 1; k >= 0; --k) {
        const size_t f = idx(t * p_.topk + k);
        if (out_.ids[f] >= 0 && c_.map.owner(out_.ids[f]) == d) row = out_.route_row[f];
      }
      out_.send_rank.push_back(d);
      out_.send_row.push_back(row);
      out_.send_record.push_back(static_cast<int32_t>(record));
    }
  }

  const oracle::Problem& p_;
  const int rank_;
  const Counts c_;
  std::vector<int64_t> capacity_, start_, record_;
  std::vector<std::vector<int64_t>> dropped_ = std::vector<std::vector<int64_t>>(idx(p_.world));
  int64_t needed_ = 0;
  uint64_t mask_ = 0;
  Tables out_;
};

/// Returns the host's plan in the same form. In the rank-major layout, the counts of an expert are record counts, which involve
/// no decision.
Tables host_plan(const HandleData& h) {
  Tables t;
  t.ids = h.ids;
  t.route_row = h.route_row;
  t.dropped = h.dropped.empty() ? std::vector<uint8_t>(h.ids.size(), 0) : h.dropped;
  for (const SendEntry& e : h.sends) {
    t.send_rank.push_back(e.rank);
    t.send_row.push_back(e.row);
    t.send_record.push_back(e.record);
  }
  t.rows = h.rows;
  t.records = h.num_records;
  t.record_begin = record_ranges(h);
  if (h.layout == Layout::rank_major) return t;
  t.first_row = h.first_row;
  t.kept = h.kept_per_expert;
  t.aligned = h.aligned_per_expert;
  t.padding = padding_ranges(h);
  t.local_dropped = h.local_dropped;
  if (!h.reports_drops) t.local_dropped.assign(idx(h.counts.world) * idx(h.map.count(h.rank)), 0);
  return t;
}

class PlanDecisions : public testing::TestWithParam<Case> {};

TEST_P(PlanDecisions, MakeTheHostsPlan) {
  for (uint64_t seed = 21; seed < 24; ++seed) {
    const oracle::Problem p = make_problem(GetParam(), seed);
    const auto handles = make_handles(p, GetParam().wide, 0);
    for (int r = 0; r < p.world; ++r)
      EXPECT_TRUE(DevicePlan(p, r).tables() == host_plan(*handles[idx(r)])) << "rank " << r << ", seed " << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(All, PlanDecisions, testing::ValuesIn(all_cases()), [](const auto& p) { return to_string(p.param); });

TEST(Decisions, OfOneExpertByHand) {
  // Without a capacity, 5 routes occupy rows [8, 13), padded to a multiple of 4.
  const auto rows = [](int64_t capacity, int64_t kept) { return expert_rows(8, 5, kept, 4, capacity); };
  const auto equal = [](const ExpertRows& a, const ExpertRows& b) {
    return a.first == b.first && a.aligned == b.aligned && a.padding_begin == b.padding_begin && a.padding_end == b.padding_end;
  };
  EXPECT_TRUE(equal(rows(100, 5), {8, 8, 13, 16}));
  EXPECT_TRUE(equal(rows(14, 5), {8, 6, 13, 14})) << "the padding is cut";
  EXPECT_TRUE(equal(rows(11, 3), {8, 3, 11, 11})) << "routes are cut";
  EXPECT_TRUE(equal(rows(6, 0), {6, 0, 6, 6})) << "nothing fits";
  EXPECT_EQ(kept_of(8, 5, 11), 3);
  EXPECT_EQ(kept_of(8, 5, 6), 0);
  EXPECT_TRUE(keeps(10, 11) && !keeps(11, 11) && overflows(12, 11) && !overflows(11, 11));
}

}  // namespace
}  // namespace plan_test
