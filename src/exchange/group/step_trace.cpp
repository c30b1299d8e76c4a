// SPDX-License-Identifier: Apache-2.0
#include "exchange/group/step_trace.hpp"

#include "exchange/group/impl.hpp"
#include "trace/device_trace.hpp"

namespace switchyard::detail {
namespace {

Event event_of(ExpertStep step) {
  switch (step) {
    case ExpertStep::mlp: return Event::expert_mlp;
    case ExpertStep::up: return Event::expert_up;
    case ExpertStep::down: break;
  }
  return Event::expert_down;
}

}  // namespace

StepTrace::StepTrace(Group& group) : group_(group.impl()) {}
StepTrace::~StepTrace() = default;

void StepTrace::begin(ExpertStep step, int64_t rows, void* stream) {
  if (group_.tracer == nullptr) return;
  if (group_.device) {
    launch_ = pack_launch(++group_.traced_steps, nullptr, rows);
    return group_.device->mark_trace(event_of(step), launch_, true, stream);
  }
  begin_ = Tracer::ticks();
}

void StepTrace::end(ExpertStep step, int64_t rows, void* stream) {
  if (group_.tracer == nullptr) return;
  if (group_.device) return group_.device->mark_trace(event_of(step), launch_, false, stream);
  group_.tracer->tick_span(kHostTrack, static_cast<uint16_t>(event_of(step)), begin_, Tracer::ticks(), rows);
}

}  // namespace switchyard::detail
