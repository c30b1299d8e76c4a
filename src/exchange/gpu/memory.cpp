// SPDX-License-Identifier: Apache-2.0
#include "exchange/gpu/memory.hpp"

#include <vector>

#include "exchange/gpu/check.hpp"
#include "heap/gpu/device_memory.hpp"

namespace switchyard::detail {

DeviceMemory::DeviceMemory(size_t bytes, gpu::Stream stream) {
  const RelaxedCapture relaxed;  // some stream of this thread may be captured
  DeferredFrees::of_process().sweep();
  count_device_allocation();
  int device = 0, pools = 0;
  check_cuda(gpu::current_device(&device), "device");
  check_cuda(gpu::has_pools(&pools, device), "device attribute");
  check_cuda(pools != 0 ? gpu::allocate_in_order(&memory_.data, bytes, stream) : gpu::allocate(&memory_.data, bytes),
             "memory of the GPU");
  if (pools != 0) memory_.stream = stream;
  memory_.context = current_context();
  check_cuda(gpu::fill(memory_.data, 0, bytes, stream), "cudaMemset");
  check_cuda(gpu::wait_for_stream(stream), "cudaMemset");
}

void set_device_flags(void* flags, int64_t bytes, uint64_t word, gpu::Stream stream) {
  const RelaxedCapture relaxed;  // some stream of this thread may be captured
  const std::vector<uint64_t> words(static_cast<size_t>(bytes) / sizeof word, word);
  check_cuda(gpu::copy_to_device(flags, words.data(), words.size() * sizeof word, stream), "flags");
  check_cuda(gpu::wait_for_stream(stream), "flags");
}

}  // namespace switchyard::detail
