// SPDX-License-Identifier: Apache-2.0
#include <limits>
#include <string>

#include "plan/index.hpp"
#include "plan/views.hpp"
#include "switchyard/status.hpp"

namespace switchyard::detail {

namespace {

constexpr int kExpertPadding = 16;  // columns of the ledger's [W, E] tables are padded to a multiple of this

/// Number of rows from each source to each expert, and the inclusive prefix sums. Padding columns contain no rows and repeat
/// the total.
void fill_counts(const GatheredCounts& counts, LedgerTables& out) {
  const int padded = out.num_experts_padded;
  out.peer_token_per_expert.assign(idx(int64_t{counts.world} * padded), 0);
  out.cumsum_per_expert.assign(idx(int64_t{counts.world} * padded), 0);
  for (int source = 0; source < counts.world; ++source) {
    int64_t sum = 0;
    for (int e = 0; e < padded; ++e) {
      const int32_t rows = e < counts.experts ? counts.s(source, e) : 0;
      sum += rows;
      out.peer_token_per_expert[idx(int64_t{source} * padded + e)] = rows;
      out.cumsum_per_expert[idx(int64_t{source} * padded + e)] = narrow(sum, "cumsum_per_expert");
    }
  }
}

/// Stable counting sort of this rank's routes by expert.
void fill_return_rows(const HandleData& h, LedgerTables& out) {
  std::vector<int32_t> next(idx(out.num_experts));
  for (int e = 1; e < out.num_experts; ++e) {
    next[idx(e)] = out.cumsum_per_expert[idx(int64_t{h.rank} * out.num_experts_padded + e - 1)];
  }
  out.expanded_row_idx.resize(h.ids.size());
  for (size_t f = 0; f < h.ids.size(); ++f) out.expanded_row_idx[f] = h.ids[f] < 0 ? -1 : next[idx(h.ids[f])]++;
}

/// Positions of this rank's expert rows, by expert and source.
void fill_expert_rows(const HandleData& h, LedgerTables& out) {
  std::vector<int64_t> first_row = h.first_row;
  if (h.layout == Layout::rank_major) h.counts.expert_first_rows(1, h.rank, first_row);
  const int first = h.map.first(h.rank);
  out.dispatch_offset.resize(idx(out.num_local_experts));
  out.prev_sum_before_rank.resize(idx(int64_t{out.world} * out.num_local_experts));
  for (int e = 0; e < out.num_local_experts; ++e) {
    out.dispatch_offset[idx(e)] = narrow(first_row[idx(e)], "dispatch_offset");
    int64_t before = 0;
    for (int source = 0; source < out.world; ++source) {
      out.prev_sum_before_rank[idx(int64_t{source} * out.num_local_experts + e)] = narrow(before, "prev_sum_before_rank");
      before += h.counts.s(source, first + e);
    }
  }
}

}  // namespace

LedgerTables make_ledger(const HandleData& h) {
  if (dropped_at_capacity(h)) throw Error(ErrorCode::unsupported, "ledger of a dispatch that dropped routes at capacity");
  LedgerTables out;
  out.world = h.counts.world;
  out.num_experts = h.counts.experts;
  out.num_experts_padded = static_cast<int>(round_up(h.counts.experts, kExpertPadding));
  out.num_local_experts = h.map.count(h.rank);
  fill_counts(h.counts, out);
  fill_return_rows(h, out);
  fill_expert_rows(h, out);
  return out;
}

}  // namespace switchyard::detail
