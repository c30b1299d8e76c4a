// SPDX-License-Identifier: Apache-2.0
#include "measure/gpu/expert_weights.hpp"

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace switchyard::measure {
namespace {

constexpr int kThreads = 256;

/// A block writes a row.
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

}  // namespace

void write_expert_weights(const WeightForm& form, int64_t first_expert, int64_t num_experts, int64_t rows, int64_t cols,
                          void* to, void* stream) {
  if (num_experts == 0) return;
  weights_kernel<<<static_cast<unsigned>(num_experts * rows), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      form, first_expert, rows, cols / 8, static_cast<uint4*>(to));
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess) throw std::runtime_error(std::string("weights kernel: ") + cudaGetErrorString(status));
}

}  // namespace switchyard::measure
