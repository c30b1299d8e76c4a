// SPDX-License-Identifier: Apache-2.0
// NCCL as a carrier, for ranks on GPUs: legs of a round are sends and receives of one NCCL group on the caller's stream.
#pragma once

#include <memory>

#include "carrier/carrier.hpp"
#include "carrier/nccl/comms.hpp"

namespace switchyard::detail {

/// post() returns when NCCL has enqueued the round on the stream, so that what is enqueued next comes after it; it waits for
/// that alone, and not for the round. With `broken` from advance() from then on if NCCL refuses, or does not come to an end
/// within the deadline. advance() cannot say for whom a round waits unless it has one leg, and never says `unlike`: ends that
/// post other sizes are found by what ranks tell of their calls, or at the deadline.
///
/// abort() lets NCCL end the communicators in a thread of its own, whatever that waits for: kernels of rounds under way end
/// without having done their work, so whoever aborts has told the kernels behind them before. A communicator that does not end
/// is left behind, and so is one that has not flushed a second after the carrier's end.
std::unique_ptr<Carrier> make_nccl_carrier(std::unique_ptr<NcclComms> comms);

}  // namespace switchyard::detail
