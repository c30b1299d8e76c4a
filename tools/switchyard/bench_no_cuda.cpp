// SPDX-License-Identifier: Apache-2.0
#include "bench_cuda.hpp"
#include "cli.hpp"

namespace switchyard::tool {

int run_bench_cuda(const BenchOptions&, std::vector<BenchOptions>) {
  throw UsageError("--backend: 'cuda' given, but this build has no CUDA code; build with nvcc and -DSWITCHYARD_BACKENDS=cuda");
}

}  // namespace switchyard::tool
