// SPDX-License-Identifier: Apache-2.0
// Stubs of the GPU functions for builds without CUDA code.
#include "cli/verb.hpp"
#include "device/clock.hpp"
#include "device/rank_device.hpp"

namespace switchyard::tool {

std::shared_ptr<RankDevice> gpu_device(int, int, size_t) { throw UsageError(no_cuda_text()); }
bool built_with_cuda() { return false; }
const char* no_cuda_text() {
  return "--backend: 'cuda' given, but this build has no CUDA code; build with nvcc and -DSWITCHYARD_BACKENDS=cuda, or use cpu";
}
int cuda_runtime_version() { return 0; }
std::vector<uint64_t> measure_timer_ticks(int) { return {}; }
std::vector<std::string> try_descriptor_exchange(int, const std::vector<std::vector<bool>>&) { return {}; }

std::unique_ptr<Clock> make_gpu_clock(Group&, Timing, const LimitRows&) { throw UsageError(no_cuda_text()); }
size_t gpu_clock_bytes(size_t) { throw UsageError(no_cuda_text()); }

}  // namespace switchyard::tool
