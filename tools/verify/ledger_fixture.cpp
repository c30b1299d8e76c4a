// SPDX-License-Identifier: Apache-2.0
#include "verify/ledger_fixture.hpp"

#include <utility>

#include "oracle/numbers.hpp"
#include "oracle/views.hpp"
#include "run/names.hpp"

namespace switchyard::tool {

LedgerFixture::LedgerFixture(const LedgerVerifyOptions& o) : hidden(o.hidden), type(rows_named(o.dtype).type) {
  world = static_cast<int>(o.ranks);
  tokens = o.tokens;
  topk = static_cast<int>(o.topk);
  experts_per_rank = static_cast<int>(o.experts_per_rank());
  drop_percent = static_cast<uint64_t>(o.drop_percent);
}

void LedgerFixture::fill_row(int rank, int64_t t, void* row) const {
  for (int64_t c = 0; c < hidden; ++c) oracle::store(type, row, c, input(rank, t, c));
}

LedgerConfig LedgerFixture::config() const {
  LedgerConfig c;
  c.hidden = hidden;
  c.num_experts = world * experts_per_rank;
  c.topk = topk;
  c.max_tokens = tokens;
  c.dtype = type;
  c.max_rows = world * routes();
  return c;
}

LedgerTables LedgerFixture::tables(int rank) const {
  oracle::Ledger golden = oracle::ledger(problem(), rank);
  LedgerTables t;
  t.world = world;
  t.num_experts = world * experts_per_rank;
  t.num_experts_padded = golden.padded;
  t.num_local_experts = experts_per_rank;
  t.peer_token_per_expert = std::move(golden.peer_token_per_expert);
  t.expanded_row_idx = std::move(golden.expanded_row_idx);
  t.cumsum_per_expert = std::move(golden.cumsum_per_expert);
  t.dispatch_offset = std::move(golden.dispatch_offset);
  t.prev_sum_before_rank = std::move(golden.prev_sum_before_rank);
  return t;
}

}  // namespace switchyard::tool
