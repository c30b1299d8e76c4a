// SPDX-License-Identifier: Apache-2.0
// Host-side checks of the ledger combine's contracts.
#include <limits>
#include <string>

#include "exchange/group/enum_checks.hpp"
#include "exchange/ledger/impl.hpp"

namespace switchyard {

namespace detail {

namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

/// Throws an error whose text is "field[index...] = value: allowed".
[[noreturn]] void wrong(const char* field, const std::string& index, int64_t value, const std::string& allowed) {
  invalid(std::string("LedgerTables::") + field + index + " = " + std::to_string(value) + ": " + allowed);
}
std::string at(int64_t i) { return "[" + std::to_string(i) + "]"; }

/// One rank's tables and the values against which they are checked.
struct LedgerChecker {
  const LedgerTables& t;
  const LedgerConfig& config;
  int world, rank;
  ExpertRanges map{config.num_experts, world};

  int64_t padded() const { return t.num_experts_padded; }
  static size_t idx(int64_t i) { return static_cast<size_t>(i); }
  int32_t rows_of(int source, int64_t expert) const { return t.peer_token_per_expert[idx(source * padded() + expert)]; }

  void check_scalar(const char* field, int64_t value, int64_t wanted) const {
    if (value != wanted) wrong(field, "", value, "must be " + std::to_string(wanted) + " here");
  }
  void check_size(const char* field, const std::vector<int32_t>& values, int64_t wanted) const {
    if (static_cast<int64_t>(values.size()) != wanted)
      wrong(field, ".size()", static_cast<int64_t>(values.size()), "must be " + std::to_string(wanted));
  }

  void check_shape() const {
    check_scalar("world", t.world, world);
    check_scalar("num_experts", t.num_experts, config.num_experts);
    check_scalar("num_experts_padded", t.num_experts_padded, round_up(config.num_experts, 16));
    check_scalar("num_local_experts", t.num_local_experts, map.count(rank));
    check_size("peer_token_per_expert", t.peer_token_per_expert, world * padded());
    check_size("cumsum_per_expert", t.cumsum_per_expert, world * padded());
    check_size("dispatch_offset", t.dispatch_offset, t.num_local_experts);
    check_size("prev_sum_before_rank", t.prev_sum_before_rank, int64_t{world} * t.num_local_experts);
    const auto routes = static_cast<int64_t>(t.expanded_row_idx.size());
    if (routes % config.topk != 0 || routes / config.topk > config.max_tokens)
      wrong("expanded_row_idx", ".size()", routes,
            "must be a multiple of topk = " + std::to_string(config.topk) +
                ", for at most max_tokens = " + std::to_string(config.max_tokens) + " tokens");
  }

  /// Checks the counts and their inclusive prefix sums. The rows of every source must fit into its return buffer, whose memory
  /// is limited.
  void check_counts() const {
    for (int s = 0; s < world; ++s) {
      int64_t sum = 0;
      for (int64_t e = 0; e < padded(); ++e) {
        const int32_t rows = rows_of(s, e);
        if (rows < 0) wrong("peer_token_per_expert", at(s) + at(e), rows, "must be at least 0");
        if (rows > 0 && e >= config.num_experts)
          wrong("peer_token_per_expert", at(s) + at(e), rows,
                "must be 0 in the padding columns, from " + std::to_string(config.num_experts) + " on");
        sum += rows;
        const int32_t prefix = t.cumsum_per_expert[idx(s * padded() + e)];
        if (prefix != sum)
          wrong("cumsum_per_expert", at(s) + at(e), prefix,
                "must be " + std::to_string(sum) + ", the inclusive prefix of peer_token_per_expert");
      }
      if (sum > config.max_tokens * config.topk)
        wrong("cumsum_per_expert", at(s) + at(padded() - 1), sum,
              "rank " + std::to_string(s) +
                  " has room for max_tokens * topk = " + std::to_string(config.max_tokens * config.topk) + " returned rows");
    }
  }

  /// Checks the rows of this rank's experts: experts must be ascending without overlap, and sources in order without gaps.
  void check_expert_rows() const {
    const int64_t limit = config.max_rows > 0 ? config.max_rows : kMaxInt32;
    int64_t end = 0;  // end of the previous experts' rows
    for (int el = 0; el < t.num_local_experts; ++el) {
      const int64_t first = t.dispatch_offset[idx(el)];
      if (first < end)
        wrong("dispatch_offset", at(el), first,
              "must be at least " + std::to_string(end) + ", where the rows of the experts before end");
      int64_t before = 0;
      for (int s = 0; s < world; ++s) {
        const int32_t given = t.prev_sum_before_rank[idx(int64_t{s} * t.num_local_experts + el)];
        if (given != before)
          wrong("prev_sum_before_rank", at(s) + at(el), given,
                "must be " + std::to_string(before) + ", the rows of the ranks before in this expert");
        before += rows_of(s, map.first(rank) + el);
      }
      end = first + before;
      if (end > limit)
        wrong("dispatch_offset", at(el), first,
              "the expert's " + std::to_string(before) + " rows must end within " + std::to_string(limit) + " rows");
    }
  }

  /// Checks the rows of the return buffer; each may occur at most once.
  void check_routes() const {
    const int64_t rows = t.cumsum_per_expert[idx(rank * padded() + padded() - 1)];
    std::vector<int64_t> route_of(idx(rows), -1);
    for (size_t f = 0; f < t.expanded_row_idx.size(); ++f) {
      const int32_t row = t.expanded_row_idx[f];
      const std::string index = at(static_cast<int64_t>(f));
      if (row == -1) continue;
      if (row < -1 || row >= rows)
        wrong("expanded_row_idx", index, row,
              "must be -1 or below " + std::to_string(rows) + ", the rows that come back to rank " + std::to_string(rank));
      int64_t& route = route_of[idx(row)];
      if (route >= 0) wrong("expanded_row_idx", index, row, "route " + std::to_string(route) + " has this row already");
      route = static_cast<int64_t>(f);
    }
  }
};

}  // namespace

void check_config(const LedgerConfig& c, int world) {
  check_range("world", world, 1, kMaxRanks);
  check_range("LedgerConfig::hidden", c.hidden, 1, int64_t{1} << 24);
  check_range("LedgerConfig::num_experts", c.num_experts, 1, 1 << 20);
  check_range("LedgerConfig::topk", c.topk, 1, kMaxTopk);
  check_range("LedgerConfig::max_tokens", c.max_tokens, 0, kMaxInt32 / c.topk);
  check_range("LedgerConfig::max_rows", c.max_rows, 0, kMaxInt32);
  check_range("LedgerConfig::max_ledgers", c.max_ledgers, 1, 1 << 16);
  check_combining_type("LedgerConfig::dtype", c.dtype);
}

void LedgerImpl::check_call(const ConstRows& y, const PreparedLedger& ledger, const void* out) const {
  if (!ledger) invalid("ledger", " is empty");
  const LedgerData& data = ledger.data();
  if (data.object != id_) invalid("ledger was prepared by another LedgerCombine");
  if (y.dtype != config.dtype)
    invalid("expert_output.dtype",
            std::string(" = ") + to_string(y.dtype) + ": must be LedgerConfig::dtype, " + to_string(config.dtype));
  if (y.cols != config.hidden)
    invalid("expert_output.cols",
            " = " + std::to_string(y.cols) + ": must be LedgerConfig::hidden, " + std::to_string(config.hidden));
  if (y.rows < data.rows)
    invalid("expert_output.rows",
            " = " + std::to_string(y.rows) + ": the ledger speaks of " + std::to_string(data.rows) + " rows");
  if (!y.data && data.rows > 0) invalid("expert_output.data", " is null");
  if (!out && data.tokens > 0) invalid("out", " is null");
}

}  // namespace detail

void check_ledger(const LedgerTables& tables, const LedgerConfig& config, int world, int rank) {
  detail::check_config(config, world);
  detail::check_range("rank", rank, 0, world - 1);
  const detail::LedgerChecker checker{tables, config, world, rank};
  checker.check_shape();
  checker.check_counts();
  checker.check_expert_rows();
  checker.check_routes();
}

}  // namespace switchyard
