// SPDX-License-Identifier: Apache-2.0
// Row-wise gradients of SwiGLU and of routing weights. One block per multiprocessor; a warp processes one row at a time, and
// the rows of all experts are assigned to the warps round-robin.
#include "gemm/gpu/each_row.cuh"
#include "gemm/gradients/gradient_params.hpp"

namespace switchyard::detail::gemm {
namespace {

constexpr int kWarpColumns = 32 * 8;  // columns of a row that a warp holds at once

/// Calls `work(row)` in all lanes of one warp for every row of an expert. Call from all threads.
template <class Work>
__device__ __forceinline__ void for_each_row(const RowRanges& ranges, int num_experts, Work work) {
  for_each_row_of<kRowThreads, 32>(ranges, num_experts, work);
}

/// Eight consecutive elements of a row.
template <class Element>
struct Eight {
  float v[8];

  static __device__ __forceinline__ Eight load(const void* p, int64_t at) {
    const int4 bits = *reinterpret_cast<const int4*>(static_cast<const Element*>(p) + at);
    const int words[4] = {bits.x, bits.y, bits.z, bits.w};
    Eight e;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float2 two;
      if constexpr (std::is_same_v<Element, __half>)
        two = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
      else
        two = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&words[i]));
      e.v[2 * i] = two.x;
      e.v[2 * i + 1] = two.y;
    }
    return e;
  }
  __device__ __forceinline__ void store(void* p, int64_t at) const {
    int words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = static_cast<int>(pack<Element>(v[2 * i], v[2 * i + 1]));
    *reinterpret_cast<int4*>(static_cast<Element*>(p) + at) = {words[0], words[1], words[2], words[3]};
  }
};

struct GatedGradient {
  float gate, up, out;
};
/// Gradients for one output, given its gradient `da`. Branch-free.
__device__ __forceinline__ GatedGradient gated_gradient(const Gating& p, float gate, float up, float da) {
  constexpr float kLog2e = 1.4426950408889634F;
  const float g = ptx::min_or_nan(gate, p.limit);
  const float u = ptx::max_or_nan(ptx::min_or_nan(up, p.limit), -p.limit) + p.shift;
  const float s = ptx::reciprocal(1.F + ptx::exp2(-kLog2e * p.alpha * g));
  const float smooth = g * s;
  const float slope = s * (1.F + p.alpha * g * (1.F - s));
  return {gate > p.limit ? 0.F : da * u * slope, up > p.limit || up < -p.limit ? 0.F : da * smooth, smooth * u};
}

template <class Element>
__global__ void __launch_bounds__(kRowThreads, 1) swiglu_gradient(const __grid_constant__ SwigluGradientParams p) {
  for_each_row(p.ranges, p.num_experts, [&](int64_t row) {
    const int64_t wide = row * 2 * p.columns, narrow = row * p.columns;
    for (int c = lane() * 8; c < p.columns; c += kWarpColumns) {
      Eight<Element> gate = Eight<Element>::load(p.h, wide + c), up = Eight<Element>::load(p.h, wide + p.columns + c);
      Eight<Element> da = Eight<Element>::load(p.da, narrow + c);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const GatedGradient d = gated_gradient(p.gating, gate.v[i], up.v[i], da.v[i]);
        gate.v[i] = d.gate;
        up.v[i] = d.up;
        da.v[i] = d.out;
      }
      gate.store(p.dh, wide + c);
      up.store(p.dh, wide + p.columns + c);
      if (p.a != nullptr) da.store(p.a, narrow + c);
    }
  });
}

template <class Element>
__global__ void __launch_bounds__(kRowThreads, 1) routing_gradient(const __grid_constant__ RoutingGradientParams p) {
  for_each_row(p.ranges, p.num_experts, [&](int64_t row) {
    float sum = 0;
#pragma unroll 4
    for (int c = lane() * 8; c < p.columns; c += kWarpColumns) {
      const Eight<Element> dy = Eight<Element>::load(p.dy, row * p.columns + c),
                           y = Eight<Element>::load(p.y, row * p.columns + c);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum = __fmaf_rn(dy.v[i], y.v[i], sum);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane() == 0) p.dweight[row] = sum;
  });
}

template <class Params, void (*kKernel)(Params)>
RowKernel<Params> row_kernel() {
  return {[] { return gpu::allow_shared(kKernel, 0); },
          [](int blocks, gpu::Stream stream, const Params& params) {
            return gpu::launch(kKernel, {blocks, kRowThreads}, stream, params);
          }};
}

}  // namespace

RowKernel<SwigluGradientParams> swiglu_gradient_kernel(bool f16) {
  return f16 ? row_kernel<SwigluGradientParams, swiglu_gradient<__half>>()
             : row_kernel<SwigluGradientParams, swiglu_gradient<__nv_bfloat16>>();
}
RowKernel<RoutingGradientParams> routing_gradient_kernel(bool f16) {
  return f16 ? row_kernel<RoutingGradientParams, routing_gradient<__half>>()
             : row_kernel<RoutingGradientParams, routing_gradient<__nv_bfloat16>>();
}

}  // namespace switchyard::detail::gemm
