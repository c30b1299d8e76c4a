// SPDX-License-Identifier: Apache-2.0
// Runs the jobs in closed_form.hpp as kernels.
#pragma once

#include <cuda_runtime_api.h>

#include "modes/low_latency/closed_form.hpp"

namespace harness {

/// Enqueues job(i) for all i. Accepts every job in closed_form.hpp.
template <class Job>
void launch_job(const Job& job, cudaStream_t stream);

}  // namespace harness
