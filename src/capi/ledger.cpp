// SPDX-License-Identifier: Apache-2.0
// C functions for ledgers and for ledger combine.
#include "switchyard/ledger.hpp"

#include <span>

#include "capi/objects.hpp"
#include "capi/structs.hpp"
#include "switchyard/c/ledger.h"

namespace switchyard::detail {

using LedgerState = Grouped<LedgerCombine>;

void write_ledger(sy_ledger* to, LedgerTables tables) {
  auto stored = store(std::move(tables));
  const LedgerTables& t = stored->value;
  sy_ledger filled = SY_LEDGER_INIT;
  filled.storage = stored.release();
  filled.world = t.world;
  filled.num_experts = t.num_experts;
  filled.num_experts_padded = t.num_experts_padded;
  filled.num_local_experts = t.num_local_experts;
  filled.num_routes = static_cast<int64_t>(t.expanded_row_idx.size());
  filled.peer_token_per_expert = data_or_null(t.peer_token_per_expert);
  filled.expanded_row_idx = data_or_null(t.expanded_row_idx);
  filled.cumsum_per_expert = data_or_null(t.cumsum_per_expert);
  filled.dispatch_offset = data_or_null(t.dispatch_offset);
  filled.prev_sum_before_rank = data_or_null(t.prev_sum_before_rank);
  write_struct(to, filled);
}

}  // namespace switchyard::detail

using namespace switchyard;
using namespace switchyard::detail;

// NOLINTBEGIN(readability-identifier-naming): names of the C ABI
struct sy_ledger_combine {
  std::shared_ptr<LedgerState> state;
};
struct sy_prepared_ledger {
  std::shared_ptr<LedgerState> state;
  PreparedLedger ledger;
};
// NOLINTEND(readability-identifier-naming)

namespace {

constexpr sy_ledger kLedger = SY_LEDGER_INIT;

/// Copies the caller's array; its length is derived from sizes that the caller passed.
std::vector<int32_t> to_table(const char* name, const int32_t* data, int64_t length) {
  if (length > 0) require(data, name);
  return length > 0 ? std::vector<int32_t>(data, data + length) : std::vector<int32_t>();
}

LedgerTables to_tables(const sy_ledger* ledger) {
  constexpr int kMaxExperts = 1 << 20;
  const sy_ledger l = read_struct(ledger, kLedger, "ledger");
  require_range("ledger->world", l.world, 1, SY_MAX_RANKS);
  require_range("ledger->num_experts", l.num_experts, 1, kMaxExperts);
  require_range("ledger->num_experts_padded", l.num_experts_padded, l.num_experts, kMaxExperts + 15);
  require_range("ledger->num_local_experts", l.num_local_experts, 0, l.num_experts);
  require_range("ledger->num_routes", l.num_routes, 0, INT32_MAX);
  const int64_t all = int64_t{l.world} * l.num_experts_padded;
  LedgerTables t;
  t.world = l.world;
  t.num_experts = l.num_experts;
  t.num_experts_padded = l.num_experts_padded;
  t.num_local_experts = l.num_local_experts;
  t.peer_token_per_expert = to_table("ledger->peer_token_per_expert", l.peer_token_per_expert, all);
  t.expanded_row_idx = to_table("ledger->expanded_row_idx", l.expanded_row_idx, l.num_routes);
  t.cumsum_per_expert = to_table("ledger->cumsum_per_expert", l.cumsum_per_expert, all);
  t.dispatch_offset = to_table("ledger->dispatch_offset", l.dispatch_offset, l.num_local_experts);
  t.prev_sum_before_rank =
      to_table("ledger->prev_sum_before_rank", l.prev_sum_before_rank, int64_t{l.world} * l.num_local_experts);
  return t;
}

}  // namespace

extern "C" {

sy_code sy_ledger_check(const sy_ledger* ledger, const sy_ledger_config* config, int32_t world, int32_t rank) {
  return guarded([&] { check_ledger(to_tables(ledger), from_c(config), world, rank); });
}

sy_code sy_ledger_format_of(const sy_ledger_config* config, int32_t world, int32_t blocks, sy_ledger_format* format) {
  return guarded([&] {
    check_struct(format, sizeof *format, "format");
    fill(format, ledger_format_bytes(from_c(config), world, blocks));
  });
}

sy_code sy_ledger_pack(const sy_ledger* ledger, const sy_ledger_config* config, int32_t world, int32_t rank, sy_bytes* bytes) {
  return guarded([&] {
    check_struct(bytes, sizeof *bytes, "bytes");
    auto stored = store(pack_route_meta(to_tables(ledger), from_c(config), world, rank));
    const auto& value = stored->value;
    write_struct(bytes, sy_bytes{sizeof(sy_bytes), stored.release(), data_or_null(value), value.size()});
  });
}

sy_code sy_ledger_unpack(const void* data, size_t size, const sy_ledger_config* config, int32_t world, int32_t rank,
                         int64_t tokens, sy_ledger* ledger) {
  return guarded([&] {
    require(data, "data");
    check_struct(ledger, sizeof *ledger, "ledger");
    const std::span bytes(static_cast<const std::byte*>(data), size);
    write_ledger(ledger, unpack_route_meta(bytes, from_c(config), world, rank, tokens));
  });
}

sy_code sy_ledger_combine_memory_required(const sy_ledger_config* config, int32_t world, sy_backend backend,
                                          sy_memory_requirement* requirement) {
  return guarded([&] {
    check_struct(requirement, sizeof *requirement, "requirement");
    fill(requirement, LedgerCombine::memory_required(from_c(config), world, to_enum<Backend>("backend", backend)));
  });
}

sy_code sy_ledger_combine_heap_bytes(const sy_ledger_config* config, int32_t world, sy_backend backend, size_t* bytes) {
  return guarded([&] {
    require(bytes, "bytes");
    *bytes = LedgerCombine::heap_bytes(from_c(config), world, to_enum<Backend>("backend", backend));
  });
}

sy_code sy_ledger_combine_create(sy_group* group, const sy_ledger_config* config, sy_ledger_combine** combine) {
  return create(group, "combine", combine, [&] { return std::make_shared<LedgerState>(group->group, from_c(config)); });
}

sy_code sy_ledger_combine_destroy(sy_ledger_combine* combine) {
  delete combine;
  return SY_OK;
}

sy_code sy_ledger_combine_prepare(sy_ledger_combine* combine, const sy_ledger* ledger, sy_prepared_ledger** prepared) {
  if (prepared) *prepared = nullptr;
  return guarded([&] {
    require(combine, "combine");
    require(prepared, "prepared");
    auto made = std::make_unique<sy_prepared_ledger>();
    made->state = combine->state;
    made->ledger = combine->state->object.prepare(to_tables(ledger));
    *prepared = made.release();
  });
}

sy_code sy_prepared_ledger_destroy(sy_prepared_ledger* prepared) {
  delete prepared;
  return SY_OK;
}

sy_code sy_prepared_ledger_sizes(const sy_prepared_ledger* prepared, int64_t* tokens, int64_t* rows, int64_t* returned_rows) {
  return guarded([&] {
    require(prepared, "prepared");
    if (tokens) *tokens = prepared->ledger.num_tokens();
    if (rows) *rows = prepared->ledger.rows();
    if (returned_rows) *returned_rows = prepared->ledger.returned_rows();
  });
}

sy_code sy_ledger_combine_run(sy_ledger_combine* combine, const sy_const_row_view* expert_output, const float* probs,
                              const sy_prepared_ledger* prepared, void* out, const sy_ledger_combine_options* options) {
  return collective_on(combine, "combine", [&] {
    require(prepared, "prepared");
    combine->state->object.combine(from_c(expert_output, "expert_output"), probs, prepared->ledger, out, from_c(options));
  });
}

sy_code sy_combine_by_ledger(const sy_const_row_view* expert_output, const float* probs, const void* route_meta, size_t size,
                             sy_ledger_combine* window, int64_t tokens, void* out, const sy_ledger_combine_options* options) {
  return collective_on(window, "window", [&] {
    require(route_meta, "route_meta");
    const std::span bytes(static_cast<const std::byte*>(route_meta), size);
    combine_by_ledger(from_c(expert_output, "expert_output"), probs, bytes, window->state->object, tokens, out,
                      from_c(options));
  });
}

sy_code sy_ledger_combine_returned(const sy_ledger_combine* combine, sy_const_row_view* rows) {
  return guarded([&] {
    require(combine, "combine");
    check_struct(rows, sizeof *rows, "rows");
    fill(rows, combine->state->object.returned());
  });
}

sy_code sy_ledger_combine_last_call(const sy_ledger_combine* combine, sy_call_statistics* statistics) {
  return guarded([&] {
    require(combine, "combine");
    check_struct(statistics, sizeof *statistics, "statistics");
    fill(statistics, combine->state->object.last_call());
  });
}

}  // extern "C"
