// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <vector>

#include "soak/nccl.hpp"
#include "soak/place.hpp"

namespace soak {

namespace {

constexpr int kStreams = 3, kEvents = 64, kThreads = 256, kMaxBlocks = 64;
/// Allocated up front, so that steps do not allocate.
constexpr size_t kPlaceBytes = size_t{96} << 20;

void must(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

cudaStream_t as_stream(void* stream) { return static_cast<cudaStream_t>(stream); }

/// Runs the first `max` iterations of a job.
template <class Job>
__global__ void job_kernel(const Job job, int64_t max) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x, end = job.size() < max ? job.size() : max;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < end; i += step) job(i);
}

/// Call before anything waits on the GPU: the first launch of a kernel may wait for all running kernels, either to load the
/// kernel or to make room for its stack.
template <class... Jobs>
void warm_up(cudaStream_t stream) {
  (job_kernel<<<1, kThreads, 0, stream>>>(Jobs{}, 0), ...);
  must(cudaStreamSynchronize(stream), "first launch of the jobs");
}

class Captured final : public Place::Graph {
 public:
  Captured(cudaStream_t stream, const std::function<void()>& enqueue) {
    must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    try {
      enqueue();
    } catch (...) {
      (void)cudaStreamEndCapture(stream, &graph_);
      if (graph_) (void)cudaGraphDestroy(graph_);
      throw;
    }
    must(cudaStreamEndCapture(stream, &graph_), "cudaStreamEndCapture");
    must(cudaGraphInstantiate(&exec_, graph_, 0), "cudaGraphInstantiate");
    must(cudaGraphUpload(exec_, stream), "cudaGraphUpload");
  }
  ~Captured() override {
    if (exec_) (void)cudaGraphExecDestroy(exec_);
    if (graph_) (void)cudaGraphDestroy(graph_);
  }
  Captured(const Captured&) = delete;
  void launch(void* stream) override { must(cudaGraphLaunch(exec_, as_stream(stream)), "cudaGraphLaunch"); }

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
};

}  // namespace

int count_gpus() {
  const pid_t child = ::fork();
  if (child == 0) {
    int count = 0;
    ::_exit(cudaGetDeviceCount(&count) == cudaSuccess ? count : 0);
  }
  int status = 0;
  return child > 0 && ::waitpid(child, &status, 0) == child && WIFEXITED(status) ? WEXITSTATUS(status) : 0;
}

int num_sms_for(int world, int lanes) {
  constexpr int kForOthers = 16;  // left for NCCL's blocks and those of jobs
  int gpus = 0, sms = 0;
  must(cudaGetDeviceCount(&gpus), "cudaGetDeviceCount");
  must(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0), "cudaDeviceGetAttribute");
  return std::max(1, (sms - kForOthers) / ((world + gpus - 1) / gpus * lanes));
}

struct Place::Impl {
  int rank = 0, world = 1, gpus = 1;
  std::array<cudaStream_t, kStreams> streams{};
  std::array<cudaEvent_t, kEvents> events{};
  size_t next_event = 0;
  std::byte* memory = nullptr;
  size_t used = 0;
};

Place::Place(int rank, int world) : impl_(std::make_unique<Impl>()) {
  Impl& me = *impl_;
  me.rank = rank, me.world = world;
  must(cudaGetDeviceCount(&me.gpus), "cudaGetDeviceCount");
  must(cudaSetDevice(rank % me.gpus), "cudaSetDevice");
  for (auto& stream : me.streams) must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  must(cudaMallocAsync(reinterpret_cast<void**>(&me.memory), kPlaceBytes, me.streams[0]), "cudaMallocAsync");
  must(cudaMemsetAsync(me.memory, 0, kPlaceBytes, me.streams[0]), "cudaMemsetAsync");
  must(cudaStreamSynchronize(me.streams[0]), "cudaMemsetAsync");
  for (auto& event : me.events) must(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
  warm_up<harness::MakeInputs, MakeRows, RankMajorExperts, ExpertMajorExperts, MaskedExperts, JudgeLayer, SetNumber,
          ClearVerdict, FillNumbers, JudgeNumbers>(me.streams[0]);
}

Place::~Place() {
  for (auto& event : impl_->events) (void)cudaEventDestroy(event);
  for (auto& stream : impl_->streams) (void)cudaStreamSynchronize(stream);
  (void)cudaFreeAsync(impl_->memory, impl_->streams[0]);  // cudaFree would wait and thereby prevent other lanes from launching
  for (auto& stream : impl_->streams) (void)cudaStreamDestroy(stream);
}

std::byte* Place::allocate(size_t bytes) {
  std::byte* const p = impl_->memory + impl_->used;
  impl_->used += (bytes + 255) / 256 * 256;
  if (impl_->used > kPlaceBytes) throw std::runtime_error("a lane needs more memory than it has");
  return p;
}

void Place::check_capture(void* stream, const char* what) const {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  must(cudaStreamIsCapturing(as_stream(stream), &status), what);
  if (status == cudaStreamCaptureStatusInvalidated) throw std::runtime_error(std::string(what) + " has voided the capture");
}

void* Place::stream(int i) const { return impl_->streams.at(static_cast<size_t>(i)); }

void Place::order(void* before, void* after) {
  if (before == after) return;
  const cudaEvent_t event = impl_->events.at(impl_->next_event++ % kEvents);
  must(cudaEventRecord(event, as_stream(before)), "cudaEventRecord");
  must(cudaStreamWaitEvent(as_stream(after), event, 0), "cudaStreamWaitEvent");
}

bool Place::done(void* stream) const {
  const cudaError_t status = cudaStreamQuery(as_stream(stream));
  if (status == cudaErrorNotReady) return false;
  must(status, "cudaStreamQuery");
  return true;
}

void Place::finish(void* stream) { must(cudaStreamSynchronize(as_stream(stream)), "cudaStreamSynchronize"); }

template <class Job>
void Place::run(const Job& job, void* stream) {
  const int64_t blocks = std::clamp<int64_t>((job.size() + kThreads - 1) / kThreads, 1, kMaxBlocks);
  job_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, as_stream(stream)>>>(job, INT64_MAX);
  must(cudaGetLastError(), "a job");
}
template void Place::run(const harness::MakeInputs&, void*);
template void Place::run(const MakeRows&, void*);
template void Place::run(const RankMajorExperts&, void*);
template void Place::run(const ExpertMajorExperts&, void*);
template void Place::run(const MaskedExperts&, void*);
template void Place::run(const JudgeLayer&, void*);
template void Place::run(const SetNumber&, void*);
template void Place::run(const ClearVerdict&, void*);
template void Place::run(const FillNumbers&, void*);
template void Place::run(const JudgeNumbers&, void*);

std::unique_ptr<Place::Graph> Place::capture(void* stream, const std::function<void()>& enqueue) {
  return std::make_unique<Captured>(as_stream(stream), enqueue);
}

std::unique_ptr<AllReduce> Place::make_all_reduce(const Gather& gather) {
  const Impl& me = *impl_;
  if (me.world > me.gpus) return nullptr;
  return make_nccl(me.rank, me.world, me.streams[2], gather);
}

void Place::copy_out(void* to, const void* from, size_t bytes) {
  must(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, impl_->streams[0]), "cudaMemcpyAsync");
  must(cudaStreamSynchronize(impl_->streams[0]), "cudaStreamSynchronize");
}

}  // namespace soak
