// SPDX-License-Identifier: Apache-2.0
#include "gpu/kernels/gemm_kernel.hpp"

#include <cuda_bf16.h>
#include <mma.h>

#include <stdexcept>
#include <string>

namespace harness {
namespace {

namespace wmma = nvcuda::wmma;

constexpr int kThreads = 256, kChunk = 64;
constexpr int kTile = Gemm::kTile, kDepth = Gemm::kDepth;
constexpr int kPerVector = 8;  // elements of 16 bytes
static_assert(kDepth % kChunk == 0 && Gemm::kRounds * kDepth * 3 * 2 < 1 << 24);

__device__ uint32_t draw(GemmMarks* marks) { return atomicAdd(&marks->tickets, 1u) + 1; }

__device__ void mark_begin(const Gemm& g, int n) {
  if (threadIdx.x != 0 || atomicAdd(&g.marks->begun_blocks[n], 1u) != 0) return;
  g.marks->begun[n] = draw(g.marks);
  *g.begun = static_cast<uint32_t>(n) + 1;
}

__device__ void mark_end(const Gemm& g, int n) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  if (atomicAdd(&g.marks->ended_blocks[n], 1u) + 1 != gridDim.x) return;
  g.marks->ended[n] = draw(g.marks);
  *g.ended = static_cast<uint32_t>(n) + 1;
}

/// A block computes a tile of C; each of its 8 warps computes 32 x 64 elements.
__global__ void __launch_bounds__(kThreads) gemm_kernel(const Gemm g, int n) {
  __shared__ __align__(128) __nv_bfloat16 a[kTile][kChunk + kPerVector];
  __shared__ __align__(128) __nv_bfloat16 b[kChunk][kTile + kPerVector];
  mark_begin(g, n);
  const int thread = static_cast<int>(threadIdx.x), row = thread / 64 * 32, column = thread / 32 % 2 * 64;
  const auto* const rows = static_cast<const __nv_bfloat16*>(g.a) + int64_t{blockIdx.x} * kTile * kDepth;
  const auto* const columns = static_cast<const __nv_bfloat16*>(g.b);
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum[2][4];
  for (auto& sums : sum)
    for (auto& s : sums) wmma::fill_fragment(s, 0.0f);
#pragma unroll 1
  for (int step = 0; step < Gemm::kRounds * (kDepth / kChunk); ++step) {
    const int k = step % (kDepth / kChunk) * kChunk;
    for (int v = thread; v < kTile * kChunk / kPerVector; v += kThreads) {
      const int r = v / (kChunk / kPerVector), c = v % (kChunk / kPerVector) * kPerVector;
      *reinterpret_cast<uint4*>(&a[r][c]) = *reinterpret_cast<const uint4*>(&rows[r * kDepth + k + c]);
    }
    for (int v = thread; v < kChunk * kTile / kPerVector; v += kThreads) {
      const int r = v / (kTile / kPerVector), c = v % (kTile / kPerVector) * kPerVector;
      *reinterpret_cast<uint4*>(&b[r][c]) = *reinterpret_cast<const uint4*>(&columns[(k + r) * kTile + c]);
    }
    __syncthreads();
    for (int depth = 0; depth < kChunk; depth += 16) {
      wmma::fragment<wmma::matrix_a, 16, 16, 16, __nv_bfloat16, wmma::row_major> left[2];
      wmma::fragment<wmma::matrix_b, 16, 16, 16, __nv_bfloat16, wmma::row_major> right;
      for (int i = 0; i < 2; ++i) wmma::load_matrix_sync(left[i], &a[row + i * 16][depth], kChunk + kPerVector);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        wmma::load_matrix_sync(right, &b[depth][column + j * 16], kTile + kPerVector);
        for (int i = 0; i < 2; ++i) wmma::mma_sync(sum[i][j], left[i], right, sum[i][j]);
      }
    }
    __syncthreads();
  }
  float* const out = g.c + int64_t{blockIdx.x} * kTile * kTile;
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 4; ++j)
      wmma::store_matrix_sync(out + (row + i * 16) * kTile + column + j * 16, sum[i][j], kTile, wmma::mem_row_major);
  mark_end(g, n);
}

__global__ void inputs_kernel(const Gemm g) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x, first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (int64_t i = first; i < int64_t{g.blocks} * kTile * kDepth; i += step)
    static_cast<__nv_bfloat16*>(g.a)[i] =
        __float2bfloat16_rn(static_cast<float>(Gemm::a_value(i / kDepth, static_cast<int>(i % kDepth))));
  for (int64_t i = first; i < kDepth * kTile; i += step)
    static_cast<__nv_bfloat16*>(g.b)[i] =
        __float2bfloat16_rn(static_cast<float>(Gemm::b_value(static_cast<int>(i / kTile), static_cast<int>(i % kTile))));
}

__global__ void ticket_kernel(GemmMarks* marks, uint32_t* to) { *to = draw(marks); }

void expect(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

}  // namespace

int gemm_blocks() {
  int device = 0, sms = 0, each = 0;
  expect(cudaGetDevice(&device), "cudaGetDevice");
  expect(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "device attribute");
  expect(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, gemm_kernel, kThreads, 0), "occupancy");
  return sms * each;
}

void launch_gemm_inputs(const Gemm& gemm, cudaStream_t stream) {
  inputs_kernel<<<256, 256, 0, stream>>>(gemm);
  expect(cudaGetLastError(), "inputs of the product");
}

void launch_gemm(const Gemm& gemm, int n, cudaStream_t stream) {
  if (n >= GemmMarks::kMax) throw std::runtime_error("more launches of the product than there are marks");
  gemm_kernel<<<static_cast<unsigned>(gemm.blocks), kThreads, 0, stream>>>(gemm, n);
  expect(cudaGetLastError(), "product");
}

void launch_ticket(GemmMarks* marks, uint32_t* to, cudaStream_t stream) {
  ticket_kernel<<<1, 1, 0, stream>>>(marks, to);
  expect(cudaGetLastError(), "ticket");
}

}  // namespace harness
