// SPDX-License-Identifier: Apache-2.0
#include "modes/normal/compare_handle.hpp"

#include "base/index.hpp"
#include "oracle/views.hpp"

namespace harness {

namespace detail = switchyard::detail;

namespace {

using switchyard::detail::idx;

/// `actual` has `allocated` entries: the expected ones, followed by `tail` in all others.
template <class T>
void compare_padded(std::vector<T> expected, int64_t allocated, T tail, const std::vector<T>& actual, const char* name,
                    Failures& f) {
  if (static_cast<int64_t>(expected.size()) > allocated) {
    f.add(std::string(name) + ": fewer entries allocated than expected");
    return;
  }
  expected.resize(idx(allocated), tail);
  f.equal_range(expected, actual, name);
}

void compare_owner(const oracle::Problem& p, const oracle::RankView& view, int rank, const detail::HandleData& h, Failures& f) {
  f.equal_range(view.kept_ids, h.ids, "handle.ids");
  f.equal_range(view.route_row, h.route_row, "handle.route_row");
  f.equal_range(view.route_record, h.route_record, "handle.route_record");
  f.equal_range(view.dropped, h.dropped, "handle.dropped");
  if (p.weights.empty()) {
    f.equal(size_t{0}, h.weights.size(), "handle.weights size");
  } else {
    f.equal_range(p.weights[idx(rank)], h.weights, "handle.weights");
  }
  std::vector<int64_t> begin{0};
  std::vector<int64_t> ranks, rows, records, got_ranks, got_rows, got_records;
  for (const auto& sends : view.sends) {
    for (const auto& send : sends) {
      ranks.push_back(send.rank);
      rows.push_back(send.row);
      records.push_back(send.record);
    }
    begin.push_back(static_cast<int64_t>(ranks.size()));
  }
  for (const auto& send : h.sends) {
    got_ranks.push_back(send.rank);
    got_rows.push_back(send.row);
    got_records.push_back(send.record);
  }
  f.equal_range(begin, h.send_begin, "handle.send_begin");
  f.equal_range(ranks, got_ranks, "handle.sends.rank");
  f.equal_range(rows, got_rows, "handle.sends.row");
  f.equal_range(records, got_records, "handle.sends.record");
}

/// Source rank of a record; records are ordered by source.
int source_of(const detail::HandleData& h, int64_t record) {
  int source = 0;
  for (int64_t end = h.counts.d(0, h.rank); record >= end && source + 1 < h.counts.world; end += h.counts.d(source, h.rank))
    ++source;
  return source;
}

void compare_receiver(const oracle::Problem& p, const oracle::RankView& view, const detail::HandleData& h, Failures& f) {
  f.equal(view.rows, h.rows, "handle.rows");
  f.check(h.rows_allocated >= h.rows, "handle.rows_allocated below rows");
  const auto records = static_cast<int64_t>(view.records.size());
  if (!f.equal(records, h.num_records, "handle.num_records")) return;
  std::vector<int32_t> tokens;
  for (const auto& r : view.records) tokens.push_back(static_cast<int32_t>(r.token));
  for (int64_t i = 0; i < records; ++i) f.equal(view.records[idx(i)].source, source_of(h, i), "source of a record");
  compare_padded(tokens, h.records_allocated, int32_t{-1}, h.record_token, "handle.record_token", f);
  compare_padded(view.record_route, h.records_allocated * p.topk, int32_t{-1}, h.record_route, "handle.record_route", f);
  if (p.weights.empty()) {
    f.equal(size_t{0}, h.record_weight.size(), "handle.record_weight size");
  } else {
    compare_padded(view.record_weight, h.records_allocated * p.topk, 0.0f, h.record_weight, "handle.record_weight", f);
  }
  if (p.layout == oracle::Layout::expert_major) {
    compare_padded(view.row_source, h.rows_allocated, int64_t{-1}, h.row_source, "handle.row_source", f);
    if (!p.weights.empty()) compare_padded(view.row_weights, h.rows_allocated, 0.0f, h.row_weight, "handle.row_weight", f);
    f.equal_range(view.expert_first_row, h.first_row, "handle.first_row");
  }
  f.equal_range(view.tokens_per_expert, h.kept_per_expert, "handle.kept_per_expert");
  f.equal_range(view.aligned_per_expert, h.aligned_per_expert, "handle.aligned_per_expert");
  f.equal_range(view.dropped_per_source, h.local_dropped, "handle.dropped_here");
}

}  // namespace

void compare_handle(const oracle::Problem& p, const oracle::Expected& x, int rank, const detail::HandleData& h, Failures& f) {
  f.equal(static_cast<int>(p.layout), static_cast<int>(h.layout), "handle.layout");
  f.equal(p.alignment, h.alignment, "handle.alignment");
  f.equal(rank, h.rank, "handle.rank");
  f.equal(p.topk, h.topk, "handle.topk");
  f.equal(p.tokens(rank), h.tokens, "handle.tokens");
  f.equal(p.max_tokens, h.max_tokens, "handle.max_tokens");
  f.equal(p.world, h.counts.world, "handle.counts.world");
  f.equal(p.experts, h.counts.experts, "handle.counts.experts");
  std::vector<int32_t> routes, touching;
  std::vector<int64_t> tokens;
  for (int s = 0; s < p.world; ++s) {
    routes.insert(routes.end(), x.routes_per_expert[idx(s)].begin(), x.routes_per_expert[idx(s)].end());
    touching.insert(touching.end(), x.touching[idx(s)].begin(), x.touching[idx(s)].end());
    tokens.push_back(p.tokens(s));
  }
  f.equal_range(routes, h.counts.routes, "handle.counts.routes");
  f.equal_range(touching, h.counts.touching, "handle.counts.touching");
  f.equal_range(tokens, h.counts.tokens, "handle.counts.tokens");
  compare_owner(p, x.ranks[idx(rank)], rank, h, f);
  compare_receiver(p, x.ranks[idx(rank)], h, f);
}

void compare_matrices(const oracle::Problem& p, const oracle::Expected& x, int rank, int num_channels,
                      const switchyard::DispatchMatrices& m, Failures& f) {
  const oracle::Matrices expected = oracle::matrices(p, x, rank, num_channels);
  f.equal(p.world, m.world, "matrices.world");
  f.equal(num_channels, m.num_channels, "matrices.num_channels");
  f.equal_range(expected.rank_prefix, m.rank_prefix_matrix, "rank_prefix_matrix");
  f.equal_range(expected.channel_prefix, m.channel_prefix_matrix, "channel_prefix_matrix");
  f.equal_range(expected.recv_channel_prefix, m.recv_channel_prefix_matrix, "recv_channel_prefix_matrix");
  f.equal_range(expected.recv_src_idx, m.recv_src_idx, "recv_src_idx");
  f.equal_range(expected.is_token_in_rank, m.is_token_in_rank, "is_token_in_rank");
  f.equal_range(expected.send_head, m.send_head, "send_head");
}

void compare_ledger(const oracle::Problem& p, int rank, const switchyard::LedgerTables& l, Failures& f) {
  const oracle::Ledger expected = oracle::ledger(p, rank);
  f.equal(p.world, l.world, "ledger.world");
  f.equal(p.experts, l.num_experts, "ledger.num_experts");
  f.equal(expected.padded, l.num_experts_padded, "ledger.num_experts_padded");
  f.equal(p.first_expert(rank + 1) - p.first_expert(rank), l.num_local_experts, "ledger.num_local_experts");
  f.equal_range(expected.peer_token_per_expert, l.peer_token_per_expert, "peer_token_per_expert");
  f.equal_range(expected.expanded_row_idx, l.expanded_row_idx, "expanded_row_idx");
  f.equal_range(expected.cumsum_per_expert, l.cumsum_per_expert, "cumsum_per_expert");
  f.equal_range(expected.dispatch_offset, l.dispatch_offset, "dispatch_offset");
  f.equal_range(expected.prev_sum_before_rank, l.prev_sum_before_rank, "prev_sum_before_rank");
}

void compare_handles(const detail::HandleData& a, const detail::HandleData& b, Failures& f) {
  f.equal(static_cast<int>(a.layout), static_cast<int>(b.layout), "layout");
  f.equal(a.alignment, b.alignment, "alignment");
  f.equal(a.rank, b.rank, "rank");
  f.equal(a.topk, b.topk, "topk");
  f.equal(a.tokens, b.tokens, "tokens");
  f.equal(a.max_tokens, b.max_tokens, "max_tokens");
  f.equal(a.hidden, b.hidden, "hidden");
  f.equal(a.counts.world, b.counts.world, "counts.world");
  f.equal(a.counts.experts, b.counts.experts, "counts.experts");
  f.equal_range(a.counts.routes, b.counts.routes, "counts.routes");
  f.equal_range(a.counts.touching, b.counts.touching, "counts.touching");
  f.equal_range(a.counts.tokens, b.counts.tokens, "counts.tokens");
  f.equal_range(a.counts.capacity, b.counts.capacity, "counts.capacity");
  f.equal(a.map.experts, b.map.experts, "map.experts");
  f.equal(a.map.world, b.map.world, "map.world");
  f.equal_range(a.ids, b.ids, "ids");
  f.equal_range(a.route_row, b.route_row, "route_row");
  f.equal_range(a.route_record, b.route_record, "route_record");
  f.equal_range(a.send_begin, b.send_begin, "send_begin");
  if (f.equal(a.sends.size(), b.sends.size(), "sends size")) {
    for (size_t i = 0; i < a.sends.size(); ++i) {
      f.equal(a.sends[i].rank, b.sends[i].rank, "sends.rank");
      f.equal(a.sends[i].row, b.sends[i].row, "sends.row");
      f.equal(a.sends[i].record, b.sends[i].record, "sends.record");
    }
  }
  f.equal_range(a.weights, b.weights, "weights");
  f.equal(a.reports_drops, b.reports_drops, "reports_drops");
  f.equal_range(a.dropped, b.dropped, "dropped");
  f.equal(a.rows, b.rows, "rows");
  f.equal(a.rows_allocated, b.rows_allocated, "rows_allocated");
  f.equal(a.num_records, b.num_records, "num_records");
  f.equal(a.records_allocated, b.records_allocated, "records_allocated");
  f.equal_range(a.record_token, b.record_token, "record_token");
  f.equal_range(a.record_route, b.record_route, "record_route");
  f.equal_range(a.record_weight, b.record_weight, "record_weight");
  f.equal_range(a.row_source, b.row_source, "row_source");
  f.equal_range(a.row_weight, b.row_weight, "row_weight");
  f.equal_range(a.first_row, b.first_row, "first_row");
  f.equal_range(a.kept_per_expert, b.kept_per_expert, "kept_per_expert");
  f.equal_range(a.aligned_per_expert, b.aligned_per_expert, "aligned_per_expert");
  f.equal_range(a.local_dropped, b.local_dropped, "dropped_here");
}

}  // namespace harness
