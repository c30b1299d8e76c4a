// SPDX-License-Identifier: Apache-2.0
#include "check/exchange_check.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>

#include "oracle/views.hpp"
#include "run/index.hpp"

namespace switchyard::tool {
namespace {

/// The bytes required of a row after its dispatch.
class ExpectedRow {
 public:
  ExpectedRow(const Scenario& s, const SentRows& sent)
      : s_(s),
        sent_(sent),
        type_(sent.quantize != ScaleKind::none ? DType::fp8_e4m3 : sent.type),
        scale_kind_(sent.quantize != ScaleKind::none ? sent.quantize : sent.scales),
        source_(dtype_bytes(sent.type, s.hidden)),
        row_(dtype_bytes(type_, s.hidden)),
        scales_(scale_row_bytes(s.hidden, scale_kind_)) {}

  void make(const oracle::Origin& origin) {
    std::fill(row_.begin(), row_.end(), std::byte{0});
    std::fill(scales_.begin(), scales_.end(), std::byte{0});
    if (origin.source < 0) return;
    const auto source = static_cast<uint64_t>(origin.source);
    const auto token = static_cast<uint64_t>(origin.token);
    fill_row(source_.data(), sent_.type, s_.hidden, row_key(s_.seed, sent_.set, RowKind::token, source, token));
    if (sent_.quantize != ScaleKind::none) {
      oracle::quantise(sent_.type, source_.data(), s_.hidden, sent_.quantize, reinterpret_cast<uint8_t*>(row_.data()),
                       scales_.data());
      return;
    }
    row_ = source_;
    if (!scales_.empty())
      fill_scales(scales_.data(), s_.hidden, scale_kind_, row_key(s_.seed, sent_.set, RowKind::token_scales, source, token));
  }
  DType type() const { return type_; }
  const std::byte* row() const { return row_.data(); }
  const std::vector<std::byte>& scales() const { return scales_; }
  /// Number of defined bytes in a scale row: online quantization leaves the padding undefined.
  size_t defined_scale_bytes(bool padding_row) const {
    if (sent_.quantize == ScaleKind::none || padding_row) return scales_.size();
    return at(num_scales(s_.hidden)) * (scale_kind_ == ScaleKind::f32 ? 4 : 1);
  }

 private:
  const Scenario& s_;
  SentRows sent_;
  DType type_;
  ScaleKind scale_kind_;
  std::vector<std::byte> source_, row_, scales_;
};

std::string origin_text(int64_t row, const oracle::Origin& o) {
  if (o.source < 0) return fmt::format("row {} (padding)", row);
  return fmt::format("row {} (rank {}, token {}{})", row, o.source, o.token, o.k < 0 ? "" : fmt::format(", k {}", o.k));
}

void compare_rows(Comparison& c, const Scenario& s, const Dispatched& d, const SentRows& sent,
                  const std::vector<oracle::Origin>& rows) {
  ExpectedRow expected(s, sent);
  c.is_true(d.x.dtype == expected.type(), "the rows do not have the requested type");
  if (!c.passed()) return;
  const size_t row_bytes = dtype_bytes(d.x.dtype, s.hidden);
  for (int64_t i = 0; i < static_cast<int64_t>(rows.size()) && c.passed(); ++i) {
    const oracle::Origin& origin = rows[at(i)];
    expected.make(origin);
    const std::byte* got = static_cast<const std::byte*>(d.x.data) + at(i) * row_bytes;
    c.rows_equal(got, expected.row(), d.x.dtype, s.hidden, origin_text(i, origin));
    if (expected.scales().empty()) continue;
    const auto* scales = static_cast<const std::byte*>(d.x.scales) + at(i) * expected.scales().size();
    const bool same = std::memcmp(scales, expected.scales().data(), expected.defined_scale_bytes(origin.source < 0)) == 0;
    c.is_true(same, origin_text(i, origin) + ": its scales differ");
  }
}

void compare_rank_major(Comparison& c, const Scenario& s, const Dispatched& d, const oracle::Received& expected) {
  for (int64_t i = 0; i < expected.rows && c.passed(); ++i) {
    c.equal(d.source_token[at(i)], expected.origin[at(i)].token, "source_token", i);
    for (int64_t f = i * s.topk; f < (i + 1) * s.topk; ++f) {
      c.equal(d.topk_ids[at(f)], expected.topk_ids[at(f)], "topk_ids", f);
      if (s.weighted())
        c.is_true(d.topk_weights[at(f)] == expected.topk_weights[at(f)], fmt::format("topk_weights[{}] differs", f));
    }
  }
}

void compare_expert_major(Comparison& c, const Scenario& s, const Dispatched& d, const oracle::Received& expected) {
  for (int64_t i = 0; i < expected.rows && c.passed(); ++i) {
    c.equal(d.row_source[at(i)], expected.row_source[at(i)], "row_source", i);
    if (s.weighted() && expected.origin[at(i)].source >= 0)
      c.is_true(d.row_weights[at(i)] == expected.row_weights[at(i)], fmt::format("row_weights[{}] differs", i));
  }
}

void compare_counts(Comparison& c, const Dispatched& d, const oracle::Received& expected) {
  const size_t experts = expected.tokens_per_expert.size();
  c.equal(d.tokens_per_expert.size(), experts, "number of local experts");
  for (size_t e = 0; e < experts && c.passed(); ++e) {
    const auto index = static_cast<int64_t>(e);
    c.equal(d.tokens_per_expert[e], expected.tokens_per_expert[e], "tokens_per_expert", index);
    c.equal(d.aligned_per_expert[e], expected.aligned_per_expert[e], "aligned_per_expert", index);
    if (!expected.expert_first_row.empty())
      c.equal(d.expert_first_row[e], expected.expert_first_row[e], "expert_first_row", index);
  }
}

void compare_dropped(Comparison& c, const Dispatched& d, const std::vector<uint8_t>& dropped,
                     const oracle::Received& expected) {
  c.equal(d.dropped.size(), dropped.size(), "length of dropped");
  for (size_t f = 0; f < dropped.size() && d.dropped.size() == dropped.size(); ++f)
    c.equal(static_cast<int>(d.dropped[f]), static_cast<int>(dropped[f]), "dropped", static_cast<int64_t>(f));
  for (size_t e = 0; e < expected.tokens_per_expert.size() && c.passed(); ++e)
    c.equal(d.tokens_per_expert[e], expected.tokens_per_expert[e], "tokens_per_expert", static_cast<int64_t>(e));
}

/// Fails unless `got` and `expected` have the same size and contents.
template <class Got, class Expected>
void compare_table(Comparison& c, const Got& got, const std::vector<Expected>& expected, const char* what) {
  if (got.size() != expected.size())
    return c.fail_unequal(what, -1, fmt::format("{} long", got.size()), std::to_string(expected.size()));
  for (size_t i = 0; i < expected.size(); ++i)
    c.equal(static_cast<int64_t>(got[i]), static_cast<int64_t>(expected[i]), what, static_cast<int64_t>(i));
}

}  // namespace

void Comparison::fail_unequal(const char* what, int64_t index, const std::string& got, const std::string& expected) {
  const std::string place = index < 0 ? "" : fmt::format("[{}]", index);
  fail(fmt::format("{}{} is {}, expected {}", what, place, got, expected));
}

void Comparison::rows_equal(const void* got, const void* expected, DType type, int64_t hidden, const std::string& where) {
  result_.compared += hidden;
  const std::string difference = row_difference(got, expected, type, hidden);
  if (!difference.empty()) fail(where + ", " + difference);
}

CheckResult check_dispatched(const std::string& name, const Scenario& s, int rank, const Dispatched& d, const SentRows& sent,
                             bool with_metadata, int64_t capacity) {
  Comparison c(name);
  const oracle::Problem problem = s.problem(capacity);
  const oracle::Received expected = oracle::received(problem, rank);
  c.equal(d.rows, expected.rows, "rows");
  c.is_true(d.x.rows >= d.rows, "fewer rows are allocated than delivered");
  if (c.passed()) compare_rows(c, s, d, sent, expected.origin);
  if (c.passed() && with_metadata && s.layout == Layout::rank_major) compare_rank_major(c, s, d, expected);
  if (c.passed() && with_metadata && s.layout == Layout::expert_major) compare_expert_major(c, s, d, expected);
  if (c.passed() && with_metadata && capacity < 0) compare_counts(c, d, expected);
  if (c.passed() && capacity >= 0) compare_dropped(c, d, oracle::owned(problem, rank).dropped, expected);
  for (int64_t i = d.rows; i < d.x.rows && c.passed() && with_metadata; ++i) {  // static sizes: marked as empty
    if (s.layout == Layout::rank_major) {
      c.equal(d.source_token[at(i)], -1, "source_token", i);
    } else {
      c.equal(d.row_source[at(i)], -1, "row_source", i);
    }
  }
  return c.take();
}

CheckResult check_combined(const std::string& name, const Scenario& s, int rank, const void* out, const CombineCase& c) {
  Comparison comparison(name);
  const size_t row_bytes = dtype_bytes(c.type, s.hidden);
  std::vector<std::byte> expected(row_bytes);
  ExpectedSums sums(s, c, rank);
  for (int64_t t = 0; t < s.tokens(rank) && comparison.passed(); ++t) {
    sums.make(t, expected.data());
    comparison.rows_equal(static_cast<const std::byte*>(out) + at(t) * row_bytes, expected.data(), c.type, s.hidden,
                          fmt::format("token {}", t));
  }
  return comparison.take();
}

void fill_outputs(const Scenario& s, int rank, uint64_t set, int64_t rows, DType type, void* y) {
  const std::vector<oracle::Origin> origins = oracle::rows_to(s.problem(), rank);
  const size_t row_bytes = dtype_bytes(type, s.hidden);
  for (int64_t i = 0; i < rows; ++i) {
    auto* row = static_cast<std::byte*>(y) + at(i) * row_bytes;
    if (origins[at(i)].source < 0) {
      std::memset(row, 0xFF, row_bytes);
    } else {
      fill_row(row, type, s.hidden, output_key(s, set, rank, origins[at(i)]));
    }
  }
}

CheckResult check_layout_query(const Scenario& s, int rank) {
  Comparison c("layout query");
  const RoutingLayout got = routing_layout(s.routing[at(rank)].expert_ids(), s.experts, s.world);
  const oracle::RoutingCounts expected = oracle::routing_counts(s.problem(), rank);
  compare_table(c, got.is_token_in_rank, expected.is_token_in_rank, "is_token_in_rank");
  c.is_true(got.num_tokens_per_rank == expected.tokens_per_rank, "num_tokens_per_rank differs");
  c.is_true(got.num_tokens_per_expert == expected.tokens_per_expert, "num_tokens_per_expert differs");
  return c.take();
}

CheckResult check_matrices(const Scenario& s, int rank, const Handle& handle, int num_channels) {
  Comparison c("matrices");
  const DispatchMatrices got = handle.matrices(num_channels);
  const oracle::Problem problem = s.problem();
  const oracle::Matrices expected = oracle::matrices(problem, oracle::expect(problem), rank, num_channels);
  compare_table(c, got.rank_prefix_matrix, expected.rank_prefix, "rank_prefix_matrix");
  compare_table(c, got.send_head, expected.send_head, "send_head");
  compare_table(c, got.is_token_in_rank, expected.is_token_in_rank, "is_token_in_rank");
  compare_table(c, got.channel_prefix_matrix, expected.channel_prefix, "channel_prefix_matrix");
  compare_table(c, got.recv_channel_prefix_matrix, expected.recv_channel_prefix, "recv_channel_prefix_matrix");
  c.equal(got.recv_src_idx.size(), expected.recv_src_idx.size(), "length of recv_src_idx");
  compare_table(c, got.recv_src_idx, expected.recv_src_idx, "recv_src_idx");
  return c.take();
}

CheckResult check_ledger(const Scenario& s, int rank, const Handle& handle) {
  Comparison c("ledger");
  const LedgerTables got = handle.ledger();
  const oracle::Ledger expected = oracle::ledger(s.problem(), rank);
  c.equal(got.num_experts_padded, expected.padded, "num_experts_padded");
  if (!c.passed()) return c.take();
  compare_table(c, got.peer_token_per_expert, expected.peer_token_per_expert, "peer_token_per_expert");
  compare_table(c, got.cumsum_per_expert, expected.cumsum_per_expert, "cumsum_per_expert");
  compare_table(c, got.expanded_row_idx, expected.expanded_row_idx, "expanded_row_idx");
  compare_table(c, got.dispatch_offset, expected.dispatch_offset, "dispatch_offset");
  compare_table(c, got.prev_sum_before_rank, expected.prev_sum_before_rank, "prev_sum_before_rank");
  return c.take();
}

}  // namespace switchyard::tool
