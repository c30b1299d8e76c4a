// SPDX-License-Identifier: Apache-2.0
// Weight copies by a GPU: from its own memory, from the mapped memory of other GPUs, and from and to host memory.
#include "exchange/gpu/rank.hpp"
#include "exchange/slots/move.hpp"
#include "heap/gpu/device_guard.hpp"

namespace switchyard::detail {

namespace {

class GpuWeightCopies final : public WeightCopies {
 public:
  GpuWeightCopies(CudaRank& gpu, bool in_host_memory, void* stream)
      : gpu_(gpu), in_host_memory_(in_host_memory), stream_(static_cast<gpu::Stream>(stream)) {}
  void check(const SlotArray& array) const override {
    const DeviceGuard guard(gpu_.device());
    if (capture_of(stream_).active)
      throw Error(ErrorCode::invalid_argument,
                  "move_weights: the stream is being captured; weights cannot be moved in a graph");
    if (!gpu::is_legacy(stream_)) gpu_.check_stream(stream_);
    gpu_.check_pointer("arrays[].data", array.data, 1);
  }
  void stage(std::byte* to, const std::byte* from, size_t bytes) override {
    enqueue(in_host_memory_ ? gpu::copy_to_host : gpu::copy_on_device, to, from, bytes);
  }
  void unstage(std::byte* to, const std::byte* from, size_t bytes) override {
    enqueue(in_host_memory_ ? gpu::copy_to_device : gpu::copy_on_device, to, from, bytes);
  }
  void wait() override {
    const DeviceGuard guard(gpu_.device());
    const RelaxedCapture relaxed;
    check_cuda(gpu::wait_for_stream(stream_), "copy of weights");
  }

 private:
  void enqueue(gpu::Status (*copy)(void*, const void*, size_t, gpu::Stream), void* to, const void* from, size_t bytes) {
    const DeviceGuard guard(gpu_.device());
    const RelaxedCapture relaxed;  // another stream of this thread may be captured
    check_cuda(copy(to, from, bytes, stream_), "copy of weights");
  }

  CudaRank& gpu_;
  const bool in_host_memory_;
  gpu::Stream stream_;
};

}  // namespace

std::unique_ptr<WeightCopies> copies_on_gpu(Group& group, bool in_host_memory, void* stream) {
  return std::make_unique<GpuWeightCopies>(rank_of(group), in_host_memory, stream);
}

}  // namespace switchyard::detail
