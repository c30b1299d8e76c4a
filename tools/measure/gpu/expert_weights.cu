// SPDX-License-Identifier: Apache-2.0
#include "measure/gpu/expert_weights.hpp"

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace switchyard::measure {
namespace {

constexpr int kThreads = 256;

/// Each block writes one row.
__global__ void __launch_bounds__(kThreads)
    weights_kernel(const __grid_constant__ WeightForm form, int64_t first_expert, int64_t rows, int64_t groups, uint4* to) {
  __shared__ uint16_t levels[WeightForm::kLevels];
  for (int i = static_cast<int>(threadIdx.x); i < WeightForm::kLevels; i += kThreads) levels[i] = form.levels[i];
  __syncthreads();
  const int64_t at = blockIdx.x, expert = at / rows, row = at % rows;
  const uint64_t key = weight_row_key(form.key, first_expert + expert, row);
  for (int64_t group = threadIdx.x; group < groups; group += kThreads) {
    const uint64_t bytes = weight_bytes(key, group);
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      words[i] = levels[bytes >> (16 * i) & 0xFF] | static_cast<uint32_t>(levels[bytes >> (16 * i + 8) & 0xFF]) << 16;
    to[at * groups + group] = uint4{words[0], words[1], words[2], words[3]};
  }
}

/// Each block writes one row; the block for the first row of a weight block also writes its scales.
__global__ void __launch_bounds__(kThreads) fp8_weights_kernel(const __grid_constant__ Fp8WeightForm form, int64_t first_expert,
                                                               Fp8WeightSize size, uint2* to, float* scales) {
  __shared__ uint8_t codes[Fp8WeightForm::kScales][WeightForm::kLevels];
  for (int i = static_cast<int>(threadIdx.x); i < WeightForm::kLevels; i += kThreads)
    for (int s = 0; s < Fp8WeightForm::kScales; ++s) codes[s][i] = form.codes[s][i];
  __syncthreads();
  const int64_t at = blockIdx.x, local = at / size.rows, row = at % size.rows, expert = first_expert + local;
  const int64_t groups = size.cols / 8, block_row = size.block_row(row);
  const bool first_of_block = row == 0 || size.block_row(row - 1) != block_row;
  const uint64_t key = weight_row_key(form.key, expert, row);
  for (int64_t group = threadIdx.x; group < groups; group += kThreads) {
    const int64_t block_col = size.block_col(8 * group);
    const int scale = weight_scale_of(expert, block_row, block_col);
    const uint64_t bytes = weight_bytes(key, group);
    uint32_t words[2] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) words[i / 4] |= static_cast<uint32_t>(codes[scale][bytes >> (8 * i) & 0xFF]) << (8 * (i % 4));
    to[at * groups + group] = uint2{words[0], words[1]};
    if (first_of_block && (group == 0 || size.block_col(8 * (group - 1)) != block_col))
      scales[(local * size.block_rows() + block_row) * size.block_cols() + block_col] = form.scales[scale];
  }
}

void check_launch() {
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess) throw std::runtime_error(std::string("weights kernel: ") + cudaGetErrorString(status));
}

}  // namespace

void write_expert_weights(const WeightForm& form, int64_t first_expert, int64_t num_experts, int64_t rows, int64_t cols,
                          void* to, void* stream) {
  if (num_experts == 0) return;
  weights_kernel<<<static_cast<unsigned>(num_experts * rows), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      form, first_expert, rows, cols / 8, static_cast<uint4*>(to));
  check_launch();
}

void write_fp8_expert_weights(const Fp8WeightForm& form, int64_t first_expert, const Fp8WeightSize& size, void* to,
                              float* scales, void* stream) {
  if (size.num_experts == 0) return;
  fp8_weights_kernel<<<static_cast<unsigned>(size.num_experts * size.rows), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      form, first_expert, size, static_cast<uint2*>(to), scales);
  check_launch();
}

}  // namespace switchyard::measure
