// SPDX-License-Identifier: Apache-2.0
// Weight copies by a GPU: from its own memory and from the mapped memory of other GPUs.
#include "exchange/gpu/rank.hpp"
#include "exchange/slots/move.hpp"
#include "heap/gpu/device_guard.hpp"

namespace switchyard::detail {

namespace {

class GpuWeightCopies final : public WeightCopies {
 public:
  GpuWeightCopies(CudaRank& gpu, void* stream) : gpu_(gpu), stream_(static_cast<gpu::Stream>(stream)) {}
  void check(const SlotArray& array) const override {
    const DeviceGuard guard(gpu_.device());
    if (capture_of(stream_).active)
      throw Error(ErrorCode::invalid_argument,
                  "move_weights: the stream is being captured; weights cannot be moved in a graph");
    if (!gpu::is_legacy(stream_)) gpu_.check_stream(stream_);
    gpu_.check_pointer("arrays[].data", array.data, 1);
  }
  void copy(std::byte* to, const std::byte* from, size_t bytes) override {
    const DeviceGuard guard(gpu_.device());
    const RelaxedCapture relaxed;  // another stream of this thread may be captured
    check_cuda(gpu::copy_on_device(to, from, bytes, stream_), "copy of weights");
  }
  void wait() override {
    const DeviceGuard guard(gpu_.device());
    const RelaxedCapture relaxed;
    check_cuda(gpu::wait_for_stream(stream_), "copy of weights");
  }

 private:
  CudaRank& gpu_;
  gpu::Stream stream_;
};

}  // namespace

std::unique_ptr<WeightCopies> copies_on_gpu(Group& group, void* stream) {
  return std::make_unique<GpuWeightCopies>(rank_of(group), stream);
}

}  // namespace switchyard::detail
