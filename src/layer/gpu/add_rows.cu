// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <string>

#include "arch/gpu_runtime.hpp"
#include "gemm/gpu/gpu_memory.hpp"
#include "layer/add_rows.hpp"

namespace switchyard::detail {
namespace {

constexpr const char* kClass = "MoeLayer";
constexpr int kThreads = 512;

struct AddParams {
  uint4* out;  ///< [tokens, vectors], eight elements each
  const uint4* sums;
  const int32_t* device_tokens;  ///< or null
  int64_t tokens, vectors;
};

__device__ __forceinline__ uint32_t sum_of_pairs(__nv_bfloat16, uint32_t a, uint32_t b) {
  const float2 x = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(a));
  const float2 y = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(b));
  const __nv_bfloat162 sum = __floats2bfloat162_rn(__fadd_rn(x.x, y.x), __fadd_rn(x.y, y.y));
  return reinterpret_cast<const uint32_t&>(sum);
}
__device__ __forceinline__ uint32_t sum_of_pairs(__half, uint32_t a, uint32_t b) {
  const float2 x = __half22float2(reinterpret_cast<const __half2&>(a));
  const float2 y = __half22float2(reinterpret_cast<const __half2&>(b));
  const __half2 sum = __floats2half2_rn(__fadd_rn(x.x, y.x), __fadd_rn(x.y, y.y));
  return reinterpret_cast<const uint32_t&>(sum);
}

template <class Element>
__global__ void __launch_bounds__(kThreads) add_rows(const __grid_constant__ AddParams p) {
  int64_t tokens = p.tokens;
  if (p.device_tokens != nullptr) tokens = max(int64_t{0}, min(tokens, static_cast<int64_t>(*p.device_tokens)));
  const int64_t count = tokens * p.vectors, step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) {
    const uint4 a = p.out[i], b = p.sums[i];
    p.out[i] = {sum_of_pairs(Element{}, a.x, b.x), sum_of_pairs(Element{}, a.y, b.y), sum_of_pairs(Element{}, a.z, b.z),
                sum_of_pairs(Element{}, a.w, b.w)};
  }
}

class GpuRowAdder final : public RowAdder {
 public:
  explicit GpuRowAdder(const LayerSetup& setup)
      : is_f16_(setup.config.token_dtype() == DType::f16),
        vectors_(static_cast<int64_t>(setup.row_bytes() / sizeof(uint4))),
        sums_(kClass, setup.sum_bytes()) {
    int device = 0;
    gpu::DeviceTraits traits;
    gemm::check_gpu(gpu::current_device(&device), kClass, "current GPU");
    gemm::check_gpu(gpu::traits_of(&traits, device), kClass, "properties of the GPU");
    multiprocessors_ = traits.multiprocessors;
    gemm::check_gpu(gpu::allow_shared(kernel(), 0), kClass, "kernel that adds to out");
  }

  void* sums() override { return sums_.data(); }
  bool takes(const void* out) const override { return out != nullptr && reinterpret_cast<uintptr_t>(out) % sizeof(uint4) == 0; }
  void add(void* out, int64_t tokens, const MoeLayerCall& call, int num_sms) override {
    const int64_t blocks = (tokens * vectors_ + kThreads - 1) / kThreads;
    if (blocks == 0) return;
    const int64_t max = num_sms > 0 ? num_sms : multiprocessors_;
    const gpu::Grid grid{static_cast<int>(std::min(blocks, max)), kThreads};
    const AddParams params{static_cast<uint4*>(out), static_cast<const uint4*>(sums_.data()), call.device_tokens, tokens,
                           vectors_};
    const auto stream = static_cast<gpu::Stream>(call.stream);
    sums_.used_on(stream);
    gemm::check_gpu(gpu::launch(kernel(), grid, stream, params), kClass, "launch of the kernel that adds to out");
  }

 private:
  void (*kernel() const)(AddParams) { return is_f16_ ? add_rows<__half> : add_rows<__nv_bfloat16>; }

  bool is_f16_;
  int64_t vectors_;  ///< of a row
  int multiprocessors_ = 0;
  gemm::GpuMemory sums_;
};

}  // namespace

std::unique_ptr<RowAdder> make_gpu_row_adder(const LayerSetup& setup) { return std::make_unique<GpuRowAdder>(setup); }

}  // namespace switchyard::detail
