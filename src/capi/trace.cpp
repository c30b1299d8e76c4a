// SPDX-License-Identifier: Apache-2.0
#include "switchyard/trace.hpp"

#include <cstring>
#include <optional>

#include "capi/objects.hpp"
#include "capi/structs.hpp"
#include "switchyard/c/trace.h"

using namespace switchyard;
using namespace switchyard::detail;

// NOLINTBEGIN(readability-identifier-naming): names of the C ABI
struct sy_trace {
  std::shared_ptr<Trace> trace;
};
struct sy_trace_span {
  std::shared_ptr<Trace> trace;
  std::optional<Trace::Span> span;
};
// NOLINTEND(readability-identifier-naming)

namespace {

const Trace& checked(const sy_trace* trace) {
  require(trace, "trace");
  return *trace->trace;
}

void check_rank(const Trace& trace, int32_t rank) { require_range("rank", rank, 0, trace.world() - 1); }

/// `content` is a std::string or a std::vector.
template <class Content>
void write_bytes(sy_bytes* to, Content content) {
  auto stored = store(std::move(content));
  const void* const data = stored->value.data();
  const size_t size = stored->value.size();
  write_struct(to, sy_bytes{sizeof(sy_bytes), stored.release(), data, size});
}

/// Phases in their C form, with the strings to which they point.
struct Phases {
  explicit Phases(std::vector<TracePhase> of) : texts(std::move(of)) {
    for (const TracePhase& p : texts)
      phases.push_back({p.name.c_str(), p.category.c_str(), p.unit.c_str(), p.rank, 0, p.count, p.total_ms, p.max_ms,
                        p.slowest_ms, p.arg_sum, p.bytes});
  }
  std::vector<TracePhase> texts;
  std::vector<sy_trace_phase> phases;
};

}  // namespace

extern "C" {

sy_code sy_trace_create(int32_t world, const sy_trace_options* options, sy_trace** trace) {
  if (trace) *trace = nullptr;
  return guarded([&] {
    require(trace, "trace");
    *trace = std::make_unique<sy_trace>(sy_trace{std::make_shared<Trace>(world, from_c(options))}).release();
  });
}

sy_code sy_trace_destroy(sy_trace* trace) {
  delete trace;
  return SY_OK;
}

sy_code sy_group_set_trace(sy_group* group, sy_trace* trace) {
  return guarded([&] {
    require(group, "group");
    group->group->set_trace(trace ? trace->trace.get() : nullptr);
    *group->recorded = trace ? trace->trace : nullptr;
  });
}

sy_code sy_trace_event(sy_trace* trace, const char* name, const char* unit, int32_t* event) {
  return guarded([&] {
    checked(trace);
    require(name, "name");
    require(event, "event");
    *event = trace->trace->event(name, unit ? unit : "");
  });
}

sy_code sy_trace_span_begin(sy_trace* trace, int32_t rank, int32_t event, int64_t arg, sy_trace_span** span) {
  if (span) *span = nullptr;
  return guarded([&] {
    check_rank(checked(trace), rank);
    require_range("event", event, 0, UINT16_MAX);
    require(span, "span");
    auto made = std::make_unique<sy_trace_span>();
    made->trace = trace->trace;
    made->span.emplace(trace->trace.get(), rank, static_cast<uint16_t>(event), arg);
    *span = made.release();
  });
}

sy_code sy_trace_span_end(sy_trace_span* span) {
  if (span) span->span.reset();
  delete span;
  return SY_OK;
}

sy_code sy_trace_clear(sy_trace* trace) {
  return guarded([&] {
    checked(trace);
    trace->trace->clear();
  });
}

sy_code sy_trace_lost(const sy_trace* trace, uint64_t* records) {
  return guarded([&] {
    require(records, "records");
    *records = checked(trace).lost();
  });
}

sy_code sy_trace_clock_error(const sy_trace* trace, uint64_t* ns) {
  return guarded([&] {
    require(ns, "ns");
    *ns = checked(trace).clock_error_ns();
  });
}

sy_code sy_trace_write_json(const sy_trace* trace, const char* path, int32_t flows) {
  return guarded([&] {
    require(path, "path");
    checked(trace).write_chrome_json(path, to_bool("flows", flows));
  });
}

sy_code sy_trace_json(const sy_trace* trace, int32_t flows, sy_bytes* bytes) {
  return guarded([&] {
    check_struct(bytes, sizeof *bytes, "bytes");
    write_bytes(bytes, checked(trace).chrome_json(to_bool("flows", flows)));
  });
}

sy_code sy_trace_serialize(const sy_trace* trace, int32_t rank, sy_bytes* bytes) {
  return guarded([&] {
    check_rank(checked(trace), rank);
    check_struct(bytes, sizeof *bytes, "bytes");
    write_bytes(bytes, checked(trace).serialize(rank));
  });
}

sy_code sy_trace_merge(sy_trace* trace, const void* data, size_t size) {
  return guarded([&] {
    checked(trace);
    if (size > 0) require(data, "data");
    trace->trace->merge({static_cast<const std::byte*>(data), size});
  });
}

sy_code sy_trace_summary_of(const sy_trace* trace, sy_trace_summary* summary) {
  return guarded([&] {
    check_struct(summary, sizeof *summary, "summary");
    auto stored = store(std::make_shared<const Phases>(checked(trace).summary()));
    const std::vector<sy_trace_phase>& phases = stored->value->phases;
    write_struct(summary, sy_trace_summary{sizeof(sy_trace_summary), stored.release(), data_or_null(phases),
                                           static_cast<int64_t>(phases.size()), sizeof(sy_trace_phase)});
  });
}

}  // extern "C"
