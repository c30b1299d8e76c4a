// SPDX-License-Identifier: Apache-2.0
// Byte layout of the published ledger format.
#include <algorithm>
#include <cstring>
#include <string>

#include "exchange/ledger/impl.hpp"

namespace switchyard {

using namespace detail;

namespace {

constexpr int64_t kFieldAlignment = 64;
constexpr int64_t kExpertPadding = 16;  // columns
constexpr size_t kGuardBytes = 4096;

int64_t field(int64_t bytes) { return round_up(bytes, kFieldAlignment); }

/// Calls f(offset, table) for each of the five tables, in the order of the format.
template <class Tables, class F>
void for_each_table(const RouteMetaLayout& at, Tables& t, F&& f) {
  f(at.peer_token_per_expert, t.peer_token_per_expert);
  f(at.expanded_row_idx, t.expanded_row_idx);
  f(at.cumsum_per_expert, t.cumsum_per_expert);
  f(at.dispatch_offset, t.dispatch_offset);
  f(at.prev_sum_before_rank, t.prev_sum_before_rank);
}

/// Tables of the right shape, filled with zeros.
LedgerTables empty_tables(const LedgerConfig& c, int world, int rank, int64_t tokens) {
  const auto zeros = [](int64_t n) { return std::vector<int32_t>(static_cast<size_t>(n)); };
  LedgerTables t;
  t.world = world;
  t.num_experts = c.num_experts;
  t.num_experts_padded = static_cast<int>(round_up(c.num_experts, kExpertPadding));
  t.num_local_experts = ExpertRanges{c.num_experts, world}.count(rank);
  t.peer_token_per_expert = t.cumsum_per_expert = zeros(int64_t{world} * t.num_experts_padded);
  t.expanded_row_idx = zeros(tokens * c.topk);
  t.dispatch_offset = zeros(t.num_local_experts);
  t.prev_sum_before_rank = zeros(int64_t{world} * t.num_local_experts);
  return t;
}

}  // namespace

LedgerFormatBytes ledger_format_bytes(const LedgerConfig& c, int world, int blocks) {
  check_config(c, world);
  check_range("blocks", blocks, 1, 1 << 16);
  const int64_t padded = round_up(c.num_experts, kExpertPadding);
  LedgerFormatBytes bytes;
  bytes.workspace = static_cast<size_t>(4 * std::max<int64_t>(64, blocks * (8 + padded)));
  bytes.route_meta = route_meta_layout(c, world, 0, c.max_tokens).bytes;  // no rank has more experts than rank 0
  bytes.window = static_cast<size_t>(field(c.max_tokens * c.topk * static_cast<int64_t>(dtype_bytes(c.dtype, c.hidden))) +
                                     2 * field(4 * world));
  bytes.guard = kGuardBytes;
  return bytes;
}

RouteMetaLayout route_meta_layout(const LedgerConfig& c, int world, int rank, int64_t tokens) {
  check_config(c, world);
  check_range("rank", rank, 0, world - 1);
  check_range("tokens", tokens, 0, c.max_tokens);
  const int64_t by_expert = field(4 * world * round_up(c.num_experts, kExpertPadding));
  const int64_t local_experts = ExpertRanges{c.num_experts, world}.count(rank);
  int64_t end = 0;
  const auto next = [&](int64_t bytes) {
    const auto begin = static_cast<size_t>(end);
    end += bytes;
    return begin;
  };
  RouteMetaLayout at;
  at.peer_token_per_expert = next(by_expert);
  at.expanded_row_idx = next(field(4 * tokens * c.topk));
  at.cumsum_per_expert = next(by_expert);
  at.dispatch_offset = next(field(4 * local_experts));
  at.prev_sum_before_rank = next(field(4 * world * local_experts));
  at.bytes = static_cast<size_t>(end);
  return at;
}

std::vector<std::byte> pack_route_meta(const LedgerTables& tables, const LedgerConfig& config, int world, int rank) {
  check_ledger(tables, config, world, rank);
  const RouteMetaLayout at =
      route_meta_layout(config, world, rank, static_cast<int64_t>(tables.expanded_row_idx.size()) / config.topk);
  std::vector<std::byte> bytes(at.bytes);
  for_each_table(at, tables, [&](size_t begin, const std::vector<int32_t>& table) {
    if (!table.empty()) std::memcpy(bytes.data() + begin, table.data(), table.size() * sizeof(int32_t));
  });
  return bytes;
}

LedgerTables unpack_route_meta(std::span<const std::byte> route_meta, const LedgerConfig& config, int world, int rank,
                               int64_t tokens) {
  const RouteMetaLayout at = route_meta_layout(config, world, rank, tokens);
  if (route_meta.size() < at.bytes)
    invalid("route_meta.size() = " + std::to_string(route_meta.size()) + ": must be at least " + std::to_string(at.bytes) +
            ", the tables of rank " + std::to_string(rank) + " with " + std::to_string(tokens) + " tokens");
  LedgerTables tables = empty_tables(config, world, rank, tokens);
  for_each_table(at, tables, [&](size_t begin, std::vector<int32_t>& table) {
    if (!table.empty()) std::memcpy(table.data(), route_meta.data() + begin, table.size() * sizeof(int32_t));
  });
  check_ledger(tables, config, world, rank);
  return tables;
}

}  // namespace switchyard
