// SPDX-License-Identifier: Apache-2.0
#include "exchange/cuda/stream_point.hpp"

#include "exchange/cuda/launch.hpp"
#include "heap/cuda/driver.cuh"

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

unsigned long long stream_id(cudaStream_t stream) {
  unsigned long long id = 0;
  check_cuda(cudaStreamGetId(stream, &id), "cudaStreamGetId");
  return id;
}

CaptureState capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  CaptureState state;
  if (stream == nullptr || stream == cudaStreamLegacy) return state;  // it cannot be captured, and asking would spoil captures
  check_cuda(cudaStreamGetCaptureInfo(stream, &status, &state.id, &state.graph), "cudaStreamGetCaptureInfo");
  state.active = status == cudaStreamCaptureStatusActive;
  if (!state.active) state.graph = nullptr;
  return state;
}

RelaxedCapture::RelaxedCapture() { check_cuda(cudaThreadExchangeStreamCaptureMode(&before_), "capture mode"); }
RelaxedCapture::~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&before_); }

void retain_in_graph(cudaGraph_t graph, void* object, void (*release)(void*)) {
  auto* const retained = new Retained{object, release};
  cudaUserObject_t held = nullptr;
  const cudaError_t status = cudaUserObjectCreate(&held, retained, release_retained, 1, cudaUserObjectNoDestructorSync);
  if (status != cudaSuccess) release_retained(retained);
  check_cuda(status, "cudaUserObjectCreate");
  const cudaError_t kept = cudaGraphRetainUserObject(graph, held, 1, cudaGraphUserObjectMove);
  if (kept != cudaSuccess) cudaUserObjectRelease(held, 1);
  check_cuda(kept, "cudaGraphRetainUserObject");
}

Point StreamPoints::mark(cudaStream_t stream, unsigned long long id) {
  cudaEvent_t event = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      event = idle_.back();
      idle_.pop_back();
    }
  }
  if (event == nullptr) {
    check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    const std::lock_guard lock(mutex_);
    idle_.reserve(++made_);  // give() needs no memory
  }
  const Point point(new StreamPoint{event, id}, [points = shared_from_this()](const StreamPoint* p) {
    points->give(p->event);
    delete p;
  });
  check_cuda(cudaEventRecord(event, stream), "cudaEventRecord");
  return point;
}

void StreamPoints::give(cudaEvent_t event) noexcept {
  const std::lock_guard lock(mutex_);
  if (!closed_) idle_.push_back(event);
}

void StreamPoints::close() noexcept {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  for (cudaEvent_t event : idle_) cudaEventDestroy(event);
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

void StreamPoints::order(cudaStream_t stream, unsigned long long id, const StreamPoint& point) {
  if (point.stream_id != id) check_cuda(cudaStreamWaitEvent(stream, point.event, 0), "cudaStreamWaitEvent");
}

void StreamPoints::wait(const StreamPoint& point) {
  check_cuda(cudaEventSynchronize(point.event), "wait for the users of rows");
}

}  // namespace switchyard::detail
