// SPDX-License-Identifier: Apache-2.0
#include "plan/index.hpp"
#include "plan/plan.hpp"

#include <algorithm>

#include "plan/decisions.hpp"

namespace switchyard::detail {

void LocalPlan::build(const ExpertIds& in, int num_experts, int world) {
  map = ExpertRanges{num_experts, world};
  topk = in.topk;
  tokens = in.num_tokens;
  const int64_t routes = tokens * topk;
  ids.resize(idx(routes));
  expert_index.resize(idx(routes));
  rank_index.resize(idx(routes));
  invalid = {};
  tokens_per_rank.assign(idx(world), 0);
  routes_per_expert.assign(idx(num_experts), 0);
  std::vector<int64_t> last_token(idx(world), -1);
  std::vector<int> owner(idx(num_experts));
  for (int r = 0; r < world; ++r)
    for (int e = map.first(r); e < map.first(r) + map.count(r); ++e) owner[idx(e)] = r;

  const auto* ids32 = static_cast<const int32_t*>(in.data);
  const auto* ids64 = static_cast<const int64_t*>(in.data);
  for (int64_t f = 0; f < routes; ++f) {
    const int64_t id = in.is_int64 ? ids64[f] : ids32[f];
    if (id < 0 || id >= num_experts) {
      ids[idx(f)] = expert_index[idx(f)] = rank_index[idx(f)] = -1;
      if (id != -1) invalid.add(f, id);
      continue;
    }
    const int64_t t = f / topk;
    const int r = owner[idx(id)];
    ids[idx(f)] = static_cast<int32_t>(id);
    expert_index[idx(f)] = routes_per_expert[idx(id)]++;
    if (last_token[idx(r)] != t) {
      last_token[idx(r)] = t;
      ++tokens_per_rank[idx(r)];
    }
    rank_index[idx(f)] = tokens_per_rank[idx(r)] - 1;
  }
}

int64_t GatheredCounts::touching_before(int source, int dest) const {
  int64_t sum = 0;
  for (int r = 0; r < source; ++r) sum += d(r, dest);
  return sum;
}

void GatheredCounts::expert_first_rows(int alignment, int dest, std::vector<int64_t>& out) const {
  const ExpertRanges map{experts, world};
  const int local_experts = map.count(dest), first = map.first(dest);
  out.assign(idx(local_experts + 1), 0);
  for (int el = 0; el < local_experts; ++el) {
    int64_t count = 0;
    for (int r = 0; r < world; ++r) count += s(r, first + el);
    out[idx(el + 1)] = out[idx(el)] + round_up(count, alignment);
  }
}

int64_t GatheredCounts::rows_needed(Layout layout, int alignment, int dest) const {
  if (layout == Layout::rank_major) return touching_before(world, dest);
  std::vector<int64_t> first;
  expert_first_rows(alignment, dest, first);
  return first.back();
}

namespace {

/// First row of this rank's segment for every expert, at the expert's rank.
std::vector<int64_t> segment_starts(const GatheredCounts& counts, int alignment, int rank) {
  const ExpertRanges map{counts.experts, counts.world};
  std::vector<int64_t> start(idx(counts.experts)), first;
  for (int dest = 0; dest < counts.world; ++dest) {
    counts.expert_first_rows(alignment, dest, first);
    for (int el = 0; el < map.count(dest); ++el) {
      const int e = map.first(dest) + el;
      int64_t row = first[idx(el)];
      for (int r = 0; r < rank; ++r) row += counts.s(r, e);
      start[idx(e)] = row;
    }
  }
  return start;
}

/// Fills route_row and route_record and sets dropped routes to -1.
void place_routes(const LocalPlan& local, HandleData& h) {
  const int64_t routes = local.tokens * local.topk;
  std::vector<int64_t> records(idx(h.counts.world));
  for (int r = 0; r < h.counts.world; ++r) records[idx(r)] = h.counts.touching_before(h.rank, r);
  std::vector<int64_t> starts;
  if (h.layout == Layout::expert_major) starts = segment_starts(h.counts, h.alignment, h.rank);
  for (int64_t f = 0; f < routes; ++f) {
    const int32_t id = local.ids[idx(f)];
    h.route_row[idx(f)] = h.route_record[idx(f)] = -1;
    if (id < 0) continue;
    const int owner = local.map.owner(id);
    const int64_t record = records[idx(owner)] + local.rank_index[idx(f)];
    const int64_t row = h.layout == Layout::rank_major ? record : starts[idx(id)] + local.expert_index[idx(f)];
    if (!keeps(row, h.counts.capacity[idx(owner)])) {
      h.dropped[idx(f)] = 1;
      h.ids[idx(f)] = -1;
      if (h.layout == Layout::rank_major) continue;  // the record would exceed the capacity too
    } else {
      h.route_row[idx(f)] = static_cast<int32_t>(row);
    }
    h.route_record[idx(f)] = static_cast<int32_t>(record);
  }
}

/// One entry per (token, rank): the first kept route is the primary; ranks ascend within a token.
void list_sends(const LocalPlan& local, HandleData& h) {
  h.sends.clear();
  h.send_begin.resize(idx(local.tokens + 1));
  h.send_begin[0] = 0;
  for (int64_t t = 0; t < local.tokens; ++t) {
    const auto begin = static_cast<std::ptrdiff_t>(h.sends.size());
    for (int64_t f = t * local.topk; f < (t + 1) * local.topk; ++f) {
      const int32_t id = local.ids[idx(f)], record = h.route_record[idx(f)];
      if (id < 0 || record < 0) continue;
      const int owner = local.map.owner(id);
      auto it = std::find_if(h.sends.begin() + begin, h.sends.end(), [&](const SendEntry& e) { return e.rank >= owner; });
      if (it == h.sends.end() || it->rank != owner)
        h.sends.insert(it, SendEntry{owner, h.route_row[idx(f)], record});
      else if (it->row < 0)
        it->row = h.route_row[idx(f)];
    }
    h.send_begin[idx(t + 1)] = static_cast<int64_t>(h.sends.size());
  }
}

}  // namespace

void build_owner_side(const LocalPlan& local, HandleData& h) {
  const int64_t routes = local.tokens * local.topk;
  h.map = local.map;
  h.topk = local.topk;
  h.tokens = local.tokens;
  h.ids = local.ids;
  h.route_row.resize(idx(routes));
  h.route_record.resize(idx(routes));
  h.dropped.assign(h.reports_drops ? idx(routes) : 0, 0);
  place_routes(local, h);
  list_sends(local, h);
  place_local_rows(h);
}

void place_local_rows(HandleData& h) {
  const int64_t capacity = h.counts.capacity[idx(h.rank)];
  h.first_row.clear();
  if (h.layout == Layout::expert_major) h.counts.expert_first_rows(h.alignment, h.rank, h.first_row);
  const int64_t records = h.counts.touching_before(h.counts.world, h.rank);
  const bool expert_major = h.layout == Layout::expert_major;
  const ReceivedSizes sizes = received_sizes(expert_major, expert_major ? h.first_row.back() : records, records, capacity);
  h.rows = sizes.rows;
  h.num_records = sizes.records;
  if (expert_major) h.first_row.pop_back();
  for (int64_t& row : h.first_row) row = least(row, h.rows);
}

std::vector<int64_t> record_ranges(const HandleData& h) {
  std::vector<int64_t> begin;
  for (int s = 0; s <= h.counts.world; ++s)
    begin.push_back(record_begin_of(h.counts.touching_before(s, h.rank), h.num_records));
  return begin;
}

namespace {

/// Expert-major: the rows of local expert `el`, which would start at `row` without a capacity.
ExpertRows rows_of_expert(const HandleData& h, int el, int64_t row, int64_t kept) {
  int64_t routes = 0;
  for (int s = 0; s < h.counts.world; ++s) routes += h.counts.s(s, h.map.first(h.rank) + el);
  return expert_rows(row, routes, kept, h.alignment, h.rows);
}

}  // namespace

std::vector<int64_t> padding_ranges(const HandleData& h) {
  std::vector<int64_t> ranges;
  for (size_t el = 0; el < h.first_row.size(); ++el) {
    const ExpertRows rows = rows_of_expert(h, static_cast<int>(el), h.first_row[el], 0);
    ranges.insert(ranges.end(), {rows.padding_begin, rows.padding_end});
  }
  return ranges;
}

namespace {

void fill_rows_from_records(HandleData& h) {
  h.row_source.assign(idx(h.rows_allocated), -1);
  h.row_weight.assign(h.record_weight.empty() ? 0 : idx(h.rows_allocated), 0.0f);
  int64_t record = 0;
  for (int source = 0; source < h.counts.world; ++source) {
    for (int64_t end = record + h.counts.d(source, h.rank); record < end; ++record) {
      for (int k = 0; k < h.topk; ++k) {
        const int64_t at = record * h.topk + k;
        const int32_t row = h.record_route[idx(at)];
        if (row < 0) continue;
        h.row_source[idx(row)] = pack_source(source, k, h.record_token[idx(record)]);
        if (!h.row_weight.empty()) h.row_weight[idx(row)] = h.record_weight[idx(at)];
      }
    }
  }
}

/// Rank-major: kept routes per (source, local expert), counted in the received records. Expert-major: from the segments.
void count_kept(HandleData& h, std::vector<int64_t>& kept) {
  const int local_experts = h.map.count(h.rank), first = h.map.first(h.rank), world = h.counts.world;
  kept.assign(idx(world) * idx(local_experts), 0);
  if (h.layout == Layout::rank_major) {
    int64_t record = 0;
    for (int source = 0; source < world; ++source)
      for (int64_t end = std::min(record + h.counts.d(source, h.rank), h.num_records); record < end; ++record)
        for (int k = 0; k < h.topk; ++k)
          if (const int32_t el = h.record_route[idx(record * h.topk + k)]; el >= 0)
            ++kept[idx(source) * idx(local_experts) + idx(el)];
    return;
  }
  std::vector<int64_t> starts;
  h.counts.expert_first_rows(h.alignment, h.rank, starts);
  for (int el = 0; el < local_experts; ++el) {
    int64_t row = starts[idx(el)];
    for (int source = 0; source < world; ++source) {
      const int64_t count = h.counts.s(source, first + el);
      kept[idx(source) * idx(local_experts) + idx(el)] = kept_of(row, count, h.rows);
      row += count;
    }
  }
}

}  // namespace

void build_receiver_side(HandleData& h) {
  const int local_experts = h.map.count(h.rank), first = h.map.first(h.rank), world = h.counts.world;
  if (h.layout == Layout::expert_major) fill_rows_from_records(h);
  std::vector<int64_t> kept;
  count_kept(h, kept);
  h.kept_per_expert.assign(idx(local_experts), 0);
  h.aligned_per_expert.assign(idx(local_experts), 0);
  h.local_dropped.assign(h.reports_drops ? idx(world) * idx(local_experts) : 0, 0);
  for (int el = 0; el < local_experts; ++el) {
    for (int source = 0; source < world; ++source) {
      const size_t at = idx(source) * idx(local_experts) + idx(el);
      h.kept_per_expert[idx(el)] += kept[at];
      if (h.reports_drops) h.local_dropped[at] = h.counts.s(source, first + el) - kept[at];
    }
    const int64_t count = h.kept_per_expert[idx(el)];
    h.aligned_per_expert[idx(el)] = h.layout == Layout::expert_major
                                        ? rows_of_expert(h, el, h.first_row[idx(el)], count).aligned
                                        : round_up(count, h.alignment);
  }
}

}  // namespace switchyard::detail
