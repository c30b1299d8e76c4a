// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <stdexcept>
#include <string>

#include "gpu/gemm/gemm_reference.hpp"

namespace gemm_test {
namespace {

void require(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

__device__ double value_of(const uint16_t* p, int64_t i, bool f16) {
  return f16 ? static_cast<double>(__half2float(__ushort_as_half(p[i])))
             : static_cast<double>(__bfloat162float(__ushort_as_bfloat16(p[i])));
}
__device__ uint16_t bits_of(double v, bool f16) {
  return f16 ? __half_as_ushort(__double2half(v)) : __bfloat16_as_ushort(__double2bfloat16(v));
}

__device__ uint64_t mix(uint64_t h) {
  h = (h ^ h >> 30) * 0xbf58476d1ce4e5b9ull;
  h = (h ^ h >> 27) * 0x94d049bb133111ebull;
  return h ^ h >> 31;
}

__global__ void fill_kernel(uint16_t* p, int64_t count, bool f16, Fill kind, uint64_t seed, float scale) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const uint64_t h = mix(seed * 0x9e3779b97f4a7c15ull + static_cast<uint64_t>(i));
    const double u = (static_cast<double>(h >> 40) + 1) * 0x1p-24, v = static_cast<double>(h & 0xffffff) * 0x1p-24;
    p[i] = bits_of(kind == Fill::integers ? static_cast<double>(h % 5) - 2 : scale * sqrt(-2 * log(u)) * cospi(2 * v), f16);
  }
}

struct Sums {
  unsigned long long unequal;
  double square, difference;
};

__device__ double dot(const Problem& p, const uint16_t* x, const uint16_t* w, int64_t output) {
  double sum = 0;
  for (int64_t i = 0; i < p.k; ++i)
    sum += value_of(x, i, p.f16) * value_of(w, p.outputs_outside ? output * p.k + i : i * p.n + output, p.f16);
  return sum;
}

__device__ double expected(const Problem& p, const uint16_t* x, const uint16_t* w, int64_t column) {
  double v = dot(p, x, w, column);
  if (p.epilogue == 1) return v < 0 ? 0 : v;
  if (p.epilogue == 2) return v / (1 + exp(-v));
  if (p.epilogue != 3) return v;
  double up = dot(p, x, w, column + p.n / 2);
  v = fmin(v, static_cast<double>(p.limit));
  up = fmax(fmin(up, static_cast<double>(p.limit)), -static_cast<double>(p.limit));
  return v / (1 + exp(-static_cast<double>(p.alpha) * v)) * (up + p.shift);
}

__global__ void compare_kernel(Problem p, const uint16_t* x, const uint16_t* w, const uint16_t* out, int64_t first,
                               int64_t rows, Sums* sums) {
  const int64_t columns = p.columns();
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < rows * columns;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int64_t row = first + i / columns, column = i % columns;
    const double want = expected(p, x + row * p.k, w, column), got = value_of(out, row * columns + column, p.f16);
    if (bits_of(want, p.f16) != out[row * columns + column]) atomicAdd(&sums->unequal, 1ull);
    atomicAdd(&sums->square, want * want);
    atomicAdd(&sums->difference, (got - want) * (got - want));
  }
}

__device__ double gradient_value(const GradientProblem& p, const void* at, int64_t i) {
  return p.wide ? static_cast<double>(static_cast<const float*>(at)[i]) : value_of(static_cast<const uint16_t*>(at), i, p.f16);
}

/// Rounds `v` to the type used in memory.
__device__ double rounded_gradient(const GradientProblem& p, double v) {
  if (p.wide) return static_cast<double>(static_cast<float>(v));
  const uint16_t bits = bits_of(v, p.f16);
  return value_of(&bits, 0, p.f16);
}

__global__ void compare_gradient_kernel(GradientProblem p, const uint16_t* dy, const uint16_t* x, const void* dw,
                                        const void* before, int64_t first, int64_t rows, Sums* sums) {
  Sums mine{};
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < p.n * p.k;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int64_t n = i / p.k, k = i % p.k;
    double want = 0;
    for (int64_t r = first; r < first + rows; ++r) want += value_of(dy, r * p.n + n, p.f16) * value_of(x, r * p.k + k, p.f16);
    if (before != nullptr) want = rounded_gradient(p, want) + gradient_value(p, before, i);
    const double got = gradient_value(p, dw, i);
    const bool equal = p.wide ? static_cast<float>(want) == static_cast<const float*>(dw)[i]
                              : bits_of(want, p.f16) == static_cast<const uint16_t*>(dw)[i];
    if (!equal) ++mine.unequal;
    mine.square += want * want;
    mine.difference += (got - want) * (got - want);
  }
  if (mine.unequal > 0) atomicAdd(&sums->unequal, mine.unequal);
  atomicAdd(&sums->square, mine.square);
  atomicAdd(&sums->difference, mine.difference);
}

__global__ void count_kernel(const uint16_t* a, const uint16_t* b, int64_t count, uint16_t bits, unsigned long long* found) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x)
    if (a[i] != (b != nullptr ? b[i] : bits)) atomicAdd(found, 1ull);
}

template <class T>
struct OnDevice {
  OnDevice() {
    require(cudaMalloc(&p, sizeof(T)), "cudaMalloc");
    require(cudaMemset(p, 0, sizeof(T)), "cudaMemset");
  }
  ~OnDevice() { cudaFree(p); }
  OnDevice(const OnDevice&) = delete;
  T read() const {
    T value;
    require(cudaMemcpy(&value, p, sizeof(T), cudaMemcpyDeviceToHost), "the kernels before");
    return value;
  }
  T* p = nullptr;
};

int64_t count(const void* a, const void* b, int64_t elements, uint16_t bits) {
  const OnDevice<unsigned long long> found;
  count_kernel<<<1024, 256>>>(static_cast<const uint16_t*>(a), static_cast<const uint16_t*>(b), elements, bits, found.p);
  return static_cast<int64_t>(found.read());
}

}  // namespace

void fill(void* p, int64_t count, bool f16, Fill kind, uint64_t seed, float scale) {
  fill_kernel<<<1024, 256>>>(static_cast<uint16_t*>(p), count, f16, kind, seed, scale);
  require(cudaDeviceSynchronize(), "fill");
}

Difference compare(const Problem& p, const void* x, const void* weights, const void* out, int expert, int64_t first,
                   int64_t rows) {
  const OnDevice<Sums> sums;
  compare_kernel<<<1024, 256>>>(p, static_cast<const uint16_t*>(x), static_cast<const uint16_t*>(weights) + expert * p.n * p.k,
                                static_cast<const uint16_t*>(out), first, rows, sums.p);
  const Sums s = sums.read();
  return {rows * p.columns(), static_cast<int64_t>(s.unequal), s.square > 0 ? std::sqrt(s.difference / s.square) : 0};
}

Difference compare_gradient(const GradientProblem& p, const void* dy, const void* x, const void* dw, const void* before,
                            int64_t first, int64_t rows) {
  const OnDevice<Sums> sums;
  compare_gradient_kernel<<<1024, 256>>>(p, static_cast<const uint16_t*>(dy), static_cast<const uint16_t*>(x), dw, before,
                                         first, rows, sums.p);
  const Sums s = sums.read();
  return {p.n * p.k, static_cast<int64_t>(s.unequal), s.square > 0 ? std::sqrt(s.difference / s.square) : 0};
}

int64_t count_other(const void* p, int64_t elements, uint16_t bits) { return count(p, nullptr, elements, bits); }
int64_t count_unequal(const void* a, const void* b, int64_t elements) { return count(a, b, elements, 0); }

}  // namespace gemm_test
