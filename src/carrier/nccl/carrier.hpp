// SPDX-License-Identifier: Apache-2.0
// NCCL as a carrier, for ranks on GPUs: legs of a round are sends and receives of one NCCL group on the caller's stream.
#pragma once

#include <memory>

#include "carrier/carrier.hpp"
#include "carrier/nccl/comms.hpp"

namespace switchyard::detail {

/// post() returns when NCCL has enqueued the round on the stream, so that later work on the stream is ordered after it; it
/// waits only for that, not for the round. If NCCL fails or does not finish within the deadline, advance() returns `broken`
/// from then on. advance() can name the peer of a waiting round only if the round has one leg, and never returns `unlike`:
/// different sizes are detected by the ranks' reports of their calls, or at the deadline.
///
/// abort() lets NCCL abort the communicators in a separate thread, however long that takes: kernels of rounds in flight end
/// without completing their work, so the caller must notify the kernels after them first. A communicator that does not end is
/// leaked, as is one that has not flushed a second after the carrier's destruction.
std::unique_ptr<Carrier> make_nccl_carrier(std::unique_ptr<NcclComms> comms);

}  // namespace switchyard::detail
