// SPDX-License-Identifier: Apache-2.0
#include "check/exchange_check.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>

#include "check/numbers.hpp"

namespace switchyard::tool {
namespace {

size_t at(int64_t i) { return static_cast<size_t>(i); }

/// The bytes that a row must have after its dispatch.
class ExpectedRow {
 public:
  ExpectedRow(const Scenario& s, const SentRows& sent)
      : s_(s),
        sent_(sent),
        type_(sent.quantize != ScaleKind::none ? DType::fp8_e4m3 : sent.type),
        scale_kind_(sent.quantize != ScaleKind::none ? sent.quantize : sent.scales),
        source_(at(s.hidden) * dtype_bytes(sent.type)),
        row_(at(s.hidden) * dtype_bytes(type_)),
        scales_(scale_row_bytes(s.hidden, scale_kind_)) {}

  void make(const RowOrigin& origin) {
    std::fill(row_.begin(), row_.end(), std::byte{0});
    std::fill(scales_.begin(), scales_.end(), std::byte{0});
    if (origin.source < 0) return;
    const auto source = static_cast<uint64_t>(origin.source);
    const auto token = static_cast<uint64_t>(origin.token);
    fill_row(source_.data(), sent_.type, s_.hidden, row_key(s_.seed, sent_.set, RowKind::token, source, token));
    if (sent_.quantize != ScaleKind::none) {
      quantize_reference(source_.data(), sent_.type, s_.hidden, sent_.quantize, reinterpret_cast<uint8_t*>(row_.data()),
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
  /// Bytes of a scale row that are defined: online quantisation says nothing about the padding.
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

std::string origin_text(int64_t row, const RowOrigin& o) {
  if (o.source < 0) return fmt::format("row {} (padding)", row);
  return fmt::format("row {} (rank {}, token {}{})", row, o.source, o.token, o.k < 0 ? "" : fmt::format(", k {}", o.k));
}

void compare_rows(Comparison& c, const Scenario& s, const Dispatched& d, const SentRows& sent,
                  const std::vector<RowOrigin>& rows) {
  ExpectedRow expected(s, sent);
  c.is_true(d.x.dtype == expected.type(), "the rows have another type than was asked for");
  if (!c.passed()) return;
  const size_t row_bytes = at(s.hidden) * dtype_bytes(d.x.dtype);
  for (int64_t i = 0; i < static_cast<int64_t>(rows.size()) && c.passed(); ++i) {
    const RowOrigin& origin = rows[at(i)];
    expected.make(origin);
    const std::byte* got = static_cast<const std::byte*>(d.x.data) + at(i) * row_bytes;
    c.rows_equal(got, expected.row(), d.x.dtype, s.hidden, origin_text(i, origin));
    if (expected.scales().empty()) continue;
    const auto* scales = static_cast<const std::byte*>(d.x.scales) + at(i) * expected.scales().size();
    const bool same = std::memcmp(scales, expected.scales().data(), expected.defined_scale_bytes(origin.source < 0)) == 0;
    c.is_true(same, origin_text(i, origin) + ": its scales differ");
  }
}

void compare_rank_major(Comparison& c, const Scenario& s, int rank, const Dispatched& d, const std::vector<RowOrigin>& rows) {
  const int first = s.first_expert(rank);
  const int last = s.first_expert(rank + 1);
  for (int64_t i = 0; i < static_cast<int64_t>(rows.size()) && c.passed(); ++i) {
    const RowOrigin& o = rows[at(i)];
    c.equal(d.source_token[at(i)], o.token, "source_token", i);
    for (int k = 0; k < s.topk; ++k) {
      const int32_t id = s.id(o.source, o.token, k);
      const bool here = id >= first && id < last;
      c.equal(d.topk_ids[at(i * s.topk + k)], here ? id - first : -1, "topk_ids", i * s.topk + k);
      if (s.weighted()) {
        c.is_true(d.topk_weights[at(i * s.topk + k)] == (here ? s.weight(o.source, o.token, k) : 0.0f),
                  fmt::format("topk_weights[{}] differs", i * s.topk + k));
      }
    }
  }
}

void compare_expert_major(Comparison& c, const Scenario& s, const Dispatched& d, const std::vector<RowOrigin>& rows) {
  for (int64_t i = 0; i < static_cast<int64_t>(rows.size()) && c.passed(); ++i) {
    const RowOrigin& o = rows[at(i)];
    const int64_t source =
        o.source < 0 ? -1 : (static_cast<int64_t>(o.source) << 48) | (static_cast<int64_t>(o.k) << 32) | o.token;
    c.equal(d.row_source[at(i)], source, "row_source", i);
    if (s.weighted() && o.source >= 0) {
      c.is_true(d.row_weights[at(i)] == s.weight(o.source, o.token, o.k), fmt::format("row_weights[{}] differs", i));
    }
  }
}

void compare_counts(Comparison& c, const Scenario& s, int rank, const Dispatched& d) {
  const std::vector<int64_t> counts = expected_expert_counts(s, rank);
  c.equal(d.tokens_per_expert.size(), counts.size(), "number of local experts");
  int64_t first_row = 0;
  for (size_t e = 0; e < counts.size() && c.passed(); ++e) {
    const int64_t aligned = (counts[e] + s.alignment - 1) / s.alignment * s.alignment;
    c.equal(d.tokens_per_expert[e], counts[e], "tokens_per_expert", static_cast<int64_t>(e));
    c.equal(d.aligned_per_expert[e], aligned, "aligned_per_expert", static_cast<int64_t>(e));
    if (s.layout == Layout::expert_major)
      c.equal(d.expert_first_row[e], first_row, "expert_first_row", static_cast<int64_t>(e));
    first_row += aligned;
  }
}

void compare_dropped(Comparison& c, const Scenario& s, int rank, const Dispatched& d, const std::vector<int64_t>& capacity) {
  const Kept kept = kept_routes(s, capacity);
  const size_t routes = s.routing[at(rank)].ids.size();
  c.equal(d.dropped.size(), routes, "length of dropped");
  for (size_t f = 0; f < routes && d.dropped.size() == routes; ++f) {
    const bool dropped = s.valid(s.routing[at(rank)].ids[f]) && kept.route[at(rank)][f] == 0;
    c.equal(static_cast<int>(d.dropped[f]), dropped ? 1 : 0, "dropped", static_cast<int64_t>(f));
  }
  const int first = s.first_expert(rank);
  for (int e = first; e < s.first_expert(rank + 1) && c.passed(); ++e) {
    int64_t count = 0;
    for (int source = 0; source < s.world; ++source) {
      for (size_t f = 0; f < s.routing[at(source)].ids.size(); ++f)
        count += s.routing[at(source)].ids[f] == e ? kept.route[at(source)][f] : 0;
    }
    c.equal(d.tokens_per_expert[at(e - first)], count, "tokens_per_expert", e - first);
  }
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
  std::vector<RowOrigin> rows = expected_rows(s, rank);
  if (capacity >= 0 && static_cast<int64_t>(rows.size()) > capacity) rows.resize(at(capacity));
  c.equal(d.rows, rows.size(), "rows");
  c.is_true(d.x.rows >= d.rows, "fewer rows are allocated than delivered");
  if (c.passed()) compare_rows(c, s, d, sent, rows);
  if (c.passed() && with_metadata && s.layout == Layout::rank_major) compare_rank_major(c, s, rank, d, rows);
  if (c.passed() && with_metadata && s.layout == Layout::expert_major) compare_expert_major(c, s, d, rows);
  if (c.passed() && with_metadata && capacity < 0) compare_counts(c, s, rank, d);
  if (c.passed() && capacity >= 0) compare_dropped(c, s, rank, d, std::vector<int64_t>(at(s.world), capacity));
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
  const size_t row_bytes = at(s.hidden) * dtype_bytes(c.type);
  std::vector<std::byte> expected(row_bytes);
  for (int64_t t = 0; t < s.tokens(rank) && comparison.passed(); ++t) {
    expected_combine(s, c, rank, t, expected.data());
    comparison.rows_equal(static_cast<const std::byte*>(out) + at(t) * row_bytes, expected.data(), c.type, s.hidden,
                          fmt::format("token {}", t));
  }
  return comparison.take();
}

void fill_outputs(const Scenario& s, int rank, uint64_t set, int64_t rows, DType type, void* y) {
  const std::vector<RowOrigin> origins = expected_rows(s, rank);
  const size_t row_bytes = at(s.hidden) * dtype_bytes(type);
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
  const Routing& mine = s.routing[at(rank)];
  const RoutingLayout got = routing_layout(mine.expert_ids(), s.experts, s.world);
  std::vector<int32_t> per_rank(at(s.world)), per_expert(at(s.experts));
  for (int64_t t = 0; t < mine.tokens; ++t) {
    std::vector<uint8_t> touched(at(s.world));
    for (int k = 0; k < s.topk; ++k) {
      const int32_t id = s.id(rank, t, k);
      if (!s.valid(id)) continue;
      ++per_expert[at(id)];
      touched[at(s.owner(id))] = 1;
    }
    for (int r = 0; r < s.world; ++r) {
      per_rank[at(r)] += touched[at(r)];
      c.equal(static_cast<int>(got.is_token_in_rank[at(t * s.world + r)]), static_cast<int>(touched[at(r)]), "is_token_in_rank",
              t * s.world + r);
    }
  }
  c.is_true(got.num_tokens_per_rank == per_rank, "num_tokens_per_rank differs");
  c.is_true(got.num_tokens_per_expert == per_expert, "num_tokens_per_expert differs");
  return c.take();
}

CheckResult check_matrices(const Scenario& s, int rank, const Handle& handle, int num_channels) {
  Comparison c("matrices");
  const DispatchMatrices got = handle.matrices(num_channels);
  const auto touches = [&](int source, int64_t t, int dest) {
    for (int k = 0; k < s.topk; ++k) {
      if (s.valid(s.id(source, t, k)) && s.owner(s.id(source, t, k)) == dest) return true;
    }
    return false;
  };
  for (int dest = 0; dest < s.world; ++dest) {
    int32_t sum = 0;
    for (int source = 0; source < s.world; ++source) {
      for (int64_t t = 0; t < s.tokens(source); ++t) sum += touches(source, t, dest) ? 1 : 0;
      c.equal(got.rank_prefix_matrix[at(source * s.world + dest)], sum, "rank_prefix_matrix", source * s.world + dest);
    }
    const int64_t per_channel = (s.tokens(rank) + num_channels - 1) / num_channels;
    int32_t sent = 0;
    for (int channel = 0; channel < num_channels; ++channel) {
      const int64_t end = std::min(s.tokens(rank), (channel + 1) * per_channel);
      int32_t head = 0;
      for (int64_t t = std::min(s.tokens(rank), channel * per_channel); t < end; ++t) {
        const bool goes = touches(rank, t, dest);
        c.equal(got.send_head[at(t * s.world + dest)], goes ? head : -1, "send_head", t * s.world + dest);
        c.equal(static_cast<int>(got.is_token_in_rank[at(t * s.world + dest)]), goes ? 1 : 0, "is_token_in_rank",
                t * s.world + dest);
        head += goes ? 1 : 0;
      }
      sent += head;
      c.equal(got.channel_prefix_matrix[at(dest * num_channels + channel)], sent, "channel_prefix_matrix",
              dest * num_channels + channel);
    }
  }
  size_t row = 0;
  for (int source = 0; source < s.world; ++source) {
    int32_t before = 0;
    const int64_t per_channel = (s.tokens(source) + num_channels - 1) / num_channels;
    for (int channel = 0; channel < num_channels; ++channel) {
      c.equal(got.recv_channel_prefix_matrix[at(source * num_channels + channel)], before, "recv_channel_prefix_matrix",
              source * num_channels + channel);
      const int64_t end = std::min(s.tokens(source), (channel + 1) * per_channel);
      for (int64_t t = std::min(s.tokens(source), channel * per_channel); t < end; ++t) {
        if (!touches(source, t, rank)) continue;
        if (row < got.recv_src_idx.size()) c.equal(got.recv_src_idx[row], t, "recv_src_idx", static_cast<int64_t>(row));
        ++row;
        ++before;
      }
    }
  }
  c.equal(got.recv_src_idx.size(), row, "length of recv_src_idx");
  return c.take();
}

CheckResult check_ledger(const Scenario& s, int rank, const Handle& handle) {
  Comparison c("ledger");
  const LedgerTables got = handle.ledger();
  const int padded = (s.experts + 15) / 16 * 16;
  c.equal(got.num_experts_padded, padded, "num_experts_padded");
  if (!c.passed()) return c.take();
  std::vector<std::vector<int32_t>> counts;  // [source][expert]
  for (const Routing& r : s.routing) {
    counts.emplace_back(at(padded));
    for (const int32_t id : r.ids) counts.back()[at(s.valid(id) ? id : padded - 1)] += s.valid(id) ? 1 : 0;
  }
  for (int source = 0; source < s.world; ++source) {
    int32_t sum = 0;
    for (int e = 0; e < padded; ++e) {
      sum += counts[at(source)][at(e)];
      c.equal(got.peer_token_per_expert[at(source * padded + e)], counts[at(source)][at(e)], "peer_token_per_expert",
              source * padded + e);
      c.equal(got.cumsum_per_expert[at(source * padded + e)], sum, "cumsum_per_expert", source * padded + e);
    }
  }
  std::vector<int32_t> next(at(padded));  // rows of a source's return buffer: by expert, then in the order of its routes
  for (int e = 1; e < padded; ++e) next[at(e)] = next[at(e - 1)] + counts[at(rank)][at(e - 1)];
  const Routing& mine = s.routing[at(rank)];
  for (size_t f = 0; f < mine.ids.size(); ++f) {
    const int32_t row = s.valid(mine.ids[f]) ? next[at(mine.ids[f])]++ : -1;
    c.equal(got.expanded_row_idx[f], row, "expanded_row_idx", static_cast<int64_t>(f));
  }
  const int first = s.first_expert(rank);
  const int here = s.first_expert(rank + 1) - first;
  int32_t offset = 0;
  for (int e = 0; e < here; ++e) {
    int32_t before = 0;
    c.equal(got.dispatch_offset[at(e)], offset, "dispatch_offset", e);
    for (int source = 0; source < s.world; ++source) {
      c.equal(got.prev_sum_before_rank[at(source * here + e)], before, "prev_sum_before_rank", source * here + e);
      before += counts[at(source)][at(first + e)];
    }
    // dispatch_offset names rows of the dispatch: expert-major ones are padded.
    offset += s.layout == Layout::expert_major ? (before + s.alignment - 1) / s.alignment * s.alignment : before;
  }
  return c.take();
}

}  // namespace switchyard::tool
