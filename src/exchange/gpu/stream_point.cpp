// SPDX-License-Identifier: Apache-2.0
#include "exchange/gpu/stream_point.hpp"

#include "exchange/gpu/check.hpp"
#include "heap/gpu/driver.cuh"

namespace switchyard::detail {

namespace {

thread_local int callback_depth = 0;

/// What a graph holds.
struct Retained {
  void* object;
  void (*release)(void*);
};
void release_retained(void* given) {
  auto* const retained = static_cast<Retained*>(given);
  ++callback_depth;
  retained->release(retained->object);
  --callback_depth;
  delete retained;
}

}  // namespace

bool in_driver_callback() noexcept { return callback_depth > 0; }

unsigned long long stream_id(gpu::Stream stream) {
  unsigned long long id = 0;
  check_cuda(gpu::id_of(stream, &id), "cudaStreamGetId");
  return id;
}

CaptureState capture_of(gpu::Stream stream) {
  CaptureState state;
  if (gpu::is_legacy(stream)) return state;  // it cannot be captured, and asking would spoil captures
  check_cuda(gpu::capture_info(stream, &state.active, &state.id, &state.graph), "cudaStreamGetCaptureInfo");
  if (!state.active) state.graph = nullptr;
  return state;
}

RelaxedCapture::RelaxedCapture() { check_cuda(gpu::exchange_capture_mode(&before_), "capture mode"); }
RelaxedCapture::~RelaxedCapture() { gpu::exchange_capture_mode(&before_); }

void retain_in_graph(gpu::Graph graph, void* object, void (*release)(void*)) {
  auto* const retained = new Retained{object, release};
  gpu::GraphObject held = nullptr;
  const gpu::Status status = gpu::make_graph_object(&held, retained, release_retained);
  if (status != gpu::kOk) release_retained(retained);
  check_cuda(status, "cudaUserObjectCreate");
  const gpu::Status kept = gpu::give_to_graph(graph, held);
  if (kept != gpu::kOk) gpu::release_graph_object(held);
  check_cuda(kept, "cudaGraphRetainUserObject");
}

Point StreamPoints::mark(gpu::Stream stream, unsigned long long id) {
  gpu::Event event = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      event = idle_.back();
      idle_.pop_back();
    }
  }
  if (event == nullptr) {
    check_cuda(gpu::make_event(&event), "cudaEventCreate");
    const std::lock_guard lock(mutex_);
    idle_.reserve(++made_);  // give() needs no memory
  }
  const Point point(new StreamPoint{event, id}, [points = shared_from_this()](const StreamPoint* p) {
    points->give(p->event);
    delete p;
  });
  check_cuda(gpu::record_event(event, stream), "cudaEventRecord");
  return point;
}

void StreamPoints::move(const StreamPoint& point, gpu::Stream stream) {
  std::atomic_thread_fence(std::memory_order_acquire);  // who held it before is done with it
  point.known_reached.store(false, std::memory_order_relaxed);
  check_cuda(gpu::record_event(point.event, stream), "cudaEventRecord");
}

void StreamPoints::give(gpu::Event event) noexcept {
  const std::lock_guard lock(mutex_);
  if (!closed_) idle_.push_back(event);
}

void StreamPoints::close() noexcept {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  for (gpu::Event event : idle_) gpu::destroy_event(event);
  idle_.clear();
}

bool StreamPoints::reached(const StreamPoint& point) noexcept try {
  if (point.known_reached.load(std::memory_order_acquire)) return true;
  const RelaxedCapture relaxed;  // some stream of this thread may be captured
  if (driver().event_query(point.event) != CUDA_SUCCESS) return false;
  point.known_reached.store(true, std::memory_order_release);
  return true;
} catch (const Error&) {
  return false;  // as far as one knows
}

void StreamPoints::order(gpu::Stream stream, unsigned long long id, const StreamPoint& point) {
  if (point.stream_id != id) check_cuda(gpu::order_after(stream, point.event), "cudaStreamWaitEvent");
}

void StreamPoints::wait(const StreamPoint& point) {
  check_cuda(gpu::wait_for_event(point.event), "wait for the users of rows");
}

}  // namespace switchyard::detail
