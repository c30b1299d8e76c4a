// SPDX-License-Identifier: Apache-2.0
#include "heap/cuda/copy_stream.hpp"

#include <map>
#include <mutex>
#include <string>

#include "switchyard/status.hpp"

namespace switchyard::detail {

cudaStream_t copy_stream() {
  static std::mutex mutex;
  static auto* streams = new std::map<int, cudaStream_t>;  // outlives every group, also static ones
  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  const std::lock_guard lock(mutex);
  cudaStream_t stream = nullptr;
  if (status == cudaSuccess) stream = (*streams)[device];
  if (status == cudaSuccess && !stream) status = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (status != cudaSuccess) {
    (void)cudaGetLastError();
    throw Error(ErrorCode::system, std::string("making a stream: ") + cudaGetErrorString(status));
  }
  return (*streams)[device] = stream;
}

}  // namespace switchyard::detail
