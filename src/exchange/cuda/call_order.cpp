// SPDX-License-Identifier: Apache-2.0
#include "exchange/cuda/call_order.hpp"

#include <algorithm>
#include <vector>

#include "exchange/exchange_base.hpp"

namespace switchyard::detail {

CallOrder::CallOrder(CudaRank& gpu)
    : gpu_(gpu), moved_(static_cast<size_t>(gpu.max_warps()) * sizeof(MoveCounter), gpu.copy_stream()) {
  check_cuda(cudaEventCreateWithFlags(&done_, cudaEventDisableTiming), "cudaEventCreate");
}

CallOrder::~CallOrder() {
  if (called_) cudaEventSynchronize(done_);
  cudaEventDestroy(done_);
}

cudaGraph_t CallOrder::begin(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaGraph_t graph = nullptr;
  if (stream) check_cuda(cudaStreamGetCaptureInfo(stream, &status, nullptr, &graph), "cudaStreamGetCaptureInfo");
  if (status == cudaStreamCaptureStatusActive) {
    gpu_.note_capture();
    return graph;
  }
  unsigned long long id = 0;  // of the stream, not of its handle: each thread's cudaStreamPerThread is another one
  check_cuda(cudaStreamGetId(stream, &id), "cudaStreamGetId");
  if (called_ && last_stream_ != id) check_cuda(cudaStreamWaitEvent(stream, done_, 0), "cudaStreamWaitEvent");
  last_stream_ = id;
  return nullptr;
}

void CallOrder::end(cudaStream_t stream, bool captured, int warps) {
  last_warps_ = warps;
  if (captured) return;
  check_cuda(cudaEventRecord(done_, stream), "cudaEventRecord");
  called_ = true;
}

void CallOrder::wait() const {
  if (called_) check_cuda(cudaEventSynchronize(done_), "wait for the last call");
}

CallStatistics CallOrder::statistics() const {
  wait();
  std::vector<MoveCounter> moved(static_cast<size_t>(std::min(last_warps_, gpu_.max_warps())));
  if (moved.empty()) return {};
  check_cuda(cudaMemcpyAsync(moved.data(), moved_.as<void>(), moved.size() * sizeof moved[0], cudaMemcpyDeviceToHost,
                             gpu_.copy_stream()),
             "statistics");
  check_cuda(cudaStreamSynchronize(gpu_.copy_stream()), "statistics");
  return sum_moved(moved);
}

}  // namespace switchyard::detail
