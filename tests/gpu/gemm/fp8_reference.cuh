// SPDX-License-Identifier: Apache-2.0
// Data of tests with fp8 products, and the comparison of bf16 outputs with float64 results from the dequantized operands.
#pragma once

#include <cuda_fp8.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "gpu/gemm/gemm_rig.hpp"

namespace gemm_test {

using Fp8 = __nv_fp8_e4m3;

__host__ __device__ inline uint64_t mix(uint64_t h) {
  h = (h ^ h >> 30) * 0xbf58476d1ce4e5b9ull;
  h = (h ^ h >> 27) * 0x94d049bb133111ebull;
  return h ^ h >> 31;
}
/// Integers in [-2, 2], or multiples of 0.3 in [-150, 150) after rounding.
static __global__ void fill_fp8(Fp8* p, int64_t count, bool integers, uint64_t seed) {
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < count; i += gridDim.x * 256ll) {
    const uint64_t h = mix(seed + static_cast<uint64_t>(i) * 0x9e3779b97f4a7c15ull);
    p[i] = Fp8(integers ? static_cast<float>(h % 5) - 2.F : static_cast<float>(h % 1000) * 0.3F - 150.F);
  }
}

/// Operands of the products of all experts, which have room for `capacity` rows each. `WeightScales` has a device function
/// of(expert, output, group), the scale of weights of 128 columns.
template <class WeightScales>
struct Fp8Operands {
  const Fp8 *x, *w;       ///< [experts * capacity, k] and [experts, n, k]
  const float* x_scales;  ///< [experts * capacity, ceil(k / 128)]
  WeightScales w_scales;
  int64_t n, k, capacity;
  switchyard::Epilogue epilogue;

  int64_t columns() const { return epilogue == switchyard::Epilogue::swiglu ? n / 2 : n; }
  __device__ double dot(int64_t row, int64_t expert, int64_t output) const {
    const int64_t groups = (k + 127) / 128;
    double sum = 0;
    for (int64_t i = 0; i < k; ++i)
      sum +=
          static_cast<double>(static_cast<float>(x[row * k + i])) *
          static_cast<double>(static_cast<float>(w[(expert * n + output) * k + i])) *
          (static_cast<double>(x_scales[row * groups + i / 128]) * static_cast<double>(w_scales.of(expert, output, i / 128)));
    return sum;
  }
  __device__ double output(int64_t row, int64_t expert, int64_t column) const {
    using switchyard::Epilogue;
    const double sum = dot(row, expert, column);
    if (epilogue == Epilogue::swiglu) return sum / (1 + exp(-sum)) * dot(row, expert, column + n / 2);
    if (epilogue == Epilogue::silu) return sum / (1 + exp(-sum));
    if (epilogue == Epilogue::relu) return sum > 0 ? sum : 0;
    return sum;
  }
};

struct Fp8Sums {
  unsigned long long unequal;
  double square, difference;
};
/// Compares the first `rows` rows of an expert.
template <class WeightScales>
__global__ void compare_fp8(Fp8Operands<WeightScales> o, int64_t expert, int64_t rows, int64_t columns, const uint16_t* out,
                            Fp8Sums* sums) {
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < rows * columns; i += gridDim.x * 256ll) {
    const int64_t row = expert * o.capacity + i / columns, column = i % columns;
    const double want = o.output(row, expert, column);
    const uint16_t bits = out[row * columns + column];
    const double got = static_cast<double>(__bfloat162float(__ushort_as_bfloat16(bits)));
    if (__bfloat16_as_ushort(__double2bfloat16(want)) != bits) atomicAdd(&sums->unequal, 1ull);
    atomicAdd(&sums->square, want * want);
    atomicAdd(&sums->difference, (got - want) * (got - want));
  }
}

/// The difference of bf16 outputs from the results, over the experts' first `rows` rows.
template <class WeightScales>
Difference difference_of(const Fp8Operands<WeightScales>& o, const std::vector<int64_t>& rows, const uint16_t* out) {
  DeviceBytes sums(sizeof(Fp8Sums));
  ok(cudaMemset(sums.as(), 0, sizeof(Fp8Sums)));
  int64_t all = 0;
  for (size_t e = 0; e < rows.size(); ++e) {
    all += rows[e];
    if (rows[e] > 0) compare_fp8<<<512, 256>>>(o, static_cast<int64_t>(e), rows[e], o.columns(), out, sums.as<Fp8Sums>());
  }
  Fp8Sums host{};
  ok(cudaMemcpy(&host, sums.as(), sizeof host, cudaMemcpyDeviceToHost));
  return {all * o.columns(), static_cast<int64_t>(host.unequal),
          host.square > 0 ? std::sqrt(host.difference / host.square) : 0};
}

/// A copy of device memory, after the enqueued work.
inline std::vector<uint8_t> bytes_of(const DeviceBytes& from, int64_t count) {
  std::vector<uint8_t> bytes(static_cast<size_t>(count));
  ok(cudaDeviceSynchronize());
  ok(cudaMemcpy(bytes.data(), from.as(), bytes.size(), cudaMemcpyDeviceToHost));
  return bytes;
}

}  // namespace gemm_test
