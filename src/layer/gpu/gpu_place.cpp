// SPDX-License-Identifier: Apache-2.0
#include "layer/gpu/gpu_place.hpp"

#include <string>

#include "arch/gpu_order.hpp"
#include "arch/gpu_runtime.hpp"
#include "gemm/gpu/gpu_memory.hpp"

namespace switchyard::detail {
namespace {

constexpr const char* kClass = "MoeLayer";

}  // namespace

GpuPlace gpu_place_of(const Group& group) {
  int devices = 0;
  gemm::check_gpu(gpu::count_devices(&devices), kClass, "number of GPUs");
  const int given = group.options().device;
  GpuPlace place;
  place.device = given < 0 ? group.rank() % devices : given;
  gpu::DeviceTraits traits;
  gemm::check_gpu(gpu::traits_of(&traits, place.device), kClass, "properties of GPU " + std::to_string(place.device));
  place.uuid = traits.uuid;
  place.multiprocessors = traits.multiprocessors;
  return place;
}

bool is_captured(void* stream) { return capture_of(static_cast<gpu::Stream>(stream)).active; }

void order_after(void* stream, void* event) {
  if (event == nullptr) return;
  gemm::check_gpu(gpu::order_after(static_cast<gpu::Stream>(stream), static_cast<gpu::Event>(event)), kClass, "weights_ready");
}

CurrentGpu::CurrentGpu(int device) {
  if (device < 0) return;
  int now = -1;
  gemm::check_gpu(gpu::current_device(&now), kClass, "current GPU");
  if (now == device) return;
  gemm::check_gpu(gpu::make_current(device), kClass, "GPU " + std::to_string(device));
  before_ = now;
}
CurrentGpu::~CurrentGpu() {
  if (before_ >= 0) (void)gpu::make_current(before_);
}

}  // namespace switchyard::detail
