// SPDX-License-Identifier: Apache-2.0
#include "verify/ledger_fixture.hpp"

#include <numeric>

#include "check/numbers.hpp"
#include "run/names.hpp"

namespace switchyard::tool {

LedgerFixture::LedgerFixture(const LedgerVerifyOptions& o)
    : world(static_cast<int>(o.pes)),
      experts(static_cast<int>(o.pes * o.experts_per_pe)),
      topk(static_cast<int>(o.topk)),
      tokens(o.tokens),
      hidden(o.hidden),
      type(rows_named(o.dtype).type),
      drop_percent_(static_cast<uint64_t>(o.drop_percent)) {}

std::vector<float> LedgerFixture::probs(int rank) const {
  std::vector<float> all(static_cast<size_t>(routes()));
  for (int64_t t = 0; t < tokens; ++t) {
    float sum = 0;
    for (int pass = 0; pass < 2; ++pass) {
      for (int64_t f = t * topk; f < (t + 1) * topk; ++f) {
        const auto share = static_cast<float>((kSeed + static_cast<uint64_t>(rank + f)) % 7 + 1);
        if (pass == 0)
          sum += share;
        else
          all[static_cast<size_t>(f)] = share / sum;
      }
    }
  }
  return all;
}

void LedgerFixture::fill_row(int rank, int64_t t, void* row) const {
  for (int64_t c = 0; c < hidden; ++c) store_element(row, type, c, input(rank, t, c));
}

LedgerConfig LedgerFixture::config() const {
  LedgerConfig c;
  c.hidden = hidden;
  c.num_experts = experts;
  c.topk = topk;
  c.max_tokens = tokens;
  c.row_type = type;
  c.max_rows = world * routes();
  return c;
}

LedgerTables LedgerFixture::tables(int rank) const {
  LedgerTables t;
  const int padded = (experts + 15) / 16 * 16, here = experts / world, first = rank * here;
  t.world = world;
  t.num_experts = experts;
  t.num_experts_padded = padded;
  t.experts_here = here;
  const auto at = [](int64_t i) { return static_cast<size_t>(i); };
  t.peer_token_per_expert.assign(at(int64_t{world} * padded), 0);
  for (int s = 0; s < world; ++s)
    for (int64_t f = 0; f < routes(); ++f)
      if (const int e = expert(s, f); e >= 0) ++t.peer_token_per_expert[at(int64_t{s} * padded + e)];
  t.cumsum_per_expert = t.peer_token_per_expert;
  for (int s = 0; s < world; ++s) {
    const auto row = t.cumsum_per_expert.begin() + int64_t{s} * padded;
    std::partial_sum(row, row + padded, row);
  }
  std::vector<int32_t> next(at(experts));
  for (int e = 1; e < experts; ++e) next[at(e)] = t.cumsum_per_expert[at(int64_t{rank} * padded + e - 1)];
  for (int64_t f = 0; f < routes(); ++f) {
    const int e = expert(rank, f);
    t.expanded_row_idx.push_back(e < 0 ? -1 : next[at(e)]++);
  }
  t.prev_sum_before_rank.assign(at(int64_t{world} * here), 0);
  int32_t offset = 0;
  for (int el = 0; el < here; ++el) {
    t.dispatch_offset.push_back(offset);
    int32_t before = 0;
    for (int s = 0; s < world; ++s) {
      t.prev_sum_before_rank[at(int64_t{s} * here + el)] = before;
      before += t.peer_token_per_expert[at(int64_t{s} * padded + first + el)];
    }
    offset += before;
  }
  return t;
}

}  // namespace switchyard::tool
