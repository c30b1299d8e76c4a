// SPDX-License-Identifier: Apache-2.0
// C functions for low-latency mode and the flat exchange.
#include "switchyard/low_latency.hpp"

#include "capi/call_options.hpp"
#include "capi/internal_exports.hpp"
#include "capi/objects.hpp"
#include "capi/structs.hpp"
#include "exchange/low_latency/known_memory.hpp"
#include "switchyard/c/low_latency.h"

using namespace switchyard;
using namespace switchyard::detail;

// NOLINTBEGIN(readability-identifier-naming): names of the C ABI
struct sy_low_latency {
  std::shared_ptr<Grouped<LowLatencyExchange>> state;
  ReceiveHook receive;  ///< hook of the last sent call, until the call is received
};
struct sy_low_latency_output {
  std::shared_ptr<Group> group;
  LowLatencyOutput output;
};
struct sy_low_latency_rows {
  std::shared_ptr<Group> group;
  LowLatencyRows rows;
};
// NOLINTEND(readability-identifier-naming)

namespace {

/// Adapts the caller's C function to C++.
struct CallerRowFunction final : CpuRowFunction {
  CallerRowFunction(sy_row_function f, void* u) noexcept : function(f), user(u) {}
  void apply(float* x, int64_t n, const RowOrigin& row, int64_t column) const noexcept override {
    const sy_row_origin origin{row.expert, row.rank, row.token, row.k};
    function(x, n, &origin, column, user);
  }
  sy_row_function function;
  void* user;
};

/// For the duration of the call, `function` owns the object to which the options point.
AllToAllOptions all_to_all_options(const sy_all_to_all_options* options, RowFunction& function) {
  if (!options) return {};
  const sy_all_to_all_options o = read_struct(options, kInit<sy_all_to_all_options>, "options");
  if (o.row_function) function = RowFunction(std::make_shared<const CallerRowFunction>(o.row_function, o.row_function_user));
  AllToAllOptions result = twin_of(o, "options");
  result.selector = sy_internal_slot_selector_1(o.selector);
  if (function) result.row_function = &function;
  return result;
}

CallOptions<sy_low_latency_dispatch_options> dispatch_options(const sy_low_latency_dispatch_options* options) {
  if (!options) return {};
  const auto o = read_struct(options, kInit<sy_low_latency_dispatch_options>, "options");
  auto result = call_options(o);
  result.twin.selector = sy_internal_slot_selector_1(o.selector);
  return result;
}

sy_low_latency_view view_of(const sy_low_latency_output& object) {
  const LowLatencyOutput& o = object.output;
  sy_low_latency_view v = SY_LOW_LATENCY_VIEW_INIT;
  v.x = o.x.data;
  v.x_rows = o.x.rows;
  v.x_cols = o.x.cols;
  v.x_dtype = static_cast<sy_dtype>(o.x.dtype);
  v.x_scale_kind = static_cast<sy_scale_kind>(o.x.scale_kind);
  v.x_scales = o.x.scales;
  v.rows_per_expert = o.rows_per_expert;
  v.scale_rows = o.scale_rows;
  v.world = object.group->size();
  v.num_local_experts = static_cast<int32_t>(o.x.rows / o.rows_per_expert);
  v.rows_of_expert = o.rows_of_expert;
  v.source_range = o.source_range;
  v.row_source = o.row_source;
  v.scale_order = static_cast<sy_scale_order>(o.scale_order);
  v.scale_group = o.scale_group;
  return v;
}

LowLatencyOutput& checked_output(sy_low_latency_output* output) {
  require(output, "output");
  return output->output;
}
const LowLatencyOutput& checked_output(const sy_low_latency_output* output) {
  require(output, "output");
  return output->output;
}

template <class Make>
sy_code make_output(sy_low_latency* exchange, sy_low_latency_output** output, const Make& make) {
  if (output) *output = nullptr;
  return guarded([&] {
    require(exchange, "exchange");
    require(output, "output");
    auto made = std::make_unique<sy_low_latency_output>();
    made->group = exchange->state->group;
    made->output = make(exchange->state->object);
    *output = made.release();
  });
}

}  // namespace

extern "C" {

sy_code sy_low_latency_memory_required(const sy_low_latency_config* config, int32_t world, sy_memory_requirement* requirement) {
  return guarded([&] {
    check_struct(requirement, sizeof *requirement, "requirement");
    fill(requirement, LowLatencyExchange::memory_required(from_c(config), world));
  });
}

sy_code sy_low_latency_heap_bytes(const sy_low_latency_config* config, int32_t world, size_t* bytes) {
  return guarded([&] {
    require(bytes, "bytes");
    *bytes = LowLatencyExchange::heap_bytes(from_c(config), world);
  });
}

sy_code sy_low_latency_scale_row_bytes(const sy_low_latency_config* config, size_t* bytes) {
  return guarded([&] {
    require(bytes, "bytes");
    const LowLatencyConfig c = from_c(config);
    require_range("config->hidden", c.hidden, 0, int64_t{1} << 24);
    if (c.scales != ScaleKind::none && c.scale_group != 32 && c.scale_group != 64 && c.scale_group != 128)
      throw ArgumentError("config->scale_group = " + std::to_string(c.scale_group) + ": must be 32, 64 or 128");
    *bytes = scale_row_bytes(c.hidden, c.scales, c.scale_group);
  });
}

sy_code sy_low_latency_create(sy_group* group, const sy_low_latency_config* config, sy_low_latency** exchange) {
  return create(group, "exchange", exchange,
                [&] { return std::make_shared<Grouped<LowLatencyExchange>>(group->group, from_c(config)); });
}

sy_code sy_low_latency_destroy(sy_low_latency* exchange) {
  delete exchange;
  return SY_OK;
}

sy_code sy_low_latency_make_output(sy_low_latency* exchange, sy_low_latency_output** output) {
  return make_output(exchange, output, [](LowLatencyExchange& object) { return object.make_output(); });
}

sy_code sy_low_latency_make_output_in(sy_low_latency* exchange, const sy_row_view* memory, sy_low_latency_output** output) {
  return make_output(exchange, output,
                     [&](LowLatencyExchange& object) { return object.make_output(from_c(memory, "memory")); });
}

sy_code sy_low_latency_output_get(const sy_low_latency_output* output, sy_low_latency_view* view) {
  return guarded([&] {
    require(output, "output");
    check_struct(view, sizeof *view, "view");
    write_struct(view, view_of(*output));
  });
}

sy_code sy_low_latency_output_destroy(sy_low_latency_output* output) {
  delete output;
  return SY_OK;
}

sy_code sy_low_latency_make_rows(sy_low_latency* exchange, sy_dtype dtype, sy_low_latency_rows** rows) {
  if (rows) *rows = nullptr;
  return guarded([&] {
    require(exchange, "exchange");
    require(rows, "rows");
    auto made = std::make_unique<sy_low_latency_rows>();
    made->group = exchange->state->group;
    made->rows = exchange->state->object.make_rows(to_enum<DType>("dtype", dtype));
    *rows = made.release();
  });
}

sy_code sy_low_latency_rows_get(const sy_low_latency_rows* rows, sy_row_view* view) {
  return guarded([&] {
    require(rows, "rows");
    check_struct(view, sizeof *view, "view");
    fill(view, rows->rows);
  });
}

sy_code sy_low_latency_rows_destroy(sy_low_latency_rows* rows) {
  delete rows;
  return SY_OK;
}

sy_code sy_low_latency_dispatch(sy_low_latency* exchange, const sy_const_row_view* x, const sy_expert_ids* ids,
                                sy_low_latency_output* output, const sy_low_latency_dispatch_options* options) {
  return collective_on(exchange, "exchange", [&] {
    const auto o = dispatch_options(options);
    LowLatencyCalls::dispatch(exchange->state->object, from_c(x, "x"), from_c(ids), checked_output(output), o.twin,
                              o.known_memory);
  });
}

sy_code sy_low_latency_dispatch_send(sy_low_latency* exchange, const sy_const_row_view* x, const sy_expert_ids* ids,
                                     sy_low_latency_output* output, const sy_low_latency_dispatch_options* options) {
  return collective_on(exchange, "exchange", [&] {
    const auto o = dispatch_options(options);
    exchange->receive = LowLatencyCalls::dispatch_send(exchange->state->object, from_c(x, "x"), from_c(ids),
                                                       checked_output(output), o.twin, o.known_memory);
  });
}

sy_code sy_low_latency_combine(sy_low_latency* exchange, const sy_const_row_view* y, const sy_low_latency_output* output,
                               void* out, const sy_low_latency_combine_options* options) {
  return collective_on(exchange, "exchange", [&] {
    const auto o = read_options(options);
    LowLatencyCalls::combine(exchange->state->object, from_c(y, "y"), checked_output(output), out, o.twin, o.known_memory);
  });
}

sy_code sy_low_latency_combine_send(sy_low_latency* exchange, const sy_const_row_view* y, const sy_low_latency_output* output,
                                    void* out, const sy_low_latency_combine_options* options) {
  return collective_on(exchange, "exchange", [&] {
    const auto o = read_options(options);
    exchange->receive = LowLatencyCalls::combine_send(exchange->state->object, from_c(y, "y"), checked_output(output), out,
                                                      o.twin, o.known_memory);
  });
}

sy_code sy_low_latency_receive(sy_low_latency* exchange) {
  if (exchange && !exchange->receive)
    return guarded([] { throw ArgumentError("receive: nothing was sent since the last sy_low_latency_receive"); });
  return collective_on(exchange, "exchange", [&] { std::exchange(exchange->receive, nullptr)(); });
}

sy_code sy_low_latency_all_to_all(sy_low_latency* exchange, const sy_const_row_view* x, const sy_expert_ids* ids, void* out,
                                  const sy_all_to_all_options* options) {
  return collective_on(exchange, "exchange", [&] {
    RowFunction function;
    exchange->state->object.moe_all_to_all(from_c(x, "x"), from_c(ids), out, all_to_all_options(options, function));
  });
}

sy_code sy_low_latency_invalid_ids(const sy_low_latency* exchange, int64_t* count) {
  return guarded([&] {
    require(exchange, "exchange");
    require(count, "count");
    *count = exchange->state->object.invalid_ids();
  });
}

sy_code sy_low_latency_last_call(const sy_low_latency* exchange, sy_call_statistics* statistics) {
  return guarded([&] {
    require(exchange, "exchange");
    check_struct(statistics, sizeof *statistics, "statistics");
    fill(statistics, exchange->state->object.last_call());
  });
}

}  // extern "C"
