// SPDX-License-Identifier: Apache-2.0
#include "gpu/kernels/closed_form_kernels.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "modes/low_latency/masked_layer.hpp"

namespace harness {
namespace {

constexpr int kThreads = 256, kMaxBlocks = 256;

template <class Job>
__global__ void job_kernel(const Job job) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < job.size(); i += step) job(i);
}

}  // namespace

template <class Job>
void launch_job(const Job& job, cudaStream_t stream) {
  const int64_t blocks = std::clamp<int64_t>((job.size() + kThreads - 1) / kThreads, 1, kMaxBlocks);
  job_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(job);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) throw std::runtime_error(std::string("job: ") + cudaGetErrorString(error));
}

template void launch_job(const MakeInputs&, cudaStream_t);
template void launch_job(const MakeAnswers&, cudaStream_t);
template void launch_job(const MakeWeights&, cudaStream_t);
template void launch_job(const Spoil&, cudaStream_t);
template void launch_job(const CountReplay&, cudaStream_t);
template void launch_job(const JudgeDispatch&, cudaStream_t);
template void launch_job(const JudgeSums&, cudaStream_t);
template void launch_job(const MakeMatrices&, cudaStream_t);
template void launch_job(const MaskedProduct&, cudaStream_t);

}  // namespace harness
