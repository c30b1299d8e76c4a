// SPDX-License-Identifier: Apache-2.0
// Work for each warp in a ledger combine, computed from a route ledger. Pure functions of a single rank's tables.
#pragma once

#include <cstdint>
#include <vector>

#include "layout/addressing.hpp"

namespace switchyard {
struct LedgerTables;
}

namespace switchyard::detail {

/// Rows that are contiguous on both sides and thus need one copy.
struct LedgerChunk {
  int32_t owner;  ///< of the tokens
  int32_t rows;
  int32_t from;  ///< first row of the expert output
  int32_t to;    ///< first row of the owner's return buffer
};

struct LedgerWork {
  std::vector<LedgerChunk> chunks;   ///< by owner, starting with the next rank; then local expert, row
  std::vector<int32_t> chunks_of;    ///< [W] by owner
  std::vector<uint64_t> senders_of;  ///< [T] bit r: a row of the token comes from rank r
  std::vector<uint8_t> sender_of;    ///< [returned] source rank of each row of the return buffer
  int64_t rows = 0;                  ///< minimum number of rows of the expert output
  int64_t returned = 0;              ///< rows returned to this rank
};

/// `tables` have been checked. Longer segments are split into chunks of about `chunk_bytes`, at least one row: small enough to
/// spread over all warps. O(T * K + returned rows + W * E + chunks).
LedgerWork make_ledger_work(const LedgerTables& tables, int topk, int64_t row_bytes, int rank, int64_t chunk_bytes);

/// Maximum number of chunks on a rank if all ranks together hold `routes` routes.
int64_t max_ledger_chunks(int64_t routes, int world, int num_local_experts, int64_t row_bytes, int64_t chunk_bytes);

}  // namespace switchyard::detail
