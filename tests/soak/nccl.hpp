// SPDX-License-Identifier: Apache-2.0
// NCCL alongside the exchange, if available: libnccl.so.2 is loaded at run time (SWITCHYARD_TEST_NCCL overrides the path).
#pragma once

#include <memory>

#include "soak/place.hpp"

namespace soak {

/// Collective, using `gather`. Returns null on all ranks if any of them lacks NCCL.
std::unique_ptr<AllReduce> make_nccl(int rank, int world, void* stream, const Gather& gather);

}  // namespace soak
