// SPDX-License-Identifier: Apache-2.0
#include "heap/gpu/copy_stream.hpp"

#include <map>
#include <mutex>
#include <string>

#include "switchyard/status.hpp"

namespace switchyard::detail {

gpu::Stream copy_stream() {
  static std::mutex mutex;
  static auto* streams = new std::map<int, gpu::Stream>;  // outlives every group, including static ones
  int device = 0;
  gpu::Status status = gpu::current_device(&device);
  const std::lock_guard lock(mutex);
  gpu::Stream stream = nullptr;
  if (status == gpu::kOk) stream = (*streams)[device];
  if (status == gpu::kOk && !stream) status = gpu::make_stream(&stream);
  if (status != gpu::kOk) {
    gpu::forget_error();
    throw Error(ErrorCode::system, std::string("making a stream: ") + gpu::text_of(status));
  }
  return (*streams)[device] = stream;
}

}  // namespace switchyard::detail
