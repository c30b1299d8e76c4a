// SPDX-License-Identifier: Apache-2.0
#include "capi/call_options.hpp"
#include "capi/objects.hpp"
#include "capi/structs.hpp"
#include "exchange/normal/known_memory.hpp"

using namespace switchyard;
using namespace switchyard::detail;

namespace {

const Handle& checked_handle(const sy_handle* handle) {
  require(handle, "handle");
  return handle->handle;
}

/// Allocates the C object for an output before the collective call, so that nothing can fail afterwards.
std::unique_ptr<sy_dispatched> make_dispatched(const sy_exchange& exchange) {
  auto made = std::make_unique<sy_dispatched>();
  made->handle = new sy_handle;
  made->state = exchange.state;
  return made;
}

/// Transfers ownership of the result to the caller.
sy_dispatched* deliver(std::unique_ptr<sy_dispatched> made, Dispatched&& dispatched, int64_t tokens) noexcept {
  made->handle->handle = dispatched.handle;
  made->handle->tokens = tokens;
  made->dispatched = std::move(dispatched);
  return made.release();
}

/// `out`: memory for the C++ twin of options->out; the result points to it.
CallOptions<sy_dispatch_options> dispatch_options(const sy_dispatch_options* options, Rows& out) {
  if (!options) return {};
  const sy_dispatch_options o = read_struct(options, kInit<sy_dispatch_options>, "options");
  CallOptions<sy_dispatch_options> result = call_options(o);
  if (o.out) {
    out = from_c(o.out, "options->out");
    result.twin.out = &out;
  }
  return result;
}

sy_dispatched_view view_of(const sy_dispatched& object) {
  const Dispatched& d = object.dispatched;
  const NormalConfig& config = object.state->object.config();
  sy_dispatched_view v = SY_DISPATCHED_VIEW_INIT;
  v.x = d.x.data;
  v.x_rows = d.x.rows;
  v.x_cols = d.x.cols;
  v.x_dtype = static_cast<sy_dtype>(d.x.dtype);
  v.x_scale_kind = static_cast<sy_scale_kind>(d.x.scale_kind);
  v.x_scales = d.x.scales;
  v.rows = d.rows;
  v.num_tokens = object.handle->tokens;
  v.world = object.state->group->size();
  v.topk = config.topk;
  v.num_local_experts = static_cast<int32_t>(d.tokens_per_expert.size());
  v.handle = object.handle;
  v.topk_ids = data_or_null(d.topk_ids);
  v.topk_weights = data_or_null(d.topk_weights);
  v.source_token = data_or_null(d.source_token);
  v.row_source = data_or_null(d.row_source);
  v.row_weights = data_or_null(d.row_weights);
  v.expert_first_row = data_or_null(d.expert_first_row);
  v.tokens_per_expert = data_or_null(d.tokens_per_expert);
  v.aligned_per_expert = data_or_null(d.aligned_per_expert);
  v.dropped = data_or_null(d.dropped);
  v.dropped_per_source = data_or_null(d.dropped_per_source);
  v.invalid_ids = data_or_null(d.invalid_ids);
  return v;
}

}  // namespace

extern "C" {

sy_code sy_exchange_memory_required(const sy_normal_config* config, int32_t world, sy_backend backend,
                                    sy_memory_requirement* requirement) {
  return guarded([&] {
    check_struct(requirement, sizeof *requirement, "requirement");
    fill(requirement, NormalExchange::memory_required(from_c(config), world, to_enum<Backend>("backend", backend)));
  });
}

sy_code sy_exchange_heap_bytes(const sy_normal_config* config, int32_t world, sy_backend backend, size_t* bytes) {
  return guarded([&] {
    require(bytes, "bytes");
    *bytes = NormalExchange::heap_bytes(from_c(config), world, to_enum<Backend>("backend", backend));
  });
}

sy_code sy_exchange_max_rows(const sy_normal_config* config, int32_t world, int64_t* rows) {
  return guarded([&] {
    require(rows, "rows");
    *rows = max_rows(from_c(config), world);
  });
}

sy_code sy_exchange_create(sy_group* group, const sy_normal_config* config, sy_exchange** exchange) {
  return create(group, "exchange", exchange, [&] { return std::make_shared<ExchangeState>(group->group, from_c(config)); });
}

sy_code sy_exchange_destroy(sy_exchange* exchange) {
  delete exchange;
  return SY_OK;
}

sy_code sy_exchange_dispatch(sy_exchange* exchange, const sy_const_row_view* x, const sy_expert_ids* ids, const float* weights,
                             const sy_dispatch_options* options, sy_dispatched** dispatched) {
  if (dispatched) *dispatched = nullptr;
  return collective_on(exchange, "exchange", [&] {
    require(dispatched, "dispatched");
    auto made = make_dispatched(*exchange);
    const ExpertIds routing = from_c(ids);
    Rows out;
    const auto o = dispatch_options(options, out);
    *dispatched =
        deliver(std::move(made),
                NormalCalls::dispatch(exchange->state->object, from_c(x, "x"), routing, weights, o.twin, o.known_memory),
                routing.num_tokens);
  });
}

sy_code sy_exchange_dispatch_cached(sy_exchange* exchange, const sy_const_row_view* x, const sy_handle* handle,
                                    const sy_dispatch_options* options, sy_dispatched** dispatched) {
  if (dispatched) *dispatched = nullptr;
  return collective_on(exchange, "exchange", [&] {
    const Handle& routing = checked_handle(handle);
    Rows out;
    const auto o = dispatch_options(options, out);
    if (!o.twin.out) require(dispatched, "dispatched");
    auto made = dispatched ? make_dispatched(*exchange) : nullptr;
    Dispatched delivered = NormalCalls::dispatch(exchange->state->object, from_c(x, "x"), routing, o.twin, o.known_memory);
    if (dispatched) *dispatched = deliver(std::move(made), std::move(delivered), handle->tokens);
  });
}

sy_code sy_dispatched_get(const sy_dispatched* dispatched, sy_dispatched_view* view) {
  return guarded([&] {
    require(dispatched, "dispatched");
    check_struct(view, sizeof *view, "view");
    write_struct(view, view_of(*dispatched));
  });
}

sy_code sy_dispatched_used_by(sy_dispatched* dispatched, void* stream) {
  return guarded([&] {
    require(dispatched, "dispatched");
    dispatched->dispatched.used_by(stream);
  });
}

sy_code sy_dispatched_destroy(sy_dispatched* dispatched) {
  delete dispatched;
  return SY_OK;
}

sy_code sy_exchange_allocate_rows(sy_exchange* exchange, const sy_handle* handle, sy_dtype dtype, void* stream,
                                  sy_rows** rows) {
  if (rows) *rows = nullptr;
  return guarded([&] {
    require(exchange, "exchange");
    require(rows, "rows");
    auto made = std::make_unique<sy_rows>();
    made->state = exchange->state;
    NormalExchange& object = exchange->state->object;
    const DType type = to_enum<DType>("dtype", dtype);
    made->rows = stream == SY_ANY_STREAM ? object.allocate_rows(checked_handle(handle), type)
                                         : object.allocate_rows(checked_handle(handle), type, stream);
    *rows = made.release();
  });
}

sy_code sy_exchange_make_graph_memory(sy_exchange* exchange, sy_graph_memory** memory) {
  if (memory) *memory = nullptr;
  return guarded([&] {
    require(exchange, "exchange");
    require(memory, "memory");
    auto made = std::make_unique<sy_graph_memory>();
    made->state = exchange->state;
    made->memory = exchange->state->object.make_graph_memory();
    *memory = made.release();
  });
}

sy_code sy_exchange_use_graph_memory(sy_exchange* exchange, const sy_graph_memory* memory) {
  return guarded([&] {
    require(exchange, "exchange");
    exchange->state->object.use_graph_memory(memory ? memory->memory : GraphMemory());
  });
}

sy_code sy_graph_memory_destroy(sy_graph_memory* memory) {
  delete memory;
  return SY_OK;
}

sy_code sy_rows_get(const sy_rows* rows, sy_row_view* view) {
  return guarded([&] {
    require(rows, "rows");
    check_struct(view, sizeof *view, "view");
    fill(view, rows->rows.rows());
  });
}

sy_code sy_rows_used_by(sy_rows* rows, void* stream) {
  return guarded([&] {
    require(rows, "rows");
    rows->rows.used_by(stream);
  });
}

sy_code sy_rows_destroy(sy_rows* rows) {
  delete rows;
  return SY_OK;
}

sy_code sy_exchange_combine(sy_exchange* exchange, const sy_const_row_view* y, const sy_handle* handle, void* out,
                            const sy_combine_options* options, float* out_weights) {
  return collective_on(exchange, "exchange", [&] {
    const auto o = read_options(options);
    NormalCalls::combine(exchange->state->object, from_c(y, "y"), checked_handle(handle), out, o.twin, out_weights,
                         o.known_memory);
  });
}

sy_code sy_exchange_invalid_ids(const sy_exchange* exchange, int64_t* count) {
  return guarded([&] {
    require(exchange, "exchange");
    require(count, "count");
    *count = exchange->state->object.invalid_ids();
  });
}

sy_code sy_exchange_set_site(sy_exchange* exchange, uint32_t site) {
  return guarded([&] {
    require(exchange, "exchange");
    exchange->state->object.set_site(site);
  });
}

sy_code sy_exchange_last_call(const sy_exchange* exchange, sy_call_statistics* statistics) {
  return guarded([&] {
    require(exchange, "exchange");
    check_struct(statistics, sizeof *statistics, "statistics");
    fill(statistics, exchange->state->object.last_call());
  });
}

}  // extern "C"
