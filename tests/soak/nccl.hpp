// SPDX-License-Identifier: Apache-2.0
// NCCL beside the exchange, if the machine has it: libnccl.so.2 is loaded at run time (SWITCHYARD_TEST_NCCL says where).
#pragma once

#include <memory>

#include "soak/place.hpp"

namespace soak {

/// Collective, by `gather`. Null, on all ranks alike, if one of them has no NCCL.
std::unique_ptr<AllReduce> make_nccl(int rank, int world, void* stream, const Gather& gather);

}  // namespace soak
