// SPDX-License-Identifier: Apache-2.0
// The fp8 kernel of the grouped GEMM by itself: the public interface does not offer it yet. Integers whose scales are powers of
// two, so that every bit of every output is known; and normal data against float64 of the dequantised operands.
#include <cuda_fp8.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "arch/gpu_tensor_map.hpp"
#include "gemm/gpu/fp8_kernel.cuh"
#include "gpu/gemm/gemm_rig.hpp"

namespace gemm_test {
namespace {

namespace gemm = switchyard::detail::gemm;
namespace gpu = switchyard::detail::gpu;
using Fp8 = __nv_fp8_e4m3;

struct Shape {
  std::vector<int64_t> rows;
  int64_t n, k;
  bool gated;
  int64_t columns() const { return gated ? n / 2 : n; }
  int64_t total() const { return std::accumulate(rows.begin(), rows.end(), int64_t{0}); }
  int experts() const { return static_cast<int>(rows.size()); }
  int64_t groups() const { return (k + 127) / 128; }
};

__device__ uint64_t mix(uint64_t h) {
  h = (h ^ h >> 30) * 0xbf58476d1ce4e5b9ull;
  h = (h ^ h >> 27) * 0x94d049bb133111ebull;
  return h ^ h >> 31;
}
__global__ void fill_fp8(Fp8* p, int64_t count, bool integers, uint64_t seed) {
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < count; i += gridDim.x * 256ll) {
    const uint64_t h = mix(seed + static_cast<uint64_t>(i) * 0x9e3779b97f4a7c15ull);
    p[i] = Fp8(integers ? static_cast<float>(h % 5) - 2.F : static_cast<float>(h % 1000) * 0.3F - 150.F);
  }
}
__global__ void fill_scales(float* p, int64_t count, bool powers, uint64_t seed) {
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < count; i += gridDim.x * 256ll) {
    const uint64_t h = mix(seed + static_cast<uint64_t>(i));
    p[i] = powers ? exp2f(static_cast<float>(h % 5) - 2.F) : 0.001F + static_cast<float>(h % 1000) * 1e-5F;
  }
}

struct Operands {
  const Fp8 *x, *w;
  const float *x_scales, *w_scales;
  int64_t n, k, groups, weight_rows;
};
__device__ double dot(const Operands& o, int64_t row, int64_t expert, int64_t output) {
  double sum = 0;
  for (int64_t i = 0; i < o.k; ++i) {
    const double scale = static_cast<double>(o.x_scales[row * o.groups + i / 128]) *
                         static_cast<double>(o.w_scales[(expert * o.weight_rows + output / 128) * o.groups + i / 128]);
    sum += static_cast<double>(static_cast<float>(o.x[row * o.k + i])) *
           static_cast<double>(static_cast<float>(o.w[(expert * o.n + output) * o.k + i])) * scale;
  }
  return sum;
}
struct Sums {
  unsigned long long unequal;
  double square, difference;
};
__global__ void compare_fp8(Operands o, bool gated, int64_t expert, int64_t first, int64_t rows, const uint16_t* out,
                            Sums* sums) {
  const int64_t columns = gated ? o.n / 2 : o.n;
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < rows * columns; i += gridDim.x * 256ll) {
    const int64_t row = first + i / columns, column = i % columns;
    double want = dot(o, row, expert, column);
    if (gated) want = want / (1 + exp(-want)) * dot(o, row, expert, column + o.n / 2);
    const uint16_t bits = out[row * columns + column];
    const double got = static_cast<double>(__bfloat162float(__ushort_as_bfloat16(bits)));
    if (__bfloat16_as_ushort(__double2bfloat16(want)) != bits) atomicAdd(&sums->unequal, 1ull);
    atomicAdd(&sums->square, want * want);
    atomicAdd(&sums->difference, (got - want) * (got - want));
  }
}

class Fp8Rig {
 public:
  Fp8Rig(const Shape& s, bool exact)
      : s_(s),
        x_(s.total() * s.k),
        w_(s.experts() * s.n * s.k),
        x_scales_(s.total() * s.groups() * 4),
        w_scales_(s.experts() * weight_rows() * s.groups() * 4),
        out_(s.total() * s.columns() * 2),
        num_rows_(s.experts() * 8),
        first_row_(s.experts() * 8),
        tickets_(8) {
    for (int64_t at = 0; const int64_t r : s.rows) {
      first_.push_back(at);
      at += r;
    }
    num_rows_.set(s.rows);
    first_row_.set(first_);
    fill_fp8<<<512, 256>>>(x_.as<Fp8>(), s.total() * s.k, exact, 1);
    fill_fp8<<<512, 256>>>(w_.as<Fp8>(), s.experts() * s.n * s.k, exact, 2);
    fill_scales<<<512, 256>>>(x_scales_.as<float>(), s.total() * s.groups(), exact, 3);
    fill_scales<<<512, 256>>>(w_scales_.as<float>(), s.experts() * weight_rows() * s.groups(), exact, 4);
    ok(cudaMemset(tickets_.as(), 0, 8));
    ok(cudaMemset(out_.as(), 0xff, static_cast<size_t>(s.total() * s.columns() * 2)));
  }

  void run() {
    const auto kernel = s_.gated ? gemm::fp8_kernel<gemm::Fp8Kind<true>> : gemm::fp8_kernel<gemm::Fp8Kind<false>>;
    int device = 0, sms = 0, shared = 0;
    ok(cudaGetDevice(&device));
    ok(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
    ok(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    ok(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    kernel<<<sms, gemm::kThreads, shared>>>(params(shared));
    ok(cudaGetLastError());
  }

  Difference difference() const {
    const Operands o{x_.as<Fp8>(), w_.as<Fp8>(), x_scales_.as<float>(), w_scales_.as<float>(),
                     s_.n,         s_.k,         s_.groups(),           weight_rows()};
    DeviceBytes sums(sizeof(Sums));
    ok(cudaMemset(sums.as(), 0, sizeof(Sums)));
    for (size_t e = 0; e < s_.rows.size(); ++e)
      if (s_.rows[e] > 0)
        compare_fp8<<<512, 256>>>(o, s_.gated, static_cast<int64_t>(e), first_[e], s_.rows[e], out_.as<uint16_t>(),
                                  sums.as<Sums>());
    Sums host{};
    ok(cudaMemcpy(&host, sums.as(), sizeof host, cudaMemcpyDeviceToHost));
    return {s_.total() * s_.columns(), static_cast<int64_t>(host.unequal),
            host.square > 0 ? std::sqrt(host.difference / host.square) : 0};
  }

 private:
  int64_t weight_rows() const { return (s_.n + 127) / 128; }

  void map(CUtensorMap* m, const void* data, gpu::ElementType type, std::initializer_list<gpu::Dimension> dimensions,
           gpu::Swizzle swizzle) const {
    ASSERT_TRUE(gpu::make_tensor_map(m, data, type, dimensions, swizzle));
  }
  gemm::GroupedParams params(int shared) const {
    gemm::GroupedParams p{};
    const auto n = static_cast<uint64_t>(s_.n), k = static_cast<uint64_t>(s_.k), e = static_cast<uint64_t>(s_.experts()),
               rows = static_cast<uint64_t>(s_.total()), columns = static_cast<uint64_t>(s_.columns());
    for (uint32_t step = 1; step <= gemm::kMostFp8Rows / switchyard::detail::kRowStep; ++step)
      map(&p.rows[step - 1], x_.as(), gpu::ElementType::bytes, {{k, 0, 128}, {rows, k, step * 16}}, gpu::Swizzle::bytes_128);
    if (s_.gated)
      map(&p.weights, w_.as(), gpu::ElementType::bytes,
          {{k, 0, 128}, {8, k, 8}, {2, n / 2 * k, 2}, {n / 16, 8 * k, 16}, {e, n * k, 1}}, gpu::Swizzle::bytes_128);
    else
      map(&p.weights, w_.as(), gpu::ElementType::bytes, {{k, 0, 128}, {n, k, 256}, {e, n * k, 1}}, gpu::Swizzle::bytes_128);
    const gpu::Swizzle swizzle = s_.gated ? gpu::Swizzle::bytes_64 : gpu::Swizzle::bytes_128;
    const uint32_t box = s_.gated ? 32 : 64;
    map(&p.out_64, out_.as(), gpu::ElementType::bf16, {{columns, 0, box}, {rows, columns * 2, 64}}, swizzle);
    map(&p.out_16, out_.as(), gpu::ElementType::bf16, {{columns, 0, box}, {rows, columns * 2, 16}}, swizzle);
    p.ranges = {num_rows_.as(), true, first_row_.as<int64_t>(), 0, s_.total()};
    p.out = out_.as<uint16_t>();
    p.tickets = tickets_.as<uint32_t>();
    p.num_experts = s_.experts();
    p.columns = static_cast<int>(s_.columns());
    const int64_t in_tile = s_.gated ? 128 : 256;
    p.column_tiles = static_cast<int>((s_.columns() + in_tile - 1) / in_tile);
    p.most_rows = gemm::kMostFp8Rows;
    p.inner_blocks = static_cast<int>(s_.groups());
    p.gate_rows = static_cast<int>(s_.n / 2);
    p.shared_bytes = static_cast<uint32_t>(shared);
    p.gating = {std::numeric_limits<float>::infinity(), 1, 0};
    p.scales.rows = x_scales_.as<std::byte>();
    p.scales.row = s_.groups() * 4;
    p.scales.block = 4;
    p.scales.weights = w_scales_.as<float>();
    p.scales.weight_rows = static_cast<int>(weight_rows());
    return p;
  }

  Shape s_;
  std::vector<int64_t> first_;
  DeviceBytes x_, w_, x_scales_, w_scales_, out_, num_rows_, first_row_, tickets_;
};

const std::vector<int64_t> kCounts = {1, 15, 16, 17, 0, 127, 128, 129, 255, 256, 257, 0, 33, 700};

TEST(Fp8Kernel, IntegersAreExact) {
  for (const auto& [n, k] : {std::pair<int64_t, int64_t>{256, 128}, {512, 1024}, {264, 256}, {1000, 384}, {128, 400}}) {
    Fp8Rig rig({kCounts, n, k, false}, true);
    for (int i = 0; i < 2; ++i) rig.run();
    const Difference d = rig.difference();
    EXPECT_EQ(d.unequal, 0) << "of " << d.elements << ", n " << n << ", k " << k;
  }
}

TEST(Fp8Kernel, NormOfNormalShapes) {
  for (const bool gated : {false, true}) {
    Fp8Rig rig({kCounts, 1024, 2048, gated}, false);
    rig.run();
    EXPECT_LE(rig.difference().norm, 5e-3) << (gated ? "gated" : "plain");
  }
}

}  // namespace
}  // namespace gemm_test
