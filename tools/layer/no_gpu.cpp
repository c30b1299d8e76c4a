// SPDX-License-Identifier: Apache-2.0
// Stubs of the GPU functions for builds without CUDA code.
#include "cli/verb.hpp"
#include "device/rank_device.hpp"
#include "measure/gpu/expert_weights.hpp"

namespace switchyard::measure {

void write_expert_weights(const WeightForm&, int64_t, int64_t, int64_t, int64_t, void*, void*) {
  throw tool::UsageError(tool::no_cuda_text());
}
void write_fp8_expert_weights(const Fp8WeightForm&, int64_t, const Fp8WeightSize&, void*, float*, void*) {
  throw tool::UsageError(tool::no_cuda_text());
}

}  // namespace switchyard::measure
