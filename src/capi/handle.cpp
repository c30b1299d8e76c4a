// SPDX-License-Identifier: Apache-2.0
// C functions for handles, and functions that need only a routing.
#include <span>

#include "capi/objects.hpp"
#include "capi/structs.hpp"

using namespace switchyard;
using namespace switchyard::detail;

extern "C" {

sy_code sy_handle_retain(sy_handle* handle) {
  return guarded([&] {
    require(handle, "handle");
    handle->owners.fetch_add(1, std::memory_order_relaxed);
  });
}

sy_code sy_handle_release(sy_handle* handle) {
  if (handle && handle->owners.fetch_sub(1, std::memory_order_acq_rel) == 1) delete handle;
  return SY_OK;
}

sy_code sy_handle_num_tokens(const sy_handle* handle, int64_t* tokens) {
  return guarded([&] {
    require(handle, "handle");
    require(tokens, "tokens");
    *tokens = handle->handle.num_tokens();
  });
}

sy_code sy_handle_rows(const sy_handle* handle, int64_t* rows) {
  return guarded([&] {
    require(handle, "handle");
    require(rows, "rows");
    *rows = handle->handle.rows();
  });
}

sy_code sy_handle_invalid_ids(const sy_handle* handle, int64_t* count) {
  return guarded([&] {
    require(handle, "handle");
    require(count, "count");
    *count = handle->handle.invalid_ids();
  });
}

sy_code sy_handle_counts(const sy_handle* handle, sy_counts* counts) {
  return guarded([&] {
    require(handle, "handle");
    check_struct(counts, sizeof *counts, "counts");
    auto stored = store(handle->handle.counts());
    const DispatchCounts& c = stored->value;
    sy_counts filled = SY_COUNTS_INIT;
    filled.storage = stored.release();
    filled.rows = c.rows;
    filled.num_local_experts = static_cast<int64_t>(c.tokens_per_expert.size());
    filled.tokens_per_expert = data_or_null(c.tokens_per_expert);
    filled.aligned_per_expert = data_or_null(c.aligned_per_expert);
    filled.expert_first_row = data_or_null(c.expert_first_row);
    write_struct(counts, filled);
  });
}

sy_code sy_storage_release(sy_storage* storage) {
  delete storage;
  return SY_OK;
}

sy_code sy_handle_serialize(const sy_handle* handle, sy_bytes* bytes) {
  return guarded([&] {
    require(handle, "handle");
    check_struct(bytes, sizeof *bytes, "bytes");
    auto stored = store(handle->handle.serialize());
    const auto& value = stored->value;
    write_struct(bytes, sy_bytes{sizeof(sy_bytes), stored.release(), data_or_null(value), value.size()});
  });
}

sy_code sy_handle_deserialize(const void* data, size_t size, sy_handle** handle) {
  if (handle) *handle = nullptr;
  return guarded([&] {
    require(handle, "handle");
    require(data, "data");
    auto made = std::make_unique<sy_handle>();
    made->handle = Handle::deserialize(std::span(static_cast<const std::byte*>(data), size));
    made->tokens = made->handle.num_tokens();
    *handle = made.release();
  });
}

sy_code sy_handle_matrices(const sy_handle* handle, int32_t num_channels, sy_matrices* matrices) {
  return guarded([&] {
    require(handle, "handle");
    check_struct(matrices, sizeof *matrices, "matrices");
    auto stored = store(handle->handle.matrices(num_channels));
    const DispatchMatrices& m = stored->value;
    sy_matrices filled = SY_MATRICES_INIT;
    filled.storage = stored.release();
    filled.world = m.world;
    filled.num_channels = m.num_channels;
    filled.num_tokens = handle->handle.num_tokens();
    filled.num_recv = static_cast<int64_t>(m.recv_src_idx.size());
    filled.rank_prefix_matrix = data_or_null(m.rank_prefix_matrix);
    filled.channel_prefix_matrix = data_or_null(m.channel_prefix_matrix);
    filled.recv_channel_prefix_matrix = data_or_null(m.recv_channel_prefix_matrix);
    filled.recv_src_idx = data_or_null(m.recv_src_idx);
    filled.is_token_in_rank = data_or_null(m.is_token_in_rank);
    filled.send_head = data_or_null(m.send_head);
    write_struct(matrices, filled);
  });
}

sy_code sy_handle_ledger(const sy_handle* handle, sy_ledger* ledger) {
  return guarded([&] {
    require(handle, "handle");
    check_struct(ledger, sizeof *ledger, "ledger");
    write_ledger(ledger, handle->handle.ledger());
  });
}

sy_code sy_routing_layout_of(const sy_expert_ids* ids, int32_t num_experts, int32_t world, sy_routing_layout* layout) {
  return guarded([&] {
    check_struct(layout, sizeof *layout, "layout");
    const ExpertIds routing = from_c(ids);
    auto stored = store(routing_layout(routing, num_experts, world));
    const RoutingLayout& l = stored->value;
    sy_routing_layout filled = SY_ROUTING_LAYOUT_INIT;
    filled.storage = stored.release();
    filled.world = world;
    filled.num_experts = num_experts;
    filled.num_tokens = routing.num_tokens;
    filled.num_tokens_per_rank = data_or_null(l.num_tokens_per_rank);
    filled.num_tokens_per_expert = data_or_null(l.num_tokens_per_expert);
    filled.is_token_in_rank = data_or_null(l.is_token_in_rank);
    write_struct(layout, filled);
  });
}

sy_code sy_routing_layout_enqueue(const sy_expert_ids* ids, int32_t num_experts, int32_t world, int32_t* num_tokens_per_rank,
                                  int32_t* num_tokens_per_expert, uint8_t* is_token_in_rank, void* stream) {
  return guarded([&] {
    enqueue_routing_layout(from_c(ids), num_experts, world, {num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank},
                           stream);
  });
}

sy_code sy_scale_row_bytes(int64_t hidden, sy_scale_kind kind, size_t* bytes) {
  return guarded([&] {
    require(bytes, "bytes");
    require_range("hidden", hidden, 0, int64_t{1} << 24);
    *bytes = scale_row_bytes(hidden, to_enum<ScaleKind>("kind", kind));
  });
}

sy_code sy_first_expert(int32_t num_experts, int32_t world, int32_t rank, int32_t* expert) {
  return guarded([&] {
    require(expert, "expert");
    require_range("num_experts", num_experts, 1, 1 << 20);
    require_range("world", world, 1, SY_MAX_RANKS);
    require_range("rank", rank, 0, world);
    *expert = first_expert(num_experts, world, rank);
  });
}

}  // extern "C"
